"""The holders of a simulated device: a lease shows whether there are any, and only then ``/proc`` is walked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.procwalk import Budget, FileTarget, ProcessMatch
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.adapters.walker import WalkReport, parse_walk_report, uninspected_from, walk_request
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceLost
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport

__all__ = ["SimHolders"]

_GHOST = Holder(pid=0, started=0, kind=HolderKind.UNTRACEABLE)
_NO_HOLDERS = WalkReport((), (), ())


class SimHolders:
    """:class:`scrubber.ports.Holders` by write lease, then by device and inode.

    Args:
        walk_pool: pool of children that walk over ``/proc`` (:mod:`scrubber.adapters.walker`); no device is blamed for
            a walk.
        budget: seconds for a walk, and for each process; less than the deadline of ``walk_pool``.
        confirm_seconds: seconds for which untraceable use or an unkillable holder must persist before it is reported as
            such. A process that is just ending looks like both for a moment, and either takes a device out of service.
    """

    def __init__(
        self,
        inventory: SimInventory,
        walk_pool: RequestPool,
        children: Children,
        *,
        budget: Budget | None = None,
        confirm_seconds: float = 0.25,
    ) -> None:
        self._inventory = inventory
        self._walk_pool = walk_pool
        self._children = children
        self._budget = budget
        self._confirm_seconds = confirm_seconds

    async def is_held(self, device: Device) -> bool:
        found = self._inventory.find_sim_device(device)
        return control.read_combined_faults(found.control_directories).ghost or lease.is_held(found.memory, found.inode)

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        found = self._inventory.find_sim_device(device)
        report = await self._walk(device, found, pod_uids, scrub)
        hung = _hung_processes(report)
        if hung or not report.holders:
            await asyncio.sleep(self._confirm_seconds)
            report = await self._walk(device, found, pod_uids, scrub)
            hung &= _hung_processes(report)
        unfinished = uninspected_from((each for each in report.unfinished if not each.parts), report.churning_groups)
        if not report.holders:
            ghosts = (_GHOST,) if not unfinished and await self.is_held(device) else ()
            return HolderReport(ghosts, report.not_covered if ghosts or unfinished else (), unfinished)
        unkillable = control.read_combined_faults(found.control_directories).unkillable
        holding = tuple(_holder(each, stays=unkillable or (each.pid, each.started) in hung) for each in report.holders)
        return HolderReport(holding, report.not_covered, unfinished, report.holders_omitted)

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        report = await self._walk(device, self._inventory.find_sim_device(device))
        return tuple(_holder(each, stays=False) for each in report.holders)

    def not_covered(self, device: Device) -> tuple[str, ...]:
        """Return nothing: the lease detects descriptors and mappings wherever they are."""
        return ()

    async def _walk(
        self, device: Device, found: SimDevice, had: Collection[str] = (), scrub: str | None = None
    ) -> WalkReport:
        """Return the holders of the file, and what could not be inspected.

        An empty report when the kernel grants the lease.
        """
        if not lease.is_held(found.memory, found.inode):
            return _NO_HOLDERS
        try:
            target = os.stat(found.memory)
        except FileNotFoundError as error:
            raise DeviceLost(f"{found.memory} is gone.") from error
        ours = {os.getpid(), *self._children.pids()}
        question = walk_request(
            FileTarget(target.st_dev, target.st_ino),
            excluded_pids=ours,
            budget=self._budget,
            priority_pods=had,
            scrub_id=scrub,
        )
        return parse_walk_report(await self._walk_pool.request(device.id, question))


def _hung_processes(report: WalkReport) -> set[tuple[int, int]]:
    return {(each.pid, each.started) for each in report.holders if each.hung}


def _holder(found: ProcessMatch, *, stays: bool) -> Holder:
    kind = HolderKind.UNKILLABLE if stays else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command)
