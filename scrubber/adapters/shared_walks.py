"""One walk over ``/proc`` for several devices: scrubs that start together would otherwise wait for each other's walks.

Promise: a report is from a walk that began after it was requested, and says of its device what a walk for that device
alone would: which processes hold it, and which processes and groups that could not be inspected may open it.

Inspections that a walk left unfinished are continued only by walks for one device: those of a scrub that asks again. A
device is also walked alone if so many different processes were left that the shared report does not name one of each
kind. Both are made by another child, so that a tenant that keeps the device it had from being inspected delays no other device.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.procwalk import Budget, DeviceNodeTarget, FileTarget, Reach, Target
from scrubber.adapters.walker import WALKER_MODULE, WalkReport, budget_within, parse_walk_report, walk_request
from scrubber.domain.errors import ScrubberError, Unavailable

__all__ = ["Search", "SharedWalks"]

_STOPPING = "The service is stopping."


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a walk looks for.

    Attributes:
        device: ID of the device.
        target: device nodes, or files, to look for.
        own_numbers: numbers of the nodes that give access to the device; empty: each node of ``target`` may.
        pids: processes that are reported even if they have nothing of the target open.
        priority_pods: UIDs of pods that had the device.
        scrub: ID of the scrub that requests it; None: of none.
    """

    device: str
    target: Target
    own_numbers: frozenset[int] = frozenset()
    pids: frozenset[int] = frozenset()
    priority_pods: frozenset[str] = frozenset()
    scrub: str | None = None

    @property
    def file_system(self) -> int | None:
        """``st_dev`` of the files; None of device nodes. One walk can look for nodes, or for files of one file system."""
        return self.target.device if isinstance(self.target, FileTarget) else None

    @property
    def opening_numbers(self) -> frozenset[int]:
        """Numbers of the nodes with which a process may get access to the device."""
        return self.own_numbers or self.target.parts


_Request = tuple[Search, asyncio.Future[WalkReport]]


class _Unfinished(NamedTuple):
    """What the last walk for a device left.

    Attributes:
        scrub: ID of the scrub that requested it.
        walks: number of consecutive walks that did not complete a group, by the end of its key.
    """

    scrub: str | None
    walks: dict[str, int]


