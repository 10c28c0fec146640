"""Who holds a file or a device: a walk over ``/proc`` by device and inode, or by the number of a device node.

Names are worth nothing here: a container can rename, bind-mount or make up any. Every thread's descriptors are looked
at, because a process whose first thread has ended shows an empty ``fd`` of its own while the others live on, and a
thread may have a table of descriptors to itself.

The walk runs in a child, and it asks no file system: a tenant can mount one that never answers. ``statx`` is told to
make do with what the kernel has (AT_STATX_DONT_SYNC); where that call is refused, the child's deadline is what is left.

A descriptor opened with ``O_PATH`` holds nothing: it can neither read nor map, and a container needs no right to the
device to open one. A descriptor in flight over a socket is seen by no walk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat as modes
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from scrubber.adapters.proc import Stat, parse_stat

__all__ = ["File", "Found", "Nodes", "Target", "Walk", "has_open", "start_time", "walk"]

_MOST_LISTS = 16
_COMMAND_LENGTH = 200
_FDINFO_LENGTH = 512  # flags and inode are in the first lines; what a driver adds comes after them

# statx(2). Offsets of stx_mode, stx_ino, stx_rdev_{major,minor} and stx_dev_{major,minor} are the same everywhere.
_AT_FDCWD, _AT_NO_AUTOMOUNT, _AT_STATX_DONT_SYNC = -100, 0x800, 0x4000
_STATX_TYPE, _STATX_INO, _STATX_SIZE = 0x1, 0x100, 256
_MODE, _INODE, _NUMBERS = struct.Struct("=28xH"), struct.Struct("=32xQ"), struct.Struct("=128xIIII")

_KCMP_FILES = 2
_KCMP_CALL = {"x86_64": 312, "aarch64": 272}.get(platform.machine())


class Seen(NamedTuple):
    """What an open or mapped file is: where it lies and, when it is a character device's node, the device's number."""

    device: int
    inode: int
    node: int | None


class File(NamedTuple):
    """A regular file, by ``st_dev`` and ``st_ino``: a simulated device's memory."""

    device: int
    inode: int

    def part(self, seen: Seen) -> int | None:
        return self.inode if (seen.device, seen.inode) == self else None

    def may_be(self, inode: int | None) -> bool:
        """Whether a file of this inode number (None: not known) is worth asking about."""
        return inode in (None, self.inode)


class Nodes(NamedTuple):
    """Character devices, by ``st_rdev``, under whatever name and on whatever file system their nodes lie."""

    numbers: frozenset[int]

    def part(self, seen: Seen) -> int | None:
        return seen.node if seen.node in self.numbers else None


Target = File | Nodes


class Found(NamedTuple):
    """A process that holds the target, or that the caller asked for by PID.

    Attributes:
        started: clock ticks since boot.
        hung: a thread is in uninterruptible sleep, or the first thread is dead and others live. Both may pass.
        parts: what of the target it has: device numbers, or the file's inode number; empty when it was only named.
    """

    pid: int
    started: int
    command: str
    hung: bool
    parts: tuple[int, ...] = ()


class Walk(NamedTuple):
    """What a walk found, and how many processes (by user) it was not allowed to look into, or not all of."""

    holders: tuple[Found, ...]
    unreadable: tuple[tuple[int, int], ...]


