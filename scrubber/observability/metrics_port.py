"""Binds the port of a daemon's metrics, before starting anything that a port in use would have to stop again.

Separate from :mod:`scrubber.observability.metrics_server`, which serves the port: that module takes as long to load as
everything else that the plugin needs.
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
"""Limit of connections that are served at the same time; further ones are closed without a response."""


class MetricsPortUnavailable(InvalidConfiguration):
    """The address of the metrics cannot be bound."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"Metrics cannot be served on {address}: {why}. Choose another --metrics-address, or off.")


@dataclass(frozen=True, slots=True)
class MetricsListener:
    """A bound port, on which clients wait until it is served."""

    socket: socket.socket
    address: str

    def close(self) -> None:
        """Release the port; no effect when it is closed already."""
        self.socket.close()


def bind_metrics_port(host: str, port: int) -> MetricsListener:
    """Bind the port.

    Raises:
        MetricsPortUnavailable: the address cannot be bound.
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
    """Bind the port; if it is not ``required``, a failure only disables the metrics, with a warning.

    Raises:
        MetricsPortUnavailable: the address cannot be bound although it is required.
    """
    try:
        return bind_metrics_port(host, port)
    except MetricsPortUnavailable as error:
        if required:
            raise
        warn(str(error))
        return None
