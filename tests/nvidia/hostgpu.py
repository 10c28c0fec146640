"""A GPU without hardware, as one computing process sees it: the existing devices and their properties.

The machine is a directory of attribute files (see ``README.md`` in this directory). A device is a GPU or a MIG instance;
attributes missing for an instance are taken from its GPU. Faults are attributes as well, read again at each use:

    wont_clear [OFFSET]           64 bytes return there after every write (default: in the middle)
    slow_clear SECONDS            the time for clearing all of the memory
    bad_page OFFSET [STATUS]      touching these 4 KiB ends the context with this status (default 214, ECC)
    sm_dead NUMBER...             SMs that are never given a block
    sm_stuck NUMBER OFFSET        a byte of this SM that does not keep what is written: in its shared memory, or beyond
                                  that in its registers
    context_bytes N               the memory of a context itself (default: one granule)
    granularity N                 the unit of memory allocation (default 2 MiB)
    multiprocessors, shared_memory    SMs (default 4), and bytes of shared memory of each (default 64 KiB)
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MESSAGES", "PAGE", "CUDARuntimeError", "HostGpu", "lives", "machine_of", "require_ready", "visible"]

PAGE: Final = 4096

MESSAGES: Final[Mapping[int, str]] = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    3: "cudaErrorInitializationError: initialization error",
    21: "cudaErrorInvalidMemcpyDirection: invalid copy direction for memcpy",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    46: "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    214: "cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
    301: "cudaErrorFileNotFound: file not found",
    500: "cudaErrorSymbolNotFound: named symbol not found",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    716: "cudaErrorMisalignedAddress: misaligned address",
    719: "cudaErrorLaunchFailure: unspecified launch failure",
    802: "cudaErrorSystemNotReady: system not yet initialized",
    803: "cudaErrorSystemDriverMismatch: system has unsupported display driver / cuda driver combination",
    999: "cudaErrorUnknown: unknown error",
}

_LOST, _MISMATCH = 15, 18  # NVML's codes, with which the machine describes faults


class CUDARuntimeError(RuntimeError):
    """The error of a call to the runtime; ``status`` is its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(MESSAGES.get(status, f"status {status}"))

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[int]]:
        return (type(self), (self.status,))


@dataclass(frozen=True, slots=True)
class HostGpu:
    """A device of the world. ``directory`` contains its attributes, memory and SMs, ``gpu`` those of the whole GPU."""

    machine: Path
    gpu: Path
    directory: Path

    def text(self, attribute: str) -> str | None:
        """Return the attribute's value; None when it does not exist."""
        for directory in (self.directory, self.gpu):
            try:
                return (directory / attribute).read_text("utf-8").strip()
            except FileNotFoundError:
                continue
        return None

    def numbers(self, attribute: str) -> list[int] | None:
        found = self.text(attribute)
        return None if found is None else [int(word, 0) for word in found.split()]

    def number(self, attribute: str, default: int) -> int:
        return (self.numbers(attribute) or [default])[0]

    @property
    def uuid(self) -> str:
        return self.text("uuid") or ""

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def total(self) -> int:
        """The bytes that contexts can share: without the driver's reserve and memory in use without a process."""
        if self.number("total", 0) == 0:
            return self.memory.stat().st_size
        expected = self.number("total", 0) - self.number("reserved", 0)
        return min(self.memory.stat().st_size, expected) - self.number("used", 0)

    @property
    def granularity(self) -> int:
        return self.number("granularity", 2 * 1024 * 1024)

    @property
    def multiprocessors(self) -> int:
        return self.number("multiprocessors", 4)

    @property
    def shared_bytes(self) -> int:
        return self.number("shared_memory", 64 * 1024)

    @property
    def capability(self) -> tuple[int, int]:
        major, _, minor = (self.text("compute_capability") or "9.0").partition(".")
        return int(major), int(minor or 0)

    @property
    def instance(self) -> tuple[int, int] | None:
        """The ids of GPU instance and compute instance; None for a whole GPU."""
        return None if self.directory == self.gpu else (self.number("gi", 0), self.number("ci", 0))

    @property
    def node(self) -> Path:
        return self.machine / "dev" / f"nvidia{self.number('minor', 0)}"


def lives(record: Path) -> bool:
    """Return whether the process that created the file ``record`` still exists: it holds a lock on it until it ends."""
    try:
        descriptor = os.open(record, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def machine_of(environment: Mapping[str, str]) -> Path:
    """Return the machine of this process.

    Raises:
        CUDARuntimeError: 35 when there is none, or no driver in it; 803 when driver and library do not match.
    """
    named = environment.get("SCRUBBER_STANDIN_WORLD")
    if not named or not (Path(named) / "state" / "node").is_dir():
        raise CUDARuntimeError(35)
    machine = Path(named)
    failure = machine / "state" / "node" / "init_error"
    if failure.exists():
        raise CUDARuntimeError(803 if int(failure.read_text("ascii")) == _MISMATCH else 35)
    return machine


def require_ready(machine: Path) -> None:
    """Raise CUDARuntimeError 802 while the GPUs of a confidential-computing node are not ready."""
    state = machine / "state" / "node" / "gpus_ready"
    if state.exists() and state.read_text("ascii").strip() != "1":
        raise CUDARuntimeError(802)


def visible(environment: Mapping[str, str]) -> list[HostGpu]:
    """Return the devices that ``CUDA_VISIBLE_DEVICES`` makes visible, in its order; all of them when it is unset.

    As in the real driver, the list ends at the first unknown name.

    Raises:
        CUDARuntimeError: as :func:`machine_of` and :func:`require_ready`; 100 when no device is left; 999 when one needs a reset.
    """
    machine = machine_of(environment)
    require_ready(machine)
    gpus = [_whole(machine, each) for each in sorted((machine / "state" / "gpus").glob("[0-9]*"), key=_address)]
    found: list[HostGpu] = []
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        found = [device for gpu in gpus if (device := _computing(gpu)) is not None]
    else:
        for name in filter(None, (each.strip() for each in names.split(","))):
            device = _named(gpus, name)
            if device is None:
                break
            found.append(device)
    present = [device for device in found if _error(device) != _LOST]
    if not present:
        raise CUDARuntimeError(100)
    if any(_error(device) is not None for device in present):
        raise CUDARuntimeError(999)
    return present


def _whole(machine: Path, directory: Path) -> HostGpu:
    return HostGpu(machine, directory, directory)


def _address(directory: Path) -> str:
    pci = directory / "pci"
    return pci.read_text("ascii").lower() if pci.exists() else directory.name


def _error(device: HostGpu) -> int | None:
    found = device.numbers("error")
    return found[0] if found else None


def _instances(gpu: HostGpu) -> list[HostGpu]:
    found = sorted(gpu.directory.glob("mig/[0-9]*"), key=lambda each: int(each.name))
    return [HostGpu(gpu.machine, gpu.gpu, each) for each in found]


def _computing(gpu: HostGpu) -> HostGpu | None:
    """Return the device that computes for a named GPU: itself, or with MIG its first instance."""
    return gpu if gpu.number("mig_mode", 0) == 0 else next(iter(_instances(gpu)), None)


def _named(gpus: list[HostGpu], name: str) -> HostGpu | None:
    if name.startswith("MIG-"):
        return next((each for gpu in gpus for each in _instances(gpu) if each.uuid == name), None)
    if re.fullmatch("[0-9]+", name):
        return _computing(gpus[int(name)]) if int(name) < len(gpus) else None
    matching = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
    return _computing(matching[0]) if len(matching) == 1 else None
