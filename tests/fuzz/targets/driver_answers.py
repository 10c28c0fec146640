"""Answers of the drivers' child processes: descriptions, snapshots, users, events, and counters kept from a reset."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from scrubber.adapters.amd.conditions import block_number
from scrubber.adapters.amd.errors import ErrorCounters
from scrubber.adapters.amd.holders import AmdHolders
from scrubber.adapters.amd.inventory import AmdInventory
from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.amd.telemetry import AmdTelemetry
from scrubber.adapters.children.process import Children
from scrubber.adapters.nvidia.description import devices_of, exclusion_reason, parse_description, peers_of
from scrubber.adapters.nvidia.event_watch import EventWatch, _EventsEnded, _WatchedGpu
from scrubber.adapters.nvidia.telemetry import NvidiaTelemetry
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable
from scrubber.domain.telemetry import Signal, Snapshot
from tests.fuzz.loop import complete, directory, on_close
from tests.fuzz.structure import EDIT_SEEDS, json_input
from tests.fuzz.target import SLOW_GOAL, target

_MOST = 2**63 - 1
_Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _positive(value: Any) -> bool:
    return _count(value) and value > 0


def _bits(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _number(value: Any) -> bool:
    return type(value) is int and -_MOST <= value <= _MOST


def _text(value: Any) -> bool:
    return type(value) is str and value != ""


def _optional(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list(check: _Check) -> _Check:
    return lambda value: type(value) is list and all(map(check, value))


def _map(check: _Check) -> _Check:
    return lambda value: type(value) is dict and all(map(check, value.values()))


def _object(**fields: _Check) -> _Check:
    return lambda value: type(value) is dict and all(check(value.get(name)) for name, check in fields.items())


def _string(value: Any) -> bool:
    return type(value) is str


def _is_row(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_count, value))


def _answer(data: bytes, *documents: Any) -> dict[str, Any] | None:
    """Return the answer that ``data`` is or describes; None where it is no JSON object, which the framing refuses."""
    try:
        found = json.loads(json_input(data, *documents))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _each_missing(document: Mapping[str, Any], rows: str = "") -> tuple[bytes, ...]:
    """Return ``document`` as JSON without each of its values in turn, or without each of those of its first row."""
    if rows:
        first, *others = document[rows]
        parts = [{**document, rows: [_without(first, name), *others]} for name in first]
    else:
        parts = [_without(document, name) for name in document]
    return tuple(json.dumps(each).encode() for each in parts)


def _without(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


class _Requests:
    """A pool whose child gives one answer."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self._answer = answer

    async def request(self, key: str, request: Mapping[str, object]) -> Any:
        return self._answer


async def _no_infrastructure(pid: int, *, has_context: bool) -> None:
    return None


_ADDRESS = "0000:0c:00.0"
_NODE: dict[str, Any] = {
    "name": _ADDRESS,
    "position": 0,
    "gpu_id": 4711,
    "partition": 0,
    "memory": 206141652992,
    "architecture": "gfx942",
    "compute_units": 304,
    "hive": 2**63 + 5,
    "render": "renderD128",
    "render_number": "226:128",
    "card": "card1",
    "card_number": "226:1",
}
_AMD_GPU: dict[str, Any] = {
    "unique_id": "1b2c3d4e5f600000",
    "model": "AMD Instinct MI300X",
    "pci_id": "0x74a1",
    "serial": "692300",
    "vbios": "113-M3000100-102",
    "memory": 206141652992,
    "numa_node": -1,
    "compute_partition": "SPX",
    "memory_partition": "NPS1",
    "kfd_number": "511:0",
    "reset_methods": "bus",
    "nodes": [_NODE],
}
_AMD_PARTITIONS = {
    **_AMD_GPU,
    "compute_partition": "DPX",
    "nodes": [_NODE, {**_NODE, "name": "amdgpu_xcp_1", "partition": 1, "render": "renderD129", "card": None}],
}
_is_amd_node = _object(
    name=_text,
    position=_optional(_count),
    gpu_id=_optional(_count),
    partition=_optional(_count),
    memory=_optional(_count),
    architecture=_text,
    compute_units=_optional(_count),
    hive=_optional(_bits),
    render=_text,
    render_number=_text,
    card=_optional(_text),
    card_number=_optional(_text),
)
_AMD_TEXTS = ("unique_id", "model", "serial", "vbios", "compute_partition", "memory_partition", "kfd_number")
_is_amd_gpu = _object(
    memory=_optional(_count),
    numa_node=_optional(_number),
    nodes=_list(_is_amd_node),
    **dict.fromkeys(_AMD_TEXTS, _optional(_text)),
)


