"""What is being done is on every line of it, and on no other."""

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

from scrubber.observability.log_context import Binding
from scrubber.observability.logging import line_logger
from scrubber.ports.runtime import Attribute, Span, Tracer


class Inner:
    """A tracer that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    @contextmanager
    def span(self, name: str, **attributes: Attribute) -> Iterator[Span]:
        self.told.append((f"begin {name}", attributes))
        try:
            yield self
        except BaseException as error:
            self.told.append((f"end {name}", error))
            raise
        self.told.append((f"end {name}", None))

    def note(self, **attributes: Attribute) -> None:
        self.told.append(("note", attributes))


bound = get_contextvars
"""What every line says now."""


def test_it_is_a_tracer() -> None:
    tracer: Tracer = Binding()
    with tracer.span("step memory") as span:
        span.note(verdict="passed")


def test_lines_inside_say_whom_they_are_about_also_those_that_know_nothing_of_it() -> None:
    stream = io.StringIO()
    log = line_logger("json", "info", stream, component="service")
    with Binding().span("scrub", device="GPU-a", scrub_id="scrub-1", tenant="team-a", path="slow"):
        log.info("api.refused", tenant="another")
    log.info("api.refused")
    inside, after = map(json.loads, stream.getvalue().splitlines())
    assert (inside["device"], inside["scrub_id"], inside["tenant"]) == ("GPU-a", "scrub-1", "another")
    assert "path" not in inside
    assert not {"device", "scrub_id", "tenant"} & after.keys()


def test_inner_scopes_add_and_nobody_s_takes_away() -> None:
    tracer = Binding()
    with tracer.span("device", device="GPU-a", tenant="team-b"):
        with tracer.span("scrub", scrub_id="scrub-1", tenant=None):
            assert bound() == {"device": "GPU-a", "scrub_id": "scrub-1"}
        assert bound() == {"device": "GPU-a", "tenant": "team-b"}
    assert bound() == {}


def test_what_becomes_known_is_bound_from_then_on_and_gone_with_its_scope() -> None:
    tracer = Binding()
    with tracer.span("hand-over") as outer:
        with tracer.span("device", device="GPU-a", tenant=None) as span:
            span.note(tenant="team-b", kind="other-tenant")
            assert bound() == {"device": "GPU-a", "tenant": "team-b"}
            with tracer.span("check", scrub_id="check-1"):
                assert bound()["tenant"] == "team-b"
            span.note(tenant=None)
            assert bound() == {"device": "GPU-a"}
        outer.note(tenant="team-c")
        assert bound() == {"tenant": "team-c"}
    assert bound() == {}
    span.note(tenant="too late")
    assert bound() == {}


def test_what_others_had_bound_is_there_again() -> None:
    with bound_contextvars(device="GPU-z", trace_id="t"):
        with Binding().span("scrub", device="GPU-a", tenant="team-a"):
            assert bound() == {"device": "GPU-a", "tenant": "team-a", "trace_id": "t"}
        assert bound() == {"device": "GPU-z", "trace_id": "t"}


def test_and_what_they_have_bound_since_the_next_time() -> None:
    tracer = Binding()
    for other in ("GPU-y", "GPU-z"):
        with bound_contextvars(device=other):
            with tracer.span("scrub", scrub_id="scrub-1"):
                assert bound() == {"device": other, "scrub_id": "scrub-1"}
            assert bound() == {"device": other}


def test_an_exception_goes_on_and_leaves_nothing_behind() -> None:
    inner, failure = Inner(), ValueError("it broke")
    with pytest.raises(ValueError, match="it broke") as raised, Binding(inner).span("scrub", device="GPU-a"):
        raise failure
    assert raised.value is failure
    assert bound() == {}
    assert inner.told == [("begin scrub", {"device": "GPU-a"}), ("end scrub", failure)]


def test_everything_is_passed_on() -> None:
    inner = Inner()
    with Binding(inner).span("scrub", device="GPU-a", path="slow") as span:
        span.note(tenant=None, outcome="passed")
    assert inner.told == [
        ("begin scrub", {"device": "GPU-a", "path": "slow"}),
        ("note", {"tenant": None, "outcome": "passed"}),
        ("end scrub", None),
    ]


async def test_a_task_belongs_to_the_scope_that_began_it_however_long_it_lives() -> None:
    tracer, go, seen = Binding(), asyncio.Event(), []

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


async def test_tasks_side_by_side_see_their_own() -> None:
    tracer, inside = Binding(), asyncio.Barrier(20)

    async def one(number: int) -> None:
        with tracer.span("device", device=f"GPU-{number}"):
            await inside.wait()
            assert bound() == {"device": f"GPU-{number}"}
        assert bound() == {}

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(one(number))


def test_one_that_is_left_elsewhere_than_it_was_entered_changes_nothing_there() -> None:
    scope = Binding().span("scrub", device="GPU-a")
    contextvars.copy_context().run(scope.__enter__)
    with bound_contextvars(device="GPU-z"):
        scope.__exit__(None, None, None)
        assert bound() == {"device": "GPU-z"}


acts = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "note"]), st.integers(0, 5), st.integers(0, 3)), max_size=40
)


@given(acts, st.booleans())
def test_in_whatever_order_scopes_are_left_what_is_open_is_bound_and_in_the_end_nothing(
    story: list[tuple[str, int, int]], other: bool
) -> None:
    def play() -> None:
        before = {"device": "GPU-z", "trace_id": "t"} if other else {}
        bind_contextvars(**before)
        tracer = Binding()
        scopes: dict[int, tuple[AbstractContextManager[Span], Span, dict[str, Attribute]]] = {}
        for act, which, value in story:
            said: dict[str, Attribute] = {"device": f"GPU-{value}"} if which % 2 else {"tenant": value or None}
            if act == "enter" and which not in scopes:
                scope = tracer.span("any", **said)
                scopes[which] = (scope, scope.__enter__(), said)
            elif act == "leave" and which in scopes:
                scopes.pop(which)[0].__exit__(None, None, None)
            elif act == "note" and which in scopes:
                scopes[which][1].note(**said)
                scopes[which][2].update(said)
            expected: dict[str, Attribute] = dict(before)
            for _, _, own in scopes.values():
                expected.update(own)
            assert bound() == {name: each for name, each in expected.items() if each is not None}
        for scope, _, _ in reversed(list(scopes.values())):
            scope.__exit__(None, None, None)
        assert bound() == before

    contextvars.copy_context().run(play)
