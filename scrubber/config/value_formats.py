"""Formats of values in an administrator's file: how they are read, written and described to editors.

A :class:`ValueFormat` implements all three for one kind of value, so that they agree. Reading is strict: nothing is
converted silently, and no key is ignored. All errors of a file are reported together, each with its line and a
correction: ``FILE:LINE: what is wrong; what helps``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, NoReturn

from scrubber.config.units import (
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
from scrubber.config.yaml_document import Location, YamlDocument, printable
from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "CODES",
    "DEVICE_SETTING",
    "DNS_NAME",
    "MAX_XID",
    "NAME",
    "NON_EMPTY_TEXT",
    "RATE",
    "RESOURCE",
    "SERVICE_ACCOUNT_PATTERN",
    "SIZE",
    "SYSTEMD_UNIT",
    "Boolean",
    "Choice",
    "Duration",
    "Integer",
    "InvalidValue",
    "KeyFormat",
    "KnownName",
    "ListOf",
    "MappingOf",
    "ParsedValue",
    "SectionFormat",
    "Text",
    "TimeWindow",
    "ValueFormat",
    "json_schema",
    "read_document",
    "refuse",
    "refuse_type",
]

MAX_XID = 9999
_Schema = dict[str, Any]


class InvalidValue(Exception):
    """Errors in a value: the location of each, and a message about it."""

    def __init__(self, *faults: tuple[Location, str]) -> None:
        super().__init__(*faults)
        self.faults = faults


def refuse(where: Location, message: str) -> NoReturn:
    """Refuse the value at ``where``. The message starts with its name; the line number locates positions in lists."""
    raise InvalidValue((where, f"{_location_prefix(where)}{message}"))


def read_document(kind: ValueFormat, document: YamlDocument, name: str) -> Any:
    """Read ``document``; ``name`` is the name of the file in messages.

    Raises:
        InvalidConfiguration: one line for each error, in the order of the file.
    """
    try:
        return kind.read(document.value, ())
    except InvalidValue as error:
        faults = sorted({(document.line(where), text) for where, text in error.faults})
        lines = (f"{name}:{line}: {printable(text)}{'' if text.endswith('?') else '.'}" for line, text in faults)
        raise InvalidConfiguration("\n".join(lines)) from None


def _read_each(parts: Iterable[tuple[Location, ValueFormat, object]]) -> list[Any]:
    """Read all parts of a value, or raise with all of the errors."""
    values: list[Any] = []
    faults: list[tuple[Location, str]] = []
    for where, kind, written in parts:
        try:
            values.append(_read(kind, written, where))
        except InvalidValue as error:
            faults += error.faults
    if faults:
        raise InvalidValue(*faults)
    return values


def _read(kind: ValueFormat, raw: object, where: Location) -> Any:
    if raw is None:
        refuse(where, _MISSING_VALUE_MESSAGE)
    return kind.read(raw, where)


def json_schema(kind: SectionFormat, title: str) -> _Schema:
    """Return the JSON Schema (2020-12) of a file of this kind."""
    definitions: _Schema = {}
    kind.schema(definitions)
    whole = definitions.pop(kind.name)
    schema = _sorted({"$defs": definitions, **whole, "title": title})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _sorted(schema: Any, of: str = "") -> Any:
    """Return ``schema`` with its keywords sorted; keys of a file, and defaults, stay in their order."""
    if isinstance(schema, list):
        return [_sorted(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words = schema if of in ("properties", "default") else sorted(schema)
    return {word: _sorted(schema[word], word) for word in words}


class ValueFormat:
    """One kind of value. The defaults here apply to values that a file contains unchanged."""

    def read(self, raw: Any, where: Location) -> Any:
        """Return the value that is written at ``where``, or raise :class:`InvalidValue`."""
        raise NotImplementedError

    def write(self, value: Any) -> Any:
        """Return the file's notation; reading it gives the same value again."""
        return value

    def schema(self, definitions: _Schema) -> _Schema:
        """Return the JSON schema; named schemas are put into ``definitions``."""
        raise NotImplementedError

    def schema_default(self, value: Any) -> Any:
        """Return the schema's notation of ``value`` as a default."""
        return value

    def merge(self, before: Any, after: Any) -> Any:
        """Return the value in force when a file or an override writes ``after`` and the value before was ``before``."""
        return after


