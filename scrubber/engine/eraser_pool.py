"""Limits how many erasers run at once on the node and decides which scrub goes first."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

__all__ = ["EraserPool"]


# See docs/decisions/0005-scrub-order-and-pauses.md.
class EraserPool:
    """A bounded number of slots. A free slot goes to a scrub that a container start waits for, else to the oldest."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._order = count()
        self._waiting: list[tuple[int, asyncio.Future[None], Callable[[], bool]]] = []

    @property
    def free(self) -> int:
        return self._free

    @property
    def busy(self) -> int:
        return self._size - self._free

    @property
    def waiting(self) -> int:
        """Number of scrubs that wait for a slot."""
        return sum(not turn.done() for _, turn, _ in list(self._waiting))

    @asynccontextmanager
    async def slot(self, is_urgent: Callable[[], bool]) -> AsyncIterator[None]:
        """Hold a slot; ``is_urgent`` is evaluated at the moment one becomes free."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            entry = (next(self._order), turn, is_urgent)
            heapq.heappush(self._waiting, entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]
        if not self._waiting:
            self._free += 1
            return
        chosen = min(self._waiting, key=lambda entry: (not entry[2](), entry[0]))
        self._waiting.remove(chosen)
        chosen[1].set_result(None)
