"""A GPU's settings as names and texts: the present values, the driver's defaults, and how values are written.

Runs in a child. There is one :class:`NvmlSetting` per name; a setting that a GPU or its driver lacks is in no reply.
NVML does not report locked clocks, so they can only be lifted. Every restore does that, and clears the list of
processes that were accounted for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from scrubber.adapters.children.child import Fault
from scrubber.adapters.nvidia.errors import NvmlFault
from scrubber.adapters.nvidia.nvml import NvmlGpu
from scrubber.adapters.nvidia.setting_values import (
    ACCESS_VALUES,
    COMPUTE_VALUES,
    NO_OFFSETS,
    SWITCH_VALUES,
    format_watts,
    parse_choice,
    parse_clocks,
    parse_offsets,
    parse_watts,
)

__all__ = ["COMPUTE_MODE", "PERSISTENCE_MODE", "SETTINGS", "NvmlSetting", "read_defaults_and_values", "restore"]

_OFFSET_CLOCKS = {"graphics": pynvml.NVML_CLOCK_GRAPHICS, "memory": pynvml.NVML_CLOCK_MEM}
_RESET_FUNCTIONS = (
    "nvmlDeviceResetGpuLockedClocks",
    "nvmlDeviceResetMemoryLockedClocks",
    "nvmlDeviceClearAccountingPids",
)


@dataclass(frozen=True, slots=True)
class NvmlSetting:
    """One setting.

    Attributes:
        read: returns the value and the driver's default; None where the GPU lacks the setting.
        write: sets the value to a text. Raises ``ValueError`` for a text that is not a value of the setting.
    """

    name: str
    read: Callable[[NvmlGpu], tuple[str, str] | None]
    write: Callable[[NvmlGpu, str], None]


def read_defaults_and_values(gpu: NvmlGpu) -> tuple[dict[str, str], dict[str, str]]:
    """Return the driver's defaults and the present values, under the same names."""
    defaults: dict[str, str] = {}
    values: dict[str, str] = {}
    for setting in SETTINGS:
        found = setting.read(gpu)
        if found is not None:
            values[setting.name], defaults[setting.name] = found
    return defaults, values


# See docs/decisions/0025-device-settings.md.
def restore(gpu: NvmlGpu, expected: Mapping[str, str]) -> dict[str, str]:
    """Write the values that differ from ``expected``, and read back every setting in it.

    Raises:
        Fault: a value is not one of the setting's, or the driver rejects it.
    """
    after: dict[str, str] = {}
    for setting in SETTINGS:
        text = expected.get(setting.name)
        found = None if text is None else setting.read(gpu)
        if text is None or found is None:
            continue
        if found[0] != text:
            _write(gpu, setting, text)
        read_back = setting.read(gpu)
        if read_back is not None:
            after[setting.name] = read_back[0]
    _reset_locked_clocks(gpu)
    return after


def _write(gpu: NvmlGpu, setting: NvmlSetting, text: str) -> None:
    try:
        setting.write(gpu, text)
    except ValueError as error:
        raise Fault("unreadable", f"{gpu.label}: {text!r} is not a value of {setting.name}: {error}.") from error
    except NvmlFault as fault:
        if not fault.not_applicable:
            raise


def _reset_locked_clocks(gpu: NvmlGpu) -> None:
    """Reset the settings that have no getter, without being requested to."""
    for function in _RESET_FUNCTIONS:
        gpu.optional(function)


def _choice(name: str, getter: str, setter: str, words: Mapping[int, str], default: str | None) -> NvmlSetting:
    """Build a setting with a few named values.

    Without a ``default`` the operator decides: its default is the present value.
    """

    def read(gpu: NvmlGpu) -> tuple[str, str] | None:
        found = gpu.optional(getter)
        if found is None:
            return None
        word = words.get(int(found), f"unknown-{int(found)}")
        return word, word if default is None else default

    def write(gpu: NvmlGpu, text: str) -> None:
        gpu.call(setter, parse_choice(words, text))

    return NvmlSetting(name, read, write)


def _restriction(name: str, which: int, default: str) -> NvmlSetting:
    def read(gpu: NvmlGpu) -> tuple[str, str] | None:
        found = gpu.optional("nvmlDeviceGetAPIRestriction", which)
        return None if found is None else (ACCESS_VALUES.get(int(found), f"unknown-{int(found)}"), default)

    def write(gpu: NvmlGpu, text: str) -> None:
        gpu.call("nvmlDeviceSetAPIRestriction", which, parse_choice(ACCESS_VALUES, text))

    return NvmlSetting(name, read, write)


def _read_power(gpu: NvmlGpu) -> tuple[str, str] | None:
    limit, default = (gpu.optional(f"nvmlDeviceGetPowerManagement{each}") for each in ("Limit", "DefaultLimit"))
    return None if limit is None or default is None else (format_watts(int(limit)), format_watts(int(default)))


def _write_power(gpu: NvmlGpu, text: str) -> None:
    gpu.call("nvmlDeviceSetPowerManagementLimit", parse_watts(text))


def _read_clocks(gpu: NvmlGpu) -> tuple[str, str] | None:
    values = _clock_pair(gpu, "nvmlDeviceGetApplicationsClock")
    defaults = _clock_pair(gpu, "nvmlDeviceGetDefaultApplicationsClock")
    return None if values is None or defaults is None else (values, defaults)


