"""The holders of a simulated device: leases show whether there are any, and only then ``/proc`` is walked.

A device has two files. A process that has its ``memory`` open has a context. One that has only its ``node`` open, as
monitoring agents do, can read and write nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.procwalk import Budget, FileTarget, ProcessMatch, UnfinishedProcess, start_time
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.adapters.walker import WalkReport, parse_walk_report, uninspected_from, walk_request
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceLost
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport
from scrubber.ports.device import InfrastructureLookup

__all__ = ["SimHolders"]

_GHOST = Holder(pid=0, started=0, kind=HolderKind.UNTRACEABLE)


@dataclass(frozen=True, slots=True)
class _Scan:
    """What walks for both files of a device found.

    Attributes:
        contexts: the PIDs of those that have the memory open.
        is_untraced: whether the kernel reports a holder of a file, and the walk found none.
        is_memory_open: whether any process has a context.
    """

    report: WalkReport
    contexts: frozenset[int]
    is_untraced: bool
    is_memory_open: bool


class SimHolders:
    """:class:`scrubber.ports.Holders` by write lease, then by device and inode.

    Args:
        walk_pool: pool of children that walk over ``/proc`` (:mod:`scrubber.adapters.walker`); no device is blamed for
            a walk.
        budget: seconds for a walk, and for each process; less than the deadline of ``walk_pool``.
        confirm_seconds: seconds for which untraceable use or an unkillable holder must persist before it is reported as
            such. A process that is just ending looks like both for a moment, and either takes a device out of service.
        infrastructure: recognizes infrastructure that the policy allows; None: there is none. A device cannot be
            cleared beside a context, so infrastructure with a context holds the device, whatever its class.
    """

    def __init__(
        self,
        inventory: SimInventory,
        walk_pool: RequestPool,
        children: Children,
        *,
        budget: Budget | None = None,
        confirm_seconds: float = 0.25,
        infrastructure: InfrastructureLookup | None = None,
    ) -> None:
        self._inventory = inventory
        self._walk_pool = walk_pool
        self._children = children
        self._budget = budget
        self._confirm_seconds = confirm_seconds
        self._infrastructure = infrastructure
        self._tolerated: dict[str, tuple[str, ...]] = {}

    async def is_held(self, device: Device) -> bool:
        found = self._inventory.find_sim_device(device)
        self._tolerated.pop(device.id, None)
        if control.read_combined_faults(found.control_directories).ghost or lease.is_held(found.memory, found.inode):
            return True
        node = _target(found.node)
        if not lease.is_held(found.node, node.inode):
            return False
        report = await self._walk(device, node)
        processes: tuple[ProcessMatch | UnfinishedProcess, ...] = (*report.holders, *report.unfinished)
        known = await self._find_infrastructure(processes, frozenset())
        if not processes or any(each.pid not in known for each in processes) or report.churning_groups:
            return True
        self._tolerated[device.id] = tuple(sorted(f"{each.owner} (PID {pid})" for pid, each in known.items()))
        return False

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        found = self._inventory.find_sim_device(device)
        scan = await self._scan(device, found, pod_uids, scrub)
        hung = _hung_processes(scan.report)
        if hung or scan.is_untraced or (scan.report.unfinished and not scan.report.holders):
            await asyncio.sleep(self._confirm_seconds)
            scan = await self._scan(device, found, pod_uids, scrub)
            hung &= _hung_processes(scan.report)
        faults, report = control.read_combined_faults(found.control_directories), scan.report
        cut_short = [each for each in report.unfinished if not each.parts]
        if not scan.is_memory_open:  # infrastructure without a context is allowed, however slow it is to inspect
            infrastructure = await self._find_infrastructure(cut_short, frozenset())
            cut_short = [each for each in cut_short if each.pid not in infrastructure]
        unfinished = uninspected_from(cut_short, report.churning_groups)
        ghosts = (_GHOST,) if (scan.is_untraced or faults.ghost) and not unfinished else ()
        if not report.holders:
            return HolderReport(ghosts, report.not_covered if ghosts or unfinished else (), unfinished)
        known = await self._find_infrastructure(report.holders, scan.contexts)
        holding = tuple(
            _holder(each, known.get(each.pid), stays=faults.unkillable or (each.pid, each.started) in hung)
            for each in report.holders
        )
        return HolderReport((*holding, *ghosts), report.not_covered, unfinished, report.holders_omitted)

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        scan = await self._scan(device, self._inventory.find_sim_device(device))
        known = await self._find_infrastructure(scan.report.holders, scan.contexts)
        return tuple(_holder(each, known.get(each.pid), stays=False) for each in scan.report.holders)

    def not_covered(self, device: Device) -> tuple[str, ...]:
        """Return the infrastructure that the last check found beside the device.

        Nothing else is uncovered: the leases detect descriptors and mappings wherever they are.
        """
        return tuple(
            f"holders: {each} has the device open, as the policy allows" for each in self._tolerated.get(device.id, ())
        )

    async def _scan(
        self, device: Device, found: SimDevice, had: Collection[str] = (), scrub: str | None = None
    ) -> _Scan:
        """Return the holders of both files, and what could not be inspected.

        No walk is made for a file on which the kernel grants a lease.
        """
        reports, untraced, contexts, memory_open = [], False, frozenset[int](), False
        for path in (found.memory, found.node):
            target = _target(path)
            if not lease.is_held(path, found.inode if path == found.memory else target.inode):
                continue
            memory_open |= path == found.memory
            report = await self._walk(device, target, had, scrub)
            reports.append(report)
            untraced |= not report.holders and not report.unfinished and not report.churning_groups
            contexts |= frozenset(each.pid for each in report.holders if path == found.memory)
        return _Scan(_merged(reports), contexts, untraced, memory_open)

    async def _walk(
        self, device: Device, target: FileTarget, had: Collection[str] = (), scrub: str | None = None
    ) -> WalkReport:
        question = walk_request(
            target,
            excluded_pids={os.getpid(), *self._children.pids()},
            budget=self._budget,
            priority_pods=had,
            scrub_id=scrub,
        )
        return parse_walk_report(await self._walk_pool.request(device.id, question))

    async def _find_infrastructure(
        self, processes: Iterable[ProcessMatch | UnfinishedProcess], contexts: Collection[int]
    ) -> dict[int, InfrastructureProcess]:
        """Return the infrastructure among ``processes``, by PID; a context of it is a program on the device."""
        found: dict[int, InfrastructureProcess] = {}
        lookup = self._infrastructure
        for each in processes if lookup is not None else ():
            assert lookup is not None
            known = await lookup(each.pid, has_context=each.pid in contexts)
            if known is not None and start_time(each.pid) == each.started:
                kind = HolderKind.VALIDATION if each.pid in contexts else known.kind
                found[each.pid] = known._replace(kind=kind)
        return found


def _target(path: Path) -> FileTarget:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError as error:
        raise DeviceLost(f"{path} is gone.") from error
    return FileTarget(found.st_dev, found.st_ino)


def _merged(reports: Sequence[WalkReport]) -> WalkReport:
    """Return one report, in which each process is named once."""
    if len(reports) == 1:
        return reports[0]
    holders = {(each.pid, each.started): each for report in reversed(reports) for each in report.holders}
    unfinished = {
        (each.pid, each.started): each
        for report in reports
        for each in report.unfinished
        if (each.pid, each.started) not in holders
    }
    return WalkReport(
        tuple(holders[each] for each in sorted(holders)),
        tuple(unfinished.values()),
        tuple(dict.fromkeys(message for report in reports for message in report.not_covered)),
        sum(report.holders_omitted for report in reports),
        tuple(dict.fromkeys(group for report in reports for group in report.churning_groups)),
    )


def _hung_processes(report: WalkReport) -> set[tuple[int, int]]:
    return {(each.pid, each.started) for each in report.holders if each.hung}


def _holder(found: ProcessMatch, known: InfrastructureProcess | None, *, stays: bool) -> Holder:
    if known is not None:
        return Holder(
            found.pid, found.started, known.kind, found.command, known.owner, is_monitoring=known.is_monitoring
        )
    kind = HolderKind.UNKILLABLE if stays else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command)
