"""The switches of a cgroup: kill all that is in it, and stop it while its processes are signalled one by one.

Promise: what was stopped here goes on again whatever happens, and a file that cannot be written is an answer, not an
error: the caller looks who is left.
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
    """The file that kills a whole cgroup, forks under way included; v2 since Linux 5.14."""
    switch = cgroup / "cgroup.kill"
    return switch if switch.exists() else None


@contextmanager
def frozen(cgroups: Sequence[Path]) -> Iterator[bool]:
    """Stop ``cgroups`` and all below from running and forking; yields whether any could be stopped.

    Freezing takes a moment, and a fork that was under way still appears; it is frozen from birth.

    On the way out every cgroup below is thawed, too, and not only where this froze it: a v1 process dies of its signal
    only when it is thawed, and it may have frozen itself in a cgroup of its own making.
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
    """Write ``text`` to ``file``; whether that was done."""
    try:
        # Never made: where the cgroup or the file is gone there is nothing to switch.
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
    """The file that freezes ``cgroup``, where this hierarchy has one."""
    for name in _FREEZE:
        if (cgroup / name).exists():
            return cgroup / name
    return None
