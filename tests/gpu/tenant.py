"""A tenant of the one device that it sees: leaves a secret until killed, searches for one, or only holds the device.

``python -m tests.gpu.tenant leave PLACE SECRET`` prints ``{"filled_bytes": n}`` once the secret is everywhere and then
never exits; ``look PLACE SECRET`` prints ``{"found_bytes": n, "looked_bytes": n}``, without any write before; ``hold``
prints ``{"held_bytes": n}``. Places are ``global``, ``shared`` and ``registers``.

It has only the device in common with the scrub: it allocates memory in another way and uses other kernels
(``attacks.ptx``), so that a mistake in those cannot hide itself here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import cupy
import numpy
from cupy.cuda import runtime

from scrubber.adapters.children.child import die_with_parent

__all__: list[str] = []

KERNELS = Path(__file__).with_name("attacks.ptx")
_LARGEST, _SMALLEST = 4 << 30, 2 << 20
_SPARED = 64 << 20
"""Bytes of the device that are not allocated, if it has that many: CUDA needs some memory later."""

_HELD = 8 << 20
_MEMORY_FULL = 2
_THREADS, _SHARED_THREADS, _REGISTER_THREADS, _REGISTERS = 256, 1024, 256, 240
_LONG = 120_000_000_000
"""Clock ticks: about a minute, unless the kill comes first."""

_SHORT = 1_000_000_000
_ARRIVAL_SECONDS = 10.0


class Tenancy:
    """The device, and one counter of each width on it."""

    def __init__(self) -> None:
        runtime.free(0)
        self.processors = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, 0))
        self.shared_bytes = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)) // 8 * 8
        self.work = cupy.cuda.Stream(non_blocking=True)
        self._looking = cupy.cuda.Stream(non_blocking=True)
        self._module = cupy.RawModule(path=str(KERNELS))
        self._numbers = int(runtime.malloc(64))
        self._seen = int(runtime.hostAlloc(64, 0))
        ctypes.memset(self._seen, 0, 64)
        # Copied there, not set: a kernel that sets memory runs on the processors whose leftovers are searched for.
        runtime.memcpy(self._numbers, self._seen, 64, runtime.memcpyHostToDevice)
        self.found = numpy.uint64(self._numbers)
        self.arrived = numpy.uint64(self._numbers + 16)
        self.stop = numpy.uint64(self._numbers + 32)

    def kernel(self, name: str) -> Callable[..., None]:
        found: Callable[..., None] = self._module.get_function(name)
        return found

    def read(self) -> tuple[int, int]:
        """Return ``found`` and ``arrived``, also while a kernel is running."""
        runtime.memcpyAsync(self._seen, self._numbers, 64, runtime.memcpyDeviceToHost, self._looking.ptr)
        self._looking.synchronize()
        words = (ctypes.c_uint32 * 16).from_address(self._seen)
        return words[0] | words[1] << 32, words[4]

    def until_arrived(self) -> None:
        """Return when every processor has its block.

        Raises:
            TimeoutError: some have none.
        """
        end = time.monotonic() + _ARRIVAL_SECONDS
        while (arrived := self.read()[1]) < self.processors:
            if time.monotonic() > end:
                raise TimeoutError(f"{arrived} of {self.processors} processors were reached")

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield address and size of pieces of nearly all memory, without touching it."""
        size = _LARGEST
        while size >= _SMALLEST:
            free, total = runtime.memGetInfo()
            spared = _SPARED if total > 64 * _SPARED else 0
            if free - spared < size:
                size //= 2
                continue
            try:
                yield int(runtime.malloc(size)), size
            except runtime.CUDARuntimeError as error:
                if error.status != _MEMORY_FULL:
                    raise
                size //= 2


