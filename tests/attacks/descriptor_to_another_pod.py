"""A descriptor of the device in another pod."""

import os
import socket

from tests.attacks.tools import Place, connected, listening, say, stay

TRIES = "passes a descriptor of its device (SCM_RIGHTS) to a pod without a GPU, which keeps it open after the attacker's end"
HOLDS = "no other pod gets the device before that pod has ended; then it is clean"
THREATS = ("B11", "D2")
ACCOMPLICE_KEEPS_DEVICE = True


def attack(place: Place) -> None:
    fd = place.open_device()
    with connected(place) as accomplice:
        socket.send_fds(accomplice, [b"x"], [fd])
        accomplice.recv(1)
    os.close(fd)
    say(ready=True)
    stay()


def accomplice(place: Place) -> None:
    server = listening(place)
    say(ready=True)
    attacker, _ = server.accept()
    _kept = socket.recv_fds(attacker, 1, 1)
    attacker.send(b"x")
    stay()
