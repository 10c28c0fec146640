"""The event loop and the servers of all targets: one for all inputs, because a start costs more than most parsers."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["close", "complete", "directory", "on_close"]

_T = TypeVar("_T")
_closers: list[Callable[[], object]] = []


@cache
def _loop() -> asyncio.AbstractEventLoop:
    atexit.register(close)
    return asyncio.new_event_loop()


def complete(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run ``coroutine`` and return its result."""
    return _loop().run_until_complete(coroutine)


def directory() -> Path:
    """Return a new directory, in memory where the machine has such; it is removed at the end."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(prefix="f-", dir=memory if memory.is_dir() else None)
    on_close(made.cleanup)
    return Path(made.name)


def on_close(closer: Callable[[], object]) -> None:
    """Call ``closer`` at the end of the tests or of the process, the last one first."""
    _closers.append(closer)


def close() -> None:
    """Close everything; the next input starts it again."""
    while _closers:
        _closers.pop()()
    if _loop.cache_info().currsize:
        _loop().close()
        _loop.cache_clear()
