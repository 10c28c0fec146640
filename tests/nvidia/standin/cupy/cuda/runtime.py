"""The runtime's functions, with CuPy's names and arguments."""

# ruff: noqa: N816 - the names are the interface

from __future__ import annotations

import atexit
import ctypes
import os

from tests.nvidia.hostcontext import NULL_STREAM, HostContext
from tests.nvidia.hostgpu import CUDARuntimeError, HostGpu, visible

__all__ = [
    "CUDARuntimeError",
    "deviceGetAttribute",
    "deviceSynchronize",
    "driverGetVersion",
    "free",
    "freeHost",
    "getDevice",
    "getDeviceCount",
    "getDeviceProperties",
    "hostAlloc",
    "malloc",
    "memGetInfo",
    "memcpy",
    "memcpyAsync",
    "memset",
    "memsetAsync",
    "runtimeGetVersion",
    "setDevice",
    "streamSynchronize",
]

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
hostAllocDefault, hostAllocPortable, hostAllocMapped, hostAllocWriteCombined = 0, 1, 2, 4

cudaDevAttrMaxThreadsPerBlock = 1
cudaDevAttrMaxSharedMemoryPerBlock = 8
cudaDevAttrWarpSize = 10
cudaDevAttrClockRate = 13
cudaDevAttrMultiProcessorCount = 16
cudaDevAttrComputeMode = 20
cudaDevAttrEccEnabled = 32
cudaDevAttrL2CacheSize = 38
cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81
cudaDevAttrMaxRegistersPerMultiprocessor = 82
cudaDevAttrMaxSharedMemoryPerBlockOptin = 97

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # attributes for which CuPy has no names
_SYSTEM_SHARED_BYTES = 1024  # the system's part of each block's share
_device = 0
_devices: list[HostGpu] = []
_contexts: dict[int, HostContext] = {}
_pinned: dict[int, ctypes.Array[ctypes.c_char]] = {}


def _seen() -> list[HostGpu]:
    """Return the devices found at the first call, as in a driver that is initialised once per process."""
    if not _devices:
        _devices.extend(visible(os.environ))
    return _devices


def context() -> HostContext:
    """Return this process's context on the current device, created by the first call that needs one."""
    if _device not in _contexts:
        made = HostContext(_seen()[_device])
        _contexts[_device] = made
        atexit.register(made.close)
    _contexts[_device].check()
    return _contexts[_device]


def driverGetVersion() -> int:
    """Return the version; 0 without a driver."""
    try:
        return int((_seen()[0].machine / "state" / "node" / "cuda_version").read_text("ascii"))
    except CUDARuntimeError:
        return 0


def runtimeGetVersion() -> int:
    return 12090


def getDeviceCount() -> int:
    return len(_seen())


def getDevice() -> int:
    _seen()
    return _device


def setDevice(device: int) -> None:
    global _device  # noqa: PLW0603 - the runtime has one current device per process
    if not 0 <= device < len(_seen()):
        raise CUDARuntimeError(101)
    _device = device


def _attributes(gpu: HostGpu) -> dict[int, int]:
    return {
        cudaDevAttrMaxThreadsPerBlock: 1024,
        cudaDevAttrMaxSharedMemoryPerBlock: 48 * 1024,
        cudaDevAttrWarpSize: 32,
        cudaDevAttrClockRate: 1_980_000,
        cudaDevAttrMultiProcessorCount: gpu.multiprocessors,
        cudaDevAttrComputeMode: gpu.number("compute_mode", 0),
        cudaDevAttrEccEnabled: gpu.number("ecc_mode", 0),
        cudaDevAttrL2CacheSize: 1024 * 1024,
        _COMPUTE_CAPABILITY_MAJOR: gpu.capability[0],
        _COMPUTE_CAPABILITY_MINOR: gpu.capability[1],
        cudaDevAttrMaxSharedMemoryPerMultiprocessor: gpu.shared_bytes + _SYSTEM_SHARED_BYTES,
        cudaDevAttrMaxRegistersPerMultiprocessor: 65536,
        cudaDevAttrMaxSharedMemoryPerBlockOptin: gpu.shared_bytes,
    }


def deviceGetAttribute(attrib: int, device: int) -> int:
    attributes = _attributes(_of(device))
    if attrib not in attributes:
        raise CUDARuntimeError(1)
    return attributes[attrib]


def _of(device: int) -> HostGpu:
    if not 0 <= device < len(_seen()):
        raise CUDARuntimeError(101)
    return _seen()[device]


def getDeviceProperties(device: int) -> dict[str, object]:
    gpu = _of(device)
    attributes = _attributes(gpu)
    return {
        "name": (gpu.text("name") or "").encode(),
        "totalGlobalMem": gpu.total,
        "multiProcessorCount": gpu.multiprocessors,
        "major": gpu.capability[0],
        "minor": gpu.capability[1],
        "sharedMemPerBlock": attributes[cudaDevAttrMaxSharedMemoryPerBlock],
        "sharedMemPerMultiprocessor": attributes[cudaDevAttrMaxSharedMemoryPerMultiprocessor],
        "sharedMemPerBlockOptin": gpu.shared_bytes,
        "regsPerBlock": 65536,
        "regsPerMultiprocessor": 65536,
        "l2CacheSize": attributes[cudaDevAttrL2CacheSize],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerMultiProcessor": 2048,
        "warpSize": 32,
        "clockRate": attributes[cudaDevAttrClockRate],
        "ECCEnabled": attributes[cudaDevAttrEccEnabled],
        "computeMode": attributes[cudaDevAttrComputeMode],
    }


def memGetInfo() -> tuple[int, int]:
    """Return (free, total) bytes; total is without the driver's reserve."""
    found = context()
    return found.free_bytes(), found.size


def malloc(size: int) -> int:
    return context().malloc(size)


def free(ptr: int) -> None:
    context().free(ptr)


def hostAlloc(size: int, flags: int) -> int:
    context()
    buffer = ctypes.create_string_buffer(size)
    _pinned[ctypes.addressof(buffer)] = buffer
    return ctypes.addressof(buffer)


def freeHost(ptr: int) -> None:
    context().finish()
    if _pinned.pop(ptr, None) is None:
        raise CUDARuntimeError(1)


def memset(ptr: int, value: int, size: int) -> None:
    memsetAsync(ptr, value, size, NULL_STREAM)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    found = context()
    found.put(stream, lambda: found.set_bytes(ptr, value, size))


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """Wait for the null stream and for those that it waits for; not for a non-blocking one."""
    memcpyAsync(dst, src, size, kind, NULL_STREAM)
    context().finish(NULL_STREAM)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    if kind not in range(5):
        raise CUDARuntimeError(21)
    found = context()
    found.put(stream, lambda: found.copy(dst, src, size))


def streamSynchronize(stream: int) -> None:
    context().finish(stream)


def deviceSynchronize() -> None:
    context().finish()
