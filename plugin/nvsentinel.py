"""Reports devices that go out of service, and return, to NVSentinel's platform connector on the same node.

The plugin sends these events, not the service: only the plugin informs others about the node, the service's snapshots
already contain what may be published, and no client of another component's socket belongs in a process that is root.

Invariants: nothing waits for NVSentinel, and no failure here affects another part of the plugin. Only the newest state
of each device waits to be sent; an older one that could not be sent is dropped and counted. After a restart of the
plugin the state of every device is sent once, so that nothing that happened meanwhile is missed. An event may arrive
more than once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from plugin.api import nvsentinel_pb2 as nvsentinel
from plugin.api import nvsentinel_pb2_grpc
from plugin.logs import Logger, WaitLogger
from plugin.observers import HealthEventObserver, NullObserver
from scrubber.api import scrubber_pb2 as pb

__all__ = ["AGENT", "CHECK_NAME", "MAX_PENDING", "NvsentinelReporter", "NvsentinelTimes", "ProcessingStrategy"]

AGENT = "gpu-scrubber"
"""The plugin's name in its events; no other agent of NVSentinel uses it."""
CHECK_NAME = "GpuScrubberOutOfService"
"""The same for every event of a device, so that its return clears what was reported before.

With the strategy ``execute``, NVSentinel makes it the type of a node condition.
"""
MAX_PENDING = 256
"""Limit of devices whose events wait to be sent."""

_QUARANTINED_STATES = frozenset({"quarantined", "recovering", "probation", "break-glass"})


class ProcessingStrategy(StrEnum):
    """What NVSentinel is to do with the events: store them, or act on them as its rules say."""

    STORE_ONLY = "store-only"
    EXECUTE = "execute"


_STRATEGIES = {
    ProcessingStrategy.STORE_ONLY: nvsentinel.STORE_ONLY,
    ProcessingStrategy.EXECUTE: nvsentinel.EXECUTE_REMEDIATION,
}


class _Health(StrEnum):
    """The state of a device in the granularity of the events."""

    IN_SERVICE = "in-service"
    QUARANTINED = "quarantined"
    CONDEMNED = "condemned"


@dataclass(frozen=True, slots=True)
class NvsentinelTimes:
    """Times of the reporter, in seconds.

    Attributes:
        deadline: limit of one request.
        first_retry, max_retry: first pause after a failure, and the limit up to which it doubles.
        log_interval: between two log lines about the same failure.
        restart: pause before the task is restarted after an unexpected error.
    """

    deadline: float = 5.0
    first_retry: float = 1.0
    max_retry: float = 300.0
    log_interval: float = 600.0
    restart: float = 30.0


