"""Unix sockets as files: which one is ours, which one is new, which one is dead.

Promise: nothing but a socket file of this plugin that nobody serves any more is ever removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from scrubber.domain.errors import InvalidConfiguration

__all__ = ["MAX_PATH_BYTES", "SocketFile", "check_path_length", "has_listener", "remove_stale_sockets"]

MAX_PATH_BYTES = 107
"""Bytes of ``sun_path`` on Linux, without the final NUL."""


@dataclass(frozen=True, slots=True)
class SocketFile:
    """One creation of a socket file.

    Inode numbers are reused, so the kubelet's new socket may have its old one's; a socket's modification time is when
    it was bound, whatever is done to its owner and mode later.
    """

    device: int
    inode: int
    bound_ns: int

    @classmethod
    def of(cls, path: Path) -> SocketFile | None:
        """The socket at ``path`` as it is now; None when there is nothing.

        Raises:
            InvalidConfiguration: something that is not a socket is there.
        """
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISSOCK(found.st_mode):
            kind = "regular file" if stat.S_ISREG(found.st_mode) else "directory or special file"
            raise InvalidConfiguration(f"{path} is a {kind}, not a socket: move it away, or name another directory.")
        return cls(found.st_dev, found.st_ino, found.st_mtime_ns)


def check_path_length(path: Path, what: str) -> None:
    """Refuse a path that no socket can have.

    Raises:
        InvalidConfiguration: it is longer than 107 bytes.
    """
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise InvalidConfiguration(
            f"The path of {what}, {path}, has {length} bytes; a Unix socket's may have {MAX_PATH_BYTES}. "
            "Choose a shorter directory."
        )


async def has_listener(path: Path, timeout: float) -> bool:
    """Whether somebody accepts connections at ``path`` within ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_unix_connection(path)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def remove_stale_sockets(directory: Path, prefix: str, *, older_than: float, now: float) -> list[Path]:
    """Remove sockets of ours that a killed plugin left behind; answers which.

    A live instance beside us (a rolling update) answers and is left alone; ``older_than`` (seconds) spares one that
    has bound its socket and does not listen yet. ``now`` is wall-clock time, as file times are.
    """
    removed = []
    for path in sorted(directory.glob(f"{prefix}-*.sock")):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if (
            not stat.S_ISSOCK(found.st_mode)
            or now - found.st_mtime < older_than
            or await has_listener(path, timeout=1.0)
        ):
            continue
        path.unlink(missing_ok=True)
        removed.append(path)
    return removed
