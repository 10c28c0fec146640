"""Counts how often any process opens a file, with inotify(7), without changing a process.

The simulated driver reads a device's ``device.json`` once for each query about it, and no other process reads it while
the node keeps its shape. So its opens are the queries, and nearly all queries are health checks.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["OpenCounter"]

_IN_CLOSE_NOWRITE = 0x10
_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
_READ_SIZE = 1 << 16


class OpenCounter:
    """Number of opens of a file in ``count``.

    The kernel merges two consecutive identical events, so closes are watched as well: there is always one in between.
    """

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    @contextmanager
    def watch(cls, path: Path) -> Iterator[OpenCounter]:
        """Count until the end of the block. Needs a running event loop."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(path), _IN_OPEN | _IN_CLOSE_NOWRITE) < 0:
            raise OSError(ctypes.get_errno(), f"{path} cannot be watched")
        opens, loop = cls(), asyncio.get_running_loop()
        loop.add_reader(fd, opens._read, fd)
        try:
            yield opens
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _read(self, fd: int) -> None:
        events = os.read(fd, _READ_SIZE)
        while events:
            _, mask, _, length = _EVENT.unpack_from(events)
            events = events[_EVENT.size + length :]
            self.count += bool(mask & _IN_OPEN)
