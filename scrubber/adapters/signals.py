"""How events of a driver reach whoever listens: the latest of each kind, and never a queue that overflows.

Edges only, told to whoever listens at that time: a consumer reads a snapshot for each. Equal signals that nobody has
read yet are one, so a consumer that is slow loses no kind of event and a flood takes no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from scrubber.domain.telemetry import Signal

__all__ = ["SignalStream", "Signals"]


class SignalStream:
    """The signals since :meth:`Signals.listen`, for one consumer."""

    def __init__(self, closed: Callable[[SignalStream], None]) -> None:
        self._when_closed = closed
        self._waiting: dict[Signal, None] = {}
        self._news = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> SignalStream:
        return self

    async def __anext__(self) -> Signal:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        signal = next(iter(self._waiting))
        del self._waiting[signal]
        return signal

    async def aclose(self) -> None:
        self.close()

    def tell(self, signals: Iterable[Signal]) -> None:
        self._waiting.update((signal, None) for signal in signals)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._when_closed(self)


class Signals:
    """One driver's signals, for any number of listeners."""

    def __init__(self) -> None:
        self._streams: set[SignalStream] = set()

    def listen(self) -> SignalStream:
        """Signals from now on."""
        stream = SignalStream(self._streams.discard)
        self._streams.add(stream)
        return stream

    def tell(self, signals: Iterable[Signal]) -> None:
        told = tuple(signals)
        if told:
            for stream in self._streams:
                stream.tell(told)

    def close(self) -> None:
        """Every stream ends once it has been read to its end."""
        for stream in tuple(self._streams):
            stream.close()
