"""One piece of work on one device: behind a fence, in a child that is killed at its deadline, with no trace left of either.

Promise: whatever happens — an error, the deadline, a cancelled caller, a killed service — the fence comes down when the
child is dead and never before, at the latest when somebody next asks about the device. A fence that was put up is looked
at once more when the work is done: it is claimed only if it still stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.orphans import end_holder
from scrubber.adapters.children.process import Child, ChildDied
from scrubber.adapters.cuda.fence import Fence, Gpu
from scrubber.adapters.cuda.programs import Programs, make_private
from scrubber.adapters.locks import lock_holder, lock_path
from scrubber.adapters.patience import patience
from scrubber.domain.device import Device
from scrubber.domain.errors import Away, Held, ScrubberError, Stuck, Unreadable

__all__ = ["Done", "Work", "Workplace"]

_LEAVING_SECONDS = 2.0
"""How long a child that has reported gets to close its context: a driver likes that better than a kill."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to do.

    Attributes:
        module: the program; see :mod:`scrubber.adapters.cuda.programs`.
        name: what it is called in sentences: ``eraser``, ``diagnostic``.
        order: what it is told; ``lock``, the path of the device's lock, and ``fenced`` are added to it.
        listen: talks to the child until it has reported, and answers the report.
        deadline: seconds, from the order to the report.
    """

    module: str
    name: str
    order: Message
    listen: Callable[[Child], Awaitable[Message]]
    deadline: float


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it.

    Attributes:
        report: the child's.
        fenced: whether a fence was put up. A device without a compute mode of its own has none.
        fence_broken: somebody took it down meanwhile, so others may have been at work on the device as well.
    """

    report: Message
    fenced: bool
    fence_broken: bool


class Workplace:
    """Shared by everybody who works on these devices with CUDA.

    Args:
        locks: the directory of the devices' lock files; made when it is not there.
    """

    def __init__(self, programs: Programs, gpu: Gpu, locks: Path) -> None:
        self.gpu = gpu
        self._programs = programs
        self._locks = locks
        self._fence = Fence(gpu, locks)
        self._at_work: set[str] = set()

    async def do(self, device: Device, work: Work) -> Done:
        """Do ``work`` on ``device``. When cancelled, its end is waited for.

        Raises:
            Held: somebody else has a context on it, or an earlier program of ours still works on it.
            Stuck: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died, or the device failed.
            Away: no child can be had, or no note be written, and no memory was touched; or the zygote died and took the
                child with it, which no device is to blame for.
            ScrubberError: as the driver answers questions around the work.
        """
        if device.id in self._at_work:
            raise Away(f"Device {device.index} is still being cleared up after an earlier piece of work.")
        make_private(self._locks)
        if (holder := lock_holder(self._lock(device))) is not None:
            raise Held(f"Process {holder} still works on device {device.index}, and its fence stands with it.")
        self._at_work.add(device.id)
        children: list[Child] = []
        try:
            done = await self._within(device, work, children)
        finally:
            gone, left = await self._clear_up(device, children)
        if not gone:
            raise Stuck(f"The {work.name} of device {device.index} has reported and does not end; it was abandoned.")
        if left is not None:
            raise left
        return done

    async def orphan(self, device: Device) -> int | None:
        """See :meth:`scrubber.ports.Eraser.orphan`. The fence that a dead one left is taken down."""
        holder = lock_holder(self._lock(device))
        if holder is None and device.id not in self._at_work:
            with suppress(ScrubberError):  # its note stays, and the next piece of work begins with it
                await self._fence.take_down(device)
        return holder

    async def end_orphan(self, device: Device, deadline: float) -> bool:
        """See :meth:`scrubber.ports.Eraser.end_orphan`."""
        ended = await end_holder(self._lock(device), deadline)
        await self.orphan(device)
        return ended

    async def _within(self, device: Device, work: Work, children: list[Child]) -> Done:
        """Everything up to the report. ``children`` gets the child, as soon as there is one."""
        await self._fence.take_down(device)
        fenced = await self._fence.put_up(device)
        child = await self._programs.start(work.module, device)
        children.append(child)
        try:
            async with patience(work.deadline):  # a node that is slow to start a child takes nothing of it
                await child.send({**work.order, "lock": str(self._lock(device)), "fenced": fenced})
                report = await work.listen(child)
        except TimeoutError as error:
            how = "it was killed" if await child.kill() else "it does not die and was abandoned"
            raise Stuck(
                f"The {work.name} of device {device.index} did not end within {work.deadline:g} s; {how}."
            ) from error
        except ChildDied as died:
            if await self._programs.died_with_zygote(child):
                raise Away(
                    f"The {work.name} of device {device.index} was ended with the zygote that it came from; "
                    "the kernel's log says whether memory was short. It is tried again."
                ) from died
            raise Unreadable(f"The {work.name} of device {device.index} broke off: {died}") from died
        broken = fenced and not await self._fence.stands(device)
        await child.wait(_LEAVING_SECONDS)
        return Done(report, fenced, broken)

    async def _clear_up(self, device: Device, children: list[Child]) -> tuple[bool, ScrubberError | None]:
        """End the child, then the fence; to the end, also when the caller does not wait for it."""

        async def clear_up() -> tuple[bool, ScrubberError | None]:
            try:
                for child in children:
                    if not await child.kill():
                        return False, None  # it may still be at work, and its fence stands with it
                await self._fence.take_down(device)
            except ScrubberError as error:
                return True, error
            finally:
                self._at_work.discard(device.id)
            return True, None

        task = asyncio.create_task(clear_up())
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as stop:
                cancelled = stop
        if cancelled is not None:
            raise cancelled
        return task.result()

    def _lock(self, device: Device) -> Path:
        return lock_path(self._locks, device.id)
