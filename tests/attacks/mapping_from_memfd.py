"""A mapping without a descriptor, in a process whose program is in a memfd."""

import os
import sys
from pathlib import Path

from tests.attacks.tools import Place, in_background, say, stay

TRIES = "outlives its container in a process that runs from a memfd and has the device mapped, without a descriptor"
HOLDS = "the process is ended before another pod gets the device, which is clean then"
THREATS = ("B13", "W6")

HOLDER = """
import mmap, os, signal, sys
fd = int(sys.argv[1])
kept = mmap.mmap(fd, os.fstat(fd).st_size or mmap.PAGESIZE)
os.close(fd)
os.write(int(sys.argv[2]), b"x")
while True:
    signal.pause()
"""


def attack(place: Place) -> None:
    fd = place.open_device()
    os.set_inheritable(fd, True)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)

    def run_from_memory() -> None:
        program = os.memfd_create("")
        os.write(program, Path(sys.executable).read_bytes())
        environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
        if not os.fork():
            os.execve(program, ["python", "-S", "-c", HOLDER, str(fd), str(writer)], environment)

    in_background(run_from_memory)
    os.close(writer)
    if os.read(reader, 1) != b"x":
        raise RuntimeError("the program from memory failed")
    os.close(fd)
    say(ready=True)
    stay()
