"""Serving gRPC on a Unix socket the way the kubelet's process does: the file stays when the process is gone.

Promise: a socket served through this module is not unlinked when its server stops, and a path that clients could not
use is refused with a message.
"""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import grpc

MAX_PATH_BYTES = 107
"""Maximum length of a Unix socket's path that the kernel accepts, in bytes."""
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""Without it a new channel may inherit the connection, or the back-off, of a closed one to the same path."""


def check_length(path: Path) -> None:
    """Reject a socket path that the kernel would reject.

    Raises:
        ValueError: it is longer than 107 bytes.
    """
    if len(str(path).encode()) > MAX_PATH_BYTES:
        raise ValueError(f"socket path {path} is longer than {MAX_PATH_BYTES} bytes: choose a shorter root directory")


async def serve(server: grpc.aio.Server, path: Path) -> None:
    """Bind ``server`` to ``path`` and start it; stopping it closes the socket but leaves the file.

    When the server stops, grpcio unlinks the path that it was given to bind, even if that now belongs to another server.
    So it is given an alias that exists only while it binds.

    Raises:
        ValueError: the path is too long.
        RuntimeError: the path cannot be bound.
    """
    check_length(path)
    with tempfile.TemporaryDirectory(prefix="kubelet-") as scratch:
        alias = Path(scratch, "d")
        alias.symlink_to(path.parent)
        server.add_insecure_port(f"unix:{alias / path.name}")
    await server.start()


def channel(path: Path) -> grpc.aio.Channel:
    """Return a separate channel to the server behind ``path``."""
    return grpc.aio.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)


Incarnation = tuple[int, int]
"""Inode and change time: inode numbers are reused, so neither is enough alone."""


def is_socket(path: Path) -> bool:
    """Whether a socket is at ``path``, dead or alive."""
    return incarnation(path) is not None


def incarnation(path: Path) -> Incarnation | None:
    """Return which socket is at ``path``, dead or alive; None where there is none (any more)."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None
