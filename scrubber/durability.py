"""Names that survive a power failure: syncing a file makes its content durable, syncing its directory its name.

A process that finds a name syncs the directory as well before it relies on it: the process that created the name may have
been killed before it did.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "sync_path"]


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable; raises ``OSError``."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_path(directory: Path) -> None:
    """Make the names in ``directory`` durable, and those that lead to it on its file system; raises ``OSError``.

    Directories in which this process cannot create a name are skipped.
    """
    directory = directory.resolve()
    sync_directory(directory)
    for above in directory.parents:
        if above.stat().st_dev != directory.stat().st_dev:
            return
        if os.access(above, os.W_OK):
            sync_directory(above)
