"""Erasers: separate processes that continue when the service that started them is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DriverTimeout, Unreadable
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest, OnChipReport
from tests.simulation.life import Life, start_outside_service
from tests.simulation.process_table import CELLS, Gpu, ProcessTable

__all__ = ["Erasers", "Erasing", "SimulatedEraser"]

CELL_SECONDS = 0.1
"""The time to write one cell, and the same again to read it back."""


@dataclass(slots=True, eq=False)
class Erasing:
    """One running eraser: it has the device's lock until ``task`` is done.

    Attributes:
        killable: whether a kill ends it.
        fence_broken: a process opened the device meanwhile, so it stops at the next cell.
    """

    pid: int
    gpu: Gpu
    killable: bool
    task: asyncio.Task[EraseReport] = field(init=False)
    fence_broken: bool = False

    async def work(self, at_work: Callable[[Erasing], None], progress: Callable[[EraseProgress], None]) -> EraseReport:
        memory, part = self.gpu, self.gpu.device.memory_bytes // CELLS
        total = part * CELLS
        residue = sum(part for cell in memory.cells if cell)
        cleared = verified = failed = 0
        for phase in ("clear", "verify"):
            for index in range(CELLS):
                await asyncio.sleep(CELL_SECONDS * memory.slow)
                at_work(self)
                if self.fence_broken:
                    return EraseReport(total, cleared, verified, residue, 0, fence_broken=True)
                if phase == "clear":
                    if not (memory.wont_clear and index == 0):
                        memory.cells[index] = ""
                    cleared += part
                elif memory.cells[index] or (memory.wont_clear and index == 0):
                    failed += part
                else:
                    verified += part
                progress(EraseProgress(phase, (index + 1) * part, total))
        flaws = memory.flaws
        if "eraser-dies" in flaws:
            raise Unreadable("the eraser died")
        return EraseReport(
            total,
            cleared - (part if "memory-short" in flaws else 0),
            verified,
            residue,
            failed,
            seconds_by_phase=(("clear", CELL_SECONDS),),
            unreleased_bytes=part if "memory-kept" in flaws else 0,
            on_chip=OnChipReport(8, 7, 1024, 1024, 0, 0) if "on-chip" in flaws else None,
        )


class Erasers:
    """All erasers of the node.

    Args:
        starts: called before one starts.
        at_work: called before each cell that one touches.

    Attributes:
        unkillable: whether those that start from now on survive a kill.
    """

    def __init__(
        self, process_table: ProcessTable, starts: Callable[[Gpu], None], at_work: Callable[[Erasing], None]
    ) -> None:
        self._process_table = process_table
        self._starts = starts
        self._at_work = at_work
        self.running: dict[str, Erasing] = {}
        self.started = 0
        self.unkillable = False

    def start(self, device: str, progress: Callable[[EraseProgress], None]) -> Erasing:
        gpu = self._process_table.gpus[device]
        self._starts(gpu)
        self.started += 1
        erasing = Erasing(100_000 + self.started, gpu, killable=not self.unkillable)
        self.running[device] = erasing

        def gone(_: asyncio.Task[EraseReport]) -> None:
            if self.running.get(device) is erasing:
                del self.running[device]

        erasing.task = start_outside_service(erasing.work(self._at_work, progress), f"eraser {erasing.pid}")
        erasing.task.add_done_callback(gone)
        return erasing

    async def kill(self, erasing: Erasing) -> bool:
        """Kill it; return whether it is gone."""
        if not erasing.killable:
            return False
        erasing.task.cancel()
        await asyncio.wait({erasing.task})
        await asyncio.sleep(0)  # its lock is free once it is gone
        return True


class SimulatedEraser:
    """:class:`scrubber.ports.Eraser` for one service."""

    def __init__(self, life: Life, process_table: ProcessTable, erasers: Erasers) -> None:
        self._life = life
        self._process_table = process_table
        self._erasers = erasers
        self._mine: set[Erasing] = set()

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        self._life.check()
        if self._process_table.blockers(device.id):
            raise DeviceBusy("a process opened the device before the eraser could fence it")

        def report(update: EraseProgress) -> None:
            if self._life.alive:
                progress(update)

        erasing = self._erasers.start(device.id, report)
        self._mine.add(erasing)
        try:
            done, _ = await asyncio.wait({erasing.task}, timeout=request.deadline)
        except asyncio.CancelledError:
            self._life.check()
            await self._erasers.kill(erasing)
            raise
        finally:
            self._mine.discard(erasing)
        self._life.check()
        if not done:
            gone = await self._erasers.kill(erasing)
            raise DriverTimeout("it was killed" if gone else "it cannot be killed")
        if erasing.task.cancelled():
            raise Unreadable("the eraser died")
        return erasing.task.result()

    async def find_orphan(self, device: Device) -> int | None:
        self._life.check()
        erasing = self._erasers.running.get(device.id)
        return None if erasing is None or erasing in self._mine else erasing.pid

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        self._life.check()
        erasing = self._erasers.running.get(device.id)
        if erasing is None:
            return True
        await asyncio.wait({erasing.task}, timeout=deadline)
        self._life.check()
        return erasing.task.done() or await self._erasers.kill(erasing)
