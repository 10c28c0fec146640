"""Timeouts of a process that occasionally stalls, in virtual time."""

import asyncio

import pytest

from scrubber.adapters.deadlines import stall_tolerant_timeout
from tests.simulation.timeline import VirtualLoop, in_virtual_time


def stand_still(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stall(seconds)


async def hang_for(seconds: float) -> float:
    """Wait for an event that never comes under a timeout of ``seconds``; return how long the wait took."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(TimeoutError):
        async with stall_tolerant_timeout(seconds):
            await asyncio.Event().wait()
    return loop.time() - begun


@in_virtual_time
async def test_hang_ends_at_the_stall_tolerant_timeout() -> None:
    assert await hang_for(2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
@in_virtual_time
async def test_timeout_of_zero_or_less_does_not_wait(seconds: float) -> None:
    assert await hang_for(seconds) == 0.0


@pytest.mark.parametrize("stall", [0.5, 0.95, 1.0, 1.05, 1.5, 100.0])
@in_virtual_time
async def test_process_stall_of_any_length_consumes_at_most_a_tenth_of_the_timeout(stall: float) -> None:
    async with stall_tolerant_timeout(1.0):
        await asyncio.sleep(0.02)
        stand_still(stall)
        await asyncio.sleep(0.8)


@pytest.mark.parametrize("stall", [0.0, 0.5, 0.95, 1.0, 1.05, 1.5, 100.0])
@pytest.mark.parametrize("before", [0.0, 0.06, 0.5])
@pytest.mark.parametrize("after", [0.0, 0.3])
@in_virtual_time
async def test_elapsed_time_excludes_the_process_stall(stall: float, before: float, after: float) -> None:
    async with stall_tolerant_timeout(1.0) as counted:
        await asyncio.sleep(before)
        stand_still(stall)
        await asyncio.sleep(after)
        elapsed = counted()
    assert before + after - 0.2 <= elapsed <= before + after + 0.2


@in_virtual_time
async def test_elapsed_time_without_a_process_stall_is_the_clock_time() -> None:
    async with stall_tolerant_timeout(1.0) as counted:
        for over in (0.0, 0.1, 0.25, 0.5, 0.99):
            await asyncio.sleep(over - counted())
            assert counted() == pytest.approx(over)


@in_virtual_time
async def test_repeated_process_stalls_end_the_wait_after_twice_the_timeout() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()

    def stand_still_again() -> None:
        stand_still(5.0)
        if loop.time() < begun + 1_000:
            loop.call_later(0.05, stand_still_again)

    loop.call_soon(stand_still_again)
    standstills = (await hang_for(1.0)) / 5.05
    assert 10 < standstills <= 20
