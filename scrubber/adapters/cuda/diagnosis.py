"""Diagnoses one GPU, or one instance of it, in a forked child.

Promise: every result is compared with one that was obtained in another way: memory with a pattern derived from its own
address, a matrix product with the same product of another kernel, data sent to the device with what a kernel finds
there, data received with what the device generated. Nothing that a tenant left is read, and the memory is left zeroed,
which is verified by reading it back. A child that is killed before that leaves its pattern: the caller has to treat the
device as dirty.

A program of the zygote (:mod:`scrubber.adapters.cuda.zygote`).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
from cupy.cuda import runtime

from scrubber.adapters.children.child import Fault, ParentSocket, serve_once
from scrubber.adapters.children.diagnostics import CheckTally, CheckTimeBudget
from scrubber.adapters.children.message import Message
from scrubber.adapters.cuda.gpu import CudaGpu, DeviceCounters, MemoryRange, open_device, translate_errors

__all__ = ["run"]

_SLICE = 1 << 30
"""Bytes between two checks of the clock and of the parent: a fraction of a millisecond of the fastest memory."""

_HOST_BUFFER = 32 << 20
_SMALLEST_MATRIX, _LARGEST_MATRIX = 64, 4096
_ENOUGH_ROUNDS = 8
_TILE = 16
_BAD, _FIRST, _COUNTERS = 0, 1, 2


class CudaDiagnosis:
    """The checks of one device, in order. All sizes are in bytes."""

    def __init__(self, link: ParentSocket, gpu: CudaGpu) -> None:
        self._link = link
        self._gpu = gpu
        gpu.load_kernels()
        self._counters = DeviceCounters(gpu, _COUNTERS)
        self._pieces = gpu.allocate_all(self._exit_if_parent_gone)
        self._slices = [part for piece in self._pieces for part in _cut(piece, _SLICE)]
        self._next = 0
        self.pattern = CheckTally("memory-pattern", "bytes", time.monotonic)
        self.product = CheckTally("matrix-product", "operations", time.monotonic)
        self.to_device = CheckTally("host-to-device", "bytes", time.monotonic)
        self.to_host = CheckTally("device-to-host", "bytes", time.monotonic)

    def run(self, allotment: CheckTimeBudget) -> list[Message]:
        """Run all checks, then write zeros everywhere.

        Raises:
            Fault: the device failed during a check.
        """
        self._pattern_round(allotment)
        while not allotment.is_exhausted("memory-pattern"):
            self._pattern_round(allotment)
        self._products(allotment)
        self._transfers(allotment)
        self._leave_zeros()
        self._gpu.free(self._pieces)
        return [each.to_message() for each in (self.pattern, self.product, self.to_device, self.to_host)]

    # --- memory

    def _pattern_round(self, allotment: CheckTimeBudget) -> None:
        """Write for half of the allotted time, or all memory, then check what was written.

        The next round continues after the last slice of this one, so that short rounds eventually cover all of a large
        memory.
        """
        nonce = numpy.uint64(int.from_bytes(os.urandom(8), "big"))
        half_over = allotment.halfway_check("memory-pattern")
        written: list[MemoryRange] = []
        for part in (*self._slices[self._next :], *self._slices[: self._next]):
            self._exit_if_parent_gone()
            with self._device_time(self.pattern):
                self._gpu.launch("fill_pattern", *_kernel_arguments(part), numpy.uint64(part.offset), nonce)
            written.append(part)
            if half_over():
                break
        self._next = (self._next + len(written)) % len(self._slices)
        for part in written:
            self._exit_if_parent_gone()
            with self._device_time(self.pattern):
                self._check_pattern(part, nonce)
            self.pattern.amount += 2 * part.size
        self.pattern.errors += self._take_error_count()

    def _leave_zeros(self) -> None:
        for part in self._slices:
            self._exit_if_parent_gone()
            self._gpu.launch("fill_zero", *_kernel_arguments(part))
            self._gpu.wait()
        for part in self._slices:
            self._exit_if_parent_gone()
            counted = (self._counters.address(_BAD), self._counters.address(_FIRST), numpy.uint64(0), numpy.uint64(0))
            self._gpu.launch("count_nonzero", *_kernel_arguments(part), numpy.uint64(part.offset), *counted)
            self._gpu.wait()
        self.pattern.errors += self._take_error_count()

    # --- arithmetic

    def _products(self, allotment: CheckTimeBudget) -> None:
        """Compute the product of two integer matrices with two kernels.

        The size is the largest of which the time allows several products. A small product leaves the device waiting
        instead of working, so only the last size counts for the rate.
        """
        largest = min(_LARGEST_MATRIX, self._largest_matrix())
        size = min(_SMALLEST_MATRIX, largest)
        while True:
            before = self.product.seconds
            self._product(size)
            if allotment.is_exhausted("matrix-product"):
                return
            next_takes = 8 * (self.product.seconds - before)
            if 2 * size <= largest and _ENOUGH_ROUNDS * next_takes <= allotment.remaining("matrix-product"):
                size *= 2
                self.product.amount, self.product.seconds = 0, 0.0

    def _product(self, size: int) -> None:
        self._exit_if_parent_gone()
        cells = size * size
        room = max(self._slices, key=lambda part: part.size).pointer
        a, b, one, other = (numpy.uint64(room + 4 * cells * index) for index in range(4))
        for matrix, seed in ((a, 1), (b, 2)):
            self._gpu.launch("fill_u32_mix", matrix, numpy.uint64(cells), numpy.uint64(seed + self.product.amount))
        # Different values, so that a kernel that does nothing is detected.
        with translate_errors("Memory could not be set"):
            runtime.memsetAsync(int(one), 0x00, 4 * cells, self._gpu.stream.ptr)
            runtime.memsetAsync(int(other), 0xFF, 4 * cells, self._gpu.stream.ptr)
        with self._device_time(self.product):
            for name, product in (("matmul_tiled", one), ("matmul_naive", other)):
                self._multiply(name, a, b, product, size)
        self._gpu.launch("compare_u32", one, other, numpy.uint64(cells), self._counters.address(_BAD))
        self.product.errors += self._take_error_count()
        self.product.amount += 2 * 2 * size**3

    def _multiply(self, name: str, a: numpy.uint64, b: numpy.uint64, product: numpy.uint64, size: int) -> None:
        with translate_errors(f"{name} could not be started"):
            tiles = size // _TILE
            self._gpu.kernel(name)(
                (tiles, tiles), (_TILE, _TILE), (a, b, product, numpy.uint32(size)), stream=self._gpu.stream
            )

    def _largest_matrix(self) -> int:
        """Return the number of rows of four equal square matrices of 32-bit numbers that fit side by side."""
        return math.isqrt(max(part.size for part in self._slices) // 16) // _TILE * _TILE

    # --- transfers to and from the host

    def _transfers(self, allotment: CheckTimeBudget) -> None:
        room = max(self._slices, key=lambda part: part.size)
        part = MemoryRange(room.pointer, 0, min(room.size, _HOST_BUFFER))
        nonce = int.from_bytes(os.urandom(8), "big")
        expected = pattern(part.size, nonce)
        with pinned(part.size) as (address, buffer):
            self._transfer(part, nonce, expected, address, buffer)
            while not allotment.is_exhausted("transfers"):
                self._transfer(part, nonce, expected, address, buffer)

    def _transfer(
        self, part: MemoryRange, nonce: int, expected: numpy.ndarray, address: int, buffer: numpy.ndarray
    ) -> None:
        """To the device: its own kernel checks the data.

        To the host: the host checks data that the device generated.
        """
        self._exit_if_parent_gone()
        buffer[:] = expected
        self._gpu.launch("fill_zero", *_kernel_arguments(part))
        with self._device_time(self.to_device):
            self._copy(part.pointer, address, part.size, runtime.memcpyHostToDevice)
        self._check_pattern(part, numpy.uint64(nonce))
        self.to_device.errors += self._take_error_count()
        self.to_device.amount += part.size
        buffer[:] = 0
        self._gpu.launch("fill_pattern", *_kernel_arguments(part), numpy.uint64(0), numpy.uint64(nonce))
        with self._device_time(self.to_host):
            self._copy(address, part.pointer, part.size, runtime.memcpyDeviceToHost)
        self.to_host.errors += int(numpy.count_nonzero(buffer != expected))
        self.to_host.amount += part.size

    def _copy(self, to: int, from_: int, size: int, kind: int) -> None:
        with translate_errors("A transfer could not be started"):
            runtime.memcpyAsync(to, from_, size, kind, self._gpu.stream.ptr)

    # --- shared by all checks

    def _check_pattern(self, part: MemoryRange, nonce: numpy.uint64) -> None:
        counted = (self._counters.address(_BAD), self._counters.address(_FIRST))
        self._gpu.launch("check_pattern", *_kernel_arguments(part), numpy.uint64(part.offset), nonce, *counted)

    def _take_error_count(self) -> int:
        """Return what the kernels have counted since the last call."""
        found = self._counters.read()[_BAD]
        self._counters.zero()
        return found

    @contextmanager
    def _device_time(self, tally: CheckTally) -> Iterator[None]:
        """Add the device time of the work launched inside to ``tally``, in seconds; waits for that work."""
        timing = self._gpu.start_timer()
        yield
        self._gpu.wait()
        tally.seconds += timing.seconds()

    def _exit_if_parent_gone(self) -> None:
        if self._link.is_parent_gone():
            sys.exit(0)


def pattern(size: int, nonce: int) -> numpy.ndarray:
    """Return ``size`` bytes as the kernel ``fill_pattern`` writes them from offset 0 on, in 64-bit words."""
    with numpy.errstate(over="ignore"):
        mixed = (numpy.arange(0, size, 16, dtype=numpy.uint64) ^ numpy.uint64(nonce)) * numpy.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> numpy.uint64(32)
        mixed *= numpy.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> numpy.uint64(32)
    words = numpy.empty(2 * mixed.size, dtype=numpy.uint64)
    words[0::2] = mixed
    words[1::2] = ((mixed << numpy.uint64(32)) | (mixed >> numpy.uint64(32))) ^ numpy.uint64(0xA5A5A5A55A5A5A5A)
    return words


@contextmanager
def pinned(size: int) -> Iterator[tuple[int, numpy.ndarray]]:
    """Pin ``size`` bytes of host memory for direct access by the device; yield the address, and 64-bit words there."""
    with translate_errors("Host memory could not be pinned"):
        address = int(runtime.hostAlloc(size, 0))
    try:
        yield address, numpy.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)), dtype=numpy.uint64)
    finally:
        with translate_errors("Host memory could not be freed"):
            runtime.freeHost(address)


def _kernel_arguments(part: MemoryRange) -> tuple[numpy.uint64, numpy.uint64]:
    """Return address and number of 16-byte units of a piece, the arguments that kernels take."""
    return numpy.uint64(part.pointer), numpy.uint64(part.size // 16)


def _cut(piece: MemoryRange, size: int) -> Iterator[MemoryRange]:
    for start in range(0, piece.size, size):
        yield MemoryRange(piece.pointer + start, piece.offset + start, min(size, piece.size - start))


def diagnose(link: ParentSocket, request: Message) -> Message:
    """Run the diagnosis of ``request`` (built by :class:`scrubber.adapters.cuda.diagnostics.CudaDiagnostics`)."""
    seconds = request.get("seconds")
    if not isinstance(seconds, int | float):
        raise Fault("unreadable", "A diagnosis request must contain the number of seconds.")
    device = open_device(request)
    return {"checks": CudaDiagnosis(link, device).run(CheckTimeBudget(time.monotonic() + seconds, time.monotonic))}


def run(link: ParentSocket) -> None:
    """Handle one request and send one reply; the zygote calls this in the child that it forked."""
    serve_once(link, lambda request: diagnose(link, request))
