"""One walk for several devices: fewer walks, and for each device the same report as from a walk of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.procwalk import Budget, ChurningGroup
from scrubber.adapters.shared_walks import NodeSearch, SharedWalks
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


def walks_of(pool: CountedPool, budget: Budget = PATIENT) -> SharedWalks:
    return SharedWalks(pool, budget, lambda: frozenset({os.getpid()}))


def search(node: str, *pids: int, scrub: str | None = None) -> NodeSearch:
    number = os.stat(node).st_rdev
    return NodeSearch(
        device=node,
        numbers=frozenset({number}),
        own_numbers=frozenset({number}),
        pids=frozenset(pids),
        priority_pods=frozenset(),
        scrub=scrub,
    )


def nodes_of(*paths: str) -> list[int]:
    """Return the device numbers of ``paths`` as they are in a request."""
    return sorted(os.stat(path).st_rdev for path in paths)


def searched(pool: CountedPool) -> list[object]:
    """Return the device numbers that each walk was for."""
    return [each["nodes"] for each in pool.requests]


@contextmanager
def holding(node: str) -> Iterator[int]:
    """Run a process that has ``node`` open; yields its PID."""
    with open(node) as opened, subprocess.Popen(["sleep", "infinity"], stdin=opened) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def complete(walks: SharedWalks, *searches: NodeSearch) -> list[WalkReport]:
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


async def test_search_made_during_a_walk_waits_for_the_next_one_which_all_that_wait_share(pool: CountedPool) -> None:
    walks = walks_of(pool)
    first = asyncio.create_task(walks.walk(search(ZERO)))
    await pool.requested.wait()
    later = [asyncio.create_task(walks.walk(search(node))) for node in (FULL, RANDOM)]
    await asyncio.gather(first, *later)
    assert searched(pool)[:2] == [nodes_of(ZERO), nodes_of(FULL, RANDOM)]


async def test_walk_that_cannot_inspect_every_process_is_repeated_for_each_device_and_no_longer_shared(
    pool: CountedPool,
) -> None:
    walks = walks_of(pool, IMPATIENT)
    searches = [search(node, scrub="scrub-1") for node in NODES]
    reports = await asyncio.gather(*(walks.walk(each) for each in searches))
    assert all(report.unfinished for report in reports)
    alone = [nodes_of(each) for each in NODES]
    assert searched(pool) == [nodes_of(*NODES), *alone]
    assert [each["scrub"] for each in pool.requests] == [None, *["scrub-1"] * 3]
    await asyncio.gather(*(walks.walk(each) for each in searches))
    assert searched(pool)[4:] == alone


class RelayPool(CountedPool):
    """A pool whose walks find a pod that forks without pause, and nothing else."""

    confined = True

    async def request(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
        self.requests.append(message)
        relays = [[POD, POD, self.confined]]
        return {"holders": [], "unreadable": [], "unfinished": [], "relays": relays, "counts": [0, 0, 0, 0]}


@pytest.mark.parametrize("confined", [True, False])
async def test_pod_that_forks_without_pause_has_devices_walked_alone_only_if_it_may_open_one_of_them(
    confined: bool,
) -> None:
    pool = RelayPool(Children())
    pool.confined = confined
    walks, alone = walks_of(pool), [nodes_of(each) for each in NODES]
    for _ in range(2):
        reports = await asyncio.gather(*(walks.walk(search(node)) for node in NODES))
        assert [report.churning_groups for report in reports] == [(ChurningGroup(POD, POD, confined),)] * 3
    assert searched(pool) == ([nodes_of(*NODES)] * 2 if confined else [nodes_of(*NODES), *alone, *alone])


async def test_holder_of_some_of_the_devices_has_every_device_walked_alone(pool: CountedPool) -> None:
    with holding(ZERO):
        walks = walks_of(pool)
        await asyncio.gather(*(walks.walk(search(node)) for node in (ZERO, RANDOM)))
    assert searched(pool) == [nodes_of(ZERO, RANDOM), nodes_of(ZERO), nodes_of(RANDOM)]


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
