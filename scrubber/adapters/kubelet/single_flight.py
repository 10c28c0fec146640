"""At most one request to the kubelet at a time, shared by all callers that arrived before it began.

The kubelet serves 100 requests per second to the whole node. A response that was already in transit when a caller
arrived is too old for it: its pod may have been admitted in between. Such callers share the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

_T = TypeVar("_T")


class SingleFlight(Generic[_T]):
    """Runs ``fetch`` for any number of callers; each call returns a result whose fetch began after the call.

    Cancelling a caller does not cancel the request that others share.
    """

    def __init__(self, fetch: Callable[[], Awaitable[_T]]) -> None:
        self._fetch = fetch
        self._running: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def get(self) -> _T:
        """Return the next result; an exception of ``fetch`` is raised in all callers that share it."""
        if self._next is None:
            self._next = asyncio.create_task(self._run_after(self._running), name="kubelet-question")
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """Cancel the requests in progress; their callers are cancelled."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        self._running = self._next = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run_after(self, before: asyncio.Task[_T] | None) -> _T:
        if before is not None:
            await asyncio.wait([before])
        # From here on callers are too late for this result.
        self._running, self._next = self._next, None
        return await self._fetch()
