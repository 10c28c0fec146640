"""Typed access to NVML with strict error handling: the only way from a child to pynvml's functions.

Promise: a request about one GPU attaches that GPU and no other, every error becomes one
:class:`~scrubber.adapters.nvidia.errors.NvmlFault`, and a value that does not apply is None, never a number.

Functions are given by name, because an older pynvml lacks some and an older driver lacks others: both count as "not
applicable". Runs in children only, and loads nothing that they do not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from scrubber.adapters.children.child import Fault
from scrubber.adapters.nvidia.errors import DriverUnavailable, NvmlFault

__all__ = ["NvmlGpu", "NvmlInstance", "NvmlMemory", "NvmlProcess", "NvmlSession"]

_FUNCTION_NOT_FOUND = 13
_INVALID_ARGUMENT = 2
_INSUFFICIENT_SIZE = 7
_NOT_FOUND = 6
_STALE = frozenset({1, 9, 18})
"""NVML's error codes when the driver that it was initialised with is gone."""
_LIST_UNSUPPORTED = frozenset({_INVALID_ARGUMENT, _NOT_FOUND, 28})
"""NVML's error codes for a GPU that was not present when it was initialised."""
_NO_INSTANCE = 0xFFFFFFFF
_NO_GPUS = 1
"""``NVML_INIT_FLAG_NO_GPUS``: a driver without a GPU, as when all are passed through, is not an error.

A GPU is initialised when its handle is requested, and not before. ``NVML_INIT_FLAG_NO_ATTACH`` must not be set: with
it, drivers up to 610 find no GPU at all, and later ones find none until it is unset.
"""
_MAX_ATTEMPTS = 4

_PROCESS_LISTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
    "mps": ("nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
}
"""The older functions first: their rows are the same in every driver.

In drivers 535.43 to 535.86 the rows of the newer functions are longer, which no version number reveals, so that every
PID but the first would be read from the wrong offset.
"""


@dataclass(frozen=True, slots=True)
class NvmlMemory:
    """Bytes.

    ``reserved`` is what the driver keeps for itself; None where it is not reported, and is then part of ``used``.
    """

    total: int
    reserved: int | None
    used: int


@dataclass(frozen=True, slots=True)
class NvmlProcess:
    """One row of a process list.

    ``memory`` is None where the driver cannot report it; so are ``gi`` and ``ci`` without MIG.
    """

    pid: int
    memory: int | None
    kind: str
    gi: int | None
    ci: int | None


