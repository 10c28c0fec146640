"""What AMD's driver writes: records of hardware errors, and the files that describe its GPUs."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from scrubber.adapters.amd.cper import (
    BAD_PAGE_THRESHOLD,
    CORRECTED,
    FATAL,
    UNCORRECTED,
    ErrorRecord,
    count_kinds,
    read_records,
)
from scrubber.adapters.amd.driver_settings import read_settings
from scrubber.adapters.amd.kernel_files import (
    AmdPaths,
    error_counts,
    fdinfo_memory,
    optional_number,
    properties_in,
    retired_pages,
    topology_nodes,
)
from tests.fuzz.loop import directory, on_close
from tests.fuzz.structure import EDIT_SEEDS, EDITS, text_input
from tests.fuzz.target import SLOW_GOAL, target

_KINDS = (UNCORRECTED, FATAL, CORRECTED)
_POSITIONS = bytes(12)


def _record(number: int, severity: int, flags: bytes, padding: int, *, length: int | None = None) -> bytes:
    """Return a record with one section for each of ``flags``."""
    sections = b"".join(bytes(12) + struct.pack("<I", each) + bytes(56) for each in flags)
    body = sections + bytes(padding)
    whole = 128 + len(body) if length is None else length
    header = struct.pack("<4sHIHIII", b"CPER", 0x100, 0xFFFFFFFF, len(flags), severity, 0, whole)
    return header + struct.pack("<Q", number) + bytes(64) + struct.pack("<Q", number) + bytes(24) + body


def _ring(plan: bytes) -> tuple[bytes, list[ErrorRecord]]:
    """Return a ring in which ``plan`` chooses severity, flags and padding of each record and what is between them."""
    ring, records = bytearray(_POSITIONS), []
    for number, at in enumerate(range(0, min(len(plan) - 3, 64), 4), 1):
        severity, flags, padding, junk = plan[at : at + 4]
        ring += bytes((junk,)) * (junk % 9)  # what is left of an overwritten record
        sections = bytes((flags & 0x7F,)) * (1 + flags % 3)
        ring += _record(number, severity % 4, sections, padding)
        if severity % 4 < len(_KINDS):
            kind = BAD_PAGE_THRESHOLD if flags & 8 else _KINDS[severity % 4]
            records.append(ErrorRecord(kind, (number.to_bytes(8, "little") * 2).hex()))
    return bytes(ring), records


@target(
    "amd-error-records",
    parser="AMD's ring of hardware error records (CPER)",
    covers=("scrubber.adapters.amd.cper",),
    oracle="complete records are found one by one with the kind that their header and sections state, and no record is found "
    "without a signature and a header of its own",
    seeds=(
        EDITS,
        EDITS + b"\1\0\0\0\0\0\0\0\2\x08\5\3",
        EDITS + bytes(range(64)),
        _POSITIONS + _record(1, 1, b"\0", 0) + _record(2, 0, b"\x08\0", 7),
        _POSITIONS + _record(1, 1, b"\0", 0, length=64) + _record(2, 2, b"", 0),
        _POSITIONS + _record(1, 0, b"\0\0\0", 0)[40:] + _record(2, 0, b"", 0)[:100],
        _POSITIONS + b"CPERCPER" + _record(7, 2, b"", 3, length=2**32 - 1),
        b"",
    ),
    words=(b"CPER", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\x80\0\0\0CPER"),
)
def amd_error_records(data: bytes) -> bool:
    planned: list[ErrorRecord] | None = None
    content = data
    if data.startswith(EDITS):
        content, planned = _ring(data[1:])
    descriptor = os.memfd_create("ring", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        found = read_records(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
    if found is None:
        assert len(content) <= len(_POSITIONS)
        return False
    assert planned is None or list(found) == planned
    headers = [
        ("CPER", content[at + 20 : at + 28], content[at + 96 : at + 104])
        for at in (each.start() for each in re.finditer(b"CPER", content))
        if at + 128 <= len(content) and content[at + 6 : at + 10] == b"\xff\xff\xff\xff"
    ]
    assert len(found) <= len(headers)
    counts = count_kinds(found)
    assert sum(counts.values()) == len(found)
    return bool(found)


_TEXTS = (
    b"cpu_cores_count 0\nsimd_count 304\nlocation_id 3073\ndomain 1\ngfx_target_version 90402\nsize_in_bytes 206141652992\n",
    b"ue: 2\nce: 7\nde: 1\n",
    b"0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P\n0x00000003 : 0x00001000 : F\n",
    b"pos:\t0\nflags:\t02\ndrm-client-id:\t7\ndrm-memory-vram:\t4096 KiB\ndrm-memory-gtt: 12 KiB\n",
    b"750000000\n",
    b"1 1 1 1 1 1 1 1\n",
    b"0x1002\n",
)
_FILES = (
    "kfd/topology/nodes/1/properties",
    "kfd/topology/nodes/1/gpu_id",
    "kfd/topology/nodes/1/mem_banks/0/properties",
    "ras/umc_err_count",
    "pages",
    "proc/1/fdinfo/3",
    "gpu/hwmon/hwmon0/power1_cap",
    "gpu/hwmon/hwmon0/power1_cap_default",
    "gpu/current_compute_partition",
    "gpu/enforce_isolation",
    "gpu/power_dpm_force_performance_level",
)


@cache
def _machine() -> Path:
    top = directory()
    on_close(_machine.cache_clear)
    for name in _FILES:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
    (top / "proc/1/fd").mkdir()
    (top / "proc/1/fd/3").symlink_to("/dev/null")
    return top


def _lines(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")


def _counted(text: bytes) -> Mapping[str, int]:
    """Return the counters of an ``err_count`` file, the last line of each name; other lines mean nothing."""
    found = {name.strip(b" \t"): value for name, _, value in (line.partition(b":") for line in _lines(text))}
    numbers = ((name, re.fullmatch(rb"[ \t]*([0-9]+)[ \t]*", value)) for name, value in found.items())
    return {os.fsdecode(name): int(match[1]) for name, match in numbers if match}


def _properties(text: bytes) -> Mapping[str, int]:
    rows = (re.fullmatch(rb"[ \t]*([^ \t]+)[ \t]+([0-9]+)[ \t]*", line) for line in _lines(text))
    return {os.fsdecode(row[1]): int(row[2]) for row in rows if row}


@target(
    "amd-kernel-files",
    parser="the text of the amdgpu driver's files",
    covers=("scrubber.adapters.amd.kernel_files", "scrubber.adapters.amd.driver_settings"),
    oracle="a file is refused as not what the driver writes, or has the numbers that regular expressions find in it; settings "
    "are one line each",
    seeds=(
        *EDIT_SEEDS,
        *_TEXTS,
        *(EDITS + bytes((number,)) for number in range(len(_TEXTS))),
        b"",
        b"SPX\n",
        b"auto\n",
    ),
    words=(b": ", b"ue: ", b" : R\n", b" KiB\n", b"drm-client-id:", b"size_in_bytes ", b"0x", b"\n"),
    longest=1024,
    share=60,
    goal=SLOW_GOAL,
)
def amd_kernel_files(data: bytes) -> bool:
    text = text_input(data, *_TEXTS)
    top = _machine()
    for name in _FILES:
        (top / name).write_bytes(b"7\n" if name.endswith("gpu_id") else text)
    pages = retired_pages(top / "pages")
    rows = [line.split(b":") for line in _lines(text)]
    assert pages == {
        each: sum(len(row) == 3 and row[2].strip(b" \t") == each.encode() for row in rows) for each in "RPF"
    }
    number = optional_number(top / "gpu/enforce_isolation")
    value = re.fullmatch(rb"[ \t]*(0x[0-9a-fA-F]{1,16}|0|[1-9][0-9]{0,19})[ \t]*", text.partition(b"\n")[0])
    assert value is None or number == int(value[1], 0)
    accepted = number is not None or any(pages.values())
    try:
        counted, (node,) = error_counts(top / "ras"), topology_nodes(top / "kfd")
        memory = fdinfo_memory(top / "proc", 1, frozenset({os.stat("/dev/null").st_rdev}))
    except ValueError:
        assert re.search(rb"[0-9]{4301}", text), "only a number without end is refused"
        return False
    assert counted == {"umc": _counted(text)}
    assert node.properties == properties_in(text) == _properties(text)
    assert node.memory_bytes == _properties(text).get("size_in_bytes", 0)
    assert re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[01][0-9a-f]\.0", node.pci_address)
    assert memory >= 0
    assert memory == 0 or b"drm-memory-vram:" in text
    try:
        values, defaults = read_settings(AmdPaths(top), top / "gpu", whole=True)
    except ValueError:
        assert not re.fullmatch(rb"[ \t]*[0-9]{1,4300}[ \t]*", text.partition(b"\n")[0]), "a power limit is a number"
        return accepted or bool(node.properties or counted["umc"])
    assert values.keys() == defaults.keys()
    assert all("\n" not in each for each in values.values())
    return accepted or bool(values)
