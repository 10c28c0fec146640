"""The format of a policy file, derived from the domain's declarations: how it is read, written and described.

Settings are named here only where a file needs a special notation. A setting that a file omits has its declared
default, so a policy contains only what it changes; an override contains only its differences from the file that it is
in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from scrubber.config.infrastructure_file import load_infrastructure_table
from scrubber.config.units import format_codes
from scrubber.config.value_formats import (
    CODES,
    DEVICE_SETTING,
    DNS_NAME,
    NAME,
    NON_EMPTY_TEXT,
    RATE,
    RESOURCE,
    SERVICE_ACCOUNT_PATTERN,
    SIZE,
    SYSTEMD_UNIT,
    Boolean,
    Choice,
    Duration,
    Integer,
    KeyFormat,
    KnownName,
    ListOf,
    MappingOf,
    SectionFormat,
    TimeWindow,
    ValueFormat,
    json_schema,
    read_document,
    refuse,
    refuse_type,
)
from scrubber.config.yaml_document import Location, YamlDocument, dump_yaml
from scrubber.domain.declaration import Declaration, InvalidSetting, ValueType, camel_case, declarations, summary
from scrubber.domain.diagnostics import CHECK_NAMES
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.infrastructure import InfrastructureClass, InfrastructurePod
from scrubber.domain.policy import Policy, PolicyOverride, RequiredProof

__all__ = [
    "RuleSection",
    "dump_policy",
    "override_name",
    "policy_reference",
    "policy_schema",
    "read_policy",
    "rule_section",
]

_Document = dict[str, Any]
"""Keys as in a file, with values that YAML can represent."""


def read_policy(document: YamlDocument, name: str) -> Policy:
    """Read a policy; ``name`` is the name of its file in messages. XIDs are those in the file, digests are empty.

    Raises:
        InvalidConfiguration: one line for each error, in the order of the file.
    """
    found: Policy = read_document(_FILE, document, name)
    return found


def policy_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a policy file, for editors; generated into ``policies/schema/``."""
    return json_schema(_FILE, "Scrub policy")


def dump_policy(policy: Policy, table: Mapping[int, ErrorClass]) -> _Document:
    """Return the content of a complete policy file. Reading it gives the same policy.

    Args:
        policy: as it was read from a file.
        table: the classes of the XIDs that need not be written.
    """
    overrides = [_override_document(each, policy) for each in policy.overrides]
    return {
        **_FILE.write(replace(policy, overrides=())),
        "xids": _xids(policy.error_classes, table),
        "overrides": overrides,
    }


def override_name(override: PolicyOverride) -> str:
    """Return the name of an override in its file; its policy is named ``<policy>/<override>``."""
    return override.policy.name.partition("/")[2]


# --- sections -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RuleSection(SectionFormat):
    """The settings that a rule declares. Reading returns those that are written, by the field names of the rule.

    Attributes:
        is_complete: nothing else changes the rule, so settings that exclude each other are refused immediately.
    """

    rule: type = object
    is_complete: bool = True

    def read(self, raw: Any, where: Location) -> Any:
        values = super().read(raw, where)
        found = {name: values[each.key] for name, each in declarations(self.rule).items() if each.key in values}
        if self.is_complete:
            self.check(self.merge(self.rule(), found), where)
        return found

    def check(self, rule: Any, where: Location) -> None:
        """Refuse a rule whose settings exclude each other."""
        if not hasattr(rule, "check"):
            return
        try:
            rule.check()
        except InvalidSetting as error:
            refuse((*where, declarations(self.rule)[error.field].key), str(error))

    def write(self, value: Any) -> Any:
        kinds = self.kinds()
        return {each.key: kinds[name].write(getattr(value, name)) for name, each in declarations(self.rule).items()}

    def merge(self, before: Any, after: Any) -> Any:
        kinds = self.kinds()
        return replace(before, **{name: kinds[name].merge(getattr(before, name), each) for name, each in after.items()})

    def kinds(self) -> dict[str, ValueFormat]:
        """Return the value formats by the field names of the rule, in declaration order."""
        kinds = {key.name: key.kind for key in self.keys}
        return {name: kinds[each.key] for name, each in declarations(self.rule).items()}


