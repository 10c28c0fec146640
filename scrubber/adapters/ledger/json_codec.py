"""Conversion of a frozen dataclass to JSON and back, either exactly or not at all.

A :class:`JsonCodec` encodes one type of value and decodes it; :func:`dataclass_codec` builds the codec of a dataclass
from the codecs of its fields. Guarantee: what is encoded decodes to an equal value, and nothing is guessed. An unknown
field, a missing one, or a value of another type is a :class:`CodecError`, never a default. Only the conversion of a
newer ledger drops unknown fields, and asks for that (:meth:`Document.decode_newer`). A dataclass that gains a field
without a codec fails at import, not at the first restart after an upgrade.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = [
    "COUNTS",
    "FLAG",
    "INTEGER",
    "NUMBER",
    "PAIRS",
    "SCALARS",
    "STRING_SET",
    "TEXT",
    "CodecError",
    "Document",
    "Json",
    "JsonCodec",
    "canonical_json",
    "dataclass_codec",
    "enum_codec",
    "optional",
    "parse_object",
    "tuple_of",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scalar: TypeAlias = "str | int | float | bool | None"
T = TypeVar("T")
C = TypeVar("C", bound=StrEnum)


class CodecError(ValueError):
    """Stored text is not what this program writes, or a value cannot be encoded; the message names the field."""


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: Json) -> str:
    """Return ``value`` in this program's only form: sorted keys, no whitespace, ASCII, finite numbers only."""
    return _CANONICAL.encode(value)


def _unchanged(json: Json) -> Json:
    return json


