"""Whether any process holds a file, queried from the kernel in ten microseconds instead of by a walk over ``/proc``.

A write lease (``fcntl`` F_SETLEASE) is granted only while no other open file description of the inode exists: it
detects descriptors, mappings, orphaned threads and descriptors in flight over a socket. A process that opens the file
while the lease is held waits until its owner releases it, and a signal notifies the owner: so the lease is a fence as
well.

It does not detect a descriptor opened with ``O_PATH``. Such a descriptor names the file and can neither read, write nor
map it; for that the file has to be opened again (by ``/proc/self/fd``), for which its mode is checked again. From then
on it is a descriptor like any other: the fence breaks, or the next query reports a holder.

Source: fcntl(2), "Leases". A lease requires the file's owner or CAP_LEASE, and a file system that grants leases.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

from scrubber.domain.errors import DeviceLost, Unreadable

__all__ = ["acquire", "can_acquire", "is_held"]


def is_held(path: Path, inode: int) -> bool:
    """Whether any process, this one included, has the file ``path`` open or mapped.

    Never blocks: the lease of another process counts as holding.

    Raises:
        DeviceLost: the file is gone.
        Unreadable: it cannot be opened, it is not the file with ``inode``, or leases do not work here.
    """
    try:
        fd = _open(path)
    except BlockingIOError:
        return True
    except FileNotFoundError as error:
        raise DeviceLost(f"{path} is gone.") from error
    except OSError as error:
        raise Unreadable(f"{path} cannot be opened, so its holders are unknown: {error.strerror}.") from error
    try:
        if os.fstat(fd).st_ino != inode:
            raise Unreadable(f"{path} was replaced; the holders of the original file are unknown.")
        return not can_acquire(fd, path)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    # O_NONBLOCK: a tenant that took a lease itself would otherwise block this open() for lease-break-time (45 s).
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except PermissionError:
        # A tenant that runs as our own user (a laptop, never a node) can remove our permission, and we can restore it.
        if os.lstat(path).st_uid != os.geteuid():
            raise
        path.chmod(0o600)
        return os.open(path, flags)


def can_acquire(fd: int, path: Path) -> bool:
    """Whether a write lease on ``fd`` is granted; it is released immediately.

    Raises:
        Unreadable: leases do not work on this file.
    """
    if not acquire(fd, path):
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def acquire(fd: int, path: Path) -> bool:
    """Take the write lease on ``fd`` and keep it; return False when another process holds the file.

    Raises:
        Unreadable: leases do not work on this file.
    """
    # A process that opens the file breaks the lease. The default signal for that is SIGIO, which ends a process that
    # does not expect it; SIGURG is ignored by default. This setting applies to this descriptor only.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EBUSY):
            return False
        why = "this user does not own it" if error.errno == errno.EACCES else "its file system does not support leases"
        raise Unreadable(f"The holders of {path} cannot be determined: {why} ({error.strerror}).") from error
    return True