def _is_described(answer: dict[str, Any]) -> bool:
    """Whether every value of a description has the type and the range that the devices need."""
    if not _is_amd_gpu(answer) or not (answer.get("model") or _optional(_text)(answer.get("pci_id"))):
        return False
    nodes = answer["nodes"]
    whole = len(nodes) == 1 and (answer.get("compute_partition") or "SPX") == "SPX"
    return (
        bool(nodes)
        and len({each["name"] for each in nodes}) == len({each.get("partition") or 0 for each in nodes}) == len(nodes)
        and all(re.fullmatch(r"renderD[0-9]+", each["render"]) for each in nodes)
        and all(re.fullmatch(r"card[0-9]+", each.get("card") or "card0") for each in nodes)
        and all((whole and answer.get("memory")) or each.get("memory") for each in nodes)
    )


@target(
    "amd-description",
    parser="the answer of the driver's child process that describes an AMD GPU",
    covers=("scrubber.adapters.amd.inventory", "scrubber.adapters.children.driver_response"),
    oracle="the answer is refused if and only if a value has another type or range than the reference requires, or two "
    "devices have one id or one index; each device has the id, the memory and the nodes of its own row, and no other node",
    seeds=(
        *EDIT_SEEDS,
        b"\0\1",
        json.dumps(_AMD_GPU).encode(),
        *_each_missing(_AMD_GPU),
        *_each_missing(_AMD_GPU, "nodes"),
        json.dumps({**_AMD_GPU, "nodes": [{**_NODE, "render": "card1"}]}).encode(),
        json.dumps({**_AMD_GPU, "nodes": [_NODE, {**_NODE, "partition": 1}]}).encode(),
        json.dumps({**_AMD_GPU, "nodes": [{**_NODE, "name": []}]}).encode(),
        b"{}",
        b'{"nodes": []}',
    ),
    words=(b'"nodes"', b'"partition"', b'"card"', b'"../mem"'),
)
def amd_description(data: bytes) -> bool:
    answer = _answer(data, _AMD_GPU, _AMD_PARTITIONS)
    if answer is None:
        return False
    inventory = AmdInventory(AmdPaths(Path("/r")), _Requests({}), node="n")  # type: ignore[arg-type]
    inventory._indexes[_ADDRESS] = 7
    try:
        devices = inventory._compose(_ADDRESS, answer)
    except Unreadable as error:
        assert str(error)
        assert not _is_described(answer), f"a complete description is refused: {error}"
        return False
    assert _is_described(answer), devices
    rows = {each["name"]: each for each in answer["nodes"]}
    assert [each.id for each in devices] == sorted(rows, key=lambda name: rows[name].get("partition") or 0)
    partitioned = len(rows) > 1 or (answer.get("compute_partition") or "SPX") != "SPX"
    for device in devices:
        row, traits = rows[device.id], dict(device.traits)
        partition = row.get("partition") or 0
        assert device.index == (f"7:{partition}" if partitioned else "7")
        assert (device.parent is None) == (not partitioned)
        assert device.memory_bytes == ((not partitioned and answer.get("memory")) or row["memory"])
        paths = ["/dev/kfd", *(f"/dev/dri/{row[name]}" for name in ("render", "card") if row.get(name))]
        assert [(each.host_path, each.container_path) for each in device.access] == [(f"/r{it}", it) for it in paths]
        for name in ("unique_id", "serial", "vbios", "kfd_number", "compute_partition", "memory_partition"):
            assert traits.get(name) == answer.get(name)
        hive = row.get("hive")
        assert int(traits["hive"], 16) == hive if hive else "hive" not in traits
        numa = answer.get("numa_node")
        assert device.numa_node == (None if numa is None or numa < 0 else numa)
    return True