class Boolean(ValueFormat):
    """True or false."""

    def read(self, raw: Any, where: Location) -> bool:
        return raw if isinstance(raw, bool) else refuse_type(raw, where, "write true or false")

    def schema(self, definitions: _Schema) -> _Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Integer(ValueFormat):
    """A whole number, or ``auto``."""

    minimum: float
    maximum: float
    or_auto: bool = False

    def read(self, raw: Any, where: Location) -> int | None:
        if self.or_auto and raw == "auto":
            return None
        auto = ", or auto" if self.or_auto else ""
        if isinstance(raw, bool) or not isinstance(raw, int):
            refuse_type(raw, where, f"write a whole number{auto}")
        if raw < self.minimum:
            refuse(where, f"{raw} is too small; write at least {self.minimum}{auto}")
        if raw > self.maximum:
            refuse(where, f"{raw} is too large; write at most {self.maximum}{auto}")
        return raw

    def write(self, value: Any) -> Any:
        return "auto" if value is None else value

    def schema(self, definitions: _Schema) -> _Schema:
        number = {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}
        return {"anyOf": [number, {"const": "auto"}]} if self.or_auto else number

    def schema_default(self, value: Any) -> Any:
        return "auto" if value is None else value


@dataclass(frozen=True)
class Choice(ValueFormat):
    """One word of an enum; the JSON schema uses the enum's name and description unless others are given."""

    enum: type[StrEnum]
    name: str = ""
    description: str = ""

    def read(self, raw: Any, where: Location) -> StrEnum:
        for word in self.enum:
            if word.value == raw:
                return word
        refuse(where, _unknown_choice_message(str(raw), [each.value for each in self.enum]))

    def write(self, value: Any) -> Any:
        return value.value

    def schema(self, definitions: _Schema) -> _Schema:
        name, description = self.name or self.enum.__name__, self.description or self.enum.__doc__
        described = {"description": description} if description else {}
        definitions[name] = {"enum": [each.value for each in self.enum], "title": name, "type": "string", **described}
        return _reference(name)

    def schema_default(self, value: Any) -> Any:
        return value.value


@dataclass(frozen=True)
class KnownName(ValueFormat):
    """One of the names that ``names`` returns: data of the program, loaded when a name is read."""

    names: Callable[[], Iterable[str]]

    def read(self, raw: Any, where: Location) -> str:
        names = [*self.names()]
        return raw if isinstance(raw, str) and raw in names else refuse(where, _unknown_choice_message(str(raw), names))

    def schema(self, definitions: _Schema) -> _Schema:
        return {"enum": [*self.names()], "type": "string"}


@dataclass(frozen=True)
class Duration(ValueFormat):
    """A duration, or ``never``."""

    minimum: float
    or_never: bool = False
    maximum: float | None = None

    def read(self, raw: Any, where: Location) -> float | None:
        if self.or_never and raw == "never":
            return None
        never = ", or never" if self.or_never else ""
        try:
            seconds = parse_seconds(raw)
        except ValueError as error:
            refuse(where, str(error).replace("write seconds", "write never, seconds") if never else str(error))
        if seconds < self.minimum:
            least = f"{self.minimum * 1000:g}ms"
            refuse(where, f"a time of {seconds:g} s is too short here; write at least {least}{never}")
        if self.maximum is not None and seconds > self.maximum:
            refuse(where, f"a time of {seconds:g} s is too long here; write at most {self.maximum:g}s{never}")
        return seconds

    def write(self, value: Any) -> Any:
        return "never" if value is None else format_seconds(value)

    def schema(self, definitions: _Schema) -> _Schema:
        written = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*(ms|s|m|h)$"}
        words = [{"const": "never"}] if self.or_never else []
        number = {"type": "number", "minimum": self.minimum}
        if self.maximum is not None:
            number["maximum"] = self.maximum
        return {"anyOf": [number, written, *words]}

    def schema_default(self, value: Any) -> Any:
        return "never" if value is None else value


