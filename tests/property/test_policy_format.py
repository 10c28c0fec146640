"""A policy file is either a policy that the schema accepts, or is refused with a line for each fault."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scrubber.config.policy_file import parse_policy
from scrubber.config.policy_format import dump_policy, policy_schema
from scrubber.config.yaml_document import Location, dump_yaml
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import Policy
from tests.policy_files import FILES

SCHEMA = policy_schema()


def faults(value: Any, schema: dict[str, Any], where: Location = ()) -> Iterator[str]:
    """Return the violations of JSON Schema in ``value``, as far as the schema of a policy uses it."""
    if "$ref" in schema:
        yield from faults(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}
    kind = types.get(schema.get("type", ""), object)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        yield f"{where}: {value!r} is no {schema['type']}"
        return
    if "anyOf" in schema and all([*faults(value, each, where)] for each in schema["anyOf"]):
        yield f"{where}: {value!r} is nothing of {schema['anyOf']}"
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{where}: {value!r} is no choice"
    if isinstance(value, str):
        if not re.search(schema.get("pattern", ""), value) or len(value) < schema.get("minLength", 0):
            yield f"{where}: {value!r} does not match"
    elif isinstance(value, int | float):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{where}: {value!r} is out of range"
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from faults(each, schema.get("items", {}), (*where, position))
    elif isinstance(value, dict):
        yield from (f"{where}: {key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, each in value.items():
            other = schema.get("additionalProperties", {})
            part = schema.get("properties", {}).get(key, other)
            if part is False or key not in schema.get("propertyNames", {}).get("enum", [key]):
                yield f"{where}: {key} is unknown"
            else:
                yield from faults(each, part, (*where, key))


@settings(deadline=None)
@given(FILES)
def test_schema_accepts_every_valid_policy_and_every_policy_dump(file: dict[str, Any]) -> None:
    policy = read(file)
    assert isinstance(policy, Policy)
    assert list(faults(file, SCHEMA)) == []
    assert list(faults(dump_policy(policy, {}), SCHEMA)) == []


def read(file: dict[str, Any]) -> Policy | list[str]:
    try:
        return parse_policy(dump_yaml(file).encode(), "policy.yaml", xids={})
    except InvalidConfiguration as error:
        return str(error).splitlines()


# --- invalid files ----------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 41, 10**6, 10**20, 10**40, 0.0, -0.0, 0.5, 2.5, -3.25, 1e300),
    *(float("inf"), float("-inf"), float("nan")),
    *("", " ", "x", "X y", "none", "never", "always", "true", "quick", "checks", "required", "observe", "release"),
    *("5 seconds", "-1s", "0s", "9ms", "49ms", "50ms", "29.9s", "30s", "1h", "25h", "2m", "1e5", "٣s"),
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
        [{"namespace": "a", "serviceAccount": "b"}],
        [{"namespace": "A", "serviceAccount": None, "c": 1}],
    ),
]


def places(value: Any, where: Location = ()) -> Iterator[Location]:
    """Return all locations in a value, the value's own location last."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*where, key))
    yield where


def known(part: dict[str, Any], where: Location = ()) -> Iterator[Location]:
    """Return the locations of a file that its schema defines."""
    part = SCHEMA["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    for key, each in part.get("properties", {}).items():
        yield (*where, key)
        yield from known(each, (*where, key))
    if "$ref" in part.get("items", {}):
        yield (*where, 0)
        yield from known(part["items"], (*where, 0))


def put(value: Any, where: Location, junk: Any) -> Any:
    """Return ``value`` with ``junk`` at ``where``; missing parents are created."""
    key, *rest = where
    if isinstance(key, int):
        entry = value[0] if isinstance(value, list) and value else {"name": "a", "models": ["x"]}
        return [put(entry, tuple(rest), junk) if rest else junk]
    below = dict(value) if isinstance(value, dict) else {}
    below[key] = put(below.get(key), tuple(rest), junk) if rest else junk
    return below


def accounted_for(file: dict[str, Any]) -> None:
    """Assert that ``file`` is a policy that can be written and read again, or is refused line by line."""
    found = read(file)
    if isinstance(found, Policy):
        assert read(dump_policy(found, {})) == found
        return
    lines = [re.fullmatch(r"policy\.yaml:(\d+): .+[.?]", each, re.DOTALL) for each in found]
    numbers = [int(each[1]) for each in lines if each]
    assert len(numbers) == len(found)
    assert numbers == sorted(numbers)


PLACES = list(known(SCHEMA))
KEYS = sorted({str(part) for where in PLACES for part in where if isinstance(part, str)})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(JUNK))
def test_arbitrary_value_at_any_key_is_read_or_refused_with_its_line(where: Location, junk: Any) -> None:
    accounted_for(put({"name": "mine"}, where, copy.deepcopy(junk)))


@st.composite
def spoiled(draw: st.DrawFn) -> dict[str, Any]:
    """A policy in which up to four things are wrong, or only look wrong."""
    file: dict[str, Any] = copy.deepcopy(draw(FILES))
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.sampled_from([each for each in places(file) if each] or [("zebra",)]))
        around: Any = file
        for part in where[:-1]:
            around = around[part]
        what = draw(st.sampled_from(["junk", "elsewhere", "gone", "again"]))
        if what == "again" and isinstance(around, list):
            around.append(copy.deepcopy(around[0]))
        elif what == "gone" and isinstance(around, dict):
            around.pop(where[-1], None)
        else:
            key = draw(st.sampled_from(KEYS)) if what == "elsewhere" and isinstance(around, dict) else where[-1]
            around[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return file


@settings(deadline=None)
@given(spoiled())
def test_damaged_policy_file_is_read_or_refused_with_a_line_for_each_fault(file: dict[str, Any]) -> None:
    accounted_for(file)
