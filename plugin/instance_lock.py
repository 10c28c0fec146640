"""Decides which of several instances of the plugin on one node may be registered: the holder of the resource's lock.

During a rolling update two instances overlap. The kubelet keeps one endpoint for a resource, and treats the end of
*any* stream of the resource as the end of that endpoint. If both instances were registered, the end of the older one
would disconnect the newer one. If the older one had registered last, the newer one would stay without an endpoint and
could not detect it, because its own stream stays open. So the newer instance starts, serves and waits here. It
registers once the older one has ended its streams or has died, which also releases the lock.

An instance of an earlier version has no lock. The newer one then registers beside it, and again when its stream ends.

Reports about the node to the API server do not belong to a resource: a separate lock decides which instance writes them
(:class:`WriterLock`).
"""

from __future__ import annotations

import fcntl
import os
import zlib
from pathlib import Path

__all__ = ["InstanceLock", "WriterLock"]


# See docs/decisions/0014-plugin-registration.md.
class InstanceLock:
    """The lock of ``resource`` in ``directory``, which all instances share. Held until :meth:`release`.

    The name begins with a dot, because the kubelet's plugin watcher reads every other file. No instance removes the
    file, but a kubelet may: some versions clear ``device-plugins/`` when they start. Only a lock of the file at
    :attr:`path` counts.
    """

    def __init__(self, directory: Path, resource: str) -> None:
        base = resource.rpartition("/")[2][:24]
        whole = zlib.crc32(resource.encode())  # distinguishes resources with the same base name
        self.path = directory / f".scrubber-{base}-{whole:08x}.lock"
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def try_acquire(self) -> bool:
        """Acquire the lock if no other instance holds it; return whether this instance holds it now.

        Call it before each registration: if the locked file was removed or replaced, that lock is released and the new
        file is locked. Where no lock can be created (a read-only directory, a full disk), every instance registers, as
        without this module.
        """
        if self._file is not None and self._is_at_path(self._file):
            return True
        self.release()
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:
            os.close(file)
            return True
        if not self._is_at_path(file):  # removed since it was opened; the caller tries again
            os.close(file)
            return False
        self._file = file
        return True

    def _is_at_path(self, file: int) -> bool:
        """Return whether ``file`` is the file that an instance starting now would open."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path, follow_symlinks=False))
        except OSError:
            return False

    def release(self) -> None:
        """Let the next instance register; no effect when the lock is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class WriterLock:
    """Decides which of several instances of the plugin on a node writes to the API server: the holder of this lock.

    An instance that waits for this lock holds a second one, which shows a stopping instance, without a wait, whether it
    has a successor. Where no lock can be created, every instance writes, and none has a successor.
    """

    def __init__(self, directory: Path) -> None:
        self._writing = InstanceLock(directory, "cluster")
        self._waiting = InstanceLock(directory, "cluster-next")

    def try_acquire(self) -> bool:
        """Return whether this instance may write now; if not, mark it as waiting. Call it before each write."""
        if self._writing.try_acquire():
            self._waiting.release()
            return True
        self._waiting.try_acquire()
        return False

    def has_successor(self) -> bool:
        """Return whether another instance waits for the lock of this one, or has acquired it already."""
        if not self._writing.try_acquire():
            return True
        alone = self._waiting.try_acquire()
        self._waiting.release()
        return not alone

    def release(self) -> None:
        """Let the next instance write; no effect when neither lock is held."""
        self._writing.release()
        self._waiting.release()
