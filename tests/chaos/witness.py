"""A tenant that reports what it found on its devices at its start, and whether they stayed unchanged while it lived.

First it reads every byte of each ``dev/simgpu*``, then it fills them with its own text, checks that repeatedly until
its time is over, and appends each observation to a report as one JSON line. It imports nothing of the project, so that
it starts fast and cannot share a mistake with what it watches.

``witness.py REPORT NAME SECONDS [--leave-leftover | --watch]``: ``NAME`` is the text; SECONDS may be ``forever``. Exit
code: 0, or 1 once bytes of others were on a device while it was held.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHUNK = 1024 * 1024
BLOCK = 4096
LOOK_EVERY = 0.1
"""Seconds between two checks of its own bytes."""


def main(report: str, name: str, hold: str, *flags: str) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a graceful end includes a last check
    ends = time.monotonic() + (float("inf") if hold == "forever" else float(hold))
    sink = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    own = f"{name} ".encode()

    def send_report(what: str, **facts: object) -> None:
        line = {"what": what, "name": name, "pid": os.getpid(), "at": time.monotonic(), **facts}
        os.write(sink, (json.dumps(line) + "\n").encode())

    devices = {path.name: os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in sorted(Path("dev").glob("simgpu*"))}
    if "--watch" not in flags:
        for device, fd in devices.items():
            strange, found = look(fd, own, zeros_are_fine=True)
            send_report("came", device=device, strange=strange, found=found)
        for fd in devices.values():
            fill(fd, own)
    if "--leave-leftover" in flags:
        subprocess.Popen([sys.executable, "-S", "-E", __file__, report, name, "forever", "--watch"], stdout=sys.stderr)
    print("ready", flush=True)
    damaged = 0
    while not damaged:
        damaged = sum(look(fd, own, zeros_are_fine=False)[0] for fd in devices.values())
        rest = ends - time.monotonic()
        if rest <= 0 or signal.sigtimedwait({signal.SIGTERM}, min(rest, LOOK_EVERY)) is not None:
            damaged = sum(look(fd, own, zeros_are_fine=False)[0] for fd in devices.values())
            break
    send_report("left", damaged=damaged)
    return 1 if damaged else 0


def look(fd: int, own: bytes, *, zeros_are_fine: bool) -> tuple[int, str]:
    """Return how many bytes are wrong (zeros may count as right), and the beginning of the first wrong ones."""
    strange, found = 0, b""
    for offset in range(0, os.fstat(fd).st_size, CHUNK):
        size = min(CHUNK, os.fstat(fd).st_size - offset)
        chunk, right = os.pread(fd, size, offset), repeated(own, offset, size)
        if chunk == right or (zeros_are_fine and not chunk.strip(b"\0")):
            continue
        for at in range(0, size, BLOCK):
            block, expected = chunk[at : at + BLOCK], right[at : at + BLOCK]
            if block != expected:
                wrong = sum(a != b and (a != 0 or not zeros_are_fine) for a, b in zip(block, expected, strict=True))
                strange += wrong
                found = found or (block[:60] if wrong else b"")
    return strange, found.decode(errors="replace")


def fill(fd: int, own: bytes) -> None:
    for offset in range(0, os.fstat(fd).st_size, CHUNK):
        os.pwrite(fd, repeated(own, offset, min(CHUNK, os.fstat(fd).st_size - offset)), offset)


def repeated(text: bytes, offset: int, size: int) -> bytes:
    start = offset % len(text)
    return (text * ((start + size) // len(text) + 1))[start : start + size]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
