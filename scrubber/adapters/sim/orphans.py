"""Erasers that outlived the service that started them, told by the lock that each holds while it works.

Promise: nothing happens to a device while somebody holds its lock, and a process is signalled only when it is the one
that the lock names: same PID, same start time, and the lock file open.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path

from scrubber.adapters.sim.processes import has_open, start_time
from scrubber.domain.errors import Unreadable

__all__ = ["UNNAMED", "end_holder", "lock_holder"]

UNNAMED = 0
"""Stands for a holder that did not say who it is, or lied."""

_PATIENCE = 2.0
_POLL = 0.02


def lock_holder(lock: Path) -> int | None:
    """PID of the eraser that holds ``lock``, :data:`UNNAMED`, or None when it is free. Waits for nobody.

    Raises:
        Unreadable: the lock file cannot be opened.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(
            f"{lock} cannot be opened, so whether an eraser is at work is unknown: {error.strerror}."
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the close below: an eraser tries for a second
        return None
    except BlockingIOError:
        return _named(fd)
    finally:
        os.close(fd)


async def end_holder(lock: Path, deadline: float) -> bool:
    """Wait for whoever holds ``lock``, then end it if it is an eraser; True once the lock is free.

    An orphan stops by itself at its next chunk, so it gets half of ``deadline`` (2 s at most) for that. A holder that
    is not proved to be an eraser is only waited for.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    kill_at = loop.time() + min(deadline / 2, _PATIENCE)
    while (pid := lock_holder(lock)) is not None:
        if loop.time() >= end:
            return False
        pidfd = _open_holder(lock, pid)
        if pidfd is None:
            await asyncio.sleep(min(_POLL, max(0.0, end - loop.time())))
            continue
        try:
            if loop.time() >= kill_at:
                with suppress(ProcessLookupError, PermissionError):  # gone, or another user's: then only time helps
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _ended(pidfd, (kill_at if loop.time() < kill_at else end) - loop.time())
        finally:
            os.close(pidfd)
    return True


def _open_holder(lock: Path, pid: int) -> int | None:
    """A pidfd of the eraser ``pid``: opened first, then proved, so that it cannot be a later process of that PID."""
    if pid == UNNAMED:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if lock_holder(lock) == pid:
        return pidfd
    os.close(pidfd)
    return None


def _named(lock: int) -> int:
    """The PID written in the locked file, if that process is the one that wrote it and has the file open."""
    words = os.pread(lock, 64, 0).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return UNNAMED
    pid, started = (int(word) for word in words)
    itself = os.fstat(lock)
    try:
        if pid and start_time(pid) == started and has_open(f"/proc/{pid}", itself.st_dev, itself.st_ino):
            return pid
    except PermissionError:
        return UNNAMED
    return UNNAMED


async def _ended(pidfd: int, seconds: float) -> None:
    """Return when the process is over, or after ``seconds``."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(pidfd, over.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await over.wait()
    finally:
        loop.remove_reader(pidfd)
