"""The maximum read, write and copy rates of this GPU: the reference of every pass in the same run.

Runs as ``python -m bench.gpu.limits BYTES REPEATS`` with one GPU visible, and prints one JSON object: bytes per second
by name, each the best median over the launch shapes tried, and the seconds to create a context. It writes only to its
own memory, and is the only module here that uses CUDA.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["KERNELS"]

KERNELS = Path(__file__).parents[2] / "scrubber/adapters/cuda/kernels.ptx"
_BLOCKS_PER_SM = (2, 4, 8, 16, 32)
_THREADS = (256, 512, 1024)
_GRAIN = 2 << 20
_MEMORY_SHARE = 0.5
"""Maximum share of the free memory."""


class MemoryBench:
    """One buffer, and the ways to fill and read it. All sizes are in bytes."""

    def __init__(self, size: int, repeats: int) -> None:
        import cupy  # so that its import and the context are timed separately

        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime
        start = time.perf_counter()
        self._runtime.free(0)
        self.context_seconds = time.perf_counter() - start
        free, _ = self._runtime.memGetInfo()
        self.size = max(_GRAIN, min(size, int(free * _MEMORY_SHARE)) // _GRAIN * _GRAIN)
        self._repeats = repeats
        self._sms = self._runtime.deviceGetAttribute(self._runtime.cudaDevAttrMultiProcessorCount, 0)
        start = time.perf_counter()
        self._module = cupy.RawModule(path=str(KERNELS))
        self._module.get_function("fill_zero")
        self.module_seconds = time.perf_counter() - start
        self._buffer = self._runtime.malloc(self.size)
        self._sink = self._runtime.malloc(_GRAIN)

    def memset(self) -> float:
        """Return the rate of the driver's own fill in bytes per second."""
        return self._rate(self.size, lambda: self._runtime.memsetAsync(self._buffer, 0, self.size, 0))

    def best_kernel_rate(self, name: str, moved: int, *arguments: int) -> tuple[float, tuple[int, int]]:
        """Return the best rate of kernel ``name``, which moves ``moved`` bytes, and its grid and block."""
        kernel = self._module.get_function(name)
        numbers = tuple(self._cupy.uint64(each) for each in arguments)
        found: list[tuple[float, tuple[int, int]]] = []
        for per_sm in _BLOCKS_PER_SM:
            for threads in (each for each in _THREADS if each <= kernel.max_threads_per_block):
                grid = self._sms * per_sm
                rate = self._rate(moved, lambda grid=grid, threads=threads: kernel((grid,), (threads,), numbers))  # type: ignore[misc]
                found.append((rate, (grid, threads)))
        return max(found)

    def run_all(self) -> dict[str, object]:
        n16, half = self.size // 16, self.size // 2 // 16
        requests: dict[str, tuple[int, Sequence[int]]] = {
            "read16": (self.size, (self._buffer, n16, self._sink)),
            "write16": (self.size, (self._buffer, n16, 0)),
            "fill_zero": (self.size, (self._buffer, n16)),
            "copy16": (2 * half * 16, (self._buffer + half * 16, self._buffer, half)),
        }
        report: dict[str, object] = {"memset_bytes_per_second": self.memset()}
        for name, (moved, arguments) in requests.items():
            rate, shape = self.best_kernel_rate(name, moved, *arguments)
            report |= {f"{name}_bytes_per_second": rate, f"{name}_grid": shape[0], f"{name}_block": shape[1]}
        return {
            **report,
            "buffer_bytes": self.size,
            "processors": self._sms,
            "context_seconds": self.context_seconds,
            "module_seconds": self.module_seconds,
        }

    def _rate(self, moved: int, work: Callable[[], object]) -> float:
        """Return bytes per second by the device's own clock: the median of several runs after a warm-up."""
        work()
        seconds: list[float] = []
        for _ in range(self._repeats):
            start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(self._cupy.cuda.get_elapsed_time(start, end) / 1000)
        return moved / max(median(seconds), 1e-9)


def main(arguments: Sequence[str]) -> None:
    size, repeats = (int(word) for word in arguments)
    print(json.dumps(MemoryBench(size, repeats).run_all()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
