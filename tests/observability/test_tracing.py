"""Traces: the spans that OpenTelemetry receives, and which trace contexts of callers are trusted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.api.server import GrpcServer
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.domain.evidence import PathKind as ScrubPath
from scrubber.domain.states import Hygiene
from scrubber.engine.views import NodeView, ScrubUpdate
from scrubber.observability.log_context import LogContextTracer
from scrubber.observability.tracing import OpenTelemetryTracer
from tests.api.service import FakeNode
from tests.observability.traces_stage import RESOURCE, Sent, attributes_of, id_of, trace_of
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def sent() -> Sent:
    return Sent()


# --- the engine's work as a trace -------------------------------------------------------------------------------------


@asynccontextmanager
async def traced(sent: Sent, devices: int = 1) -> AsyncIterator[SimulatedCluster]:
    """Provide a simulated cluster whose service is traced as in the daemon, through the tracer that binds log lines."""
    async with simulated_cluster(devices=devices, settled=False) as cluster:
        cluster.tracer = LogContextTracer(sent.traces)
        await cluster.start_service()
        await cluster.until(cluster.settled)
        yield cluster


@in_virtual_time
async def test_hand_over_with_a_scrub_is_one_trace() -> None:
    sent = Sent()
    async with traced(sent) as cluster:
        cluster.kubelet.delete(await started(cluster))
        sent.memory.clear()
        await request_start(cluster, await admitted(cluster))
        over = sent.named("hand-over")
        assert over.parent is None
        assert {trace_of(each) for each in sent.spans if each.name in ("device", "wait", "grant")} == {trace_of(over)}
        assert sent.outline(over).startswith("hand-over(device(")
        wait, scrub = attributes_of(sent.named("wait")), sent.named("scrub")
        assert wait["scrubber.scrub_id"] == attributes_of(scrub)["scrubber.scrub_id"]
        assert attributes_of(scrub)["scrubber.outcome"] == "passed"
        assert attributes_of(sent.named("device"))["scrubber.tenant"] == "umbrella"
        assert {each.status.status_code for each in sent.spans} == {StatusCode.UNSET}


@in_virtual_time
async def test_fast_path_hand_over_has_its_checks_and_one_grant() -> None:
    sent = Sent()
    async with traced(sent, devices=2) as cluster:
        await request_start(cluster, await admitted(cluster, "umbrella", "serve-0", 0, 1))
        checks = "device(check(step holders, step settings, step health))"
        assert sent.outline(sent.named("hand-over")) == f"hand-over({checks}, {checks}, grant)"
        assert attributes_of(sent.named("hand-over")) == {
            "scrubber.resource": "",
            "scrubber.devices": 2,
            "scrubber.kind": "unknown",
            "scrubber.path": "fast",
        }


@in_virtual_time
async def test_background_scrub_is_a_separate_trace() -> None:
    sent = Sent()
    async with traced(sent) as cluster:
        scrub = sent.named("scrub")
        assert scrub.parent is None
        assert sent.outline(scrub) == "scrub(step holders, step memory, step on-chip, step settings, step health)"
        assert attributes_of(scrub)["scrubber.device"] == cluster.gpu().id
        assert "scrubber.tenant" not in attributes_of(scrub)


@in_virtual_time
async def test_refusal_is_an_error_span_with_its_code() -> None:
    sent = Sent()
    async with traced(sent) as cluster:
        await cluster.node.actions.quarantine("0", "spare", "uid:0")
        await refusal_of(
            request_start(cluster, cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id], starts=False))
        )
        over = sent.named("hand-over")
        assert (over.status.status_code, over.status.description) == (StatusCode.ERROR, "quarantined")
        assert attributes_of(over)["scrubber.refused"] == attributes_of(over)["error.type"] == "quarantined"


@in_virtual_time
async def test_failed_step_marks_its_scrub_span_as_failed() -> None:
    sent = Sent()
    async with traced(sent) as cluster:
        cluster.gpu().flaws.add("on-chip")
        cluster.kubelet.delete(await started(cluster))
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE)
        await cluster.until(lambda: attributes_of(sent.named("scrub")).get("scrubber.outcome") == "failed")
        for name in ("step on-chip", "scrub"):
            assert sent.named(name).status.status_code is StatusCode.ERROR
        assert attributes_of(sent.named("step on-chip"))["scrubber.findings"]
        assert sent.named("step memory").status.status_code is StatusCode.UNSET


@in_virtual_time
async def test_hand_over_cancelled_by_its_caller_is_no_error() -> None:
    sent = Sent()
    async with traced(sent) as cluster:
        cluster.kubelet.delete(await started(cluster))
        call = request_start(cluster, await admitted(cluster))
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.SCRUBBING)
        call.cancel()
        await asyncio.wait({call})
        await cluster.until(lambda: any(each.name == "hand-over" for each in sent.spans[-20:]) and cluster.settled())
        given_up = [each for each in sent.spans if attributes_of(each).get("scrubber.cancelled")]
        assert {"hand-over", "device"} <= {each.name for each in given_up}
        assert {each.status.status_code for each in given_up} == {StatusCode.UNSET}


# --- one span ---------------------------------------------------------------------------------------------------------


def test_unexpected_exception_is_recorded_by_class_and_propagates(sent: Sent) -> None:
    with pytest.raises(ZeroDivisionError), sent.traces.span("grant"):
        raise ZeroDivisionError("of pod umbrella/serve-0")
    (span,) = sent.spans
    assert span.status.status_code is StatusCode.ERROR
    assert "umbrella" not in span.to_json(), "what an error says stays on the node"
    assert span.events == ()


def test_last_value_of_a_span_attribute_is_kept_and_none_is_ignored(sent: Sent) -> None:
    with sent.traces.span("device", device="GPU-1", tenant="acme") as span:
        span.set_attributes(tenant=None, path="fast")
        span.set_attributes(path="slow")
    assert attributes_of(sent.spans[0]) == {"scrubber.device": "GPU-1", "scrubber.path": "slow"}


async def test_spans_started_within_a_span_are_its_children_across_tasks(sent: Sent) -> None:
    async def beside() -> None:
        with sent.traces.span("scrub"):
            pass

    with sent.traces.span("hand-over"):
        task = asyncio.create_task(beside())
    await task
    with sent.traces.span("later"):
        pass
    assert sent.outline(sent.named("hand-over")) == "hand-over(scrub)"
    assert sent.named("later").parent is None


def test_following_span_is_linked_to_its_predecessor(sent: Sent) -> None:
    with sent.traces.span("Allocate"):
        allocation = sent.traces.traceparent()
    with sent.traces.span("PreStartContainer", follows=allocation):
        pass
    (link,) = sent.named("PreStartContainer").links
    assert link.context.span_id == id_of(sent.named("Allocate"))
    assert sent.named("PreStartContainer").parent is None
    assert "scrubber.follows" not in attributes_of(sent.named("PreStartContainer"))


@given(
    text=st.text(st.characters(), max_size=50) | st.sampled_from(["\ud800", "a\udcff\n\x1b[31m", "x" * 100_000]),
    number=st.integers() | st.floats(),
)
def test_arbitrary_attribute_value_does_not_prevent_span_encoding(text: str, number: float) -> None:
    sent = Sent()
    with sent.traces.span("device", device=text, number=number) as span:
        span.set_attributes(tenant=text)
    with sent.traces.span("grant"):
        pass
    (resource,) = encode_spans(sent.spans).resource_spans
    spans = {each.name: each for scope in resource.scope_spans for each in scope.spans}
    assert spans.keys() == {"device", "grant"}
    assert {"scrubber.device", "scrubber.tenant"} <= {each.key for each in spans["device"].attributes}
    assert all(len(each.value.string_value) <= 256 for each in spans["device"].attributes)


def test_log_lines_carry_the_trace_id_only_within_a_span(sent: Sent) -> None:
    structlog.contextvars.clear_contextvars()
    with sent.traces.span("hand-over"):
        with sent.traces.span("device"):
            pass
        bound = structlog.contextvars.get_contextvars()
    assert bound == {"trace_id": f"{trace_of(sent.named('hand-over')):032x}"}
    assert structlog.contextvars.get_contextvars() == {}


async def test_span_closed_in_another_task_ends_without_an_error(sent: Sent) -> None:
    span = sent.traces.span("device")
    await asyncio.create_task(_entered(span))
    span.__exit__(None, None, None)
    assert [each.name for each in sent.spans] == ["device"]
    assert sent.traces.traceparent() == ""


async def _entered(span: Any) -> None:
    span.__enter__()


class Broken(SimpleSpanProcessor):
    """A library that fails in every call."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise ZeroDivisionError

    def on_end(self, span: Any) -> None:
        raise ZeroDivisionError


