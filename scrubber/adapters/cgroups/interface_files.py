"""Control files of a cgroup: killing everything in it, and freezing it while its processes are signalled one by one.

Guarantee: everything frozen here is always thawed again, and a file that cannot be written is a result, not an error:
the caller checks which processes are left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scrubber.adapters.cgroups.tree import walk_cgroups

__all__ = ["frozen", "kill_file", "write_interface_file"]

_FREEZE = {"cgroup.freeze": "1", "freezer.state": "FROZEN"}
_THAW = {"cgroup.freeze": "0", "freezer.state": "THAWED"}


def kill_file(cgroup: Path) -> Path | None:
    """Return the file that kills a whole cgroup, including forks in progress; v2 since Linux 5.14."""
    switch = cgroup / "cgroup.kill"
    return switch if switch.exists() else None


@contextmanager
def frozen(cgroups: Sequence[Path]) -> Iterator[bool]:
    """Keep ``cgroups`` and all below from running and forking; yields whether any could be frozen.

    Freezing takes a moment, and a fork in progress still appears; the new process is frozen from the start.

    On exit every cgroup below is thawed too, not only those frozen here: a v1 process dies of its signal only after it
    is thawed, and it may have frozen itself in a cgroup that it created.
    """
    switches = [switch for cgroup in cgroups if (switch := _freeze_file(cgroup)) is not None]
    try:
        stopped = [write_interface_file(switch, _FREEZE[switch.name]) for switch in switches]
        yield any(stopped)
    finally:
        for switch in switches:
            write_interface_file(switch, _THAW[switch.name])
        for switch in switches:
            for below in walk_cgroups(switch.parent):
                write_interface_file(below / switch.name, _THAW[switch.name])


def write_interface_file(file: Path, text: str) -> bool:
    """Write ``text`` to ``file``; return whether that succeeded."""
    try:
        # The file is never created: if the cgroup or the file no longer exists, there is nothing to control.
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _freeze_file(cgroup: Path) -> Path | None:
    """Return the file that freezes ``cgroup``, where this hierarchy has one."""
    for name in _FREEZE:
        if (cgroup / name).exists():
            return cgroup / name
    return None
