"""Directory change notifications from the kernel: delayed by microseconds, and without cost while nothing changes.

Source: inotify(7). Open and write events are not requested: the memory files are in the same directories, and a tenant
that opens one in a loop must not wake the service.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

__all__ = ["OVERFLOW", "Inotify"]

_IN_MODIFY = 0x02
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_DELETE_SELF = 0x400
_IN_MOVE_SELF = 0x800
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x01000000
_EVENT_MASK = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR

_EVENT = struct.Struct("iIII")
_READ_SIZE = 64 * 1024

OVERFLOW = (Path(), "")
"""Change that represents events dropped by the kernel: anything may have changed."""


class Inotify:
    """Watched directories and files.

    :meth:`fileno` is readable when an entry was created, replaced or removed in a directory, or a file was changed.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"inotify: {os.strerror(code)} (see fs.inotify.max_user_instances)")
        self._watched: dict[int, Path] = {}
        self._watches: dict[Path, int] = {}

    def fileno(self) -> int:
        return int(self._fd)

    def add(self, directory: Path) -> bool:
        """Watch ``directory``, at most once; return False when it does not exist."""
        return self._add(directory, _EVENT_MASK)

    def add_file(self, file: Path) -> bool:
        """Watch the contents of ``file``, at most once; return False when it does not exist."""
        return self._add(file, _IN_MODIFY)

    def _add(self, path: Path, mask: int) -> bool:
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if watch >= 0:
            self._watched[watch] = path
            self._watches[path] = watch
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise OSError(code, f"inotify: {os.strerror(code)} (see fs.inotify.max_user_watches)", str(path))

    def remove(self, watched: Path) -> None:
        """Stop watching a directory or file; does nothing if it is not watched or no longer exists."""
        watch = self._watches.pop(watched, None)
        if watch is not None and self._watched.pop(watch, None) is not None:
            self._libc.inotify_rm_watch(self._fd, watch)

    def read(self) -> list[tuple[Path, str]]:
        """Return the changes since the last call: directory and name in it (empty for the directory or file itself)."""
        changes: list[tuple[Path, str]] = []
        while True:
            try:
                events = os.read(self._fd, _READ_SIZE)
            except BlockingIOError:
                return changes
            while events:
                watch, mask, _, length = _EVENT.unpack_from(events)
                name = events[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
                events = events[_EVENT.size + length :]
                if mask & _IN_Q_OVERFLOW:
                    changes.append(OVERFLOW)
                elif mask & _IN_IGNORED:
                    path = self._watched.pop(watch, None)
                    if path is not None and self._watches.get(path) == watch:
                        del self._watches[path]
                elif watch in self._watched:
                    changes.append((self._watched[watch], os.fsdecode(name)))

    def close(self) -> None:
        os.close(self._fd)
