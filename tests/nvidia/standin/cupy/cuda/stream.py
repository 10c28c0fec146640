"""Streams are queues that are processed when a program waits; events are entries in them that record the time."""

from __future__ import annotations

import time
from types import TracebackType

from cupy.cuda import runtime
from tests.nvidia.hostcontext import NULL_STREAM

__all__ = ["Event", "Stream", "get_elapsed_time", "pointer_of"]

_current: list[int] = [NULL_STREAM]
_NOT_READY = 600


class Stream:
    """A separate queue; a non-blocking one and the null stream do not wait for each other."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = NULL_STREAM if null else runtime.context().new_stream(non_blocking=non_blocking)

    def synchronize(self) -> None:
        runtime.context().finish(self.ptr)

    @property
    def done(self) -> bool:
        """Return whether the queue is empty; every call does one step of its work."""
        runtime.context().check()
        return not runtime.context().step(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _current.append(self.ptr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.pop()


def pointer_of(stream: Stream | None) -> int:
    """Return the queue of ``stream``; without one that of the current stream."""
    return _current[-1] if stream is None else int(stream.ptr)


class Event:
    """A moment in a stream's work."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        runtime.context().check()
        self._stream: int | None = None
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream, self.at = pointer_of(stream), None
        runtime.context().put(self._stream, self._happen)

    def synchronize(self) -> None:
        """Wait for the event; returns at once if it was never recorded, as in the real one."""
        context = runtime.context()
        context.check()
        while self._stream is not None and self.at is None:
            if not context.step(self._stream):
                return

    @property
    def done(self) -> bool:
        """Return whether the event has happened; every call does one step of its stream's work."""
        runtime.context().check()
        if self._stream is not None and self.at is None:
            runtime.context().step(self._stream)
        return self._stream is None or self.at is not None

    def _happen(self) -> None:
        self.at = time.perf_counter()


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two events that have both happened."""
    if start_event.at is None or end_event.at is None:
        raise runtime.CUDARuntimeError(_NOT_READY)
    return (end_event.at - start_event.at) * 1000
