"""The eraser pool: what work shares limits it, no slot is lost, and a scrub for which a start waits goes first."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.domain.device import SharedResource
from scrubber.engine.eraser_pool import EraserPool, ScrubPriority
from tests.simulation.timeline import in_virtual_time


class Line:
    """Tasks that want a slot, and the order in which they got one.

    Args:
        slots: of the resource that tasks share unless they name another one.
        limit: of the pool.
    """

    def __init__(self, slots: int = 1, limit: int | None = None) -> None:
        self.limit = limit
        self.shared = SharedResource("host memory", slots)
        self.slots = EraserPool(lambda: self.limit)
        self.order: list[str] = []
        self.inside: Counter[SharedResource | None] = Counter()
        self.most = 0
        self.urgent: set[str] = set()
        self.reserved: set[str] = set()
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.resources: dict[str, SharedResource | None] = {}

    async def join(self, name: str) -> None:
        """Let ``name`` request a slot of the shared resource, and wait for it if necessary."""
        await self.join_for(name, self.shared)

    async def join_for(self, name: str, resource: SharedResource | None) -> None:
        self.leave[name], self.resources[name] = asyncio.Event(), resource
        self.tasks[name] = asyncio.create_task(self._work(name, resource))
        await asyncio.sleep(0.01)

    def _priority(self, name: str) -> ScrubPriority:
        if name in self.urgent:
            return ScrubPriority.START_WAITS
        return ScrubPriority.RESERVED if name in self.reserved else ScrubPriority.IDLE

    async def _work(self, name: str, resource: SharedResource | None) -> None:
        async with self.slots.slot(resource, lambda: self._priority(name)):
            self.order.append(name)
            self.inside[resource] += 1
            self.most = max(self.most, self.inside.total())
            try:
                await self.leave[name].wait()
            finally:
                self.inside[resource] -= 1

    def has_room_for(self, name: str) -> bool:
        """Whether nothing but another task's turn could keep ``name`` waiting."""
        resource = self.resources[name]
        fits = resource is None or self.inside[resource] < resource.slots
        return fits and (self.limit is None or self.inside.total() < self.limit)

    async def done(self, name: str) -> None:
        self.leave[name].set()
        await asyncio.sleep(0.01)

    async def wait_until_done(self) -> None:
        for name in list(self.tasks):
            await self.done(name)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@in_virtual_time
async def test_eraser_pool_never_runs_more_erasers_than_their_shared_resource_has_slots() -> None:
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
async def test_free_eraser_slot_goes_to_a_reserved_device_after_urgent_scrubs_and_before_all_others() -> None:
    line = Line(1)
    for name in "abcd":
        await line.join(name)
    line.reserved |= {"c", "d"}
    line.urgent.add("d")
    await line.done("a")
    await line.done("d")
    assert line.order == ["a", "d", "c"]
    await line.wait_until_done()


@in_virtual_time
async def test_erasers_of_devices_with_memory_of_their_own_all_run_at_once() -> None:
    line = Line()
    for name in "abcdefgh":
        await line.join_for(name, None)
    assert line.most == 8
    await line.wait_until_done()


@in_virtual_time
async def test_erasers_that_wait_for_one_shared_resource_delay_no_eraser_of_another() -> None:
    line = Line(1)
    for name in "ab":
        await line.join(name)
    await line.join_for("other memory", SharedResource("other memory", 1))
    await line.join_for("own memory", None)
    assert line.order == ["a", "other memory", "own memory"]
    await line.wait_until_done()


@in_virtual_time
async def test_limit_of_the_eraser_pool_counts_the_erasers_of_all_resources() -> None:
    line = Line(2, limit=2)
    await line.join("a")
    await line.join_for("b", None)
    await line.join("c")
    await line.join_for("d", None)
    assert line.order == ["a", "b"]
    await line.wait_until_done()
    assert line.most == 2


