"""The current operation is on every log line within it, and on no other."""

import asyncio
import contextvars
import io
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.contextvars import bind_contextvars, bound_contextvars, get_contextvars

from scrubber.observability.log_context import LogContextTracer
from scrubber.observability.logging import make_logger
from scrubber.ports.runtime import AttributeValue, Span, Tracer


class Inner:
    """A tracer that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        self.calls.append((f"begin {name}", attributes))
        try:
            yield self
        except BaseException as error:
            self.calls.append((f"end {name}", error))
            raise
        self.calls.append((f"end {name}", None))

    def set_attributes(self, **attributes: AttributeValue) -> None:
        self.calls.append(("note", attributes))


bound = get_contextvars
"""The fields of every line at this moment."""


def test_log_context_tracer_implements_the_tracer_port() -> None:
    tracer: Tracer = LogContextTracer()
    with tracer.span("step memory") as span:
        span.set_attributes(verdict="passed")


def test_log_lines_within_a_span_carry_its_device_scrub_and_tenant() -> None:
    stream = io.StringIO()
    log = make_logger("json", "info", stream, component="service")
    with LogContextTracer().span("scrub", device="GPU-a", scrub_id="scrub-1", tenant="team-a", path="slow"):
        log.info("api.refused", tenant="another")
    log.info("api.refused")
    inside, after = map(json.loads, stream.getvalue().splitlines())
    assert (inside["device"], inside["scrub_id"], inside["tenant"]) == ("GPU-a", "scrub-1", "another")
    assert "path" not in inside
    assert not {"device", "scrub_id", "tenant"} & after.keys()


def test_inner_span_adds_context_and_a_none_tenant_removes_the_outer_tenant() -> None:
    tracer = LogContextTracer()
    with tracer.span("device", device="GPU-a", tenant="team-b"):
        with tracer.span("scrub", scrub_id="scrub-1", tenant=None):
            assert bound() == {"device": "GPU-a", "scrub_id": "scrub-1"}
        assert bound() == {"device": "GPU-a", "tenant": "team-b"}
    assert bound() == {}


def test_span_attribute_is_bound_when_set_and_removed_with_its_span() -> None:
    tracer = LogContextTracer()
    with tracer.span("hand-over") as outer:
        with tracer.span("device", device="GPU-a", tenant=None) as span:
            span.set_attributes(tenant="team-b", kind="other-tenant")
            assert bound() == {"device": "GPU-a", "tenant": "team-b"}
            with tracer.span("check", scrub_id="check-1"):
                assert bound()["tenant"] == "team-b"
            span.set_attributes(tenant=None)
            assert bound() == {"device": "GPU-a"}
        outer.set_attributes(tenant="team-c")
        assert bound() == {"tenant": "team-c"}
    assert bound() == {}
    span.set_attributes(tenant="too late")
    assert bound() == {}


def test_context_bound_outside_the_tracer_is_restored_after_a_span() -> None:
    with bound_contextvars(device="GPU-z", trace_id="t"):
        with LogContextTracer().span("scrub", device="GPU-a", tenant="team-a"):
            assert bound() == {"device": "GPU-a", "tenant": "team-a", "trace_id": "t"}
        assert bound() == {"device": "GPU-z", "trace_id": "t"}


def test_span_restores_the_context_bound_at_its_own_start() -> None:
    tracer = LogContextTracer()
    for other in ("GPU-y", "GPU-z"):
        with bound_contextvars(device=other):
            with tracer.span("scrub", scrub_id="scrub-1"):
                assert bound() == {"device": other, "scrub_id": "scrub-1"}
            assert bound() == {"device": other}


def test_exception_passes_through_a_span_and_leaves_no_context() -> None:
    inner, failure = Inner(), ValueError("it broke")
    with pytest.raises(ValueError, match="it broke") as raised, LogContextTracer(inner).span("scrub", device="GPU-a"):
        raise failure
    assert raised.value is failure
    assert bound() == {}
    assert inner.calls == [("begin scrub", {"device": "GPU-a"}), ("end scrub", failure)]


def test_spans_and_attributes_are_forwarded_to_the_inner_tracer() -> None:
    inner = Inner()
    with LogContextTracer(inner).span("scrub", device="GPU-a", path="slow") as span:
        span.set_attributes(tenant=None, outcome="passed")
    assert inner.calls == [
        ("begin scrub", {"device": "GPU-a", "path": "slow"}),
        ("note", {"tenant": None, "outcome": "passed"}),
        ("end scrub", None),
    ]


async def test_task_keeps_its_own_span_however_long_the_task_runs() -> None:
    tracer, go, seen = LogContextTracer(), asyncio.Event(), []

    async def scrub() -> None:
        with tracer.span("scrub", scrub_id="scrub-1", tenant="team-a"):
            await go.wait()
            seen.append(bound())
        seen.append(bound())

    with tracer.span("device", device="GPU-a", tenant="team-b"):
        task = asyncio.create_task(scrub())
        await asyncio.sleep(0)
        assert bound() == {"device": "GPU-a", "tenant": "team-b"}
    assert bound() == {}
    go.set()
    await task
    assert seen == [
        {"device": "GPU-a", "scrub_id": "scrub-1", "tenant": "team-a"},
        {"device": "GPU-a", "tenant": "team-b"},
    ]
    assert bound() == {}


async def test_concurrent_tasks_have_separate_log_context() -> None:
    tracer, inside = LogContextTracer(), asyncio.Barrier(20)

    async def one(number: int) -> None:
        with tracer.span("device", device=f"GPU-{number}"):
            await inside.wait()
            assert bound() == {"device": f"GPU-{number}"}
        assert bound() == {}

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(one(number))


def test_span_closed_in_another_context_changes_nothing_there() -> None:
    scope = LogContextTracer().span("scrub", device="GPU-a")
    contextvars.copy_context().run(scope.__enter__)
    with bound_contextvars(device="GPU-z"):
        scope.__exit__(None, None, None)
        assert bound() == {"device": "GPU-z"}


acts = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "note"]), st.integers(0, 5), st.integers(0, 3)), max_size=40
)


@given(acts, st.booleans())
def test_spans_closed_in_any_order_leave_only_the_open_spans_context(
    story: list[tuple[str, int, int]], other: bool
) -> None:
    def play() -> None:
        before = {"device": "GPU-z", "trace_id": "t"} if other else {}
        bind_contextvars(**before)
        tracer = LogContextTracer()
        scopes: dict[int, tuple[AbstractContextManager[Span], Span, dict[str, AttributeValue]]] = {}
        for act, which, value in story:
            attributes: dict[str, AttributeValue] = (
                {"device": f"GPU-{value}"} if which % 2 else {"tenant": value or None}
            )
            if act == "enter" and which not in scopes:
                scope = tracer.span("any", **attributes)
                scopes[which] = (scope, scope.__enter__(), attributes)
            elif act == "leave" and which in scopes:
                scopes.pop(which)[0].__exit__(None, None, None)
            elif act == "note" and which in scopes:
                scopes[which][1].set_attributes(**attributes)
                scopes[which][2].update(attributes)
            expected: dict[str, AttributeValue] = dict(before)
            for _, _, own in scopes.values():
                expected.update(own)
            assert bound() == {name: each for name, each in expected.items() if each is not None}
        for scope, _, _ in reversed(list(scopes.values())):
            scope.__exit__(None, None, None)
        assert bound() == before

    contextvars.copy_context().run(play)
