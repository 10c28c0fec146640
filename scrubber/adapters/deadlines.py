"""Timeouts for an event loop that may itself have stalled.

Guarantee: a deadline that expired while the event loop was not running does not count against the component that was
queried. A missed deadline takes a device out of service, and the cause of the stall (a node that swaps, a service that
was stopped or got no CPU time) is not that device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

__all__ = ["stall_tolerant_timeout"]

_CLOCK_CHECKS = 10


# See docs/decisions/0019-children-and-stall-tolerant-deadlines.md.
@asynccontextmanager
async def stall_tolerant_timeout(seconds: float) -> AsyncIterator[Callable[[], float]]:
    """Like ``asyncio.timeout(seconds)``, but grant a tenth of ``seconds`` again for each clock check that ran late.

    Yields a function that returns how many of the ``seconds`` have elapsed; forgiven stalls are not included.

    At most ``seconds`` in total are granted again, so a real hang is detected after twenty clock checks. A stall
    shorter than a tenth of ``seconds`` is treated as slowness and counts, however many of them follow each other.

    A caller that catches the ``TimeoutError`` must still check once, without waiting, for results that have arrived by
    then.
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
