"""What the attack programs share: find and mark the device, outlive the container, report that the attack has begun."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

__all__ = ["LIBC", "MARK", "MISLEADING_SPACES", "Place", "connected", "in_background", "listening", "say", "stay"]

LIBC = ctypes.CDLL(None, use_errno=True)
MARK = b"left by an attack "
MISLEADING_SPACES: tuple[bytes, ...] = tuple(
    character.encode()
    for character in map(chr, range(sys.maxunicode + 1))
    if not 0xD800 <= ord(character) < 0xE000
    and character not in " \t\n"
    and (character.isspace() or len(f"a{character}b".splitlines()) > 1)
)
"""Every character that Python treats as a line end or as whitespace and the kernel does not, in UTF-8."""
_DEVICES = ("dev/simgpu*", "/dev/simgpu*", "/dev/nvidia[0-9]*", "/dev/dri/renderD*")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attack runs: its device's file if one was named, the directory shared with its accomplice, its targets."""

    device: Path | None
    shared: Path
    targets: tuple[Path, ...]

    def open_device(self) -> int:
        """Open the device, write a mark all over a simulated one, and return the descriptor."""
        path = self.device or next(
            found for each in _DEVICES for found in sorted(Path("/" if each[0] == "/" else ".").glob(each.lstrip("/")))
        )
        fd = os.open(path, os.O_RDWR)
        if size := os.fstat(fd).st_size:
            with suppress(OSError):
                os.pwrite(fd, (MARK * (size // len(MARK) + 1))[:size], 0)
        return fd


def say(**facts: object) -> None:
    """Print one JSON line: ``ready=True`` once the attack runs."""
    print(json.dumps(facts), flush=True)


def stay() -> NoReturn:
    """Ignore SIGTERM, and stay until SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def in_background(part: Callable[[], object]) -> int:
    """Run ``part`` in a process of its own session that ignores SIGTERM, and return its PID once ``part`` returned.

    The process stays.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        answer = os.read(reader, 4)  # not to its end: processes that it started have the pipe open, too
        os.close(reader)
        if answer != b"done":
            raise RuntimeError("a process of the attack failed")
        return pid
    try:
        os.close(reader)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        part()
        os.write(writer, b"done")
        os.close(writer)
        stay()
    finally:
        os._exit(1)


def listening(place: Place) -> socket.socket:
    """Return a socket that listens in the shared directory."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place.shared / "accomplice.sock"))
    server.listen()
    return server


def connected(place: Place) -> socket.socket:
    """Return a connection to the accomplice."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(place.shared / "accomplice.sock"))
    return client
