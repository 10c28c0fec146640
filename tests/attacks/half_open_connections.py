"""Connections that never send a request; --target is a socket, or an address such as 127.0.0.1:9464."""

import resource
import socket
from pathlib import Path

from tests.attacks.tools import Place, say, stay

TRIES = "opens 300 connections to each socket that it finds, silent ones and ones that end in the middle of a request"
HOLDS = "hand-overs continue, and operators are answered"
THREATS = ("D14",)
DEVICES = 0
TARGETS = "sockets"

CONNECTIONS = 300
BEGINNINGS = (
    b"",
    b"PRI * HTTP/2.0\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00",
    b"GET /metrics HTTP/1.1\r\n",
    b"\xff" * 64,
)


def attack(place: Place) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(CONNECTIONS * len(place.targets) + 100, most), most))
    kept, refused = [], 0
    for number in range(CONNECTIONS):
        for target in place.targets:
            try:
                client = _connect(target)
                client.settimeout(1)
                client.send(BEGINNINGS[number % len(BEGINNINGS)])
            except OSError:
                refused += 1
            else:
                kept.append(client)
    say(ready=True, connections=len(kept), refused=refused)
    stay()


def _connect(target: Path) -> socket.socket:
    if not target.is_socket():
        host, _, port = str(target).rpartition(":")
        return socket.create_connection((host, int(port)), timeout=1)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(1)
    client.connect(str(target))
    return client
