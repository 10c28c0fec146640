"""One bell for everything in the emulated node that may change, so that nobody polls and nobody sleeps to wait.

Promise: a condition is looked at once when it is asked for and again after every ring; a change is never missed,
because waiting and ringing happen on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeNotifier:
    """Rung after every change of pods, containers, devices or registrations."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake everybody who waits for a condition."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``condition()`` holds; false when ``timeout`` seconds have passed first (``None``: no limit)."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    future = loop.create_future()
                    self._waiting.add(future)
                    try:
                        await future
                    finally:
                        self._waiting.discard(future)
        except TimeoutError:
            return condition()
        return True
