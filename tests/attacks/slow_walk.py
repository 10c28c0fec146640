"""A process that takes long to inspect, in a pod that never had a GPU."""

import os
import resource

from tests.attacks.tools import Place, in_background, say, stay

TRIES = "has 150,000 descriptors open in a pod that never had a GPU, while a pod with a GPU leaves a process behind"
HOLDS = "the device is cleaned and handed over although that pod lives on"
THREATS = ("D5",)

PROCESSES, DESCRIPTORS = 3, 50_000


def attack(place: Place) -> None:
    place.open_device()
    in_background(lambda: None)
    say(ready=True)
    stay()


def accomplice(place: Place) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS + 100, most), most))

    def open_many() -> None:
        null = os.open("/dev/null", os.O_RDONLY)
        for _ in range(min(DESCRIPTORS, most - 100)):
            os.dup(null)

    for _ in range(PROCESSES):
        in_background(open_many)
    say(ready=True)
    stay()
