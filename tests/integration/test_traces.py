"""Both daemons export their work to a collector as one trace; a collector that never answers changes nothing."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Written
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from scrubber import __version__
from scrubber.emulator.playground import Daemon, Playground, gpu_pod_spec, tenant_argv
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, found_by, reader, running, writer

SERVICE, PLUGIN = "gpu-scrubber", "gpu-scrubber-plugin"


@dataclass(frozen=True)
class Span:
    """A received span, with the attributes of its resource."""

    written: Written
    of: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.written.name)


def _values(attributes: Any) -> dict[str, Any]:
    def value(of: AnyValue) -> Any:
        return getattr(of, of.WhichOneof("value") or "string_value")

    return {pair.key: value(pair.value) for pair in attributes}


@dataclass
class Collector(otlp_grpc.TraceServiceServicer):
    """A collector that accepts all spans, on an ephemeral port."""

    spans: list[Span] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    endpoint: str = ""
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def Export(self, request: otlp.ExportTraceServiceRequest, context: Any) -> otlp.ExportTraceServiceResponse:
        self.raw.append(request.SerializeToString())
        for spans in request.resource_spans:
            of = _values(spans.resource.attributes)
            self.spans += [
                Span(each, of, _values(each.attributes)) for part in spans.scope_spans for each in part.spans
            ]
        self._came.set()
        return otlp.ExportTraceServiceResponse()

    def inside(self, span: Span) -> list[Span]:
        """Return the direct children of ``span``, in order of their start."""
        within = [each for each in self.spans if each.written.parent_span_id == span.written.span_id]
        return sorted(within, key=lambda each: int(each.written.start_time_unix_nano))

    def named(self, name: str) -> list[Span]:
        return [each for each in self.spans if each.name == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON):
            while not holds():
                self._came.clear()
                await self._came.wait()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, server = Collector(), grpc.aio.server()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield collector
    await server.stop(None)


@asynccontextmanager
async def traced(endpoint: str) -> AsyncIterator[Playground]:
    """Provide a stage whose two daemons export traces to ``endpoint`` at short intervals."""
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        arguments = list(stage.service.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        stage.service.arguments = arguments
        for daemon in (stage.service, stage.plugin):
            daemon.arguments = [*daemon.arguments, "--traces", "otlp", "--node-name", "node-7"]
            daemon.environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        yield stage
        log_lines.check(stage)


async def test_start_of_a_pod_is_one_trace_through_both_daemons_down_to_the_scrub_steps() -> None:
    async with collecting() as collector, traced(collector.endpoint) as stage:
        first = await running(stage, writer("secret-of-a", "team-a"))
        await stage.kubelet.delete(first, grace=0)
        # It stays, so that no scrub and certificate follow it.
        second = await running(stage, gpu_pod_spec("secret-of-b", "team-b", tenant_argv("--read", "--hold", "forever")))
        assert '"residue_bytes": 0' in second.read_log("main")
        await collector.until(lambda: len(_granted(collector)) >= 2)
        allocate = collector.named("Allocate")[-1]
        start, over = _granted(collector)[-1]

        assert (start.of["service.name"], over.of["service.name"]) == (PLUGIN, SERVICE)
        assert {(each.of["service.version"], each.of["k8s.node.name"]) for each in (start, over)} == {
            (__version__, "node-7")
        }
        assert start.written.trace_id == over.written.trace_id
        assert [link.span_id for link in start.written.links] == [allocate.written.span_id]
        assert not start.written.parent_span_id, "the kubelet says nothing of a trace"
        assert [each.name for each in collector.inside(allocate)] == ["reserve"]

        device, *_, grant = collector.inside(over)
        assert (device.name, grant.name) == ("device", "grant")
        assert device.attributes["scrubber.tenant"] == "team-b"
        steps = [each for part in collector.inside(device) for each in collector.inside(part)]
        assert "step holders" in {each.name for each in steps}
        assert {each.written.trace_id for each in (device, grant, *steps)} == {over.written.trace_id}

        await collector.until(lambda: len(collector.named("scrub")) >= 2)
        scrub = collector.named("scrub")[-1]
        assert [each.name for each in collector.inside(scrub)][:2] == ["step holders", "step memory"]
        assert scrub.attributes["scrubber.tenant"] == "team-a"

        assert not any(b"secret-of" in each for each in collector.raw), "a pod's name stays on the node"
        granted = _last(stage.service, "handover.granted")
        assert granted["trace_id"] == over.written.trace_id.hex()
        assert _last(stage.plugin, "handover.granted")["trace_id"] == granted["trace_id"]
        assert _last(stage.plugin, "allocation.granted")["trace_id"] == allocate.written.trace_id.hex()
        proof = _last(stage.service, "certificate.issued")
        assert (granted["base_certificate"], proof["scrub_id"]) == (
            proof["certificate"],
            scrub.attributes["scrubber.scrub_id"],
        )
        names = f'{{scrub_id="{proof["scrub_id"]}",trace_id="{scrub.written.trace_id.hex()}"}}'
        exemplars = await asyncio.to_thread(_exemplars, stage.service)
        assert ("scrubber_scrub_duration_seconds", names) in exemplars, "a graph leads to the trace of the scrub"


def _last(daemon: Daemon, event: str) -> dict[str, Any]:
    return [each for each in log_lines.lines(daemon) if each["event"] == event][-1]


def _exemplars(daemon: Daemon) -> set[tuple[str, str]]:
    """Return histogram and labels of every exemplar on the metrics page of ``daemon``."""
    page = urllib.request.Request(
        f"http://{_last(daemon, 'metrics.serving')['address']}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(page, timeout=SOON) as response:
        lines = response.read().decode().splitlines()
    marked = (line.partition(" # ") for line in lines if not line.startswith("#"))
    return {(sample.split("_bucket{")[0], text[: text.index("}") + 1]) for sample, _, text in marked if text}


def _granted(collector: Collector) -> list[tuple[Span, Span]]:
    """Return granted starts, each with its last hand-over, as far as both have arrived completely."""
    starts = [
        each for each in collector.named("PreStartContainer") if each.written.status.code == Status.STATUS_CODE_UNSET
    ]
    overs = [(start, [each for each in collector.inside(start) if each.name == "hand-over"]) for start in starts]
    return [(start, over[-1]) for start, over in overs if over]


async def test_collector_that_never_answers_delays_no_start_and_no_stop() -> None:
    connected, both = [], asyncio.Event()

    async def silent(reading: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        connected.append(writing)
        if len(connected) >= 2:
            both.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with traced(f"http://127.0.0.1:{port}") as stage:
            first = await running(stage, writer("a", "team-a"))
            async with asyncio.timeout(SOON):
                await both.wait()
            await stage.kubelet.delete(first, grace=0)
            assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
            children = stage.child_processes(stage.service)
            assert await stage.plugin.stop(SOON) == 0
            assert await stage.service.stop(SOON) == 0
            assert stage.running_processes(children) == []
    finally:
        for each in connected:
            each.close()
        server.close()


@pytest.mark.parametrize("daemon", ["service", "plugin"])
async def test_missing_trace_endpoint_is_refused_at_the_start(daemon: str) -> None:
    async with Playground(devices=1, memory="2MiB") as stage:
        arguments = {"service": stage.service, "plugin": stage.plugin}[daemon].arguments
        ended = await stage.run_command(*arguments, "--traces", "otlp")
        assert ended.returncode == 2, ended.stderr
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in ended.stderr
        assert not (stage.directory / "state").exists()
