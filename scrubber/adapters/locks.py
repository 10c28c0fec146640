"""The lock file of each device: whoever works on the device's memory holds it, and says in it who that is.

Promise: no two programs of ours work on one device at a time, also across a restart of the service; a lock ends with
its process, however that ends; and a name in a lock file counts only if that process is the one that wrote it and has
the file open. No path is made of an id before it is known to be one.

Standard library and the walk only, because the programs that hold the locks import it too.
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

__all__ = ["SERVICE_LOCK", "UNIDENTIFIED", "acquire_lock", "is_device_id", "lock_holder", "lock_path"]

SERVICE_LOCK = "service"
"""Among the locks of the devices, so no device may be called so."""

UNIDENTIFIED = 0
"""Stands for a holder that did not say who it is, or lied."""

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_ID = re.compile(r"[A-Za-z0-9:._-]{1,128}")
_RESERVED = frozenset({".", "..", SERVICE_LOCK})


def is_device_id(text: str) -> bool:
    """Whether ``text`` can name a device and its lock file."""
    return _ID.fullmatch(text) is not None and text not in _RESERVED


def lock_path(lock_directory: Path, device_id: str) -> Path:
    """The lock file of the device ``device_id`` in the directory ``lock_directory``.

    Raises:
        Unreadable: ``device_id`` is no id, and might lead elsewhere.
    """
    if not is_device_id(device_id):
        raise Unreadable(f"{device_id!r} is no id of a device, so its lock is not looked for.")
    return lock_directory / device_id


def acquire_lock(path: str, timeout: float = 1.0) -> bool:
    """Take a device's lock for the rest of this process, and write down who has it; False when somebody else has it.

    Args:
        timeout: seconds to try: a service that asks whether the lock is free has it for a moment.

    Raises:
        OSError: the lock file cannot be opened or written.
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
    """PID of the program that holds ``lock``, :data:`UNIDENTIFIED`, or None when it is free. Waits for nobody.

    Raises:
        Unreadable: the lock file cannot be opened.
        Unavailable: this process or the node is short of what it takes to open a file.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"{lock} cannot be opened, so whether an eraser is at work is unknown: {error.strerror}."
        raise (Unavailable if error.errno in _SHORTAGES else Unreadable)(message) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the close below: an eraser tries for a second
        return None
    except BlockingIOError:
        return _recorded_holder(fd)
    finally:
        os.close(fd)


def _recorded_holder(lock: int) -> int:
    """The PID written in the locked file, if that process is the one that wrote it and has the file open."""
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