def leave_global(tenancy: Tenancy, secret: int) -> int:
    filled = 0
    for address, size in tenancy.pieces():
        arguments = (numpy.uint64(address), numpy.uint64(size // 8), numpy.uint64(secret))
        tenancy.kernel("leave_global")((8 * tenancy.processors,), (_THREADS,), arguments, stream=tenancy.work)
        filled += size
    tenancy.work.synchronize()
    return filled


def look_global(tenancy: Tenancy, secret: int) -> tuple[int, int]:
    looked = 0
    for address, size in tenancy.pieces():
        arguments = (numpy.uint64(address), numpy.uint64(size // 8), numpy.uint64(secret), tenancy.found)
        tenancy.kernel("find_global")((8 * tenancy.processors,), (_THREADS,), arguments, stream=tenancy.work)
        looked += size
    tenancy.work.synchronize()
    return 8 * tenancy.read()[0], looked


def leave_shared(tenancy: Tenancy, secret: int) -> int:
    size = tenancy.shared_bytes
    arguments = (numpy.uint64(secret), numpy.uint32(size), tenancy.arrived, tenancy.stop, numpy.uint64(_LONG))
    _on_chip(tenancy, "leave_shared", _SHARED_THREADS, arguments, shared=size)
    tenancy.until_arrived()
    return size * tenancy.processors


def look_shared(tenancy: Tenancy, secret: int) -> tuple[int, int]:
    size = tenancy.shared_bytes
    common = (tenancy.found, tenancy.arrived, numpy.uint32(tenancy.processors), numpy.uint64(_SHORT))
    arguments = (numpy.uint64(secret), numpy.uint32(size), *common)
    _on_chip(tenancy, "find_shared", _SHARED_THREADS, arguments, shared=size)
    tenancy.work.synchronize()
    return 8 * tenancy.read()[0], size * tenancy.processors


def leave_registers(tenancy: Tenancy, secret: int) -> int:
    common = (tenancy.found, tenancy.arrived, tenancy.stop, numpy.uint64(_LONG))
    arguments = (numpy.uint32(secret & 0xFFFFFFFF), numpy.uint32(1), *common)
    _on_chip(tenancy, "leave_registers", _REGISTER_THREADS, arguments)
    tenancy.until_arrived()
    return 4 * _REGISTERS * _REGISTER_THREADS * tenancy.processors


def look_registers(tenancy: Tenancy, secret: int) -> tuple[int, int]:
    common = (tenancy.found, tenancy.arrived, numpy.uint32(tenancy.processors), numpy.uint64(_SHORT))
    arguments = (numpy.uint32(secret & 0xFFFFFFFF), numpy.uint32(0), *common)
    _on_chip(tenancy, "find_registers", _REGISTER_THREADS, arguments)
    tenancy.work.synchronize()
    return 4 * tenancy.read()[0], 4 * _REGISTERS * _REGISTER_THREADS * tenancy.processors


def _on_chip(tenancy: Tenancy, name: str, threads: int, arguments: Sequence[object], shared: int = 0) -> None:
    """Launch one block on each processor."""
    kernel = tenancy.kernel(name)
    if shared:
        kernel.max_dynamic_shared_size_bytes = shared  # type: ignore[attr-defined]
    kernel((tenancy.processors,), (threads,), tuple(arguments), shared_mem=shared, stream=tenancy.work)


_LEAVE: Mapping[str, Callable[[Tenancy, int], int]] = {
    "global": leave_global,
    "shared": leave_shared,
    "registers": leave_registers,
}
_LOOK: Mapping[str, Callable[[Tenancy, int], tuple[int, int]]] = {
    "global": look_global,
    "shared": look_shared,
    "registers": look_registers,
}


def _report(**value: int) -> None:
    print(json.dumps(value), flush=True)


def _never_end() -> NoReturn:
    while True:
        signal.pause()


def main(arguments: Sequence[str]) -> None:
    die_with_parent(os.getppid())
    what, *rest = arguments
    tenancy = Tenancy()
    if what == "hold":
        runtime.malloc(_HELD)
        _report(held_bytes=_HELD)
        _never_end()
    place, secret = rest[0], int(rest[1])
    if what == "leave":
        _report(filled_bytes=_LEAVE[place](tenancy, secret))
        _never_end()
    found, looked = _LOOK[place](tenancy, secret)
    _report(found_bytes=found, looked_bytes=looked)


if __name__ == "__main__":
    main(sys.argv[1:])
