"""What each CUDA status means to the caller, decided in one place.

Promise: a status in no table makes the device unreadable, never clean; and a mismatch of the driver, its library and
the shipped kernels is attributed to no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from scrubber.adapters.children.child import Fault

__all__ = ["MEMORY_FULL", "STATUSES", "CudaStatusInfo", "fault_for_status"]

MEMORY_FULL = 2

_NO_DRIVER = "install or load the driver"
_OLD_DRIVER = "install a newer driver (for CUDA 12 or later)"
_OLD_PROGRAM = "install a newer version of this program"
_BROKEN_PROGRAM = "reinstall this program"
_COMPILER = "the driver's package brings libnvidia-ptxjitcompiler; CUDA_DISABLE_PTX_JIT must not be set"
_WAIT_FOR_HOLDER = "wait until the process that uses it has ended"
_KERNEL_LOG = "check the kernel log"
_LOST = "the work in progress is lost; check the kernel log"


class CudaStatusInfo(NamedTuple):
    """What a status means here.

    Attributes:
        name: CUDA's own name, without its ``cudaError``.
        code: one of :data:`scrubber.adapters.children.request_pool.FAULT_TYPES`.
        message, remedy: what is wrong, and what to do.
    """

    name: str
    code: str
    message: str
    remedy: str


STATUSES: Mapping[int, CudaStatusInfo] = {
    2: CudaStatusInfo("MemoryAllocation", "held", "no device memory is free", "wait until its holder frees it"),
    3: CudaStatusInfo("InitializationError", "away", "the driver could not be initialised", _NO_DRIVER),
    34: CudaStatusInfo("StubLibrary", "away", "CUDA's library is a stub", "pass the driver's root directory"),
    35: CudaStatusInfo("InsufficientDriver", "away", "the driver is missing, or older than CUDA requires", _NO_DRIVER),
    36: CudaStatusInfo("CallRequiresNewerDriver", "away", "the driver is older than CUDA requires", _OLD_DRIVER),
    46: CudaStatusInfo("DevicesUnavailable", "held", "another process has a context on the device", _WAIT_FOR_HOLDER),
    100: CudaStatusInfo("NoDevice", "unreadable", "CUDA does not see the device", _KERNEL_LOG),
    101: CudaStatusInfo("InvalidDevice", "unreadable", "CUDA does not know the device", _KERNEL_LOG),
    200: CudaStatusInfo("InvalidKernelImage", "away", "the driver does not accept the bundled kernels", _OLD_DRIVER),
    201: CudaStatusInfo("DeviceUninitialized", "unreadable", "the context is no longer valid", _LOST),
    209: CudaStatusInfo(
        "NoKernelImageForDevice", "away", "the bundled kernels do not support this architecture", _OLD_PROGRAM
    ),
    214: CudaStatusInfo("ECCUncorrectable", "unreadable", "an ECC error could not be corrected", _LOST),
    216: CudaStatusInfo("DeviceAlreadyInUse", "held", "another process uses the device exclusively", _WAIT_FOR_HOLDER),
    218: CudaStatusInfo("InvalidPtx", "away", "the driver cannot compile the bundled kernels", _OLD_PROGRAM),
    220: CudaStatusInfo("NvlinkUncorrectable", "unreadable", "an NVLink error could not be corrected", _LOST),
    221: CudaStatusInfo("JitCompilerNotFound", "away", "the driver's compiler is missing", _COMPILER),
    222: CudaStatusInfo("UnsupportedPtxVersion", "away", "the driver is too old for the bundled kernels", _OLD_DRIVER),
    223: CudaStatusInfo("JitCompilationDisabled", "away", "compilation of the bundled kernels is disabled", _COMPILER),
    226: CudaStatusInfo("Contained", "unreadable", "a hardware error was contained", _LOST),
    301: CudaStatusInfo("FileNotFound", "away", "the bundled kernels are missing", _BROKEN_PROGRAM),
    302: CudaStatusInfo("SharedObjectSymbolNotFound", "away", "the driver's libraries do not match", _OLD_DRIVER),
    303: CudaStatusInfo("SharedObjectInitFailed", "away", "a library of the driver cannot be initialised", _OLD_DRIVER),
    304: CudaStatusInfo("OperatingSystem", "unreadable", "a system call of the driver failed", _KERNEL_LOG),
    500: CudaStatusInfo("SymbolNotFound", "away", "a requested kernel is not among the bundled ones", _BROKEN_PROGRAM),
    700: CudaStatusInfo("IllegalAddress", "unreadable", "a kernel accessed an illegal address", _LOST),
    701: CudaStatusInfo(
        "LaunchOutOfResources", "unreadable", "a kernel requested more resources than the device has", _OLD_PROGRAM
    ),
    702: CudaStatusInfo("LaunchTimeout", "unreadable", "a kernel exceeded the driver's time limit", _LOST),
    709: CudaStatusInfo("ContextIsDestroyed", "unreadable", "the context was destroyed", _LOST),
    710: CudaStatusInfo("Assert", "unreadable", "an assertion of a kernel failed", _LOST),
    714: CudaStatusInfo("HardwareStackError", "unreadable", "a kernel's stack is corrupted", _LOST),
    715: CudaStatusInfo("IllegalInstruction", "unreadable", "a kernel executed an illegal instruction", _LOST),
    716: CudaStatusInfo("MisalignedAddress", "unreadable", "a kernel accessed a misaligned address", _LOST),
    717: CudaStatusInfo(
        "InvalidAddressSpace", "unreadable", "a kernel accessed an address in the wrong address space", _LOST
    ),
    718: CudaStatusInfo("InvalidPc", "unreadable", "a kernel has an invalid program counter", _LOST),
    719: CudaStatusInfo("LaunchFailure", "unreadable", "a kernel failed on the device", _LOST),
    800: CudaStatusInfo("NotPermitted", "held", "the device may not be used now", _WAIT_FOR_HOLDER),
    802: CudaStatusInfo(
        "SystemNotReady",
        "away",
        "the system is not ready",
        "machines with NVSwitch need Fabric Manager; in a confidential-computing mode the GPUs must be set ready",
    ),
    803: CudaStatusInfo(
        "SystemDriverMismatch", "away", "driver and library are of different versions", "reboot the node"
    ),
    804: CudaStatusInfo(
        "CompatNotSupportedOnDevice",
        "away",
        "the driver does not support this CUDA version on this device",
        _OLD_DRIVER,
    ),
    999: CudaStatusInfo("Unknown", "unreadable", "the driver reports an unknown error", _KERNEL_LOG),
}
"""The statuses that are known to occur; those of the runtime and of the driver have the same numbers here."""


def fault_for_status(status: int | None, cuda_message: str, action: str) -> Fault:
    """Return the fault for ``cuda_message``. ``status`` is None when CUDA's library was not even found."""
    if status is None:
        return Fault("away", f"{action}: CUDA cannot be used ({cuda_message}); {_NO_DRIVER}.")
    _, code, words, remedy = STATUSES.get(status, CudaStatusInfo("", "unreadable", "CUDA failed", _KERNEL_LOG))
    return Fault(code, f"{action}: {words} ({cuda_message}); {remedy}.")
