"""The directories and files of the sockets: who owns them, who may enter, and what may be replaced.

Promise: at most one service serves a directory; nothing is ever removed that is not a dead socket of ours; and a socket
becomes visible under its name only when it is served and its mode is right, so there is no moment in which a wrong
caller gets in or a right one finds nobody behind it.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from scrubber.api.sockets import Purpose, Sockets
from scrubber.domain.errors import AlreadyRunning, InvalidConfiguration

__all__ = ["SocketDirectory", "gid_of"]

_PRIVATE = 0o700
_OPERATORS = 0o750
_TRAVERSABLE = 0o711
_SOCKET = 0o660


def gid_of(group: str) -> int:
    """Number of ``group``; raises :class:`InvalidConfiguration` when the node has none of that name."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidConfiguration(f"There is no group {group!r} on this node.") from None


class SocketDirectory:
    """The directory of the sockets, held from :meth:`acquire` to :meth:`release`.

    Sockets are bound under another name in their final directory (:meth:`prepare_bind_path`), and renamed once they are served
    (:meth:`publish`). gRPC unlinks by name whatever stands where it bound when it stops; after the rename that is
    nothing.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._lock: int | None = None
        self._published: dict[Path, tuple[int, int]] = {}

    def acquire(self) -> None:
        """Make the directories, and become the one service in them.

        Raises:
            AlreadyRunning: another service holds the directory.
            InvalidConfiguration: a directory cannot be made, is not ours, or could not be entered by the group.
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
                f"The sockets cannot be made in {directory} ({error}): "
                "give a directory that this user may write, with --socket."
            ) from error
        except BaseException:
            self.release()
            raise

    def prepare_bind_path(self, purpose: Purpose) -> Path:
        """Where the socket for ``purpose`` is bound until it is published.

        Raises:
            AlreadyRunning: somebody answers on the socket that is there already.
            InvalidConfiguration: what is there is not a dead socket of ours.
        """
        final = self._sockets.path(purpose)
        _is_stale_socket(final)
        return self._remove_stale_socket(final.with_name("new"))

    def prepare_internal_bind_path(self) -> Path:
        """Where the server is bound that only the front door relays to; it is never published."""
        return self._remove_stale_socket(self._sockets.internal_dir / "admin.sock")

    def publish(self, purpose: Purpose) -> None:
        """Give the socket bound at :meth:`prepare_bind_path` its mode, its group and its name, in the place of a dead one."""
        final = self._sockets.path(purpose)
        bound = final.with_name("new")
        group = self._sockets.group_of(purpose)
        if group is not None:
            os.chown(bound, -1, gid_of(group))
        os.chmod(bound, _SOCKET)
        os.rename(bound, final)
        self._published[final] = _identity(os.lstat(final))

    def unpublish(self) -> None:
        """Take the published names away, so that callers see at once that nobody serves; connections stay."""
        for path, identity in self._published.items():
            try:
                if _identity(os.lstat(path)) == identity:
                    os.unlink(path)
            except FileNotFoundError:
                continue
        self._published.clear()

    def release(self) -> None:
        """Withdraw what is published and let another service in. The lock file stays: unlinking it would make two."""
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
        """Make the directory itself, or check one that is there: its modes are somebody else's decision."""
        if not directory.exists():
            # Everybody may pass: what is in it lets in whom it should, and a later start may name other groups.
            directory.mkdir(mode=_PRIVATE, parents=True)
            directory.chmod(_TRAVERSABLE)
            return
        about = directory.stat()
        if not stat.S_ISDIR(about.st_mode):
            raise InvalidConfiguration(
                f"{directory} is not a directory; give the directory of the sockets with --socket."
            )
        if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
            raise InvalidConfiguration(
                f"Everybody may write {directory}, and so could put other sockets there: chmod o-w {directory}"
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
    """A directory with exactly ``mode``, owned by this user."""
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
            f"Another scrub service (PID {holder}) serves {directory}: "
            "stop it, or give another directory with --socket."
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _is_stale_socket(path: Path) -> bool:
    """Whether a dead socket of ours stands at ``path``; False when nothing does.

    Raises:
        InvalidConfiguration, AlreadyRunning: anything else is there.
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
        raise AlreadyRunning(f"Another program answers on {path}: stop it, or give another directory with --socket.")
    return True


def _has_listener(path: Path) -> bool:
    """Whether somebody listens. A full backlog (EAGAIN) is somebody, too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fsencode(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _identity(about: os.stat_result) -> tuple[int, int]:
    return (about.st_dev, about.st_ino)