_AMD_SNAPSHOT: dict[str, Any] = {
    "errors": {"umc": {"ue": 2, "ce": 7, "de": 1}, "gfx": {"ue": 1, "ce": 0}, "new": {"ue": 3}, "sdma": {"ce": 4}},
    "records": {"fatal": 1, "bad-page-threshold": 1, "corrected": 2},
    "fatal_records": ["0a", "0b"],
    "pages": {"R": 3, "P": 1, "F": 0},
    "temperature": 41,
    "width": 8,
    "max_width": 16,
    "settings": {"power_limit_watts": "750"},
    "defaults": {"power_limit_watts": "750"},
    "used": 300 << 20,
    "processes": [[7, 4096]],
}
_AMD_IDLE = {**_AMD_SNAPSHOT, "errors": {}, "records": None, "fatal_records": [], "pages": None, "processes": []}
_is_amd_snapshot = _object(
    errors=_map(_map(_count)),
    records=_optional(_map(_count)),
    fatal_records=_list(_string),
    pages=_optional(_map(_count)),
    temperature=_optional(_number),
    width=_optional(_count),
    max_width=_optional(_count),
    settings=_map(_string),
    defaults=_map(_string),
    used=_count,
    processes=_list(_is_row),
)
_AMD_DEVICE = Device("a", "0", "m", 1, traits=(("pci_address", _ADDRESS), ("kfd_id", "1")))


@target(
    "amd-snapshot",
    parser="the answer of the driver's child process about the health and the users of an AMD GPU",
    covers=("scrubber.adapters.amd.telemetry", "scrubber.adapters.children.driver_response"),
    oracle="the answer is refused if and only if a value has another type or range than the reference requires; every "
    "uncorrected error, fatal record and unretired page is in the snapshot, and the device is held if a process that is not "
    "our own has it, or more memory is used than by an idle driver",
    seeds=(
        *EDIT_SEEDS,
        b"\0\1",
        json.dumps(_AMD_SNAPSHOT).encode(),
        *_each_missing(_AMD_SNAPSHOT),
        b'{"errors": {"umc": {"ue": 1}}}',
        b"\0\0\x22\0\x0a",
    ),
    words=(b'"ue":', b'"umc":', b'"processes":', b'"used":', b'"fatal_records":'),
    goal=SLOW_GOAL,
)
def amd_snapshot(data: bytes) -> bool:
    answer = _answer(data, _AMD_SNAPSHOT, _AMD_IDLE)
    return answer is not None and complete(_amd_snapshot(answer))


