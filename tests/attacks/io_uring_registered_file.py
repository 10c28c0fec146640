"""A file that is registered with io_uring and is in no descriptor table."""

import ctypes
import os
import socket

from tests.attacks.tools import LIBC, Place, connected, listening, say, stay

TRIES = "passes its device to a pod without a GPU, which registers it with io_uring and closes the descriptor"
HOLDS = "no other pod gets the device before that pod has ended; then it is clean"
THREATS = ("B12",)
ACCOMPLICE_KEEPS_DEVICE = True

SETUP, REGISTER, FILES = 425, 427, 2
"""Numbers of the system calls, equal on all architectures that Kubernetes runs on; IORING_REGISTER_FILES."""


def attack(place: Place) -> None:
    fd = place.open_device()
    with connected(place) as accomplice:
        socket.send_fds(accomplice, [b"x"], [fd])
        accomplice.recv(1)
    os.close(fd)
    say(ready=True)
    stay()


def accomplice(place: Place) -> None:
    """Where the kernel or a seccomp profile permits no io_uring, the descriptor stays open: the line says so."""
    server = listening(place)
    say(ready=True)
    attacker, _ = server.accept()
    _, (fd,), _, _ = socket.recv_fds(attacker, 1, 1)
    ring = LIBC.syscall(SETUP, 8, ctypes.create_string_buffer(120))
    registered = ring >= 0 and LIBC.syscall(REGISTER, ring, FILES, (ctypes.c_int * 1)(fd), 1) == 0
    if registered:
        os.close(fd)
    say(registered=registered)
    attacker.send(b"x")
    stay()
