"""Tunes Python's garbage collector: rare in a command, which ends soon and keeps what it loads; default in a daemon.

The objects of gRPC and pydantic are scanned repeatedly during loading, and once more at the interpreter's exit: a fifth
to a third of a command's CPU time.
"""

from __future__ import annotations

import atexit
import gc

__all__ = ["make_gc_rare", "restore_gc"]

_DEFAULT_THRESHOLD = gc.get_threshold()
_COMMAND_THRESHOLD = 200_000
"""More objects than a command loads; also a bound on the garbage of a long-running command such as ``devices --watch``.
"""


def make_gc_rare() -> None:
    """Make collections rare, for a short-lived process that needs no cleanup at its exit."""
    gc.set_threshold(_COMMAND_THRESHOLD, *_DEFAULT_THRESHOLD[1:])
    atexit.register(gc.freeze)


def restore_gc() -> None:
    """Restore the defaults, for a long-lived process, before it starts its work."""
    gc.set_threshold(*_DEFAULT_THRESHOLD)
    atexit.unregister(gc.freeze)
