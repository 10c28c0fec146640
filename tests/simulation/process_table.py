"""Devices and processes: memory whose bytes identify their writer, and processes that open it.

A device's memory is a row of cells. A cell is empty (zeros) or contains the label of the container that wrote it, so
that a read of another tenant's data is visible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from scrubber.domain.assignment import Process
from scrubber.domain.device import Device
from scrubber.domain.telemetry import HolderKind

__all__ = ["CELLS", "LIFTED_BY_A_RESET", "MIB", "Gpu", "Proc", "ProcessTable", "gpu", "instance"]

CELLS = 4
MIB = 1024 * 1024
DEFAULTS = {"compute-mode": "default", "power-limit-watts": "400"}
LIFTED_BY_A_RESET = frozenset(
    {
        "reset-required",
        "row-remap-pending",
        "page-retirement-pending",
        "fabric-failed",
        "ecc-mode-pending",
        "mig-mode-pending",
    }
)
"""Conditions that a reset ends on a real device; it does not end a narrow link or a failed row remapping."""


@dataclass(slots=True, eq=False)
class Gpu:
    """One device, its bytes, its settings and its faults.

    Attributes:
        cells: the writer of each part of the memory; empty for zeros.
        xids: those that the driver lists, each with its count since the last reset.
        conditions: other lasting reports of the driver, by code, each with the value read.
        recovery: the driver's own recommendation; None where it reports none.
        ecc: uncorrected errors since the driver was loaded; None where they are not counted.
        counters: the device's own, which survive everything.
        stuck: driver calls do not return.
        silent: queries about it are impossible.
        nonsense: the driver's answer is invalid.
        odd: the driver reports a fault that is in no table.
        lost: off the bus.
        listed: whether the inventory contains it.
        wont_clear: one cell keeps its content, independent of writes.
        slow: factor on the time that clearing takes.
        ghost: held without a process.
        reset_fails: an error message, or None when resets work.
        reset_missing: why the device cannot be reset at all, or None.
        together: ids of the devices that are reset with it.
        firmware: the VBIOS version that it reports.
        flaws: ways in which a scrub of it fails: ``settings-not-restored``, ``settings-hang``, ``memory-short``,
            ``memory-kept``, ``on-chip``, ``eraser-dies``, ``diagnosis-wrong``, ``diagnosis-slow``.
    """

    device: Device
    cells: list[str] = field(default_factory=lambda: [""] * CELLS)
    settings: dict[str, str] = field(default_factory=lambda: dict(DEFAULTS))
    xids: dict[int, int] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    recovery: str | None = None
    ecc: int | None = 0
    counters: dict[str, int] = field(default_factory=dict)
    stuck: bool = False
    silent: bool = False
    nonsense: bool = False
    odd: bool = False
    lost: bool = False
    listed: bool = True
    wont_clear: bool = False
    slow: float = 1.0
    ghost: bool = False
    reset_fails: str | None = None
    reset_missing: str | None = None
    together: tuple[str, ...] = ()
    flaws: set[str] = field(default_factory=set)
    celsius: int = 40
    firmware: str = "vbios-1"
    resets: int = 0

    @property
    def id(self) -> str:
        return self.device.id

    @property
    def described(self) -> Device:
        """The device as the driver describes it."""
        return replace(self.device, traits=(*self.device.traits, ("vbios", self.firmware)))

    def report_xid(self, xid: int, times: int = 1) -> None:
        """Let the driver report an XID."""
        self.xids[xid] = self.xids.get(xid, 0) + times

    def was_reset(self) -> None:
        """Remove exactly what a reset removes on a real device."""
        self.resets += 1
        self._forget()
        self.lost = self.ghost = False
        if self.recovery is not None and "reset" in self.recovery:
            self.recovery = "none"

    def was_rebooted(self) -> None:
        """Remove what a reboot of the node removes: all that a reset does, and faults of the driver's own state."""
        self._forget()
        self.lost = self.ghost = self.stuck = self.silent = self.nonsense = self.odd = False
        if self.recovery is not None and ("reset" in self.recovery or "reboot" in self.recovery):
            self.recovery = "none"

    def _forget(self) -> None:
        self.xids.clear()
        self.ecc = None if self.ecc is None else 0
        for code in LIFTED_BY_A_RESET & self.conditions.keys():
            del self.conditions[code]

    def clear_faults(self) -> None:
        """Remove every fault; the device's counters keep their values."""
        self.xids.clear()
        self.conditions.clear()
        self.flaws.clear()
        self.recovery = None if self.recovery is None else "none"
        self.ecc = None if self.ecc is None else 0
        self.stuck = self.silent = self.nonsense = self.odd = self.lost = self.wont_clear = self.ghost = False
        self.slow, self.celsius, self.firmware = 1.0, 40, "vbios-1"
        self.reset_fails, self.listed = None, True
        if self.device.parent is None:
            self.reset_missing = None


def gpu(number: int, memory_bytes: int = MIB) -> Gpu:
    """Return device number ``number`` of the node; ids are in the order of the numbers."""
    return Gpu(Device(f"GPU-{number:04d}", str(number), "Labelled One", memory_bytes))


def instance(number: int, of: str, memory_bytes: int = MIB) -> Gpu:
    """Return device ``number``, an instance of GPU ``of``: siblings share its faults, and it cannot be reset."""
    device = Device(f"MIG-{number:04d}", f"{of}:{number}", "Labelled One", memory_bytes, parent=of, profile="1g")
    return Gpu(device, reset_missing="it is an instance, and only its whole GPU can be reset")


