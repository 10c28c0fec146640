"""The directories and files of the sockets: their owners, their modes, and which files may be replaced.

Invariants: at most one service serves a directory. Only stale sockets of this service are ever removed. A socket
appears under its final name only when it is served and has the right mode, so at no moment can an unauthorized caller
connect, or an authorized one find a socket without a server.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from scrubber.api.sockets import Purpose, Sockets
from scrubber.domain.errors import AlreadyRunning, InvalidConfiguration

__all__ = ["SocketDirectory", "gid_of"]

_PRIVATE = 0o700
_OPERATORS = 0o750
_TRAVERSABLE = 0o711
_SOCKET = 0o660


def gid_of(group: str) -> int:
    """Return the gid of ``group``; raises :class:`InvalidConfiguration` when the node has no such group."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidConfiguration(f"The group {group!r} does not exist on this node.") from None


class SocketDirectory:
    """The directory of the sockets, held from :meth:`acquire` to :meth:`release`.

    Sockets are bound under another name in their final directory (:meth:`prepare_bind_path`), and renamed once they are
    served (:meth:`publish`). When gRPC stops, it unlinks the file at the path where it bound; after the rename there is
    none.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._lock: int | None = None
        self._published: dict[Path, tuple[int, int]] = {}

    def acquire(self) -> None:
        """Create the directories, and become the one service in them.

        Raises:
            AlreadyRunning: another service holds the directory.
            InvalidConfiguration: a directory cannot be created, belongs to another user, or cannot be entered by the
                group.
        """
        groups = {purpose: self._sockets.group_of(purpose) for purpose in Purpose}
        gids = {purpose: gid_of(group) for purpose, group in groups.items() if group is not None}
        directory = self._sockets.directory
        try:
            self._make_root(directory, set(gids.values()))
            self._lock = _acquire_lock(self._sockets.lock, directory)
            _make_private_directory(self._sockets.internal_dir, _PRIVATE, None)
            for purpose in Purpose:
                mode = _OPERATORS if purpose in gids else _PRIVATE
                _make_private_directory(directory / purpose.value, mode, gids.get(purpose))
        except OSError as error:
            self.release()
            raise InvalidConfiguration(
                f"The sockets cannot be created in {directory} ({error}): pass a directory that this user can "
                "write to with --socket-dir."
            ) from error
        except BaseException:
            self.release()
            raise

    def prepare_bind_path(self, purpose: Purpose) -> Path:
        """Return the path where the socket for ``purpose`` is bound until it is published.

        Raises:
            AlreadyRunning: a process listens on the existing socket.
            InvalidConfiguration: the existing file is not a stale socket of this service.
        """
        final = self._sockets.path(purpose)
        _is_stale_socket(final)
        return self._remove_stale_socket(final.with_name("new"))

    def prepare_internal_bind_path(self) -> Path:
        """Return the path of the real admin server, which only the proxy connects to; it is never published."""
        return self._remove_stale_socket(self._sockets.internal_dir / "admin.sock")

    def publish(self, purpose: Purpose) -> None:
        """Set mode and group of the socket bound at :meth:`prepare_bind_path`, and rename it over a stale one."""
        final = self._sockets.path(purpose)
        bound = final.with_name("new")
        group = self._sockets.group_of(purpose)
        if group is not None:
            os.chown(bound, -1, gid_of(group))
        os.chmod(bound, _SOCKET)
        os.rename(bound, final)
        self._published[final] = _identity(os.lstat(final))

    def unpublish(self) -> None:
        """Remove the published names, so that new callers fail at once; existing connections stay open.

        A name that cannot be removed refuses connections once the service has ended, and the next one replaces it. It
        must not hide the error for which the service ends.
        """
        for path, identity in self._published.items():
            with suppress(OSError):
                if _identity(os.lstat(path)) == identity:
                    os.unlink(path)
        self._published.clear()

    def release(self) -> None:
        """Unpublish the sockets and release the directory.

        The lock file stays: after an unlink, two locks could be held.
        """
        self.unpublish()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @staticmethod
    def _remove_stale_socket(path: Path) -> Path:
        if _is_stale_socket(path):
            os.unlink(path)
        return path

    @staticmethod
    def _make_root(directory: Path, gids: set[int]) -> None:
        """Create the directory itself, or check an existing one, whose mode is not changed."""
        if not directory.exists():
            # All users may traverse it: access is controlled inside, and a later start may name other groups.
            directory.mkdir(mode=_PRIVATE, parents=True)
            directory.chmod(_TRAVERSABLE)
            return
        about = directory.stat()
        if not stat.S_ISDIR(about.st_mode):
            raise InvalidConfiguration(
                f"{directory} is not a directory; pass the directory of the sockets with --socket-dir."
            )
        if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
            raise InvalidConfiguration(
                f"{directory} is world-writable, so any user could place other sockets there: chmod o-w {directory}"
            )
        entering = {about.st_gid} if about.st_mode & stat.S_IXGRP else set()
        kept_out = sorted(gids - entering) if not about.st_mode & stat.S_IXOTH else []
        if kept_out:
            names = " and ".join(grp.getgrgid(gid).gr_name for gid in kept_out)
            mend = f"chgrp {names} {directory} && chmod g+x {directory}" if len(gids) == 1 else f"chmod a+x {directory}"
            raise InvalidConfiguration(
                f"The group that may use the admin and read sockets cannot enter {directory} ({names}): {mend}"
            )


def _make_private_directory(directory: Path, mode: int, gid: int | None) -> None:
    """Create or check a directory owned by this user, with exactly ``mode``."""
    try:
        directory.mkdir(mode=_PRIVATE)
    except FileExistsError:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode):
            raise InvalidConfiguration(f"{directory} is not a directory: remove it.") from None
        if about.st_uid != os.geteuid():
            raise InvalidConfiguration(
                f"{directory} belongs to uid {about.st_uid}, and this service runs as uid {os.geteuid()}: remove it."
            ) from None
    if gid is not None:
        os.chown(directory, -1, gid)
    directory.chmod(mode)


def _acquire_lock(path: Path, directory: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise AlreadyRunning(
            f"Another scrub service (PID {holder}) serves {directory}: stop it, or pass another directory "
            "with --socket-dir."
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _is_stale_socket(path: Path) -> bool:
    """Return whether a stale socket of this service is at ``path``; False when there is no file.

    Raises:
        InvalidConfiguration, AlreadyRunning: any other file is there.
    """
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(about.st_mode):
        raise InvalidConfiguration(f"{path} is not a socket, so it is not replaced: move it away.")
    if about.st_uid != os.geteuid():
        raise InvalidConfiguration(
            f"{path} belongs to uid {about.st_uid}, and this service runs as uid {os.geteuid()}: remove it."
        )
    if _has_listener(path):
        raise AlreadyRunning(
            f"Another program listens on {path}: stop it, or pass another directory with --socket-dir."
        )
    return True


def _has_listener(path: Path) -> bool:
    """Return whether a process listens. A full backlog (EAGAIN) counts as a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fsencode(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _identity(about: os.stat_result) -> tuple[int, int]:
    return (about.st_dev, about.st_ino)