@dataclass(frozen=True)
class _Proofs(SectionFormat):
    """The required proof for each kind of hand-over."""

    check: Callable[[Any], None] | None = None

    def read(self, raw: Any, where: Location) -> dict[HandOverKind, RequiredProof]:
        values = super().read(raw, where)
        proofs = {kind: values[camel_case(kind)] for kind in HandOverKind if camel_case(kind) in values}
        try:
            if self.check is not None:
                self.check(proofs)
        except InvalidSetting as error:
            refuse((*where, error.field), str(error))
        return proofs

    def write(self, value: Any) -> Any:
        return {camel_case(kind): proof.value for kind, proof in value.items()}

    def merge(self, before: Any, after: Any) -> Any:
        return {**before, **after}


@dataclass(frozen=True)
class _Xids(SectionFormat):
    """The codes of each class, which messages call ``noun``. Reading returns the class of each code."""

    noun: str = "XID"

    def read(self, raw: Any, where: Location) -> dict[int, ErrorClass]:
        lists = super().read(raw, where)
        classes: dict[int, ErrorClass] = {}
        for kind in ErrorClass:
            for position, codes in enumerate(lists.get(kind.value, ())):
                for code in codes:
                    if code in classes:
                        places = " and ".join(dict.fromkeys((classes[code].value, kind.value)))
                        message = f"{self.noun} {code} is listed twice, under {places}; keep one of them"
                        refuse((*where, kind.value, position), message)
                    classes[code] = kind
        return classes

    def write(self, value: Any) -> Any:
        lists = {kind.value: format_codes(code for code, each in value.items() if each is kind) for kind in ErrorClass}
        return {name: codes for name, codes in lists.items() if codes}

    def merge(self, before: Any, after: Any) -> Any:
        return {**before, **after}


class _InfrastructurePod(SectionFormat):
    """Pods of the node's infrastructure."""

    def read(self, raw: Any, where: Location) -> InfrastructurePod:
        values = super().read(raw, where)
        return InfrastructurePod(
            values["namespace"], values.get("serviceAccount", ""), values.get("class", InfrastructureClass.MONITORING)
        )

    def write(self, value: Any) -> Any:
        account = {"serviceAccount": value.service_account} if value.service_account else {}
        other = value.agent_class is not InfrastructureClass.MONITORING
        return {"namespace": value.namespace, **account, **({"class": value.agent_class.value} if other else {})}


class _SecondsByCondition(MappingOf):
    """How long a condition may last; a condition without a limit is omitted."""

    def write(self, value: Any) -> Any:
        return {code: self.kind.write(value.get(code)) for code in self.known}

    def merge(self, before: Any, after: Any) -> Any:
        return {code: seconds for code, seconds in sorted({**before, **after}.items()) if seconds is not None}


class _Floors(ValueFormat):
    """Minimum rates of each check by pattern of model names: ``{"NVIDIA H200*": {"host-to-device": "20GB/s"}}``."""

    def read(self, raw: Any, where: Location) -> dict[str, dict[str, float]]:
        if not isinstance(raw, dict):
            refuse(where, 'write patterns of model names here, such as "NVIDIA H200*", each with its checks below it')
        floors: dict[str, dict[str, float]] = {}
        for model, rates in raw.items():
            if not isinstance(rates, dict):
                message = f"write checks with their rates below the pattern; the checks are: {', '.join(CHECK_NAMES)}"
                refuse((*where, model), message)
            floors[model] = {}
            for check, rate in rates.items():
                if check not in CHECK_NAMES:
                    refuse((*where, model, check), f"this is not a check; the checks are: {', '.join(CHECK_NAMES)}")
                floors[model][check] = float(RATE.read(rate, (*where, model, check)))
        return floors

    def write(self, value: Any) -> Any:
        return {
            model: {check: RATE.write(int(rate)) for check, rate in rates.items()} for model, rates in value.items()
        }

    def schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"propertyNames": {"enum": list(CHECK_NAMES)}}}

    def schema_default(self, value: Any) -> Any:
        return {}

    def merge(self, before: Any, after: Any) -> Any:
        """Merge with the override's own patterns first, because the first matching pattern applies."""
        return {**after, **{model: rates for model, rates in before.items() if model not in after}}


