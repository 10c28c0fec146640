"""The format that is derived from the declarations and the one that was written by hand agree about every file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrubber.config import policy_file, policy_format, policy_model, policy_written
from scrubber.config.complaints import validated
from scrubber.config.policy_model import PolicyFile
from scrubber.config.xid_file import load_xids
from scrubber.config.yaml_lines import Located, Location, read_yaml
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Policy
from tests.policy_files import FILES
from tests.unit import test_policy_file, test_policy_overrides

ROOT = Path(__file__).parents[2]
TABLE = {code: row.kind for code, row in load_xids().items()}


def located(value: Any) -> Located:
    """``value`` with a line of its own for each of its parts."""
    keys: dict[Location, int] = {}
    values: dict[Location, int] = {}
    lines = count(1)

    def number(part: Any, where: Location) -> None:
        values[where] = next(lines)
        for key, each in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
            if isinstance(part, dict):
                keys[*where, key] = next(lines)
            number(each, (*where, key))

    number(value, ())
    return Located(value, keys, values)


def old(document: Located) -> Policy | str:
    try:
        return validated(PolicyFile, document, "policy.yaml").policy()
    except BadConfiguration as error:
        return str(error)


def new(document: Located) -> Policy | str:
    try:
        return policy_format.read_policy(document, "policy.yaml")
    except BadConfiguration as error:
        return str(error)


def of_all_devices(policy: Policy) -> list[Policy]:
    return [policy, *(each.policy for each in policy.overrides)]


def agree(value: Any) -> bool:
    """Assert that both read ``value`` alike; return whether it is a policy."""
    document = value if isinstance(value, Located) else located(value)
    before, after = old(document), new(document)
    assert after == before
    if isinstance(before, str):
        return False
    assert isinstance(after, Policy)
    for table in (TABLE, {}):
        dumps = (policy_format.written(after, table), policy_written.written(before, table))
        assert json.dumps(dumps[0]) == json.dumps(dumps[1]), "in the same order, too"
    for one, other in zip(of_all_devices(after), of_all_devices(before), strict=True):
        assert policy_format.policy_digest(one) == policy_file.policy_digest(other)
    return True


def test_the_schemas_are_equal() -> None:
    assert json.dumps(policy_format.policy_schema()) == json.dumps(policy_model.policy_schema())


def texts() -> Iterator[bytes]:
    """Every policy in the tree, and every text that a test of policies is about."""
    for path in sorted([*ROOT.glob("policies/*.yaml"), *ROOT.glob("tests/**/*.yaml")]):
        yield path.read_bytes()
    for module in (test_policy_file, test_policy_overrides):
        for test in vars(module).values():
            for mark in getattr(test, "pytestmark", ()):
                for each in mark.args[1]:
                    first = next(iter(getattr(each, "values", each)), b"")
                    if isinstance(first, str | bytes):
                        yield first.encode() if isinstance(first, str) else first
        yield from (
            each.encode() for each in re.findall(r'"""\\\n(.*?)"""', Path(module.__file__ or "").read_text(), re.DOTALL)
        )
    for page in (ROOT / "docs").glob("**/*.md"):
        yield from (
            each.encode() for each in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        )


def test_every_policy_of_the_tree_is_read_alike() -> None:
    found = []
    for text in texts():
        for content in (text, b"name: example\n" + text):
            try:
                document = read_yaml(content, "policy.yaml")
            except BadConfiguration:
                continue
            if isinstance(document.value, dict):
                found.append(agree(document))
    assert found.count(True) > 30
    assert found.count(False) > 100


CASES = {True: 0, False: 0}
"""How many policies, and how many files that are none, were compared."""


@settings(max_examples=500, deadline=None)
@given(FILES)
def test_a_file_is_read_alike(file: dict[str, Any]) -> None:
    CASES[agree(file)] += 1


# --- files that are no policies ---------------------------------------------------------------------------------------

JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 41, 10**6, 10**20, 10**40, 0.0, -0.0, 0.5, 2.5, -3.25, 1e300),
    *(float("inf"), float("-inf"), float("nan")),
    *("", " ", "x", "X y", "none", "never", "always", "true", "quick", "checks", "required", "observe", "at-release"),
    *(
        "5 seconds",
        "-1s",
        "0s",
        "9ms",
        "49ms",
        "50ms",
        "29.9s",
        "30s",
        "1h",
        "25h",
        "2m",
        "1e5",
        "٣s",
        "5s\n",
        "mine\n",
    ),
    *("0", "1", "64MiB", "1GiB/s", "20 Gbit/s", "0B", "79", "69-72", "72-69", "0-3", "9999", "10000", "1-10000"),
    *("02:00-05:00", "22:00-04:00", "24:00-24:00", "23:00-24:30", "5:00 - 6:00", "00:00-24:00"),
    *("a.service", "a@1.service", ".service", "nvidia.com/gpu", "gpu", "a" * 64, "é"),
    *([], [None], [1, 2], ["a"], ["*"], [[]], [{}], ["79", 79], [13, "12-14"], ["a.service", 3, ""], [True]),
    *(
        {},
        {"a": 1},
        {"a": None},
        {"a": {}},
        {"too-hot": "5m"},
        {"too-hott": 1},
        {"lost": None},
        {"host-to-device": "1GB/s"},
    ),
    *({"H*": {"host-to-device": "1GB/s"}}, {"H*": {"matrix": 1}}, {"H*": None}, {"H*": {"matrix-product": None}}),
    *({"name": "a", "models": ["x"]}, [{"name": "a", "models": ["x"]}], [{"name": "a"}], [{"models": ["*"]}]),
    *(
        {"namespace": "a"},
        [{"namespace": "a", "service-account": "b"}],
        [{"namespace": "A", "service-account": None, "c": 1}],
    ),
]

KEYS = sorted(
    {key for part in (policy_model.policy_schema(), *policy_model.policy_schema()["$defs"].values()) for key in part.get("properties", ())}
)  # fmt: skip


def settings_of(schema: dict[str, Any], part: dict[str, Any], where: Location = ()) -> Iterator[Location]:
    """The places of a file that its schema knows."""
    part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    for key, each in part.get("properties", {}).items():
        yield (*where, key)
        yield from settings_of(schema, each, (*where, key))
    if "$ref" in part.get("items", {}):
        yield (*where, 0)
        yield from settings_of(schema, part["items"], (*where, 0))


def put(value: Any, where: Location, junk: Any) -> Any:
    """``value`` with ``junk`` at ``where``; what is missing on the way there is made."""
    key, *rest = where
    if isinstance(key, int):
        entry = value[0] if isinstance(value, list) and value else {"name": "a", "models": ["x"]}
        return [put(entry, tuple(rest), junk) if rest else junk]
    below = dict(value) if isinstance(value, dict) else {}
    below[key] = put(below.get(key), tuple(rest), junk) if rest else junk
    return below


SCHEMA = policy_model.policy_schema()
PLACES = list(settings_of(SCHEMA, SCHEMA))


@pytest.mark.parametrize("where", PLACES, ids=lambda where: ".".join(map(str, where)))
def test_whatever_is_written_in_a_place_is_read_alike(where: Location) -> None:
    for junk in JUNK:
        CASES[agree(put({"name": "mine"}, where, junk))] += 1
    for key in KEYS:
        CASES[agree(put({"name": "mine"}, (*where[:-1], key), "a"))] += 1


def places(value: Any, where: Location = ()) -> Iterator[Location]:
    """All places of a value, its own last."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*where, key))
    yield where


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """A policy in which up to four things are wrong, or only look wrong."""
    file = copy.deepcopy(draw(FILES))
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.sampled_from(list(places(file))))
        if not where:
            file[draw(st.sampled_from([*KEYS, "zebra", "limts", "[key"]))] = copy.deepcopy(draw(st.sampled_from(JUNK)))
            continue
        around: Any = file
        for part in where[:-1]:
            around = around[part]
        what = draw(st.sampled_from(["junk", "unknown", "elsewhere", "gone", "under", "again"]))
        if what == "junk":
            around[where[-1]] = copy.deepcopy(draw(st.sampled_from(JUNK)))
        elif what == "gone" and isinstance(around, dict):
            del around[where[-1]]
        elif what == "again" and isinstance(around, list):
            around.append(copy.deepcopy(around[0]))
        elif isinstance(around, dict):
            key = {"unknown": draw(st.text(min_size=1, max_size=5)), "elsewhere": draw(st.sampled_from(KEYS))}.get(
                what, str(where[-1]).replace("-", "_").title()
            )
            around[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return file


@settings(max_examples=1500, deadline=None)
@given(spoiled())
def test_a_spoiled_file_is_read_alike(file: dict[str, Any]) -> None:
    CASES[agree(file)] += 1


def test_enough_was_compared() -> None:
    assert CASES[True] > 1000
    assert CASES[False] > 10000
