"""More holders, with longer names, than fit into one answer of a walk."""

import os

from tests.attacks.tools import Place, in_background, say, stay

TRIES = "outlives its container in 450 processes with names of 3,900 bytes that all have the device open"
HOLDS = "the processes are ended before another pod gets the device, which is clean then; they are listed or counted"
THREATS = ("D5", "D1")

HOLDERS = 450
NAME = "\N{EURO SIGN}" * 1300


def attack(place: Place) -> None:
    os.set_inheritable(place.open_device(), True)
    reader, _writer = os.pipe()

    def multiply() -> None:
        os.dup2(reader, 0)
        for _ in range(HOLDERS):
            if not os.fork():
                os.execv("/bin/sh", ["sh", "-c", "read never", NAME])

    in_background(multiply)
    say(ready=True)
    stay()
