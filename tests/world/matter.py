"""Devices and processes: memory whose bytes say who wrote them, and processes that open it.

A device's memory is a row of cells. A cell is empty (zeros) or carries the label of the container that wrote it, so
"somebody reads what another left" is something that can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scrubber.domain.assignment import Process
from scrubber.domain.device import Device

__all__ = ["CELLS", "MIB", "Gpu", "Matter", "Proc", "gpu"]

CELLS = 4
MIB = 1024 * 1024
DEFAULTS = {"compute-mode": "default", "power-limit-watts": "400"}


@dataclass(slots=True, eq=False)
class Gpu:
    """One device, its bytes, its settings and its faults.

    Attributes:
        cells: who wrote each part of the memory; empty for zeros.
        xids: standing conditions.
        stuck: questions to the driver are not answered.
        lost: off the bus.
        listed: whether the inventory knows it.
        wont_clear: one cell keeps what is in it, whoever writes.
        slow: factor on the time that clearing takes.
        ghost: held by something that has no process.
        reset_fails: a sentence, or None when resets work.
        reset_missing: why the device cannot be reset at all, or None.
    """

    device: Device
    cells: list[str] = field(default_factory=lambda: [""] * CELLS)
    settings: dict[str, str] = field(default_factory=lambda: dict(DEFAULTS))
    xids: dict[int, int] = field(default_factory=dict)
    stuck: bool = False
    lost: bool = False
    listed: bool = True
    wont_clear: bool = False
    slow: float = 1.0
    ghost: bool = False
    reset_fails: str | None = None
    reset_missing: str | None = None
    celsius: int = 40
    resets: int = 0

    @property
    def id(self) -> str:
        return self.device.id

    def mend(self) -> None:
        """Take every fault away."""
        self.xids.clear()
        self.stuck = self.lost = self.wont_clear = self.ghost = False
        self.slow, self.celsius = 1.0, 40
        self.reset_fails = self.reset_missing = None


def gpu(number: int, memory_bytes: int = MIB) -> Gpu:
    """Device number ``number`` of the node; ids are in the order of the numbers."""
    return Gpu(Device(f"GPU-{number:04d}", str(number), "Labelled One", memory_bytes))


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
        sandbox: whether it is the pod's sandbox, which was there before any container.
        killable: whether a kill ends it (it does not in an uninterruptible sleep).
        command: what it calls itself.
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

    @property
    def process(self) -> Process:
        return Process(self.pid, self.started, self.container)


class Matter:
    """All devices and all processes of the node.

    Args:
        opened: called whenever a process opens a device, before it holds it.
    """

    def __init__(self, gpus: list[Gpu], opened: Callable[[Proc, Gpu], None]) -> None:
        self.gpus = {each.id: each for each in gpus}
        self.procs: dict[int, Proc] = {}
        self._opened = opened
        self._next_pid = 1000

    def start(self, pod: str | None, container: str, label: str, **facts: object) -> Proc:
        """Start a process; it has nothing open yet."""
        self._next_pid += 1
        proc = Proc(self._next_pid, self._next_pid * 10, pod, container, label, **facts)  # type: ignore[arg-type]
        self.procs[proc.pid] = proc
        return proc

    def fork(self, parent: Proc) -> Proc:
        """A child of ``parent``: same container, same open devices."""
        child = self.start(parent.pod, parent.container, parent.label, mounted=parent.mounted)
        child.holds = set(parent.holds)
        return child

    def end(self, proc: Proc) -> bool:
        """Kill ``proc``; False when it cannot be ended."""
        if not proc.killable:
            return False
        proc.alive = False
        proc.holds.clear()
        return True

    def living(self, pod: str | None = None) -> Iterator[Proc]:
        """Every living process, or those of one pod."""
        return (proc for proc in list(self.procs.values()) if proc.alive and pod in (None, proc.pod))

    def holders(self, device: str) -> list[Proc]:
        return [proc for proc in self.living() if device in proc.holds]

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
        """What ``proc`` finds in the memory."""
        assert proc.alive
        assert device in proc.holds
        return list(self.gpus[device].cells)
