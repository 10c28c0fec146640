"""Diagnoses one AMD GPU, or one partition of it, in a child of its own.

Promise: every result is compared with one that was obtained in another way: memory with a pattern derived from its own
address, a matrix product with the same product in the opposite direction, data sent to the device with what a kernel and
the host find there. The memory is left zeroed, which is verified by reading it back.
"""

from __future__ import annotations

import math
import os
import sys
import time
from secrets import randbits

from scrubber.adapters.amd.hip import HipGpu, MemoryPiece, open_device
from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.diagnostics import CheckTally, CheckTimeBudget
from scrubber.adapters.children.message import Message

__all__: list[str] = []

_SLICE = 1 << 30
"""Bytes between two checks of the clock and of the parent."""
_HOST_BUFFER = 8 << 20
_SMALLEST_MATRIX, _LARGEST_MATRIX = 32, 2048
_ENOUGH_ROUNDS = 8
_BAD = 0
_UNIT = 16


class HipDiagnosis:
    """The checks of one device, in order. All sizes are in bytes."""

    def __init__(self, link: ParentSocket, gpu: HipGpu) -> None:
        self._link = link
        self._gpu = gpu
        self._pieces = gpu.allocate_all(self._exit_if_parent_gone)
        self._slices = [
            MemoryPiece(piece.pointer + start, piece.offset + start, min(_SLICE, piece.size - start))
            for piece in self._pieces
            for start in range(0, piece.size, _SLICE)
        ]
        self._next = 0
        self._room = max(self._slices, key=lambda part: part.size)
        self._pattern = CheckTally("memory-pattern", "bytes", time.monotonic)
        self._product = CheckTally("matrix-product", "operations", time.monotonic)
        self._to_device = CheckTally("host-to-device", "bytes", time.monotonic)
        self._to_host = CheckTally("device-to-host", "bytes", time.monotonic)

    def run(self, budget: CheckTimeBudget) -> list[Message]:
        """Run all checks, then write zeros everywhere."""
        self._pattern_round(budget)
        while not budget.is_exhausted("memory-pattern"):
            self._pattern_round(budget)
        self._products(budget)
        self._transfer()
        while not budget.is_exhausted("transfers"):
            self._transfer()
        self._leave_zeros()
        self._gpu.free(self._pieces)
        return [each.to_message() for each in (self._pattern, self._product, self._to_device, self._to_host)]

    def _pattern_round(self, budget: CheckTimeBudget) -> None:
        """Write for half of the time, or all memory, then check what was written; the next round continues there."""
        nonce, half_over = randbits(64), budget.halfway_check("memory-pattern")
        written: list[MemoryPiece] = []
        for part in (*self._slices[self._next :], *self._slices[: self._next]):
            self._work(self._pattern, "fill_pattern", _sized(part), part.offset, nonce)
            written.append(part)
            if half_over():
                break
        self._next = (self._next + len(written)) % len(self._slices)
        for part in written:
            bad = self._gpu.counter(_BAD)
            self._work(self._pattern, "check_pattern", _sized(part), part.offset, nonce, bad)
            self._pattern.amount += 2 * part.size
        self._pattern.errors += self._take_errors()

    def _products(self, budget: CheckTimeBudget) -> None:
        """Compute the product of two integer matrices with two kernels, of the largest size that the time allows."""
        largest = min(_LARGEST_MATRIX, math.isqrt(self._room.size // 16))
        size = min(_SMALLEST_MATRIX, largest)
        while True:
            before = self._product.seconds
            self._multiply(size)
            if budget.is_exhausted("matrix-product"):
                return
            next_takes = 8 * (self._product.seconds - before)
            if 2 * size <= largest and _ENOUGH_ROUNDS * next_takes <= budget.remaining("matrix-product"):
                size *= 2
                self._product.amount, self._product.seconds = 0, 0.0

    def _multiply(self, size: int) -> None:
        cells = size * size
        a, b, one, other = (self._room.pointer + 4 * cells * index for index in range(4))
        for matrix, seed in ((a, 1), (b, 2)):
            self._gpu.launch("fill_u32_mix", (matrix, cells), seed + self._product.amount)
        # Different values, so that a kernel that does nothing is detected.
        self._gpu.launch("fill_u32_mix", (one, cells), 3)
        self._gpu.launch("fill_u32_mix", (other, cells), 4)
        self._gpu.wait()
        for name, product in (("matmul_forward", one), ("matmul_backward", other)):
            self._work(self._product, name, (a, b, product, size))
        self._gpu.launch("compare_u32", (one, other, cells), self._gpu.counter(_BAD))
        self._product.errors += self._take_errors()
        self._product.amount += 2 * 2 * size**3

    def _transfer(self) -> None:
        """Send random data to two places, compare them on the device, and read one of them back."""
        self._exit_if_parent_gone()
        size = min(self._room.size // 2, _HOST_BUFFER) // _UNIT * _UNIT
        content, places = os.urandom(size), (self._room.pointer, self._room.pointer + size)
        with self._to_device.measure_time():
            for place in places:
                self._gpu.copy_to_device(place, content)
        self._to_device.amount += 2 * size
        self._gpu.launch("compare_u32", (*places, size // 4), self._gpu.counter(_BAD))
        self._to_device.errors += self._take_errors()
        with self._to_host.measure_time():
            found = self._gpu.copy_to_host(places[0], size)
        self._to_host.amount += size
        if found != content:
            self._to_host.errors += sum(mine != theirs for mine, theirs in zip(content, found, strict=True))

    def _leave_zeros(self) -> None:
        for part in self._slices:
            self._work(None, "fill_zero", _sized(part))
        for part in self._slices:
            self._work(None, "count_nonzero", _sized(part), part.offset, self._gpu.counter(_BAD), 0, 0)
        self._pattern.errors += self._take_errors()

    def _work(self, tally: CheckTally | None, name: str, sized: tuple[int, ...], *more: int) -> None:
        """Run a kernel to its end, and add its time to ``tally``."""
        self._exit_if_parent_gone()
        start = time.monotonic()
        self._gpu.launch(name, sized, *more)
        self._gpu.wait()
        if tally is not None:
            tally.seconds += time.monotonic() - start

    def _take_errors(self) -> int:
        """Return what the kernels have counted since the last call."""
        found = self._gpu.counters()[_BAD]
        self._gpu.zero_counters()
        return found

    def _exit_if_parent_gone(self) -> None:
        if self._link.is_parent_gone():
            sys.exit(0)


def _sized(piece: MemoryPiece) -> tuple[int, int]:
    return piece.pointer, piece.size // _UNIT


def diagnose(link: ParentSocket, request: Message) -> Message:
    """Run the diagnosis of ``request``; return its checks."""
    seconds = request.get("seconds")
    if not isinstance(seconds, int | float):
        raise Fault("unreadable", "A diagnosis request must contain the number of seconds.")
    device = open_device(request)
    budget = CheckTimeBudget(time.monotonic() + seconds, time.monotonic)
    return {"checks": HipDiagnosis(link, device).run(budget)}


def main() -> None:
    link = child.connect_to_parent()
    child.serve_once(link, lambda request: diagnose(link, request))


if __name__ == "__main__":
    main()