# --- overrides ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OverrideEntry:
    """An override as it is written: the devices it applies to, and its changes, by the field names of a policy."""

    name: str
    devices: Mapping[str, tuple[str, ...]]
    changes: Mapping[str, Any]

    def shadows(self, later: _OverrideEntry) -> bool:
        """Return whether this entry matches every device that ``later`` matches."""
        mine, others = self.devices, later.devices
        wider = all(_are_patterns_within(others[each], mine[each]) for each in ("models", "nodes"))
        resources = {*mine["resources"]}
        return wider and (not resources or (bool(others["resources"]) and {*others["resources"]} <= resources))


class _OverrideSection(SectionFormat):
    """The differences for some devices."""

    def read(self, raw: Any, where: Location) -> _OverrideEntry:
        values = super().read(raw, where)
        devices = {name: values.get(each.key, ()) for name, each in declarations(PolicyOverride).items()}
        if not any(devices.values()):
            message = (
                f'the override "{values["name"]}" selects no devices; write models: ["NVIDIA H200*"], '
                'resources: [nvidia.com/gpu] or nodes: ["gpu-test-*"], or several of these'
            )
            refuse(where, message)
        declared = declarations(Policy).items()
        changes = {name: values[each.key] for name, each in declared if each.key in values and name != "name"}
        return _OverrideEntry(values["name"], devices, changes)


class _Overrides(ListOf):
    """Overrides, each with a unique name and the first match for some device."""

    def read(self, raw: Any, where: Location) -> Collection[_OverrideEntry]:
        if not isinstance(raw, list):
            refuse_type(raw, where, f"write a list, each entry with a name, such as {self.example}")
        entries = super().read(raw, where)
        for position, later in enumerate(entries):
            for earlier in [*entries][:position]:
                at = (*where, position, "name")
                if earlier.name == later.name:
                    refuse(at, f'two overrides are named "{later.name}"; rename one of them')
                if earlier.shadows(later):
                    message = (
                        f'"{later.name}" never applies: "{earlier.name}" comes first and matches all of its '
                        f'devices; put it before "{earlier.name}", or remove it'
                    )
                    refuse(at, message)
        return entries


def _are_patterns_within(patterns: Sequence[str], wider: Sequence[str]) -> bool:
    """Return whether every match of ``patterns`` surely matches one of ``wider``; an empty list matches everything."""
    if not wider or "*" in wider:
        return True
    return bool(patterns) and all(any(_is_pattern_within(one, each) for each in wider) for one in patterns)


def _is_pattern_within(pattern: str, wider: str) -> bool:
    """Return whether every match of ``pattern`` surely matches ``wider``."""
    if pattern == wider:
        return True
    # Only a star in the wider pattern covers a star in the pattern; a wildcard for one character does not.
    certain = not any(each in wider for each in "?[") or not any(each in pattern for each in "*?[")
    return certain and fnmatchcase(pattern, wider)


@dataclass(frozen=True)
class _PolicyFile(RuleSection):
    """A complete file. Reading returns the policy."""

    def read(self, raw: Any, where: Location) -> Policy:
        values = super().read(raw, where)
        entries: Sequence[_OverrideEntry] = values.pop("overrides", ())
        policy: Policy = self.merge(Policy(), values)
        overrides = [
            PolicyOverride(self._apply_override(policy, entry, at), **entry.devices) for at, entry in enumerate(entries)
        ]
        return replace(policy, overrides=tuple(overrides))

    def _apply_override(self, policy: Policy, entry: _OverrideEntry, position: int) -> Policy:
        """Return ``policy`` with the changes of ``entry``.

        A change that fits the override's own settings may contradict those of the file, so the result is checked.

        A change may contradict the override's own settings; that is refused here, where the values of both are known.
        """
        changed: Policy = self.merge(policy, {**entry.changes, "name": f"{policy.name}/{entry.name}"})
        for name, kind in self.kinds().items():
            if isinstance(kind, RuleSection):
                kind.check(getattr(changed, name), ("overrides", position, declarations(Policy)[name].key))
        return changed


