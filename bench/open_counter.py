"""How often a file is opened, by whomever, as the kernel counts it (inotify(7)): no process has to be changed for it.

The simulated driver reads a device's ``device.json`` once for each question about it, and nobody else reads it while the
node keeps its shape. So its opens are the questions, and nearly all questions are looks at the device's health.
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
    """``count`` goes up with every open of the file. Two in a row with nothing between count as one, so closes are told
    as well: there is always one between.
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