class _NvmlHandle:
    """An object with an NVML handle. ``label`` names it in messages."""

    def __init__(self, handle: Any, about: str) -> None:
        self.handle = handle
        self.label = about

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``function`` for this handle, and return its result.

        Raises:
            NvmlFault: the call did not succeed.
        """
        return _call(self.label, function, self.handle, *arguments)

    def optional(self, function: str, *arguments: Any) -> Any:
        """Call ``function`` as :meth:`call` does; return None where it does not apply."""
        try:
            return self.call(function, *arguments)
        except NvmlFault as fault:
            if fault.not_applicable:
                return None
            raise

    def checked(self, function: str, *arguments: Any) -> None:
        """Call the library directly, for functions whose Python wrapper drops the error."""
        _check(self.label, function, self.handle, *arguments)

    def uuid(self) -> str:
        return str(self.call("nvmlDeviceGetUUID"))

    def memory(self) -> NvmlMemory:
        with_reserved = self.optional("nvmlDeviceGetMemoryInfo", getattr(pynvml, "nvmlMemory_v2", None))
        if with_reserved is not None:
            reserved = getattr(with_reserved, "reserved", None)
            return NvmlMemory(
                int(with_reserved.total), None if reserved is None else int(reserved), int(with_reserved.used)
            )
        plain = self.call("nvmlDeviceGetMemoryInfo")
        return NvmlMemory(int(plain.total), None, int(plain.used))


class NvmlInstance(_NvmlHandle):
    """A MIG instance: a compute instance of a GPU instance."""

    def __init__(self, handle: Any, about: str, index: int) -> None:
        super().__init__(handle, about)
        self.index = index

    def ids(self) -> tuple[int, int]:
        """Return the ids of its GPU instance and its compute instance."""
        return int(self.call("nvmlDeviceGetGpuInstanceId")), int(self.call("nvmlDeviceGetComputeInstanceId"))


class NvmlGpu(_NvmlHandle):
    """One GPU, identified by its address on the PCI bus."""

    def __init__(self, handle: Any, address: str) -> None:
        super().__init__(handle, f"GPU {address}")
        self.address = address

    def instances(self) -> tuple[NvmlInstance, ...]:
        """Return its MIG instances, in NVML's order; none where MIG is off or unknown."""
        most = self.optional("nvmlDeviceGetMaxMigDeviceCount") or 0
        found: list[NvmlInstance] = []
        for index in range(int(most)):
            try:
                handle = self.optional("nvmlDeviceGetMigDeviceHandleByIndex", index)
            except NvmlFault as fault:
                if fault.nvml_code not in (_NOT_FOUND, _INVALID_ARGUMENT):
                    raise
                handle = None
            if handle is not None:
                found.append(NvmlInstance(handle, f"{self.label}, MIG instance {index}", index))
        return tuple(found)

    def fields(self, field_ids: Iterable[int]) -> dict[int, int | None]:
        """Return several values from one call, by field id; None for those that do not apply."""
        ids = list(field_ids)
        answers = self.optional("nvmlDeviceGetFieldValues", ids)
        if answers is None:
            return dict.fromkeys(ids)
        values: dict[int, int | None] = {}
        for each, answer in zip(ids, answers, strict=True):
            values[each] = _field_value(f"{self.label}, field {each}", answer)
        return values

    def processes(self) -> tuple[NvmlProcess, ...]:
        """Return the processes of all three lists.

        A list that this driver lacks is skipped, but the compute list is required.
        """
        lists = {kind: self._processes(functions) for kind, functions in _PROCESS_LISTS.items()}
        if lists["compute"] is None:
            raise Fault("unreadable", f"{self.label}: the driver does not list the processes that use it.")
        return tuple(_entry(kind, row) for kind, rows in lists.items() if rows is not None for row in rows)

    def _processes(self, functions: Sequence[str]) -> Sequence[Any] | None:
        for function in functions:
            rows = self._read_stable_list(function)
            if rows is not None:
                return rows
        return None

    def _read_stable_list(self, function: str) -> Sequence[Any] | None:
        """Return a process list. It may grow between the two calls that read it: then both calls are repeated."""
        for tries_left in reversed(range(_MAX_ATTEMPTS)):
            try:
                rows: Sequence[Any] | None = self.optional(function)
            except NvmlFault as fault:
                if fault.nvml_code != _INSUFFICIENT_SIZE or not tries_left:
                    raise
            else:
                return rows
        return None


