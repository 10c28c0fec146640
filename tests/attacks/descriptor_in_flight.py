"""A descriptor of the device that no process has: it waits in a socket of another pod."""

import os
import socket

from tests.attacks.tools import Place, connected, listening, say, stay

TRIES = "leaves a descriptor of its device in the queue of a socket that a pod without a GPU keeps, so that no process has it"
HOLDS = "no other pod gets the device before that pod has ended; then it is clean"
THREATS = ("B12",)
ACCOMPLICE_KEEPS_DEVICE = True


def attack(place: Place) -> None:
    fd = place.open_device()
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)
    with connected(place) as accomplice:
        socket.send_fds(accomplice, [b"x"], [ours.fileno(), theirs.fileno()])
        accomplice.recv(1)
    say(ready=True)
    stay()


def accomplice(place: Place) -> None:
    server = listening(place)
    say(ready=True)
    attacker, _ = server.accept()
    _kept = socket.recv_fds(attacker, 1, 2)
    attacker.send(b"x")
    stay()
