"""Virtual time: it stops while any task can run, and jumps when every task waits.

Two runs of the same program take the same steps at the same instants. A program that waits for an impossible event, or
that never waits, fails instead of hanging.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any, ParamSpec, TypeVar

from scrubber.adapters.deadlines import stall_tolerant_timeout

__all__ = ["Deadlock", "Livelock", "VirtualClock", "VirtualLoop", "in_virtual_time"]

EPOCH = 1_800_000_000.0
"""Wall-clock seconds at which every timeline begins."""
_RESOLUTION = 1e-9
"""Seconds by which two timers that are due at the same instant may differ."""

P = ParamSpec("P")
T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits, and no timer will ever wake one."""


class Livelock(AssertionError):
    """Tasks keep each other busy without any time passing."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time. ``unretrieved`` collects exceptions that were never retrieved.

    It watches no descriptors and never blocks: instead of waiting, time jumps to the next timer. Timers due at the same
    instant run in the order in which they were set.
    """

    busy_limit = 50_000
    """How often the loop may go round without time passing."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._busy = 0
        self._begun: deque[asyncio.Handle] = vars(self)["_ready"]
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self.unretrieved: list[str] = []
        self.set_exception_handler(_note)

    def time(self) -> float:
        return self._now

    def stall(self, seconds: float) -> None:
        """Let time pass without running anything: a stopped process, or a blocked loop."""
        self._now += seconds

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._begun.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""

    def _run_once(self) -> None:
        """Run everything that is ready; if nothing is, let time jump to the next timer before."""
        ready, timers = self._begun, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Deadlock(f"At {self._now:g} s every task waits for an event that no task will cause.")
            if timers[0][0] > self._now:
                self._now = timers[0][0]
                self._busy = 0
        self._busy += 1
        if self._busy > self.busy_limit:
            self._busy = 0
            raise Livelock(f"At {self._now:g} s the loop went round {self.busy_limit} times, and no time passed.")
        due = self._now + _RESOLUTION
        while timers and timers[0][0] < due:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    unretrieved = f"{context.get('message')}: {context.get('exception')!r}"
    if "Killed(" not in unretrieved:  # nothing is left to retrieve what a task of a killed service raised
        loop.unretrieved.append(unretrieved)


class VirtualClock:
    """:class:`scrubber.ports.Clock` on a virtual loop.

    Attributes:
        offset: by how many seconds the wall clock was set.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.offset = 0.0

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH + self._loop.time() + self.offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)

    def stall_tolerant_timeout(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        return stall_tolerant_timeout(seconds)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Run a coroutine test on a separate loop; remaining tasks are cancelled, and their errors reported."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        loop = VirtualLoop()
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result = runner.run(test(*args, **kwargs))
        finally:
            loop.close()
        assert loop.unretrieved == []
        return result

    # pytest-asyncio must treat it as an ordinary function.
    del run.__wrapped__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run
