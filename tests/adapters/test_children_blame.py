"""Questions whose answer others than the device can delay: no answer is nobody's fault, and nobody is asked apart."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from scrubber.adapters.children.message import LIMIT
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.questions import QuestionPool
from scrubber.domain.errors import Away

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
    made = QuestionPool(children, MODULE, deadline=LONG, blames=Away)
    yield made
    await made.close()


async def test_a_question_without_an_answer_blames_no_device_and_the_next_one_is_answered(pool: QuestionPool) -> None:
    with pytest.raises(Away, match="no fault of GPU-0"):
        await pool.ask("GPU-0", {"do": "hang"}, deadline=0.05)
    assert pool.stuck == frozenset()
    first, second = [await pool.ask(device, {"do": "tell"}) for device in ("GPU-0", "GPU-1")]
    assert first["pid"] == second["pid"]


async def test_a_question_that_kills_two_children_blames_no_device(pool: QuestionPool) -> None:
    with pytest.raises(Away, match="Two children"):
        await pool.ask("GPU-0", {"do": "die"})
    assert (await pool.ask("GPU-0", {"do": "tell", "echo": 1}))["echo"] == 1


async def test_a_question_that_cannot_be_sent_blames_no_device(pool: QuestionPool) -> None:
    with pytest.raises(Away, match="cannot be asked"):
        await pool.ask("GPU-0", {"do": "tell", "echo": "x" * LIMIT})


async def test_all_of_it_costs_one_process_that_cannot_be_ended() -> None:
    deaf = Children(kill_limit=0.05, send_signal=lambda pidfd, number: None)
    pool = QuestionPool(deaf, MODULE, deadline=LONG, blames=Away)
    with pytest.raises(Away, match="did not answer"):
        await pool.ask("GPU-0", {"do": "hang"}, deadline=0.05)
    for device in ("GPU-0", "GPU-1"):
        with pytest.raises(Away, match="cannot be ended"):
            await pool.ask(device, {"do": "tell"}, deadline=0.2)
    (undying,) = deaf.pids()
    os.kill(undying, signal.SIGKILL)
    again: dict[str, object] = {}
    async with asyncio.timeout(LONG):
        while not again:  # until its end is noticed
            with suppress(Away):
                again = await pool.ask("GPU-0", {"do": "tell", "echo": 1})
    assert again["echo"] == 1
    deaf.kill_limit = LONG  # they end at the end of their file, which may take a loaded machine a while
    await pool.close()
    await deaf.close()