@dataclass(frozen=True, slots=True)
class JsonCodec(Generic[T]):
    """Encodes values of one type and decodes them; both raise :class:`CodecError` for anything else.

    Attributes:
        drop_unknown: returns JSON without the fields that ``decode`` does not know; never raises.
    """

    encode: Callable[[T], Json]
    decode: Callable[[Json], T]
    drop_unknown: Callable[[Json], Json] = _unchanged


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CodecError(f"{value!r} is not text")
    return str(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CodecError(f"{value!r} is not a whole number")
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CodecError(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise CodecError("the number is too large") from None
    if not math.isfinite(number):
        raise CodecError(f"{value!r} is not a finite number")
    if number != value:
        raise CodecError("the number has too many digits")
    return number


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise CodecError(f"{value!r} is neither true nor false")
    return value


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, bool | int):
        return value
    return _number(value) if isinstance(value, float) else _text(value)


TEXT: JsonCodec[str] = JsonCodec(_text, _text)
INTEGER: JsonCodec[int] = JsonCodec(_integer, _integer)
NUMBER: JsonCodec[float] = JsonCodec(_number, _number)
FLAG: JsonCodec[bool] = JsonCodec(_flag, _flag)


def optional(codec: JsonCodec[T]) -> JsonCodec[T | None]:
    """Return a codec for ``codec`` or None, which is encoded as null."""
    return JsonCodec(
        lambda value: None if value is None else codec.encode(value),
        lambda json: None if json is None else codec.decode(json),
        codec.drop_unknown,
    )


def enum_codec(enum: type[C]) -> JsonCodec[C]:
    """Return the codec of a member of ``enum``, encoded as its value."""

    def write(value: C) -> Json:
        return enum(_text(value)).value

    def read(json: Json) -> C:
        try:
            return enum(_text(json))
        except ValueError:
            raise CodecError(f"{json!r} is not a {enum.__name__}") from None

    return JsonCodec(write, read)


def _items(json: Json) -> list[Json]:
    if not isinstance(json, list):
        raise CodecError(f"{json!r} is not a list")
    return json


def tuple_of(kind: JsonCodec[T]) -> JsonCodec[tuple[T, ...]]:
    """Return the codec of a tuple of ``kind``, in order."""
    return JsonCodec(
        lambda values: [kind.encode(value) for value in values],
        lambda json: tuple(kind.decode(item) for item in _items(json)),
        lambda json: [kind.drop_unknown(item) for item in json] if isinstance(json, list) else json,
    )


def _sorted_set(values: frozenset[str]) -> Json:
    written: list[Json] = []
    written.extend(sorted(_text(value) for value in values))
    return written


def _pairs(kind: JsonCodec[T]) -> JsonCodec[tuple[tuple[str, T], ...]]:
    def read(json: Json) -> tuple[tuple[str, T], ...]:
        pairs = [_items(item) for item in _items(json)]
        if any(len(pair) != 2 for pair in pairs):
            raise CodecError(f"{json!r} is not names with values")
        return tuple((_text(name), kind.decode(value)) for name, value in pairs)

    return JsonCodec(lambda values: [[_text(name), kind.encode(value)] for name, value in values], read)


COUNTS: JsonCodec[tuple[tuple[str, int], ...]] = _pairs(INTEGER)
"""Pairs of a name and an integer, in order."""
PAIRS: JsonCodec[tuple[tuple[str, str], ...]] = _pairs(TEXT)
"""Pairs of a name and a string, in order."""

STRING_SET: JsonCodec[frozenset[str]] = JsonCodec(
    _sorted_set, lambda json: frozenset(_text(item) for item in _items(json))
)
"""A frozenset of strings; encoded in sorted order, so that equal sets are equal text."""


def _write_scalars(values: Mapping[str, Scalar]) -> Json:
    return {_text(name): _scalar(value) for name, value in values.items()}


def _read_scalars(json: Json) -> Mapping[str, Scalar]:
    if not isinstance(json, dict):
        raise CodecError(f"{json!r} is not an object")
    return {name: _scalar(value) for name, value in json.items()}


SCALARS: JsonCodec[Mapping[str, Scalar]] = JsonCodec(_write_scalars, _read_scalars)
"""Evidence and event fields: names mapped to strings, numbers, booleans or null."""


def dataclass_codec(cls: type[T], **kinds: JsonCodec[Any]) -> JsonCodec[T]:
    """Return the codec of the dataclass ``cls``; ``kinds`` contains exactly one codec for each of its fields.

    Raises:
        TypeError: At import, when the dataclass and ``kinds`` do not have the same fields.
    """
    names = {each.name for each in fields(cls)}  # type: ignore[arg-type]
    if names != kinds.keys():
        odd = ", ".join(sorted(names ^ kinds.keys()))
        raise TypeError(f"{cls.__name__} and its stored form disagree on: {odd}")

    def write(value: T) -> Json:
        if not isinstance(value, cls):
            raise CodecError(f"{value!r} is not a {cls.__name__}")
        written: dict[str, Json] = {}
        for name, kind in kinds.items():
            try:
                written[name] = kind.encode(getattr(value, name))
            except CodecError as problem:
                raise CodecError(f"{name}: {problem}") from None
        return written

    def read(json: Json) -> T:
        if not isinstance(json, dict):
            raise CodecError(f"{json!r} is not a {cls.__name__}")
        if unknown := json.keys() - kinds.keys():
            raise CodecError(f"unknown field {', '.join(sorted(unknown))}")
        if missing := kinds.keys() - json.keys():
            raise CodecError(f"missing field {', '.join(sorted(missing))}")
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            try:
                values[name] = kind.decode(json[name])
            except CodecError as problem:
                raise CodecError(f"{name}: {problem}") from None
        return cls(**values)

    def drop_unknown(json: Json) -> Json:
        if not isinstance(json, dict):
            return json
        return {name: kinds[name].drop_unknown(value) for name, value in json.items() if name in kinds}

    return JsonCodec(write, read, drop_unknown)


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """A value stored separately: canonical JSON that contains its format number.

    Attributes:
        format: increases whenever a field is added, dropped or changes its meaning.
    """

    codec: JsonCodec[T]
    format: int

    def encode(self, value: T) -> str:
        """Return ``value`` as canonical JSON; raises :class:`CodecError` when it would not decode to the same value."""
        written = self.codec.encode(value)
        assert isinstance(written, dict)  # documents are encoded dataclasses
        return canonical_json({"format": self.format, **written})

    def decode(self, text: str) -> T:
        """Return the value in ``text``; raises :class:`CodecError` for anything that :meth:`encode` does not write."""
        json_value = parse_object(text)
        found = json_value.pop("format", None)
        if isinstance(found, bool) or found != self.format:
            raise CodecError(f"in format {found!r}; this program reads format {self.format}")
        return self.codec.decode(json_value)

    def decode_newer(self, text: str) -> T:
        """Return the value in ``text``, which may have fields of a newer format: those are dropped.

        Raises:
            CodecError: A field is missing, or has a value that this program does not know.
        """
        json_value = parse_object(text)
        json_value.pop("format", None)
        return self.codec.decode(self.codec.drop_unknown(json_value))


def parse_object(text: str) -> dict[str, Json]:
    """Return the JSON object in ``text``; raises :class:`CodecError` if it is none."""
    try:
        json_value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise CodecError(f"not JSON: {problem}") from None
    if not isinstance(json_value, dict):
        raise CodecError("not an object")
    return json_value
