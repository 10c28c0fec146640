"""Binds a TCP port of a daemon, before starting anything that a port in use would have to stop again."""

from __future__ import annotations

import socket
from dataclasses import dataclass

__all__ = ["MAX_CONNECTIONS", "TcpListener", "listen_on"]

MAX_CONNECTIONS = 32
"""Limit of connections that a port serves at the same time; also the length of the queue before it is served."""


@dataclass(frozen=True, slots=True)
class TcpListener:
    """A bound port, on which clients wait until it is served. ``address``: ``HOST:PORT``, with the port in use."""

    socket: socket.socket
    address: str

    def close(self) -> None:
        """Release the port; no effect when it is closed already."""
        self.socket.close()


def listen_on(host: str, port: int) -> TcpListener:
    """Bind the port; 0 lets the system choose.

    Raises:
        OSError: the address cannot be bound.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(place)
        taken.listen(MAX_CONNECTIONS)
    except OSError:
        taken.close()
        raise
    return TcpListener(taken, f"{f'[{host}]' if ':' in host else host}:{taken.getsockname()[1]}")