class NvmlSession:
    """NVML in this process. Initialising it attaches no GPU; requesting a GPU does.

    It is initialised again when the driver was reloaded, and when a GPU was removed from the bus and rediscovered:
    older handles then refer to something that no longer exists.
    """

    def __init__(self, proc_driver: Path, pci_devices: Path) -> None:
        self._proc_driver = proc_driver
        self._pci_devices = pci_devices
        self._driver: int | None = None
        self._open = False
        self._attached: dict[str, int | None] = {}
        self._missing: dict[str, int | None] = {}

    def open(self) -> None:
        """Initialise NVML unless it is initialised.

        Raises:
            DriverUnavailable: the driver is missing, or does not match its library.
        """
        driver = _inode(self._proc_driver)
        if self._open and driver != self._driver:
            self.close()
        if self._open:
            return
        try:
            pynvml.nvmlInitWithFlags(_NO_GPUS)
        except pynvml.NVMLError as error:
            raise DriverUnavailable(int(error.value)) from error
        self._open, self._driver = True, driver

    def close(self) -> None:
        """Release every GPU."""
        if self._open:
            with suppress(pynvml.NVMLError):  # the driver may be gone already
                pynvml.nvmlShutdown()
        self._open = False
        self._attached.clear()

    def system(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function that is about no GPU."""
        self.open()
        return _call("The driver", function, *arguments)

    def system_checked(self, function: str, *arguments: Any) -> None:
        """Call the library directly, for functions whose Python wrapper drops the error."""
        self.open()
        _check("The driver", function, *arguments)

    def system_optional(self, function: str) -> Any:
        try:
            return self.system(function)
        except NvmlFault as fault:
            if fault.not_applicable:
                return None
            raise

    def gpu(self, address: str) -> NvmlGpu:
        """Return the GPU at ``address``, and attach it if it was not attached.

        Raises:
            DriverUnavailable: as :meth:`open`.
            NvmlFault: there is none, it is lost, or it needs a reset.
        """
        place = _inode(self._pci_devices / address)
        if self._attached.get(address, place) != place:
            self.close()
        self.open()
        try:
            handle = _handle(address)
        except NvmlFault as fault:
            if not self._should_retry(fault, address, place):
                raise
            self.close()
            self.open()
            handle = _handle(address)
            self._missing.pop(address, None)
        self._attached[address] = place
        return NvmlGpu(handle, address)

    def _should_retry(self, fault: NvmlFault, address: str, place: int | None) -> bool:
        """Retry once for each time that the device appears: initialising NVML again detaches the other GPUs."""
        if fault.nvml_code in _STALE:
            return True
        if fault.nvml_code not in _LIST_UNSUPPORTED or self._missing.get(address, -1) == place:
            return False
        self._missing[address] = place
        return True


def _handle(address: str) -> Any:
    return _call(f"GPU {address}", "nvmlDeviceGetHandleByPciBusId", address.encode("ascii"))


def _call(about: str, function: str, *arguments: Any) -> Any:
    wrapper = getattr(pynvml, function, None)
    if wrapper is None:
        raise NvmlFault(_FUNCTION_NOT_FOUND, f"{about}, {function}")
    try:
        return wrapper(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlFault(int(error.value), f"{about}, {function}") from error
    except UnicodeDecodeError as error:
        raise Fault("unreadable", f"{about}, {function}: the driver returned data that is not text.") from error


def _check(about: str, function: str, *arguments: Any) -> None:
    try:
        status = int(pynvml._nvmlGetFunctionPointer(function)(*arguments))
    except pynvml.NVMLError as error:
        status = int(error.value)
    if status:
        raise NvmlFault(status, f"{about}, {function}")


def _field_value(about: str, answer: Any) -> int | None:
    if answer.nvmlReturn:
        fault = NvmlFault(int(answer.nvmlReturn), about)
        if fault.not_applicable or fault.nvml_code == _INVALID_ARGUMENT:  # a field that this driver does not know
            return None
        raise fault
    member = {
        pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        getattr(pynvml, "NVML_VALUE_TYPE_UNSIGNED_SHORT", 6): "usVal",
    }.get(int(answer.valueType))
    if member is None:
        raise Fault("unreadable", f"{about}: the driver returned a type that this service does not know.")
    return int(getattr(answer.value, member))


def _entry(kind: str, row: Any) -> NvmlProcess:
    memory = row.usedGpuMemory
    return NvmlProcess(
        int(row.pid),
        None if memory is None else int(memory),
        kind,
        _id(row, "gpuInstanceId"),
        _id(row, "computeInstanceId"),
    )


def _id(row: Any, name: str) -> int | None:
    found = int(getattr(row, name, _NO_INSTANCE))
    return None if found == _NO_INSTANCE else found


def _inode(path: Path) -> int | None:
    """Return the inode, as the identity of the file: one that the kernel creates again has another inode."""
    try:
        return path.stat().st_ino
    except OSError:
        return None
