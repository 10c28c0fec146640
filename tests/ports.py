"""TCP ports on loopback for daemons that must use the same port again after a restart."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that has no listener, is never an ephemeral port, and is returned by no other call.

    It stays reserved for as long as this process lives, also between two runs of a daemon: every caller, in this
    process or in another one of the same network namespace, first binds an abstract socket name for the port. Where a
    daemon may choose its port, use port 0 instead.
    """
    while True:
        port = random.randrange(20_000, 32_000)  # below the ephemeral ports
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0tests-port-{port}")
                probe.bind((_HOST, port))
            except OSError:
                continue
            claim.detach()
        return port
