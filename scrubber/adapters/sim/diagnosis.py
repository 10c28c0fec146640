"""The child that runs a workload on one simulated device and checks the results.

Promise: it works under the eraser's fence and lock, so no tenant's data can be in the way and no other process can
read; it stops between two chunks as soon as a process tries to open the device, or its parent is gone; and it leaves
zeros behind, which it has read back. A child that is killed before that leaves its pattern: the caller has to treat the
device as dirty.

Runs as ``python -m scrubber.adapters.sim.diagnosis``.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator

from scrubber.adapters import locks
from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.diagnostics import CheckTally, CheckTimeBudget
from scrubber.adapters.children.message import Message
from scrubber.adapters.sim.eraser import (
    BlockPattern,
    ClearingFaults,
    FenceBroken,
    LeaseFence,
    count_differences,
    open_memory,
    release_space,
    restore_file,
)

__all__: list[str] = []

_CHUNK = 1024 * 1024
_ZEROS = bytes(_CHUNK)
_TAMPERED = b"\x5a" * 64
_MATRIX = 24
"""Rows and columns: a product takes milliseconds, so that the end of the allotted time is noticed."""

_Matrix = list[list[int]]


class SimDiagnosis:
    """The checks of one device, in order. All sizes are in bytes."""

    def __init__(self, link: ParentSocket, memory: int, total: int, control: ClearingFaults) -> None:
        self._link = link
        self._memory = memory
        self._total = total
        self._control = control
        self._fence = LeaseFence(memory)
        self._next = 0
        self.pattern = CheckTally("memory-pattern", "bytes", time.monotonic)
        self.matrix = CheckTally("matrix-product", "operations", time.monotonic)
        self.to_device = CheckTally("host-to-device", "bytes", time.monotonic)
        self.to_host = CheckTally("device-to-host", "bytes", time.monotonic)

    def run(self, allotment: CheckTimeBudget) -> list[Message]:
        """Run all checks, then write zeros everywhere.

        Raises:
            FenceBroken: a process tried to open the device; nothing was written after that.
        """
        self._repeat(allotment, "memory-pattern", lambda: self._pattern_round(allotment))
        self._repeat(allotment, "matrix-product", self._matrix_round)
        self._repeat(allotment, "transfers", self._transfer_round)
        self._leave_zeros()
        return [each.to_message() for each in (self.pattern, self.matrix, self.to_device, self.to_host)]

    def _repeat(self, allotment: CheckTimeBudget, part: str, work: Callable[[], None]) -> None:
        work()
        while not allotment.is_exhausted(part):
            work()

    def _pattern_round(self, allotment: CheckTimeBudget) -> None:
        """Write for half of the allotted time, or all memory, then read it all back.

        The next round continues after the last chunk of this one, so that short rounds eventually cover all of a large
        memory.
        """
        pattern = BlockPattern(_CHUNK)
        half_over = allotment.halfway_check("memory-pattern")
        written: list[tuple[int, int]] = []
        for offset, size in self._chunks_from(self._next):
            content = pattern.at(offset, size)
            with self.pattern.measure_time():
                self._write(offset, content)
            written.append((offset, size))
            self._next = (offset + size) % self._total
            if half_over():
                break
        if self._control.wont_clear():
            os.pwrite(self._memory, _TAMPERED[: self._total], written[0][0])
        for offset, size in written:
            self._check_fence()
            expected = pattern.at(offset, size)
            with self.pattern.measure_time():
                found = self._read(offset, size)
            self.pattern.errors += count_differences(found, expected)
            self.pattern.amount += 2 * size

    def _matrix_round(self) -> None:
        """Compute one product of integer matrices twice, by dot products and by outer products: they must be equal."""
        self._check_fence()
        rows = _matrix()
        columns = _matrix()
        with self.matrix.measure_time():
            one = _by_dot_products(rows, columns)
            other = _by_outer_products(rows, columns)
        self.matrix.errors += sum(
            a != b for row, twin in zip(one, other, strict=True) for a, b in zip(row, twin, strict=True)
        )
        self.matrix.amount += 2 * 2 * _MATRIX**3

    def _transfer_round(self) -> None:
        for offset, size in self._chunks_from(self._next):
            sent = random.randbytes(size)
            with self.to_device.measure_time():
                self._write(offset, sent)
            self.to_device.amount += size
            with self.to_host.measure_time():
                found = self._read(offset, size)
            self.to_host.amount += size
            self.to_host.errors += count_differences(found, sent)
            self._next = (offset + size) % self._total
            return

    def _leave_zeros(self) -> None:
        for offset, size in self._chunks_from(0):
            self._write(offset, _ZEROS[:size])
        for offset, size in self._chunks_from(0):
            self.pattern.errors += count_differences(self._read(offset, size), _ZEROS[:size])
        release_space(self._memory, self._total)
        self._fence.check()

    def _chunks_from(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield every chunk of the memory once, beginning at ``start``; check the parent and the fence before each."""
        offsets = range(0, self._total, _CHUNK)
        first = start // _CHUNK
        for offset in (*offsets[first:], *offsets[:first]):
            self._check_fence()
            yield offset, min(_CHUNK, self._total - offset)

    def _check_fence(self) -> None:
        if self._link.is_parent_gone():
            sys.exit(0)
        self._fence.check()

    def _read(self, offset: int, size: int) -> bytes:
        found = os.pread(self._memory, size, offset)
        if len(found) != size:
            raise Fault("unreadable", f"The device ends at byte {offset + len(found)} instead of {self._total}.")
        return found

    def _write(self, offset: int, content: bytes) -> None:
        written = os.pwrite(self._memory, content, offset)
        if written != len(content):
            raise Fault("unreadable", f"The device took {written} of {len(content)} bytes at {offset}.")


