"""Files that operators write: policies, tables, the command backend's file, and values with units."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import yaml

from scrubber.config.bundled import find_policy
from scrubber.config.command_file import parse_command_file
from scrubber.config.infrastructure_file import parse_infrastructure_table
from scrubber.config.policy_file import parse_policy
from scrubber.config.policy_format import dump_policy
from scrubber.config.units import (
    format_codes,
    format_seconds,
    format_size,
    format_window,
    parse_codes,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_window,
)
from scrubber.config.xid_file import parse_xid_table
from scrubber.config.yaml_document import dump_yaml, parse_yaml
from scrubber.domain.errors import InvalidConfiguration
from tests.fuzz.structure import EDIT_SEEDS, json_input, mostly_edited
from tests.fuzz.target import SLOW_GOAL, target

_NAME = "file.yaml"
_WORDS = (
    b": ",
    b"- ",
    b"\n  ",
    b"|\n",
    b"*a",
    b"&a ",
    b"!!",
    b"? ",
    b"{",
    b"[" * 500,
    b"- " * 500,
    b"\xef\xbb\xbf",
    b"---\n",
)


def _refused(read: Callable[[bytes], object], content: bytes) -> bool:
    """Whether ``read`` refuses ``content``, each line of its message naming the file, and a line unless it is too large."""
    try:
        read(content)
    except InvalidConfiguration as error:
        lines = str(error).split("\n")
        assert all(line.startswith(f"{_NAME}:") for line in lines), lines
        return True
    return False


@target(
    "yaml",
    parser="YAML, with lines",
    covers=("scrubber.config.yaml_document",),
    oracle="a document is refused with the number of a line, or its value is written and read back without a change; JSON has "
    "the value that Python's JSON reader finds",
    seeds=(
        *EDIT_SEEDS,
        b"a: 1\nb: [x, 'y', \"z\\n\"]\nc:\n  - d: .5\n",
        b"a: &x 1\nb: *x\n",
        b"? a\n: b\n",
        b"a: |\n  text\n",
        b"1e3",
    ),
    words=_WORDS,
    share=60,
    goal=SLOW_GOAL,
)
def yaml_file(data: bytes) -> bool:
    document = json_input(data, {"a": [1, "x", {"b": None}], "c": {"d": 0.5, "e": True}})
    if _refused(lambda content: parse_yaml(content, _NAME), document):
        return False
    found = parse_yaml(document, _NAME)
    lines = document.count(b"\n") + document.count(b"\r") + 1
    assert all(1 <= line <= lines + document.count("\u2028".encode()) + 1 for line in found.value_lines.values())
    again = parse_yaml(dump_yaml({"value": found.value}).encode(), _NAME).value
    assert repr(again) == repr({"value": found.value})  # NaN is not equal to itself
    return True


_POLICY = yaml.safe_load(find_policy("default").read_text())


@target(
    "policy",
    parser="a policy",
    covers=("scrubber.config.policy_file", "scrubber.config.policy_format", "scrubber.config.value_formats"),
    oracle="a policy is refused with one line for each error, or it is written and read back without a change, with an equal "
    "digest",
    seeds=(
        *EDIT_SEEDS,
        *(b"\0" + bytes((place, 0, value)) for place in range(0, 60, 7) for value in (3, 6, 17)),
        b"name: mine\nreset: required\nlimits: {handOver: 20, slowPath: 1.5m, minClearRate: 1GiB/s}\n",
        b"name: mine\nxids: {reboot: [79, 110-112]}\noverrides:\n- name: a\n  namespaces: [team-*]\n  sharing: never\n",
    ),
    words=(b"handOver", b"limits", b"overrides", b"namespaces", b"1.5m", b"64MiB/s", b"required", b"never", *_WORDS),
    share=60,
    goal=SLOW_GOAL,
)
def policy(data: bytes) -> bool:
    content = json_input(data, _POLICY)

    def read(content: bytes) -> Any:
        return parse_policy(content, _NAME, xids={})

    if _refused(read, content):
        return False
    found = read(content)
    again = read(dump_yaml(dump_policy(found, {})).encode())
    assert again == found
    assert again.digest == found.digest
    return True


_XIDS = {
    "sources": {"catalog": "x"},
    "xids": [
        {"code": 79, "class": "reboot", "source": "catalog", "note": "off the bus"},
        {"code": "110-112", "class": "ignore", "source": "catalog", "note": "information"},
    ],
}
_INFRASTRUCTURE = {
    "sources": {"chart": "x"},
    "groups": {"cloud": {"note": "n", "namespaces": ["kube-system"]}},
    "agents": [
        {"group": "cloud", "name": "agent", "class": "monitoring", "source": "chart", "serviceAccounts": ["a"]},
        {"group": "cloud", "name": "gpud", "class": "monitoring", "source": "chart", "unit": "gpud.service"},
    ],
}
_COMMAND = {"program": "/bin/x", "deadlines": {"inventory": "1s"}, "environment": {"A": "b"}, "pollInterval": 5}


@target(
    "xid-table",
    parser="a table of XIDs",
    covers=("scrubber.config.xid_file", "scrubber.config.value_formats"),
    oracle="a table is refused with one line for each error, or its codes are positive, in order, and explained",
    seeds=(
        *EDIT_SEEDS,
        b"# table\nsources: {a: b}\nxids:\n- {code: 79-81, class: reboot, source: a, note: off the bus}\n",
    ),
    words=(b"code", b"class", b"source", b"note", b"79-81", *_WORDS),
    share=60,
    goal=SLOW_GOAL,
)
def xid_table(data: bytes) -> bool:
    content = mostly_edited(data, _XIDS)
    if _refused(lambda content: parse_xid_table(content, _NAME), content):
        return False
    found = parse_xid_table(content, _NAME)
    assert list(found) == sorted(found)
    assert all(code > 0 and row.note for code, row in found.items())
    return True


@target(
    "infrastructure-table",
    parser="a table of infrastructure",
    covers=("scrubber.config.infrastructure_file", "scrubber.config.value_formats"),
    oracle="a table is refused with one line for each error, or every agent is in the group under which it is listed, and no "
    "group is empty",
    seeds=(
        *EDIT_SEEDS,
        (
            b"# table\nsources: {chart: x}\ngroups: {cloud: {note: n, namespaces: [kube-system]}}\n"
            b"agents: [{group: cloud, name: agent, class: monitoring, source: chart}]\n"
        ),
    ),
    words=(b"groups", b"agents", b"serviceAccounts", b"unit", b"namespaces", b"gpud.service", *_WORDS),
    goal=SLOW_GOAL,
)
def infrastructure_table(data: bytes) -> bool:
    content = mostly_edited(data, _INFRASTRUCTURE)
    if _refused(lambda content: parse_infrastructure_table(content, _NAME), content):
        return False
    found = parse_infrastructure_table(content, _NAME)
    assert all(group.agents and all(each.group == name for each in group.agents) for name, group in found.items())
    return True


@target(
    "command-file",
    parser="the file of the command backend",
    covers=("scrubber.config.command_file", "scrubber.config.value_formats"),
    oracle="a file is refused with one line for each error, or names an absolute program and positive times",
    seeds=(
        *EDIT_SEEDS,
        b"# file\nprogram: /bin/x\ndeadlines: {inventory: 500ms}\nenvironment: {A: b}\npollInterval: 5s\n",
    ),
    words=(b"program", b"deadlines", b"environment", b"pollInterval", b"500ms", *_WORDS),
    goal=SLOW_GOAL,
)
def command_file(data: bytes) -> bool:
    content = mostly_edited(data, _COMMAND)
    if _refused(lambda content: parse_command_file(content, _NAME), content):
        return False
    found = parse_command_file(content, _NAME)
    assert found.program.is_absolute()
    assert all(0 < seconds < float("inf") for seconds in (*found.deadlines.values(), found.poll_interval))
    assert not any("\0" in value for pair in found.environment.items() for value in pair), found.environment
    return True


@target(
    "units",
    parser="times, sizes, rates, windows and codes",
    covers=("scrubber.config.units",),
    oracle="a value is refused with its reason, or is formatted as a text that is parsed as the same value",
    seeds=(b"25s", b"1.5GiB", b"64MiB/s", b"22:00-04:00", b"69-72", b"500 ms", b"1e3"),
    words=(b"ms", b"GiB", b"/s", b":", b"-", b"999999999999999999"),
    longest=64,
)
def units(data: bytes) -> bool:
    text = data.decode(errors="surrogateescape")
    values: tuple[object, ...] = (text,)
    with contextlib.suppress(ValueError, RecursionError):
        values = (text, json.loads(text))
    accepted = False
    for value in values:
        for parse, form in (
            (parse_seconds, format_seconds),
            (parse_size, format_size),
            (parse_rate, format_size),
            (parse_window, format_window),
            (lambda raw: parse_codes(raw, 10_000), format_codes),
        ):
            try:
                found: Any = parse(value)
            except ValueError as error:
                assert str(error)
                continue
            accepted = True
            written: Any = form(found)
            parts = written if isinstance(written, list) else [written]
            again: list[Any] = [parse(each) for each in parts]
            assert found == (tuple(chain(*again)) if isinstance(written, list) else again[0])
    return accepted
