"""Traces of the kubelet's calls: each lasts as long as its call, and log lines of the call contain its trace id."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.gate import GateTimes
from plugin.kubelet.registration import RegistrationTimes
from plugin.main import PluginSettings, PluginTimes, run
from scrubber.config.settings import TraceExport
from scrubber.domain.errors import NotReady, Quarantined, ScrubberError
from tests.emulation import Refusal, TinyPlugin
from tests.observability.traces_stage import attributes_of, trace_of
from tests.plugin_collaborators import DEADLINE, FakeKubelet, FakeService, allocation, device, snapshot, start

VENDORS = "vendor.example/gpu"
KINDS = [False, True]
TIMES = PluginTimes(gate=GateTimes(reserve=DEADLINE), registration=RegistrationTimes(stream=DEADLINE))


@dataclass
class Node:
    service: FakeService
    plugin: rpc.DevicePluginStub
    vendor: TinyPlugin | None
    spans: list[ReadableSpan] = field(default_factory=list)

    def refuse(self, error: ScrubberError) -> None:
        async def refused(_: object) -> None:
            raise error

        self.service.on_reserve = self.service.on_hand_over = refused


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[ReadableSpan]:
    """Collect the spans that the plugin exports."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    finished: list[ReadableSpan] = []

    def export(_: OTLPSpanExporter, batch: Sequence[ReadableSpan]) -> SpanExportResult:
        finished.extend(batch)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    return finished


@asynccontextmanager
async def node(directory: Path, *, behind: bool) -> AsyncIterator[Node]:
    """Provide a service, a kubelet, and the plugin with traces: alone, or in front of a vendor's plugin."""
    upstream = directory / "u"
    settings = PluginSettings(
        kubelet_dir=directory,
        socket=directory / "s",
        registration="classic",
        log_format="json",
        upstream_dir=upstream if behind else None,
        traces=TraceExport.OTLP,
        times=TIMES,
    )
    upstream.mkdir(mode=0o755)
    vendor = TinyPlugin(("sim-0",)) if behind else None
    async with FakeKubelet(directory) as kubelet, FakeService(directory / "s", snapshot(device(0))) as service:
        task = asyncio.create_task(run(settings))
        try:
            if vendor is not None:
                await vendor.serve(upstream / "vendor.sock")
                await _register(upstream / "kubelet.sock", "vendor.sock")
            registered = await kubelet.new_registration()
            await kubelet.until(lambda: registered.healthy == {"sim-0"})
            yield Node(service, registered.plugin, vendor)
        finally:
            if vendor is not None:
                await vendor.stop()
            task.cancel()
            await asyncio.wait({task})


async def _register(socket: Path, endpoint: str) -> None:
    request = api.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=VENDORS)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        await rpc.RegistrationStub(channel).Register(request, timeout=DEADLINE, wait_for_ready=True)


def written(capfd: pytest.CaptureFixture[str], spans: list[ReadableSpan]) -> dict[str, str]:
    """Return, for our log lines that name a method, event → name of the span in whose trace it is."""
    of = {f"{trace_of(each):032x}": each.name for each in spans}
    lines: list[dict[str, Any]] = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    return {line["event"]: of.get(line.get("trace_id", ""), "") for line in lines if "method" in line}


@pytest.mark.parametrize("behind", KINDS)
async def test_log_line_of_a_granted_call_carries_the_trace_of_the_call(
    short_tmp: Path, capfd: pytest.CaptureFixture[str], spans: list[ReadableSpan], behind: bool
) -> None:
    async with node(short_tmp, behind=behind) as here:
        await here.plugin.Allocate(allocation("sim-0"))
        await here.plugin.PreStartContainer(start("sim-0"), timeout=30)
    assert written(capfd, spans) == {"allocation.granted": "Allocate", "handover.granted": "PreStartContainer"}
    assert {attributes_of(each)["scrubber.devices"] for each in spans} == {1}


@pytest.mark.parametrize("behind", KINDS)
async def test_refused_call_is_traced_with_its_error_type(
    short_tmp: Path, capfd: pytest.CaptureFixture[str], spans: list[ReadableSpan], behind: bool
) -> None:
    async with node(short_tmp, behind=behind) as here:
        here.refuse(Quarantined("XID 95"))
        with pytest.raises(grpc.aio.AioRpcError):
            await here.plugin.Allocate(allocation("sim-0"))
        here.refuse(NotReady("a scrub is in progress"))
        with pytest.raises(grpc.aio.AioRpcError):
            await here.plugin.PreStartContainer(start("sim-0"), timeout=30)
    assert written(capfd, spans) == {"allocation.refused": "Allocate", "handover.refused": "PreStartContainer"}
    assert {each.name: attributes_of(each)["error.type"] for each in spans} == {
        "Allocate": "quarantined",
        "PreStartContainer": "not-ready",
    }


async def test_call_with_an_unknown_device_is_traced(
    short_tmp: Path, capfd: pytest.CaptureFixture[str], spans: list[ReadableSpan]
) -> None:
    async with node(short_tmp, behind=False) as here:
        with pytest.raises(grpc.aio.AioRpcError):
            await here.plugin.Allocate(allocation("unknown"))
    assert written(capfd, spans) == {"allocation.refused": "Allocate"}


async def test_refusal_by_a_vendors_plugin_is_traced_with_the_call(
    short_tmp: Path, capfd: pytest.CaptureFixture[str], spans: list[ReadableSpan]
) -> None:
    async def refuse(_: list[str]) -> None:
        raise Refusal("not on a Friday")

    async with node(short_tmp, behind=True) as here:
        assert here.vendor is not None
        here.vendor.on_allocate = refuse
        with pytest.raises(grpc.aio.AioRpcError, match="not on a Friday"):
            await here.plugin.Allocate(allocation("sim-0"))
    assert written(capfd, spans) == {"upstream.call-refused": "Allocate"}
    (span,) = spans
    assert attributes_of(span)["error.type"] == "upstream-refused"
