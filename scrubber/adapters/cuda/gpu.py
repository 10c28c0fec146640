"""The one GPU, or instance of one, that this process sees: its context, its memory in pieces, and kernels on it.

Promise: every CUDA failure is raised as a :class:`Fault` that names the device or the driver. A piece of memory is
exactly what CUDA allocated, at an offset that no other piece of this process shares.

Imported only in the zygote and in the children that it forks: importing this module touches no device, creating a
:class:`CudaGpu` opens a context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cupy
import numpy
from cupy.cuda import runtime

from scrubber.adapters import locks
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.cuda.status import MEMORY_FULL, fault_for_status

__all__ = ["KERNELS_PATH", "CudaGpu", "DeviceCounters", "MemoryRange", "StreamTimer", "open_device", "translate_errors"]

KERNELS_PATH = Path(__file__).with_name("kernels.ptx")
"""Built from ``kernels.cu`` beside it; the driver compiles it once and caches the result."""

_MAX_RANGE_BYTES = 8 << 30
_MIN_RANGE_BYTES = 2 << 20
_UNIT = 16
_SCRATCH_BYTES = 4096
"""Bytes for all counters together: the first of a smallest piece, of which the rest is memory like any other."""
_EXCLUSIVE_PROCESS = 3
_THREADS = 256
_BLOCKS_PER_SM = 8


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Turn CUDA errors raised inside into a :class:`Fault`."""
    try:
        yield
    except RuntimeError as error:  # CUDARuntimeError and CUDADriverError have a status; a library not found has none
        raise fault_for_status(getattr(error, "status", None), str(error), action) from error


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A range of the device's memory that this process has allocated.

    Attributes:
        offset: offset of the range among all pieces, in the order of their allocation. Not a physical address.
    """

    pointer: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class StreamTimer:
    """Measures the seconds between two points of a stream, by the device's own clock."""

    def __init__(self, stream: object) -> None:
        self._stream = stream
        with translate_errors("The elapsed time could not be measured"):
            self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
            self._start.record(stream)

    def seconds(self) -> float:
        """Return the seconds until the work launched last is over; waits for it."""
        with translate_errors("The device failed while working"):
            self._end.record(self._stream)
            self._end.synchronize()
            return float(cupy.cuda.get_elapsed_time(self._start, self._end)) / 1000


