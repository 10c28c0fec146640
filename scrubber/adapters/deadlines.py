"""How long an answer is waited for by an event loop that may itself have stood still.

Promise: a deadline that passed while nobody could look is not held against whoever was asked. A device goes out of
service over a missed one, and what made the loop stand still (a node that swaps, a service that was stopped or got no
processor) was not that device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

__all__ = ["stall_tolerant_timeout"]

_CLOCK_CHECKS = 10


@asynccontextmanager
async def stall_tolerant_timeout(seconds: float) -> AsyncIterator[Callable[[], float]]:
    """As ``asyncio.timeout(seconds)``, of which a tenth is given again for each look at the clock that came too late.

    What is yielded says how many of the ``seconds`` are over; a standstill that is given again is none of them.

    No more than ``seconds`` is given again: what really hangs is known after twenty looks. A standstill of less than a tenth
    is taken for slowness and counts, however many follow each other.

    Whoever catches the ``TimeoutError`` still looks once, without waiting, for what has arrived by then.
    """
    loop = asyncio.get_running_loop()
    step = max(0.0, seconds) / _CLOCK_CHECKS
    left = spare = _CLOCK_CHECKS
    coming: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def late(now: float) -> bool:
            return now - coming.when() > step

        def counted() -> float:
            now = loop.time()
            begun = coming.when() - step
            return step * (_CLOCK_CHECKS - left) + (0.0 if spare and late(now) else min(step, now - begun))

        def look() -> None:
            nonlocal left, spare
            now = loop.time()
            if spare and late(now):
                spare -= 1
            else:
                left -= 1
            if left:
                next_at(now + step)
            else:
                limit.reschedule(now)

        def next_at(when: float) -> None:
            nonlocal coming
            coming = loop.call_at(when, look)

        next_at(loop.time() + step)
        try:
            yield counted
        finally:
            coming.cancel()
