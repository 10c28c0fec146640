"""The location of a ledger: a private directory on a local disk, for one instance at a time.

Guarantee: an existing ledger is never replaced by an empty one. A marker is written once the first ledger is complete;
from then on a missing database is a loss that an operator must investigate. Removal of ledger files while they are open
is detected: data written into them afterwards would not be found by a restart.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.ledger.failures import START_OVER_HINT
from scrubber.domain.errors import AlreadyRunning, InvalidConfiguration, LedgerFailure
from scrubber.durability import sync_directory, sync_path

__all__ = ["UNSUPPORTED_FILESYSTEMS", "FileIdentity", "StateDirectory", "filesystem_magic"]

UNSUPPORTED_FILESYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x564C: "NCP",
    0x786F4256: "VirtualBox shared folders",
}
"""``f_type`` of file systems whose locks or write ordering SQLite cannot rely on (statfs(2), linux/magic.h)."""

FileIdentity = tuple[int, int]
"""Device and inode of a file."""

_COPY_PREFIX = "ledger-schema-"

_MARKER_TEXT = "A scrub ledger lives here, in ledger.db. If that file is missing, records were lost.\n"


def filesystem_magic(directory: Path) -> int:
    """Return ``f_type`` of the file system of ``directory``, from statfs(2); ``os.statvfs`` does not provide it."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(512)  # struct statfs is 120 bytes on 64-bit Linux; its first member is a long
    if libc.statfs(os.fsencode(directory), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def _file_identity(path: Path) -> FileIdentity | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


class StateDirectory:
    """The directory of one ledger and the files in it.

    Args:
        filesystem: returns the magic number of the file system of a directory.
    """

    def __init__(self, directory: Path, filesystem: Callable[[Path], int] = filesystem_magic) -> None:
        self.directory = directory
        self.database = directory / "ledger.db"
        self.log = directory / "ledger.db-wal"
        self.temporary_database = directory / "ledger.db.new"
        self.temporary_log = directory / "ledger.db.new-wal"
        self.marker = directory / "ledger.marker"
        self.lock_file = directory / "ledger.lock"
        self.reserve = directory / "ledger.reserve"
        self._filesystem = filesystem

    def prepare(self) -> None:
        """Create the directory, or check that the existing one is private to this user and on a local disk.

        A directory that other users may only read is made private: the kubelet creates a ``hostPath`` with mode 0755.

        Raises:
            InvalidConfiguration: It belongs to another user, other users may write into it, or it is on a network file
                system.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.directory.stat()
        if found.st_uid != os.geteuid():
            raise InvalidConfiguration(
                f"The state directory {self.directory} belongs to uid {found.st_uid}, but the service runs as "
                f"uid {os.geteuid()}; change its owner, or pass another directory with --state-dir."
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidConfiguration(
                f"The state directory {self.directory} is writable by other users (mode "
                f"{stat.S_IMODE(found.st_mode):04o}); run: chmod 700 {self.directory}"
            )
        kind = UNSUPPORTED_FILESYSTEMS.get(self._filesystem(self.directory))
        if kind is not None:
            raise InvalidConfiguration(
                f"The state directory {self.directory} is on {kind}, where a ledger cannot be stored safely; "
                "pass a directory on a local disk with --state-dir."
            )
        self._make_private()

    def _make_private(self) -> None:
        """Remove all permissions of other users from a state directory.

        Only from a directory that is empty or already holds a ledger: ``--state-dir /etc`` by mistake must not lock out
        the users of the node. A symbolic link, and what cannot be changed, is left as it is; ``scrubber doctor``
        reports it.
        """
        with suppress(OSError):
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                opened_to_others = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
                names = os.listdir(descriptor) if opened_to_others and found.st_uid == os.geteuid() else ["?"]
                if not names or self.marker.name in names:
                    os.fchmod(descriptor, 0o700)
            finally:
                os.close(descriptor)

    def lock(self) -> int:
        """Lock the directory for this process; the returned descriptor holds the lock until it is closed.

        Raises:
            AlreadyRunning: Another process holds the lock.
        """
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = value_in(os.pread(descriptor, 32, 0)) or "unknown"
                raise AlreadyRunning(
                    f"Another scrub service (PID {owner}) owns the ledger in {self.directory}; stop it first, "
                    "or pass another directory with --state-dir."
                ) from None
            written = os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            os.ftruncate(descriptor, written)  # after the write: on a full disk the space of the previous PID is reused
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def size(self) -> int | None:
        """Return the size in bytes of the database and its log together; None when it cannot be determined."""
        try:
            return sum(path.stat().st_size for path in (self.database, self.log) if path.exists())
        except OSError:
            return None

    def file_identities(self) -> dict[Path, FileIdentity]:
        """Return the identities of the current files of the ledger: database, write-ahead log and lock.

        A path without a file is omitted; :meth:`check_unchanged` does not check it.
        """
        found = ((path, _file_identity(path)) for path in (self.database, self.log, self.lock_file))
        return {path: identity for path, identity in found if identity is not None}

    def check_unchanged(self, opened: Mapping[Path, FileIdentity]) -> None:
        """Check that the files that were ``opened`` are still at their paths. One ``stat`` each.

        Raises:
            LedgerFailure: One was removed, renamed or replaced.
        """
        for path, identity in opened.items():
            if _file_identity(path) != identity:
                raise LedgerFailure(
                    f"{path} was removed, renamed or replaced while the service was running, so its changes "
                    "would be lost; restore the file to its place, or restart the service and follow its "
                    "messages; hand-overs are refused until then."
                )

    def copy_of(self, schema: int) -> Path:
        """Return the path of the copy that is kept of a ledger with the number ``schema``."""
        return self.directory / f"{_COPY_PREFIX}{schema}.db"

    def copies(self) -> dict[int, Path]:
        """Return the copies of ledgers with other schemas, by the number of the schema."""
        found = {path.stem.removeprefix(_COPY_PREFIX): path for path in self.directory.glob(f"{_COPY_PREFIX}*.db")}
        return {int(number): path for number, path in found.items() if number.isascii() and number.isdecimal()}

    def replace_database(self, schema: int) -> Path:
        """Put the temporary database into the place of the database, and keep that one as the copy of ``schema``.

        Durable on return. A crash at any moment leaves a complete database: the earlier one, or the new one.

        Precondition: the lock is held, both databases are complete and closed, and neither has a log.

        Raises:
            LedgerFailure: The database has a log, without which its file is not complete.
            OSError: Any error reported by the storage; nothing was replaced.
        """
        for log in (self.log, self.temporary_log):
            if log.exists() and log.stat().st_size:
                raise LedgerFailure(
                    f"{log} could not be written into its database; check the disk, and start the service again."
                )
            log.unlink(missing_ok=True)
        copy = self.copy_of(schema)
        copy.unlink(missing_ok=True)
        os.link(self.database, copy)
        self._flush(copy)
        self._flush(self.temporary_database)
        sync_directory(self.directory)
        self.temporary_database.rename(self.database)
        sync_directory(self.directory)
        return copy

    def remove_temporary_database(self) -> None:
        """Remove what an unfinished conversion has left."""
        for leftover in self.directory.glob(self.temporary_database.name + "*"):
            leftover.unlink()

    def ensure_database(self, create: Callable[[Path], None]) -> None:
        """Ensure that the database exists: the existing one or, in a location that never had one, a new one.

        Precondition: the lock is held, and nothing in this process has the database open. (Closing any descriptor of it
        would release SQLite's own locks.)

        Args:
            create: creates a complete, closed database at the given path. The path exists, empty and private.

        Raises:
            LedgerFailure: There was a ledger here and its database is missing or empty.
        """
        self.remove_temporary_database()
        if self.database.exists():
            if self.database.stat().st_size == 0:
                raise LedgerFailure(
                    f"The ledger in {self.directory} is empty: its records were lost; {START_OVER_HINT}"
                )
        else:
            remains = [path.name for path in (self.marker, *self.directory.glob("ledger.db-*")) if path.exists()]
            if remains:
                raise LedgerFailure(
                    f"ledger.db is missing in {self.directory}, but {' and '.join(remains)} shows that a "
                    f"ledger existed; {START_OVER_HINT}"
                )
            self.create_temporary_database(create)
            self._flush(self.temporary_database)
            self.temporary_database.rename(self.database)
        if not self.marker.exists():
            # Also for an existing database: the process that created it may have been killed before this point.
            sync_path(self.directory)
            descriptor = os.open(self.marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, _MARKER_TEXT.encode("ascii"))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(self.directory)

    def create_temporary_database(self, create: Callable[[Path], None]) -> None:
        """Have ``create`` write a complete database at the temporary path, where it finds an empty, private file."""
        os.close(os.open(self.temporary_database, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        create(self.temporary_database)

    @staticmethod
    def _flush(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
