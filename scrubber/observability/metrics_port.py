"""The port of a daemon's metrics, taken before anything else is started that a taken one would have to end.

Apart from :mod:`scrubber.observability.metrics_server`, which serves it: that takes as long to load as all else that the plugin needs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "MAX_CONNECTIONS",
    "MetricsListener",
    "MetricsPortUnavailable",
    "bind_metrics_port",
    "bind_metrics_port_or_warn",
]

MAX_CONNECTIONS = 32
"""Connections that are answered at the same time; one more is closed unanswered."""


class MetricsPortUnavailable(InvalidConfiguration):
    """The address of the metrics cannot be listened on."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"Metrics cannot be served on {address}: {why}. Choose another --metrics-address, or off.")


@dataclass(frozen=True, slots=True)
class MetricsListener:
    """A port on which clients wait until it is served."""

    socket: socket.socket
    address: str

    def close(self) -> None:
        """Give the port up; nothing to do when it was closed before."""
        self.socket.close()


def bind_metrics_port(host: str, port: int) -> MetricsListener:
    """Take the port.

    Raises:
        MetricsPortUnavailable: the address cannot be listened on.
    """
    bracketed = f"[{host}]" if ":" in host else host
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(place)
            taken.listen(MAX_CONNECTIONS)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise MetricsPortUnavailable(f"{bracketed}:{port}", error.strerror or str(error)) from error
    return MetricsListener(taken, f"{bracketed}:{taken.getsockname()[1]}")


def bind_metrics_port_or_warn(
    host: str, port: int, *, required: bool, warn: Callable[[str], object]
) -> MetricsListener | None:
    """Take the port; where it is not ``required``, a taken one costs a warning and the metrics, and nothing else.

    Raises:
        MetricsPortUnavailable: the address cannot be listened on although it is required.
    """
    try:
        return bind_metrics_port(host, port)
    except MetricsPortUnavailable as error:
        if required:
            raise
        warn(str(error))
        return None
