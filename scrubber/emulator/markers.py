"""Which processes belong to a pod where control groups cannot be written: a marker in each process's environment.

Promise: a signal goes only to a process that carried the marker after its pidfd was opened, so never to an unrelated
process that reuses the PID; and no process is overlooked because it is just calling ``exec``. Only processes of our own
user can be read; the emulator starts no others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterator

POD_UID = "SCRUBBER_SIM_POD_UID"
CONTAINER = "SCRUBBER_SIM_CONTAINER"
RUN = "SCRUBBER_SIM_RUN"
SANDBOX = "POD"
"""The container name of a sandbox, as in the kubelet's own container labels."""
POLL = 0.005
EXEC_TIMEOUT = 2.0
"""Seconds of reading after which the environment of a process that seems to be calling ``exec`` is taken as it is.

On a busy machine such a process may lose the processor half way. Nothing else is done meanwhile.
"""
EMPTY_TIMEOUT = 0.1
"""The same for a running process whose environment is empty: it is being filled, or the process was given none."""
MAX_COUNTED_WAIT = 0.01
"""Maximum seconds counted per read: time in which this process did not run is no evidence about the other process."""
PF_EXITING = 0x4
PF_KTHREAD = 0x200000
"""Flags of a task, from the kernel's ``sched.h``."""


def marker_environment(uid: str, container: str, run: str) -> dict[str, str]:
    """Return the variables that every process of a container carries.

    ``run`` is new for each start, as a cgroup's name is.
    """
    return {POD_UID: uid, CONTAINER: container, RUN: run}


def marked_processes(uids: Collection[str], container: str | None = None) -> list[int]:
    """Return the PIDs of live processes with the marker of one of the pods, or of that container in them."""
    return [pid for pid in _pids() if _carries(pid, uids, container)]


async def kill_marked_processes(uids: Collection[str], container: str | None = None) -> None:
    """Kill every process of the pods or container, repeatedly until none is left: a process may be forking."""
    while found := marked_processes(uids, container):
        for pid in found:
            _kill(pid, uids, container)
        await asyncio.sleep(POLL)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _carries(pid: int, uids: Collection[str], container: str | None) -> bool:
    variables = _variables(pid)
    marker = f"{POD_UID}=".encode()
    marked = next((each[len(marker) :] for each in variables if each.startswith(marker)), b"")
    if marked.decode(errors="replace") not in uids:
        return False
    return container is None or f"{CONTAINER}={container}".encode() in variables


def _variables(pid: int) -> list[bytes]:
    """Return a process's environment; empty when it has none, is gone, or belongs to another user."""
    waited, last_check = 0.0, time.monotonic()
    try:
        while True:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                content = environ.read()
            # A process in the midst of exec has an address space without an environment: read again.
            if content or waited >= _exec_timeout(pid):
                return content.split(b"\0")
            os.sched_yield()
            now = time.monotonic()
            waited, last_check = waited + min(now - last_check, MAX_COUNTED_WAIT), now
    except OSError:
        return []


def _exec_timeout(pid: int) -> float:
    """Return for how many seconds an empty environment may be one that is being created (proc(5): 3, 9, 50, 51)."""
    with open(f"/proc/{pid}/stat", "rb") as stat:  # a command's name may not be valid text
        fields = stat.read().rpartition(b") ")[2].split(b" ")
    state, flags, start, end = fields[0], int(fields[6]), int(fields[47]), int(fields[48])
    if state in b"ZX" or flags & (PF_KTHREAD | PF_EXITING):
        return 0.0
    if start == end != 0:
        return EMPTY_TIMEOUT if state in b"RD" else 0.0  # a process does not sleep while exec fills it
    return EXEC_TIMEOUT


def _kill(pid: int, uids: Collection[str], container: str | None) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(pid, uids, container):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