def _clock_pair(gpu: NvmlGpu, function: str) -> str | None:
    memory, graphics = (gpu.optional(function, each) for each in (pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_GRAPHICS))
    return None if memory is None or graphics is None else f"{int(memory)},{int(graphics)}"


def _write_clocks(gpu: NvmlGpu, text: str) -> None:
    if text == _clock_pair(gpu, "nvmlDeviceGetDefaultApplicationsClock"):
        gpu.call("nvmlDeviceResetApplicationsClocks")
        return
    memory, graphics = parse_clocks(text)
    gpu.call("nvmlDeviceSetApplicationsClocks", memory, graphics)


def _read_boost(gpu: NvmlGpu) -> tuple[str, str] | None:
    found = gpu.optional("nvmlDeviceGetAutoBoostedClocksEnabled")
    return (
        None
        if found is None
        else (SWITCH_VALUES.get(found[0], str(found[0])), SWITCH_VALUES.get(found[1], str(found[1])))
    )


def _write_boost(gpu: NvmlGpu, text: str) -> None:
    gpu.call("nvmlDeviceSetAutoBoostedClocksEnabled", parse_choice(SWITCH_VALUES, text))


def _read_ecc(gpu: NvmlGpu) -> tuple[str, str] | None:
    """Read the mode after the next reset: the one that a tenant can have changed, and that we can write."""
    modes, default = gpu.optional("nvmlDeviceGetEccMode"), gpu.optional("nvmlDeviceGetDefaultEccMode")
    if modes is None or default is None:
        return None
    return SWITCH_VALUES.get(modes[1], str(modes[1])), SWITCH_VALUES.get(default[0], str(default[0]))


def _write_ecc(gpu: NvmlGpu, text: str) -> None:
    gpu.call("nvmlDeviceSetEccMode", parse_choice(SWITCH_VALUES, text))


def _read_offsets(gpu: NvmlGpu) -> tuple[str, str] | None:
    offsets = _offsets(gpu)
    if offsets is None:
        return None
    off = [f"{clock} P{pstate} {value:+d}" for (clock, pstate), value in offsets.items() if value]
    return ", ".join(off) or NO_OFFSETS, NO_OFFSETS


def _write_offsets(gpu: NvmlGpu, text: str) -> None:
    offsets = parse_offsets(text)
    for place, value in (_offsets(gpu) or {}).items():
        if value != offsets.get(place, 0):
            clock, pstate = place
            gpu.checked("nvmlDeviceSetClockOffsets", ctypes.byref(_offset(clock, pstate, offsets.get(place, 0))))


def _offsets(gpu: NvmlGpu) -> dict[tuple[str, int], int] | None:
    """Return MHz by clock and performance state; None where there are none."""
    found: dict[tuple[str, int], int] = {}
    for pstate in _performance_states(gpu):
        for clock in _OFFSET_CLOCKS:
            info = _offset(clock, pstate)
            try:
                # pynvml's own function drops the error, and would return 0 for a GPU that is lost.
                gpu.checked("nvmlDeviceGetClockOffsets", ctypes.byref(info))
            except NvmlFault as fault:
                if not fault.not_applicable and fault.nvml_code != 2:  # a clock that this state does not have
                    raise
            else:
                found[clock, pstate] = int(info.clockOffsetMHz)
    return found or None


def _offset(clock: str, pstate: int, value: int = 0) -> Any:
    info = pynvml.c_nvmlClockOffset_t()
    info.version = pynvml.nvmlClockOffset_v1
    info.type, info.pstate, info.clockOffsetMHz = _OFFSET_CLOCKS[clock], pstate, value
    return info


def _performance_states(gpu: NvmlGpu) -> Iterable[int]:
    found = gpu.optional("nvmlDeviceGetSupportedPerformanceStates")
    return (0,) if found is None else [int(each) for each in found]


COMPUTE_MODE = _choice(
    "compute_mode", "nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode", COMPUTE_VALUES, default="default"
)

PERSISTENCE_MODE = _choice(
    "persistence_mode", "nvmlDeviceGetPersistenceMode", "nvmlDeviceSetPersistenceMode", SWITCH_VALUES, default=None
)
"""Decided by the operator: its default is the present value, so only a policy that names it restores it."""

SETTINGS: tuple[NvmlSetting, ...] = (
    COMPUTE_MODE,
    PERSISTENCE_MODE,
    NvmlSetting("power_limit_watts", _read_power, _write_power),
    NvmlSetting("application_clocks", _read_clocks, _write_clocks),
    NvmlSetting("clock_offsets", _read_offsets, _write_offsets),
    NvmlSetting("auto_boost", _read_boost, _write_boost),
    _choice(
        "accounting_mode",
        "nvmlDeviceGetAccountingMode",
        "nvmlDeviceSetAccountingMode",
        SWITCH_VALUES,
        default="disabled",
    ),
    _restriction("api_restriction_application_clocks", 0, "restricted"),
    _restriction("api_restriction_auto_boosted_clocks", 1, "unrestricted"),
    NvmlSetting("ecc_mode", _read_ecc, _write_ecc),
)
