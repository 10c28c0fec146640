"""Messages of child processes and answers of a backend's command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from scrubber.adapters.children.diagnostics import parse_checks
from scrubber.adapters.children.eraser_report import parse_byte_count, parse_residue_map, parse_seconds_by_phase
from scrubber.adapters.children.message import HEADER_SIZE, MAX_BODY_SIZE, MalformedMessage, body_length, pack, unpack
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.domain.diagnostics import CHECK_NAMES
from scrubber.domain.errors import ScrubberError, Unreadable
from tests.fuzz.structure import EDIT_SEEDS, json_input
from tests.fuzz.target import target

_WORDS = (b'"ok":', b'"fault":', b'"message":', b'"phase":', b"1e999", b"NaN", b"[" * 2000)
_LARGEST = 2**63 - 1
"""The largest number that the API's messages can carry."""

_REPORT: dict[str, Any] = {
    "ok": {
        "covered_bytes": 1024,
        "total_bytes": 2048,
        "residue": 3,
        "residue_map": [1, 2, 0],
        "seconds_by_phase": [["write", 0.5], ["verify", 1]],
    }
}
_FAULT = {"fault": "lost", "message": "GPU is lost"}


@target(
    "child-message",
    parser="the framing of a child's messages",
    covers=("scrubber.adapters.children.message", "scrubber.adapters.children.request_pool"),
    oracle="an accepted message is a JSON object that is packed and unpacked without a change, and is an answer or one "
    "of this project's errors",
    seeds=(*EDIT_SEEDS, json.dumps(_REPORT).encode(), json.dumps(_FAULT).encode(), b"[]", b"\xff\xff\xff\xff"),
    words=_WORDS,
)
def child_message(data: bytes) -> bool:
    data = json_input(data, _REPORT, _FAULT)
    try:
        assert body_length(data[:HEADER_SIZE]) <= MAX_BODY_SIZE
    except MalformedMessage as error:
        assert str(error).isprintable()
    try:
        message = unpack(data)
    except MalformedMessage:
        return False
    packed = pack(message)
    assert body_length(packed[:HEADER_SIZE]) == len(packed) - HEADER_SIZE
    assert repr(unpack(packed[HEADER_SIZE:])) == repr(message)  # NaN is not equal to itself
    try:
        answer = parse_answer(message)
    except ScrubberError:
        return False
    assert answer is message["ok"]
    return True


@target(
    "eraser-report",
    parser="the numbers in an eraser's report",
    covers=("scrubber.adapters.children.eraser_report",),
    oracle="a report is unreadable, or its numbers are whole, fit into the API's messages, and add up; its times are finite "
    "and not negative",
    seeds=(*EDIT_SEEDS, json.dumps(_REPORT["ok"]).encode()),
    words=(b'"residue_map":', b'"seconds_by_phase":', b"true", *_WORDS),
)
def eraser_report(data: bytes) -> bool:
    try:
        message = unpack(json_input(data, _REPORT["ok"]))
    except MalformedMessage:
        return False
    read = 0
    for key in ("covered_bytes", "total_bytes", "residue"):
        try:
            number = parse_byte_count(message, key)
        except Unreadable:
            continue
        read += 1
        assert type(number) is int
        assert 0 <= number <= _LARGEST
        if key == "residue":
            try:
                parts = parse_residue_map(message, number)
            except Unreadable:
                continue
            assert sum(parts) == number
            assert all(type(each) is int and each >= 0 for each in parts)
    try:
        times = parse_seconds_by_phase(message)
    except Unreadable:
        return False
    assert all(type(phase) is str and math.isfinite(seconds) and seconds >= 0 for phase, seconds in times), times
    return read == 3


def _checks() -> dict[str, Any]:
    return {
        "checks": [{"name": name, "errors": 0, "unit": "bytes", "done": 1024, "seconds": 0.25} for name in CHECK_NAMES]
    }


@target(
    "diagnostic-report",
    parser="the checks in a diagnostic's report",
    covers=("scrubber.adapters.children.diagnostics",),
    oracle="a report is unreadable, or contains each check once with a finite rate",
    seeds=(*EDIT_SEEDS, json.dumps(_checks()).encode()),
    words=(b'"errors":', b'"unit":', b'"seconds":', b'"done":', *_WORDS),
)
def diagnostic_report(data: bytes) -> bool:
    try:
        message = unpack(json_input(data, _checks()))
    except MalformedMessage:
        return False
    try:
        checks = parse_checks(message)
    except Unreadable:
        return False
    assert [each.name for each in checks] == list(CHECK_NAMES)
    for check in checks:
        assert type(check.errors) is int
        assert check.errors >= 0
        assert all(math.isfinite(value) and value >= 0 for value in _numbers(check.measured)), check
    return True


def _numbers(measured: Mapping[str, float]) -> list[float]:
    return list(measured.values())
