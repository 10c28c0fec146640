"""How the doctor reads files: without blocking, without endless reads, and without changing anything.

The files may have been created by any user: a pipe without a writer, a file without an end, a link to something else. A
file that cannot be read completely is an ``OSError`` with a reason that people understand.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from scrubber.adapters.kernel_text import fields_in, lines_in, number_in, value_in

__all__ = [
    "FileSystem",
    "file_system_of",
    "format_mode",
    "group_name",
    "has_listener",
    "is_same_directory",
    "list_matching",
    "lock_holder",
    "path_exists",
    "read_bytes",
    "read_text",
    "socket_address",
    "user_name",
]

_MAX_BYTES = 1 << 20
_VOLATILE_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""``f_type`` of file systems in memory (linux/magic.h)."""


def read_text(path: Path, max_bytes: int = _MAX_BYTES) -> str:
    """Return the content of the regular file at ``path``; follows links.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than ``max_bytes`` bytes.
    """
    return read_bytes(path, max_bytes).decode("utf-8", "replace")


def read_bytes(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Return the content as bytes; see :func:`read_text`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"It has more than {max_bytes} bytes", str(path))
    return content


def is_same_directory(first: Path, second: Path) -> bool:
    """Whether both paths are one directory; False if one of them is missing or may not be looked at."""
    try:
        return first.samefile(second)
    except OSError:
        return False


def path_exists(path: Path) -> bool:
    """Whether anything exists at ``path``; follows links.

    Raises:
        OSError: this cannot be determined.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def list_matching(directory: Path, pattern: str) -> list[Path]:
    """Return the paths directly in ``directory`` whose names match ``pattern``; none where there is no such directory.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if fnmatchcase(name, pattern)]
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system of a path.

    Attributes:
        device: its device number; two paths with the same one share their space.
        network_type: its type, if other machines can reach it or it does not preserve the order of writes; else empty.
        free_bytes: bytes that root can still write.
        read_only: whether nothing can be written.
        volatile_type: its type, if its content does not outlive a reboot; else empty.
    """

    device: int
    network_type: str
    free_bytes: int
    read_only: bool
    volatile_type: str = ""


def file_system_of(path: Path) -> FileSystem:
    """Query the kernel for the file system of ``path``; raises OSError."""
    from scrubber.adapters.ledger import state_directory

    about, space, kind = os.stat(path), os.statvfs(path), state_directory.filesystem_magic(path)
    return FileSystem(
        about.st_dev,
        state_directory.UNSUPPORTED_FILESYSTEMS.get(kind, ""),
        space.f_bfree * space.f_frsize,
        bool(space.f_flag & os.ST_RDONLY),
        _VOLATILE_FILE_SYSTEMS.get(kind, ""),
    )


def format_mode(about: os.stat_result) -> str:
    """Return the permissions as people type them: ``0700``."""
    return f"{stat.S_IMODE(about.st_mode):04o}"


def user_name(uid: int) -> str:
    """Return ``anna (uid 1000)``; ``uid 1000`` where the number has no name."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_name(gid: int) -> str:
    """Return the group's name, or its number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Return an address of the socket ``path``; the path itself can be too long for one, as below ``--node-root``.

    Raises:
        OSError: it does not exist, or this user may not search its directory.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def has_listener(path: Path) -> bool:
    """Whether a process accepts connections on the socket ``path``; disconnects immediately, and never blocks.

    Raises:
        PermissionError: this user may not connect.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            with socket_address(path) as address:
                probe.connect(address)
        except BlockingIOError:  # more clients are waiting than the kernel queues
            return True
        except PermissionError:
            raise
        except OSError:
            return False
    return True


def lock_holder(path: Path, locks: Path) -> int | None:
    """Return the PID of the process that holds the ``flock`` on ``path``; None if there is none. Leaves the lock alone.

    Args:
        locks: ``/proc/locks``, which lists the locks of this PID namespace and of those below it.

    Raises:
        OSError: ``path`` or ``locks`` cannot be read.
    """
    about = os.lstat(path)
    here = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}".encode()
    held: dict[int, bytes] = {}
    for line in lines_in(read_bytes(locks, 8 << 20)):
        words = fields_in(line)
        # 17: FLOCK  ADVISORY  WRITE 4711 fe:00:131099 0 EOF; a process that waits for a lock has an arrow after the
        # number.
        if len(words) >= 6 and words[1] == b"FLOCK" and words[4].isdigit():
            held[number_in(words[4])] = words[5]
            if words[5] == here:
                return number_in(words[4])
    # On Btrfs and overlays a file's device has two numbers. There the PID that the owner wrote into the file decides.
    inode = f":{about.st_ino}".encode()
    candidates = [pid for pid, what in held.items() if what.endswith(inode)]
    return next((pid for pid in candidates if value_in(read_bytes(path, 64)) == str(pid)), None)
