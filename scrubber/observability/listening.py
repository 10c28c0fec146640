"""The port of a daemon's metrics, taken before anything else is started that a taken one would have to end.

Apart from :mod:`scrubber.observability.metrics_server`, which serves it: that takes as long to load as all else that the plugin needs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from scrubber.domain.errors import BadConfiguration

__all__ = ["MOST_CONNECTIONS", "Listener", "PortTaken", "listen", "listen_or_warn"]

MOST_CONNECTIONS = 32
"""Connections that are answered at the same time; one more is closed unanswered."""


class PortTaken(BadConfiguration):
    """The address of the metrics cannot be listened on."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"Metrics cannot be served on {address}: {why}. Choose another --metrics-address, or off.")


@dataclass(frozen=True, slots=True)
class Listener:
    """A port on which clients wait until it is served."""

    socket: socket.socket
    address: str

    def close(self) -> None:
        """Give the port up; nothing to do when it was closed before."""
        self.socket.close()


def listen(host: str, port: int) -> Listener:
    """Take the port.

    Raises:
        PortTaken: the address cannot be listened on.
    """
    bracketed = f"[{host}]" if ":" in host else host
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(place)
            taken.listen(MOST_CONNECTIONS)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise PortTaken(f"{bracketed}:{port}", error.strerror or str(error)) from error
    return Listener(taken, f"{bracketed}:{taken.getsockname()[1]}")


def listen_or_warn(host: str, port: int, *, required: bool, warn: Callable[[str], object]) -> Listener | None:
    """Take the port; where it is not ``required``, a taken one costs a warning and the metrics, and nothing else.

    Raises:
        PortTaken: the address cannot be listened on although it is required.
    """
    try:
        return listen(host, port)
    except PortTaken as error:
        if required:
            raise
        warn(str(error))
        return None
