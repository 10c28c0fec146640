"""When Python looks for cycles: seldom in a command, which ends soon and keeps what it loads; as usual in a daemon.

What gRPC and pydantic make is looked through again and again while they are loaded, and once more when the interpreter
ends: a fifth to a third of a command's processor time.
"""

from __future__ import annotations

import atexit
import gc

__all__ = ["as_usual", "seldom"]

_USUAL = gc.get_threshold()
_MANY = 200_000
"""More than a command loads; a command that stays, such as ``devices --watch``, keeps no more garbage than that."""


def seldom() -> None:
    """For a process that has nothing to say when it goes."""
    gc.set_threshold(_MANY, *_USUAL[1:])
    atexit.register(gc.freeze)


def as_usual() -> None:
    """For a process that lives long after all, before it does anything."""
    gc.set_threshold(*_USUAL)
    atexit.unregister(gc.freeze)
