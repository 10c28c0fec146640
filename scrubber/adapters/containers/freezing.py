"""The switches of a cgroup: kill all that is in it, and stop it while its processes are signalled one by one.

Promise: what was stopped here goes on again whatever happens, and a file that cannot be written is an answer, not an
error: the caller looks who is left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scrubber.adapters.containers.tree import cgroups_in

__all__ = ["frozen", "kill_switch", "press"]

_STOP = {"cgroup.freeze": "1", "freezer.state": "FROZEN"}
_GO = {"cgroup.freeze": "0", "freezer.state": "THAWED"}


def kill_switch(cgroup: Path) -> Path | None:
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
    switches = [switch for cgroup in cgroups if (switch := _freezer(cgroup)) is not None]
    try:
        stopped = [press(switch, _STOP[switch.name]) for switch in switches]
        yield any(stopped)
    finally:
        for switch in switches:
            press(switch, _GO[switch.name])
        for switch in switches:
            for below in cgroups_in(switch.parent):
                press(below / switch.name, _GO[switch.name])


def press(switch: Path, text: str) -> bool:
    """Write ``text`` to ``switch``; whether that was done."""
    try:
        # Never made: where the cgroup or the file is gone there is nothing to switch.
        descriptor = os.open(switch, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _freezer(cgroup: Path) -> Path | None:
    """The file that freezes ``cgroup``, where this hierarchy has one."""
    for name in _STOP:
        if (cgroup / name).exists():
            return cgroup / name
    return None