def _matrix() -> _Matrix:
    return [[random.getrandbits(31) for _ in range(_MATRIX)] for _ in range(_MATRIX)]


def _by_dot_products(rows: _Matrix, columns: _Matrix) -> _Matrix:
    across = list(zip(*columns, strict=True))
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in across] for row in rows]


def _by_outer_products(rows: _Matrix, columns: _Matrix) -> _Matrix:
    """Compute the same sums in another order: backwards, and one addend of every sum at a time."""
    result = [[0] * _MATRIX for _ in range(_MATRIX)]
    for inner in reversed(range(_MATRIX)):
        across = columns[inner]
        for row, sums in zip(rows, result, strict=True):
            factor = row[inner]
            sums[:] = [before + factor * each for before, each in zip(sums, across, strict=True)]
    return result


def diagnose(link: ParentSocket, request: Message) -> Message:
    """Run the diagnosis of ``request`` (built by :class:`scrubber.adapters.sim.diagnostics.SimDiagnostics`)."""
    total, inode, paths, seconds = (request.get(key) for key in ("bytes", "inode", "control", "seconds"))
    if not isinstance(total, int) or not isinstance(inode, int) or not isinstance(paths, list):
        raise Fault("unreadable", "A diagnosis request must contain bytes, inode and control files.")
    if not isinstance(seconds, int | float):
        raise Fault("unreadable", "A diagnosis request must contain the number of seconds.")
    allotment = CheckTimeBudget(time.monotonic() + seconds, time.monotonic)
    if not locks.acquire_lock(str(request["lock"])):
        raise Fault("held", "Another eraser still works on the device.")
    memory = open_memory(str(request["memory"]), inode)
    try:
        diagnosis = SimDiagnosis(link, memory, total, ClearingFaults(paths))
        restore_file(memory, total)
        return {"checks": diagnosis.run(allotment)}
    except FenceBroken as error:
        raise Fault(
            "held", "A process opened the device while it was diagnosed, so the diagnosis was stopped."
        ) from error
    except OSError as error:
        raise Fault("unreadable", f"The device cannot be diagnosed: {error.strerror}.") from error


def main() -> None:
    link = child.connect_to_parent()
    child.serve_once(link, lambda request: diagnose(link, request))


if __name__ == "__main__":
    main()
