"""Kills what a run of a command left behind when its supervisor was killed first, identified by the device's lock.

The program and everything that it starts inherit a descriptor of the lock file. The file is in a directory of the
service that only root can open, so a process that has it open belongs to a run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.locks import lock_holder
from scrubber.adapters.procwalk import has_open

__all__ = ["kill_lock_holders"]

_POLL = 0.02


async def kill_lock_holders(lock: Path, deadline: float) -> bool:
    """Kill every other process that has ``lock`` open until it is free, or ``deadline`` seconds have passed.

    Returns:
        Whether the lock is free.

    Raises:
        Unreadable, Unavailable: as :func:`~scrubber.adapters.locks.lock_holder`.
    """
    with suppress(TimeoutError):
        async with stall_tolerant_timeout(deadline):
            while lock_holder(lock) is not None:
                await asyncio.to_thread(_kill, lock)
                await asyncio.sleep(_POLL)
    return lock_holder(lock) is None


def _kill(lock: Path) -> None:
    try:
        found = os.stat(lock)
    except FileNotFoundError:
        return
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with suppress(OSError):
            pidfd = os.pidfd_open(int(name))
            try:
                if has_open(f"/proc/{name}", found.st_dev, found.st_ino):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
