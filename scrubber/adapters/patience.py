"""How long an answer is waited for by an event loop that may itself have stood still.

Promise: a deadline that passed while nobody could look is not held against whoever was asked. A device goes out of
service over a missed one, and what made the loop stand still (a node that swaps, a service that was stopped or got no
processor) was not that device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["patience"]


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout(seconds)``; a loop that comes late to the deadline gives as long again as it is late.

    That is given once, and no more than ``seconds``: what really hangs is known after twice that at the latest.

    Whoever catches the ``TimeoutError`` still looks once, without waiting, for what has arrived by then.
    """
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds
    async with asyncio.timeout(None) as limit:

        def at_the_deadline() -> None:
            now = loop.time()
            limit.reschedule(now + min(now - due, seconds))

        look = loop.call_at(due, at_the_deadline)
        try:
            yield
        finally:
            look.cancel()
