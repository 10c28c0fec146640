"""The real clock. Tests control time with another implementation of the same protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from scrubber.adapters.deadlines import stall_tolerant_timeout

__all__ = ["SystemClock"]


class SystemClock:
    """:class:`scrubber.ports.Clock` on the system clocks and the running event loop."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)

    def stall_tolerant_timeout(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        return stall_tolerant_timeout(seconds)
