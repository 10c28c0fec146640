"""What the kernel knows about an open or mapped file, and whether that is what is looked for.

No file system is asked: a tenant can mount one that never answers. ``statx`` is told to make do with what the kernel has
(AT_STATX_DONT_SYNC). Where that call is not to be had, ``stat`` asks, and a file is then only asked about when the kernel
says by other means that it may be the one.
"""

from __future__ import annotations

import ctypes
import os
import stat as modes
import struct
from collections.abc import Callable, Set
from typing import NamedTuple

__all__ = ["Eye", "File", "Nodes", "Seen", "Target", "map_name", "told"]

_FDINFO_LENGTH = 512  # flags and inode are in the first lines; what a driver adds comes after them

# statx(2). Offsets of stx_mode, stx_ino, stx_rdev_{major,minor} and stx_dev_{major,minor} are the same everywhere.
_AT_FDCWD, _AT_NO_AUTOMOUNT, _AT_STATX_DONT_SYNC = -100, 0x800, 0x4000
_STATX_TYPE, _STATX_INO, _STATX_SIZE = 0x1, 0x100, 256
_FIELDS = struct.Struct("=28xH2xQ88xIIII")
_FLAGS, _WANTED = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC, _STATX_TYPE | _STATX_INO

Call = Callable[[int, bytes, int, int, object], int]


class Seen(NamedTuple):
    """What an open or mapped file is: what kind of one, where it lies, and the device's number if it is a node."""

    mode: int
    inode: int
    node_major: int
    node_minor: int
    major: int
    minor: int

    @property
    def device(self) -> int:
        return os.makedev(self.major, self.minor)


class File(NamedTuple):
    """A regular file, by ``st_dev`` and ``st_ino``: a simulated device's memory."""

    device: int
    inode: int

    def part(self, seen: Seen) -> int | None:
        return self.inode if seen.inode == self.inode and seen.device == self.device else None

    def all_in(self, parts: Set[int]) -> bool:
        """Whether there is nothing more to be found in a process that has ``parts``."""
        return self.inode in parts

    def may_be(self, inode: int | None) -> bool:
        """Whether a file of this inode number (None: not known) is worth asking about."""
        return inode in (None, self.inode)


class Nodes(NamedTuple):
    """Character devices, by ``st_rdev``, under whatever name and on whatever file system their nodes lie."""

    numbers: frozenset[int]

    def part(self, seen: Seen) -> int | None:
        if not modes.S_ISCHR(seen.mode):
            return None
        number = os.makedev(seen.node_major, seen.node_minor)
        return number if number in self.numbers else None

    def all_in(self, parts: Set[int]) -> bool:
        """As :meth:`File.all_in`."""
        return self.numbers <= parts


Target = File | Nodes


class Eye:
    """Sees one file after the other; for one thread.

    Attributes:
        quiet: whether it asks no file system.
    """

    def __init__(self) -> None:
        self._statx = _STATX
        self._answer = ctypes.create_string_buffer(_STATX_SIZE)
        self.quiet = self._statx is not None

    def see(self, path: str, directory: int | None = None) -> Seen:
        """What the file behind ``path`` is; a relative one begins at the descriptor ``directory``.

        Raises:
            OSError: as stat(2).
        """
        if self._statx is None:
            return _asked(os.stat(path, dir_fd=directory))
        where = _AT_FDCWD if directory is None else directory
        if self._statx(where, path.encode(), _FLAGS, _WANTED, self._answer):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return Seen(*_FIELDS.unpack_from(self._answer))


def _asked(found: os.stat_result) -> Seen:
    node, device = found.st_rdev, found.st_dev
    return Seen(found.st_mode, found.st_ino, os.major(node), os.minor(node), os.major(device), os.minor(device))


def map_name(device: int) -> bytes:
    """How ``/proc/PID/maps`` writes the device that a file lies on."""
    return f"{os.major(device):02x}:{os.minor(device):02x}".encode()


def told(path: str) -> tuple[int, int | None]:
    """Flags and inode number in a descriptor's ``fdinfo``; no inode from a kernel that does not tell it (before 5.14).

    Raises:
        OSError: the descriptor is closed, or this user may not know.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(descriptor, _FDINFO_LENGTH).split(b"\n")
    finally:
        os.close(descriptor)
    flags = next((int(line[6:], 8) for line in lines if line.startswith(b"flags:")), 0)
    return flags, next((int(line[4:]) for line in lines if line.startswith(b"ino:")), None)


def _if_it_works(call: Call | None) -> Call | None:
    """``call``, unless a seccomp filter that is older than it refuses it."""
    answer = ctypes.create_string_buffer(_STATX_SIZE)
    return call if call is not None and call(_AT_FDCWD, b"/", _FLAGS, _WANTED, answer) == 0 else None


# Without argtypes: its conversions cost as much as a tenth of the call, and these are ints and bytes.
_STATX = _if_it_works(getattr(ctypes.CDLL(None, use_errno=True), "statx", None))
