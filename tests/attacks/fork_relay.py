"""A chain of processes, each of which starts the next one and ends."""

import os
import signal
import time

from tests.attacks.tools import Place, say, stay

TRIES = "outlives its container in a chain of processes that pass the device on, each alive for 5 ms"
HOLDS = "the chain is ended before another pod gets the device, which is clean then"
THREATS = ("W6", "B17", "D6")


def attack(place: Place) -> None:
    place.open_device()
    if not os.fork():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.005)
            if os.fork():
                os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    say(ready=True)
    stay()
