"""Requests that others than the device can delay: a missing answer is no device fault, and no request is isolated."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from scrubber.adapters.children.message import MAX_BODY_SIZE
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.domain.errors import Unavailable

MODULE = "tests.adapters.wayward_child"
LONG = 30.0


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children(kill_timeout=LONG)
    yield made
    await made.close()
    assert made.pids() == frozenset()


@pytest.fixture
async def pool(children: Children) -> AsyncIterator[RequestPool]:
    made = RequestPool(children, MODULE, deadline=LONG, error_type=Unavailable)
    yield made
    await made.close()


async def test_unanswered_driver_request_marks_no_device_stuck_and_the_next_one_succeeds(pool: RequestPool) -> None:
    with pytest.raises(Unavailable, match="not a fault of GPU-0"):
        await pool.request("GPU-0", {"do": "hang"}, deadline=0.05)
    assert pool.stuck_devices == frozenset()
    first, second = [await pool.request(device, {"do": "tell"}) for device in ("GPU-0", "GPU-1")]
    assert first["pid"] == second["pid"]


async def test_driver_request_that_kills_two_children_is_no_device_fault(pool: RequestPool) -> None:
    with pytest.raises(Unavailable, match="Two child processes"):
        await pool.request("GPU-0", {"do": "die"})
    assert (await pool.request("GPU-0", {"do": "tell", "echo": 1}))["echo"] == 1


async def test_driver_request_too_large_to_send_is_no_device_fault(pool: RequestPool) -> None:
    with pytest.raises(Unavailable, match="cannot be sent"):
        await pool.request("GPU-0", {"do": "tell", "echo": "x" * MAX_BODY_SIZE})


async def test_hanging_driver_requests_cost_at_most_one_unkillable_child() -> None:
    deaf = Children(kill_timeout=0.05, send_signal=lambda pidfd, number: None)
    pool = RequestPool(deaf, MODULE, deadline=LONG, error_type=Unavailable)
    with pytest.raises(Unavailable, match="did not answer"):
        await pool.request("GPU-0", {"do": "hang"}, deadline=0.05)
    for device in ("GPU-0", "GPU-1"):
        with pytest.raises(Unavailable, match="cannot be killed"):
            await pool.request(device, {"do": "tell"}, deadline=0.2)
    (undying,) = deaf.pids()
    os.kill(undying, signal.SIGKILL)
    again: dict[str, object] = {}
    async with asyncio.timeout(LONG):
        while not again:  # until its end is noticed
            with suppress(Unavailable):
                again = await pool.request("GPU-0", {"do": "tell", "echo": 1})
    assert again["echo"] == 1
    deaf.kill_timeout = LONG  # they exit at end of file, which may take a while on a loaded machine
    await pool.close()
    await deaf.close()
