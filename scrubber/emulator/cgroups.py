"""Control groups for the emulator's pods, laid out as the kubelet's cgroupfs driver lays them out.

Promise: a process put into a container's group never leaves it while the group exists, and this module removes what it
created. Only cgroup v2 with ``cgroup.kill`` (Linux 5.14) is used; without it the emulator marks its processes in their
environment instead.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
POLL = 0.01
"""Seconds between reads of ``cgroup.events``."""


def writable_cgroup_parent() -> Path | None:
    """Create a directory for the emulator in a writable cgroup v2 tree; return ``None`` where there is none.

    The ``Kubelet`` that receives it owns it: ``Kubelet.close()`` removes it with everything below.
    """
    for candidate in _candidates():
        directory = candidate / f"scrubber-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            directory.mkdir()
        except OSError:
            continue
        # Moving a process also needs write permission in the common ancestor, and killing a group needs cgroup.kill.
        if (directory / "cgroup.kill").exists() and os.access(candidate / "cgroup.procs", os.W_OK):
            return directory
        directory.rmdir()
    return None


def _candidates() -> list[Path]:
    """Return possible parents: our own group first, where a session may have delegated rights, then the root."""
    own = _own_group()
    found: list[Path] = []
    for mount in MOUNTS:
        if (mount / "cgroup.controllers").exists():
            found += [mount / own, mount] if own else [mount]
    return [path for path in found if (path / "cgroup.procs").exists()]


def _own_group() -> str:
    for line in Path("/proc/self/cgroup").read_bytes().split(b"\n"):
        if line.startswith(b"0::"):
            return os.fsdecode(line[3:].strip(b"/"))
    return ""


def add_process(group: Path, pid: int) -> None:
    """Move a process into ``group``.

    Raises:
        OSError: the process or the group is gone, or the kernel refuses.
    """
    (group / "cgroup.procs").write_text(str(pid))


def process_ids(group: Path) -> list[int]:
    """Return the PIDs in ``group`` itself, zombies included; empty when the group is gone."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_bytes().split(b"\n") if line]
    except (FileNotFoundError, OSError):
        return []


def is_populated(group: Path) -> bool:
    """Whether a live process is in ``group`` or below it; a zombie does not count. A group that is gone has none."""
    try:
        return b"populated 1" in (group / "cgroup.events").read_bytes().split(b"\n")
    except OSError:
        return False


def kill_processes(group: Path) -> None:
    """Kill every process in ``group`` and below; nothing to do when the group is gone."""
    try:
        (group / "cgroup.kill").write_text("1")
    except FileNotFoundError:
        return


async def wait_until_empty(group: Path) -> None:
    """Wait until no live process is left in ``group`` or below it."""
    while is_populated(group):  # noqa: ASYNC110  # asyncio cannot wait for the priority events of cgroup.events
        await asyncio.sleep(POLL)


def remove_tree(group: Path) -> bool:
    """Remove ``group`` and the empty groups below it; return False while a process is still in one of them."""
    if not group.is_dir():
        return True
    for below in [path for path in group.iterdir() if path.is_dir()]:
        if not remove_tree(below):
            return False
    try:
        group.rmdir()
    except OSError:
        return False
    return True