def start_time(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot; None when there is no such process.

    Raises:
        PermissionError: this user may not know.
    """
    stat = _stat(f"/proc/{pid}/stat")
    return None if stat is None else stat.started


def walk(target: Target, excluded: Iterable[int] = (), named: Iterable[int] = ()) -> Walk:
    """Every process but ``excluded`` that has the target open or mapped, in any of its threads.

    Args:
        named: PIDs that are described as well when they hold nothing that a walk can see. Those that are gone, or
            zombies without a living thread, are not in the answer.
    """
    wanted = frozenset(named)
    settled: set[tuple[bytes, int]] = set()
    holders: list[Found] = []
    unreadable: dict[int, int] = {}
    for pid in _everybody(excluded):
        look = _Look(pid, target, settled)
        try:
            found = look.run(always=pid in wanted)
        except PermissionError:  # not even its state may be known
            found, look.closed = None, True
        if found is not None:
            holders.append(found)
        if look.closed and (found is None or not found.parts):
            try:
                uid = os.stat(f"/proc/{pid}").st_uid
            except OSError:
                continue  # it ended meanwhile
            unreadable[uid] = unreadable.get(uid, 0) + 1
    return Walk(tuple(sorted(holders)), tuple(sorted(unreadable.items())))


def _everybody(excluded: Iterable[int]) -> Iterator[int]:
    """Each process once, also those that were forked meanwhile: one that forks and ends is never in the list when it is
    looked at, but its child is in the next list. A busy node always has new ones, so the lists come to an end.
    """
    known = set(excluded)
    for _ in range(_MOST_LISTS):
        fresh = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in known]
        if not fresh:
            return
        known.update(fresh)
        yield from fresh


def has_open(place: str, device: int, inode: int) -> bool:
    """Whether one of the descriptors of ``place`` (``/proc/PID``, or one of its threads) is that file.

    Raises:
        PermissionError: this user may not know.
    """
    parts, closed = _open_parts(place, File(device, inode))
    if closed and not parts:
        raise PermissionError(errno.EACCES, "The descriptors cannot be looked at", place)
    return bool(parts)


class _Look:
    """One process, looked into once. ``closed`` says that a part of it may not be looked at by this user.

    ``settled`` is shared by all looks of a walk: mapped files that are known to be no part of the target.
    """

    def __init__(self, pid: int, target: Target, settled: set[tuple[bytes, int]]) -> None:
        self.closed = False
        self._pid = pid
        self._target = target
        self._settled = settled

    def run(self, *, always: bool) -> Found | None:
        stat = _stat(f"/proc/{self._pid}/stat")
        if stat is None or stat.kernel_thread:
            return None
        states = self._living_threads()
        parts: set[int] = set()
        try:
            for thread in _own_tables(states):
                more, closed = _open_parts(f"/proc/{self._pid}/task/{thread}", self._target)
                parts |= more
                self.closed = self.closed or closed
            parts |= self._mapped_parts(states)
        except PermissionError:
            self.closed = True
        if not states or not (parts or always):
            return None
        hung = self._pid not in states or "D" in states.values()
        return Found(self._pid, stat.started, _command(self._pid), hung, tuple(sorted(parts)))

    def _living_threads(self) -> dict[int, str]:
        """The state of each thread that still runs, the first thread first."""
        try:
            threads = sorted(int(name) for name in os.listdir(f"/proc/{self._pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            return {}
        stats = {thread: _stat(f"/proc/{self._pid}/task/{thread}/stat") for thread in threads}
        return {thread: stat.state for thread, stat in stats.items() if stat is not None and not stat.dead}

    def _mapped_parts(self, threads: Iterable[int]) -> set[int]:
        """What of the target is in the memory map; threads share one, so the first that still has one is asked."""
        for thread in threads:
            try:
                with open(f"/proc/{self._pid}/task/{thread}/maps", "rb") as file:
                    lines = file.readlines()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if lines:
                return self._parts_of_map(lines)
        return set()

    def _parts_of_map(self, lines: Iterable[bytes]) -> set[int]:
        parts: set[int] = set()
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) < 5 or not (inode := int(fields[4])):
                continue
            key = (fields[3], inode)
            if key in self._settled or (isinstance(self._target, File) and not self._target.may_be(inode)):
                continue
            part = self._mapped_part(fields[0], key)
            if part is not None:
                parts.add(part)
        return parts

    def _mapped_part(self, addresses: bytes, key: tuple[bytes, int]) -> int | None:
        """Which part of the target is mapped at ``addresses``. ``key`` is how ``maps`` names the file.

        That name says who a file is only where ``stat`` gives it the same one: on btrfs and overlayfs it does not, and
        two files may share it. So only then is the answer remembered for the rest of the walk.
        """
        if isinstance(self._target, File) and key == (_map_name(self._target.device), self._target.inode):
            return self._target.inode
        start, _, end = addresses.partition(b"-")
        try:
            seen = _see(f"/proc/{self._pid}/map_files/{int(start, 16):x}-{int(end, 16):x}")
        except PermissionError:
            if isinstance(self._target, File):
                return self._target.inode  # an equal inode number is all that this user may know
            self.closed = True
            return None
        except OSError:
            return None  # unmapped meanwhile
        part = self._target.part(seen)
        if part is None and key == (_map_name(seen.device), seen.inode):
            self._settled.add(key)
        return part


def _map_name(device: int) -> bytes:
    return f"{os.major(device):02x}:{os.minor(device):02x}".encode()


def _open_parts(place: str, target: Target) -> tuple[set[int], bool]:
    """What of the target is open in ``place``, and whether some descriptor there may not be looked at."""
    parts: set[int] = set()
    closed = False
    try:
        names = os.listdir(f"{place}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return parts, False
    for name in names:
        try:
            if isinstance(target, File) and not target.may_be(_told(f"{place}/fdinfo/{name}")[1]):
                continue
            part = target.part(_see(f"{place}/fd/{name}"))
            if part is not None and part not in parts and not _told(f"{place}/fdinfo/{name}")[0] & os.O_PATH:
                parts.add(part)
        except PermissionError:
            closed = True  # a FUSE of another user's answers so even to root; the other descriptors still count
        except OSError:
            continue  # closed meanwhile, or its file system is gone
    return parts, closed


def _told(path: str) -> tuple[int, int | None]:
    """Flags and inode number in a descriptor's ``fdinfo``; no inode from a kernel that does not tell it (before 5.14)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(descriptor, _FDINFO_LENGTH).split(b"\n")
    finally:
        os.close(descriptor)
    flags = next((int(line[6:], 8) for line in lines if line.startswith(b"flags:")), 0)
    return flags, next((int(line[4:]) for line in lines if line.startswith(b"ino:")), None)


def _own_tables(threads: Collection[int]) -> list[int]:
    """One of ``threads`` for each table of descriptors: nearly always they share one, and some have a thousand."""
    distinct: list[int] = []
    for thread in threads:
        if not any(_share_table(thread, other) for other in distinct):
            distinct.append(thread)
    return distinct


def _share_table(one: int, other: int) -> bool:
    """Whether two threads have the same descriptors; False as well where kcmp(2) is not to be had."""
    if _KCMP_CALL is None:
        return False
    return bool(_LIBC.syscall(_KCMP_CALL, one, other, _KCMP_FILES, 0, 0) == 0)


def _see(path: str) -> Seen:
    """What the kernel knows about the file behind ``path``, without asking its file system.

    Raises:
        OSError: as stat(2).
    """
    if _STATX is None:
        return _see_asking(path)
    answer = ctypes.create_string_buffer(_STATX_SIZE)
    flags = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC
    if _STATX(_AT_FDCWD, path.encode(), flags, _STATX_TYPE | _STATX_INO, answer) != 0:
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.ENOSYS):  # a seccomp filter that is older than the call
            return _see_asking(path)
        raise OSError(number, os.strerror(number), path)
    (mode,), (inode,) = _MODE.unpack_from(answer), _INODE.unpack_from(answer)
    node_major, node_minor, major, minor = _NUMBERS.unpack_from(answer)
    node = os.makedev(node_major, node_minor) if modes.S_ISCHR(mode) else None
    return Seen(os.makedev(major, minor), inode, node)


def _see_asking(path: str) -> Seen:
    found = os.stat(path)
    return Seen(found.st_dev, found.st_ino, found.st_rdev if modes.S_ISCHR(found.st_mode) else None)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_COMMAND_LENGTH * 4)
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:_COMMAND_LENGTH]


def _stat(path: str) -> Stat | None:
    try:
        with open(path, "rb") as file:
            return parse_stat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong)
_LIBC.syscall.restype = ctypes.c_long
_STATX = getattr(_LIBC, "statx", None)
if _STATX is not None:
    _STATX.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