class CudaGpu:
    """The device in the environment's ``CUDA_VISIBLE_DEVICES``, with a context on it.

    Raises:
        Fault: ``held`` when another process holds it, ``away`` without a driver, ``unreadable`` when it does not work.
    """

    def __init__(self) -> None:
        with translate_errors("No context could be created"):
            if (visible := runtime.getDeviceCount()) != 1:
                raise Fault("unreadable", f"CUDA shows {visible} devices to a program that may see only one.")
            runtime.setDevice(0)
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.processors = self._attribute("cudaDevAttrMultiProcessorCount")
        self._kernels = None
        self._scratch: MemoryRange | None = None
        self._scratch_used = 0

    @property
    def is_exclusive(self) -> bool:
        """Whether no other process can open a context, as CUDA reports it."""
        return self._attribute("cudaDevAttrComputeMode") == _EXCLUSIVE_PROCESS

    @property
    def max_shared_bytes(self) -> int:
        """The maximum shared memory of a block, in bytes: nearly all that a processor has."""
        return self._attribute("cudaDevAttrMaxSharedMemoryPerBlockOptin")

    def load_kernels(self) -> None:
        """Have the kernels compiled, or loaded from the driver's cache, before the memory is full."""
        with translate_errors("The kernels could not be loaded"):
            self._kernels = cupy.RawModule(path=str(KERNELS_PATH))
            self.kernel("fill_zero")

    def kernel(self, name: str) -> Callable[..., None]:
        """Return the kernel ``name``, for launches that need more than :meth:`launch`."""
        if self._kernels is None:
            self.load_kernels()
        found: Callable[..., None] = self._kernels.get_function(name)  # type: ignore[attr-defined]
        return found

    def launch(self, name: str, *arguments: object) -> None:
        """Start a kernel that accepts any grid on the whole device; the next :meth:`wait` reports a failure."""
        with translate_errors(f"{name} could not be started"):
            grid = (self.processors * _BLOCKS_PER_SM,)
            self.kernel(name)(grid, (_THREADS,), arguments, stream=self.stream)

    def record_event(self) -> Callable[[], None]:
        """Record a point in the stream; calling the returned function waits until everything before it is over.

        That call raises :class:`Fault` when something before the point failed on the device.
        """
        with translate_errors("The device failed while working"):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)

        def wait() -> None:
            with translate_errors("The device failed while working"):
                event.synchronize()

        return wait

    def wait(self) -> None:
        """Return when the device is idle.

        Raises:
            Fault: something that was launched failed.
        """
        with translate_errors("The device failed while working"):
            self.stream.synchronize()

    def start_timer(self) -> StreamTimer:
        """Start to measure, from the next launch on."""
        return StreamTimer(self.stream)

    def allocate_all(self, before_each: Callable[[], None]) -> list[MemoryRange]:
        """Allocate all memory except for the scratch area with the counters, in as few pieces as possible.

        Args:
            before_each: called before each piece; may raise to stop.

        Raises:
            Fault: not even the scratch area can be allocated, or the device failed.
        """
        desk = self._scratch_range()
        pieces = [MemoryRange(desk.pointer + _SCRATCH_BYTES, 0, desk.size - _SCRATCH_BYTES)]
        size = _MAX_RANGE_BYTES
        while size >= _MIN_RANGE_BYTES:
            before_each()
            if (piece := self.allocate(size, pieces[-1].end if pieces else 0)) is None:
                size //= 2
            else:
                pieces.append(piece)
        if not pieces:
            raise Fault(
                "held",
                f"Less than {_MIN_RANGE_BYTES} bytes of the device's memory are free: something holds all of it.",
            )
        return pieces

    def allocate(self, size: int, offset: int = 0) -> MemoryRange | None:
        """Allocate ``size`` bytes (a multiple of 16); return None when no piece of that size is free."""
        if size % _UNIT:
            raise ValueError(f"{size} bytes are not a multiple of {_UNIT}")
        with translate_errors(f"{size} bytes could not be allocated"):
            try:
                return MemoryRange(int(runtime.malloc(size)), offset, size)
            except runtime.CUDARuntimeError as error:
                if error.status != MEMORY_FULL:
                    raise
                return None

    def free(self, pieces: Sequence[MemoryRange]) -> None:
        """Free memory. The scratch area is zeroed and stays until the end of the process."""
        desk = self._scratch_range()
        with translate_errors("Memory could not be freed"):
            runtime.memsetAsync(desk.pointer, 0, _SCRATCH_BYTES, self.stream.ptr)
            self.stream.synchronize()
            for piece in pieces:
                if not desk.pointer <= piece.pointer < desk.pointer + desk.size:
                    runtime.free(piece.pointer)

    def allocate_scratch(self, size: int) -> int:
        """Return the address of ``size`` zeroed bytes for counters; they stay allocated until the process ends."""
        desk = self._scratch_range()
        at, self._scratch_used = self._scratch_used, self._scratch_used + -(-size // _UNIT) * _UNIT
        if self._scratch_used > _SCRATCH_BYTES:
            raise ValueError(f"{size} bytes are more than the rest of the scratch range")
        return desk.pointer + at

    def _scratch_range(self) -> MemoryRange:
        if self._scratch is None:
            if (taken := self.allocate(_MIN_RANGE_BYTES)) is None:
                raise Fault(
                    "held", "The device's memory is full before this service has allocated any: something holds it."
                )
            with translate_errors("Counters could not be initialised"):
                runtime.memsetAsync(taken.pointer, 0, _SCRATCH_BYTES, self.stream.ptr)
            self._scratch = taken
        return self._scratch

    def _attribute(self, name: str) -> int:
        with translate_errors(f"The device does not report its {name}"):
            return int(runtime.deviceGetAttribute(getattr(runtime, name), 0))


def open_device(request: Message) -> CudaGpu:
    """Open the device of a :class:`scrubber.adapters.cuda.gpu_jobs.GpuJob`: take its lock, and open a context on it.

    Raises:
        Fault: as :class:`CudaGpu`; ``held`` when another job of this service has the lock, ``away`` when the lock
            cannot be taken or the fence that the request names is not enabled: other processes could then use the
            device as well.
    """
    try:
        taken = locks.acquire_lock(str(request["lock"]))
    except OSError as error:
        raise Fault("away", f"The device's lock cannot be taken: {error.strerror}.") from error
    if not taken:
        raise Fault("held", "Another process of this service still works on the device.")
    gpu = CudaGpu()
    if request["fenced"] is True and not gpu.is_exclusive:
        raise Fault(
            "away",
            "The device was fenced, but CUDA does not report it as exclusive: nothing was done. This is retried.",
        )
    return gpu


class DeviceCounters:
    """64-bit numbers on the device, which kernels add to or lower; all zero at first."""

    def __init__(self, gpu: CudaGpu, count: int) -> None:
        self._gpu = gpu
        self._count = count
        self._pointer = gpu.allocate_scratch(8 * count)

    def address(self, index: int) -> numpy.uint64:
        """Return the address of one of them, as kernels take it."""
        return numpy.uint64(self._pointer + 8 * index)

    def zero(self, first: int = 0, count: int | None = None) -> None:
        """Set ``count`` of them (default: all) from ``first`` on to 0, in stream order."""
        self._set(first, self._count - first if count is None else count, 0)

    def fill_with_ones(self, first: int, count: int = 1) -> None:
        """Set ``count`` of them from ``first`` on to the largest number of 64 bits."""
        self._set(first, count, 0xFF)

    def read(self) -> list[int]:
        """Return all of them, once the device is idle."""
        self._gpu.wait()
        values = (ctypes.c_uint64 * self._count)()
        with translate_errors("Results could not be read"):
            runtime.memcpy(ctypes.addressof(values), self._pointer, ctypes.sizeof(values), runtime.memcpyDeviceToHost)
        return list(values)

    def _set(self, first: int, count: int, byte: int) -> None:
        with translate_errors("Counters could not be initialised"):
            runtime.memsetAsync(self._pointer + 8 * first, byte, 8 * count, self._gpu.stream.ptr)