class SharedWalks:
    """Walks for devices. While one is made, requests collect, and the next one is for all of them.

    Args:
        shared: pool whose child makes the walks for all devices that wait.
        alone: pool whose child continues the walks of one device.
        excluded_pids: returns processes that are never reported.
    """

    def __init__(
        self, shared: RequestPool, alone: RequestPool, budget: Budget, excluded_pids: Callable[[], frozenset[int]]
    ) -> None:
        self._shared = shared
        self._alone = alone
        self._budget = budget
        self._excluded_pids = excluded_pids
        self._pending: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None
        self._closed = False
        self._unfinished: dict[tuple[str, int | None], _Unfinished] = {}
        """By device and file system; none for a device whose last walk inspected every process."""

    @classmethod
    def in_children(cls, children: Children, deadline: float, process_budget: float | None = None) -> Self:
        """Return walks in ``children``, which are no holders themselves.

        Args:
            deadline: seconds within which a walk returns its report.
            process_budget: maximum seconds of a walk for one process; None for half of the budget of all processes.
        """
        shared, alone = (
            RequestPool(children, WALKER_MODULE, deadline=deadline, error_type=Unavailable) for _ in range(2)
        )
        budget = budget_within(deadline, process_budget)
        return cls(shared, alone, budget, lambda: frozenset({os.getpid(), *children.pids()}))

    async def walk(self, search: Search) -> WalkReport:
        """Return the processes that have a part of the target of ``search`` open or mapped.

        Raises:
            Unavailable: the walk was not completed in time, or no child can be started; no device is at fault.
        """
        if self._closed:
            raise Unavailable(_STOPPING)
        last = self._unfinished.get((search.device, search.file_system))
        if last is not None and search.scrub is not None and last.scrub == search.scrub:
            return self._counted(search, _report_of(search, await self._request(self._alone, search)))
        answer: asyncio.Future[WalkReport] = asyncio.get_running_loop().create_future()
        self._pending.append((search, answer))
        if self._runner is None:
            self._runner = asyncio.create_task(self._serve(), name="shared walks")
        report = await answer
        if report.kinds_omitted:  # processes that could open this device may have lost their place to those of others
            report = await self._request(self._alone, search)
        return self._counted(search, _report_of(search, report))

    async def close(self) -> None:
        """Fail every request with :class:`Unavailable`, and end the children."""
        self._closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
        _fail_all(self._pending)  # a task that is cancelled before its first step runs none of its code
        await asyncio.gather(self._shared.close(), self._alone.close())

    async def _serve(self) -> None:
        batch: list[_Request] = []
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                batch = [each for each in batch if not each[1].done()]  # done: its caller left
                for file_system in {search.file_system for search, _ in batch}:
                    await self._answer([each for each in batch if each[0].file_system == file_system])
        finally:
            self._runner = None
            _fail_all(batch)
            _fail_all(self._pending)
            self._pending = []

    async def _answer(self, batch: list[_Request]) -> None:
        searches = [search for search, _ in batch]
        first, parts = searches[0], frozenset[int]().union(*(each.target.parts for each in searches))
        union = Search(
            device=first.device,
            target=DeviceNodeTarget(parts) if first.file_system is None else FileTarget(first.file_system, parts),
            own_numbers=frozenset().union(*(each.opening_numbers for each in searches)),
            pids=frozenset().union(*(each.pids for each in searches)),
            priority_pods=frozenset().union(*(each.priority_pods for each in searches)),
        )
        try:
            report = await self._request(self._shared, union)
        except ScrubberError as error:
            _fail_all(batch, error)
            return
        if len(batch) == 1:
            report = report._replace(kinds_omitted=0)
        for _, answer in batch:
            if not answer.done():
                answer.set_result(report)

    async def _request(self, pool: RequestPool, search: Search) -> WalkReport:
        request = walk_request(
            search.target,
            excluded_pids=self._excluded_pids(),
            requested_pids=search.pids,
            budget=self._budget,
            priority_pods=search.priority_pods,
            device_numbers=search.opening_numbers,
            scrub_id=search.scrub,
        )
        return parse_walk_report(await pool.request(search.device, request))

    def _counted(self, search: Search, report: WalkReport) -> WalkReport:
        """Return ``report`` with the number of consecutive walks for this device that did not complete a group."""
        key = (search.device, search.file_system)
        last = self._unfinished.pop(key, None)
        if not report.unfinished:
            return report
        before = {} if last is None else last.walks
        walks = {each.group: before.get(each.group, 0) + 1 for each in report.unfinished}
        self._unfinished[key] = _Unfinished(search.scrub, walks)
        return report._replace(unfinished=tuple(each._replace(walks=walks[each.group]) for each in report.unfinished))


def _fail_all(requests: Iterable[_Request], error: ScrubberError | None = None) -> None:
    for _, answer in requests:
        if not answer.done():
            answer.set_exception(error or Unavailable(_STOPPING))


def _report_of(search: Search, report: WalkReport) -> WalkReport:
    """Return the part of ``report`` that concerns one device."""
    parts_of_device = search.target.parts

    def of_device(parts: Iterable[int]) -> tuple[int, ...]:
        return tuple(part for part in parts if part in parts_of_device)

    def could_open(reach: Reach) -> Reach:
        return None if reach is None else reach & search.opening_numbers

    holders = tuple(each._replace(parts=of_device(each.parts)) for each in report.holders)
    hidden = sum(each.pid in report.partial_pids and not each.parts for each in holders)
    message = f"holders: {hidden} process(es) that hold another device could not be inspected completely"
    omitted = [
        number for part, number in report.omitted_by_part if part in parts_of_device or (not part and search.pids)
    ]
    return report._replace(
        holders=tuple(each for each in holders if each.parts or each.pid in search.pids),
        not_covered=(*report.not_covered, *([message] if hidden else [])),
        holders_omitted=max(omitted, default=0),
        unfinished=tuple(
            each._replace(parts=of_device(each.parts), reach=could_open(each.reach)) for each in report.unfinished
        ),
        churning_groups=tuple(each._replace(reach=could_open(each.reach)) for each in report.churning_groups),
    )
