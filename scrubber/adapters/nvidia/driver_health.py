"""One reading of a GPU's lasting health state, from its driver. Runs in a child.

Only readings are sent to the parent: :mod:`scrubber.domain.health.signals` decides what a condition means for the
device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pynvml

from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia.driver_description import links_of
from scrubber.adapters.nvidia.nvml import NvmlGpu

__all__ = [
    "read_conditions",
    "read_error_counters",
    "read_gauges",
    "recovery_action_name",
    "reset_required_condition",
    "scrub_on_free_condition",
]

_RECOVERY_ACTION = 230
"""Drivers from 565 on report what a GPU needs (``NVML_FI_DEV_GET_GPU_RECOVERY_ACTION``)."""
_RECOVERY = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain-p2p",
    4: "drain-and-reset",
    5: "imex",
    6: "bus-reset",
    7: "system-reboot",
}
_NVLINK_ERRORS = (38, 45, 52, 59)
"""CRC errors of flits, CRC errors of data, replays, recoveries: each summed over all links."""
_SLOWDOWNS = ((0x08, "hw-slowdown"), (0x40, "hw-thermal-slowdown"), (0x80, "power-brake"))
_MAX_RETIRED_PAGES = 64
"""How many pages the InfoROM can retire; beyond it there is no room (NVIDIA, GPU memory error management)."""
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}
_FABRIC_COMPLETED = 3
_TRUE = re.compile(rb"\bRMDisableScrubOnFree\b\s*[:=]\s*\"?(0x)?0*[1-9a-f]", re.IGNORECASE)


def read_gauges(gpu: NvmlGpu) -> Message:
    """Return single values; None where they do not apply."""
    heat = gpu.optional("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU)
    if heat is None:
        heat = gpu.optional("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
    return {
        "ecc_uncorrected": _ecc(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        "temperature_celsius": None if heat is None else int(heat),
        "recovery": recovery_action_name(gpu.fields([_RECOVERY_ACTION])[_RECOVERY_ACTION]),
    }


def recovery_action_name(action: int | None) -> str | None:
    """Return the name of the recovery action that the driver requests. An unknown action is not "none"."""
    return None if action is None else _RECOVERY.get(action, f"unknown-{action}")


def read_error_counters(gpu: NvmlGpu) -> Mapping[str, int]:
    """Return the driver's error counters by name, without those that do not apply."""
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    rows = gpu.optional("nvmlDeviceGetRemappedRows")
    links = [each for each in gpu.fields(_NVLINK_ERRORS).values() if each is not None]
    found: dict[str, int | None] = {
        "ecc_corrected": _ecc(gpu, corrected, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected_aggregate": _ecc(gpu, uncorrected, pynvml.NVML_AGGREGATE_ECC),
        "remapped_rows_correctable": None if rows is None else int(rows[0]),
        "remapped_rows_uncorrectable": None if rows is None else int(rows[1]),
        "retired_pages": _retired_pages(gpu),
        "pcie_replays": _number(gpu, "nvmlDeviceGetPcieReplayCounter"),
        "nvlink_errors": sum(links) if links else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def read_conditions(gpu: NvmlGpu, counters: Mapping[str, int]) -> Mapping[str, str]:
    """Return the lasting conditions of ``gpu`` by code, each with what was read."""
    found: dict[str, str] = {}
    for part in (_memory, _clocks, _pcie, _links, _modes):
        found.update(part(gpu))
    retired = counters.get("retired_pages", 0)
    if retired >= _MAX_RETIRED_PAGES:
        found["page-retirement-limit"] = f"{retired} pages retired; the limit is {_MAX_RETIRED_PAGES}"
    return found


def reset_required_condition() -> Mapping[str, str]:
    """Return the only condition that is known of a GPU that replies to nothing until it is reset."""
    return {"reset-required": "the driver does not respond for it until it is reset"}


def scrub_on_free_condition(proc_driver: Path) -> Mapping[str, str]:
    """Return a condition if the kernel module is configured not to clear the memory that a process frees."""
    try:
        parameters = (proc_driver / "params").read_bytes()
    except OSError:
        return {}
    found = _TRUE.search(parameters)
    return {} if found is None else {"scrub-on-free-disabled": "RMDisableScrubOnFree is set for the nvidia module"}


def _memory(gpu: NvmlGpu) -> Iterator[tuple[str, str]]:
    rows = gpu.optional("nvmlDeviceGetRemappedRows")
    if rows is not None and rows[2]:
        yield "row-remap-pending", "rows will be remapped by the next reset"
    if rows is not None and rows[3]:
        yield "row-remap-failure", "a row could not be remapped"
    if _number(gpu, "nvmlDeviceGetRetiredPagesPendingStatus"):
        yield "page-retirement-pending", "pages will be retired by the next reset"


def _clocks(gpu: NvmlGpu) -> Iterator[tuple[str, str]]:
    reasons = _number(gpu, "nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name that drivers before 535 know
        reasons = _number(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    for bit, code in _SLOWDOWNS:
        if reasons & bit:
            yield code, f"clocks are reduced, reasons {reasons:#x}"


def _pcie(gpu: NvmlGpu) -> Iterator[tuple[str, str]]:
    width, widest = _number(gpu, "nvmlDeviceGetCurrPcieLinkWidth"), _number(gpu, "nvmlDeviceGetMaxPcieLinkWidth")
    if width is not None and widest is not None and width < widest:
        yield "pcie-width", f"x{width} of x{widest}"
    if _number(gpu, "nvmlDeviceGetPerformanceState") != 0:  # an idle link slows down by design
        return
    speed = _number(gpu, "nvmlDeviceGetCurrPcieLinkGeneration")
    fastest = _number(gpu, "nvmlDeviceGetMaxPcieLinkGeneration")
    if speed is not None and fastest is not None and speed < fastest:
        yield "pcie-generation", f"generation {speed} of {fastest}"


def _links(gpu: NvmlGpu) -> Iterator[tuple[str, str]]:
    links = links_of(gpu)
    down = [link for link, active in links if not active]
    joined = len(down) < len(links)
    if joined and down:
        yield "nvlink-down", f"{_format_list(down)} of {len(links)} links"
    fabric = _fabric(gpu)
    if fabric is None:
        return
    state, status = fabric
    if state == _FABRIC_COMPLETED and status:
        yield "fabric-failed", f"registration ended with NVML error {status}"
    elif state in _FABRIC_STATES and state != _FABRIC_COMPLETED and joined:
        # A GPU without an active link is not part of a fabric, and waits for nothing.
        yield "fabric-failed", f"registration {_FABRIC_STATES[state]}"


def _fabric(gpu: NvmlGpu) -> tuple[int, int] | None:
    """Return the state and status of the GPU's registration with the NVLink fabric."""
    for structure, function in (
        ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
    ):
        made: Any = getattr(pynvml, structure, None)
        if made is None:
            continue
        info = made()
        if gpu.optional(function, pynvml.byref(info)) is not None:
            return int(info.state), int(info.status)
    return None


def _modes(gpu: NvmlGpu) -> Iterator[tuple[str, str]]:
    words = {0: "disabled", 1: "enabled"}
    for function, code in (("nvmlDeviceGetEccMode", "ecc-mode-pending"), ("nvmlDeviceGetMigMode", "mig-mode-pending")):
        modes = gpu.optional(function)
        if modes is not None and modes[0] != modes[1]:
            yield code, f"{words.get(modes[0], modes[0])}; {words.get(modes[1], modes[1])} after a reset"


def _retired_pages(gpu: NvmlGpu) -> int | None:
    causes = [
        gpu.optional("nvmlDeviceGetRetiredPages", cause) for cause in range(pynvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)
    ]
    known = [len(pages) for pages in causes if pages is not None]
    return sum(known) if known else None


def _ecc(gpu: NvmlGpu, error: int, counter: int) -> int | None:
    found = gpu.optional("nvmlDeviceGetTotalEccErrors", error, counter)
    return None if found is None else int(found)


def _number(gpu: NvmlGpu, function: str) -> int | None:
    found = gpu.optional(function)
    return None if found is None else int(found)


def _format_list(numbers: list[int]) -> str:
    return ", ".join(str(each) for each in numbers)