# --- from a declaration to its format -------------------------------------------------------------------------------


def rule_section(rule: type, name: str) -> RuleSection:
    """Return the section of a file that ``rule`` declares; ``name`` is its name in the JSON schema.

    Overridable settings come first.
    """
    settings = sorted(declarations(rule).values(), key=lambda each: not each.overridable)
    return RuleSection(name, summary(rule), tuple(_key(each) for each in settings), rule=rule)


def _key(declared: Declaration) -> KeyFormat:
    kind = _KINDS[declared.type](declared)
    if isinstance(kind, SectionFormat):
        return KeyFormat(declared.key, kind)
    default = ... if declared.required else declared.default
    return KeyFormat(declared.key, kind, declared.description, default, required=declared.required)


def _name(declared: Declaration) -> str:
    return f"{declared.key[:1].upper()}{declared.key[1:]}Section"


def _proofs(declared: Declaration) -> ValueFormat:
    keys = (
        KeyFormat(camel_case(kind), Choice(RequiredProof), text, declared.default[kind])
        for kind, text in declared.entries.items()
    )
    return _Proofs(_name(declared), declared.description, tuple(keys), check=declared.check)


def _xids_by_class(declared: Declaration) -> ValueFormat:
    keys = (KeyFormat(kind.value, ListOf(CODES), text, ()) for kind, text in declared.entries.items())
    name, noun = ("XidSection", "XID") if declared.key == "xids" else ("ErrorSection", "error")
    return _Xids(name, declared.description, tuple(keys), noun=noun)


def _seconds(declared: Declaration) -> ValueFormat:
    return Duration(declared.minimum or 0, or_never=declared.optional)


def _number(declared: Declaration) -> ValueFormat:
    assert declared.minimum is not None
    assert declared.maximum is not None
    return Integer(declared.minimum, declared.maximum, or_auto=declared.optional)


def _list_of(kind: ValueFormat, declared: Declaration, collection: type[Collection[Any]] = tuple) -> ValueFormat:
    return ListOf(kind, declared.example or ListOf.example, collection)


_INFRASTRUCTURE_POD = _InfrastructurePod(
    "InfrastructurePod",
    "Pods of the node's infrastructure, identified by fields that tenants cannot choose.",
    (
        KeyFormat("namespace", DNS_NAME, "The pods' namespace.", required=True, example="monitoring"),
        KeyFormat(
            "serviceAccount",
            SERVICE_ACCOUNT_PATTERN,
            "The pods' service account, or its beginning and *. Checked where a pod has a token of its account; "
            "omitted: any account.",
            example="dcgm-exporter",
        ),
        KeyFormat(
            "class",
            Choice(InfrastructureClass),
            "What they do with devices.",
            default=InfrastructureClass.MONITORING,
            example="driver",
        ),
    ),
)

_CONDITIONS = (
    "baseline-mismatch",
    "command-broken",
    "ecc-mode-pending",
    "event-stream-lost",
    "hw-slowdown",
    "hw-thermal-slowdown",
    "inforom-corrupt",
    "mig-mode-pending",
    "nvlink-down",
    "pcie-generation",
    "pcie-width",
    "power-brake",
    "too-hot",
)
"""The soft conditions of all backends, which a file names by code."""

