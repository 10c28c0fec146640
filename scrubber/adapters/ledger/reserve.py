"""Disk space reserved for the ledger, for changes that must be stored when the disk is full.

Any pod can fill the disk: with logs, image layers, an ``emptyDir``. A file next to the ledger holds blocks that no
other process can use, and releases them when a change could not be stored for lack of space.

All changes except those with grants may use it. A grant is the only operation that can be refused, and it causes
further changes. Every other change records what has already happened, or reduces trust (a quarantine, a finding, a
release, the end of a scrub, an operator action), and their number is bounded when nothing more is granted.

Guarantee: the reserve is released in slices, each immediately before the change that needs it is retried. A process
that fills the disk at the same moment gets only what one change left of one slice.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["RESERVE_BYTES", "SLICE_BYTES", "DiskReserve"]

RESERVE_BYTES = 4 * 1024 * 1024
SLICE_BYTES = 16 * 1024

_FULL = (errno.ENOSPC, errno.EDQUOT)


# See docs/decisions/0035-full-disk-and-bounded-history.md.
class DiskReserve:
    """Blocks held by the file at ``path``; nothing is ever written into it.

    On a copy-on-write or compressing file system, held blocks may not become usable blocks.

    Args:
        size: size in bytes; 0: there is no reserve, and it is always complete.

    Raises (all methods):
        OSError: The storage fails for another reason than being full.
    """

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path = path
        self._size = size
        self._descriptor: int | None = None
        self._complete = size == 0

    def allocate(self) -> bool:
        """Allocate the whole reserve if there is room; return whether it is complete. Costs nothing while it is."""
        if self._complete:
            return True
        descriptor = self._open()
        held = os.fstat(descriptor).st_size
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError as exc:
            os.ftruncate(descriptor, held)  # some file systems keep what they had allocated by then
            if exc.errno in _FULL:
                return False
            raise
        self._complete = True
        return True

    def release_slice(self) -> bool:
        """Release one slice; False when nothing is left."""
        if self._size == 0:
            return False
        descriptor = self._open()
        held = os.fstat(descriptor).st_size
        if held == 0:
            return False
        self._complete = False
        os.ftruncate(descriptor, max(held - SLICE_BYTES, 0))
        # A journalling file system reuses blocks only after the journal on disk records them as free.
        os.fsync(descriptor)
        return True

    def close(self) -> None:
        """Close the file; its blocks remain allocated for the next instance."""
        descriptor, self._descriptor = self._descriptor, None
        self._complete = self._size == 0
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return self._descriptor
