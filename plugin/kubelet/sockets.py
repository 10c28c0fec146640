"""Unix sockets as files: which one is ours, which one is new, and which one is stale.

Invariant: only a stale socket file of this plugin, one without a listener, is ever removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from scrubber.domain.errors import InvalidConfiguration, Unavailable

__all__ = [
    "MAX_PATH_BYTES",
    "SOCKET_UMASK",
    "SocketFile",
    "add_socket",
    "check_path_length",
    "has_listener",
    "remove_stale_sockets",
]

SOCKET_UMASK = 0o117
"""umask: the kubelet runs as root, and no other user needs the plugin's sockets."""

MAX_PATH_BYTES = 107
"""Maximum length of ``sun_path`` on Linux in bytes, without the final NUL."""


@dataclass(frozen=True, slots=True)
class SocketFile:
    """Identity of one creation of a socket file.

    Inode numbers are reused, so the kubelet's new socket may have the inode of the old one. A socket's modification
    time is the time of its bind, regardless of later changes of its owner and mode.
    """

    device: int
    inode: int
    bound_ns: int

    @classmethod
    def of(cls, path: Path) -> SocketFile | None:
        """Return the identity of the socket at ``path`` as it is now; None when there is no file.

        Raises:
            InvalidConfiguration: the file is not a socket.
        """
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISSOCK(found.st_mode):
            kind = "regular file" if stat.S_ISREG(found.st_mode) else "directory or special file"
            raise InvalidConfiguration(f"{path} is a {kind}, not a socket. Move it, or use another directory.")
        return cls(found.st_dev, found.st_ino, found.st_mtime_ns)


def check_path_length(path: Path, what: str) -> None:
    """Refuse a path that is too long for a socket.

    Raises:
        InvalidConfiguration: it is longer than 107 bytes.
    """
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise InvalidConfiguration(
            f"The path of {what}, {path}, has {length} bytes; the limit for a Unix socket is {MAX_PATH_BYTES}. "
            "Use a directory with a shorter path."
        )


async def has_listener(path: Path, timeout: float) -> bool:
    """Return whether a process accepts connections at ``path`` within ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_unix_connection(path)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def add_socket(server: grpc.aio.Server, path: Path) -> SocketFile | None:
    """Have ``server`` listen at ``path`` once it starts; return the identity of the socket.

    A file at ``path`` is replaced, even if another process listens there.

    Raises:
        Unavailable: the directory does not exist (any more).
        InvalidConfiguration: the socket cannot be created there.
    """
    before = os.umask(SOCKET_UMASK)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        if not path.parent.is_dir():
            raise Unavailable(f"{path.parent} does not exist.") from error
        raise InvalidConfiguration(
            f"Cannot create a socket at {path}. Check that uid {os.geteuid()} can write to the directory."
        ) from error
    finally:
        os.umask(before)
    return SocketFile.of(path)


async def remove_stale_sockets(paths: Iterable[Path], *, older_than: float, now: float) -> list[Path]:
    """Remove those of ``paths`` that are sockets which a killed plugin left behind; return their paths.

    A live instance (during a rolling update) accepts connections and keeps its socket; ``older_than`` (seconds) spares
    an instance that has bound its socket and does not listen yet. ``now`` is wall-clock time, as file times are; a
    socket of the future is an old one, after the clock was set back. What cannot be removed stays.
    """
    removed = []
    for path in sorted(paths):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if (
            not stat.S_ISSOCK(found.st_mode)
            or 0 <= now - found.st_mtime < older_than
            or await has_listener(path, timeout=1.0)
        ):
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed
