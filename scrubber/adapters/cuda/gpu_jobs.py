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
from scrubber.adapters.children.orphans import terminate_lock_holder
from scrubber.adapters.children.process import Child, ChildDied
from scrubber.adapters.cuda.fence import ComputeModeFence, GpuControl
from scrubber.adapters.cuda.programs import ProgramLauncher, make_private_directory
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.locks import lock_holder, lock_path
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DriverTimeout, ScrubberError, Unavailable, Unreadable

__all__ = ["GpuJob", "GpuJobResult", "GpuJobRunner"]

_EXIT_TIMEOUT = 2.0
"""How long a child that has reported gets to close its context: a driver likes that better than a kill."""


@dataclass(frozen=True, slots=True)
class GpuJob:
    """What to do.

    Attributes:
        module: the program; see :mod:`scrubber.adapters.cuda.programs`.
        name: what it is called in sentences: ``eraser``, ``diagnostic``.
        request: what it is told; ``lock``, the path of the device's lock, and ``fenced`` are added to it.
        read_report: talks to the child until it has reported, and answers the report.
        deadline: seconds, from the order to the report.
    """

    module: str
    name: str
    request: Message
    read_report: Callable[[Child], Awaitable[Message]]
    deadline: float


@dataclass(frozen=True, slots=True)
class GpuJobResult:
    """What came of it.

    Attributes:
        report: the child's.
        fenced: whether a fence was put up. A device without a compute mode of its own has none.
        fence_broken: somebody took it down meanwhile, so others may have been at work on the device as well.
    """

    report: Message
    fenced: bool
    fence_broken: bool


class GpuJobRunner:
    """Shared by everybody who works on these devices with CUDA.

    Args:
        locks: the directory of the devices' lock files; made when it is not there.
    """

    def __init__(self, programs: ProgramLauncher, gpu: GpuControl, locks: Path) -> None:
        self.gpu = gpu
        self._programs = programs
        self._locks = locks
        self._fence = ComputeModeFence(gpu, locks)
        self._busy: set[str] = set()

    async def run(self, device: Device, job: GpuJob) -> GpuJobResult:
        """Do ``job`` on ``device``. When cancelled, its end is waited for.

        Raises:
            DeviceBusy: somebody else has a context on it, or an earlier program of ours still works on it.
            DriverTimeout: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died, or the device failed.
            Unavailable: no child can be had, or no note be written, and no memory was touched; or the zygote died and took
                the child with it, which no device is to blame for.
            ScrubberError: as the driver answers questions around the work.
        """
        if device.id in self._busy:
            raise Unavailable(f"Device {device.index} is still being cleared up after an earlier piece of work.")
        make_private_directory(self._locks)
        if (holder := lock_holder(self._lock(device))) is not None:
            raise DeviceBusy(f"Process {holder} still works on device {device.index}, and its fence stands with it.")
        self._busy.add(device.id)
        children: list[Child] = []
        try:
            done = await self._run_fenced(device, job, children)
        finally:
            gone, left = await self._clean_up(device, children)
        if not gone:
            raise DriverTimeout(
                f"The {job.name} of device {device.index} has reported and does not end; it was abandoned."
            )
        if left is not None:
            raise left
        return done

    async def find_orphan(self, device: Device) -> int | None:
        """See :meth:`scrubber.ports.Eraser.find_orphan`. The fence that a dead one left is taken down."""
        holder = lock_holder(self._lock(device))
        if holder is None and device.id not in self._busy:
            with suppress(ScrubberError):  # its note stays, and the next piece of work begins with it
                await self._fence.disable(device)
        return holder

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        """See :meth:`scrubber.ports.Eraser.terminate_orphan`."""
        ended = await terminate_lock_holder(self._lock(device), deadline)
        await self.find_orphan(device)
        return ended

    async def _run_fenced(self, device: Device, work: GpuJob, children: list[Child]) -> GpuJobResult:
        """Everything up to the report. ``children`` gets the child, as soon as there is one."""
        await self._fence.disable(device)
        fenced = await self._fence.enable(device)
        child = await self._programs.start(work.module, device)
        children.append(child)
        try:
            async with stall_tolerant_timeout(
                work.deadline
            ):  # a node that is slow to start a child takes nothing of it
                await child.send({**work.request, "lock": str(self._lock(device)), "fenced": fenced})
                report = await work.read_report(child)
        except TimeoutError as error:
            how = "it was killed" if await child.kill() else "it does not die and was abandoned"
            raise DriverTimeout(
                f"The {work.name} of device {device.index} did not end within {work.deadline:g} s; {how}."
            ) from error
        except ChildDied as died:
            if await self._programs.died_with_zygote(child):
                raise Unavailable(
                    f"The {work.name} of device {device.index} was ended with the zygote that it came from; "
                    "the kernel's log says whether memory was short. It is tried again."
                ) from died
            raise Unreadable(f"The {work.name} of device {device.index} broke off: {died}") from died
        broken = fenced and not await self._fence.is_enabled(device)
        await child.wait(_EXIT_TIMEOUT)
        return GpuJobResult(report, fenced, broken)

    async def _clean_up(self, device: Device, children: list[Child]) -> tuple[bool, ScrubberError | None]:
        """End the child, then the fence; to the end, also when the caller does not wait for it."""

        async def clear_up() -> tuple[bool, ScrubberError | None]:
            try:
                for child in children:
                    if not await child.kill():
                        return False, None  # it may still be at work, and its fence stands with it
                await self._fence.disable(device)
            except ScrubberError as error:
                return True, error
            finally:
                self._busy.discard(device.id)
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
