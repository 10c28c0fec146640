"""Clears one AMD GPU, or one partition of it, in a child of its own, and proves it.

Promise: it reports as "cleared" and "verified" only bytes that this run wrote and, when all of them were written, read
back as zeros in another launch. It stops between two pieces of memory as soon as its parent is gone. Residue is counted,
never kept. The child identifies itself in the device's lock file, which it holds until its end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from secrets import randbits

from scrubber.adapters.amd.hip import HipGpu, MemoryPiece, open_device
from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.message import Message

__all__: list[str] = []

_PROGRESS_SECONDS = 0.05
_MAP_PARTS = 64
_UNIT = 16
_COUNT, _WITNESS, _MAP = 0, 2, 4
"""Indexes of counters: bytes, two words for the check of the kernel, and bytes by part of the memory."""
_WITNESS_BYTES = 16


class HipEraseRun:
    """One scrub, pass by pass; its counts are what the report contains. All counts are in bytes."""

    def __init__(self, link: ParentSocket, gpu: HipGpu) -> None:
        self._link = link
        self._gpu = gpu
        self._sent_at = 0.0
        self._pieces: list[MemoryPiece] = []
        self.covered = 0
        self.residue: int | None = None
        self.residue_map: list[int] = []
        self.pattern_failed = 0
        self.unverified = 0
        self.seconds: dict[str, float] = {}

    def run(self, *, audit: bool, pattern: bool) -> None:
        """Run all passes, in order; the memory is freed when they are over."""
        self._pieces = self._gpu.allocate_all(self._exit_if_parent_gone)
        self.covered = self._pieces[-1].end
        if audit:
            self.residue = self._nonzero("audit")
            self.residue_map = self._gpu.counters()[_MAP : _MAP + _MAP_PARTS] if self.residue else []
        if pattern:
            self._pattern(randbits(64))
        self._pass("clear", lambda piece: self._gpu.launch("fill_zero", _sized(piece)))
        self.unverified = self._nonzero("verify")
        self._gpu.free(self._pieces)

    def _pattern(self, nonce: int) -> None:
        """Fill the memory with numbers derived from their own addresses, and compare."""
        gpu = self._gpu
        gpu.zero_counters()
        self._pass("pattern", lambda piece: gpu.launch("fill_pattern", _sized(piece), piece.offset, nonce))
        bad = gpu.counter(_COUNT)
        self._pass("pattern", lambda piece: gpu.launch("check_pattern", _sized(piece), piece.offset, nonce, bad))
        self.pattern_failed = gpu.counters()[_COUNT]

    def _nonzero(self, phase: str) -> int:
        """Count the bytes that are not zero; the counters then contain where they are.

        A count of zero proves something only if the kernel can detect residue: so it is also given a witness, bytes
        beside the memory that are not zero.
        """
        gpu = self._gpu
        gpu.zero_counters()
        for word in range(_WITNESS, _WITNESS + _WITNESS_BYTES // 8):
            gpu.set_counter(word, 2**64 - 1)
        part = -(-self.covered // (_MAP_PARTS * _UNIT)) * _UNIT
        count, map_ = gpu.counter(_COUNT), gpu.counter(_MAP)
        self._pass(phase, lambda piece: gpu.launch("count_nonzero", _sized(piece), piece.offset, count, map_, part))
        gpu.launch("count_nonzero", (gpu.counter(_WITNESS), 1), self.covered, count, map_, 0)
        found = gpu.counters()[_COUNT] - _WITNESS_BYTES
        if found < 0:
            raise Fault(
                "unreadable",
                f"The {phase} pass did not detect the non-zero bytes it was given as a check, so its result proves "
                "nothing.",
            )
        return found

    def _pass(self, phase: str, work: Callable[[MemoryPiece], None]) -> None:
        self._send_progress(phase, 0, always=True)
        start = time.monotonic()
        for piece in self._pieces:
            self._exit_if_parent_gone()
            work(piece)
            self._gpu.wait()
            self._send_progress(phase, piece.end, always=piece.end == self.covered)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def _exit_if_parent_gone(self) -> None:
        if self._link.is_parent_gone():
            sys.exit(0)  # abandoned: no process would receive the report, and the ledger records the device as dirty

    def _send_progress(self, phase: str, done: int, *, always: bool) -> None:
        now = time.monotonic()
        if always or now - self._sent_at >= _PROGRESS_SECONDS:
            self._sent_at = now
            self._link.send({"phase": phase, "done_bytes": done, "total_bytes": self.covered})


def _sized(piece: MemoryPiece) -> tuple[int, int]:
    """Return address and size as kernels take them."""
    return piece.pointer, piece.size // _UNIT


def erase(link: ParentSocket, request: Message) -> Message:
    """Run the scrub of ``request``; return the counts."""
    run = HipEraseRun(link, open_device(request))
    run.run(audit=request["audit"] is True, pattern=request["pattern"] is True)
    return {
        "covered_bytes": run.covered,
        "cleared_bytes": run.covered,
        "verified_bytes": run.covered - run.unverified,
        "failed_bytes": run.unverified + run.pattern_failed,
        "residue_bytes": run.residue,
        "residue_map": run.residue_map,
        "seconds_by_phase": [list(row) for row in run.seconds.items()],
    }


def main() -> None:
    link = child.connect_to_parent()
    child.serve_once(link, lambda request: erase(link, request))


if __name__ == "__main__":
    main()
