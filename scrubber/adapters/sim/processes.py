"""Who holds a file: a walk over ``/proc`` by device and inode, for when the kernel said that somebody does.

Names are worth nothing here: a container can rename, bind-mount or make up any. Every thread's descriptors are looked
at, because a process whose first thread has ended shows an empty ``fd`` of its own while the others live on.

The walk runs in a child: ``stat`` through ``/proc/PID/fd`` asks the file system behind the descriptor, and a tenant can
mount one that never answers. So only a descriptor whose inode number, which the kernel knows by itself, is the file's is
asked for its device; before Linux 5.14 the kernel does not tell, and every one is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from scrubber.adapters.proc import Stat, parse_stat

__all__ = ["Found", "Walk", "has_open", "start_time", "walk"]

_COMMAND_LENGTH = 200
_FDINFO_LENGTH = 512  # the inode number is in one of the first lines; what a driver adds comes after them


class Found(NamedTuple):
    """A process that holds the file.

    Attributes:
        started: clock ticks since boot.
        hung: a thread is in uninterruptible sleep, or the first thread is dead and others live. Both may pass.
    """

    pid: int
    started: int
    command: str
    hung: bool


class Walk(NamedTuple):
    """What a walk found, and how many processes (by user) it was not allowed to look into."""

    holders: tuple[Found, ...]
    unreadable: tuple[tuple[int, int], ...]


def start_time(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot; None when there is no such process.

    Raises:
        PermissionError: this user may not know.
    """
    stat = _stat(f"/proc/{pid}/stat")
    return None if stat is None else stat.started


def walk(device: int, inode: int, excluded: Iterable[int] = ()) -> Walk:
    """Every process but ``excluded`` that has the file open or mapped, in any of its threads."""
    skipped = frozenset(excluded)
    holders: list[Found] = []
    unreadable: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in skipped:
            continue
        try:
            if (found := _look_into(int(name), device, inode)) is not None:
                holders.append(found)
        except PermissionError:
            try:
                uid = os.stat(f"/proc/{name}").st_uid
            except OSError:
                continue  # it ended meanwhile
            unreadable[uid] = unreadable.get(uid, 0) + 1
    return Walk(tuple(sorted(holders)), tuple(sorted(unreadable.items())))


def _look_into(pid: int, device: int, inode: int) -> Found | None:
    stat = _stat(f"/proc/{pid}/stat")
    if stat is None or stat.kernel_thread:
        return None
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return None
    states: dict[int, str] = {}
    holds = False
    for thread in threads:
        place = f"/proc/{pid}/task/{thread}"
        of_thread = _stat(f"{place}/stat")
        if of_thread is None or of_thread.dead:
            continue
        states[int(thread)] = of_thread.state
        holds = holds or has_open(place, device, inode) or _has_mapped(place, device, inode)
    if not holds:
        return None
    leader_dead = pid not in states
    return Found(pid, stat.started, _command(pid), leader_dead or "D" in states.values())


def has_open(place: str, device: int, inode: int) -> bool:
    """Whether one of the descriptors of ``place`` (``/proc/PID``, or one of its threads) is the file.

    Raises:
        PermissionError: this user may not know.
    """
    try:
        names = os.listdir(f"{place}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for name in names:
        try:
            if _told_inode(f"{place}/fdinfo/{name}") not in (None, inode):
                continue
            target = os.stat(f"{place}/fd/{name}")
        except PermissionError:
            raise
        except OSError:
            continue  # closed meanwhile, or its file system is gone
        if (target.st_dev, target.st_ino) == (device, inode):
            return True
    return False


def _told_inode(path: str) -> int | None:
    """The inode number in a descriptor's ``fdinfo``; None from a kernel that does not tell it (before 5.14)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(descriptor, _FDINFO_LENGTH).split(b"\n")
    finally:
        os.close(descriptor)
    return next((int(line[4:]) for line in lines if line.startswith(b"ino:")), None)


def _has_mapped(place: str, device: int, inode: int) -> bool:
    """Whether the file is in the memory map.

    On some file systems ``maps`` shows another device number than ``stat`` (btrfs, overlayfs): the link in ``map_files``
    decides then, and where that may not be followed, an equal inode number counts as the file.
    """
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    try:
        with open(f"{place}/maps", "rb") as lines:
            for line in lines:
                fields = line.split(None, 5)
                if len(fields) < 5 or int(fields[4]) != inode:
                    continue
                if fields[3] == wanted or _is_mapped_file(place, fields[0].decode(), device, inode):
                    return True
    except (FileNotFoundError, ProcessLookupError):
        return False
    return False


def _is_mapped_file(place: str, addresses: str, device: int, inode: int) -> bool:
    process = place.split("/task/", maxsplit=1)[0]
    try:
        target = os.stat(f"{process}/map_files/{addresses}")
    except OSError:
        return True
    return (target.st_dev, target.st_ino) == (device, inode)


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
