"""A policy that is written out in the words of its file is the same policy when it is read again."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrubber.config.bundled import find_policy, shipped_policies
from scrubber.config.policy_file import load_policy, parse_policy
from scrubber.config.policy_format import policy_schema, written
from scrubber.config.units import (
    parse_codes,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_window,
    write_codes,
    write_rate,
    write_seconds,
    write_size,
    write_window,
)
from scrubber.config.xid_file import load_xids
from scrubber.config.yaml_lines import as_yaml, read_yaml
from scrubber.domain.policy import Policy
from scrubber.domain.signal_table import ErrorClass
from tests.policy_files import FILES, FLOORS

ROWS = load_xids()
TABLE = {code: row.kind for code, row in ROWS.items()}


def read(values: dict[str, Any]) -> Policy:
    return parse_policy(as_yaml(values).encode(), "policy.yaml", xids=ROWS)


def floors_in_order(policy: Policy) -> list[list[str]]:
    return [list(each.diagnostics.floors) for each in (policy, *(one.policy for one in policy.overrides))]


# -- the promise -------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(FILES)
def test_a_policy_that_is_written_out_and_read_again_is_the_same_policy(file: dict[str, Any]) -> None:
    policy = read(file)
    assert policy.settings == file.get("settings", {})
    for table in (TABLE, {}):
        assert read(written(policy, table)) == policy


@settings(deadline=None)
@given(FLOORS, FLOORS)
def test_the_order_of_an_overrides_floors_survives(of_node: dict[str, Any], of_override: dict[str, Any]) -> None:
    entry = {"name": "other", "models": ["x"], "diagnostics": {"floors": of_override}}
    policy = read({"name": "mine", "diagnostics": {"floors": of_node}, "overrides": [entry]})
    again = read(written(policy, TABLE))
    assert again == policy
    assert floors_in_order(again) == floors_in_order(policy)


@settings(max_examples=50, deadline=None)
@given(FILES)
def test_what_is_written_once_is_written_the_same_way_ever_after(file: dict[str, Any]) -> None:
    once = written(read(file), TABLE)
    assert written(read(once), TABLE) == once


@pytest.mark.parametrize("name", sorted(shipped_policies()))
def test_a_policy_that_ships_is_written_out_as_itself(name: str) -> None:
    policy = load_policy(name)
    assert read(written(policy, TABLE)) == policy


def test_the_shipped_default_is_written_as_its_file_is() -> None:
    """It writes every key out, too: what is shown of another policy can be laid beside it."""
    assert read_yaml(find_policy("default").read_bytes(), "default.yaml").value == written(
        load_policy("default"), TABLE
    )


def keys(schema: dict[str, Any]) -> dict[str, Any]:
    """All that a file can hold, as far as that is fixed."""
    sections = {key: each["$ref"].rpartition("/")[2] for key, each in schema["properties"].items() if "$ref" in each}
    below = {key: policy_schema()["$defs"][name] for key, name in sections.items() if key != "xids"}
    return {key: keys(below[key]) if "properties" in below.get(key, ()) else None for key in schema["properties"]}


def test_every_key_of_a_policys_file_is_written() -> None:
    def fixed(values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        return {key: fixed(each, known[key]) if known[key] else None for key, each in values.items()}

    assert fixed(written(load_policy("default"), TABLE), keys(policy_schema())) == keys(policy_schema())


def test_of_xids_only_those_are_written_that_the_table_has_otherwise() -> None:
    plain = load_policy("default")
    policy = dataclasses.replace(
        plain,
        error_classes={**plain.error_classes, 94: ErrorClass.RESET, 4241: ErrorClass.IGNORE, 4242: ErrorClass.IGNORE},
    )
    assert written(policy, TABLE)["xids"] == {"ignore": ["4241-4242"], "reset": [94]}
    assert set(written(policy, {})["xids"]) == {each.value for each in ErrorClass} - {"unknown"}


def test_an_override_says_what_differs_and_its_own_floors_first() -> None:
    policy = read(
        {
            "name": "mine",
            "diagnostics": {"floors": {"A*": {"host-to-device": "1GB/s"}, "B*": {"host-to-device": "2GB/s"}}},
            "settings": {"a": "1", "b": "2"},
            "overrides": [
                {
                    "name": "other",
                    "models": ["B*"],
                    "diagnostics": {"slow-path": "none", "floors": {"B*": {"host-to-device": "2GB/s"}}},
                    "settings": {"b": "3"},
                    "xids": {"application": [13], "reset": [94]},
                    "limits": {"settle": "5000ms", "reset": "1m"},
                }
            ],
        }
    )
    (override,) = written(policy, TABLE)["overrides"]
    assert override == {
        "name": "other",
        "models": ["B*"],
        "limits": {"reset": "1m"},
        "diagnostics": {"floors": {"B*": {"host-to-device": "2GB/s"}}},
        "settings": {"b": "3"},
        "xids": {"reset": [94]},
    }


WRITTEN_PLAINLY_THEY_WERE_SOMETHING_ELSE = [
    *("", " a", "a ", "1e5", "08", "1.", ".5", "~", "null", "no", "true", "1:30", "2026-11-20", "<<", "="),
    *("a: b", "# c", "- d", "*e", "&f", "? g", "@h", "---", "'", '"', "é", "😀"),
    *("\x01", "\x85", "\u2028", "\ufeff", "a\nb", "a \n b", "x" * 300, "word " * 60),
]


@pytest.mark.parametrize("word", WRITTEN_PLAINLY_THEY_WERE_SOMETHING_ELSE)
def test_a_word_stays_a_word_whatever_it_looks_like(word: str) -> None:
    text = as_yaml({"a": word, "b": [word, word], f"k{word}": {word: word}})
    assert read_yaml(text.encode(), "x.yaml").value == {"a": word, "b": [word, word], f"k{word}": {word: word}}
    assert text.isascii()
    assert all(line == line.rstrip() for line in text.splitlines()), "a terminal may cut what is at the end"


# -- quantities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.05, "50ms"),
        (0.0005, "0.0005s"),
        (2.5, "2.5s"),
        (25.0, "25s"),
        (60.0, "1m"),
        (90.0, "90s"),
        (600.0, "10m"),
        (14400.0, "4h"),
        (86400.0, "24h"),
        (1e-7, "0.0000001s"),
        (1 / 3, 1 / 3),
        (1e300, 1e300),
    ],
)
def test_a_time_is_written_with_its_unit(seconds: float, text: str | float) -> None:
    assert write_seconds(seconds) == text


@given(st.floats(0, allow_infinity=False))
def test_every_time_is_read_as_it_was_written(seconds: float) -> None:
    assert parse_seconds(write_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, 1),
        (512, 512),
        (1000, "1KB"),
        (2**20, "1MiB"),
        (2**30, "1GiB"),
        (20 * 10**9, "20GB"),
        (1500, 1500),
        (3 << 40, "3TiB"),
    ],
)
def test_a_size_is_written_the_shortest_way(size: int, text: str | int) -> None:
    assert write_size(size) == text
    assert write_rate(size) == (f"{text}/s" if isinstance(text, str) else text)


@given(st.integers(1, 10**18) | st.integers(1, 10**15).map(lambda tera: tera * 2**40))
def test_every_size_and_rate_is_read_as_it_was_written(size: int) -> None:
    assert parse_size(write_size(size)) == size
    assert parse_rate(write_rate(size)) == size


@given(st.integers(0, 1439), st.integers(1, 1440))
def test_every_window_is_read_as_it_was_written(begin: int, end: int) -> None:
    if (end - begin) % 1440 == 0:
        end += 1 if end < 1440 else -1
    assert parse_window(write_window((begin * 60.0, end * 60.0))) == (begin * 60.0, end * 60.0)


@given(st.sets(st.integers(1, 40)))
def test_codes_are_written_in_order_as_few_ranges(codes: set[int]) -> None:
    parts = [parse_codes(each, 9999) for each in write_codes(codes)]
    assert [code for part in parts for code in part] == sorted(codes)
    assert all(before[-1] + 1 < after[0] for before, after in itertools.pairwise(parts))
