"""One question to the kubelet at a time, shared by everybody who asked before it began.

The kubelet answers 100 questions a second to the whole node. An answer that was already on the wire when somebody
asked is too old for them: their pod may have been admitted in between. They share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

_T = TypeVar("_T")


class SingleFlight(Generic[_T]):
    """Runs ``fetch`` for any number of callers; whoever calls gets an answer that began after the call.

    A caller that is cancelled leaves the others' question on its way.
    """

    def __init__(self, fetch: Callable[[], Awaitable[_T]]) -> None:
        self._fetch = fetch
        self._running: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def get(self) -> _T:
        """The next answer; what ``fetch`` raises is raised to all who share it."""
        if self._next is None:
            self._next = asyncio.create_task(self._run_after(self._running), name="kubelet-question")
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """Give up the questions that are on their way; their callers are cancelled."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        self._running = self._next = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run_after(self, before: asyncio.Task[_T] | None) -> _T:
        if before is not None:
            await asyncio.wait([before])
        # From here on callers are too late for this answer.
        self._running, self._next = self._next, None
        return await self._fetch()