_KINDS: Mapping[ValueType, Callable[[Declaration], ValueFormat]] = {
    ValueType.SECTION: lambda each: rule_section(type(each.default), _name(each)),
    ValueType.BOOLEAN: lambda _: Boolean(),
    ValueType.ENUM: lambda each: Choice(type(each.default)),
    ValueType.NAME: lambda _: NAME,
    ValueType.INTEGER: _number,
    ValueType.CELSIUS: _number,
    ValueType.PERCENT: _number,
    ValueType.SECONDS: _seconds,
    ValueType.BYTES: lambda _: SIZE,
    ValueType.PER_SECOND: lambda _: RATE,
    ValueType.TIME_OF_DAY: lambda _: TimeWindow(),
    ValueType.PATTERNS: lambda each: _list_of(NON_EMPTY_TEXT, each),
    ValueType.RESOURCES: lambda each: _list_of(RESOURCE, each),
    ValueType.SYSTEMD_UNITS: lambda each: _list_of(SYSTEMD_UNIT, each, frozenset),
    ValueType.INFRASTRUCTURE_GROUPS: lambda each: _list_of(KnownName(load_infrastructure_table), each, frozenset),
    ValueType.INFRASTRUCTURE_PODS: lambda each: _list_of(_INFRASTRUCTURE_POD, each, frozenset),
    ValueType.SECONDS_BY_CONDITION: lambda _: _SecondsByCondition(Duration(0, or_never=True), _CONDITIONS),
    ValueType.PER_SECOND_BY_MODEL: lambda _: _Floors(),
    ValueType.PROOF_BY_HAND_OVER: _proofs,
    ValueType.DEVICE_SETTINGS: lambda _: MappingOf(DEVICE_SETTING),
    ValueType.CODES_BY_CLASS: _xids_by_class,
    ValueType.OVERRIDES: lambda each: _Overrides(_override_section(), each.example),
}


def _override_section() -> SectionFormat:
    policy = declarations(Policy).values()
    of_devices = (replace(_key(each), default=...) for each in declarations(PolicyOverride).values())
    (name, *others) = (_in_override(each) for each in policy if each.overridable)
    elsewhere: dict[tuple[str, ...], str] = {
        (each.key,): "the policy itself" for each in policy if not each.overridable
    }
    for each in policy:
        if each.type is ValueType.SECTION and each.overridable and not each.in_override:
            elsewhere |= {(each.key, key): each.key for key in _node_level_keys(each)}
    return _OverrideSection(
        "OverrideSection",
        "Differences for some devices. Keys that are omitted keep the values of the rest of the file.",
        (name, *of_devices, *others),
        misplaced_keys=elsewhere,
        extra_schema={"anyOf": [{"required": [each.key]} for each in declarations(PolicyOverride).values()]},
    )


def _in_override(declared: Declaration) -> KeyFormat:
    """A setting that an override omits has the value of its file, so there is no default."""
    key = replace(_key(declared), default=...)
    if not isinstance(key.kind, RuleSection):
        return replace(key, description=key.description and (declared.in_override or key.description))
    kind = replace(key.kind, is_complete=False)
    if declared.in_override:
        of_node = _node_level_keys(declared)
        elsewhere: dict[tuple[str, ...], str] = {(each,): declared.key for each in of_node}
        keys = tuple(each for each in kind.keys if each.name not in of_node)
        kind = replace(
            kind, name=f"Override{kind.name}", description=declared.in_override, keys=keys, misplaced_keys=elsewhere
        )
    return replace(key, kind=kind)


def _node_level_keys(section: Declaration) -> list[str]:
    """Return the keys of a section that no override can change."""
    rule: type = type(section.default)
    return [each.key for each in declarations(rule).values() if not each.overridable]


_LISTED_LAST = ("infrastructure", "injection", "settings", "xids", "errors", "overrides")
"""Keys of a file that editors and error messages list after all others."""


def _file() -> _PolicyFile:
    keys = sorted(
        (_key(each) for each in declarations(Policy).values()),
        key=lambda key: _LISTED_LAST.index(key.name) if key.name in _LISTED_LAST else -1,
    )
    return _PolicyFile("PolicyFile", summary(Policy), tuple(keys), rule=Policy, is_complete=False)


_FILE = _file()


# --- writing --------------------------------------------------------------------------------------------------------


def _xids(classes: Mapping[int, ErrorClass], others: Mapping[int, ErrorClass]) -> _Document:
    """Return by class the codes that have another class, or none, in ``others``."""
    differing = {code: kind for code, kind in classes.items() if others.get(code) is not kind}
    found: _Document = _FILE.kinds()["error_classes"].write(differing)
    return found


