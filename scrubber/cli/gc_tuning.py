"""When Python looks for cycles: seldom in a command, which ends soon and keeps what it loads; as usual in a daemon.

What gRPC and pydantic make is looked through again and again while they are loaded, and once more when the interpreter
ends: a fifth to a third of a command's processor time.
"""

from __future__ import annotations

import atexit
import gc

__all__ = ["make_gc_rare", "restore_gc"]

_DEFAULT_THRESHOLD = gc.get_threshold()
_COMMAND_THRESHOLD = 200_000
"""More than a command loads; a command that stays, such as ``devices --watch``, keeps no more garbage than that."""


def make_gc_rare() -> None:
    """For a process that has nothing to say when it goes."""
    gc.set_threshold(_COMMAND_THRESHOLD, *_DEFAULT_THRESHOLD[1:])
    atexit.register(gc.freeze)


def restore_gc() -> None:
    """For a process that lives long after all, before it does anything."""
    gc.set_threshold(*_DEFAULT_THRESHOLD)
    atexit.unregister(gc.freeze)
