"""Virtual time: it stops while any task can run, and jumps when every task waits.

Two runs of the same program take the same steps at the same instants. A program that waits for an impossible event, or
that never waits, fails instead of hanging.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, TypeVar

from scrubber.adapters.deadlines import stall_tolerant_timeout

__all__ = ["Deadlock", "Livelock", "VirtualClock", "VirtualLoop", "in_virtual_time"]

EPOCH = 1_800_000_000.0
"""Wall-clock seconds at which every timeline begins."""

P = ParamSpec("P")
T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits, and no timer will ever wake one."""


class Livelock(AssertionError):
    """Tasks keep each other busy without any time passing."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that watches no descriptors and never blocks: instead of waiting, time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.busy_limit = 50_000
        self._busy = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"At {self.now:g} s every task waits for an event that no task will cause.")
        if timeout > 0:
            self.now += timeout
            self._busy = 0
        else:
            self._busy += 1
            if self._busy > self.busy_limit:
                self._busy = 0
                raise Livelock(f"At {self.now:g} s the loop went round {self.busy_limit} times, and no time passed.")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time. ``unretrieved`` collects exceptions that were never retrieved."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.unretrieved: list[str] = []
        self.set_exception_handler(_note)

    def time(self) -> float:
        return self._jumping.now

    def stall(self, seconds: float) -> None:
        """Let time pass without running anything: a stopped process, or a blocked loop."""
        self._jumping.now += seconds


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
