"""A tenant of the one AMD device that it sees: leaves a secret until killed, searches for one, or only holds the device.

``python -m tests.gpu.amd.tenant ROOT ARCHITECTURE UNITS leave PLACE SECRET`` prints ``{"filled_bytes": n}`` once the secret
is everywhere and then never exits; ``look PLACE SECRET`` prints ``{"found_bytes": n, "looked_bytes": n}``; ``hold`` prints
``{"held_bytes": n}``. Places are ``global`` and ``local``.

It has only the device and HIP in common with the scrub: its kernels, and how it calls them, are its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from scrubber.adapters.children.child import die_with_parent

__all__: list[str] = []

_KERNELS = Path(__file__).with_name("attacks.c")
_LIBRARIES = ("opt/rocm/lib/libamdhip64.so.7", "opt/rocm/lib/libamdhip64.so.6", "opt/rocm/lib/libamdhip64.so")
_GROUP, _GROUPS_PER_UNIT = 256, 8
_LARGEST, _SMALLEST = 4 << 30, 1 << 20
_HELD = 8 << 20
_LOCAL_BYTES = 64 << 10
_WAIT_TICKS = 1_000_000_000
"""Clock ticks: less than a second."""
_SUCCESS, _MEMORY_FULL, _TO_DEVICE, _TO_HOST = 0, 2, 1, 2
_NUMBERS = 8
_FOUND, _ARRIVED, _LATE = 0, 2, 4
"""Indexes of counters."""


class Tenancy:
    """The device, the kernels, and the counters on it."""

    def __init__(self, root: Path, architecture: str, units: int) -> None:
        self.units = units
        found = next((str(root / name) for name in _LIBRARIES if (root / name).exists()), "libamdhip64.so")
        self._hip = ctypes.CDLL(found)
        self._call("hipInit", ctypes.c_uint(0))
        self._call("hipSetDevice", ctypes.c_int(0))
        self._module = ctypes.c_void_p()
        code = _KERNELS.with_suffix(f".{architecture}.co").read_bytes()
        self._call("hipModuleLoadData", ctypes.byref(self._module), code)
        self._numbers = self.malloc(8 * _NUMBERS) or 0
        self._call(
            "hipMemcpy", ctypes.c_void_p(self._numbers), bytes(8 * _NUMBERS), ctypes.c_size_t(8 * _NUMBERS), _TO_DEVICE
        )

    def malloc(self, size: int) -> int | None:
        """Return the address of new memory; None when there is not so much."""
        pointer = ctypes.c_void_p()
        status = self._hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        if status == _MEMORY_FULL:
            return None
        if status != _SUCCESS:
            raise RuntimeError(f"hipMalloc: HIP error {status}")
        return pointer.value

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield address and size of pieces of nearly all memory, without touching it."""
        size = _LARGEST
        while size >= _SMALLEST:
            address = self.malloc(size)
            if address is None:
                size //= 2
            else:
                yield address, size

    def counter(self, index: int) -> int:
        return self._numbers + 8 * index

    def read(self, index: int) -> int:
        """Return a counter when the device is idle."""
        self._call("hipDeviceSynchronize")
        numbers = (ctypes.c_uint64 * _NUMBERS)()
        self._call("hipMemcpy", numbers, ctypes.c_void_p(self._numbers), ctypes.c_size_t(8 * _NUMBERS), _TO_HOST)
        return int(numbers[index])

    def run(self, name: str, groups: int, *arguments: int) -> None:
        function = ctypes.c_void_p()
        self._call("hipModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        values = [ctypes.c_uint64(value) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = [ctypes.c_uint(value) for value in (groups, 1, 1, _GROUP, 1, 1, 0)]
        self._call("hipModuleLaunchKernel", function, *shape, None, pointers, None)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._hip, function)(*arguments)
        if status != _SUCCESS:
            raise RuntimeError(f"{function}: HIP error {status}")


def leave(tenancy: Tenancy, place: str, secret: int) -> int:
    """Fill ``place`` with the secret; return the bytes that were filled."""
    filled, groups = 0, tenancy.units * _GROUPS_PER_UNIT
    if place == "global":
        for address, size in tenancy.pieces():
            tenancy.run("leave_global", groups, address, size // 8, groups * _GROUP, secret)
            filled += size
        tenancy.read(_FOUND)
        return filled
    tenancy.run("leave_local", tenancy.units, secret, *_meeting(tenancy))
    return _LOCAL_BYTES * (tenancy.units - tenancy.read(_LATE))


def look(tenancy: Tenancy, place: str, secret: int) -> tuple[int, int]:
    """Return the bytes of the secret in ``place``, and the bytes that were read."""
    looked, groups, found = 0, tenancy.units * _GROUPS_PER_UNIT, tenancy.counter(_FOUND)
    if place == "global":
        for address, size in tenancy.pieces():
            tenancy.run("find_global", groups, address, size // 8, groups * _GROUP, secret, found)
            looked += size
    else:
        tenancy.run("find_local", tenancy.units, secret, found, *_meeting(tenancy))
        looked = _LOCAL_BYTES * (tenancy.units - tenancy.read(_LATE))
    return 8 * tenancy.read(_FOUND), looked


def _meeting(tenancy: Tenancy) -> tuple[int, int, int, int]:
    return tenancy.counter(_ARRIVED), tenancy.counter(_LATE), tenancy.units, _WAIT_TICKS


def _never_end() -> NoReturn:
    while True:
        signal.pause()


def main(arguments: Sequence[str]) -> None:
    die_with_parent(os.getppid())
    root, architecture, units, what, *rest = arguments
    tenancy = Tenancy(Path(root), architecture, int(units))
    if what == "hold":
        tenancy.malloc(_HELD)
        print(json.dumps({"held_bytes": _HELD}), flush=True)
        _never_end()
    place, secret = rest[0], int(rest[1])
    if what == "leave":
        print(json.dumps({"filled_bytes": leave(tenancy, place, secret)}), flush=True)
        _never_end()
    found, looked = look(tenancy, place, secret)
    print(json.dumps({"found_bytes": found, "looked_bytes": looked}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
