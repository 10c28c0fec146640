"""Where the service's sockets are: one directory, in it one directory and one socket for each purpose.

Promise: the service and its clients compute the same paths from the same directory, and a directory too long for Unix
sockets is refused here, with a sentence, before anybody binds or connects.
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
"""Bytes of a Unix socket's path that Linux takes, without the closing zero (``sun_path``, unix(7))."""

_MAX_SUFFIX_BYTES = len("/door/a4294967295-ffff")
"""The longest name ever bound below the directory: the front door's end of a relayed connection."""


class Purpose(StrEnum):
    """What a socket is for: who may use it, and the one service it serves."""

    PLUGIN = "plugin"
    ADMIN = "admin"
    READ = "read"

    @property
    def service(self) -> str:
        """Full name of the gRPC service behind the socket."""
        return f"scrubber.v1.{self.value.capitalize()}"

    @property
    def socket(self) -> str:
        """The socket's path below the directory, as people write it."""
        return f"{self.value}/{self.value}.sock"


@dataclass(frozen=True, slots=True)
class Sockets:
    """The service's sockets below ``directory``.

    Args:
        directory: what ``--socket`` names.
        admin_group: operators: its members may use the admin and the read socket; None leaves both to the service's own user.
        read_group: its members may use the read socket, in the place of ``admin_group``: who may act is in both, to see as well.

    Raises:
        InvalidConfiguration: ``directory`` is too long for the sockets below it.
    """

    directory: Path
    admin_group: str | None = None
    read_group: str | None = None

    def group_of(self, purpose: Purpose) -> str | None:
        """Whose members may use a socket, besides the service's own user."""
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
                f"The socket directory {self.directory} has {length} bytes, and {room} leave room for the sockets: "
                f"the path of a Unix socket has at most {MAX_SOCKET_PATH_BYTES}. Give a shorter one with --socket."
            )

    def path(self, purpose: Purpose) -> Path:
        """The socket that clients connect to."""
        return self.directory / purpose.socket

    @property
    def lock(self) -> Path:
        """Held by the one service that may serve here."""
        return self.directory / "lock"

    @property
    def internal_dir(self) -> Path:
        """The service's own directory, mode 0700: what the admin front door relays to."""
        return self.directory / "door"


def grpc_target(path: Path) -> str:
    """``path`` as gRPC takes it. The library reads a target as a URI, so spaces, ``%``, ``?`` and ``#`` are quoted."""
    return "unix:" + quote(os.fsencode(path))
