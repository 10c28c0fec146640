"""Cost of the daemons at rest: CPU time, and memory by proportional set size (PSS).

PSS counts each shared page proportionally, so the sum over all processes is correct. Child processes count for the
daemon that started them, and are listed separately.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Amount
from bench.node import BenchNode
from scrubber.adapters.nvidia.event_watch import EVENTS_MODULE
from scrubber.emulator.playground import Playground

__all__ = [
    "at_rest",
    "cpu_of_service",
    "cpu_seconds",
    "daemon_processes",
    "event_children",
    "per_call",
    "pss",
    "thread_seconds",
    "written_by_service",
]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Family:
    """A daemon and its descendants."""

    name: str
    daemon: int

    @property
    def children(self) -> list[int]:
        found, waiting = [], [self.daemon]
        while waiting:
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                below = [int(pid) for pid in (task / "children").read_text().split()]
                found += below
                waiting += below
        return found

    def cpu_of_each(self) -> dict[int, float]:
        return {pid: cpu_seconds(pid) for pid in (self.daemon, *self.children)}


async def at_rest(stage: Playground, *, seconds: float, name: str, title: str) -> list[Amount]:
    """Measure CPU time over ``seconds`` and PSS at the end, by process and in total."""
    families = _families(stage)
    began = time.monotonic()
    before = [family.cpu_of_each() for family in families]
    await asyncio.sleep(seconds)
    after = [family.cpu_of_each() for family in families]
    passed = time.monotonic() - began

    amounts: list[Amount] = []
    for family, first, last in zip(families, before, after, strict=True):
        for who, pids in ((family.name, {family.daemon}), (f"{family.name}'s children", last.keys() - {family.daemon})):
            if pids:
                slug = who.replace("'s ", "-")
                used = sum(last[pid] - first.get(pid, 0.0) for pid in pids)
                amounts.append(
                    Amount(f"{name}.cpu.{slug}", f"CPU of {who}, {title}", 100 * used / passed, "% of a core")
                )
                amounts.append(Amount(f"{name}.pss.{slug}", f"PSS of {who}, {title}", pss(pids), "MB"))
    for kind, unit in (("cpu", "% of a core"), ("pss", "MB")):
        value = sum(each.value for each in amounts if each.name.startswith(f"{name}.{kind}."))
        amounts.append(Amount(f"{name}.{kind}", f"{kind.upper()} of all, {title}", value, unit))
    return amounts


async def per_call(
    node: BenchNode, call: Callable[[int], Awaitable[object]], *, calls: int, every: float, name: str, title: str
) -> list[Amount]:
    """Measure the CPU time of each daemon and its children for one ``call`` and the ``every`` seconds before it.

    ``call`` gets its number. Other load on the machine lengthens a call but hardly changes its CPU time, which is
    therefore the figure to use on a busy machine.
    """
    families = _families(node.stage)
    before = [family.cpu_of_each() for family in families]
    for number in range(calls):
        await asyncio.sleep(every)
        await call(number)
    after = [family.cpu_of_each() for family in families]
    return [
        Amount(
            f"{name}.{family.name}",
            f"CPU of the {family.name} and its children per {title}",
            1000 * sum(seconds - first.get(pid, 0.0) for pid, seconds in last.items()) / calls,
            "ms",
        )
        for family, first, last in zip(families, before, after, strict=True)
    ]


def event_children(node: BenchNode) -> list[Amount]:
    """Return the number of the service's children that wait for events of NVIDIA GPUs, and their memory."""
    service, _ = _families(node.stage)
    pids = [pid for pid in service.children if EVENTS_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    title = f"{len(node.devices)} GPUs, stand-in for NVIDIA's driver"
    return [
        Amount("event-children", f"processes that wait for events, {title}", len(pids), ""),
        Amount("event-children.pss", f"PSS of the processes that wait for events, {title}", pss(pids), "MB"),
    ]


def daemon_processes(stage: Playground) -> dict[str, list[int]]:
    """Return the PIDs of each daemon and its children, by the daemon's name."""
    return {family.name: [family.daemon, *family.children] for family in _families(stage)}


def cpu_of_service(node: BenchNode) -> float:
    """Return the CPU time in seconds that the service and its children have used so far."""
    service, _ = _families(node.stage)
    return sum(service.cpu_of_each().values())


def written_by_service(node: BenchNode) -> int:
    """Return the bytes that the service itself has passed to ``write`` so far: ledger and log (proc(5), ``wchar``)."""
    lines = Path(f"/proc/{node.stage.service.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _families(stage: Playground) -> tuple[_Family, _Family]:
    other = "plugin" if stage.cluster is None else "driver"
    return _Family("service", stage.service.pid), _Family(other, stage.plugin.pid)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all threads and dead children, user and system (proc(5): fields 14-17)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


def thread_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of each living thread of ``pids``, to the nanosecond: for short periods of little work."""
    found = {}
    for pid in pids:
        with suppress(OSError):  # a process or a thread that has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def pss(pids: Iterable[int]) -> float:
    """Return the PSS in MB (10^6 bytes)."""
    kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                kib += int(line.split()[1])
    return kib * 1024 / 1e6
