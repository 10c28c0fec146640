"""Kernels from PTX text: names and parameters come from the text, the code is its source on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy

from cupy.cuda import driver, runtime
from cupy.cuda.stream import Stream, pointer_of
from tests.nvidia.hostkernels import MOST_THREADS, HostKernels

__all__ = ["RawKernel", "RawModule"]

_SHARED_BYTES_UNASKED = 48 * 1024
_INVALID_VALUE, _FILE_NOT_FOUND, _NOT_FOUND = 1, 301, 500
_built: dict[Path, HostKernels] = {}


def _cache() -> Path:
    """Return a directory that only this user can write: its files are loaded and executed."""
    named = os.environ.get("SCRUBBER_STANDIN_CACHE")
    cache = Path(named) if named else Path(tempfile.gettempdir()) / f"scrubber-standin-{os.getuid()}"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = cache.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not cache.is_dir():
        raise PermissionError(
            f"{cache} is not this user's alone; remove it, or name another in SCRUBBER_STANDIN_CACHE."
        )
    return cache


def _kernels(ptx: Path) -> HostKernels:
    if ptx not in _built:
        _built[ptx] = HostKernels.build(ptx, _cache())
    return _built[ptx]


class RawKernel:
    """A kernel of a module. Calling it adds it to a stream's queue."""

    def __init__(self, kernels: HostKernels, name: str) -> None:
        self.name = name
        self._kernels = kernels
        self._dynamic_shared_bytes = _SHARED_BYTES_UNASKED

    @property
    def num_regs(self) -> int:
        return 255 if "registers" in self.name else 32

    @property
    def local_size_bytes(self) -> int:
        return 0

    @property
    def shared_size_bytes(self) -> int:
        return 0

    @property
    def max_threads_per_block(self) -> int:
        return MOST_THREADS

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._dynamic_shared_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, requested: int) -> None:
        if requested > runtime.context().gpu.shared_bytes:
            raise driver.CUDADriverError(_INVALID_VALUE)
        self._dynamic_shared_bytes = requested

    @property
    def attributes(self) -> Mapping[str, int]:
        return {
            "local_size_bytes": self.local_size_bytes,
            "max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes,
            "max_threads_per_block": self.max_threads_per_block,
            "num_regs": self.num_regs,
            "shared_size_bytes": self.shared_size_bytes,
        }

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[object],
        *,
        shared_mem: int = 0,
        stream: Stream | None = None,
    ) -> None:
        if {type(grid), type(block)} != {tuple}:
            raise TypeError("Grid and block are tuples.")
        context = runtime.context()
        threads = int(numpy.prod(block))
        if not 0 < threads <= MOST_THREADS or int(numpy.prod(grid)) <= 0 or shared_mem > self._dynamic_shared_bytes:
            raise driver.CUDADriverError(_INVALID_VALUE)
        arguments = [_bytes(self.name, argument) for argument in args]
        widths = tuple(map(len, arguments))
        if widths != self._kernels.entries[self.name].widths:
            raise TypeError(f"{self.name} takes {self._kernels.entries[self.name].widths} bytes, not {widths}.")
        grid, block = tuple(map(int, grid)), tuple(map(int, block))
        context.put(pointer_of(stream), lambda: context.launch(self._kernels, self.name, grid, block, arguments))


def _bytes(kernel: str, argument: object) -> bytes:
    if not isinstance(argument, numpy.integer):
        raise TypeError(f"{kernel}: {argument!r} has no width of its own; pass numpy.uint32 or numpy.uint64.")
    return argument.tobytes()


class RawModule:
    """A file of PTX text; read when the first kernel is requested, as in the real one."""

    def __init__(self, *, path: str) -> None:
        self.file_path = path

    def get_function(self, name: str) -> RawKernel:
        runtime.context()
        path = Path(self.file_path)
        if not path.is_file():
            raise driver.CUDADriverError(_FILE_NOT_FOUND)
        kernels = _kernels(path)
        if name not in kernels.entries:
            raise driver.CUDADriverError(_NOT_FOUND)
        return RawKernel(kernels, name)
