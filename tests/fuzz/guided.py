"""The process in which libFuzzer drives one target: ``python -m tests.fuzz.guided MODULE NAME STATUS ARGUMENTS…``.

Only this process instruments the product: its modules are rewritten while they are imported, so nothing of the product
may be imported before. libFuzzer chooses inputs that reach new code, ends the process at the first finding, and saves the
input. STATUS is a file of :data:`STATUS_SIZE` bytes, through which the parent sees how far this process came, whatever
ended it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["STATUS", "Counts", "read_counts"]

STATUS: Final = struct.Struct("5Q")
_WARM_UP: Final = 1000
"""Inputs after which memory is measured first: by then everything has been loaded."""
_MEASURED_EVERY: Final = 256
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

Counts = tuple[int, int, int, int, int]
"""Inputs; how many were accepted; CPU time in nanoseconds; resident bytes after the warm-up, and at the end."""


def read_counts(status: Path) -> Counts:
    """Return what a process wrote into ``status``."""
    counts: Counts = STATUS.unpack(status.read_bytes())
    return counts


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    module, name, status, *arguments = sys.argv[1:]
    import atheris

    with atheris.instrument_imports(include=["scrubber", "plugin"], enable_loader_override=False):
        from tests.fuzz.table import targets_in

        found = next(each for each in targets_in(module) if each.name == name)
    check = found.check
    findings = Path(next(each for each in arguments if each.startswith("-artifact_prefix=")).partition("=")[2])
    with open(status, "r+b") as file:
        shared = mmap.mmap(file.fileno(), STATUS.size)
    inputs = accepted = first = last = 0
    start = time.process_time_ns()

    def one(data: bytes) -> None:
        nonlocal inputs, accepted, first, last
        inputs += 1
        try:
            accepted += check(data)
        except Exception:
            # libFuzzer saves the input as well, but not always when the error left something behind.
            (findings / f"crash-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}").write_bytes(data)
            raise
        if not inputs % _MEASURED_EVERY:
            last = _resident()
            first = first if inputs > _WARM_UP else last
        STATUS.pack_into(shared, 0, inputs, accepted, time.process_time_ns() - start, first, last)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