async def _amd_snapshot(answer: dict[str, Any]) -> bool:
    requests: Any = _Requests(answer)
    holders = AmdHolders(Children(), requests, infrastructure=_no_infrastructure)
    errors = ErrorCounters(Path("/nonexistent"), "boot")
    telemetry = AmdTelemetry(
        requests, holders, errors, devices=lambda: (), fingerprint=lambda: "", poll_interval=1000.0
    )
    signals = _Recorder()
    telemetry._signals = signals  # type: ignore[assignment]
    try:
        found = await telemetry.snapshot(_AMD_DEVICE)
    except Unreadable as error:
        assert not _is_amd_snapshot(answer), f"a complete snapshot is refused: {error}"
        return False
    assert _is_amd_snapshot(answer), found
    uncorrected = {block: kinds["ue"] for block, kinds in answer["errors"].items() if "ue" in kinds}
    others: Counter[int] = Counter()
    for block, count in uncorrected.items():
        if block != "umc" and count:
            others[block_number(block)] += count
    assert found.errors == others
    assert found.ecc_uncorrected == uncorrected.get("umc")
    assert len(signals.sent) == sum(count > 0 for count in uncorrected.values())
    pages, records = answer.get("pages") or {}, answer.get("records") or {}
    width, most = answer.get("width"), answer.get("max_width")
    expected = {
        "page-retirement-pending": pages.get("P", 0) > 0,
        "page-retirement-failure": pages.get("F", 0) > 0,
        "pcie-width": bool(width and most and width < most),
        "cper-fatal": bool(answer["fatal_records"]),
        "bad-page-threshold": records.get("bad-page-threshold", 0) > 0,
    }
    assert found.conditions.keys() == {code for code, active in expected.items() if active}
    assert found.counters["ecc_corrected"] == sum(each.get("ce", 0) for each in answer["errors"].values())
    users = {pid for pid, _ in answer["processes"]} - {os.getpid()}
    assert found.is_held == (bool(users) or answer["used"] > 512 << 20)
    assert (found.settings, found.temperature_celsius) == (answer["settings"], answer.get("temperature"))
    return True


@dataclass
class _Recorder:
    """Keeps signals in place of sending them."""

    sent: list[Signal] = field(default_factory=list)

    def publish(self, signals: Iterable[Signal]) -> None:
        self.sent += signals


_COUNTED = {"umc": 5, "gfx": 3, "sdma": 0}
_RECORDS = ("0a", "0b")
_COUNTERS = {"boot": "b", "atReset": {_ADDRESS: {"errors": {"umc": 2, "gfx": 7}, "records": ["0a"]}}}
_is_counters = _object(
    boot=lambda value: value == "b", atReset=_map(_object(errors=_map(_natural), records=_list(_string)))
)


@cache
def _counter_file() -> Path:
    on_close(_counter_file.cache_clear)
    return directory() / "errors.json"


@target(
    "amd-error-counters",
    parser="the file of error counters from an AMD GPU's last reset",
    covers=("scrubber.adapters.amd.errors",),
    oracle="a file that is not this boot's or not exactly as written subtracts nothing, another one exactly its numbers; no "
    "error counts more often than the driver counted it, and what is recorded next is read back without a change",
    seeds=(
        *EDIT_SEEDS,
        json.dumps(_COUNTERS).encode(),
        b'{"boot": "b", "atReset": {}}',
        b'{"boot": "b", "atReset": {"0000:0c:00.0": {"errors": {"umc": -5, "gfx": true}, "records": ["0a"]}}}',
        b'{"boot": "b", "atReset": {"0000:0c:00.0": {"errors": {"umc": Infinity}, "records": "0a"}}}',
        b"{}",
        b"[" * 3000,
    ),
    words=(b'"atReset":', b'"errors":', b'"records":', b"Infinity", b"NaN"),
    goal=SLOW_GOAL,
)
def amd_error_counters(data: bytes) -> bool:
    text, path = json_input(data, _COUNTERS), _counter_file()
    path.write_bytes(text)
    counters = ErrorCounters(path, "b")
    counted, records = counters.since_reset(_ADDRESS, _COUNTED), counters.records_since_reset(_ADDRESS, _RECORDS)
    document = _answer(text)
    saved: Mapping[str, Any] = {}
    accepted = document is not None and _is_counters(document)
    if accepted and document is not None:
        saved = document["atReset"].get(_ADDRESS, {})
    before = saved.get("errors", {})
    expected = {
        block: count - before.get(block, 0) if before.get(block, 0) <= count else count
        for block, count in _COUNTED.items()
    }
    assert counted == expected
    assert all(0 <= counted[block] <= count for block, count in _COUNTED.items())
    assert records == len(set(_RECORDS) - set(saved.get("records", ())))
    counters.record_reset("other", _COUNTED, _RECORDS)
    again = ErrorCounters(path, "b")
    assert again.since_reset("other", _COUNTED) == dict.fromkeys(_COUNTED, 0)
    assert again.records_since_reset("other", _RECORDS) == 0
    assert again.since_reset(_ADDRESS, _COUNTED) == expected
    return accepted


