"""A declared setting is read, written, described and listed; its name occurs nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from scrubber.config.policy_file import parse_policy
from scrubber.config.policy_format import dump_policy, policy_reference, policy_schema, rule_section
from scrubber.config.value_formats import InvalidValue
from scrubber.config.yaml_document import dump_yaml
from scrubber.domain.declaration import Declaration, InvalidSetting, ValueType, camel_case, declarations, setting
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import Enforcement, Infrastructure, Policy, PolicyOverride

ROOT = Path(__file__).parents[2]


def declared(
    rule: type = Policy, *above: str, overridable: bool = True
) -> Iterator[tuple[tuple[str, ...], Declaration, bool]]:
    """Yield every setting below ``rule``: its location in a file, its declaration, and whether it is overridable."""
    for each in declarations(rule).values():
        if each.type is ValueType.SECTION:
            yield from declared(type(each.default), *above, each.key, overridable=each.overridable)
        else:
            yield (*above, each.key), each, overridable and each.overridable


SETTINGS = {".".join(where): (where, each, overridable) for where, each, overridable in declared()}
SCHEMA, DUMP, PAGE = policy_schema(), dump_policy(Policy(), {}), policy_reference()
every_setting = pytest.mark.parametrize(("where", "setting", "overridable"), SETTINGS.values(), ids=SETTINGS)


def at(values: Any, where: tuple[str, ...]) -> Any:
    for key in where:
        values = values[key]
    return values


def put(where: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(where):
        value = {key: value}
    found: dict[str, Any] = value
    return found


def in_schema(where: tuple[str, ...]) -> dict[str, Any]:
    part = SCHEMA
    for key in where:
        part = part["properties"][key]
        part = {**SCHEMA["$defs"][part["$ref"].rpartition("/")[2]], **part} if "$ref" in part else part
    return part


def read(values: dict[str, Any]) -> Policy:
    return parse_policy(dump_yaml(values).encode(), "policy.yaml", xids={})


def test_policy_has_more_than_fifty_settings_including_the_central_ones() -> None:
    assert len(SETTINGS) >= 50
    assert set(SETTINGS) >= {
        "name",
        "handOver",
        "limits.handOver",
        "limits.minClearRate",
        "stuckPods.evictAfter",
        "overrides",
    }


@pytest.mark.parametrize("rule", [Policy, PolicyOverride, *{type(each.default) for each in declarations(Policy).values() if each.type is ValueType.SECTION}])  # fmt: skip
def test_every_field_of_a_policy_rule_is_declared_as_a_setting(rule: type) -> None:
    others = (
        {"digest", "unlisted_error", "error_notes", "signals", "by_backend"}
        if rule is Policy
        else {"policy"}
        if rule is PolicyOverride
        else {"all_units", "all_pods"}
        if rule is Infrastructure
        else set()
    )
    assert {each.name for each in fields(rule)} - declarations(rule).keys() == others


@every_setting
def test_every_setting_has_a_description_and_a_default_within_its_range(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    assert setting.description.endswith(".")
    assert setting.type in ValueType
    default = setting.default
    if default is None:
        assert setting.optional
    else:
        assert setting.minimum is None or default >= setting.minimum
        assert setting.maximum is None or default <= setting.maximum


@every_setting
def test_value_outside_the_declared_range_is_refused(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    below = (
        None
        if setting.minimum is None
        else setting.minimum - (0.001 if isinstance(setting.default, float) or setting.type is ValueType.SECONDS else 1)
    )
    above = None if setting.maximum is None else setting.maximum + 1
    for number in (below, above):
        if number is not None:
            with pytest.raises(InvalidConfiguration, match=f"{where[-1]}: .*(write at|less than one|too low|negative)"):
                read({"name": "mine", **put(where, number)})


@every_setting
def test_every_setting_is_in_the_schema_with_description_and_range(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    part = in_schema(where)
    assert part["description"] == setting.description
    numbers = [part, *part.get("anyOf", ())]
    assert setting.minimum is None or setting.minimum in [each.get("minimum") for each in numbers]
    assert setting.maximum is None or setting.maximum in [each.get("maximum") for each in numbers]


@every_setting
def test_every_setting_is_in_the_policy_dump_and_its_dumped_value_reads_back(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    assert read({"name": "mine", **put(where, at(DUMP, where))}) == read(
        {"name": at(DUMP, ("name",)) if where == ("name",) else "mine"}
    )


@every_setting
def test_every_setting_is_on_the_reference_page(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    keys = [(*where, camel_case(entry)) for entry in setting.entries] or [where]
    for *above, key in keys:
        _, _, below = PAGE.partition(f"## {above[0] if above else 'At the top of a file'}\n")
        (row,) = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith(f"| `{key}` |")]
        assert f"| {'yes' if overridable else 'no'} |" in row
        assert setting.entries or setting.description in row


@every_setting
def test_override_may_name_every_setting_that_is_not_node_wide(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    if where == ("name",):
        return  # an override has its own
    entry = {"name": "other", "models": ["x"], **put(where, at(DUMP, where))}
    if overridable:
        assert len(read({"name": "mine", "overrides": [entry]}).overrides) == 1
    else:
        with pytest.raises(InvalidConfiguration, match="applies to the whole node"):
            read({"name": "mine", "overrides": [entry]})


# --- a new setting is one line ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy:
    """How toys are put away."""

    after: float | None = setting(None, "When they are.", ValueType.SECONDS, minimum=0.5, optional=True)
    boxes: int = setting(2, "Into how many boxes.", minimum=1, maximum=4, overridable=False)
    kept_bytes: int = setting(1024, "What stays.", ValueType.BYTES, key="kept")
    mode: Enforcement = setting(Enforcement.OBSERVE, "Whether anybody has to.")
    quiet: bool = setting(True, "Without a sound.")

    def check(self) -> None:
        if self.quiet and self.boxes > 3:
            raise InvalidSetting("kept_bytes", "more than 3 boxes are never quiet")


TOYS = rule_section(Toy, "ToySection")


def toys(values: dict[str, Any]) -> Toy:
    toy: Toy = TOYS.merge(Toy(), TOYS.read(values, ("toys",)))
    return toy


def test_newly_declared_setting_is_read_and_written() -> None:
    written = {"after": "1m", "boxes": 3, "kept": "2MiB", "mode": "enforce", "quiet": False}
    found = Toy(60.0, 3, 2 * 1024 * 1024, Enforcement.ENFORCE, False)
    assert toys(written) == found
    assert TOYS.write(found) == written
    assert toys({}) == Toy()
    assert TOYS.write(Toy()) == {"after": "never", "boxes": 2, "kept": 1024, "mode": "observe", "quiet": True}


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"after": "1ms"}, (("toys", "after"), "toys.after: a time of 0.001 s is too short here; write at least 500ms, or never")),
        ({"boxes": 5}, (("toys", "boxes"), "toys.boxes: 5 is too large; write at most 4")),
        ({"mode": "enforced"}, (("toys", "mode"), 'toys.mode: "enforced" is not a valid value; did you mean "enforce"?')),
        ({"boxes": 4}, (("toys", "kept"), "toys.kept: more than 3 boxes are never quiet")),
        ({"box": 1}, (("toys", "box"), 'unknown key "box" in "toys"; did you mean "boxes"?')),
        ({"quiet": None}, (("toys", "quiet"), "toys.quiet: the value is missing; write one, or remove the key")),
    ],
)  # fmt: skip
def test_invalid_value_of_a_newly_declared_setting_is_refused_like_any_other(
    values: dict[str, Any], fault: tuple[object, str]
) -> None:
    with pytest.raises(InvalidValue) as caught:
        toys(values)
    assert caught.value.faults == (fault,)


def test_newly_declared_setting_is_described_in_the_schema() -> None:
    definitions: dict[str, Any] = {}
    assert TOYS.schema(definitions) == {"$ref": "#/$defs/ToySection"}
    assert definitions["ToySection"]["description"] == "How toys are put away."
    properties = definitions["ToySection"]["properties"]
    assert list(properties) == ["after", "kept", "mode", "quiet", "boxes"], "what an override may change comes first"
    assert properties["boxes"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 4,
        "default": 2,
        "description": "Into how many boxes.",
        "title": "Boxes",
    }