def test_exception_in_the_library_costs_only_its_span() -> None:
    traces = OpenTelemetryTracer(Broken(InMemorySpanExporter()), RESOURCE)
    with traces.span("hand-over") as span:
        span.set_attributes(path="fast")


def test_operator_resource_attributes_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=blue,service.name=other")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    sent = Sent()
    with sent.traces.span("reserve"):
        pass
    assert dict(sent.spans[0].resource.attributes) == {"service.name": "mine", "k8s.cluster.name": "blue"}


# --- the parent of a trace --------------------------------------------------------------------------------------------


def joined(traces: OpenTelemetryTracer, *metadata: tuple[str, str | bytes]) -> str:
    """Return the trace context of a task after it has joined the trace in ``metadata``."""

    async def join() -> str:
        traces.join_trace(metadata)
        return traces.traceparent()

    return asyncio.run(join())


@pytest.mark.parametrize(
    "traceparent", [CALLER, f"00-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-more"]
)
def test_callers_traceparent_is_joined(sent: Sent, traceparent: str) -> None:
    assert joined(sent.traces, ("user-agent", "x"), ("traceparent", traceparent)) == f"00-{traceparent[3:55]}"


@pytest.mark.parametrize(
    "traceparent",
    [
        *("", "00", CALLER[:-1], CALLER + "-", CALLER + "-more", CALLER + "\n", " " + CALLER, CALLER.upper()),
        *(CALLER.replace("-", "_"), f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"),
        *(f"cc-{TRACE}-{SPAN}-01-{'x' * 100_000}", CALLER.replace("0af", "\u0660af"), CALLER.encode(), "\ud800"),
    ],
)
def test_malformed_traceparent_is_ignored(sent: Sent, traceparent: str | bytes) -> None:
    assert joined(sent.traces, ("traceparent", traceparent)) == ""


@given(st.lists(st.tuples(st.text() | st.just("traceparent"), st.text() | st.binary())))
def test_arbitrary_caller_metadata_is_never_an_error(metadata: list[tuple[str, str | bytes]]) -> None:
    traces = Sent().traces
    assert joined(traces, *metadata) == ""


def test_duplicate_traceparent_is_ignored(sent: Sent) -> None:
    assert joined(sent.traces, ("traceparent", CALLER), ("traceparent", CALLER)) == ""


def test_trace_not_sampled_by_the_caller_is_not_sampled(sent: Sent) -> None:
    async def call() -> None:
        sent.traces.join_trace([("traceparent", CALLER[:-1] + "0")])
        with sent.traces.span("hand-over"):
            pass

    asyncio.run(call())
    assert sent.spans == ()


class Listening(FakeNode):
    """A node that records the trace context of each call."""

    def __init__(self, traces: OpenTelemetryTracer) -> None:
        super().__init__()
        self.traces = traces
        self.at: list[str] = []

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        with self.traces.span("reserve"):
            return await super().reserve(devices, resource)

    async def scrub(self, device: str, path: ScrubPath, actor: str) -> AsyncIterator[ScrubUpdate]:
        with self.traces.span("scrub"):
            async for update in super().scrub(device, path, actor):
                yield update

    def view(self) -> NodeView:
        self.at.append(self.traces.traceparent())
        return super().view()


@pytest.fixture
async def node(short_tmp: Path, sent: Sent) -> AsyncIterator[Listening]:
    node = Listening(sent.traces)
    server = GrpcServer(node, Sockets(short_tmp / "s"), join_trace=sent.traces.join_trace)
    await server.start()
    node.at.clear()
    yield node
    await server.stop(0)


async def test_service_continues_the_plugins_trace(node: Listening, sent: Sent, short_tmp: Path) -> None:
    async with PluginClient(short_tmp / "s", trace_metadata=sent.traces.outgoing_metadata) as plugin:
        with sent.traces.span("Allocate"):
            await plugin.reserve(["GPU-a0"], timeout=30)
        await plugin.reserve(["GPU-a0"], timeout=30)
    first, second = [each for each in sent.spans if each.name == "reserve"]
    assert first.parent is not None
    assert first.parent.span_id == id_of(sent.named("Allocate"))
    assert first.kind is SpanKind.SERVER
    assert trace_of(first) == trace_of(sent.named("Allocate"))
    assert second.parent is None, "a call without a trace follows none, not the one before it"


async def test_read_socket_ignores_the_callers_trace(node: Listening, short_tmp: Path) -> None:
    metadata = (("traceparent", CALLER),)
    async with grpc.aio.insecure_channel(grpc_target(Sockets(short_tmp / "s").path(Purpose.READ))) as channel:
        await scrubber_pb2_grpc.ReadStub(channel).ListDevices(pb.ListDevicesRequest(), metadata=metadata, timeout=30)
    async with grpc.aio.insecure_channel(grpc_target(Sockets(short_tmp / "s").path(Purpose.PLUGIN))) as channel:
        await scrubber_pb2_grpc.PluginStub(channel).GetSnapshot(pb.GetSnapshotRequest(), metadata=metadata, timeout=30)
    assert node.at == ["", CALLER]


async def test_scrub_on_the_admin_socket_joins_the_operators_trace(
    node: Listening, sent: Sent, short_tmp: Path
) -> None:
    async with grpc.aio.insecure_channel(grpc_target(Sockets(short_tmp / "s").path(Purpose.ADMIN))) as channel:
        stub = scrubber_pb2_grpc.AdminStub(channel)
        request = pb.ScrubRequest(device="GPU-a0", path="slow")
        for metadata in ((("traceparent", CALLER),), None):
            async for _ in stub.Scrub(request, metadata=metadata, timeout=30):
                pass
    first, second = [each.parent for each in sent.spans if each.name == "scrub"]
    assert first is not None
    assert f"{first.span_id:016x}" == SPAN
    assert second is None


@pytest.mark.parametrize("traceparent", ["", "00-" + "0" * 52, "x" * 4000, CALLER + ",", "%00%ff"])
async def test_caller_with_a_malformed_trace_is_answered(node: Listening, short_tmp: Path, traceparent: str) -> None:
    async with PluginClient(
        short_tmp / "s", trace_metadata=lambda: (("traceparent", traceparent), ("tracestate", "=,=" * 99))
    ) as plugin:
        await plugin.reserve(["GPU-a0"], timeout=30)
    assert len(node.requests) == 1


async def test_service_without_tracing_answers_a_caller_with_a_trace(short_tmp: Path) -> None:
    server = GrpcServer(FakeNode(), Sockets(short_tmp / "s"))
    await server.start()
    try:
        async with PluginClient(short_tmp / "s", trace_metadata=lambda: (("traceparent", CALLER),)) as plugin:
            await plugin.reserve(["GPU-a0"], timeout=30)
        async with ReadClient(short_tmp / "s") as read, AdminClient(short_tmp / "s") as admin:
            await read.devices()
            await admin.quarantine("GPU-a0", "noise")
    finally:
        await server.stop(0)
