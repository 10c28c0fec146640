"""Dedicated threads for readers, so that input which a tenant makes slow to read does not block the event loop.

Guarantee: all threads exist from the first use on (so a node that later runs out of processes does not affect them),
functions never overlap in more threads than configured, and a cancelled caller leaves nothing half done: a function
that has started finishes in its thread, and its result is dropped.
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
    """Runs functions in ``threads`` threads, in the order of the calls.

    Args:
        threads: number of threads; with 1, functions never overlap.
        name: name of the threads, as shown by ``top -H`` or ``py-spy``.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    async def __call__(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``function`` in another thread; return its result or raise its exception.

        Raises:
            Unreadable: No thread can be started.
            Unavailable: The service is stopping.
        """
        return await asyncio.wrap_future(self._running_executor().submit(function, *args, **kwargs))

    def close(self) -> None:
        """Accept no more functions; those that have started finish without being waited for."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _running_executor(self) -> ThreadPoolExecutor:
        if self._closed:
            raise Unavailable("Processes are no longer inspected: the service is stopping.")
        if self._executor is None:
            self._executor = self._start_executor()
        return self._executor

    def _start_executor(self) -> ThreadPoolExecutor:
        executor = ThreadPoolExecutor(self._threads, self._name)
        together = threading.Barrier(self._threads)
        try:
            for _ in range(self._threads):  # each waits for the others, so each occupies a separate thread
                executor.submit(together.wait)
        except RuntimeError as exc:
            together.abort()
            executor.shutdown(wait=False, cancel_futures=True)
            raise Unreadable(
                "Processes cannot be inspected: no thread can be started, so the node has too many processes "
                "or too little memory. This is retried."
            ) from exc
        return executor