_INSTANCE = {
    "uuid": "MIG-1",
    "index": 0,
    "gi": 1,
    "ci": 0,
    "total": 10468982784,
    "name": "NVIDIA H100 MIG 1g.10gb",
    "slices": 1,
    "compute_slices": 1,
    "mebibytes": 9984,
}
_NVIDIA_GPU: dict[str, Any] = {
    "uuid": "GPU-1",
    "name": "NVIDIA H100",
    "minor": 3,
    "total": 85899345920,
    "mig": False,
    "architecture": "hopper",
    "serial": None,
    "virtualization": "none",
    "links": [{"remote": "0000:3c:00.0", "kind": "gpu"}, {"remote": None, "kind": "switch"}],
    "instances": [],
}
_NVIDIA_MIG = {
    **_NVIDIA_GPU,
    "mig": True,
    "links": [],
    "instances": [_INSTANCE, {**_INSTANCE, "uuid": "MIG-2", "gi": 2, "index": 1, "name": ""}],
}
_is_instance = _object(
    uuid=_text,
    index=_count,
    gi=_count,
    ci=_count,
    total=_positive,
    name=_optional(_string),
    slices=_optional(_count),
    compute_slices=_optional(_count),
    mebibytes=_optional(_count),
)
_NVIDIA_TRAITS = (
    "architecture",
    "compute_capability",
    "serial",
    "vbios",
    "inforom",
    "gsp_firmware",
    "virtualization",
)
_is_nvidia_gpu = _object(
    uuid=_text,
    name=_text,
    minor=_count,
    total=_positive,
    mig=lambda value: type(value) is bool,
    links=_list(_object(remote=_optional(_text), kind=_optional(_text))),
    instances=_list(_is_instance),
    **dict.fromkeys(_NVIDIA_TRAITS, _optional(_text)),
)
_MINORS = {"gpu3/gi1/access": 12, "gpu3/gi1/ci0/access": 13, "gpu3/gi2/access": 14}
_PROFILE = re.compile(r"unknown|([0-9]+c\.)?[0-9]+g\.[0-9]+gb\S*")


@target(
    "nvidia-description",
    parser="the answer of the driver's child process that describes an NVIDIA GPU",
    covers=("scrubber.adapters.nvidia.description", "scrubber.adapters.children.driver_response"),
    oracle="the answer is refused if and only if a value has another type or range than the reference requires, or two "
    "devices have one id or one index; each device has the id, the memory and the nodes of its own row, and no other node",
    seeds=(
        *EDIT_SEEDS,
        b"\0\1",
        b"\0\1\x13\0\3",
        json.dumps(_NVIDIA_GPU).encode(),
        *_each_missing(_NVIDIA_GPU),
        *_each_missing(_NVIDIA_MIG, "instances"),
        b"{}",
    ),
    words=(b'"instances"', b'"links"', b'"minor"', b'"mig": true', b"MIG 1c.2g.20gb"),
)
def nvidia_description(data: bytes) -> bool:
    answer = _answer(data, _NVIDIA_GPU, _NVIDIA_MIG)
    if answer is None:
        return False
    complete_answer = _is_nvidia_gpu(answer)
    rows = {each["uuid"]: each for each in answer["instances"]} if complete_answer else {}
    if complete_answer and not len(rows) == len({each["index"] for each in rows.values()}) == len(answer["instances"]):
        complete_answer = False
    try:
        gpu = parse_description(answer)
    except Unreadable as error:
        assert not complete_answer, f"a complete description is refused: {error}"
        return False
    assert complete_answer, gpu
    peers = peers_of({"a": gpu, "0000:3c:00.0": parse_description({**_NVIDIA_GPU, "uuid": "GPU-2", "links": []})})
    linked = any(each.get("remote") == "0000:3c:00.0" for each in answer["links"])
    assert ("GPU-2" in peers.get(gpu.uuid, ())) <= (linked and not answer["mig"])
    devices = devices_of(
        gpu, "a", 0, numa_node=None, peers=frozenset(), minors=_MINORS, nodes=Path("/nowhere/dev"), traits=()
    )
    hosts_vgpus = answer.get("virtualization") in ("host-vgpu", "host-vsga")
    assert (exclusion_reason(gpu, "a") is None) == (not hosts_vgpus and (not answer["mig"] or bool(rows)))
    own = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    if not answer["mig"]:
        (device,) = devices
        assert (device.id, device.memory_bytes, device.parent) == (answer["uuid"], answer["total"], None)
        names = [f"nvidia{answer['minor']}", *own]
        assert [each.container_path for each in device.access] == [f"/dev/{name}" for name in names]
        return True
    assert [each.id for each in devices] == list(rows)
    for device in devices:
        row = rows[device.id]
        place = f"gpu{answer['minor']}/gi{row['gi']}"
        caps = [_MINORS.get(f"{place}/access"), _MINORS.get(f"{place}/ci{row['ci']}/access")]
        names = [f"nvidia{answer['minor']}", *own, *(f"nvidia-caps/nvidia-cap{it}" for it in caps if it is not None)]
        assert [each.container_path for each in device.access] == [f"/dev/{name}" for name in names]
        assert (device.index, device.memory_bytes, device.parent) == (
            f"0:{row['index']}",
            row["total"],
            answer["uuid"],
        )
        assert device.profile is not None
        assert _PROFILE.fullmatch(device.profile), device.profile
    return True


