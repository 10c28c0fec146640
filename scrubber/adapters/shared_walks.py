"""One walk over ``/proc`` for several devices: scrubs that start together would otherwise wait for each other's walks.

Promise: a report is from a walk that began after it was requested, and says nothing else than a walk for that device
alone. A walk that could not inspect every process, or that found a holder of only some of the devices, is repeated for
each of them, and a device for which it cannot be completed is not part of a shared walk until it can: continuing an
inspection, and what a process that could not be inspected may have open, are matters of one device. A group whose
processes start and exit too fast repeats no walk if it could open none of the devices: another walk would find the same,
and any tenant can make such a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.procwalk import Budget, DeviceNodeTarget
from scrubber.adapters.walker import WalkReport, parse_walk_report, walk_request
from scrubber.domain.errors import ScrubberError, Unavailable

__all__ = ["NodeSearch", "SharedWalks"]

_STOPPING = "The service is stopping."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSearch:
    """What a walk looks for.

    Attributes:
        device: ID of the device.
        numbers: device numbers of the nodes to look for.
        own_numbers: numbers of the nodes that give access to the device.
        pids: processes that are reported even if they have none of the nodes open.
        priority_pods: UIDs of pods that had the device.
        scrub: ID of the scrub that requests it; None: of none.
    """

    device: str
    numbers: frozenset[int]
    own_numbers: frozenset[int]
    pids: frozenset[int]
    priority_pods: frozenset[str]
    scrub: str | None


_Request = tuple[NodeSearch, asyncio.Future[WalkReport]]


class SharedWalks:
    """Walks in the children of ``pool``. While one is made, requests collect, and the next one is for all of them.

    Args:
        excluded_pids: returns processes that are never reported.
    """

    def __init__(self, pool: RequestPool, budget: Budget, excluded_pids: Callable[[], frozenset[int]]) -> None:
        self._pool = pool
        self._budget = budget
        self._excluded_pids = excluded_pids
        self._pending: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None
        self._closed = False
        self._incomplete: set[str] = set()
        """Devices whose last walk could not inspect every process."""

    async def walk(self, search: NodeSearch) -> WalkReport:
        """Return the processes that have a node of ``search`` open or mapped.

        Raises:
            Unavailable: the walk was not completed in time, or no child can be started; no device is at fault.
        """
        if self._closed:
            raise Unavailable(_STOPPING)
        if search.device in self._incomplete:
            return await self._walk_alone(search)
        report: asyncio.Future[WalkReport] = asyncio.get_running_loop().create_future()
        self._pending.append((search, report))
        if self._runner is None:
            self._runner = asyncio.create_task(self._serve(), name="shared walks")
        return await report

    async def close(self) -> None:
        """Fail every request with :class:`Unavailable`."""
        self._closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
        _fail_all(self._pending)  # a task that is cancelled before its first step runs none of its code

    async def _serve(self) -> None:
        batch: list[_Request] = []
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                await self._answer([each for each in batch if not each[1].done()])  # done: its caller left
        finally:
            self._runner = None
            _fail_all(batch)
            _fail_all(self._pending)
            self._pending = []

    async def _answer(self, batch: Sequence[_Request]) -> None:
        searches = [search for search, _ in batch]
        try:
            together = await self._walk_together(searches) if len(searches) > 1 else None
        except ScrubberError as error:
            found: Sequence[WalkReport | BaseException] = [error] * len(batch)
        else:
            alone = () if together else (self._walk_alone(each) for each in searches)
            found = together or await asyncio.gather(*alone, return_exceptions=True)
        for (_, report), result in zip(batch, found, strict=True):
            if report.done():
                continue
            if isinstance(result, BaseException):
                report.set_exception(result)
            else:
                report.set_result(result)

    async def _walk_together(self, searches: Sequence[NodeSearch]) -> list[WalkReport] | None:
        """Return a report for each of ``searches``; None if one walk cannot tell for all of them."""
        union = NodeSearch(
            device=searches[0].device,
            numbers=frozenset().union(*(each.numbers for each in searches)),
            own_numbers=frozenset().union(*(each.own_numbers for each in searches)),
            pids=frozenset().union(*(each.pids for each in searches)),
            priority_pods=frozenset().union(*(each.priority_pods for each in searches)),
            scrub=None,
        )
        report = await self._request(union)
        # Of a process that has one of the nodes open, such a walk does not tell whether all the rest was inspected.
        partly = any(each.parts and not union.numbers <= set(each.parts) for each in report.holders)
        return None if partly or not _is_complete(report) else [_report_of(each, report) for each in searches]

    async def _walk_alone(self, search: NodeSearch) -> WalkReport:
        report = await self._request(search)
        if _is_complete(report):
            self._incomplete.discard(search.device)
        else:
            self._incomplete.add(search.device)
        return report

    async def _request(self, search: NodeSearch) -> WalkReport:
        request = walk_request(
            DeviceNodeTarget(search.numbers),
            excluded_pids=self._excluded_pids(),
            requested_pids=search.pids,
            budget=self._budget,
            priority_pods=search.priority_pods,
            device_numbers=search.own_numbers,
            scrub_id=search.scrub,
        )
        return parse_walk_report(await self._pool.request(search.device, request))


def _fail_all(requests: Iterable[_Request]) -> None:
    for _, report in requests:
        if not report.done():
            report.set_exception(Unavailable(_STOPPING))


def _is_complete(report: WalkReport) -> bool:
    may_hold = any(not each.confined for each in report.churning_groups)
    return not (report.unfinished or may_hold or report.holders_omitted)


def _report_of(search: NodeSearch, report: WalkReport) -> WalkReport:
    """Return the part of a complete ``report`` that concerns one device."""
    holders = (
        each._replace(parts=tuple(part for part in each.parts if part in search.numbers)) for each in report.holders
    )
    return report._replace(holders=tuple(each for each in holders if each.parts or each.pid in search.pids))