class TimeWindow(ValueFormat):
    """A time window within a day, or ``always``."""

    def read(self, raw: Any, where: Location) -> tuple[float, float] | None:
        if raw == "always":
            return None
        try:
            return parse_window(raw)
        except ValueError as error:
            refuse(where, f"{error}, or always")

    def write(self, value: Any) -> Any:
        return "always" if value is None else format_window(value)

    def schema(self, definitions: _Schema) -> _Schema:
        written = {"type": "string", "pattern": r"^[0-9]{1,2}:[0-9]{2}\s*-\s*[0-9]{1,2}:[0-9]{2}$"}
        return {"anyOf": [{"const": "always"}, written]}

    def schema_default(self, value: Any) -> Any:
        return self.write(value)


@dataclass(frozen=True)
class ParsedValue(ValueFormat):
    """A value that a function parses; the function refuses with :class:`ValueError`."""

    parse: Callable[[object], Any]
    json_schema: _Schema
    format: Callable[[Any], Any] = str

    def read(self, raw: Any, where: Location) -> Any:
        try:
            return self.parse(raw)
        except ValueError as error:
            refuse(where, str(error))

    def write(self, value: Any) -> Any:
        return self.format(value)

    def schema(self, definitions: _Schema) -> _Schema:
        return self.json_schema


def _device_setting(raw: object) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError(
            'a setting is a string or a number; quote it if it must be the string true or false, as in "true"'
        )
    return str(raw)


def _size_schema(after: str = "") -> _Schema:
    pattern = rf"^[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]([iI][bB]?|[bB])|[bB])?{after}$"
    return {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": pattern}]}


SIZE = ParsedValue(parse_size, _size_schema(), format=format_size)
RATE = ParsedValue(parse_rate, _size_schema("(/s)?"), format=format_rate)
CODES = ParsedValue(
    lambda written: parse_codes(written, MAX_XID),
    {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": MAX_XID},
            {"type": "string", "pattern": r"^[0-9]+\s*-\s*[0-9]+$"},
        ]
    },
)
"""A number, or a range; read as the numbers in it."""
DEVICE_SETTING = ParsedValue(_device_setting, {"anyOf": [{"type": "string"}, {"type": "number"}]})


@dataclass(frozen=True)
class Text(ValueFormat):
    """A text that matches ``pattern``; ``mismatch`` completes "X is …" in the error message."""

    pattern: str = ""
    mismatch: str = ""

    def read(self, raw: Any, where: Location) -> str:
        if not isinstance(raw, str):
            refuse_type(raw, where, "write a string; quote it if it looks like a number or like true or false")
        if self.pattern and not re.fullmatch(self.pattern, raw):
            refuse(where, f'"{raw}" is {self.mismatch}')
        if not raw.strip():
            refuse_type(raw, where, "write at least one character that is not a space")
        return raw

    def schema(self, definitions: _Schema) -> _Schema:
        return {"type": "string", "pattern": self.pattern} if self.pattern else {"type": "string", "minLength": 1}