_NVIDIA_SNAPSHOT: dict[str, Any] = {
    "ecc_uncorrected": 1,
    "temperature_celsius": 31,
    "recovery": "none",
    "settings": {"compute_mode": "default"},
    "defaults": {"compute_mode": "default"},
    "conditions": {"pcie-width": "x8 of x16"},
    "counters": {"ecc_corrected": 3},
    "used": 1,
    "processes": [],
}
_is_nvidia_snapshot = _object(
    ecc_uncorrected=_optional(_count),
    temperature_celsius=_optional(_number),
    recovery=_optional(_text),
    settings=_map(_string),
    defaults=_map(_string),
    conditions=_map(_string),
    counters=_map(_count),
)


class _Events:
    def xids(self, device: str) -> Mapping[int, int]:
        return {31: 2}

    def event_stream_error(self, device: str) -> str | None:
        return "lost"

    def inforom_corrupt(self, device: str) -> bool:
        return True


class _Held:
    async def usage_shows_holder(self, device: Device, answer: Any) -> bool:
        return True


@target(
    "nvidia-snapshot",
    parser="the answer of the driver's child process about the health of an NVIDIA GPU",
    covers=("scrubber.adapters.nvidia.telemetry", "scrubber.adapters.children.driver_response"),
    oracle="the answer is refused if and only if a value has another type or range than the reference requires; the snapshot "
    "has every condition and counter of the answer, and those that the events show",
    seeds=(*EDIT_SEEDS, json.dumps(_NVIDIA_SNAPSHOT).encode(), *_each_missing(_NVIDIA_SNAPSHOT), b"{}"),
    words=(b'"counters":', b'"conditions":', b'"recovery":', b'"processes": null'),
)
def nvidia_snapshot(data: bytes) -> bool:
    answer = _answer(data, _NVIDIA_SNAPSHOT)
    if answer is None:
        return False
    original = json.loads(json.dumps(answer))
    telemetry = NvidiaTelemetry(_Requests(answer), _Events(), _Held())  # type: ignore[arg-type]
    device = Device("GPU-1", "0", "m", 1, traits=(("pci_address", _ADDRESS),))
    try:
        found = complete(telemetry.snapshot(device))
    except Unreadable as error:
        assert not _is_nvidia_snapshot(original), f"a complete snapshot is refused: {error}"
        return False
    assert _is_nvidia_snapshot(original), found
    shown = {"event-stream-lost": "lost", "inforom-corrupt": "its checksums are wrong"}
    assert found == Snapshot(
        "GPU-1",
        errors={31: 2},
        ecc_uncorrected=original.get("ecc_uncorrected"),
        temperature_celsius=original.get("temperature_celsius"),
        is_held=None if original.get("processes") is None else True,
        recovery_action=original.get("recovery"),
        settings=original["settings"],
        defaults=original["defaults"],
        conditions={**original["conditions"], **shown},
        counters=original["counters"],
    )
    return True


