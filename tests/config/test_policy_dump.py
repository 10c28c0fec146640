"""A policy that is written in the format of its file is the same policy when it is read again."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.config.bundled import bundled_policies, find_policy
from scrubber.config.policy_file import load_policy, parse_policy
from scrubber.config.policy_format import dump_policy, policy_schema
from scrubber.config.units import (
    format_codes,
    format_rate,
    format_seconds,
    format_size,
    format_window,
    parse_codes,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_window,
)
from scrubber.config.xid_file import load_xid_table
from scrubber.config.yaml_document import dump_yaml, parse_yaml
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import Policy
from tests.policy_files import FILES, FLOORS

ROWS = load_xid_table()
TABLE = {code: row.error_class for code, row in ROWS.items()}


def read(values: dict[str, Any]) -> Policy:
    return parse_policy(dump_yaml(values).encode(), "policy.yaml", xids=ROWS)


def floors_in_order(policy: Policy) -> list[list[str]]:
    return [list(each.diagnostics.min_rates) for each in (policy, *(one.policy for one in policy.overrides))]


# -- round trip --------------------------------------------------------------------------------------------------------


@given(FILES)
def test_dumped_policy_reads_back_as_the_same_policy(file: dict[str, Any]) -> None:
    policy = read(file)
    assert policy.settings == file.get("settings", {})
    for table in (TABLE, {}):
        assert read(dump_policy(policy, table)) == policy


@given(FLOORS, FLOORS)
def test_order_of_an_overrides_minimum_rates_survives_a_dump(
    of_node: dict[str, Any], of_override: dict[str, Any]
) -> None:
    entry = {"name": "other", "models": ["x"], "diagnostics": {"minRates": of_override}}
    policy = read({"name": "mine", "diagnostics": {"minRates": of_node}, "overrides": [entry]})
    again = read(dump_policy(policy, TABLE))
    assert again == policy
    assert floors_in_order(again) == floors_in_order(policy)


@given(FILES)
def test_dump_of_a_dumped_policy_is_the_same(file: dict[str, Any]) -> None:
    once = dump_policy(read(file), TABLE)
    assert dump_policy(read(once), TABLE) == once


@pytest.mark.parametrize("name", sorted(bundled_policies()))
def test_bundled_policy_survives_a_dump(name: str) -> None:
    policy = load_policy(name)
    assert read(dump_policy(policy, TABLE)) == policy


def test_dump_of_the_bundled_default_policy_equals_its_file() -> None:
    """The file also contains every key, so that it can be compared with the dump of another policy."""
    assert parse_yaml(find_policy("default").read_bytes(), "default.yaml").value == dump_policy(
        load_policy("default"), TABLE
    )


def keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Return all keys that a file can contain, as far as they are fixed."""
    sections = {key: each["$ref"].rpartition("/")[2] for key, each in schema["properties"].items() if "$ref" in each}
    below = {key: policy_schema()["$defs"][name] for key, name in sections.items() if key not in ("xids", "errors")}
    return {key: keys(below[key]) if "properties" in below.get(key, ()) else None for key in schema["properties"]}


def test_policy_dump_contains_every_key() -> None:
    def fixed(values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        return {key: fixed(each, known[key]) if known[key] else None for key, each in values.items()}

    assert fixed(dump_policy(load_policy("default"), TABLE), keys(policy_schema())) == keys(policy_schema())


def test_policy_dump_lists_only_xids_that_differ_from_the_table() -> None:
    plain = load_policy("default")
    policy = dataclasses.replace(
        plain,
        error_classes={**plain.error_classes, 94: ErrorClass.RESET, 4241: ErrorClass.IGNORE, 4242: ErrorClass.IGNORE},
    )
    assert dump_policy(policy, TABLE)["xids"] == {"ignore": ["4241-4242"], "reset": [94]}
    assert set(dump_policy(policy, {})["xids"]) == {each.value for each in ErrorClass} - {"unknown"}


def test_dump_of_an_override_contains_differences_only_with_its_own_rates_first() -> None:
    policy = read(
        {
            "name": "mine",
            "diagnostics": {"minRates": {"A*": {"host-to-device": "1GB/s"}, "B*": {"host-to-device": "2GB/s"}}},
            "settings": {"a": "1", "b": "2"},
            "overrides": [
                {
                    "name": "other",
                    "models": ["B*"],
                    "diagnostics": {"slowPath": "none", "minRates": {"B*": {"host-to-device": "2GB/s"}}},
                    "settings": {"b": "3"},
                    "xids": {"application": [13], "reset": [94]},
                    "limits": {"unknownPodIdlePeriod": "5000ms", "reset": "1m"},
                }
            ],
        }
    )
    (override,) = dump_policy(policy, TABLE)["overrides"]
    assert override == {
        "name": "other",
        "models": ["B*"],
        "limits": {"reset": "1m"},
        "diagnostics": {"minRates": {"B*": {"host-to-device": "2GB/s"}}},
        "settings": {"b": "3"},
        "xids": {"reset": [94]},
    }


WRITTEN_PLAINLY_THEY_WERE_SOMETHING_ELSE = [
    *("", " a", "a ", "1e5", "08", "1.", ".5", "~", "null", "no", "true", "1:30", "2026-11-20", "<<", "="),
    *("a: b", "# c", "- d", "*e", "&f", "? g", "@h", "---", "'", '"', "é", "😀"),
    *("\x01", "\x85", "\u2028", "\ufeff", "a\nb", "a \n b", "x" * 300, "word " * 60),
]


@pytest.mark.parametrize("word", WRITTEN_PLAINLY_THEY_WERE_SOMETHING_ELSE)
def test_strings_survive_a_yaml_dump_whatever_they_contain(word: str) -> None:
    text = dump_yaml({"a": word, "b": [word, word], f"k{word}": {word: word}})
    assert parse_yaml(text.encode(), "x.yaml").value == {"a": word, "b": [word, word], f"k{word}": {word: word}}
    assert text.isascii()
    assert all(line == line.rstrip() for line in text.splitlines()), "a terminal may cut what is at the end"


# -- quantities with units ---------------------------------------------------------------------------------------------


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
def test_duration_is_formatted_with_its_unit(seconds: float, text: str | float) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, allow_infinity=False))
def test_every_formatted_duration_parses_to_the_same_value(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


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
def test_size_is_formatted_in_its_shortest_form(size: int, text: str | int) -> None:
    assert format_size(size) == text
    assert format_rate(size) == (f"{text}/s" if isinstance(text, str) else text)


@given(st.integers(1, 10**18) | st.integers(1, 10**15).map(lambda tera: tera * 2**40))
def test_every_formatted_size_and_rate_parses_to_the_same_value(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert parse_rate(format_rate(size)) == size


@given(st.integers(0, 1439), st.integers(1, 1440))
def test_every_formatted_window_parses_to_the_same_value(begin: int, end: int) -> None:
    if (end - begin) % 1440 == 0:
        end += 1 if end < 1440 else -1
    assert parse_window(format_window((begin * 60.0, end * 60.0))) == (begin * 60.0, end * 60.0)


@given(st.sets(st.integers(1, 40)))
def test_xid_codes_are_formatted_in_order_as_few_ranges(codes: set[int]) -> None:
    parts = [parse_codes(each, 9999) for each in format_codes(codes)]
    assert [code for part in parts for code in part] == sorted(codes)
    assert all(before[-1] + 1 < after[0] for before, after in itertools.pairwise(parts))
