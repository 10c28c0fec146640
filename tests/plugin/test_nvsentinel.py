"""Health events for NVSentinel, to a stand-in for its platform connector that answers, refuses and hangs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty

from plugin.api import nvsentinel_pb2 as nvsentinel
from plugin.api import nvsentinel_pb2_grpc
from plugin.logs import create_logger
from plugin.main import PluginSettings, run
from plugin.nvsentinel import AGENT, CHECK_NAME, MAX_PENDING, NvsentinelReporter, NvsentinelTimes, ProcessingStrategy
from scrubber.domain.errors import InvalidConfiguration
from tests import forkserver
from tests.plugin_collaborators import DEADLINE, Bell, FakeKubelet, FakeService, device, snapshot, start

QUICK = NvsentinelTimes(deadline=DEADLINE, first_retry=0.01, max_retry=0.02, restart=0.01)


async def _answer(context: Any) -> None:
    return


async def _hang(context: Any) -> None:
    await asyncio.Event().wait()


async def _refuse(context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the ring buffer is full")


class PlatformConnector(nvsentinel_pb2_grpc.PlatformConnectorServicer):
    """The platform connector of a node. ``behave`` runs before a response; only answered events are in ``events``."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "nvsentinel.sock"
        self.bell = Bell()
        self.requests = 0
        self.events: list[nvsentinel.HealthEvent] = []
        self.behave: Callable[[Any], Awaitable[None]] = _answer
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        nvsentinel_pb2_grpc.add_PlatformConnectorServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def HealthEventOccurredV1(self, request: nvsentinel.HealthEvents, context: Any) -> Empty:
        self.requests += 1
        self.bell.ring()
        await self.behave(context)
        assert request.version == 1
        self.events += request.events
        self.bell.ring()
        return Empty()

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.bell.until(holds)


class Reporting:
    """A running reporter, its log, and what it counted."""

    def __init__(self, socket: Path, strategy: ProcessingStrategy, times: NvsentinelTimes) -> None:
        self.bell = Bell()
        self.counts: Counter[str] = Counter()
        self.faults: list[Exception] = []
        self.stream = io.StringIO()
        self.reporter = NvsentinelReporter(
            socket,
            "node-1",
            strategy=strategy,
            times=times,
            log=create_logger("json", stream=self.stream),
            clock=time.monotonic,
            wall_clock=lambda: 1_900_000_000.25,
            jitter=lambda: 0.5,
            observer=self,
        )

    def on_health_events(self, outcome: str, count: int) -> None:
        if self.faults:
            raise self.faults.pop()
        self.counts[outcome] += count
        self.bell.ring()

    async def counted(self, outcome: str, number: int) -> None:
        """Wait until at least ``number`` were counted."""
        await self.bell.until(lambda: self.counts[outcome] >= number)

    @property
    def logged(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.stream.getvalue().splitlines()]


@asynccontextmanager
async def reporting(
    socket: Path, strategy: ProcessingStrategy = ProcessingStrategy.STORE_ONLY, times: NvsentinelTimes = QUICK
) -> AsyncIterator[Reporting]:
    running = Reporting(socket, strategy, times)
    running.reporter.start()
    try:
        yield running
    finally:
        async with asyncio.timeout(DEADLINE):
            await running.reporter.stop()


def summary(event: nvsentinel.HealthEvent) -> tuple[str, bool, bool, int]:
    return event.metadata["state"], event.isHealthy, event.isFatal, event.recommendedAction


