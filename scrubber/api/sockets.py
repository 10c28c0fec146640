"""Paths of the service's sockets: one directory that contains one directory and one socket for each purpose.

Invariant: the service and its clients compute the same paths from the same directory. A directory too long for Unix
sockets is refused here with a message, before any bind or connect.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from scrubber.domain.errors import InvalidConfiguration

__all__ = ["MAX_SOCKET_PATH_BYTES", "Purpose", "Sockets", "grpc_target"]

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length in bytes of a Unix socket's path on Linux, without the final NUL (``sun_path``, unix(7))."""

_MAX_SUFFIX_BYTES = len("/door/a4294967295-ffff")
"""The longest path ever bound below the directory: the proxy's end of a relayed connection."""


# See docs/decisions/0036-operator-commands.md.
class Purpose(StrEnum):
    """The purpose of a socket, which defines its users and the one service it serves."""

    PLUGIN = "plugin"
    ADMIN = "admin"
    READ = "read"

    @property
    def service(self) -> str:
        """Full name of the gRPC service behind the socket."""
        return f"scrubber.v1.{self.value.capitalize()}"

    @property
    def socket(self) -> str:
        """The socket's path below the directory, as shown to users."""
        return f"{self.value}/{self.value}.sock"


@dataclass(frozen=True, slots=True)
class Sockets:
    """The service's sockets below ``directory``.

    Args:
        directory: value of ``--socket-dir``.
        admin_group: operators: its members may use the admin and the read socket; None leaves both to the service's own
            user.
        read_group: its members may use the read socket, in place of ``admin_group``: an operator who also reads is in
            both.

    Raises:
        InvalidConfiguration: ``directory`` is too long for the sockets below it.
    """

    directory: Path
    admin_group: str | None = None
    read_group: str | None = None

    def group_of(self, purpose: Purpose) -> str | None:
        """Return the group whose members may use a socket, besides the service's own user."""
        match purpose:
            case Purpose.PLUGIN:
                return None
            case Purpose.ADMIN:
                return self.admin_group
            case Purpose.READ:
                return self.read_group or self.admin_group

    def __post_init__(self) -> None:
        length, room = len(os.fsencode(self.directory)), MAX_SOCKET_PATH_BYTES - _MAX_SUFFIX_BYTES
        if length > room:
            raise InvalidConfiguration(
                f"The path of the socket directory {self.directory} has {length} bytes; at most {room} leave "
                f"room for the sockets, because the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES} "
                "bytes. Pass a shorter one with --socket-dir."
            )

    def path(self, purpose: Purpose) -> Path:
        """Return the path of the socket that clients connect to."""
        return self.directory / purpose.socket

    @property
    def lock(self) -> Path:
        """Lock file of the one service that may serve here."""
        return self.directory / "lock"

    @property
    def internal_dir(self) -> Path:
        """The service's private directory, mode 0700, with the real admin server behind the proxy."""
        return self.directory / "door"


def grpc_target(path: Path) -> str:
    """Return ``path`` as a gRPC target. gRPC parses targets as URIs, so spaces, ``%``, ``?`` and ``#`` are quoted."""
    return "unix:" + quote(os.fsencode(path))
