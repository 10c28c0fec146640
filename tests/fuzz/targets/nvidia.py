"""What NVIDIA's driver and the kernel write about GPUs, and the driver's own answer about their users."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path

from scrubber.adapters.nvidia.bus import fingerprint, list_gpus, mig_minors, numa_node
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.holders import _capability, _parse_usage
from scrubber.adapters.nvidia.setting_values import (
    NO_OFFSETS,
    parse_clocks,
    parse_offsets,
    parse_watts,
    validation_errors,
)
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import DeviceFault, Unreadable
from tests.fuzz.loop import directory, on_close
from tests.fuzz.structure import EDIT_SEEDS, EDITS, json_input, text_input
from tests.fuzz.target import SLOW_GOAL, target

_ADDRESS = "0000:3b:00.0"
_TEXTS = (
    b"gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\nconfig 1\nmonitor 2\n",
    b"Model: \t\t NVIDIA H100\nIRQ:   \t\t 99\nGPU UUID: \t GPU-1\nGPU Excluded:\t Yes\n",
    b"0x10de\n",
    b"0x030200\n",
    b"-1\n",
    b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n",
)
_FILES = (
    "proc/driver/nvidia-caps/mig-minors",
    f"proc/driver/nvidia/gpus/{_ADDRESS}/information",
    f"sys/bus/pci/devices/{_ADDRESS}/vendor",
    f"sys/bus/pci/devices/{_ADDRESS}/class",
    f"sys/bus/pci/devices/{_ADDRESS}/numa_node",
    "proc/driver/nvidia/version",
)


@cache
def _machine() -> Path:
    top = directory()
    on_close(_machine.cache_clear)
    for name in _FILES:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
    return top


def _lines(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")


def _minors(text: bytes) -> Mapping[str, int]:
    rows = (re.fullmatch(rb"[ \t]*([^ \t]+)[ \t]+([0-9]{1,7})[ \t]*", line) for line in _lines(text))
    return {os.fsdecode(row[1]): int(row[2]) for row in rows if row}


@target(
    "nvidia-kernel-files",
    parser="the text of NVIDIA's files in `/proc`, and of a GPU's in sysfs",
    covers=("scrubber.adapters.nvidia.bus",),
    oracle="the GPU is found, excluded or not, with the minors and the NUMA node that regular expressions find in the files",
    seeds=(*EDIT_SEEDS, *_TEXTS, *(EDITS + bytes((number,)) for number in range(len(_TEXTS))), b""),
    words=(b"GPU Excluded", b": ", b" Yes\n", b"/access ", b"0x", b"\n"),
    longest=1024,
    goal=SLOW_GOAL,
)
def nvidia_kernel_files(data: bytes) -> bool:
    text, top = text_input(data, *_TEXTS), _machine()
    for name in _FILES:
        (top / name).write_bytes(text)
    paths = DriverPaths(proc_driver=top / "proc/driver/nvidia", sys=top / "sys")
    minors, (gpu,), node = mig_minors(paths), list_gpus(paths), numa_node(paths, _ADDRESS)
    assert minors == _minors(text)
    excluded = any(
        re.fullmatch(rb"[ \t]*GPU[ \t]+Excluded[ \t]*:[ \t]*yes[ \t]*", line, re.IGNORECASE) for line in _lines(text)
    )
    named = any(re.match(rb"[ \t]*GPU[ \t]+Excluded[ \t]*:", line) for line in _lines(text))
    assert (gpu.unusable_reason is not None) == (excluded and named)
    written = re.fullmatch(rb"[ \t]*([0-9]{1,9})[ \t]*\n?", text)
    assert node is None or node >= 0
    assert written is None or node == int(written[1])
    assert fingerprint(paths) == fingerprint(paths)
    return bool(minors or excluded or node is not None)


_DEVICES = b"Character devices:\n  1 mem\n195 nvidia-frontend\n511 nvidia-caps\n510 nvidia-caps-imex-channels\n\nBlock devices:\n"
_NODE = Access(AccessKind.DEVICE_NODE, "/nowhere/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap12")


@target(
    "nvidia-capability-number",
    parser="`/proc/devices`, for the number of an instance's capability node",
    covers=("scrubber.adapters.nvidia.holders",),
    oracle="the number is composed of the first major number that a regular expression finds for the driver's name, or unknown",
    seeds=(*EDIT_SEEDS, _DEVICES, b"511 nvidia-caps\n", b"x nvidia-caps\n511 nvidia-caps\n", b""),
    words=(b" nvidia-caps\n", b"511 ", b"nvidia-caps ", b"\n"),
    goal=SLOW_GOAL,
)
def nvidia_capability_number(data: bytes) -> bool:
    text = text_input(data, _DEVICES)
    path = _machine() / "devices"
    path.write_bytes(text)
    found = _capability(_NODE, path)
    rows = (re.fullmatch(rb"[ \t]*([0-9]{1,3})[ \t]+nvidia-caps[ \t]*", line) for line in _lines(text))
    major = next((int(row[1]) for row in rows if row), None)
    assert found == (None if major is None else os.makedev(major, 12))
    return found is not None


_USAGE = {
    "total": 85899345920,
    "reserved": 6291456,
    "used": 4096,
    "processes": [[7, 4096, "compute"], [8, None, "mps"]],
}


@target(
    "nvidia-usage",
    parser="the answer of the driver's child process about the users of a GPU",
    covers=("scrubber.adapters.nvidia.holders",),
    oracle="the answer is refused, or each process that is not our own has the most memory that a row gives it",
    seeds=(*EDIT_SEEDS, b"{}", b'{"used": 1, "processes": []}', b'{"used": 1, "processes": [[7, 1, ""], [7, 2, ""]]}'),
    words=(b'"processes"', b"[[", b"null", b'"used": '),
)
def nvidia_usage(data: bytes) -> bool:
    try:
        answer = json.loads(json_input(data, _USAGE))
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict):
        return False
    try:
        usage = _parse_usage(answer, frozenset({8}))
    except (Unreadable, DeviceFault):
        return False
    assert usage.used == answer["used"] >= 0
    own = [(pid, max(0, used) if type(used) is int else 0) for pid, used, _ in answer["processes"] if pid != 8]
    assert usage.processes == {pid: max(used for other, used in own if other == pid) for pid, _ in own}
    assert all(type(pid) is int and pid >= 0 for pid in usage.processes)
    return True


_WORDS_OF = {
    "compute_mode": {"default", "prohibited", "exclusive-process"},
    "persistence_mode": {"disabled", "enabled"},
    "auto_boost": {"disabled", "enabled"},
    "accounting_mode": {"disabled", "enabled"},
    "ecc_mode": {"disabled", "enabled"},
    "api_restriction_application_clocks": {"unrestricted", "restricted"},
    "api_restriction_auto_boosted_clocks": {"unrestricted", "restricted"},
}


def _is_written_back(name: str, text: str) -> bool:
    """Whether a value that was accepted is the one spelling of what it means."""
    if name in _WORDS_OF:
        return text in _WORDS_OF[name]
    if name == "power_limit_watts":
        return text == format(Decimal(text).normalize(), "f") and parse_watts(text) == Decimal(text) * 1000
    if name == "application_clocks":
        return text == "{},{}".format(*parse_clocks(text))
    offsets = [f"{clock} P{state} {mhz:+d}" for (clock, state), mhz in parse_offsets(text).items()]
    return name == "clock_offsets" and text == (", ".join(offsets) or NO_OFFSETS)


@target(
    "nvidia-settings",
    parser="the settings of an NVIDIA GPU in a policy",
    covers=("scrubber.adapters.nvidia.setting_values",),
    oracle="each setting that no GPU can have is refused with a message that names it, and an accepted value is the only "
    "spelling of what it means",
    seeds=(
        b"compute_mode=default\0persistence_mode=enabled\0power_limit_watts=312.5",
        b"application_clocks=3201,1980\0clock_offsets=graphics P0 +100, memory P0 -50",
        b"clock_offsets=none\0ecc_mode=disabled\0api_restriction_application_clocks=restricted",
        b"power_limit_watts=300.0\0compute_mode=exclusive-thread",
    ),
    words=(
        b"\0power_limit_watts=",
        b"\0application_clocks=",
        b"\0clock_offsets=",
        b"graphics P0 +1",
        b", memory P12 -3",
    ),
)
def nvidia_settings(data: bytes) -> bool:
    pairs = (each.partition("=") for each in data.decode("utf-8", "replace").split("\0"))
    settings = {name: text for name, mark, text in pairs if mark}
    errors = validation_errors(settings)
    refused = {each for each in settings if validation_errors({each: settings[each]})}
    assert len(errors) == len(refused)
    assert all(any(error.startswith(name) for error in errors) for name in refused)
    assert all(_is_written_back(name, settings[name]) for name in settings.keys() - refused)
    return bool(settings) and not refused
