"""Time, so that tests own it. Engine code sleeps and times out through this only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go backwards; for deadlines inside one process."""

    def wall(self) -> float:
        """Seconds since the epoch; for the ledger and for people."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``; 0 yields to other tasks once."""

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Cancel the body after ``seconds`` and raise :class:`TimeoutError` from the ``async with``."""

    def patience(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        """As :meth:`timeout`; a standstill of this process for more than a tenth of ``seconds`` is given again, up to as much
        in all.

        For deadlines that a device is blamed for. The body is given a function that says how many of the seconds are over.
        """
