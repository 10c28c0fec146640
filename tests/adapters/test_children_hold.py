"""Holding a device back: while it is held, no child that ever asked about it lives, and the others get their answers."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.questions import QuestionPool
from scrubber.domain.errors import Away, Stuck
from tests.ahead import advance_until

MODULE = "tests.adapters.wayward_child"
LONG = 30.0


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(kill_limit=LONG)
    yield made
    await made.close()
    assert made.pids() == frozenset()


@pytest.fixture
async def pool(children: Children) -> AsyncIterator[QuestionPool]:
    made = QuestionPool(children, MODULE, deadline=LONG)
    yield made
    await made.close()


@pytest.fixture
async def deaf() -> AsyncIterator[Children]:
    """Children that no signal of ours ends; the end of their file does, unless something keeps them."""
    made = Children(kill_limit=0.05, send_signal=lambda pidfd, number: None)
    yield made
    made.kill_limit = LONG  # a loaded machine may take a while for that
    await made.close()


@pytest.fixture
async def deaf_pool(deaf: Children) -> AsyncIterator[QuestionPool]:
    made = QuestionPool(deaf, MODULE, deadline=LONG)
    yield made
    deaf.kill_limit = LONG
    await made.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


async def it_hangs(fifo: Path) -> None:
    assert await asyncio.to_thread(fifo.read_text, "ascii") == "It hangs."


async def test_no_child_that_asked_about_a_device_lives_while_it_is_held(
    pool: QuestionPool, children: Children
) -> None:
    await pool.ask("held", {"do": "tell"})
    async with pool.hold(["held"]):
        assert children.pids() == frozenset()


async def test_a_held_device_is_asked_nothing_and_the_others_go_on_with_a_fresh_child(pool: QuestionPool) -> None:
    before = await pool.ask("other", {"do": "tell"})
    async with pool.hold(["held", "0000:01:00.0"]):
        for name in ("held", "0000:01:00.0"):
            with pytest.raises(Away, match="is being reset"):
                await pool.ask(name, {"do": "tell"})
        during = await pool.ask("other", {"do": "tell", "echo": 1})
        assert (during["echo"], during["pid"] != before["pid"]) == (1, True)
    assert (await pool.ask("held", {"do": "tell"}))["pid"] == during["pid"]


async def test_a_question_at_its_turn_is_answered_first_and_those_behind_it_are_told(
    pool: QuestionPool,
) -> None:
    names = ("other", "held", "held", "other")
    queue = [asyncio.create_task(pool.ask(name, {"do": "tell", "echo": name})) for name in names]
    await asyncio.sleep(0)  # each stands in line now
    async with pool.hold(["held"]):
        for refused in queue[1:3]:
            with pytest.raises(Away, match="held"):
                await refused
        assert [(await answered)["echo"] for answered in (queue[0], queue[3])] == ["other", "other"]


async def test_a_stuck_device_can_be_held_because_whoever_hung_over_it_was_ended(
    pool: QuestionPool, children: Children
) -> None:
    with pytest.raises(Stuck):
        await pool.ask("held", {"do": "hang"}, deadline=0.05)
    async with pool.hold(["held"]):
        assert all([await pool.ask("other", {"do": "tell"})])
        assert len(children.pids()) == 1
    assert (await pool.ask("held", {"do": "tell", "echo": 1}))["echo"] == 1


async def test_a_probe_that_is_at_its_question_is_ended_before_its_device_is_held(
    pool: QuestionPool, children: Children, fifo: Path
) -> None:
    with pytest.raises(Stuck):
        await pool.ask("held", {"do": "hang"}, deadline=0.05)
    await pool.ask("held", {"do": "tell"})  # whoever hung is over by now, and the probe is ready
    probing = asyncio.create_task(pool.ask("held", {"do": "hang", "fifo": str(fifo)}))
    await it_hangs(fifo)

    async def hold() -> frozenset[int]:
        async with pool.hold(["held"]):
            return children.pids()

    holding = asyncio.create_task(hold())
    async with asyncio.timeout(LONG):
        while len(children.pids()) > 1:  # until the shared child is over, and the probe is waited for
            await asyncio.to_thread(os.sched_yield)
    await advance_until(probing.done)
    assert await holding == frozenset()
    with pytest.raises(Stuck):
        await probing


@pytest.mark.parametrize("held", ["sick", "well"])
async def test_a_device_is_not_held_while_a_child_that_asked_about_it_cannot_be_ended(
    deaf: Children, deaf_pool: QuestionPool, held: str
) -> None:
    await deaf_pool.ask("well", {"do": "tell"})
    with pytest.raises(Stuck):
        await deaf_pool.ask("sick", {"do": "hang"}, deadline=0.05)
    with pytest.raises(Stuck, match=rf"{held}.*cannot be ended"):
        async with deaf_pool.hold([held]):
            raise AssertionError("it was held")
    # The child that was asked last ends at the end of its file, and may take longer for that than the limit.
    (undying,) = (each for each in deaf.abandoned if each.device == "sick")
    os.kill(undying.pid, signal.SIGKILL)
    async with asyncio.timeout(LONG):
        while True:  # until its end is noticed
            with suppress(Stuck):
                async with deaf_pool.hold([held]):
                    break
    assert (await deaf_pool.ask(held, {"do": "tell", "echo": 1}))["echo"] == 1


async def test_a_child_that_cannot_be_ended_keeps_every_later_hold_from_its_devices_too(
    deaf: Children, deaf_pool: QuestionPool
) -> None:
    await deaf_pool.ask("held", {"do": "tell"})
    (undying,) = deaf.pids()
    os.kill(undying, signal.SIGSTOP)
    assert await _undying(deaf_pool, "held") == undying
    await _end_by_hand(undying, deaf_pool, "held")


async def test_a_child_that_only_its_socket_left_keeps_its_device_from_being_held(
    deaf: Children, deaf_pool: QuestionPool, tmp_path: Path
) -> None:
    await deaf_pool.ask("held", {"do": "tell"})
    (lingering,) = deaf.pids()
    fresh = await deaf_pool.ask("held", {"do": "leave-once", "marker": str(tmp_path / "left")})
    assert await _undying(deaf_pool, "held") == lingering
    assert (await deaf_pool.ask("held", {"do": "tell"}))["pid"] == fresh["pid"], "nobody pays for what cannot be ended"
    await _end_by_hand(lingering, deaf_pool, "held")


async def test_a_probe_that_has_answered_and_cannot_be_ended_keeps_its_device_from_being_held(
    deaf: Children, deaf_pool: QuestionPool, tmp_path: Path
) -> None:
    cure = tmp_path / "cure"
    question: Message = {"do": "hang-without", "file": str(cure), "then": "linger"}
    await deaf_pool.ask("well", {"do": "tell"})
    (hung,) = deaf.pids()
    with pytest.raises(Stuck):
        await deaf_pool.ask("held", question, deadline=0.05)
    os.kill(hung, signal.SIGKILL)
    cure.touch()
    async with asyncio.timeout(LONG):
        while True:  # until the end of whoever hung is noticed
            with suppress(Stuck):
                probe = await deaf_pool.ask("held", question)
                break
    assert await _undying(deaf_pool, "held") == probe["pid"]
    deaf.kill_limit = LONG  # the shared child ends at the end of its file, which may take a loaded machine a while
    async with deaf_pool.hold(["well"]):
        pass  # the probe has never asked about this one
    await _end_by_hand(int(str(probe["pid"])), deaf_pool, "held")


async def _undying(pool: QuestionPool, device: str) -> int:
    """The process that keeps ``device`` from being held, as often as somebody tries."""
    named = set[int]()
    for _ in range(2):
        with pytest.raises(Stuck, match="cannot be ended") as refusal:
            async with pool.hold([device]):
                raise AssertionError("it was held")
        named |= {int(each) for each in re.findall(r"process (\d+)", str(refusal.value))}
    (pid,) = named
    return pid


async def _end_by_hand(pid: int, pool: QuestionPool, device: str) -> None:
    """Return once the pool has noticed, and the device can be held."""
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LONG):
        while True:
            with suppress(Stuck):
                async with pool.hold([device]):
                    return


async def test_a_device_that_two_hold_is_held_until_both_let_go(pool: QuestionPool) -> None:
    async with pool.hold(["held"]):
        async with pool.hold(["held", "other"]):
            pass
        with pytest.raises(Away):
            await pool.ask("held", {"do": "tell"})
        assert (await pool.ask("other", {"do": "tell", "echo": 1}))["echo"] == 1
    assert (await pool.ask("held", {"do": "tell", "echo": 2}))["echo"] == 2


async def test_a_hold_that_is_given_up_lets_the_device_go(pool: QuestionPool, fifo: Path) -> None:
    hung = asyncio.create_task(pool.ask("other", {"do": "hang", "fifo": str(fifo)}))
    await it_hangs(fifo)

    async def hold() -> None:
        async with pool.hold(["held"]):
            raise AssertionError("the child that hangs was not waited for")

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await advance_until(hung.done)
    assert (await pool.ask("held", {"do": "tell", "echo": 1}))["echo"] == 1
    with pytest.raises(Stuck):
        await hung
