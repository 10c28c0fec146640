"""Room on the disk that is the ledger's own, for what has to be recorded when there is no other.

Any pod can fill the disk: with logs, image layers, an ``emptyDir``. A file beside the ledger holds blocks that nobody
else gets, and gives them back when a change could not be stored for want of space.

Which changes may use it: all but those with grants. A grant is the one thing that we may refuse, and that brings new
work with it; everything else tells what has already happened, or takes trust away (a quarantine, a finding, a release,
a scrub's end, an operator's word), and comes to an end when no more is granted.

The promise: it is given back slice by slice, each right before the change that needs it is tried again, so whoever
fills the disk in the same moment gets what one change left of one slice and no more.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["RESERVE_BYTES", "SLICE_BYTES", "DiskReserve"]

RESERVE_BYTES = 4 * 1024 * 1024
SLICE_BYTES = 16 * 1024

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskReserve:
    """Blocks that the file at ``path`` holds; nothing is ever written into it.

    On a file system that copies on write or compresses, blocks that are held may not be blocks that can be had.

    Args:
        size: bytes; 0: there is none, and it is always whole.

    Raises (all methods):
        OSError: the storage fails in another way than by being full.
    """

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path = path
        self._size = size
        self._descriptor: int | None = None
        self._complete = size == 0

    def allocate(self) -> bool:
        """Hold all of it, if there is room for all; whether it is whole. Costs nothing while it is."""
        if self._complete:
            return True
        descriptor = self._open()
        held = os.fstat(descriptor).st_size
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError as exc:
            os.ftruncate(descriptor, held)  # some file systems leave what they had found by then
            if exc.errno in _FULL:
                return False
            raise
        self._complete = True
        return True

    def release_slice(self) -> bool:
        """Let go of one slice; False when nothing is left."""
        if self._size == 0:
            return False
        descriptor = self._open()
        held = os.fstat(descriptor).st_size
        if held == 0:
            return False
        self._complete = False
        os.ftruncate(descriptor, max(held - SLICE_BYTES, 0))
        # A journalling file system gives blocks out again only when it is on the disk that they are free.
        os.fsync(descriptor)
        return True

    def close(self) -> None:
        """Close the file; its blocks stay held, for the next instance."""
        descriptor, self._descriptor = self._descriptor, None
        self._complete = self._size == 0
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return self._descriptor
