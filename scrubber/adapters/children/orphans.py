"""Programs that outlived the service that started them, identified by the lock of the device that each works on.

Guarantee: nothing happens to a device while a process holds its lock, and a process is signalled only if it is the one
that the lock names: same PID, same start time, and the lock file open.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from scrubber.adapters.children.process import wait_for_exit
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.locks import UNIDENTIFIED, lock_holder

__all__ = ["terminate_lock_holder"]

_GRACE = 2.0
_POLL = 0.02


async def terminate_lock_holder(lock: Path, deadline: float) -> bool:
    """Wait for the holder of ``lock``, then kill it if it is an eraser; True once the lock is free.

    An orphan stops on its own at its next chunk, so it gets half of ``deadline`` (2 s at most) for that. A holder that
    is not proved to be an eraser is only waited for. Time during which this service was stalled does not count.
    """
    kill_after = min(deadline / 2, _GRACE)
    with suppress(TimeoutError):
        async with stall_tolerant_timeout(deadline) as counted:
            while (pid := lock_holder(lock)) is not None:
                pidfd = _open_pidfd(lock, pid)
                if pidfd is None:
                    await asyncio.sleep(_POLL)
                    continue
                try:
                    left = kill_after - counted()
                    if left <= 0:
                        with suppress(ProcessLookupError, PermissionError):  # exited, or another user's process
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left if left > 0 else None):
                            await wait_for_exit(pidfd)
                finally:
                    os.close(pidfd)
    return lock_holder(lock) is None


def _open_pidfd(lock: Path, pid: int) -> int | None:
    """Open a pidfd of the eraser ``pid`` and then verify it, so that it cannot be a later process of that PID."""
    if pid == UNIDENTIFIED:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if lock_holder(lock) == pid:
        return pidfd
    os.close(pidfd)
    return None
