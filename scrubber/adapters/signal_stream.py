"""Delivery of driver events to subscribers: each kind at most once until it is read, without a queue that can overflow.

Signals are edges, delivered only to those subscribed at that time; for each signal the consumer reads a snapshot. Equal
signals that have not been read yet are merged, so a slow consumer misses no kind of event and a flood of events takes
no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from scrubber.domain.telemetry import Signal

__all__ = ["SignalBroadcaster", "SignalStream"]


class SignalStream:
    """The signals since :meth:`SignalBroadcaster.subscribe`, for one consumer."""

    def __init__(self, on_close: Callable[[SignalStream], None]) -> None:
        self._on_close = on_close
        self._pending: dict[Signal, None] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> SignalStream:
        return self

    async def __anext__(self) -> Signal:
        while not self._pending:
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        signal = next(iter(self._pending))
        del self._pending[signal]
        return signal

    async def aclose(self) -> None:
        self.close()

    def push(self, signals: Iterable[Signal]) -> None:
        self._pending.update((signal, None) for signal in signals)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._on_close(self)


class SignalBroadcaster:
    """The signals of one driver, for any number of subscribers."""

    def __init__(self) -> None:
        self._streams: set[SignalStream] = set()

    def subscribe(self) -> SignalStream:
        """Return a stream of the signals from now on."""
        stream = SignalStream(self._streams.discard)
        self._streams.add(stream)
        return stream

    def publish(self, signals: Iterable[Signal]) -> None:
        batch = tuple(signals)
        if batch:
            for stream in self._streams:
                stream.push(batch)

    def close(self) -> None:
        """Close every stream; each one ends after its pending signals have been read."""
        for stream in tuple(self._streams):
            stream.close()
