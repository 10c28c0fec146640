"""The one GPU, or partition of one, that this process sees through HIP: memory in pieces, and kernels on it.

Promise: every failure of HIP is raised as a :class:`Fault`. What is cleared is the requested device: the driver attributes
the memory that this process has allocated to the device's own number, and that is compared.

Imported only in the children that clear or diagnose: importing this module touches no device, creating a :class:`HipGpu`
opens one. The library is called through ctypes, so nothing of ROCm but the library itself is needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters import locks
from scrubber.adapters.amd.kernel_files import AmdPaths, kfd_processes
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message

__all__ = ["GROUP", "HipGpu", "MemoryPiece", "kernel_object", "open_device"]

GROUP = 256
_GROUPS_PER_UNIT = 8
_MAX_PIECE_BYTES = 8 << 30
_MIN_PIECE_BYTES = 256 << 10
_COUNTERS = 128
"""64-bit counters of all passes, in a piece of their own."""
_SCRATCH_BYTES = 4096
_UNIT = 16

_SUCCESS, _OUT_OF_MEMORY, _NO_DEVICE = 0, 2, 100
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_LIBRARY_NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_LIBRARY_DIRECTORY = "opt/rocm/lib"
_KERNELS = Path(__file__).with_name("kernels.c")
_ADDRESS_LENGTH = 64


@dataclass(frozen=True, slots=True)
class MemoryPiece:
    """A piece of the device's memory that this process has allocated.

    Attributes:
        offset: offset among all pieces, in the order of their allocation. Not a physical address.
    """

    pointer: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def kernel_object(architecture: str) -> Path:
    """Return the code object for an instruction set.

    Raises:
        Fault: ``away``: this version of the service has none; the device is not at fault.
    """
    shipped = {path.suffixes[0].removeprefix("."): path for path in sorted(_KERNELS.parent.glob("kernels.*.co"))}
    if (found := shipped.get(architecture)) is None:
        raise Fault(
            "away",
            f"There are no kernels for a GPU of the architecture {architecture}, so it cannot be cleared; this version "
            f"has them for {', '.join(shipped)}.",
        )
    return found


def _load_library(root: Path) -> ctypes.CDLL:
    """Load HIP from below ``root``, else from where the system's loader finds it."""
    directory = root / _LIBRARY_DIRECTORY
    candidates = [str(directory / name) for name in _LIBRARY_NAMES if (directory / name).exists()]
    problems: list[str] = []
    for name in (*candidates, *_LIBRARY_NAMES):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise Fault(
        "away",
        f"ROCm's library libamdhip64 cannot be loaded ({problems[0]}), so no GPU can be cleared: install the ROCm "
        "runtime (package hip-runtime-amd), or pass the root that contains /opt/rocm with --amd-root.",
    )


