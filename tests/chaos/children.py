"""The children of a daemon that a test started, and signals that reach only them."""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ERASER", "DaemonChild", "children_of", "parent_of", "state_of"]

ERASER = "scrubber.adapters.sim.eraser"
_ZYGOTE = "scrubber.adapters.sim.zygote"


@dataclass(frozen=True, slots=True)
class DaemonChild:
    """A child process of ``parent`` that runs ``module``: started with ``python -m``, or forked by a zygote."""

    pid: int
    parent: int
    module: str

    def signal(self, number: signals.Signals) -> bool:
        """Send a signal if the process is still that child; return False when it has ended meanwhile."""
        handle = self.signal_and_keep(number)
        if handle is None:
            return False
        os.close(handle)
        return True

    def signal_and_keep(self, number: signals.Signals) -> int | None:
        """Send a signal and return the process's pidfd, for the caller to close; None when it has ended meanwhile."""
        handle: int | None = None
        try:
            handle = os.pidfd_open(self.pid)
            if _child(self.pid, self.parent) == self:
                signals.pidfd_send_signal(handle, number)
                return handle
        except ProcessLookupError:
            pass
        if handle is not None:
            os.close(handle)
        return None


def children_of(parent: int) -> list[DaemonChild]:
    """Return the living children of ``parent`` that run a module, and those of its zygote, lowest PID first."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    own = [child for pid in pids if (child := _child(pid, parent)) is not None]
    zygotes = [child.pid for child in own if child.module == _ZYGOTE]
    forked = [child for zygote in zygotes for pid in pids if (child := _child(pid, zygote)) is not None]
    return sorted((*own, *forked), key=lambda child: child.pid)


def parent_of(pid: int) -> int:
    """Return the PID of its parent; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def state_of(pid: int) -> str:
    """Return the state letter of a process (proc(5)); ``Z`` when there is none."""
    fields = _stat(pid)
    return fields[0] if fields else "Z"


def _child(pid: int, parent: int) -> DaemonChild | None:
    fields = _stat(pid)
    if not fields or int(fields[1]) != parent or fields[0] in "ZX":
        return None
    module = _module(pid)
    if module == _ZYGOTE == _module(parent):
        module = ERASER
    return None if module is None else DaemonChild(pid, parent, module)


def _module(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return words[words.index("-m") + 1] if "-m" in words[:-1] else None


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
