"""The eraser pool: never more erasers than slots, and a scrub for which a start waits goes first."""

from __future__ import annotations

import asyncio

import pytest

from scrubber.engine.eraser_pool import EraserPool
from tests.simulation.timeline import in_virtual_time


class Line:
    """Tasks that want a slot, and the order in which they got one."""

    def __init__(self, size: int) -> None:
        self.slots = EraserPool(size)
        self.order: list[str] = []
        self.inside = 0
        self.most = 0
        self.urgent: set[str] = set()
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def join(self, name: str) -> None:
        """Let ``name`` request a slot, and wait for it if necessary."""
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name))
        await asyncio.sleep(0.01)

    async def _work(self, name: str) -> None:
        async with self.slots.slot(lambda: name in self.urgent):
            self.order.append(name)
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                await self.leave[name].wait()
            finally:
                self.inside -= 1

    async def done(self, name: str) -> None:
        self.leave[name].set()
        await asyncio.sleep(0.01)

    async def wait_until_done(self) -> None:
        for name in list(self.tasks):
            await self.done(name)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@in_virtual_time
async def test_eraser_pool_never_runs_more_erasers_than_slots() -> None:
    line = Line(2)
    for name in "abcde":
        await line.join(name)
    assert line.order == ["a", "b"]
    await line.wait_until_done()
    assert sorted(line.order) == list("abcde")
    assert line.most == 2


@in_virtual_time
async def test_free_eraser_slot_goes_to_the_oldest_waiter() -> None:
    line = Line(1)
    for name in "abc":
        await line.join(name)
    await line.done("a")
    assert line.order == ["a", "b"]
    await line.wait_until_done()


@in_virtual_time
async def test_free_eraser_slot_goes_to_an_urgent_scrub_before_older_ones() -> None:
    line = Line(1)
    for name in "abcd":
        await line.join(name)
    line.urgent |= {"c", "d"}
    await line.done("a")
    assert line.order == ["a", "c"]
    await line.wait_until_done()


@in_virtual_time
async def test_urgency_of_a_scrub_is_evaluated_when_an_eraser_slot_becomes_free() -> None:
    line = Line(1)
    for name in "abc":
        await line.join(name)
    line.urgent.add("c")
    line.urgent.remove("c")
    await line.done("a")
    assert line.order == ["a", "b"]
    await line.wait_until_done()


@in_virtual_time
async def test_cancelled_waiter_for_an_eraser_slot_is_skipped() -> None:
    line = Line(1)
    for name in "abc":
        await line.join(name)
    line.tasks["b"].cancel()
    await line.done("a")
    assert line.order == ["a", "c"]
    await line.wait_until_done()


@in_virtual_time
async def test_eraser_slot_given_to_a_waiter_that_is_cancelled_at_that_moment_is_passed_on() -> None:
    line = Line(1)
    for name in "abc":
        await line.join(name)
    line.leave["a"].set()
    await asyncio.sleep(0)  # b has the slot now, and has not run since
    line.tasks["b"].cancel()
    await asyncio.sleep(0.01)
    assert line.order == ["a", "c"]
    await line.wait_until_done()


@in_virtual_time
async def test_eraser_slot_is_free_again_after_an_error_and_after_all_waiters_were_cancelled() -> None:
    slots = EraserPool(1)
    with pytest.raises(RuntimeError, match="the eraser died"):
        await _die_while_another_waits(slots)
    async with asyncio.timeout(1.0), slots.slot(lambda: False):
        pass


async def _die_while_another_waits(slots: EraserPool) -> None:
    async with slots.slot(lambda: False):
        waiter = asyncio.create_task(_hold(slots))
        await asyncio.sleep(0.01)
        waiter.cancel()
        raise RuntimeError("the eraser died")


async def _hold(slots: EraserPool) -> None:
    async with slots.slot(lambda: False):
        await asyncio.sleep(100)
