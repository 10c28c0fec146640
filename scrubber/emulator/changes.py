"""One notifier for all changes in the emulated node, so that waiting needs neither polling nor sleeping.

Promise: a condition is checked when the wait starts and after every notification; no change is missed, because waiting
and notifying happen on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeNotifier:
    """Notified after every change of pods, containers, devices or registrations."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all tasks that wait for a condition."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``condition()`` holds.

        Return False when ``timeout`` seconds have passed first (``None``: no limit).
        """
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