_XID_EVENT = {"event": 8, "data": 31, "gi": None, "ci": None}
_MESSAGES: list[dict[str, Any]] = [
    {"registered": True},
    {"watching": True},
    {"inforom": False},
    _XID_EVENT,
    {**_XID_EVENT, "gi": 1, "ci": 0},
    {"event": 256, "data": 0},
    {"event": 16384, "data": 0},
    {"event": 2, "data": 1},
    {"fault": "lost", "message": "The GPU has fallen off the bus."},
]
_PARTS: Mapping[str, tuple[int | None, int | None]] = {"MIG-1": (1, 0), "MIG-2": (2, 0)}
_is_event = _object(event=_bits, data=_bits, gi=_optional(_count), ci=_optional(_count))


@target(
    "nvidia-events",
    parser="messages of the child process that waits for a GPU's events",
    covers=("scrubber.adapters.nvidia.event_watch", "scrubber.adapters.children.driver_response"),
    oracle="a message is refused if and only if a value has another type or range than the reference requires; each device has "
    "exactly the XIDs of its own instance and those without an instance, and no message but a registration ends a watch gap",
    seeds=(*EDIT_SEEDS, json.dumps(_MESSAGES).encode(), json.dumps([_XID_EVENT] * 3).encode(), b"[{}]"),
    words=(b'"event":', b'"data":', b'"gi":', b'"registered":', b'"fault":', b"18446744073709551615"),
)
def nvidia_events(data: bytes) -> bool:
    try:
        messages = json.loads(json_input(data, _MESSAGES))
    except (ValueError, RecursionError):
        return False
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return False
    return complete(_handle(messages))


async def _handle(messages: list[dict[str, Any]]) -> bool:
    watch: Any = EventWatch(None, None, None)  # type: ignore[arg-type]
    signals = watch._signals = _Recorder()
    gpu = _WatchedGpu("GPU-1", _ADDRESS, _PARTS)
    watch._gpus["GPU-1"] = gpu
    watch._gpu_parts = {device: ("GPU-1", part) for device, part in _PARTS.items()}
    gpu.stream_error = "gap"
    expected: dict[str, Counter[int]] = {device: Counter() for device in _PARTS}
    registered = False
    events = 0
    for message in messages:
        sent = len(signals.sent)
        is_other = next((key for key in ("registered", "watching", "inforom", "fault") if key in message), None)
        try:
            watch._handle_message(gpu, message)
        except Unreadable as error:
            assert is_other is None
            assert not _is_event(message), f"a complete event is refused: {error}"
            break
        except _EventsEnded as end:
            assert is_other == "fault"
            assert end.permanent == (message["fault"] == "not-applicable")
            assert {each.device for each in signals.sent[sent:]} == set(_PARTS)
            break
        registered = registered or is_other == "registered"
        if is_other is None:
            events += 1
            assert _is_event(message), message
            place = (message.get("gi"), message.get("ci"))
            mine = [
                device for device, part in _PARTS.items() if place[0] in (None, part[0]) and place[1] in (None, part[1])
            ]
            assert [each.device for each in signals.sent[sent:] if each.device] == mine
            if message["event"] == 8:
                for device in mine:
                    expected[device][message["data"]] += 1
    assert (watch.event_stream_error("MIG-1") is None) == registered
    assert {device: watch.xids(device) for device in _PARTS} == expected
    return events > 0 or registered
