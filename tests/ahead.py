"""Advance the running event loop's clock, so that a generous deadline passes at once.

Sockets, child processes and threads stay real. A test that needs a deadline to pass gives it the common patience, waits
until what it is about has begun, and calls :func:`advance_until`: nothing has to happen within a short time before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["advance", "advance_until"]

_STEP = 1.0
"""Seconds; less than a tenth of any deadline that is advanced over: ``stall_tolerant_timeout`` takes more for a stall."""
_GIVE_UP = 60.0


def advance(seconds: float) -> None:
    """Put the loop's clock forward at once, as after a stall of this process."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def advance_until(holds: Callable[[], bool]) -> None:
    """Put the loop's clock forward, step by step, until ``holds``. Every timer of this loop may expire meanwhile.

    Begin only when nothing with a deadline of its own (the start or the end of a child process) is under way.
    """
    loop, ahead, real = asyncio.get_running_loop(), 0.0, time.monotonic()
    before = loop.time
    loop.time = lambda: before() + ahead  # type: ignore[method-assign]
    while not holds():
        assert time.monotonic() < real + _GIVE_UP, "it did not happen however much time passed"
        ahead += _STEP
        await asyncio.sleep(0)