async def test_each_change_of_a_device_is_one_event_with_the_services_message(short_tmp: Path) -> None:
    async with PlatformConnector(short_tmp) as connector, reporting(connector.socket) as running:
        for version, (state, refusal) in enumerate(
            [
                ("clean", ""),
                ("in-use", ""),
                ("quarantined", "Device sim-0 is quarantined (XID 95)."),
                ("recovering", "Device sim-0 is recovering."),
                ("probation", "Device sim-0 is on probation."),
                ("condemned", "Device sim-0 is condemned."),
                ("dirty", ""),
            ]
        ):
            expected = {"clean": 1, "in-use": 1, "condemned": 3, "dirty": 4}.get(state, 2)
            shown = device(0, state=state, refusal=refusal, advertised=not refusal, pci_address="0000:3b:00.0")
            running.reporter.on_snapshot(snapshot(shown, version=version))
            await running.counted("sent", expected)
        assert [summary(each) for each in connector.events] == [
            ("clean", True, False, nvsentinel.NONE),
            ("quarantined", False, False, nvsentinel.NONE),
            ("condemned", False, True, nvsentinel.CONTACT_SUPPORT),
            ("dirty", True, False, nvsentinel.NONE),
        ]
        quarantined = connector.events[1]
        assert quarantined.message == "Device sim-0 is quarantined (XID 95)."
        assert [(each.entityType, each.entityValue) for each in quarantined.entitiesImpacted] == [
            ("GPU_UUID", "sim-0"),
            ("PCI", "0000:3b:00.0"),
        ]
        assert quarantined.generatedTimestamp.ToMilliseconds() == 1_900_000_000_250
        for each in connector.events:
            assert (each.version, each.agent, each.checkName, each.componentClass) == (1, AGENT, CHECK_NAME, "GPU")
            assert (each.nodeName, each.processingStrategy) == ("node-1", nvsentinel.STORE_ONLY)
    assert running.counts == {"sent": 4}


async def test_execute_strategy_is_sent_only_when_it_was_chosen(short_tmp: Path) -> None:
    async with (
        PlatformConnector(short_tmp) as connector,
        reporting(connector.socket, ProcessingStrategy.EXECUTE) as running,
    ):
        running.reporter.on_snapshot(snapshot(device(0)))
        await connector.until(lambda: bool(connector.events))
        assert connector.events[0].processingStrategy == nvsentinel.EXECUTE_REMEDIATION


async def test_event_of_a_mig_instance_names_its_gpu(short_tmp: Path) -> None:
    async with PlatformConnector(short_tmp) as connector, reporting(connector.socket) as running:
        running.reporter.on_snapshot(snapshot(device(0, parent="GPU-1", state="quarantined")))
        await connector.until(lambda: bool(connector.events))
        (event,) = connector.events
        assert [each.entityValue for each in event.entitiesImpacted] == ["GPU-1"]
        assert event.metadata["device"] == "sim-0"
        assert event.message == "Device sim-0 is quarantined."  # it is advertised, so there is no refusal


async def test_service_that_has_not_checked_every_device_is_not_reported(short_tmp: Path) -> None:
    async with PlatformConnector(short_tmp) as connector, reporting(connector.socket) as running:
        running.reporter.on_snapshot(snapshot(device(0, state="quarantined"), ready=False))
        running.reporter.on_snapshot(None)
        running.reporter.on_snapshot(snapshot(device(1)))
        await connector.until(lambda: bool(connector.events))
        running.reporter.on_snapshot(None)
        running.reporter.on_snapshot(snapshot(device(1), device(2)))
        await connector.until(lambda: len(connector.events) == 2)
        assert [each.metadata["device"] for each in connector.events] == ["sim-1", "sim-2"]


@pytest.mark.parametrize("kind", ["refuses", "is absent"])
async def test_connector_that_refuses_or_is_absent_gets_the_newest_state_later(short_tmp: Path, kind: str) -> None:
    connector = PlatformConnector(short_tmp)
    connector.behave = _refuse
    async with reporting(connector.socket) as running:
        if kind == "refuses":
            await connector.__aenter__()
        for version, state in enumerate(["quarantined", "clean", "quarantined", "clean"]):
            running.reporter.on_snapshot(snapshot(device(0, state=state), device(1), version=version))
            await running.counted("failed", running.counts["failed"] + 4)
        assert connector.events == []
        connector.behave = _answer
        if kind == "is absent":
            await connector.__aenter__()
        await connector.until(lambda: len(connector.events) == 2)
        assert {each.metadata["device"]: each.isHealthy for each in connector.events} == {"sim-0": True, "sim-1": True}
        await running.counted("sent", 2)
    assert running.counts["dropped"] == 3
    assert running.logged == ["nvsentinel.send-failed", "nvsentinel.send-succeeded"]
    await connector.__aexit__()


