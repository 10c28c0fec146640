"""One walk for several devices: fewer walks, and for each device the same report as from a walk of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.procwalk import Budget, DeviceNodeTarget, FileTarget
from scrubber.adapters.shared_walks import Search, SharedWalks
from scrubber.adapters.walker import WALKER_MODULE, WalkReport
from scrubber.domain.errors import Unavailable

ZERO, FULL, RANDOM = "/dev/zero", "/dev/full", "/dev/random"
"""Nodes that stand for three devices."""
NODES = (ZERO, FULL, RANDOM)
POD = "0d1f2a3b-4c5d-4e6f-8a9b-0c1d2e3f4a5b"
PATIENT, IMPATIENT = Budget(20.0, 60.0, 20.0), Budget(0.0, 0.0, 0.0)


class CountedPool(RequestPool):
    """A pool that keeps the requests for walks that it is given."""

    def __init__(self, children: Children) -> None:
        super().__init__(children, WALKER_MODULE, deadline=120.0, error_type=Unavailable)
        self.children = children
        self.requests: list[Message] = []
        self.requested = asyncio.Event()

    async def request(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
        self.requests.append(message)
        self.requested.set()
        return await super().request(device, message, deadline=deadline)


@pytest.fixture
async def pool() -> AsyncIterator[CountedPool]:
    children = Children()
    pool = CountedPool(children)
    yield pool
    await pool.close()
    await children.close()


def walks_of(pool: CountedPool) -> SharedWalks:
    return SharedWalks(pool, pool, PATIENT, lambda: frozenset({os.getpid()}))


def search(node: str, *pids: int, scrub: str | None = None) -> Search:
    number = os.stat(node).st_rdev
    return Search(
        device=node,
        target=DeviceNodeTarget(frozenset({number})),
        pids=frozenset(pids),
        scrub=scrub,
    )


def nodes_of(*paths: str) -> list[int]:
    """Return the device numbers of ``paths`` as they are in a request."""
    return sorted(os.stat(path).st_rdev for path in paths)


def searched(pool: CountedPool) -> list[object]:
    """Return the device numbers that each walk was for."""
    return [each["nodes"] for each in pool.requests]


@contextmanager
def holding(path: str | Path) -> Iterator[int]:
    """Run a process that has ``path`` open; yields its PID."""
    with open(path) as opened, subprocess.Popen(["sleep", "infinity"], stdin=opened) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def complete(walks: SharedWalks, *searches: Search) -> list[WalkReport]:
    """Return reports that nothing else on this machine kept from being complete."""
    while True:
        reports = await asyncio.gather(*(walks.walk(each) for each in searches))
        if not any(each.unfinished or each.churning_groups for each in reports):
            return reports


async def test_searches_made_together_share_a_walk_and_each_gets_the_holders_of_its_own_device(
    pool: CountedPool,
) -> None:
    with holding(ZERO) as one, holding(FULL) as other:
        reports = await complete(walks_of(pool), search(ZERO), search(FULL), search(RANDOM, one))
        assert searched(pool)[0] == nodes_of(*NODES)
        found = [{each.pid: each.parts for each in report.holders} for report in reports]
        assert found[0][one] == (os.stat(ZERO).st_rdev,)
        assert found[1][other] == (os.stat(FULL).st_rdev,)
        assert other not in found[0]
        assert one not in found[1]
        assert found[2][one] == ()  # requested, although it has no node of that device
        assert other not in found[2]


async def test_one_walk_looks_for_nodes_and_one_for_the_files_of_a_file_system(
    pool: CountedPool, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("one", "other")]
    for path in paths:
        path.touch()
    files = [os.stat(path) for path in paths]
    targets = [FileTarget(each.st_dev, frozenset({each.st_ino})) for each in files]
    with paths[0].open(), holding(paths[1]) as other:
        searches = [Search(device=f"file {target}", target=target) for target in targets]
        walks = walks_of(pool)
        reports = await asyncio.gather(*(walks.walk(each) for each in (search(ZERO), *searches)))
    both = [files[0].st_dev, *sorted(each.st_ino for each in files)]
    assert {str(each.get("nodes", each.get("file"))) for each in pool.requests} == {str(nodes_of(ZERO)), str(both)}
    assert len(pool.requests) == 2
    assert {each.pid: each.parts for each in reports[2].holders} == {other: (files[1].st_ino,)}
    assert reports[1].holders == (), "this process is excluded"


async def test_search_made_during_a_walk_waits_for_the_next_one_which_all_that_wait_share(pool: CountedPool) -> None:
    walks = walks_of(pool)
    first = asyncio.create_task(walks.walk(search(ZERO)))
    await pool.requested.wait()
    later = [asyncio.create_task(walks.walk(search(node))) for node in (FULL, RANDOM)]
    await asyncio.gather(first, *later)
    assert searched(pool)[:2] == [nodes_of(ZERO), nodes_of(FULL, RANDOM)]


async def test_scrub_whose_report_left_inspections_unfinished_continues_them_alone(pool: CountedPool) -> None:
    alone = CountedPool(pool.children)
    walks, walked_alone = SharedWalks(pool, alone, IMPATIENT, frozenset), [nodes_of(each) for each in NODES]
    for scrub, times in (("scrub-1", (1, 2, 3)), ("scrub-2", (4,))):
        for number in times:
            reports = await asyncio.gather(*(walks.walk(search(node, scrub=scrub)) for node in NODES))
            assert [max(each.walks for each in report.unfinished) for report in reports] == [number] * 3
    assert searched(pool) == [nodes_of(*NODES)] * 2
    assert [each["scrub"] for each in pool.requests] == [None] * 2
    assert searched(alone) == walked_alone * 2
    assert {each["scrub"] for each in alone.requests} == {"scrub-1"}
    await alone.close()


class ReportingPool(CountedPool):
    """A pool whose walks return ``message``."""

    def __init__(self, message: Message) -> None:
        super().__init__(Children())
        self.message = message

    async def request(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
        self.requests.append(message)
        return self.message


def report_of(**fields: object) -> Message:
    return {
        "holders": [],
        "unreadable": [],
        "unfinished": [],
        "relays": [],
        "counts": [0] * 6,
        "omitted": [],
        "partial": [],
    } | fields


async def test_process_or_group_that_was_not_inspected_may_hold_only_the_devices_that_it_could_open() -> None:
    zero, full, _ = (os.stat(node).st_rdev for node in NODES)
    process: list[object] = [77, 4711, "crowd", 0, "there was no time", [zero], [zero], 1, POD]
    pool = ReportingPool(report_of(unfinished=[process], relays=[[POD, POD, [zero, full]], ["", None, None]]))
    walks = walks_of(pool)
    reports = await asyncio.gather(*(walks.walk(search(node)) for node in NODES))
    assert searched(pool) == [nodes_of(*NODES)], "one walk tells for each of them"
    assert [each.unfinished[0].parts for each in reports] == [(zero,), (), ()]
    assert [each.unfinished[0].confined for each in reports] == [False, True, True]
    assert [[group.confined for group in each.churning_groups] for each in reports] == [
        [False, False],
        [False, False],
        [True, False],
    ]


async def test_holders_that_were_omitted_or_partly_inspected_are_attributed_to_their_devices() -> None:
    zero, full, _ = (os.stat(node).st_rdev for node in NODES)
    holder = [77, 4711, "crowd", False, [zero]]
    message = report_of(holders=[holder], counts=[0, 7, 0, 0, 0, 0], omitted=[[zero, 5], [full, 2]], partial=[77])
    pool = ReportingPool(message)
    walks = walks_of(pool)
    reports = await asyncio.gather(*(walks.walk(search(node)) for node in NODES))
    assert len(pool.requests) == 1
    assert [each.holders_omitted for each in reports] == [5, 2, 0]
    hidden = "holders: 1 process(es) that hold another device could not be inspected completely"
    assert [each.not_covered for each in reports] == [(), (hidden,), (hidden,)]


async def test_device_is_walked_alone_if_the_shared_report_names_no_process_of_some_kind() -> None:
    """Otherwise tenants of other devices could crowd a process out of the report that could open this one."""
    zero, full, _ = (os.stat(node).st_rdev for node in NODES)
    crowd: list[object] = [77, 4711, "crowd", 0, "there was no time", [], [full], 1, POD]
    hidden: list[object] = [78, 4712, "quiet", 0, "there was no time", [], [zero], 1, "another pod"]
    shared = ReportingPool(report_of(unfinished=[crowd], counts=[1, 0, 0, 0, 1, 0]))
    alone = ReportingPool(report_of(unfinished=[hidden], counts=[1, 0, 0, 0, 1, 0]))
    walks = SharedWalks(shared, alone, PATIENT, frozenset)
    reports = await asyncio.gather(*(walks.walk(search(node, scrub=node)) for node in (ZERO, FULL)))
    assert searched(shared) == [nodes_of(ZERO, FULL)]
    assert searched(alone) == [nodes_of(ZERO), nodes_of(FULL)]
    assert not reports[0].unfinished[0].confined
    assert [each.unfinished[0].walks for each in reports] == [1, 1]
    await walks.walk(search(RANDOM))
    assert len(shared.requests) == 2, "a walk for one device is not repeated"
    assert len(alone.requests) == 2


async def test_walk_that_is_continued_for_one_device_delays_no_other(pool: CountedPool) -> None:
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    class HangingPool(CountedPool):
        async def request(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
            return await never

    walks = SharedWalks(pool, HangingPool(pool.children), IMPATIENT, frozenset)
    await walks.walk(search(ZERO, scrub="scrub-1"))
    hanging = asyncio.create_task(walks.walk(search(ZERO, scrub="scrub-1")))
    assert (await walks.walk(search(FULL, scrub="scrub-2"))).unfinished
    assert not hanging.done()
    hanging.cancel()


async def test_search_whose_caller_has_left_is_not_made(pool: CountedPool) -> None:
    walks = walks_of(pool)
    first = asyncio.create_task(walks.walk(search(ZERO)))
    await pool.requested.wait()
    left, stays = (asyncio.create_task(walks.walk(search(node))) for node in (FULL, RANDOM))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(first, stays)
    assert searched(pool)[:2] == [nodes_of(ZERO), nodes_of(RANDOM)]


async def test_searches_fail_when_the_walks_are_closed(pool: CountedPool) -> None:
    walks = walks_of(pool)
    waiting = [asyncio.create_task(walks.walk(search(node))) for node in NODES]
    await pool.requested.wait()
    waiting.append(asyncio.create_task(walks.walk(search(ZERO))))
    await asyncio.sleep(0)
    await walks.close()
    assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*waiting, return_exceptions=True))


async def test_walk_fails_when_the_walks_are_closed_before_it_has_begun(pool: CountedPool) -> None:
    walks = walks_of(pool)
    waiting = asyncio.create_task(walks.walk(search(ZERO)))
    await asyncio.sleep(0)
    await walks.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await walks.walk(search(ZERO))
