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

__all__ = ["DeviceNodeTarget", "FileStat", "FileTarget", "StatxReader", "Target", "maps_device", "read_fdinfo"]

_FDINFO_LENGTH = 512  # flags and inode are in the first lines; what a driver adds comes after them

# statx(2). Offsets of stx_mode, stx_ino, stx_rdev_{major,minor} and stx_dev_{major,minor} are the same everywhere.
_AT_FDCWD, _AT_NO_AUTOMOUNT, _AT_STATX_DONT_SYNC = -100, 0x800, 0x4000
_STATX_TYPE, _STATX_INO, _STATX_SIZE = 0x1, 0x100, 256
_FIELDS = struct.Struct("=28xH2xQ88xIIII")
_FLAGS, _MASK = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC, _STATX_TYPE | _STATX_INO

StatxCall = Callable[[int, bytes, int, int, object], int]


class FileStat(NamedTuple):
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


class FileTarget(NamedTuple):
    """A regular file, by ``st_dev`` and ``st_ino``: a simulated device's memory."""

    device: int
    inode: int

    def match(self, file_stat: FileStat) -> int | None:
        return self.inode if file_stat.inode == self.inode and file_stat.device == self.device else None

    def is_complete(self, parts: Set[int]) -> bool:
        """Whether there is nothing more to be found in a process that has ``parts``."""
        return self.inode in parts

    def may_match(self, inode: int | None) -> bool:
        """Whether a file of this inode number (None: not known) is worth asking about."""
        return inode in (None, self.inode)


class DeviceNodeTarget(NamedTuple):
    """Character devices, by ``st_rdev``, under whatever name and on whatever file system their nodes lie."""

    numbers: frozenset[int]

    def match(self, file_stat: FileStat) -> int | None:
        if not modes.S_ISCHR(file_stat.mode):
            return None
        number = os.makedev(file_stat.node_major, file_stat.node_minor)
        return number if number in self.numbers else None

    def is_complete(self, parts: Set[int]) -> bool:
        """As :meth:`FileTarget.is_complete`."""
        return self.numbers <= parts


Target = FileTarget | DeviceNodeTarget


class StatxReader:
    """Sees one file after the other; for one thread.

    Attributes:
        uses_statx: whether it asks no file system.
    """

    def __init__(self) -> None:
        self._statx = _STATX
        self._buffer = ctypes.create_string_buffer(_STATX_SIZE)
        self.uses_statx = self._statx is not None

    def stat(self, path: str, directory: int | None = None) -> FileStat:
        """What the file behind ``path`` is; a relative one begins at the descriptor ``directory``.

        Raises:
            OSError: as stat(2).
        """
        if self._statx is None:
            return _from_stat_result(os.stat(path, dir_fd=directory))
        where = _AT_FDCWD if directory is None else directory
        if self._statx(where, path.encode(), _FLAGS, _MASK, self._buffer):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return FileStat(*_FIELDS.unpack_from(self._buffer))


def _from_stat_result(found: os.stat_result) -> FileStat:
    node, device = found.st_rdev, found.st_dev
    return FileStat(found.st_mode, found.st_ino, os.major(node), os.minor(node), os.major(device), os.minor(device))


def maps_device(device: int) -> bytes:
    """How ``/proc/PID/maps`` writes the device that a file lies on."""
    return f"{os.major(device):02x}:{os.minor(device):02x}".encode()


def read_fdinfo(path: str) -> tuple[int, int | None]:
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


def _if_supported(call: StatxCall | None) -> StatxCall | None:
    """``call``, unless a seccomp filter that is older than it refuses it."""
    answer = ctypes.create_string_buffer(_STATX_SIZE)
    return call if call is not None and call(_AT_FDCWD, b"/", _FLAGS, _MASK, answer) == 0 else None


# Without argtypes: its conversions cost as much as a tenth of the call, and these are ints and bytes.
_STATX = _if_supported(getattr(ctypes.CDLL(None, use_errno=True), "statx", None))
