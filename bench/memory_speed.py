"""The reference of the eraser: ``memset`` and ``memcmp`` on memory of the same size, in the same state, at the same nice value.

Invariant: the memory is that of a file without a name on tmpfs, like a simulated device's, and is mapped beforehand. Run as
``python -m bench.memory_speed BYTES``, it measures once for each line on its standard input until that ends: ``written`` is
memory that a tenant has written, ``untouched`` is memory without pages, which the kernel creates at the first access.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["MemorySpeed", "Reading"]

_NICE = 19
_PART = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of each function for all of the memory."""

    memset: float
    memcmp: float


class MemorySpeed:
    """The client of the process that measures."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def __call__(self, state: str) -> Reading:
        """Measure on memory in ``state``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{state}\n".encode())
        memset, memcmp = (await self._process.stdout.readline()).split()
        return Reading(float(memset), float(memcmp))

    @classmethod
    @asynccontextmanager
    async def start(cls, size: int) -> AsyncIterator[MemorySpeed]:
        """Run a process that measures with ``size`` bytes."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.memory_speed", str(size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        try:
            yield cls(process)
        finally:
            process.stdin.close()
            await process.wait()


def _measure(state: str, size: int) -> Reading:
    libc = ctypes.CDLL(None)
    libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memory = os.memfd_create("reference")
    try:
        os.ftruncate(memory, size)
        flags = mmap.MAP_SHARED
        if state == "written":
            written = os.urandom(_PART)
            for offset in range(0, size, _PART):
                os.pwrite(memory, written[: size - offset], offset)
            flags |= mmap.MAP_POPULATE
        with mmap.mmap(memory, size, flags=flags) as mapped:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            began = time.monotonic()
            libc.memset(address, 0, size)
            between = time.monotonic()
            # All bytes are equal if each equals the one before it; this reads the memory once, as fast as possible.
            if libc.memcmp(address, address + 1, size - 1) != 0:
                raise RuntimeError("the memory is not zero")
            return Reading(between - began, time.monotonic() - between)
    finally:
        os.close(memory)


def main() -> None:
    os.nice(_NICE)
    size = int(sys.argv[1])
    for line in sys.stdin:
        found = _measure(line.strip(), size)
        print(found.memset, found.memcmp, flush=True)


if __name__ == "__main__":
    main()
