"""Answers of the command backend's program, and reports of walks over /proc."""

from __future__ import annotations

import json
import math
from typing import cast

from scrubber.adapters.children.message import MalformedMessage, unpack
from scrubber.adapters.command.answers import API_VERSION, REQUIRED_VERBS, Answer, Verb, read_answer
from scrubber.adapters.command.health import CommandTelemetry
from scrubber.adapters.command.inventory import parse_devices
from scrubber.adapters.command.runner import CommandRunner
from scrubber.adapters.locks import is_device_id
from scrubber.adapters.walker import parse_walk_report, uninspected_from
from scrubber.domain.device import AccessKind
from scrubber.domain.errors import BrokenCommand, DeviceBusy, DeviceFault, Unavailable
from tests.api.service import device
from tests.fuzz.loop import complete
from tests.fuzz.structure import EDIT_SEEDS, json_input
from tests.fuzz.target import SLOW_GOAL, target

_ID = "request-1"
_HEAD = {"apiVersion": API_VERSION, "kind": "Response", "id": _ID}
_INVENTORY = {
    **_HEAD,
    "driver": "1.2.3",
    "devices": [
        {
            "id": "dev-0",
            "index": "0:1",
            "model": "Accelerator",
            "memoryBytes": 1 << 30,
            "numaNode": 0,
            "pci": "0000:3b:00.0",
            "parent": "card-0",
            "peers": ["dev-1"],
            "nodes": [{"path": "/dev/null", "containerPath": "/dev/accel0"}],
            "environment": {"DEVICE": "0"},
            "cdi": ["vendor.com/class=0"],
        },
        {"id": "dev-1", "index": "1", "model": "Accelerator", "memoryBytes": 1},
    ],
}
_TELEMETRY = {
    **_HEAD,
    "errors": {"79": 1},
    "conditions": {"thermal": "too hot"},
    "settings": {"power": "300"},
    "defaults": {"power": "400"},
    "eccUncorrected": 0,
    "temperatureCelsius": 40,
    "recoveryAction": "reset",
    "counters": {"ecc_total": 3},
}
_FAULT = {**_HEAD, "code": "lost", "message": "the device is gone"}


class _Runner:
    """Answers every verb with one answer."""

    verbs = REQUIRED_VERBS

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def run(self, verb: Verb, *_: object) -> Answer:
        return self._answer


@target(
    "command-answer",
    parser="answers of a command backend's program",
    covers=(
        "scrubber.adapters.command.answers",
        "scrubber.adapters.command.inventory",
        "scrubber.adapters.command.health",
    ),
    oracle="an answer is refused as that of a broken command, or is the fault that the exit status announces, or has "
    "only plain values: valid and unique ids, absolute paths, whole numbers that are not negative, texts of one "
    "line",
    seeds=(
        *EDIT_SEEDS,
        *(json.dumps(each).encode() for each in (_INVENTORY, _TELEMETRY, _FAULT)),
        *(
            b"\0" + bytes((document, place, 0, value))
            for document in range(3)
            for place in range(4, 40, 5)
            for value in (2, 17)
        ),
    ),
    words=(b'"devices"', b'"nodes"', b'"errors"', b'"memoryBytes"', b'"../x"', b"0:1"),
    goal=SLOW_GOAL,
)
def command_answer(data: bytes) -> bool:
    try:
        found: object = json.loads(json_input(data, _INVENTORY, _TELEMETRY, _FAULT))
    except (ValueError, RecursionError):
        return False
    for status in (10, 11, 12, 13, -9):
        try:
            read_answer("program", Verb.TELEMETRY, _ID, {"status": status, "answer": found, "seconds": 0.5})
        except (DeviceFault, DeviceBusy, Unavailable, BrokenCommand) as error:
            assert isinstance(error, BrokenCommand) or status in (10, 11, 12), (status, error)
            assert "\n" not in str(error)
            continue
        raise AssertionError(f"exit status {status} is a success")
    try:
        answer = read_answer("program", Verb.INVENTORY, _ID, {"status": 0, "answer": found, "seconds": 0.5})
    except BrokenCommand:
        return False
    return _check_devices(answer) | _check_telemetry(answer)


def _check_devices(answer: Answer) -> bool:
    try:
        devices = parse_devices(answer)
    except BrokenCommand as error:
        assert str(error).isprintable(), str(error)
        return False
    assert len({each.id for each in devices}) == len({each.index for each in devices}) == len(devices)
    for each in devices:
        assert is_device_id(each.id)
        assert 0 <= each.memory_bytes < 1 << 63
        assert each.numa_node is None or each.numa_node >= 0
        assert each.id not in each.peers
        for access in each.access:
            if access.kind in (AccessKind.MOUNT, AccessKind.DEVICE_NODE):
                assert access.host_path.startswith("/")
                assert ".." not in access.host_path.split("/")
            assert access.host_path.isprintable()
            assert access.container_path.isprintable()
    return bool(devices)


def _check_telemetry(answer: Answer) -> bool:
    telemetry = CommandTelemetry(cast("CommandRunner", _Runner(answer)), tuple, interval=lambda: 1.0)
    try:
        found = complete(telemetry.snapshot(device(0)))
    except BrokenCommand as error:
        assert str(error).isprintable(), str(error)
        return False
    assert all(1 <= code <= 9999 and times > 0 for code, times in (found.errors or {}).items())
    assert found.settings.keys() == (found.defaults or {}).keys()
    assert all(type(value) is int and 0 <= value < 1 << 63 for value in found.counters.values())
    assert found.temperature_celsius is None or math.isfinite(found.temperature_celsius)
    return bool(found.counters)


_WALK = {
    "holders": [[17, 4711, "python", False, [0]]],
    "unreadable": [[1000, 2]],
    "unfinished": [[18, 4712, "sh", 0, "it has too many threads", [1], [1], 3, "1"]],
    "relays": [["/kubepods/pod1", "1", []], ["/x", None, None]],
    "counts": [0, 1, 2, 3, 4, 5],
    "omitted": [[5, 1]],
    "partial": [17],
}


@target(
    "walk-report",
    parser="a child's report of a walk over `/proc`",
    covers=("scrubber.adapters.walker",),
    oracle="a report is refused as unavailable, or every process in it can exist: a PID is positive and fits into the kernel's type",
    seeds=(*EDIT_SEEDS, json.dumps(_WALK).encode(), *(b"\0" + bytes((place, 0, 5)) for place in range(30))),
    words=(b'"holders"', b'"counts"', b"1e999", b"-1"),
)
def walk_report(data: bytes) -> bool:
    try:
        message = unpack(json_input(data, _WALK))
    except MalformedMessage:
        return False
    try:
        found = parse_walk_report(message)
    except Unavailable:
        return False
    identities = [(each.pid, each.started) for each in found.holders]
    for pid, started in (*identities, *((each.pid, each.started) for each in found.unfinished)):
        assert 0 < pid < 1 << 31
        assert started >= 0
    assert found.holders_omitted >= 0
    uninspected_from(found.unfinished, found.churning_groups)
    return True
