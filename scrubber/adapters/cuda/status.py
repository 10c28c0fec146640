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

_NO_DRIVER = "install the driver, or load it"
_OLD_DRIVER = "install a newer driver; those of CUDA 12 and later will do"
_OLD_PROGRAM = "install a newer version of this program"
_BROKEN_PROGRAM = "install this program again"
_COMPILER = "the driver's package brings libnvidia-ptxjitcompiler; CUDA_DISABLE_PTX_JIT must not be set"
_WAIT_FOR_HOLDER = "it has to end first"
_KERNEL_LOG = "the kernel's log may say more"
_LOST = "what was under way is lost, and the kernel's log may say more"


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
    2: CudaStatusInfo("MemoryAllocation", "held", "the device's memory is taken", "somebody or something holds it"),
    3: CudaStatusInfo("InitializationError", "away", "the driver could not be initialised", _NO_DRIVER),
    34: CudaStatusInfo("StubLibrary", "away", "CUDA's library is a stub", "name the driver's own root directory"),
    35: CudaStatusInfo("InsufficientDriver", "away", "the driver is missing, or older than CUDA asks for", _NO_DRIVER),
    36: CudaStatusInfo("CallRequiresNewerDriver", "away", "the driver is older than CUDA asks for", _OLD_DRIVER),
    46: CudaStatusInfo("DevicesUnavailable", "held", "another process has a context on the device", _WAIT_FOR_HOLDER),
    100: CudaStatusInfo("NoDevice", "unreadable", "CUDA does not see the device", _KERNEL_LOG),
    101: CudaStatusInfo("InvalidDevice", "unreadable", "CUDA does not know the device", _KERNEL_LOG),
    200: CudaStatusInfo("InvalidKernelImage", "away", "the driver does not take the shipped kernels", _OLD_DRIVER),
    201: CudaStatusInfo("DeviceUninitialized", "unreadable", "the context is not valid any more", _LOST),
    209: CudaStatusInfo(
        "NoKernelImageForDevice", "away", "the shipped kernels do not run on this architecture", _OLD_PROGRAM
    ),
    214: CudaStatusInfo("ECCUncorrectable", "unreadable", "an ECC error could not be corrected", _LOST),
    216: CudaStatusInfo("DeviceAlreadyInUse", "held", "another process has the device for itself", _WAIT_FOR_HOLDER),
    218: CudaStatusInfo("InvalidPtx", "away", "the driver cannot compile the shipped kernels", _OLD_PROGRAM),
    220: CudaStatusInfo("NvlinkUncorrectable", "unreadable", "an NVLink error could not be corrected", _LOST),
    221: CudaStatusInfo("JitCompilerNotFound", "away", "the driver's compiler is missing", _COMPILER),
    222: CudaStatusInfo("UnsupportedPtxVersion", "away", "the driver is too old for the shipped kernels", _OLD_DRIVER),
    223: CudaStatusInfo("JitCompilationDisabled", "away", "compiling the shipped kernels is switched off", _COMPILER),
    226: CudaStatusInfo("Contained", "unreadable", "a hardware error was contained", _LOST),
    301: CudaStatusInfo("FileNotFound", "away", "the shipped kernels are not there", _BROKEN_PROGRAM),
    302: CudaStatusInfo(
        "SharedObjectSymbolNotFound", "away", "the driver's libraries do not fit together", _OLD_DRIVER
    ),
    303: CudaStatusInfo("SharedObjectInitFailed", "away", "a library of the driver's does not start", _OLD_DRIVER),
    304: CudaStatusInfo("OperatingSystem", "unreadable", "a system call of the driver failed", _KERNEL_LOG),
    500: CudaStatusInfo("SymbolNotFound", "away", "the shipped kernels lack one that is asked for", _BROKEN_PROGRAM),
    700: CudaStatusInfo("IllegalAddress", "unreadable", "a kernel met an illegal address", _LOST),
    701: CudaStatusInfo(
        "LaunchOutOfResources", "unreadable", "a kernel asked for more than the device has", _OLD_PROGRAM
    ),
    702: CudaStatusInfo("LaunchTimeout", "unreadable", "a kernel did not end in the driver's time", _LOST),
    709: CudaStatusInfo("ContextIsDestroyed", "unreadable", "the context was destroyed", _LOST),
    710: CudaStatusInfo("Assert", "unreadable", "a kernel found itself wrong", _LOST),
    714: CudaStatusInfo("HardwareStackError", "unreadable", "a kernel's stack broke", _LOST),
    715: CudaStatusInfo("IllegalInstruction", "unreadable", "a kernel met an illegal instruction", _LOST),
    716: CudaStatusInfo("MisalignedAddress", "unreadable", "a kernel met a misaligned address", _LOST),
    717: CudaStatusInfo("InvalidAddressSpace", "unreadable", "a kernel met an address of another kind", _LOST),
    718: CudaStatusInfo("InvalidPc", "unreadable", "a kernel lost its place", _LOST),
    719: CudaStatusInfo("LaunchFailure", "unreadable", "a kernel failed on the device", _LOST),
    800: CudaStatusInfo("NotPermitted", "held", "the device may not be used now", _WAIT_FOR_HOLDER),
    802: CudaStatusInfo(
        "SystemNotReady", "away", "the system is not ready", "machines with NVSwitch need Fabric Manager"
    ),
    803: CudaStatusInfo(
        "SystemDriverMismatch", "away", "driver and library are of different versions", "reboot the node"
    ),
    804: CudaStatusInfo("CompatNotSupportedOnDevice", "away", "the driver does not take this CUDA here", _OLD_DRIVER),
    999: CudaStatusInfo("Unknown", "unreadable", "the driver does not say what happened", _KERNEL_LOG),
}
"""The statuses that are known to occur; those of the runtime and of the driver have the same numbers here."""


def fault_for_status(status: int | None, cuda_message: str, action: str) -> Fault:
    """Return the fault for ``cuda_message``. ``status`` is None when CUDA's library was not even found."""
    if status is None:
        return Fault("away", f"{action}: CUDA cannot be used ({cuda_message}); {_NO_DRIVER}.")
    _, code, words, remedy = STATUSES.get(status, CudaStatusInfo("", "unreadable", "CUDA failed", _KERNEL_LOG))
    return Fault(code, f"{action}: {words} ({cuda_message}); {remedy}.")
