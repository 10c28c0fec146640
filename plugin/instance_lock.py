"""Which of several instances of the plugin on one node may be registered: the one that holds the resource's lock.

During a rolling update two instances overlap. The kubelet keeps one endpoint for a resource, and takes the end of *any*
stream of the resource for the end of that one. If both instances were registered, the end of the older one would
disconnect the newer one; and if the older one had registered last, the newer one would stay without an endpoint and could
not tell, because its own stream lives on. So the newer instance starts, serves and waits here; it registers once the older
one has ended its streams, or has died, which releases the lock too.

An instance of an earlier version has no lock. The newer one then registers beside it, and again when its stream ends.

What the node looks like to the cluster is no resource's: which instance writes that has a lock of its own (:class:`WriterLock`).
"""

from __future__ import annotations

import fcntl
import os
import zlib
from pathlib import Path

__all__ = ["InstanceLock", "WriterLock"]


class InstanceLock:
    """The lock of ``resource`` in ``directory``, which all instances share. Held until :meth:`release`.

    The name begins with a dot, because the kubelet's plugin watcher looks at every other file. No instance removes the file,
    but a kubelet may: some versions clear ``device-plugins/`` when they start. Only the lock of the file at :attr:`path` counts.
    """

    def __init__(self, directory: Path, resource: str) -> None:
        base = resource.rpartition("/")[2][:24]
        whole = zlib.crc32(resource.encode())  # tells resources of one base name apart
        self.path = directory / f".scrubber-{base}-{whole:08x}.lock"
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def try_acquire(self) -> bool:
        """Take the lock if no other instance holds it; return whether this one does now.

        Call it before each registration: a lock whose file was removed or replaced is given up, and the file's successor
        is locked. Where there can be no lock (a read-only directory, a full disk), every instance registers, as without
        this module.
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
        """Return whether ``file`` is what an instance that starts now would open."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path, follow_symlinks=False))
        except OSError:
            return False

    def release(self) -> None:
        """Let the next instance register; nothing to do when the lock is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class WriterLock:
    """Which of several instances of the plugin on a node writes to the API server: the one that holds this lock.

    An instance that waits for it holds a second one. By that the instance that ends knows, without waiting for anything,
    that it has a successor. Where no lock can be made, every instance writes, and none has a successor.
    """

    def __init__(self, directory: Path) -> None:
        self._writing = InstanceLock(directory, "cluster")
        self._waiting = InstanceLock(directory, "cluster-next")

    def try_acquire(self) -> bool:
        """Return whether this instance may write now; otherwise it is known to be waiting. Call it before each write."""
        if self._writing.try_acquire():
            self._waiting.release()
            return True
        self._waiting.try_acquire()
        return False

    def has_successor(self) -> bool:
        """Return whether another instance waits for the lock of this one, or has taken it already."""
        if not self._writing.try_acquire():
            return True
        alone = self._waiting.try_acquire()
        self._waiting.release()
        return not alone

    def release(self) -> None:
        """Let the next instance write; nothing to do when neither lock is held."""
        self._writing.release()
        self._waiting.release()