def _override_document(override: PolicyOverride, node: Policy) -> _Document:
    """Return the devices of an override, and its differences from the policy that it is in."""
    who = {name: [*getattr(override, name)] for name in declarations(PolicyOverride) if getattr(override, name)}
    mine, others = ({**_FILE.write(replace(each, overrides=())), "xids": {}} for each in (override.policy, node))
    floors = _first_floors(mine["diagnostics"].pop("minRates"), others["diagnostics"].pop("minRates"))
    differing = _differing(mine, others) | {"name": override_name(override)}
    if floors:
        differing.setdefault("diagnostics", {})["minRates"] = floors
    xids = _xids(override.policy.error_classes, node.error_classes)
    differing |= {"xids": xids} if xids else {}
    return {"name": "", **who, **differing}


def _differing(values: _Document, others: _Document) -> _Document:
    """Return the entries of ``values`` that are missing from ``others`` or different there."""
    found: _Document = {}
    for key, value in values.items():
        other = others.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            inner = _differing(value, other)
            found |= {key: inner} if inner else {}
        elif key not in others or value != other:
            found[key] = value
    return found


def _first_floors(floors: _Document, others: _Document) -> _Document:
    """Return the shortest prefix of ``floors`` that an override must write: merging puts its own patterns first."""
    items = list(floors.items())
    for count in range(len(items)):
        own = dict(items[:count])
        if items[count:] == [(model, rates) for model, rates in others.items() if model not in own]:
            return own
    return floors


# --- the reference page ---------------------------------------------------------------------------------------------


def policy_reference() -> str:
    """Return the page that lists every setting, in Markdown; generated into ``docs/policy-settings.md``."""
    kinds, sections = _FILE.kinds(), declarations(Policy).items()
    top = [_row(each, kinds[name]) for name, each in sections if not isinstance(kinds[name], SectionFormat)]
    parts = [_INTRODUCTION, "## At the top of a file", "\n".join([_HEAD, *top])]
    for name, declared in sections:
        kind = kinds[name]
        if isinstance(kind, SectionFormat):
            parts += [f"## {declared.key}", declared.description, "\n".join([_HEAD, *_rows(declared, kind)])]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# Policy settings

Every setting of a policy: its type, default and range, and whether an override may change it for some devices. A setting that
no override changes applies to the whole node. Times may have a unit (500ms, 25s, 2m, 1h), and so may sizes and rates (64MiB,
20GB/s). [policies.md](policies.md) explains how policies work.

This page is generated from the declarations in `scrubber/domain/policy.py`: `python scripts/gen_schema.py`."""
_HEAD = "| key | type | default | range | override | description |\n| --- | --- | --- | --- | --- | --- |"


def _rows(section: Declaration, kind: SectionFormat) -> Iterator[str]:
    if isinstance(kind, RuleSection):
        settings = [(each, kind.kinds()[name]) for name, each in declarations(kind.rule).items()]
    else:
        entries = (
            (replace(section, key=key.name, description=key.description, default=key.default), key.kind)
            for key in kind.keys
        )
        settings = [*entries]
    for each, of_value in settings:
        yield _row(replace(each, overridable=section.overridable and each.overridable), of_value)


def _row(declared: Declaration, kind: ValueFormat) -> str:
    words = ", ".join(f"`{each}`" for each in kind.enum) if isinstance(kind, Choice) else ""
    default = kind.schema_default(declared.default) if isinstance(kind, MappingOf) else kind.write(declared.default)
    text = "required" if declared.required else f"`{dump_yaml({'': default}).partition(':')[2].strip()}`"
    least, most = (None if each is None else kind.write(each) for each in (declared.minimum, declared.maximum))
    span = "-" if least is None else f"at least {least}" if most is None else f"{least} to {most}"
    override = "yes" if declared.overridable else "no"
    cells = (f"`{declared.key}`", words or declared.type.value, text, span, override, declared.description)
    return f"| {' | '.join(cells)} |"