@dataclass(slots=True, eq=False)
class Proc:
    """A process.

    Attributes:
        pod: UID of its pod; None for a process of the host.
        container: one start of a container: a restart is another.
        label: what it leaves on memory that it writes.
        mounted: ids of the devices that it could open.
        holds: ids of the devices that it has open.
        first: whether it is the first process of its container.
        sandbox: whether it is the pod's sandbox, which existed before any container.
        killable: whether a kill ends it (it does not in an uninterruptible sleep).
        command: its command line.
        agent: what it is to the policy, if it belongs to the node's infrastructure.
        memory_bytes: memory of a device that the driver attributes to it.
    """

    pid: int
    started: int
    pod: str | None
    container: str
    label: str
    mounted: frozenset[str] = frozenset()
    holds: set[str] = field(default_factory=set)
    first: bool = False
    sandbox: bool = False
    killable: bool = True
    alive: bool = True
    command: str = "python train.py"
    agent: HolderKind | None = None
    memory_bytes: int = 0

    @property
    def process(self) -> Process:
        return Process(self.pid, self.started, self.container)


class ProcessTable:
    """All devices and all processes of the node.

    Args:
        opened: called whenever a process opens a device, before it holds it.

    Attributes:
        has_cgroups: whether containers are identified by cgroups, whose removal is observed.
        has_job_cgroups: whether Slurm keeps its jobs in cgroups.
        removed_pods: UIDs of pods that the kubelet has removed; their own cgroups end with their last process.
        watch_error: why no pod's end can be watched from now on; empty while they can.
    """

    def __init__(self, gpus: list[Gpu], opened: Callable[[Proc, Gpu], None]) -> None:
        self.gpus = {each.id: each for each in gpus}
        self.procs: dict[int, Proc] = {}
        self.has_cgroups = True
        self.has_job_cgroups = True
        self.removed_pods: set[str] = set()
        self.watch_error = ""
        self._opened = opened
        self._next_pid = 1000
        self._created: dict[str, list[tuple[asyncio.Future[str], set[str]]]] = {}
        self._ended: dict[str, list[asyncio.Future[None]]] = {}

    def start(self, pod: str | None, container: str, label: str, **facts: object) -> Proc:
        """Start a process; it has nothing open yet."""
        self._next_pid += 1
        for future, known in self._created.pop(pod or "", []):
            if container in known:
                self._created.setdefault(pod or "", []).append((future, known))
            elif not future.done():
                future.set_result(container)
        proc = Proc(self._next_pid, self._next_pid * 10, pod, container, label, **facts)  # type: ignore[arg-type]
        self.procs[proc.pid] = proc
        return proc

    def first_container(self, pod: str) -> asyncio.Future[str]:
        """Return a future with the name of the first container that appears in ``pod`` from now on."""
        known = {proc.container for proc in self.procs.values() if proc.pod == pod}
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._created.setdefault(pod, []).append((future, known))
        return future

    def next_end(self, pod: str) -> asyncio.Future[None]:
        """Return a future that is done when a process of ``pod`` ends from now on; never where it has no cgroup yet."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if any(proc.pod == pod for proc in self.procs.values()):
            self._ended.setdefault(pod, []).append(future)
        return future

    def fork(self, parent: Proc) -> Proc:
        """Fork a child of ``parent``: same container, same open devices."""
        child = self.start(parent.pod, parent.container, parent.label, mounted=parent.mounted)
        child.holds = set(parent.holds)
        return child

    def end(self, proc: Proc) -> bool:
        """Kill ``proc``; return False when it cannot be killed."""
        if not proc.killable:
            return False
        proc.alive = False
        proc.holds.clear()
        for future in self._ended.pop(proc.pod or "", []):
            if not future.done():
                future.set_result(None)
        return True

    def living(self, pod: str | None = None) -> Iterator[Proc]:
        """Yield every living process, or those of one pod."""
        return (proc for proc in list(self.procs.values()) if proc.alive and pod in (None, proc.pod))

    def kin(self, device: str) -> list[Gpu]:
        """Return the device, and the other instances of its GPU: they share its faults."""
        mine = self.gpus[device]
        parent = mine.device.parent
        return [
            mine,
            *(each for each in self.gpus.values() if parent and each is not mine and each.device.parent == parent),
        ]

    def holders(self, device: str) -> list[Proc]:
        return [proc for proc in self.living() if device in proc.holds]

    def blockers(self, device: str) -> list[Proc]:
        """Return the holders beside which the device cannot be cleared: all but allowed infrastructure."""
        return [proc for proc in self.holders(device) if proc.agent is not HolderKind.INFRASTRUCTURE]

    def open(self, proc: Proc, device: str) -> None:
        assert proc.alive
        assert proc.pod is None or device in proc.mounted
        self._opened(proc, self.gpus[device])
        proc.holds.add(device)

    def write(self, proc: Proc, device: str) -> None:
        """Fill the memory with the label of ``proc``."""
        assert proc.alive
        assert device in proc.holds
        memory = self.gpus[device]
        memory.cells = [proc.label] * CELLS

    def read(self, proc: Proc, device: str) -> list[str]:
        """Return the memory's content as ``proc`` reads it."""
        assert proc.alive
        assert device in proc.holds
        return list(self.gpus[device].cells)