NON_EMPTY_TEXT = Text()
NAME = Text(
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
    "not a valid name; use lowercase letters, digits and hyphens, such as my-policy",
)
DNS_NAME = Text(
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
    "not a valid name; use lowercase letters, digits and hyphens, such as gpu-operator",
)
SERVICE_ACCOUNT_PATTERN = Text(
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$|^[a-z0-9][a-z0-9.-]{0,251}\*$",
    "not a service account; use lowercase letters, digits and hyphens, and * at the end only, such as nvidia-gpu-driver-*",
)
SYSTEMD_UNIT = Text(
    r"^[A-Za-z0-9:_.@-]+\.service$", "not a systemd service; write its full name, such as nvidia-dcgm.service"
)
RESOURCE = Text(
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
    "not a resource; write its full name, such as nvidia.com/gpu",
)


@dataclass(frozen=True)
class ListOf(ValueFormat):
    """A list of values of one kind."""

    kind: ValueFormat
    example: str = "[79, 151]"
    collection: Callable[[Iterable[Any]], Collection[Any]] = tuple

    def read(self, raw: Any, where: Location) -> Collection[Any]:
        if not isinstance(raw, list):
            refuse_type(raw, where, f"write a list, such as {self.example}")
        return self.collection(_read_each(((*where, at), self.kind, each) for at, each in enumerate(raw)))

    def write(self, value: Any) -> Any:
        return [self.kind.write(each) for each in (sorted(value) if isinstance(value, frozenset) else value)]

    def schema(self, definitions: _Schema) -> _Schema:
        return {"type": "array", "items": self.kind.schema(definitions)}

    def schema_default(self, value: Any) -> Any:
        return self.write(value)


@dataclass(frozen=True)
class MappingOf(ValueFormat):
    """A mapping with arbitrary keys, or with some of ``known``, and values of one kind."""

    kind: ValueFormat
    known: Sequence[str] = ()

    def read(self, raw: Any, where: Location) -> dict[str, Any]:
        if not isinstance(raw, dict):
            refuse_type(raw, where, _NOT_A_MAPPING_MESSAGE)
        unknown = [key for key in raw if self.known and key not in self.known]
        faults = [
            ((*where, key), f"{_location_prefix(where)}{_unknown_choice_message(key, self.known)}") for key in unknown
        ]
        try:
            values = _read_each(((*where, key), self.kind, value) for key, value in raw.items())
        except InvalidValue as error:
            raise InvalidValue(*faults, *error.faults) from None
        if faults:
            raise InvalidValue(*faults)
        return dict(zip(raw, values, strict=True))

    def write(self, value: Any) -> Any:
        return {key: self.kind.write(each) for key, each in value.items()}

    def schema(self, definitions: _Schema) -> _Schema:
        names = {"propertyNames": {"enum": [*self.known]}} if self.known else {}
        return {"type": "object", "additionalProperties": self.kind.schema(definitions), **names}

    def schema_default(self, value: Any) -> Any:
        return {}  # the defaults stay in force, except for the keys that are written

    def merge(self, before: Any, after: Any) -> Any:
        return {**before, **after}


@dataclass(frozen=True)
class KeyFormat:
    """A key that a section may have.

    Attributes:
        description: for editors; empty for a section, which has a separate description.
        default: for editors; ``...`` where there is none.
        example: an example for the message that the key is missing.
    """

    name: str
    kind: ValueFormat
    description: str = ""
    default: Any = ...
    required: bool = False
    example: str = ""

    def schema(self, definitions: _Schema) -> _Schema:
        schema = dict(self.kind.schema(definitions))
        if self.description:
            schema["description"] = self.description
        if self.default is not ...:
            schema["default"] = self.kind.schema_default(self.default)
        if self.example:
            schema["examples"] = [self.example]
        if "$ref" not in schema:
            schema["title"] = re.sub("(?=[A-Z])", " ", self.name).capitalize()
        return schema


