"""One job on one device: in a child that sees this device alone, and is killed at its deadline.

AMD's driver has no mode that keeps other processes from opening a GPU, so nothing fences the device meanwhile: other
users are looked for before and after, and their presence breaks the result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.amd.holders import AmdHolders
from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.amd.requests import Trait, device_request, trait
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.orphans import terminate_lock_holder
from scrubber.adapters.children.process import Child, ChildDied, Children
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.locks import lock_holder, lock_path
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DriverTimeout, Unreadable

__all__ = ["DIAGNOSIS_MODULE", "ERASER_MODULE", "AmdJob", "AmdJobRunner"]

ERASER_MODULE = "scrubber.adapters.amd.eraser"
DIAGNOSIS_MODULE = "scrubber.adapters.amd.diagnosis"

_NICE = 19
_EXIT_TIMEOUT = 5.0
"""Seconds that a child that has reported gets to exit by itself: the driver clears its memory meanwhile."""


@dataclass(frozen=True, slots=True)
class AmdJob:
    """A job to run on a device.

    Attributes:
        name: in messages: ``eraser``, ``diagnostic``.
        request: the request to the child; what describes the device is added to it.
        read_report: reads messages of the child until it has reported, and returns the report.
        deadline: seconds from the request to the report.
    """

    module: str
    name: str
    request: Message
    read_report: Callable[[Child], Awaitable[Message]]
    deadline: float


class AmdJobRunner:
    """Runs all jobs on the devices of a node.

    Args:
        locks: directory of the devices' lock files.
        release_timeout: seconds to wait, after a child has ended, until the driver has freed its memory.
    """

    def __init__(
        self, paths: AmdPaths, children: Children, holders: AmdHolders, locks: Path, *, release_timeout: float = 10.0
    ) -> None:
        self._paths = paths
        self._children = children
        self._holders = holders
        self._locks = locks
        self._release_timeout = release_timeout

    async def run(self, device: Device, job: AmdJob) -> tuple[Message, int, bool]:
        """Run ``job``; return its report, bytes that stayed in use after it, and whether another process was found.

        Raises:
            DeviceBusy: a process holds the device, or an earlier job of this service still works on it.
            DriverTimeout: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died, or the device failed.
            Unavailable: no child can be started, or ROCm or the kernels for this GPU are missing.
        """
        if (holder := lock_holder(self._lock(device))) is not None:
            raise DeviceBusy(f"Process {holder} of this service still works on device {device.index}.")
        if await self._holders.is_held(device):
            raise DeviceBusy(f"A process holds device {device.index}, or memory of it is still in use.")
        child = await self._children.start(
            job.module, device=device.id, nice=_NICE, environment=self._environment(device)
        )
        try:
            async with stall_tolerant_timeout(job.deadline):
                await child.send(self._request(device, job.request))
                report = await job.read_report(child)
            shared_use = await self._has_other_user(device)
            await child.wait(_EXIT_TIMEOUT)
        except TimeoutError as error:
            how = "it was killed" if await child.kill() else "it could not be killed and was abandoned"
            raise DriverTimeout(
                f"The {job.name} of device {device.index} did not finish within {job.deadline:g} s; {how}."
            ) from error
        except ChildDied as died:
            raise Unreadable(f"The {job.name} of device {device.index} gave no valid report: {died}") from died
        finally:
            gone = await child.kill()
        if not gone:
            raise DriverTimeout(
                f"The {job.name} of device {device.index} has reported and does not exit; it was abandoned."
            )
        return report, await self._holders.wait_until_idle(device, self._release_timeout), shared_use

    async def find_orphan(self, device: Device) -> int | None:
        """Implement :meth:`scrubber.ports.Eraser.find_orphan`."""
        return lock_holder(self._lock(device))

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        """Implement :meth:`scrubber.ports.Eraser.terminate_orphan`."""
        return await terminate_lock_holder(self._lock(device), deadline)

    async def _has_other_user(self, device: Device) -> bool:
        """Whether a process that is not this service's has a compute context on the device."""
        return bool(await self._holders.list_users(device))

    def _request(self, device: Device, request: Message) -> Message:
        described = device_request(device, "work")
        return {
            **request,
            "lock": str(self._lock(device)),
            "root": str(self._paths.root),
            "pci": described["pci"],
            "gpu_id": described["gpu_id"],
            "architecture": trait(device, Trait.ARCHITECTURE),
            "units": int(trait(device, Trait.COMPUTE_UNITS)),
        }

    def _environment(self, device: Device) -> dict[str, str]:
        """Return what lets the ROCm runtime see this device alone.

        A partition has no unique number of its own, so it is named by its position in the topology; the child checks
        that it got the right one.
        """
        unique_id = dict(device.traits).get(Trait.UNIQUE_ID)
        is_named = device.parent is None and unique_id is not None
        return {"ROCR_VISIBLE_DEVICES": f"GPU-{unique_id}" if is_named else trait(device, Trait.POSITION)}

    def _lock(self, device: Device) -> Path:
        return lock_path(self._locks, device.id)
