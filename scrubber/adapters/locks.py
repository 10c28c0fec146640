"""The lock file of each device: a process that works on the device's memory holds the lock and records its PID in it.

Guarantee: no two programs of this project work on one device at the same time, even across a restart of the service. A
lock ends with its process, however the process ends. The PID recorded in a lock file counts only if that process wrote
it and has the file open. A path is built from a device ID only after the ID has been validated.

This module imports only the standard library and the process walk, because the programs that hold the locks import it
too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path

from scrubber.adapters.kernel_text import fields_in
from scrubber.adapters.procwalk import has_open, start_time
from scrubber.domain.errors import Unavailable, Unreadable

__all__ = ["SERVICE_LOCK", "UNIDENTIFIED", "acquire_lock", "is_device_id", "lock_holder", "lock_holders", "lock_path"]

SERVICE_LOCK = "service"
"""File name of the service's own lock. It lies among the device locks, so no device may have this ID."""

UNIDENTIFIED = 0
"""PID reported for a holder that recorded no PID, or a wrong one."""

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_ID = re.compile(r"[A-Za-z0-9:._-]{1,128}")
_RESERVED = frozenset({".", "..", SERVICE_LOCK})


def is_device_id(text: str) -> bool:
    """Whether ``text`` is valid as the ID of a device and the name of its lock file."""
    return _ID.fullmatch(text) is not None and text not in _RESERVED


def lock_path(lock_directory: Path, device_id: str) -> Path:
    """Return the path of the lock file of device ``device_id`` in the directory ``lock_directory``.

    Raises:
        Unreadable: ``device_id`` is not a valid ID and might lead out of the directory.
    """
    if not is_device_id(device_id):
        raise Unreadable(f"{device_id!r} is not a device id, so its lock is not checked.")
    return lock_directory / device_id


def acquire_lock(path: str, timeout: float = 1.0) -> bool:
    """Lock a device for the life of this process and record its PID; return False when another process holds the lock.

    Args:
        timeout: how long to try, in seconds: a service that checks whether the lock is free holds it for a moment.

    Raises:
        OSError: The lock file cannot be opened or written.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                return False
            time.sleep(0.002)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()} {start_time(os.getpid())}\n".encode(), 0)
    return True


def lock_holder(lock: Path) -> int | None:
    """Return the PID of the holder of ``lock``, :data:`UNIDENTIFIED`, or None when the lock is free. Never waits.

    Raises:
        Unreadable: The lock file cannot be opened.
        Unavailable: This process or the node lacks the resources to open a file.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"{lock} cannot be opened, so it is unknown whether an eraser is running: {error.strerror}."
        raise (Unavailable if error.errno in _SHORTAGES else Unreadable)(message) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the close below; acquirers retry for a second
        return None
    except BlockingIOError:
        return _recorded_holder(fd)
    finally:
        os.close(fd)


def lock_holders(lock_directory: Path) -> frozenset[int]:
    """Return the PIDs of all processes that hold the lock of a device; :data:`UNIDENTIFIED` for what is unknown."""
    try:
        names = os.listdir(lock_directory)
    except FileNotFoundError:
        return frozenset()
    except OSError:
        return frozenset({UNIDENTIFIED})
    return frozenset(
        pid for name in names if is_device_id(name) and (pid := _holder_of(lock_directory / name)) is not None
    )


def _holder_of(lock: Path) -> int | None:
    try:
        return lock_holder(lock)
    except (Unreadable, Unavailable):
        return UNIDENTIFIED


def _recorded_holder(lock: int) -> int:
    """Return the PID recorded in the locked file, if that process wrote it and has the file open."""
    words = fields_in(os.pread(lock, 64, 0).removesuffix(b"\n"))
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return UNIDENTIFIED
    pid, started = (int(word) for word in words)
    itself = os.fstat(lock)
    try:
        if pid and start_time(pid) == started and has_open(f"/proc/{pid}", itself.st_dev, itself.st_ino):
            return pid
    except PermissionError:
        return UNIDENTIFIED
    return UNIDENTIFIED