class HipGpu:
    """The device that the environment shows to this process.

    Raises:
        Fault: ``away`` without library, driver or kernels for it, ``held`` when its memory is full, ``unreadable`` when
            it does not work, or another device is shown.
    """

    def __init__(self, paths: AmdPaths, *, address: str, gpu_id: int, architecture: str, units: int) -> None:
        self._paths = paths
        self._gpu_id = gpu_id
        self._grid = max(1, units) * _GROUPS_PER_UNIT
        code = kernel_object(architecture).read_bytes()
        self._hip = _load_library(paths.root)
        self._hip.hipGetErrorString.restype = ctypes.c_char_p
        self._open(address)
        self._module = ctypes.c_void_p()
        self._call("The kernels could not be loaded", "hipModuleLoadData", ctypes.byref(self._module), code)
        self._functions: dict[str, ctypes.c_void_p] = {}
        scratch = self.allocate(_SCRATCH_BYTES)
        if scratch is None:
            raise Fault(
                "held", "The device's memory is full before this service has allocated any: something holds it."
            )
        self._scratch = scratch
        self.zero_counters()

    @property
    def threads(self) -> int:
        """The number of threads of a launch."""
        return self._grid * GROUP

    def _open(self, address: str) -> None:
        self._call("HIP could not be initialised", "hipInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self._call("HIP shows no device", "hipGetDeviceCount", ctypes.byref(count))
        if count.value != 1:
            raise Fault("unreadable", f"HIP shows {count.value} devices to a program that may see only one.")
        self._call("The device could not be opened", "hipSetDevice", ctypes.c_int(0))
        buffer = ctypes.create_string_buffer(_ADDRESS_LENGTH)
        self._call(
            "The device does not report its PCI address",
            "hipDeviceGetPCIBusId",
            buffer,
            _ADDRESS_LENGTH,
            ctypes.c_int(0),
        )
        shown = buffer.value.decode("ascii", "replace").lower()
        if shown.rpartition(".")[0] != address.rpartition(".")[0]:  # the function may number a partition
            raise Fault("unreadable", f"HIP shows the GPU at {shown} instead of the one at {address}.")

    # --- memory

    def allocate(self, size: int, offset: int = 0) -> MemoryPiece | None:
        """Allocate ``size`` bytes; return None when no piece of that size is free."""
        pointer = ctypes.c_void_p()
        status = self._hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        if status == _OUT_OF_MEMORY:
            return None
        self._check(f"{size} bytes could not be allocated", status)
        return MemoryPiece(pointer.value or 0, offset, size)

    def allocate_all(self, before_each: Callable[[], None]) -> list[MemoryPiece]:
        """Allocate all memory, in as few pieces as possible.

        Args:
            before_each: called before each piece; may raise to stop.

        Raises:
            Fault: ``held`` when nothing is free; ``unreadable`` when the driver attributes the memory to another device.
        """
        pieces: list[MemoryPiece] = []
        size = _MAX_PIECE_BYTES
        while size >= _MIN_PIECE_BYTES:
            before_each()
            piece = self.allocate(size, pieces[-1].end if pieces else 0)
            if piece is None:
                size //= 2
            else:
                pieces.append(piece)
        if not pieces:
            raise Fault("held", "The device's memory is full: something holds all of it.")
        self._check_attribution(pieces[-1].end)
        return pieces

    def free(self, pieces: Sequence[MemoryPiece]) -> None:
        """Free memory."""
        for piece in pieces:
            self._call("Memory could not be freed", "hipFree", ctypes.c_void_p(piece.pointer))

    def _check_attribution(self, allocated: int) -> None:
        """Check that the driver counts this process's memory as memory of the requested device.

        The runtime chooses the device by an environment variable, and a wrong choice would clear another tenant's.
        """
        mine = sum(each.vram_bytes for each in kfd_processes(self._paths.kfd, self._gpu_id) if each.pid == os.getpid())
        if mine < allocated:
            raise Fault(
                "unreadable",
                f"The driver attributes {mine} of {allocated} allocated bytes to the device that was to be cleared: HIP "
                "uses another one, or a PID namespace hides this process.",
            )

    # --- kernels and counters

    def launch(self, name: str, pointers_and_sizes: Sequence[int], *more: int) -> None:
        """Start a kernel on the whole device; its arguments are 64-bit numbers, with the number of threads in between."""
        values = [ctypes.c_uint64(value) for value in (*pointers_and_sizes, self.threads, *more)]
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid = [ctypes.c_uint(value) for value in (self._grid, 1, 1, GROUP, 1, 1, 0)]
        self._call(
            f"{name} could not be started", "hipModuleLaunchKernel", self._function(name), *grid, None, arguments, None
        )

    def wait(self) -> None:
        """Return when the device is idle.

        Raises:
            Fault: something that was launched failed.
        """
        self._call("The device failed while working", "hipDeviceSynchronize")

    def counter(self, index: int) -> int:
        """Return the address of a counter, as kernels take it."""
        return self._scratch.pointer + 8 * index

    def zero_counters(self) -> None:
        """Set all counters to 0."""
        self.copy_to_device(self._scratch.pointer, bytes(8 * _COUNTERS))

    def set_counter(self, index: int, value: int) -> None:
        self.copy_to_device(self.counter(index), value.to_bytes(8, "little"))

    def counters(self) -> list[int]:
        """Return all counters, once the device is idle."""
        self.wait()
        found = self.copy_to_host(self._scratch.pointer, 8 * _COUNTERS)
        return [int.from_bytes(found[at : at + 8], "little") for at in range(0, len(found), 8)]

    def copy_to_device(self, pointer: int, content: bytes) -> None:
        self._copy(ctypes.c_void_p(pointer), content, len(content), _HOST_TO_DEVICE)

    def copy_to_host(self, pointer: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._copy(buffer, ctypes.c_void_p(pointer), size, _DEVICE_TO_HOST)
        return buffer.raw

    def _copy(self, to: object, from_: object, size: int, kind: int) -> None:
        self._call("Data could not be copied", "hipMemcpy", to, from_, ctypes.c_size_t(size), ctypes.c_int(kind))

    def _function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            found = ctypes.c_void_p()
            self._call(
                f"{name} is not in the kernels",
                "hipModuleGetFunction",
                ctypes.byref(found),
                self._module,
                name.encode(),
            )
            self._functions[name] = found
        return self._functions[name]

    def _call(self, action: str, function: str, *arguments: object) -> None:
        self._check(action, getattr(self._hip, function)(*arguments))

    def _check(self, action: str, status: int) -> None:
        if status == _SUCCESS:
            return
        message = (self._hip.hipGetErrorString(status) or b"").decode("utf-8", "replace")
        code = {_OUT_OF_MEMORY: "held", _NO_DEVICE: "away"}.get(status, "unreadable")
        raise Fault(code, f"{action}: {message or 'unknown error'} (HIP error {status}); the kernel log may show more.")


def open_device(request: Message) -> HipGpu:
    """Open the device of a request of :class:`scrubber.adapters.amd.erasure.AmdJobs`, after taking its lock.

    Raises:
        Fault: as :class:`HipGpu`; ``held`` when another process of this service works on the device.
    """
    try:
        taken = locks.acquire_lock(str(request["lock"]))
    except OSError as error:
        raise Fault("away", f"The device's lock cannot be taken: {error.strerror}.") from error
    if not taken:
        raise Fault("held", "Another process of this service still works on the device.")
    gpu_id, units = request["gpu_id"], request["units"]
    if not isinstance(gpu_id, int) or not isinstance(units, int):
        raise Fault("unreadable", "A request for work on a GPU must describe the GPU.")
    return HipGpu(
        AmdPaths(Path(str(request["root"]))),
        address=str(request["pci"]),
        gpu_id=gpu_id,
        architecture=str(request["architecture"]),
        units=units,
    )
