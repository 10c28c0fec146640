"""A setting that is declared is read, written, described and listed; nothing else has to name it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from scrubber.config.policy_file import parse_policy
from scrubber.config.policy_format import policy_reference, policy_schema, section_of, written
from scrubber.config.values import InvalidValue
from scrubber.config.yaml_lines import as_yaml
from scrubber.domain.declaration import Contradiction, Declaration, ValueType, declarations, setting
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Enforcement, Override, Policy

ROOT = Path(__file__).parents[2]


def declared(
    rule: type = Policy, *above: str, overridable: bool = True
) -> Iterator[tuple[tuple[str, ...], Declaration, bool]]:
    """Every setting below ``rule``: where a file has it, what it declares, and whether an override may have it."""
    for each in declarations(rule).values():
        if each.type is ValueType.SECTION:
            yield from declared(type(each.default), *above, each.key, overridable=each.overridable)
        else:
            yield (*above, each.key), each, overridable and each.overridable


SETTINGS = {".".join(where): (where, each, overridable) for where, each, overridable in declared()}
SCHEMA, DUMP, PAGE = policy_schema(), written(Policy(), {}), policy_reference()
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
    return parse_policy(as_yaml(values).encode(), "policy.yaml", xids={})


def test_a_policy_has_the_settings_that_its_file_has() -> None:
    assert len(SETTINGS) >= 50
    assert set(SETTINGS) >= {
        "name",
        "hand-over",
        "limits.hand-over",
        "limits.memory-rate",
        "stuck.evict-after",
        "overrides",
    }


@pytest.mark.parametrize("rule", [Policy, Override, *{type(each.default) for each in declarations(Policy).values() if each.type is ValueType.SECTION}])  # fmt: skip
def test_every_field_of_a_rule_is_a_setting(rule: type) -> None:
    others = (
        {"digest", "unlisted_error", "error_notes", "signals"}
        if rule is Policy
        else {"policy"}
        if rule is Override
        else set()
    )
    assert {each.name for each in fields(rule)} - declarations(rule).keys() == others


@every_setting
def test_a_setting_says_what_it_is_and_its_default_is_in_its_range(
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
def test_a_range_that_is_declared_is_kept(where: tuple[str, ...], setting: Declaration, overridable: bool) -> None:
    below = None if setting.minimum is None else setting.minimum - (1 if isinstance(setting.default, int) else 0.001)
    above = None if setting.maximum is None else setting.maximum + 1
    for number in (below, above):
        if number is not None:
            with pytest.raises(BadConfiguration, match=f"{where[-1]}: .*(write at|less than one|too slow|negative)"):
                read({"name": "mine", **put(where, number)})


@every_setting
def test_a_setting_is_in_the_schema(where: tuple[str, ...], setting: Declaration, overridable: bool) -> None:
    part = in_schema(where)
    assert part["description"] == setting.description
    numbers = [part, *part.get("anyOf", ())]
    assert setting.minimum is None or setting.minimum in [each.get("minimum") for each in numbers]
    assert setting.maximum is None or setting.maximum in [each.get("maximum") for each in numbers]


@every_setting
def test_a_setting_is_in_a_dump_and_its_default_can_be_written_down(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    assert read({"name": "mine", **put(where, at(DUMP, where))}) == read(
        {"name": at(DUMP, ("name",)) if where == ("name",) else "mine"}
    )


@every_setting
def test_a_setting_is_on_the_reference_page(where: tuple[str, ...], setting: Declaration, overridable: bool) -> None:
    keys = [(*where, entry.value) for entry in setting.entries] or [where]
    for *above, key in keys:
        _, _, below = PAGE.partition(f"## {above[0] if above else 'At the top of a file'}\n")
        (row,) = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith(f"| `{key}` |")]
        assert f"| {'yes' if overridable else 'no'} |" in row
        assert setting.entries or setting.description in row


@every_setting
def test_an_override_may_name_a_setting_unless_it_counts_for_the_whole_node(
    where: tuple[str, ...], setting: Declaration, overridable: bool
) -> None:
    if where == ("name",):
        return  # an override has one of its own
    entry = {"name": "other", "models": ["x"], **put(where, at(DUMP, where))}
    if overridable:
        assert len(read({"name": "mine", "overrides": [entry]}).overrides) == 1
    else:
        with pytest.raises(BadConfiguration, match="counts for the whole node"):
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
            raise Contradiction("kept_bytes", "more than 3 boxes are never quiet")


TOYS = section_of(Toy, "ToySection")


def toys(values: dict[str, Any]) -> Toy:
    toy: Toy = TOYS.changed(Toy(), TOYS.read(values, ("toys",)))
    return toy


def test_a_new_setting_is_read_and_written_because_it_is_declared() -> None:
    said = {"after": "1m", "boxes": 3, "kept": "2MiB", "mode": "enforce", "quiet": False}
    found = Toy(60.0, 3, 2 * 1024 * 1024, Enforcement.ENFORCE, False)
    assert toys(said) == found
    assert TOYS.write(found) == said
    assert toys({}) == Toy()
    assert TOYS.write(Toy()) == {"after": "never", "boxes": 2, "kept": 1024, "mode": "observe", "quiet": True}


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"after": "1ms"}, (("toys", "after"), "toys.after: a time of 0.001 s is impossible here; write at least 500ms, or never")),
        ({"boxes": 5}, (("toys", "boxes"), "toys.boxes: 5 is impossible; write at most 4")),
        ({"mode": "enforced"}, (("toys", "mode"), 'toys.mode: "enforced" is not known; did you mean "enforce"?')),
        ({"boxes": 4}, (("toys", "kept"), "toys.kept: more than 3 boxes are never quiet")),
        ({"box": 1}, (("toys", "box"), 'unknown key "box" in "toys"; did you mean "boxes"?')),
        ({"quiet": None}, (("toys", "quiet"), "toys.quiet: nothing is written here; write its value, or remove the key")),
    ],
)  # fmt: skip
def test_a_new_setting_is_refused_in_the_words_of_all_others(values: dict[str, Any], fault: tuple[object, str]) -> None:
    with pytest.raises(InvalidValue) as caught:
        toys(values)
    assert caught.value.faults == (fault,)


def test_a_new_setting_is_described_because_it_is_declared() -> None:
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
