"""The holders of a simulated device: leases show whether there are any, and only then ``/proc`` is walked.

A device has two files. A process that has its ``memory`` open has a context. One that has only its ``node`` open, as
monitoring agents do, can read and write nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scrubber.adapters.procwalk import FileTarget, ProcessMatch, UnfinishedProcess, start_time
from scrubber.adapters.shared_walks import Search, SharedWalks
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.adapters.walker import WalkReport, uninspected_from
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceLost
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport
from scrubber.ports.device import InfrastructureLookup

__all__ = ["SimHolders"]

_GHOST = Holder(pid=0, started=0, kind=HolderKind.UNTRACEABLE)
_NOTHING = WalkReport((), (), ())


class _File(NamedTuple):
    """A file, by ``st_dev`` and ``st_ino``."""

    file_system: int
    inode: int


@dataclass(frozen=True, slots=True)
class _Scan:
    """What a walk for both files of a device found.

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
        confirm_seconds: seconds for which untraceable use or an unkillable holder must persist before it is reported as
            such. A process that is just ending looks like both for a moment, and either takes a device out of service.
        infrastructure: recognizes infrastructure that the policy allows; None: there is none. A device cannot be
            cleared beside a context, so infrastructure with a context holds the device, whatever its class.
    """

    def __init__(
        self,
        inventory: SimInventory,
        walks: SharedWalks,
        *,
        confirm_seconds: float = 0.25,
        infrastructure: InfrastructureLookup | None = None,
    ) -> None:
        self._inventory = inventory
        self._walks = walks
        self._confirm_seconds = confirm_seconds
        self._infrastructure = infrastructure
        self._tolerated: dict[str, tuple[str, ...]] = {}

    async def is_held(self, device: Device) -> bool:
        found = self._inventory.find_sim_device(device)
        self._tolerated.pop(device.id, None)
        if control.read_combined_faults(found.control_directories).ghost or lease.is_held(found.memory, found.inode):
            return True
        node = _file(found.node)
        if not lease.is_held(found.node, node.inode):
            return False
        report = await self._walks.walk(_search(device, node))
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
        memory, node = _file(found.memory), _file(found.node)
        is_memory_open = lease.is_held(found.memory, found.inode)
        held = [*([memory] if is_memory_open else []), *([node] if lease.is_held(found.node, node.inode) else [])]
        if not held:
            return _Scan(_NOTHING, frozenset(), is_untraced=False, is_memory_open=False)
        report = await self._walks.walk(_search(device, *held, had=had, scrub=scrub))
        contexts = frozenset(each.pid for each in report.holders if memory.inode in each.parts)
        traced = {part for each in report.holders for part in each.parts}
        untraced = not (report.unfinished or report.churning_groups or traced >= {each.inode for each in held})
        return _Scan(report, contexts, untraced, is_memory_open)

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


def _file(path: Path) -> _File:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError as error:
        raise DeviceLost(f"{path} is gone.") from error
    return _File(found.st_dev, found.st_ino)


def _search(device: Device, *files: _File, had: Collection[str] = (), scrub: str | None = None) -> Search:
    """Return the search for ``files``, which are in one directory and so of one file system."""
    target = FileTarget(files[0].file_system, frozenset(each.inode for each in files))
    return Search(device=device.id, target=target, priority_pods=frozenset(had), scrub=scrub)


def _hung_processes(report: WalkReport) -> set[tuple[int, int]]:
    return {(each.pid, each.started) for each in report.holders if each.hung}


def _holder(found: ProcessMatch, known: InfrastructureProcess | None, *, stays: bool) -> Holder:
    if known is not None:
        return Holder(
            found.pid, found.started, known.kind, found.command, known.owner, is_monitoring=known.is_monitoring
        )
    kind = HolderKind.UNKILLABLE if stays else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command)
