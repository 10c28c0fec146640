"""Advance the clock of the running event loop, so that a long deadline expires immediately.

Sockets, child processes and threads stay real. A test that needs a deadline to expire uses the usual long timeout,
waits until the operation under test has started, and calls :func:`advance_until`. No step then depends on the machine's
speed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["advance", "advance_until"]

_STEP = 1.0
"""Seconds. Less than a tenth of any deadline that is skipped: ``stall_tolerant_timeout`` treats a larger step as a
stall."""
_GIVE_UP = 60.0


def advance(seconds: float) -> None:
    """Advance the loop's clock at once, as after a stall of this process."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def advance_until(holds: Callable[[], bool]) -> None:
    """Advance the loop's clock step by step until ``holds`` returns true. Any timer of the loop may expire meanwhile.

    Call it only while no operation with its own deadline (the start or the end of a child process) is in progress.
    """
    loop, ahead, real = asyncio.get_running_loop(), 0.0, time.monotonic()
    before = loop.time
    loop.time = lambda: before() + ahead  # type: ignore[method-assign]
    while not holds():
        assert time.monotonic() < real + _GIVE_UP, "it did not happen however much time passed"
        ahead += _STEP
        await asyncio.sleep(0)
