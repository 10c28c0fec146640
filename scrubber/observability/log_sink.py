"""Where log lines go: to whoever reads them, as long as somebody does.

Promise: writing never raises, and waits for a reader who has fallen behind once, for :data:`WRITE_TIMEOUT`, until he has caught
up. What cannot be written is lost and counted; what follows begins on a line of its own.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import TextIO

__all__ = ["WRITE_TIMEOUT", "LineWriter", "LostLineCounter"]

WRITE_TIMEOUT = 0.05
"""Seconds."""


class LostLineCounter:
    """Lines that could not be written, until somebody counts them and from then on."""

    def __init__(self) -> None:
        self._uncounted = 0
        self._callback: Callable[[], None] | None = None

    def count_line(self) -> None:
        """A line was lost."""
        if self._callback is None:
            self._uncounted += 1
        else:
            self._callback()

    def set_callback(self, callback: Callable[[], None]) -> None:
        """``callback`` is called for each line that was lost, those before this call too. It must not raise."""
        lost, self._uncounted, self._callback = self._uncounted, 0, callback
        for _ in range(lost):
            callback()


class LineWriter:
    """What structlog writes rendered lines with. Lines of several threads do not mix.

    Args:
        stream: None where there is none.
        write_timeout: seconds that a reader who has fallen behind is waited for.
    """

    def __init__(
        self, stream: TextIO | None, lost_lines: LostLineCounter, *, write_timeout: float = WRITE_TIMEOUT
    ) -> None:
        self._stream = stream
        self._lost_lines = lost_lines
        self._write_timeout = write_timeout
        self._lock = threading.Lock()
        self._is_reader_behind = False
        self._has_partial_line = False
        self._poll = select.poll()
        self._descriptor = _descriptor(stream)
        if self._descriptor is not None:
            self._poll.register(self._descriptor, select.POLLOUT)

    def write(self, line: str) -> None:
        with self._lock:
            try:
                written = self._try_write(line)
            except (OSError, ValueError):  # closed, full, or nobody reads any more
                written = False
        if not written:
            self._lost_lines.count_line()

    debug = info = warning = error = critical = write

    def _try_write(self, line: str) -> bool:
        if self._stream is None or self._stream.closed:  # its number may be another file's by now
            return False
        if self._descriptor is None:
            self._stream.write(line + "\n")
            self._stream.flush()
            return True
        text = f"\n{line}\n" if self._has_partial_line else f"{line}\n"
        left = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        while left:
            if not self._is_writable():
                return False
            # As much as is taken without waiting by whatever can be written to at all.
            sent = os.write(self._descriptor, left[: select.PIPE_BUF])
            left, self._has_partial_line = left[sent:], True
        self._has_partial_line = False
        return True

    def _is_writable(self) -> bool:
        self._is_reader_behind = not self._poll.poll(0 if self._is_reader_behind else self._write_timeout * 1000)
        return not self._is_reader_behind


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):  # it is closed, or lies in memory
        return None
