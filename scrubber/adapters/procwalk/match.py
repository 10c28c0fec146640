"""The kernel's information about an open or mapped file, and whether the file matches the target.

No file system is queried: a tenant can mount one that never answers. ``statx`` is called so that it uses only what the
kernel already has (AT_STATX_DONT_SYNC). Where that call is unavailable, ``stat`` is used, which does query the file
system, and only for a file that may match according to other kernel information.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat as modes
import struct
from collections.abc import Callable, Set
from typing import NamedTuple

__all__ = [
    "DeviceNodeTarget",
    "FileStat",
    "FileTarget",
    "StatxReader",
    "Target",
    "maps_device",
    "parse_fdinfo",
    "read_fdinfo",
]

_FDINFO_LENGTH = 512
_FDINFO = re.compile(
    rb"pos:\t-?\d+\nflags:\t(?P<flags>[0-7]{1,12})\n(?:mnt_id:\t\d+\n(?:ino:\t(?P<inode>\d{1,20})\n)?)?"
)
"""The kernel's own lines. Those of a driver come after them, and may contain a name that a tenant chose, with line breaks:
that of a DMA buffer."""

# statx(2). Offsets of stx_mode, stx_ino, stx_rdev_{major,minor} and stx_dev_{major,minor} are the same everywhere.
_AT_FDCWD, _AT_NO_AUTOMOUNT, _AT_STATX_DONT_SYNC = -100, 0x800, 0x4000
_STATX_TYPE, _STATX_INO, _STATX_SIZE = 0x1, 0x100, 256
_FIELDS = struct.Struct("=28xH2xQ88xIIII")
_FLAGS, _MASK = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC, _STATX_TYPE | _STATX_INO

StatxCall = Callable[[int, bytes, int, int, object], int]


class FileStat(NamedTuple):
    """Properties of an open or mapped file: its type, its location, and the device number if it is a device node."""

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
    """Regular files of one file system, by ``st_dev`` and ``st_ino``: the memory of simulated devices."""

    device: int
    inodes: frozenset[int]

    @property
    def parts(self) -> frozenset[int]:
        """What a process can have of the target, as numbers."""
        return self.inodes

    def match(self, file_stat: FileStat) -> int | None:
        return file_stat.inode if file_stat.inode in self.inodes and file_stat.device == self.device else None

    def is_complete(self, parts: Set[int]) -> bool:
        """Whether nothing more can be found in a process that has ``parts``."""
        return self.inodes <= parts

    def may_match(self, inode: int | None) -> bool:
        """Whether a file with this inode number (None: unknown) may match and must be checked."""
        return inode is None or inode in self.inodes


class DeviceNodeTarget(NamedTuple):
    """Character devices, by ``st_rdev``, regardless of the name and the file system of their nodes."""

    numbers: frozenset[int]

    @property
    def parts(self) -> frozenset[int]:
        """Like :attr:`FileTarget.parts`."""
        return self.numbers

    def match(self, file_stat: FileStat) -> int | None:
        if not modes.S_ISCHR(file_stat.mode):
            return None
        number = os.makedev(file_stat.node_major, file_stat.node_minor)
        return number if number in self.numbers else None

    def is_complete(self, parts: Set[int]) -> bool:
        """Like :meth:`FileTarget.is_complete`."""
        return self.numbers <= parts


Target = FileTarget | DeviceNodeTarget


class StatxReader:
    """Reads the properties of one file after another; for one thread.

    Attributes:
        uses_statx: whether ``statx`` is used, so that no file system is queried.
    """

    def __init__(self) -> None:
        self._statx = _STATX
        self._buffer = ctypes.create_string_buffer(_STATX_SIZE)
        self.uses_statx = self._statx is not None

    def stat(self, path: str, directory: int | None = None) -> FileStat:
        """Return the properties of the file at ``path``; a relative path begins at the descriptor ``directory``.

        Raises:
            OSError: As for stat(2).
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
    """Return the device of a file in the notation of ``/proc/PID/maps``."""
    return f"{os.major(device):02x}:{os.minor(device):02x}".encode()


def read_fdinfo(path: str) -> tuple[int, int | None]:
    """Return the flags and inode number of a descriptor, as :func:`parse_fdinfo` does.

    Raises:
        OSError: The descriptor is closed, or this user may not read it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return parse_fdinfo(os.read(descriptor, _FDINFO_LENGTH))
    finally:
        os.close(descriptor)


def parse_fdinfo(data: bytes) -> tuple[int, int | None]:
    """Return the flags and inode number from the text of ``fdinfo``; no inode from a kernel before 5.14.

    Of a text in another format, neither is known: 0 and None, with which the file counts as one that may match.
    """
    found = _FDINFO.match(data)
    return (int(found["flags"], 8), int(found["inode"]) if found["inode"] else None) if found else (0, None)


def _if_supported(call: StatxCall | None) -> StatxCall | None:
    """Return ``call``, or None if a seccomp filter that is older than the system call rejects it."""
    answer = ctypes.create_string_buffer(_STATX_SIZE)
    return call if call is not None and call(_AT_FDCWD, b"/", _FLAGS, _MASK, answer) == 0 else None


# No argtypes: their conversions cost up to a tenth of the call, and the arguments are ints and bytes.
_STATX = _if_supported(getattr(ctypes.CDLL(None, use_errno=True), "statx", None))
