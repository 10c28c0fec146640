"""Clears one GPU, or one instance of it, in a forked child, and proves it.

Promise: it reports as "cleared" and "verified" only bytes that this run wrote and, when all of them were written, read
back as zeros in another launch; every other byte of the device is counted as not covered. It stops between two pieces
of memory as soon as its parent is gone. Residue is counted, never kept.

The child identifies itself in the device's lock file, which it holds from before the first context until its end. The
processors come first and last: first, because what is counted there must not be what our own kernels left; last,
because the audit carried what it read through them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from secrets import randbits

import numpy

from scrubber.adapters.children.child import Fault, ParentSocket, serve_once
from scrubber.adapters.children.message import Message
from scrubber.adapters.cuda.gpu import CudaGpu, DeviceCounters, MemoryRange, open_device
from scrubber.adapters.cuda.on_chip import OnChipMemory

__all__ = ["run"]

_PROGRESS_SECONDS = 0.05
_MAP_PARTS = 64
_UNIT = 16

_WITNESS_BYTES = 16
_COUNT, _FIRST, _WITNESS, _MAP = 0, 1, 2, 4
"""Indexes of the counters of a pass: bytes, offset of the first one, two non-zero words, and bytes per map part."""


class CudaEraseRun:
    """One scrub, pass by pass; its counts are what the report contains. All counts are in bytes."""

    def __init__(self, link: ParentSocket, gpu: CudaGpu) -> None:
        self._link = link
        self._progress_sent_at = 0.0
        self._gpu = gpu
        self._gpu.load_kernels()
        self._processors = OnChipMemory(self._gpu, self._exit_if_parent_gone)
        self._counters = DeviceCounters(self._gpu, _MAP + _MAP_PARTS)
        self._pieces: list[MemoryRange] = []
        self._map_part = 0
        self.covered = 0
        self.cleared = 0
        self.residue: int | None = None
        self.residue_map: list[int] = []
        self.pattern_failed = 0
        self.unverified_bytes = 0
        self.on_chip: Message | None = None
        self.seconds: dict[str, float] = {}

    def run(self, *, audit: bool, pattern: bool, on_chip: bool) -> None:
        """Run all passes, in order; the memory is freed when they are over."""
        before = self._clear_processors() if on_chip else {}
        self._pieces = self._gpu.allocate_all(self._exit_if_parent_gone)
        self.covered = self._pieces[-1].end
        self._map_part = -(-self.covered // (_MAP_PARTS * _UNIT)) * _UNIT
        if audit:
            self.residue = self._nonzero("audit")
            self.residue_map = self._counters.read()[_MAP:] if self.residue else []
        if pattern:
            self._pattern(randbits(64))
        self._pass("clear", lambda piece: self._gpu.launch("fill_zero", *_kernel_arguments(piece)))
        self.cleared = self.covered
        self.unverified_bytes = self._nonzero("verify")
        if on_chip:
            self.on_chip = {**self._clear_processors(), "residue_bytes": before["residue_bytes"]}
        self._gpu.free(self._pieces)

    def _pattern(self, nonce: int) -> None:
        """Fill the memory with numbers derived from their own addresses, and compare."""
        seed = numpy.uint64(nonce)
        fill, check = "fill_pattern", "check_pattern"
        self._reset()
        self._pass(
            "pattern", lambda piece: self._gpu.launch(fill, *_kernel_arguments(piece), numpy.uint64(piece.offset), seed)
        )
        self._pass(
            "pattern",
            lambda piece: self._gpu.launch(
                check,
                *_kernel_arguments(piece),
                numpy.uint64(piece.offset),
                seed,
                self._counters.address(_COUNT),
                self._counters.address(_FIRST),
            ),
        )
        self.pattern_failed = self._counters.read()[_COUNT]

    def _nonzero(self, phase: str) -> int:
        """Count the bytes that are not zero; the counters then contain where they are.

        A count of zero proves something only if the kernel can detect residue: so it is also given a witness, bytes
        beside the memory that are not zero.
        """
        self._reset()
        self._counters.fill_with_ones(_WITNESS, 2)
        self._pass(
            phase,
            lambda piece: self._count_nonzero(
                *_kernel_arguments(piece), piece.offset, self._counters.address(_MAP), numpy.uint64(self._map_part)
            ),
        )
        nowhere = numpy.uint64(0)
        self._count_nonzero(self._counters.address(_WITNESS), numpy.uint64(1), self.covered, nowhere, nowhere)
        found = self._counters.read()[_COUNT] - _WITNESS_BYTES
        if found < 0:
            raise Fault(
                "unreadable",
                f"The {phase} pass did not detect the non-zero bytes it was given as a check, so its "
                "result proves nothing.",
            )
        return found

    def _count_nonzero(
        self, address: numpy.uint64, n16: numpy.uint64, offset: int, map_: numpy.uint64, map_part: numpy.uint64
    ) -> None:
        counted = (self._counters.address(_COUNT), self._counters.address(_FIRST), map_, map_part)
        self._gpu.launch("count_nonzero", address, n16, numpy.uint64(offset), *counted)

    def _reset(self) -> None:
        self._counters.zero()
        self._counters.fill_with_ones(_FIRST)

    def _pass(self, phase: str, work: Callable[[MemoryRange], None]) -> None:
        """Do ``work`` on each piece, one piece ahead of the device, and wait until the device has finished them all."""
        self._send_progress(phase, 0, self.covered, always=True)
        timing = self._gpu.start_timer()
        under_way: tuple[MemoryRange, Callable[[], None]] | None = None
        for piece in self._pieces:
            self._exit_if_parent_gone()
            work(piece)
            if under_way is not None:
                self._finish(phase, *under_way)
            under_way = (piece, self._gpu.record_event())
        if under_way is not None:
            self._finish(phase, *under_way)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + timing.seconds()

    def _finish(self, phase: str, piece: MemoryRange, wait: Callable[[], None]) -> None:
        wait()
        self._send_progress(phase, piece.end, self.covered, always=piece.end == self.covered)

    def _clear_processors(self) -> Message:
        size = self._processors.cleared_bytes
        self._send_progress("on-chip", 0, size, always=True)
        start = time.monotonic()
        found = self._processors.clear()
        self.seconds["on-chip"] = self.seconds.get("on-chip", 0.0) + time.monotonic() - start
        self._send_progress("on-chip", size, size, always=True)
        return found

    def _exit_if_parent_gone(self) -> None:
        if self._link.is_parent_gone():
            sys.exit(0)  # abandoned: no process would receive the report, and the ledger records the device as dirty

    def _send_progress(self, phase: str, done: int, total: int, *, always: bool) -> None:
        now = time.monotonic()
        if always or now - self._progress_sent_at >= _PROGRESS_SECONDS:
            self._progress_sent_at = now
            self._link.send({"phase": phase, "done_bytes": done, "total_bytes": total})


def _kernel_arguments(piece: MemoryRange) -> tuple[numpy.uint64, numpy.uint64]:
    """Return address and size as kernels take them."""
    return numpy.uint64(piece.pointer), numpy.uint64(piece.size // _UNIT)


def erase(link: ParentSocket, request: Message) -> Message:
    """Run the scrub of ``request`` (built by :class:`scrubber.adapters.cuda.erasure.CudaEraser`); return the counts."""
    eraser = CudaEraseRun(link, open_device(request))
    eraser.run(audit=request["audit"] is True, pattern=request["pattern"] is True, on_chip=request["on_chip"] is True)
    return {
        "covered_bytes": eraser.covered,
        "cleared_bytes": eraser.cleared,
        "verified_bytes": eraser.covered - eraser.unverified_bytes,
        "failed_bytes": eraser.unverified_bytes + eraser.pattern_failed,
        "residue_bytes": eraser.residue,
        "residue_map": eraser.residue_map,
        "on_chip": eraser.on_chip,
        "seconds_by_phase": [list(row) for row in eraser.seconds.items()],
    }


def run(link: ParentSocket) -> None:
    """Handle one request and send one reply; the zygote calls this in the child that it forked."""
    serve_once(link, lambda request: erase(link, request))