@dataclass(frozen=True)
class SectionFormat(ValueFormat):
    """A mapping with predefined keys, each with a format; no other keys are accepted.

    Attributes:
        name: name in a JSON schema.
        misplaced_keys: keys, its own or one level below, that belong elsewhere; only the first is reported.
        extra_schema: additions to its JSON schema.
    """

    name: str
    description: str
    keys: tuple[KeyFormat, ...]
    misplaced_keys: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    extra_schema: _Schema = field(default_factory=dict)

    def read(self, raw: Any, where: Location) -> Any:
        """Return the values of the keys that are written."""
        if not isinstance(raw, dict):
            refuse_type(raw, where, _NOT_A_MAPPING_MESSAGE)
        self._refuse_misplaced(raw, where)
        known = {key.name: key for key in self.keys}
        faults = [((*where, key), self._unknown_key_message(key, raw[key], where)) for key in raw if key not in known]
        faults += [
            (where, f'the key "{key.name}" is missing; add a line such as {key.name}: {key.example or "mine"}')
            for key in self.keys
            if key.required and key.name not in raw
        ]
        found = [key for key in raw if key in known]
        try:
            values = _read_each(((*where, key), known[key].kind, raw[key]) for key in found)
        except InvalidValue as error:
            raise InvalidValue(*faults, *error.faults) from None
        if faults:
            raise InvalidValue(*faults)
        return dict(zip(found, values, strict=True))

    def _refuse_misplaced(self, raw: Mapping[str, Any], where: Location) -> None:
        below = [(key, inner) for key, part in raw.items() if isinstance(part, dict) for inner in part]
        for path in (*below, *((key,) for key in raw)):
            if path in self.misplaced_keys:
                place = self.misplaced_keys[path]
                message = f'"{path[-1]}" applies to the whole node, not to some devices; write it in {place}'
                refuse((*where, *path), message)

    def _unknown_key_message(self, key: str, raw: object, where: Location) -> str:
        if raw is None:
            return f"{_location_prefix((*where, key))}{_MISSING_VALUE_MESSAGE}"
        known = [each.name for each in self.keys]
        spelled = {each.lower(): each for each in known}
        close = get_close_matches(re.sub("[_-]", "", key.lower()), spelled, n=1)
        helps = f'did you mean "{spelled[close[0]]}"?' if close else f"the keys are: {', '.join(known)}"
        around = [part for part in where if isinstance(part, str)]
        place = f' in "{around[-1]}"' if around else ""
        return f'unknown key "{key}"{place}; {helps}'

    def schema(self, definitions: _Schema) -> _Schema:
        required = [key.name for key in self.keys if key.required]
        definitions[self.name] = {
            "additionalProperties": False,
            "description": self.description,
            "properties": {key.name: key.schema(definitions) for key in self.keys},
            **({"required": required} if required else {}),
            "title": self.name,
            "type": "object",
            **self.extra_schema,
        }
        return _reference(self.name)


_NOT_A_MAPPING_MESSAGE = "write its keys on indented lines below it"
_MISSING_VALUE_MESSAGE = "the value is missing; write one, or remove the key"


def _unknown_choice_message(raw: str, choices: Sequence[str]) -> str:
    close = get_close_matches(raw.lower().replace("_", "-"), choices, n=1)
    helps = f'did you mean "{close[0]}"?' if close else f"write one of {', '.join(choices)}"
    return f'"{raw}" is not a valid value; {helps}'


def _location_prefix(where: Location) -> str:
    """Return ``limits.handOver: ``; empty for the whole file."""
    return ".".join(part for part in where if isinstance(part, str)) + ": " if where else ""


def refuse_type(raw: object, where: Location, hint: str) -> NoReturn:
    refuse(where, f"{_describe_value(raw)} is not valid here; {hint}")


def _describe_value(raw: object) -> str:
    if isinstance(raw, dict):
        return "a mapping"
    if isinstance(raw, list):
        return "a list"
    if isinstance(raw, bool):
        return "true" if raw else "false"
    return f'"{raw}"' if isinstance(raw, str) else str(raw)


def _reference(name: str) -> _Schema:
    return {"$ref": f"#/$defs/{name}"}
