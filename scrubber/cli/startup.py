"""Start-up time of the process: garbage collection, and libraries that need not be loaded.

Python's garbage collector is rare in a command, which ends soon and keeps what it loads, and as usual in a daemon: the
objects of gRPC and pydantic are scanned repeatedly during loading, and once more at the interpreter's exit, which is a
fifth to a third of a command's CPU time.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

__all__ = ["load_structlog_without_rich", "make_gc_rare", "restore_gc", "silence_grpc_logs"]

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


def silence_grpc_logs() -> None:
    """Silence gRPC's core, which writes its own lines to standard error; it reads this variable when it is loaded."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def load_structlog_without_rich() -> None:
    """Load structlog without rich, which it would not use and which takes longer to load than gRPC."""
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # None makes the import fail as if rich were not installed
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]
