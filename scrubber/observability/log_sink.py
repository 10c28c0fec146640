"""Where log lines go: to whoever reads them, as long as somebody does.

Promise: writing never raises, and waits for a reader who has fallen behind once, for :data:`PATIENCE`, until he has caught
up. What cannot be written is lost and counted; what follows begins on a line of its own.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import TextIO

__all__ = ["PATIENCE", "Lines", "Losses"]

PATIENCE = 0.05
"""Seconds."""


class Losses:
    """Lines that could not be written, until somebody counts them and from then on."""

    def __init__(self) -> None:
        self._uncounted = 0
        self._count: Callable[[], None] | None = None

    def one(self) -> None:
        """A line was lost."""
        if self._count is None:
            self._uncounted += 1
        else:
            self._count()

    def counted_by(self, count: Callable[[], None]) -> None:
        """``count`` is called for each line that was lost, those before this call too. It must not raise."""
        lost, self._uncounted, self._count = self._uncounted, 0, count
        for _ in range(lost):
            count()


class Lines:
    """What structlog writes rendered lines with. Lines of several threads do not mix.

    Args:
        stream: None where there is none.
        patience: seconds that a reader who has fallen behind is waited for.
    """

    def __init__(self, stream: TextIO | None, losses: Losses, *, patience: float = PATIENCE) -> None:
        self._stream = stream
        self._losses = losses
        self._patience = patience
        self._lock = threading.Lock()
        self._behind = False
        self._torn = False
        self._ready = select.poll()
        self._descriptor = _descriptor(stream)
        if self._descriptor is not None:
            self._ready.register(self._descriptor, select.POLLOUT)

    def write(self, line: str) -> None:
        with self._lock:
            try:
                written = self._written(line)
            except (OSError, ValueError):  # closed, full, or nobody reads any more
                written = False
        if not written:
            self._losses.one()

    debug = info = warning = error = critical = write

    def _written(self, line: str) -> bool:
        if self._stream is None or self._stream.closed:  # its number may be another file's by now
            return False
        if self._descriptor is None:
            self._stream.write(line + "\n")
            self._stream.flush()
            return True
        text = f"\n{line}\n" if self._torn else f"{line}\n"
        left = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        while left:
            if not self._takes_more():
                return False
            # As much as is taken without waiting by whatever can be written to at all.
            sent = os.write(self._descriptor, left[: select.PIPE_BUF])
            left, self._torn = left[sent:], True
        self._torn = False
        return True

    def _takes_more(self) -> bool:
        self._behind = not self._ready.poll(0 if self._behind else self._patience * 1000)
        return not self._behind


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):  # it is closed, or lies in memory
        return None