@in_virtual_time
async def test_raised_limit_of_the_eraser_pool_takes_effect_at_once() -> None:
    line = Line(limit=1)
    for name in "abc":
        await line.join_for(name, None)
    line.limit = None
    line.slots.assign()
    await asyncio.sleep(0.01)
    assert line.order == ["a", "b", "c"]
    await line.wait_until_done()


@in_virtual_time
async def test_lowered_limit_of_the_eraser_pool_ends_no_eraser() -> None:
    line = Line()
    for name in "abc":
        await line.join_for(name, None)
    line.limit = 1
    for name in "de":
        await line.join_for(name, None)
    for name in "ab":
        await line.done(name)
    assert line.order == ["a", "b", "c"]
    await line.done("c")
    assert line.order == ["a", "b", "c", "d"]
    await line.wait_until_done()


def test_size_of_the_eraser_pool_counts_each_shared_resource_once() -> None:
    shared, other = SharedResource("host memory", 2), SharedResource("other memory", 3)
    assert EraserPool().size([None, None, shared, shared, shared, other]) == 2 + 2 + 3
    assert EraserPool(lambda: 4).size([None, None, shared, other]) == 4
    assert EraserPool().size([]) == 0


RESOURCES = (None, SharedResource("a", 1), SharedResource("b", 2))
ACTIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(RESOURCES)),
    st.tuples(st.sampled_from(["done", "cancel", "done at once", "urgent", "reserve"]), st.integers(0, 9)),
    st.tuples(st.just("limit"), st.none() | st.integers(1, 3)),
)


@given(st.lists(ACTIONS, max_size=40))
def test_no_eraser_slot_is_lost_exceeded_or_left_unused(actions: list[tuple[str, object]]) -> None:
    in_virtual_time(_carry_out)(actions)


async def _carry_out(actions: list[tuple[str, object]]) -> None:
    """Carry out ``actions``; a task is named by its number, and one that does not exist is left alone."""
    line = Line()
    for action, value in actions:
        name = str(value)
        before = set(line.order)
        if action == "join":
            assert value is None or isinstance(value, SharedResource)
            await line.join_for(str(len(line.tasks)), value)
        elif action == "limit":
            assert value is None or isinstance(value, int)
            line.limit = value
            line.slots.assign()
        elif name in line.tasks and action == "urgent":
            line.urgent.add(name)
        elif name in line.tasks and action == "reserve":
            line.reserved.add(name)
        elif name in line.tasks and action == "cancel":
            line.tasks[name].cancel()
        elif name in line.tasks:
            line.leave[name].set()
        if action == "done at once":  # the next action meets the slot between two owners
            await asyncio.sleep(0)
            continue
        await asyncio.sleep(0.01)
        waiting = [each for each, task in line.tasks.items() if not task.done() and each not in line.order]
        assert not any(line.has_room_for(each) for each in waiting)
        assert all(used <= shared.slots for shared, used in line.inside.items() if shared is not None)
        started = [each for each in line.order if each not in before]
        assert action == "limit" or line.limit is None or not started or line.inside.total() <= line.limit
        assert (line.slots.busy, line.slots.waiting) == (line.inside.total(), len(waiting))
    await line.wait_until_done()
    line.limit = None
    line.slots.assign()
    await asyncio.gather(*line.tasks.values(), return_exceptions=True)
    assert (line.slots.busy, line.slots.waiting) == (0, 0)


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
    slots = EraserPool(lambda: 1)
    with pytest.raises(RuntimeError, match="the eraser died"):
        await _die_while_another_waits(slots)
    async with asyncio.timeout(1.0), slots.slot(None, lambda: ScrubPriority.IDLE):
        pass


async def _die_while_another_waits(slots: EraserPool) -> None:
    async with slots.slot(None, lambda: ScrubPriority.IDLE):
        waiter = asyncio.create_task(_hold(slots))
        await asyncio.sleep(0.01)
        waiter.cancel()
        raise RuntimeError("the eraser died")


async def _hold(slots: EraserPool) -> None:
    async with slots.slot(None, lambda: ScrubPriority.IDLE):
        await asyncio.sleep(100)