async def test_connector_that_hangs_is_abandoned_at_the_deadline_and_tried_again(short_tmp: Path) -> None:
    times = NvsentinelTimes(deadline=1.0, first_retry=0.01, max_retry=0.02)
    async with PlatformConnector(short_tmp) as connector, reporting(connector.socket, times=times) as running:
        connector.behave = _hang
        running.reporter.on_snapshot(snapshot(device(0)))
        await connector.until(lambda: connector.requests == 2)
        assert running.counts == {"failed": 1}
        connector.behave = _answer
        await connector.until(lambda: bool(connector.events))


async def test_event_that_is_replaced_during_a_request_is_sent_next(short_tmp: Path) -> None:
    proceed = asyncio.Event()

    async def wait(context: Any) -> None:
        await proceed.wait()

    async with PlatformConnector(short_tmp) as connector, reporting(connector.socket) as running:
        connector.behave = wait
        running.reporter.on_snapshot(snapshot(device(0)))
        await connector.until(lambda: connector.requests == 1)
        running.reporter.on_snapshot(snapshot(device(0, state="condemned"), version=2))
        await asyncio.sleep(0)
        proceed.set()
        await connector.until(lambda: len(connector.events) == 2)
        assert [each.isFatal for each in connector.events] == [False, True]


async def test_number_of_waiting_events_is_limited_and_the_oldest_are_dropped(short_tmp: Path) -> None:
    async with reporting(short_tmp / "nvsentinel.sock") as running:
        running.reporter.on_snapshot(snapshot(*(device(number) for number in range(MAX_PENDING + 3))))
        await running.counted("failed", 1)
        assert running.counts["dropped"] == 3
        async with PlatformConnector(short_tmp) as connector:
            await connector.until(lambda: len(connector.events) == MAX_PENDING)
            assert connector.events[0].metadata["device"] == "sim-3"


async def test_unexpected_error_is_logged_and_the_reporter_starts_again(short_tmp: Path) -> None:
    async with PlatformConnector(short_tmp) as connector, reporting(connector.socket) as running:
        running.faults.append(ZeroDivisionError())
        running.reporter.on_snapshot(snapshot(device(0)))
        await connector.until(
            lambda: len(connector.events) == 2
        )  # counting the first attempt failed, so it is repeated
        assert running.logged == ["nvsentinel.failed"]


async def test_container_starts_while_nvsentinel_hangs_and_the_plugin_stops_at_once(short_tmp: Path) -> None:
    words = ["--kubelet-dir", str(short_tmp), "--socket-dir", str(short_tmp / "s"), "--log-format", "json"]
    words += ["--registration", "classic", "--metrics-address", "off", "--node-name", "node-1"]
    connector = PlatformConnector(short_tmp)
    connector.behave = _hang
    async with connector, FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", snapshot(device(0))):
        process = await forkserver.start(
            *("scrubber.cli.main", "plugin", *words),
            env={**os.environ, "SCRUBBER_NVSENTINEL_SOCKET": str(connector.socket)},
            stderr=PIPE,
        )
        try:
            registered = await kubelet.new_registration()
            await connector.until(lambda: connector.requests == 1)
            await registered.plugin.PreStartContainer(start("sim-0"), timeout=DEADLINE)
            process.terminate()
            async with asyncio.timeout(DEADLINE):
                _, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0
        (line,) = [json.loads(each) for each in stderr.splitlines() if b'"nvsentinel.reporting"' in each]
        assert (line["node"], line["strategy"]) == ("node-1", "store-only")


async def test_nvsentinel_socket_without_a_node_name_is_refused(short_tmp: Path) -> None:
    settings = PluginSettings(kubelet_dir=short_tmp, socket=short_tmp, nvsentinel_socket=short_tmp / "nvsentinel.sock")
    with pytest.raises(InvalidConfiguration, match="--nvsentinel-socket needs --node-name"):
        await run(settings)
