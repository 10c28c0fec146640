"""Directories that look like those of pods; --target is the directory of the pods' logs."""

import os
import uuid

from tests.attacks.tools import Place, say, stay

TRIES = "creates 2,000 directories in the directory of the pods' logs (hostPath), with hostile names"
HOLDS = "hand-overs continue; no name is attributed to another pod"
THREATS = ("W4",)
DEVICES = 0
TARGETS = "logs"

DIRECTORIES = 2000
NAMES = (b"team-b_\n_%s", b"\x1b[2J_x_%s", b"\xff_\xfe_%s", b"___%s", b"team-b_other_%s", b"%s")


def attack(place: Place) -> None:
    for number in range(DIRECTORIES):
        unique = b"%s" % str(uuid.uuid4()).encode()
        os.mkdir(os.fsencode(place.targets[0]) + b"/" + NAMES[number % len(NAMES)] % unique)
    say(ready=True)
    stay()
