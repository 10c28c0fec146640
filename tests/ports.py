"""TCP ports on loopback for daemons that have to find theirs again after a restart."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that nobody listens on, that no outgoing connection is given, and that no other call returns.

    It stays reserved, also between two lives of a daemon, for as long as this process lives: whoever calls this, in this
    process or in another one of the same network namespace, binds a name for the port first. Where a daemon may choose
    its port, let it (port 0).
    """
    while True:
        port = random.randrange(20_000, 32_000)  # below the ports of outgoing connections
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0tests-port-{port}")
                probe.bind((_HOST, port))
            except OSError:
                continue
            claim.detach()
        return port
