"""The holders of a command's device: the service's own walk over the device's nodes, joined with what the command lists.

The command can add holders. It cannot remove any: what the walk finds counts, whatever the command says.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Collection

from scrubber.adapters.command.answers import Answer, Verb
from scrubber.adapters.command.runner import CommandRunner
from scrubber.adapters.procwalk import (
    DeviceNodeTarget,
    FileTarget,
    ProcessMatch,
    Target,
    live_start_time,
    process_name,
)
from scrubber.adapters.shared_walks import Search, SharedWalks
from scrubber.adapters.walker import WalkReport, uninspected_from
from scrubber.domain.device import AccessKind, Device
from scrubber.domain.errors import BrokenCommand
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport
from scrubber.ports.device import InfrastructureLookup

__all__ = ["CommandHolders"]

_WALK_LIMITS = (
    "holders: a walk over /proc does not detect descriptors in flight in sockets or moved while their process is "
    "inspected, files registered with io_uring, and access by other ways than the nodes that the command names"
)
_NO_NODES = "holders: the device has no node that can be searched for; only the command can name its holders"
_INCOMPLETE = "holders: the command cannot name all processes that use the device"
_NOT_ASKED = "holders: the command names none; only open nodes of the device are detected"
_GHOST = Holder(pid=0, started=0, kind=HolderKind.UNTRACEABLE)


class CommandHolders:
    """:class:`scrubber.ports.Holders`.

    Args:
        confirm_seconds: how long an unkillable holder must persist before it is reported as one.
    """

    def __init__(
        self,
        runner: CommandRunner,
        walks: SharedWalks,
        *,
        infrastructure: InfrastructureLookup | None,
        confirm_seconds: float = 2.0,
    ) -> None:
        self._runner = runner
        self._walks = walks
        self._infrastructure = infrastructure
        self._confirm_seconds = confirm_seconds
        self._not_covered: dict[str, tuple[str, ...]] = {}

    async def is_held(self, device: Device) -> bool:
        report = await self._report(device)
        self._not_covered[device.id] = report.not_covered
        return bool(report.uninspected or report.omitted_count) or any(
            each.kind is not HolderKind.INFRASTRUCTURE for each in report.holders
        )

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        report = await self._report(device, pod_uids, scrub)
        if any(each.kind is HolderKind.UNKILLABLE for each in report.holders):
            await asyncio.sleep(self._confirm_seconds)
            report = await self._report(device, pod_uids, scrub)
        return report

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        walk = await self._walk(device)
        return tuple([await self._holder(each, has_context=False) for each in walk.holders])

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return self._not_covered.get(device.id, _limits(device))

    async def _report(self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None) -> HolderReport:
        pids, not_covered, is_held = await self._ask(device)
        walk = await self._walk(device, pod_uids, scrub)
        seen = {each.pid for each in walk.holders}
        holders = [await self._holder(each, has_context=each.pid in pids) for each in walk.holders]
        for pid in sorted(pids - seen):
            started = live_start_time(pid)
            if started is not None and not self._runner.is_own(pid):
                found = ProcessMatch(pid, started, process_name(pid), hung=False, parts=())
                holders.append(await self._holder(found, has_context=True))
        uninspected = uninspected_from(walk.unfinished, walk.churning_groups)
        if is_held and not holders and not uninspected:
            holders.append(_GHOST)
        return HolderReport(
            tuple(holders), (*not_covered, *walk.not_covered, *_limits(device)), uninspected, walk.holders_omitted
        )

    async def _ask(self, device: Device) -> tuple[frozenset[int], tuple[str, ...], bool]:
        """Return the PIDs that the command names, what it cannot name, and whether it says that the device is held."""
        if Verb.HOLDERS not in self._runner.verbs:
            return frozenset(), (_NOT_ASKED,), False
        answer = await self._runner.run(Verb.HOLDERS, device)
        listed = {f"pids[{at}]": each for at, each in enumerate(answer.objects("pids"))}
        numbers = Answer(answer.command, listed, answer.seconds)
        pids = {numbers.required_number(name) for name in listed}
        complete = answer.flag("complete", default=False)
        return frozenset(pids - {0}), () if complete else (_INCOMPLETE,), answer.flag("held", default=bool(pids))

    async def _walk(self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None) -> WalkReport:
        """Return the processes that have a node of ``device`` open, without the runs of the command."""
        had = frozenset(pod_uids)
        searches = [Search(device=device.id, target=each, priority_pods=had, scrub=scrub) for each in _targets(device)]
        reports = await asyncio.gather(*(self._walks.walk(each) for each in searches))
        holders = {(each.pid, each.started): each for report in reports for each in report.holders}
        return WalkReport(
            tuple(found for _, found in sorted(holders.items()) if not self._runner.is_own(found.pid)),
            tuple(
                each
                for report in reports
                for each in report.unfinished
                if (each.pid, each.started) not in holders and not self._runner.is_own(each.pid)
            ),
            tuple(dict.fromkeys(message for report in reports for message in report.not_covered)),
            sum(report.holders_omitted for report in reports),
            tuple(dict.fromkeys(group for report in reports for group in report.churning_groups)),
        )

    async def _holder(self, found: ProcessMatch, *, has_context: bool) -> Holder:
        known = None
        if self._infrastructure is not None:
            known = await self._infrastructure(found.pid, has_context=has_context)
        if known is None:
            kind = HolderKind.UNKILLABLE if found.hung else HolderKind.PROCESS
            return Holder(found.pid, found.started, kind, found.command)
        return Holder(
            found.pid, found.started, known.kind, found.command, known.owner, is_monitoring=known.is_monitoring
        )


def _targets(device: Device) -> list[Target]:
    """Return what to search for: all device nodes at once, and each regular file.

    Raises:
        BrokenCommand: there is no such node; if the device is lost, its telemetry says so.
    """
    numbers: set[int] = set()
    files: list[Target] = []
    for each in device.access:
        if each.kind not in (AccessKind.DEVICE_NODE, AccessKind.MOUNT):
            continue
        try:
            found = os.stat(each.host_path)
        except OSError as error:
            raise BrokenCommand(
                f"{each.host_path}, which the inventory names as a node of device {device.id}, cannot be opened: "
                f"{error.strerror}; correct `nodes`, or check that the driver has created it."
            ) from error
        if stat.S_ISCHR(found.st_mode):
            numbers.add(found.st_rdev)
        else:
            files.append(FileTarget(found.st_dev, frozenset({found.st_ino})))
    return [*([DeviceNodeTarget(frozenset(numbers))] if numbers else []), *files]


def _limits(device: Device) -> tuple[str, ...]:
    has_nodes = any(each.kind in (AccessKind.DEVICE_NODE, AccessKind.MOUNT) for each in device.access)
    return (_WALK_LIMITS,) if has_nodes else (_NO_NODES,)
