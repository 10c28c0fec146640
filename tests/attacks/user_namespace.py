"""A process in user, PID and mount namespaces of its own."""

import os

from tests.attacks.tools import LIBC, Place, in_background, say, stay

TRIES = "outlives its container as process 1 of its own PID namespace, with all capabilities in its own user namespace"
HOLDS = "the process is ended before another pod gets the device, which is clean then"
THREATS = ("B13", "D1")

NEW_USER, NEW_PID, NEW_MOUNTS = 0x10000000, 0x20000000, 0x00020000


def attack(place: Place) -> None:
    place.open_device()
    reader, writer = os.pipe()

    def enter() -> None:
        entered = LIBC.unshare(NEW_USER | NEW_PID | NEW_MOUNTS) == 0
        if not os.fork():
            LIBC.mount(b"none", b"/proc", b"tmpfs", 0, None)
            os.write(writer, b"%d" % (entered and os.getpid() == 1))
            stay()

    in_background(enter)
    say(ready=True, entered=os.read(reader, 1) == b"1")
    stay()
