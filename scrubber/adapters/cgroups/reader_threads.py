"""Threads of a reader's own, so that what a tenant makes long to read is not waited for on the event loop.

Promise: the threads are there from the first use on (a node that has run out of processes meanwhile has not taken them
away), nothing runs in two of them that was not meant to, and a caller that is cancelled leaves nothing half done: what
was begun ends in its thread, and nobody hears of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from scrubber.domain.errors import Unavailable, Unreadable

__all__ = ["ReaderThreads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ReaderThreads:
    """Runs functions in ``threads`` threads, in the order in which they were asked for.

    Args:
        threads: with one, what is run never overlaps.
        name: of the threads, for whoever looks at the service with ``top -H`` or ``py-spy``.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    async def __call__(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What ``function`` answers or raises, from another thread.

        Raises:
            Unreadable: there is no thread to run it in.
            Unavailable: the service is stopping.
        """
        return await asyncio.wrap_future(self._running_executor().submit(function, *args, **kwargs))

    def close(self) -> None:
        """Take on nothing more; what has begun ends by itself, and nobody waits for it here."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _running_executor(self) -> ThreadPoolExecutor:
        if self._closed:
            raise Unavailable("No process is looked at any more: the service is stopping.")
        if self._executor is None:
            self._executor = self._start_executor()
        return self._executor

    def _start_executor(self) -> ThreadPoolExecutor:
        executor = ThreadPoolExecutor(self._threads, self._name)
        together = threading.Barrier(self._threads)
        try:
            for _ in range(self._threads):  # each waits for the others, so each needs a thread of its own
                executor.submit(together.wait)
        except RuntimeError as exc:
            together.abort()
            executor.shutdown(wait=False, cancel_futures=True)
            raise Unreadable(
                "Processes cannot be looked at: no thread can be started, so the node has too many processes or too "
                "little memory. It is tried again."
            ) from exc
        return executor
