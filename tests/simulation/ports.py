"""The ports of one service into the cluster, except ledger and eraser. They do nothing after the end of its life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from scrubber.domain.assignment import KubeletReading, Pod, Process
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import DeviceBusy, DeviceFault, DeviceLost, DriverTimeout, Unavailable, Unreadable
from scrubber.domain.evidence import ScrubRecord
from scrubber.domain.infrastructure import ProcessOwner
from scrubber.domain.pods import RemainingCgroups
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport, Signal, Snapshot
from scrubber.ports.record import Event
from tests.simulation.erasing import Erasers
from tests.simulation.kubelet import Kubelet
from tests.simulation.life import Life
from tests.simulation.process_table import DEFAULTS, Gpu, Proc, ProcessTable
from tests.simulation.timeline import VirtualClock

__all__ = [
    "SimulatedAssignments",
    "SimulatedClock",
    "SimulatedContainers",
    "SimulatedDiagnostics",
    "SimulatedHolders",
    "SimulatedInventory",
    "SimulatedJournal",
    "SimulatedOwners",
    "SimulatedResetter",
    "SimulatedSettings",
    "SimulatedTelemetry",
]

QUESTION_DEADLINE = 1.0
RESET_SECONDS = 2.0
HANG_SECONDS = 3600.0
LIST_SECONDS = 0.005


class SimulatedClock:
    """:class:`scrubber.ports.Clock`."""

    def __init__(self, life: Life, clock: VirtualClock) -> None:
        self._life = life
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        self._life.check()
        await self._clock.sleep(seconds)
        self._life.check()

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        self._life.check()
        return self._clock.timeout(seconds)

    def stall_tolerant_timeout(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        self._life.check()
        return self._clock.stall_tolerant_timeout(seconds)


class SimulatedInventory:
    """:class:`scrubber.ports.Inventory`."""

    def __init__(self, life: Life, process_table: ProcessTable, identity: NodeIdentity) -> None:
        self._life = life
        self._process_table = process_table
        self._identity = identity

    async def devices(self) -> tuple[Device, ...]:
        self._life.check()
        return tuple(gpu.described for gpu in self._process_table.gpus.values() if gpu.listed)

    async def identity(self) -> NodeIdentity:
        self._life.check()
        return self._identity


class SimulatedHolders:
    """:class:`scrubber.ports.Holders`. ``unreadable`` names devices whose holders cannot be determined."""

    def __init__(self, life: Life, process_table: ProcessTable, erasers: Erasers, unreadable: set[str]) -> None:
        self._life = life
        self._process_table = process_table
        self._erasers = erasers
        self._unreadable = unreadable

    async def is_held(self, device: Device) -> bool:
        self._life.check()
        await asyncio.sleep(0)
        self._life.check()
        if device.id in self._unreadable:
            raise DriverTimeout("the question who holds it was not answered")
        gpu, erasing = self._process_table.gpus[device.id], self._erasers.running.get(device.id)
        if gpu.lost:
            raise DeviceLost("the device fell off the bus")
        if erasing is not None:
            erasing.fence_broken = True  # a query opens the device, and an eraser cannot tell by which process
        return bool(gpu.ghost or self._process_table.blockers(device.id) or erasing is not None)

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        held = await self.is_held(device)
        found = tuple(
            Holder(
                proc.pid,
                proc.started,
                proc.agent or (HolderKind.PROCESS if proc.killable else HolderKind.UNKILLABLE),
                proc.command,
                f"gpu-operator/{proc.pod}" if proc.agent else "",
                proc.memory_bytes,
            )
            for proc in self._process_table.holders(device.id)
        )
        if held and not self._process_table.blockers(device.id):
            return HolderReport((Holder(0, 0, HolderKind.UNTRACEABLE),))
        return HolderReport(found)

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        report = await self.list_holders(device)
        return tuple(each for each in report.holders if each.kind is not HolderKind.UNTRACEABLE)

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return ()


class SimulatedTelemetry:
    """:class:`scrubber.ports.Telemetry`."""

    def __init__(self, life: Life, process_table: ProcessTable) -> None:
        self._life = life
        self._process_table = process_table
        self.happened: asyncio.Queue[Signal] = asyncio.Queue()

    async def snapshot(self, device: Device) -> Snapshot:
        """Return the snapshot; for an instance its own conditions, with those of its siblings."""
        self._life.check()
        await asyncio.sleep(0)
        gpu, kin = self._process_table.gpus[device.id], self._process_table.kin(device.id)
        if any(each.stuck for each in kin):
            await asyncio.sleep(QUESTION_DEADLINE)
            self._life.check()
            raise DriverTimeout("the driver did not answer in time")
        self._life.check()
        if any(each.lost for each in kin):
            raise DeviceLost("the device fell off the bus")
        if gpu.silent:
            raise Unavailable("no driver answers")
        if gpu.nonsense:
            raise Unreadable("the driver's answer makes no sense")
        if gpu.odd:
            raise DeviceFault("the driver reports a fault that is in no table")
        return Snapshot(
            device.id,
            errors={code: times for each in reversed(kin) for code, times in each.xids.items()},
            ecc_uncorrected=gpu.ecc if gpu.ecc is None else sum(each.ecc or 0 for each in kin),
            temperature_celsius=max(each.celsius for each in kin),
            recovery_action=gpu.recovery,
            settings=dict(gpu.settings),
            defaults=dict(DEFAULTS),
            conditions={code: read for each in reversed(kin) for code, read in each.conditions.items()},
            counters=dict(gpu.counters),
        )

    async def signals(self) -> AsyncIterator[Signal]:
        while True:
            signal = await self.happened.get()
            self._life.check()
            yield signal


class SimulatedSettings:
    """:class:`scrubber.ports.Settings`."""

    def __init__(self, life: Life, process_table: ProcessTable) -> None:
        self._life = life
        self._process_table = process_table

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        self._life.check()
        gpu = self._process_table.gpus[device.id]
        if "settings-hang" in gpu.flaws:
            await asyncio.sleep(HANG_SECONDS)
            self._life.check()
        if "settings-not-restored" in gpu.flaws:
            return dict(gpu.settings)
        gpu.settings.update({name: value for name, value in expected.items() if name in gpu.settings})
        return dict(gpu.settings)


class SimulatedResetter:
    """:class:`scrubber.ports.Resetter`.

    Args:
        resets: called before a reset.
    """

    def __init__(self, life: Life, process_table: ProcessTable, resets: Callable[[Gpu], None]) -> None:
        self._life = life
        self._process_table = process_table
        self._resets = resets

    async def plan(self, device: Device) -> ResetPlan:
        self._life.check()
        gpu = self._process_table.gpus[device.id]
        agents = tuple(
            f"PID {each.pid} is an agent."
            for each in self._process_table.holders(device.id)
            if each.agent is HolderKind.INFRASTRUCTURE
        )
        return ResetPlan(
            device.id, "by decree", ("reset",), gpu.reset_missing, agents, also_reset=gpu.together, agents=agents
        )

    async def reset(self, device: Device, deadline: float) -> None:
        self._life.check()
        gpu = self._process_table.gpus[device.id]
        if self._process_table.holders(device.id):
            raise DeviceBusy("the device is held")
        everyone = [gpu, *(self._process_table.gpus[each] for each in gpu.together)]
        for each in everyone:
            self._resets(each)
        await asyncio.sleep(RESET_SECONDS)
        self._life.check()
        if gpu.reset_fails is not None:
            raise Unreadable(gpu.reset_fails)
        for each in everyone:
            each.was_reset()


class SimulatedDiagnostics:
    """:class:`scrubber.ports.Diagnostics`; it does not change the memory."""

    def __init__(self, life: Life, process_table: ProcessTable) -> None:
        self._life = life
        self._process_table = process_table

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        self._life.check()
        if self._process_table.holders(device.id):
            raise DeviceBusy("the device is held")
        await asyncio.sleep(level.seconds / 10)
        self._life.check()
        gpu = self._process_table.gpus[device.id]
        wrong = gpu.wont_clear or "diagnosis-wrong" in gpu.flaws
        rate = 1e9 if "diagnosis-slow" in gpu.flaws else 1e12
        return (
            DiagnosticCheck("memory-pattern", int(wrong)),
            DiagnosticCheck("matrix-product", 0, {"operations_per_second": rate}),
        )


class SimulatedAssignments:
    """:class:`scrubber.ports.Assignments`."""

    def __init__(self, life: Life, kubelet: Kubelet) -> None:
        self._life = life
        self._kubelet = kubelet

    async def read(self) -> KubeletReading:
        self._life.check()
        await asyncio.sleep(LIST_SECONDS / 2 + self._kubelet.delay)
        reading = self._kubelet.reading()
        await asyncio.sleep(LIST_SECONDS / 2)
        self._life.check()
        return reading

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        self._life.check()
        return self._kubelet.starts_of(pod)


class SimulatedContainers:
    """:class:`scrubber.ports.Containers`.

    Args:
        signalled: called for each process before it is signalled, with the process.
        unreadable: UIDs of pods whose processes cannot be listed.
    """

    def __init__(
        self, life: Life, process_table: ProcessTable, signalled: Callable[[Pod, Proc], None], unreadable: set[str]
    ) -> None:
        self._life = life
        self._process_table = process_table
        self._signalled = signalled
        self._unreadable = unreadable

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        self._life.check()
        assert pod.uid is not None
        await asyncio.sleep(0)
        self._life.check()
        if pod.uid in self._unreadable:
            raise Unreadable("the pod's control group cannot be read")
        return tuple(proc.process for proc in self._process_table.living(pod.uid))

    async def pod_uid_of(self, pid: int) -> str | None:
        self._life.check()
        proc = self._process_table.procs.get(pid)
        return proc.pod if proc is not None and proc.alive else None

    def watch_first_container(self, pod: Pod) -> asyncio.Future[str] | None:
        self._life.check()
        assert pod.uid is not None
        return None if pod.uid in self._unreadable else self._process_table.first_container(pod.uid)

    def watch_end(self, pod: Pod) -> asyncio.Future[None] | None:
        self._life.check()
        assert pod.uid is not None
        if self._process_table.watch_error or pod.uid in self._unreadable:
            raise Unreadable(self._process_table.watch_error or "the pod's control group cannot be read")
        return self._process_table.next_end(pod.uid) if self._process_table.has_cgroups else None

    async def require_job_cgroups(self) -> None:
        self._life.check()
        if not self._process_table.has_job_cgroups:
            raise Unreadable("Slurm keeps no cgroups")

    async def remaining_cgroups(self, pod: Pod) -> RemainingCgroups | None:
        self._life.check()
        await asyncio.sleep(0)
        self._life.check()
        if pod.uid in self._unreadable:
            raise Unreadable("the pod's control group cannot be read")
        if not self._process_table.has_cgroups:
            return None
        containers = frozenset(proc.container for proc in self._process_table.living(pod.uid))
        return RemainingCgroups(bool(containers) or pod.uid not in self._process_table.removed_pods, containers)

    async def terminate(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        self._life.check()
        survivors: list[Process] = []
        for leftover in leftovers:
            proc = self._process_table.procs[leftover.pid]
            if not proc.alive or proc.process.identity != leftover.identity or proc.pod != pod.uid:
                continue
            self._signalled(pod, proc)
            if not self._process_table.end(proc):
                survivors.append(leftover)
        if survivors:
            await asyncio.sleep(deadline)
            self._life.check()
        return tuple(survivors)

    async def kill_cgroups(self, pod: Pod, deadline: float) -> bool:
        self._life.check()
        assert pod.uid is not None
        for proc in self._process_table.living(pod.uid):
            self._signalled(pod, proc)
        ended = [self._process_table.end(proc) for proc in self._process_table.living(pod.uid)]
        return all(ended)

    def not_covered(self) -> tuple[str, ...]:
        return ()


class SimulatedJournal:
    """:class:`scrubber.ports.Journal`; ``events`` contains the recorded events, ``scrubs`` the records of scrubs."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.events: list[Event] = []
        self.scrubs: list[ScrubRecord] = []

    def record(self, events: Sequence[Event]) -> None:
        if self._life.alive:
            self.events += events

    def record_scrub(self, scrub: ScrubRecord) -> None:
        if self._life.alive:
            self.scrubs.append(scrub)


class SimulatedOwners:
    """:class:`scrubber.ports.node.Owners`, by the process table; pods have names where the kubelet knows them."""

    def __init__(self, process_table: ProcessTable, kubelet: Kubelet) -> None:
        self._process_table = process_table
        self._kubelet = kubelet

    async def owner_of(self, pid: int) -> ProcessOwner:
        proc = self._process_table.procs.get(pid)
        if proc is None or proc.pod is None:
            return ProcessOwner()
        tenant = self._kubelet.of(proc.pod)
        namespace, name = ("", "") if tenant is None else (tenant.pod.namespace, tenant.pod.name)
        return ProcessOwner(namespace, name, proc.pod)
