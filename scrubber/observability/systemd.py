"""State notifications of both daemons to the service manager, in systemd's notify protocol (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

__all__ = ["DEFAULT_WATCHDOG_INTERVAL", "SystemdNotifier", "watchdog_interval"]

DEFAULT_WATCHDOG_INTERVAL = 5.0
"""Seconds between two watchdog signals where the service manager names no timeout."""


class SystemdNotifier:
    """Sends states to the service manager.

    Args:
        address: value of ``NOTIFY_SOCKET``: a path, or ``@`` and an abstract name; empty without a service manager.
    """

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        # One socket for the whole lifetime: a service that has run out of file descriptors can still notify the
        # watchdog.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None

    def notify(self, state: str) -> None:
        """Send ``state``: variable assignments, one per line.

        Never raises and never waits: a state that cannot be delivered immediately is dropped.
        """
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto(state.encode(), self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def watchdog_interval(environment: Mapping[str, str]) -> float:
    """Return the seconds between two watchdog signals: a quarter of ``WATCHDOG_USEC``, at most the default.

    A variable that is meant for another process (``WATCHDOG_PID``), or is no positive number, is ignored.
    """
    written, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not (written.isascii() and written.isdigit() and int(written)) or process not in ("", str(os.getpid())):
        return DEFAULT_WATCHDOG_INTERVAL
    return min(DEFAULT_WATCHDOG_INTERVAL, int(written) / 4e6)
