"""One job on one device: behind a fence, in a child that is killed at its deadline, with both cleaned up afterwards.

Promise: in every case (an error, the deadline, a cancelled caller, a killed service) the fence is disabled when the
child is dead and never before, at the latest when :meth:`GpuJobRunner.find_orphan` is next called or a job next runs. A
fence is checked again when the job is done: one that is no longer enabled is reported as broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
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
"""Seconds that a child that has reported gets to close its context: the driver handles that better than a kill."""


@dataclass(frozen=True, slots=True)
class GpuJob:
    """A job to run on a device.

    Attributes:
        module: the program; see :mod:`scrubber.adapters.cuda.programs`.
        name: its name in messages: ``eraser``, ``diagnostic``.
        request: the request to the child; ``lock``, the path of the device's lock, and ``fenced`` are added to it.
        read_report: reads messages of the child until it has reported, and returns the report.
        deadline: seconds from the request to the report.
    """

    module: str
    name: str
    request: Message
    read_report: Callable[[Child], Awaitable[Message]]
    deadline: float


@dataclass(frozen=True, slots=True)
class GpuJobResult:
    """The result of a job.

    Attributes:
        report: the child's report.
        fenced: whether the device was fenced. A device without a compute mode of its own is not.
        fence_broken: whether the fence was disabled meanwhile, so that other processes may have used the device as
            well.
    """

    report: Message
    fenced: bool
    fence_broken: bool


class GpuJobRunner:
    """Runs all CUDA jobs on these devices; shared by every component that needs one.

    Args:
        locks: directory of the devices' lock files; created if it does not exist.
        accepting_work: lets devices in a confidential-computing mode accept work while its context is open; raises
            Unavailable where it cannot.
    """

    def __init__(
        self,
        programs: ProgramLauncher,
        gpu: GpuControl,
        locks: Path,
        *,
        accepting_work: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.gpu = gpu
        self._programs = programs
        self._locks = locks
        self._accepting_work = accepting_work
        self._fence = ComputeModeFence(gpu, locks)
        self._busy: set[str] = set()

    async def run(self, device: Device, job: GpuJob) -> GpuJobResult:
        """Run ``job`` on ``device``. A cancelled call waits for the end of the job.

        Raises:
            DeviceBusy: another process has a context on it, or an earlier job of this service still works on it.
            DriverTimeout: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died, or the device failed.
            Unavailable: no child can be started or no record written, and no memory was touched; or the zygote died and
                took the child with it, which is not the fault of any device.
            ScrubberError: from the driver calls before and after the job.
        """
        if device.id in self._busy:
            raise Unavailable(f"Device {device.index} is still being cleaned up after an earlier job.")
        make_private_directory(self._locks)
        if (holder := lock_holder(self._lock(device))) is not None:
            raise DeviceBusy(f"Process {holder} still works on device {device.index}, and its fence is in place.")
        self._busy.add(device.id)
        children: list[Child] = []
        try:
            async with self._accepting_work():
                try:
                    done = await self._run_fenced(device, job, children)
                finally:
                    gone, left = await self._clean_up(device, children)
        finally:
            self._busy.discard(device.id)
        if not gone:
            raise DriverTimeout(
                f"The {job.name} of device {device.index} has reported and does not exit; it was abandoned."
            )
        if left is not None:
            raise left
        return done

    async def find_orphan(self, device: Device) -> int | None:
        """Implement :meth:`scrubber.ports.Eraser.find_orphan`, and disable the fence that a dead eraser left."""
        holder = lock_holder(self._lock(device))
        if holder is None and device.id not in self._busy:
            with suppress(ScrubberError):  # the record stays, and the next job starts with it
                await self._fence.disable(device)
        return holder

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        """Implement :meth:`scrubber.ports.Eraser.terminate_orphan`."""
        ended = await terminate_lock_holder(self._lock(device), deadline)
        await self.find_orphan(device)
        return ended

    async def _run_fenced(self, device: Device, work: GpuJob, children: list[Child]) -> GpuJobResult:
        """Do everything up to the report. ``children`` receives the child, as soon as there is one."""
        await self._fence.disable(device)
        fenced = await self._fence.enable(device)
        child = await self._programs.start(work.module, device)
        children.append(child)
        try:
            async with stall_tolerant_timeout(work.deadline):  # a node that is slow to start a child uses up none of it
                await child.send({**work.request, "lock": str(self._lock(device)), "fenced": fenced})
                report = await work.read_report(child)
        except TimeoutError as error:
            how = "it was killed" if await child.kill() else "it could not be killed and was abandoned"
            raise DriverTimeout(
                f"The {work.name} of device {device.index} did not finish within {work.deadline:g} s; {how}."
            ) from error
        except ChildDied as died:
            if await self._programs.died_with_zygote(child):
                raise Unavailable(
                    f"The {work.name} of device {device.index} was killed together with its zygote; the "
                    "kernel log shows whether memory was short. This is retried."
                ) from died
            raise Unreadable(f"The {work.name} of device {device.index} gave no valid report: {died}") from died
        broken = fenced and not await self._fence.is_enabled(device)
        await child.wait(_EXIT_TIMEOUT)
        return GpuJobResult(report, fenced, broken)

    async def _clean_up(self, device: Device, children: list[Child]) -> tuple[bool, ScrubberError | None]:
        """End the child, then disable the fence; runs to its end even if the caller is cancelled."""

        async def clear_up() -> tuple[bool, ScrubberError | None]:
            try:
                for child in children:
                    if not await child.kill():
                        return False, None  # it may still be at work, so its fence stays enabled
                await self._fence.disable(device)
            except ScrubberError as error:
                return True, error
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
