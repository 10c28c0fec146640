"""The memory on a GPU's processors: shared memory and registers, cleared on every one of them, with proof of that.

Promise: a processor counts as seen only when both kernels cleared it and read it back; each kernel marks the number of
the processor that it ran on. The report contains how many were seen, and nothing is rounded up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

from scrubber.adapters.children.message import Message
from scrubber.adapters.cuda.gpu import CudaGpu, DeviceCounters, translate_errors

__all__ = ["OnChipMemory"]

_ROUNDS = 16
_WORDS = 16
_BARRIER_TICKS = 200_000_000
"""Clock ticks that a block waits for the others, about 0.1 s: on an otherwise idle device they all start at once."""

_SHARED_THREADS, _REGISTER_THREADS = 1024, 256
_REGISTER_BYTES = 240 * _REGISTER_THREADS * 4
"""Bytes cleared and read back on each processor; the other registers hold the kernel's own addresses meanwhile."""

# Indexes of a kernel's counters: one bit per processor (and the number of processor ids), bytes found, bytes that
# failed, and how many blocks have arrived.
_SEEN, _RESIDUE, _FAILED, _ARRIVED = 0, _WORDS + 1, _WORDS + 2, _WORDS + 3
_COUNTERS = _WORDS + 4


class OnChipMemory:
    """All processors (SMs) of ``gpu``. ``before_launch`` is called before each launch and may raise to stop."""

    def __init__(self, gpu: CudaGpu, before_launch: Callable[[], None]) -> None:
        self._gpu = gpu
        self._before_launch = before_launch
        self._shared_bytes = gpu.max_shared_bytes // 8 * 8
        self._counters = DeviceCounters(gpu, _COUNTERS)
        with translate_errors("The on-chip kernels could not be prepared"):
            self._shared = gpu.kernel("onchip_shared")
            self._shared.max_dynamic_shared_size_bytes = self._shared_bytes  # type: ignore[attr-defined]
            self._registers = gpu.kernel("onchip_registers")

    @property
    def cleared_bytes(self) -> int:
        """Bytes on all processors together, when all are seen."""
        return self._gpu.processors * (self._shared_bytes + _REGISTER_BYTES)

    def clear(self) -> Message:
        """Count residue, clear the memory and read it back; return the fields of an :class:`OnChipReport`."""
        shared_seen, shared_residue, shared_failed = self._rounds(self._clear_shared)
        registers_seen, registers_residue, registers_failed = self._rounds(self._clear_registers)
        return {
            "units": self._gpu.processors,
            "units_cleared": min(self._gpu.processors, (shared_seen & registers_seen).bit_count()),
            "shared_bytes": self._shared_bytes,
            "register_bytes": _REGISTER_BYTES,
            "residue_bytes": shared_residue + registers_residue,
            "failed_bytes": shared_failed + registers_failed,
        }

    def _rounds(self, launch: Callable[[], None]) -> tuple[int, int, int]:
        """Launch until every processor was seen, or :data:`_ROUNDS` times.

        Return the bits seen, bytes found and bytes failed.
        """
        self._counters.zero()
        values: list[int] = []
        for _ in range(_ROUNDS):
            self._before_launch()
            self._counters.zero(_ARRIVED, 1)
            launch()
            values = self._counters.read()
            if _seen(values).bit_count() >= self._gpu.processors:
                break
        return _seen(values), values[_RESIDUE], values[_FAILED]

    def _clear_shared(self) -> None:
        with translate_errors("onchip_shared could not be started"):
            self._shared(
                (self._gpu.processors,),
                (_SHARED_THREADS,),
                (*self._common(), numpy.uint32(self._shared_bytes)),
                shared_mem=self._shared_bytes,
                stream=self._gpu.stream,
            )

    def _clear_registers(self) -> None:
        with translate_errors("onchip_registers could not be started"):
            self._registers((self._gpu.processors,), (_REGISTER_THREADS,), self._common(), stream=self._gpu.stream)

    def _common(self) -> tuple[object, ...]:
        at = self._counters.address
        return (
            *(at(each) for each in (_SEEN, _RESIDUE, _FAILED, _ARRIVED)),
            numpy.uint32(self._gpu.processors),
            numpy.uint64(_BARRIER_TICKS),
        )


def _seen(values: list[int]) -> int:
    return sum(word << (64 * index) for index, word in enumerate(values[_SEEN : _SEEN + _WORDS]))