class NvsentinelReporter:
    """Sends health events of one node.

    Args:
        socket: path of the platform connector's socket.
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch; ``jitter``: random, in [0, 1).
    """

    def __init__(
        self,
        socket: Path,
        node: str,
        *,
        strategy: ProcessingStrategy,
        times: NvsentinelTimes,
        log: Logger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float],
        observer: HealthEventObserver | None = None,
    ) -> None:
        self._socket = socket
        self._node = node
        self._strategy = strategy
        self._times = times
        self._log = log
        self._wall_clock = wall_clock
        self._jitter = jitter
        self._observer = observer or NullObserver()
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._health: dict[str, _Health] = {}
        self._pending: dict[str, nvsentinel.HealthEvent] = {}
        self._has_pending = asyncio.Event()
        self._snapshot: pb.Snapshot | None = None
        self._snapshot_arrived = asyncio.Event()
        self._task: asyncio.Task[NoReturn] | None = None

    def on_snapshot(self, snapshot: pb.Snapshot | None) -> None:
        """Store a snapshot of the service, so that an error in its processing cannot affect the caller.

        None, and a snapshot of a service that has not checked every device, contain no information.
        """
        if snapshot is not None and snapshot.ready:
            self._snapshot = snapshot
            self._snapshot_arrived.set()

    def start(self) -> None:
        """Start the background task."""
        self._task = asyncio.create_task(self._run_forever(), name="NVSentinel")

    async def stop(self) -> None:
        """Stop at once; events that were not sent are lost, and the next start sends the state of every device."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _follow_snapshots(self) -> NoReturn:
        """Queue an event for each device whose health differs from its last event."""
        while True:
            await self._snapshot_arrived.wait()
            self._snapshot_arrived.clear()
            devices = self._snapshot.devices if self._snapshot is not None else ()
            before, self._health = self._health, {each.id: _health_of(each) for each in devices}
            for device in devices:
                health = self._health[device.id]
                if before.get(device.id) is not health:
                    self._queue(device.id, self._event(device, health))

    def _queue(self, device: str, event: nvsentinel.HealthEvent) -> None:
        superseded = self._pending.pop(device, None)
        if superseded is None and len(self._pending) >= MAX_PENDING:
            superseded = self._pending.pop(next(iter(self._pending)))
        if superseded is not None:
            self._observer.on_health_events("dropped", 1)
        self._pending[device] = event
        self._has_pending.set()

    async def _run_forever(self) -> NoReturn:
        while True:
            work = asyncio.create_task(self._work(), name="health events")
            try:
                # A task instead of a call, so that every exception, including one from a bug of ours, ends there.
                await asyncio.wait({work})
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            self._log.error("nvsentinel.failed", exc_info=work.exception())
            await asyncio.sleep(self._times.restart)

    async def _work(self) -> NoReturn:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_snapshots(), name="health events: snapshots")
            await self._send_forever()

    async def _send_forever(self) -> NoReturn:
        failures = 0
        while True:
            await self._has_pending.wait()
            batch = dict(self._pending)
            error = await self._send(batch.values())
            if error:
                self._observer.on_health_events("failed", len(batch))
                self._reminder.log_waiting("nvsentinel.send-failed", socket=str(self._socket), message=error)
                pause = min(self._times.max_retry, self._times.first_retry * 2 ** min(failures, 20))
                failures += 1
                await asyncio.sleep(pause * (0.5 + 0.5 * self._jitter()))
                continue
            failures = 0
            self._observer.on_health_events("sent", len(batch))
            self._reminder.log_ended("nvsentinel.send-succeeded", socket=str(self._socket))
            # An event that was replaced during the request is sent next.
            self._pending = {each: event for each, event in self._pending.items() if batch.get(each) is not event}
            if not self._pending:
                self._has_pending.clear()

    async def _send(self, events: Iterable[nvsentinel.HealthEvent]) -> str:
        """Send ``events``; return why that failed, or the empty text."""
        # A channel for each request: requests are rare, and the socket may be a new one each time.
        async with grpc.aio.insecure_channel(f"unix:{self._socket}") as channel:
            connector = nvsentinel_pb2_grpc.PlatformConnectorStub(channel)
            try:
                await connector.HealthEventOccurredV1(
                    nvsentinel.HealthEvents(version=1, events=events), timeout=self._times.deadline
                )
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
        return ""

    def _event(self, device: pb.SnapshotDevice, health: _Health) -> nvsentinel.HealthEvent:
        entities = [nvsentinel.Entity(entityType="GPU_UUID", entityValue=device.parent or device.id)]
        if device.pci_address:
            entities.append(nvsentinel.Entity(entityType="PCI", entityValue=device.pci_address))
        generated = Timestamp()
        generated.FromMilliseconds(int(self._wall_clock() * 1000))
        in_service, condemned = health is _Health.IN_SERVICE, health is _Health.CONDEMNED
        message = f"Device {device.id} is in service." if in_service else device.refusal
        return nvsentinel.HealthEvent(
            version=1,
            agent=AGENT,
            componentClass="GPU",
            checkName=CHECK_NAME,
            isFatal=condemned,
            isHealthy=in_service,
            message=message or f"Device {device.id} is {device.state}.",
            # A quarantined device recovers automatically: the service resets it itself.
            recommendedAction=nvsentinel.CONTACT_SUPPORT if condemned else nvsentinel.NONE,
            entitiesImpacted=entities,
            metadata={"device": device.id, "state": device.state},
            generatedTimestamp=generated,
            nodeName=self._node,
            processingStrategy=_STRATEGIES[self._strategy],
        )


def _health_of(device: pb.SnapshotDevice) -> _Health:
    if device.state == "condemned":
        return _Health.CONDEMNED
    return _Health.QUARANTINED if device.state in _QUARANTINED_STATES else _Health.IN_SERVICE
