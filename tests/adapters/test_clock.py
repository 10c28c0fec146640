"""The system clock fulfils the contract of its port."""

import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.ports.runtime import Clock


async def test_monotonic_clock_advances_and_never_goes_back() -> None:
    clock: Clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0.001)
    assert clock.monotonic() >= before + 0.001
    assert clock.wall() > 1_700_000_000


async def test_clock_timeout_ends_its_body_with_timeout_error() -> None:
    clock = SystemClock()
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.001):
            await clock.sleep(60)
