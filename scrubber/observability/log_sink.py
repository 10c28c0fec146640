"""Writes log lines to a stream without blocking on its reader.

Invariants: writing never raises. It waits at most :data:`WRITE_TIMEOUT` for a reader that has fallen behind, and only
once until that reader has caught up. Lines that cannot be written are lost and counted; the next line starts on a new
line.
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
    """Counts lines that could not be written, and forwards the count to a callback once there is one."""

    def __init__(self) -> None:
        self._uncounted = 0
        self._callback: Callable[[], None] | None = None

    def count_line(self) -> None:
        """Count one lost line."""
        if self._callback is None:
            self._uncounted += 1
        else:
            self._callback()

    def set_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` for each lost line, including the earlier ones. It must not raise."""
        lost, self._uncounted, self._callback = self._uncounted, 0, callback
        for _ in range(lost):
            callback()


class LineWriter:
    """Output of structlog for rendered lines. Lines of several threads do not mix.

    Args:
        stream: None where there is none.
        write_timeout: seconds to wait for a reader that has fallen behind.
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
            except (OSError, ValueError):  # closed, full, or without a reader
                written = False
        if not written:
            self._lost_lines.count_line()

    debug = info = warning = error = critical = write

    def _try_write(self, line: str) -> bool:
        if self._stream is None or self._stream.closed:  # its file descriptor may belong to another file by now
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
            # A writable pipe accepts this many bytes without blocking.
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
    except (OSError, ValueError):  # it is closed, or in memory
        return None
