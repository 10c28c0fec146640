"""How long somebody is waited for by a process that now and then stands still, in virtual time."""

import asyncio

import pytest

from scrubber.adapters.patience import patience
from tests.world.timeline import VirtualLoop, in_virtual_time


def stand_still(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stand_still(seconds)


async def hang_for(seconds: float) -> float:
    """Have patience with nobody for ``seconds``; how long that took."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(TimeoutError):
        async with patience(seconds):
            await asyncio.Event().wait()
    return loop.time() - begun


@in_virtual_time
async def test_who_hangs_is_given_up_after_the_seconds() -> None:
    assert await hang_for(2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
@in_virtual_time
async def test_without_any_time_nobody_is_waited_for(seconds: float) -> None:
    assert await hang_for(seconds) == 0.0


@pytest.mark.parametrize("standstill", [0.5, 0.95, 1.0, 1.05, 1.5, 100.0])
@in_virtual_time
async def test_a_standstill_of_any_length_takes_no_more_than_a_tenth_of_the_time(standstill: float) -> None:
    async with patience(1.0):
        await asyncio.sleep(0.02)
        stand_still(standstill)
        await asyncio.sleep(0.8)


@pytest.mark.parametrize("standstill", [0.0, 0.5, 0.95, 1.0, 1.05, 1.5, 100.0])
@pytest.mark.parametrize("before", [0.0, 0.06, 0.5])
@pytest.mark.parametrize("after", [0.0, 0.3])
@in_virtual_time
async def test_what_is_over_is_said_without_the_standstill(standstill: float, before: float, after: float) -> None:
    async with patience(1.0) as counted:
        await asyncio.sleep(before)
        stand_still(standstill)
        await asyncio.sleep(after)
        told = counted()
    assert before + after - 0.2 <= told <= before + after + 0.2


@in_virtual_time
async def test_without_a_standstill_it_is_the_time() -> None:
    async with patience(1.0) as counted:
        for over in (0.0, 0.1, 0.25, 0.5, 0.99):
            await asyncio.sleep(over - counted())
            assert counted() == pytest.approx(over)


@in_virtual_time
async def test_standing_still_again_and_again_is_given_up_after_twice_the_time() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()

    def stand_still_again() -> None:
        stand_still(5.0)
        if loop.time() < begun + 1_000:
            loop.call_later(0.05, stand_still_again)

    loop.call_soon(stand_still_again)
    standstills = (await hang_for(1.0)) / 5.05
    assert 10 < standstills <= 20
