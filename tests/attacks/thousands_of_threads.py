"""Threads with a descriptor table each, and no first thread."""

import os
import threading

from tests.attacks.tools import LIBC, Place, in_background, say, stay

TRIES = "outlives its container in 2,000 threads with a descriptor table each, one of which has the device, without a main thread"
HOLDS = "the process is ended before another pod gets the device, which is clean then"
THREATS = ("B13", "D5", "W6")

THREADS = 2000
FILES = 0x400


def attack(place: Place) -> None:
    reader, writer = os.pipe()

    def crowd() -> None:
        threading.stack_size(64 * 1024)
        ready = threading.Barrier(THREADS + 1)

        def run(number: int) -> None:
            LIBC.unshare(FILES)
            if number == THREADS // 2:
                place.open_device()
            ready.wait()
            LIBC.pause()

        for number in range(THREADS):
            threading.Thread(target=run, args=(number,), daemon=True).start()
        ready.wait()

    def without_a_main_thread() -> None:
        if not os.fork():
            crowd()
            os.write(writer, b"x")
            LIBC.pthread_exit(None)

    in_background(without_a_main_thread)
    os.close(writer)
    say(ready=True, threads=THREADS if os.read(reader, 1) else 0)
    stay()
