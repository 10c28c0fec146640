"""The node's key: one file below the state directory, created on the first start and never replaced by the service.

Guarantee: the file exists completely or not at all, even after a power failure or a crash at any point. A file that
cannot be the node's key prevents the start with a message, because certificates signed with the old key would not
verify against a new key in its place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from scrubber.adapters.signing.ed25519 import Ed25519Key, encode_private_key, load_private_key
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["FILE_NAME", "NodeKey"]

FILE_NAME = "signing.key"
_TEMPORARY_NAME = "signing.key.new"
_MAX_KEY_BYTES = 16 * 1024
_RESTORE_HINT = (
    "Restore the node's own file, or remove it: the next start then creates a new key, which must be "
    "distributed to everyone who verifies certificates."
)


# See docs/decisions/0033-signed-certificates.md.
class NodeKey(Ed25519Key):
    """A :class:`scrubber.ports.record.Signer` with a key that outlives the process."""

    @classmethod
    def open(cls, directory: Path) -> tuple[Self, bool]:
        """Return the key in ``directory``, and whether it was just created.

        Args:
            directory: the state directory. It exists, belongs to this user, and no other user can write into it.

        Raises:
            InvalidConfiguration: The file there is not a key of this node that only this user can read, or the
                directory cannot store a file.
        """
        path = directory / FILE_NAME
        try:
            place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidConfiguration(
                f"The node's key cannot be stored in {directory}: {error.strerror}. Pass another state "
                "directory with --state-dir."
            ) from error
        try:
            # Two services started at once must not create two keys, nor may one remove the other's unfinished file.
            fcntl.flock(place, fcntl.LOCK_EX)
            _remove_file(place, _TEMPORARY_NAME)
            written = _read_key(place, path)
            created = written is None
            if written is None:
                _create_key(place)
                written = _read_key(place, path)
            # Also for an existing file: the process that created it may have been killed before this point.
            os.fsync(place)
            if written is None:
                raise InvalidConfiguration(
                    f"The node's key {path} disappeared while it was being read. Start the service again."
                )
            return cls(load_private_key(written)), created
        except ValueError as wrong:
            raise InvalidConfiguration(f"The node's key {path} {wrong}. {_RESTORE_HINT}") from None
        except OSError as error:
            raise InvalidConfiguration(
                f"The node's key {path} cannot be stored: {error.strerror}. Without it no certificate can be signed."
            ) from error
        finally:
            os.close(place)


def _create_key(place: int) -> None:
    """Write a new key, and give it its final name only when it is completely on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    unfinished = os.open(_TEMPORARY_NAME, flags, 0o600, dir_fd=place)
    try:
        with os.fdopen(unfinished, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # independent of the umask
            file.write(encode_private_key(Ed25519PrivateKey.generate()))
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces a file.
        os.link(_TEMPORARY_NAME, FILE_NAME, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
    finally:
        _remove_file(place, _TEMPORARY_NAME)


def _read_key(place: int, path: Path) -> bytes | None:
    """Return the content of the key file if only this user can read it; None when there is no file.

    Raises:
        ValueError: The file cannot be the key; the message is a predicate, as in :func:`load_private_key`.
        InvalidConfiguration: Other users may read the file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(FILE_NAME, flags, dir_fd=place)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("is a symbolic link, so its owner is unknown") from None
        raise
    try:
        about = os.fstat(descriptor)
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("is not a regular file")
        if about.st_uid != os.geteuid():
            raise ValueError(f"belongs to uid {about.st_uid}, and the service runs as uid {os.geteuid()}")
        if mode & 0o077:
            raise InvalidConfiguration(
                f"Users other than its owner may read the node's key {path} (mode {mode:04o}), so it may be "
                f"compromised. If it is not, run: chmod 600 {path}. If it may be, remove it: the next start "
                "then creates a new key, which must be distributed to everyone who verifies certificates."
            )
        if about.st_size == 0:
            raise ValueError("is empty")
        if about.st_size > _MAX_KEY_BYTES:
            raise ValueError("is not a private key in PEM format")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_KEY_BYTES)
    finally:
        os.close(descriptor)


def _remove_file(place: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=place)
