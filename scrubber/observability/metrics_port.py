"""Binds the port of a daemon's metrics, before starting anything that a port in use would have to stop again.

Separate from :mod:`scrubber.observability.metrics_server`, which serves the port: that module takes as long to load as
everything else that the plugin needs.
"""

from __future__ import annotations

from collections.abc import Callable

from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.tcp_listener import TcpListener, listen_on

__all__ = ["MetricsPortUnavailable", "bind_metrics_port", "bind_metrics_port_or_warn"]


class MetricsPortUnavailable(InvalidConfiguration):
    """The address of the metrics cannot be bound."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"Metrics cannot be served on {address}: {why}. Choose another --metrics-address, or off.")


def bind_metrics_port(host: str, port: int) -> TcpListener:
    """Bind the port.

    Raises:
        MetricsPortUnavailable: the address cannot be bound.
    """
    try:
        return listen_on(host, port)
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise MetricsPortUnavailable(where, error.strerror or str(error)) from error


def bind_metrics_port_or_warn(
    host: str, port: int, *, required: bool, warn: Callable[[str], object]
) -> TcpListener | None:
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
