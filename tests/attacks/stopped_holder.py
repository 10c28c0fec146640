"""A process that is stopped (SIGSTOP) when it is to be ended."""

import os
import signal
import time
from pathlib import Path

from tests.attacks.tools import Place, say, stay

TRIES = "outlives its container in a stopped process (SIGSTOP) of another session that has the device open"
HOLDS = "the process is ended before another pod gets the device, which is clean then"
THREATS = ("B13", "D1")


def attack(place: Place) -> None:
    place.open_device()
    pid = os.fork()
    if not pid:
        os.setsid()
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"T":
        time.sleep(0.01)
    say(ready=True)
    stay()
