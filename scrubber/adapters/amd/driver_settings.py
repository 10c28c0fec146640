"""Reads and restores the settings of a GPU that are files: performance level, power limit, isolation, partition modes.

A partition mode is read here and written by a reset alone: its change replaces the devices of the GPU, and only a reset
keeps all of them out of use. Imported by the driver's child, and by the check of a policy, which needs no driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from scrubber.adapters.amd.kernel_files import AmdPaths, optional_text

__all__ = ["COMPUTE_MODE", "MEMORY_MODE", "read_settings", "restore_settings", "validation_errors"]

COMPUTE_MODE, MEMORY_MODE = "compute_partition", "memory_partition"
_LEVEL, _POWER, _ISOLATION = "performance_level", "power_limit_watts", "enforce_isolation"
_LEVELS = ("auto", "low", "high", "manual", "perf_determinism")
_DEFAULT_LEVEL = "auto"
_MODES: Mapping[str, str] = {"0": "off", "1": "isolate-and-clean", "2": "legacy", "3": "isolate"}
_WORDS: Mapping[str, tuple[str, ...]] = {
    _LEVEL: _LEVELS,
    _ISOLATION: tuple(_MODES.values()),
    COMPUTE_MODE: ("SPX", "DPX", "TPX", "QPX", "CPX"),
    MEMORY_MODE: ("NPS1", "NPS2", "NPS3", "NPS4", "NPS6", "NPS8"),
}
_WATTS = re.compile(r"[1-9][0-9]{0,4}")
_MICRO = 1_000_000


def validation_errors(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return why no GPU can have the settings of a policy: one message for each setting; none when some GPU can."""
    found: list[str] = []
    for name, text in sorted(settings.items()):
        if name == _POWER:
            possible = "" if _WATTS.fullmatch(text) else "write whole watts, such as 550"
        else:
            words = _WORDS.get(name)
            if words is None:
                names = ", ".join(sorted((_POWER, *_WORDS)))
                found.append(f"{name} is not a setting of an AMD GPU; the settings are {names}.")
                continue
            possible = "" if text in words else f"write one of {', '.join(words)}"
        if possible:
            found.append(f'{name} cannot be "{text}"; {possible}.')
    return tuple(found)


def read_settings(paths: AmdPaths, gpu: Path, *, whole: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return the present values and the driver's defaults of the settings that ``gpu`` has.

    A partition mode has no default: a node may be set up with any. So its present value is the default.

    Args:
        whole: whether they are requested for the whole GPU; a partition has only the modes.

    Raises:
        OSError: a file of a setting exists and cannot be read.
    """
    values: dict[str, str] = {}
    for name in (COMPUTE_MODE, MEMORY_MODE):
        if (mode := optional_text(gpu / f"current_{name}")) is not None:
            values[name] = mode
    defaults = dict(values)
    if not whole:
        return values, defaults
    if (level := optional_text(gpu / "power_dpm_force_performance_level")) is not None:
        values[_LEVEL], defaults[_LEVEL] = level, _DEFAULT_LEVEL
    for cap in sorted(gpu.glob("hwmon/hwmon*/power1_cap")):
        default = optional_text(cap.with_name("power1_cap_default"))
        if default is not None:
            values[_POWER], defaults[_POWER] = _watts(optional_text(cap) or ""), _watts(default)
    if (modes := optional_text(gpu / "enforce_isolation")) is not None:
        # Without an option of the module there is no default: what was set at boot must not be switched off.
        values[_ISOLATION] = _isolation(modes)
        option = optional_text(paths.module / "parameters/enforce_isolation") or ""
        defaults[_ISOLATION] = _MODES.get(option, values[_ISOLATION])
    return values, defaults


def restore_settings(paths: AmdPaths, gpu: Path, wanted: Mapping[str, object], *, whole: bool) -> dict[str, str]:
    """Write those of ``wanted`` that differ, and return what is read back, without settings that ``gpu`` lacks.

    Partition modes are not written.

    Raises:
        OSError: a file cannot be read. A value that the driver refuses is not an error here: it is read back unchanged.
    """
    before, _ = read_settings(paths, gpu, whole=whole)
    for name, value in before.items():
        text = wanted.get(name)
        if isinstance(text, str) and text != value and name not in (COMPUTE_MODE, MEMORY_MODE):
            _apply(gpu, name, text)
    after, _ = read_settings(paths, gpu, whole=whole)
    return {name: value for name, value in after.items() if name in wanted}


def _apply(gpu: Path, name: str, text: str) -> None:
    try:
        if name == _LEVEL:
            (gpu / "power_dpm_force_performance_level").write_bytes(text.encode("ascii"))
        elif name == _POWER:
            for cap in gpu.glob("hwmon/hwmon*/power1_cap"):
                cap.write_bytes(str(int(text) * _MICRO).encode("ascii"))
        else:
            number = next(number for number, word in _MODES.items() if word == text)
            partitions = len((optional_text(gpu / "enforce_isolation") or "").split(" "))
            (gpu / "enforce_isolation").write_bytes(" ".join([number] * partitions).encode("ascii"))
    except (OSError, ValueError, StopIteration):
        return  # what is read back shows it


def _watts(microwatts: str) -> str:
    return str(int(microwatts) // _MICRO)


def _isolation(modes: str) -> str:
    """Return the one mode of all partitions; what is written where they differ, which no policy can expect."""
    different = sorted(set(modes.split(" ")))
    return _MODES.get(different[0], modes) if len(different) == 1 else modes
