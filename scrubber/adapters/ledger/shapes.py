"""How a frozen dataclass becomes JSON and comes back exactly as it was, or not at all.

A :class:`Kind` writes one sort of value and reads it back; :func:`shape` builds the kind of a dataclass from the kinds
of its fields. The promise: what is written reads back equal, and nothing is guessed. A field that this program does
not know, one that is missing, or a value of another type is :class:`Undecodable`, never a default. A dataclass that
gains a field without a kind for it fails at import, not at the first restart after an upgrade.
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
    "TEXT",
    "Document",
    "Json",
    "Kind",
    "Undecodable",
    "canonical",
    "choice",
    "listed",
    "optional",
    "shape",
    "unordered",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scalar: TypeAlias = "str | int | float | bool | None"
T = TypeVar("T")
C = TypeVar("C", bound=StrEnum)


class Undecodable(ValueError):
    """Stored text is not what this program writes, or a value cannot be written; the text says which field."""


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical(value: Json) -> str:
    """The one way this program writes ``value``: sorted keys, no blanks, ASCII, finite numbers only."""
    return _CANONICAL.encode(value)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """Writes values of one sort and reads them back; both raise :class:`Undecodable` for anything else."""

    write: Callable[[T], Json]
    read: Callable[[Json], T]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Undecodable(f"{value!r} is not text")
    return str(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Undecodable(f"{value!r} is not a whole number")
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Undecodable(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise Undecodable("a number is too large") from None
    if not math.isfinite(number):
        raise Undecodable(f"{value!r} is not a finite number")
    return number


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise Undecodable(f"{value!r} is neither true nor false")
    return value


def _scalar(value: object) -> Scalar:
    if value is None or isinstance(value, bool | int):
        return value
    return _number(value) if isinstance(value, float) else _text(value)


TEXT: Kind[str] = Kind(_text, _text)
INTEGER: Kind[int] = Kind(_integer, _integer)
NUMBER: Kind[float] = Kind(_number, _number)
FLAG: Kind[bool] = Kind(_flag, _flag)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """``kind``, or null for None."""
    return Kind(
        lambda value: None if value is None else kind.write(value),
        lambda json: None if json is None else kind.read(json),
    )


def choice(enum: type[C]) -> Kind[C]:
    """A member of ``enum``, by its value."""

    def write(value: C) -> Json:
        return enum(_text(value)).value

    def read(json: Json) -> C:
        try:
            return enum(_text(json))
        except ValueError:
            raise Undecodable(f"{json!r} is not a {enum.__name__}") from None

    return Kind(write, read)


def _items(json: Json) -> list[Json]:
    if not isinstance(json, list):
        raise Undecodable(f"{json!r} is not a list")
    return json


def listed(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A tuple of ``kind``, in order."""
    return Kind(
        lambda values: [kind.write(value) for value in values],
        lambda json: tuple(kind.read(item) for item in _items(json)),
    )


def _sorted_set(values: frozenset[str]) -> Json:
    written: list[Json] = []
    written.extend(sorted(_text(value) for value in values))
    return written


def _pairs(kind: Kind[T]) -> Kind[tuple[tuple[str, T], ...]]:
    def read(json: Json) -> tuple[tuple[str, T], ...]:
        pairs = [_items(item) for item in _items(json)]
        if any(len(pair) != 2 for pair in pairs):
            raise Undecodable(f"{json!r} is not names with values")
        return tuple((_text(name), kind.read(value)) for name, value in pairs)

    return Kind(lambda values: [[_text(name), kind.write(value)] for name, value in values], read)


COUNTS: Kind[tuple[tuple[str, int], ...]] = _pairs(INTEGER)
"""Pairs of a name and a whole number, in order."""
PAIRS: Kind[tuple[tuple[str, str], ...]] = _pairs(TEXT)
"""Pairs of a name and a text, in order."""

unordered: Kind[frozenset[str]] = Kind(_sorted_set, lambda json: frozenset(_text(item) for item in _items(json)))
"""A frozenset of texts; written sorted, so that equal sets are equal text."""


def _write_scalars(values: Mapping[str, Scalar]) -> Json:
    return {_text(name): _scalar(value) for name, value in values.items()}


def _read_scalars(json: Json) -> Mapping[str, Scalar]:
    if not isinstance(json, dict):
        raise Undecodable(f"{json!r} is not an object")
    return {name: _scalar(value) for name, value in json.items()}


SCALARS: Kind[Mapping[str, Scalar]] = Kind(_write_scalars, _read_scalars)
"""Evidence and event fields: names to text, numbers, flags or null."""


def shape(made: type[T], **kinds: Kind[Any]) -> Kind[T]:
    """The kind of the dataclass ``made``; ``kinds`` names each of its fields, no more and no fewer.

    Raises:
        TypeError: at import, when the dataclass and ``kinds`` do not name the same fields.
    """
    names = {each.name for each in fields(made)}  # type: ignore[arg-type]
    if names != kinds.keys():
        odd = ", ".join(sorted(names ^ kinds.keys()))
        raise TypeError(f"{made.__name__} and the form it is stored in disagree on: {odd}")

    def write(value: T) -> Json:
        if not isinstance(value, made):
            raise Undecodable(f"{value!r} is not a {made.__name__}")
        written: dict[str, Json] = {}
        for name, kind in kinds.items():
            try:
                written[name] = kind.write(getattr(value, name))
            except Undecodable as problem:
                raise Undecodable(f"{name}: {problem}") from None
        return written

    def read(json: Json) -> T:
        if not isinstance(json, dict):
            raise Undecodable(f"{json!r} is not a {made.__name__}")
        if unknown := json.keys() - kinds.keys():
            raise Undecodable(f"unknown field {', '.join(sorted(unknown))}")
        if missing := kinds.keys() - json.keys():
            raise Undecodable(f"missing field {', '.join(sorted(missing))}")
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            try:
                values[name] = kind.read(json[name])
            except Undecodable as problem:
                raise Undecodable(f"{name}: {problem}") from None
        return made(**values)

    return Kind(write, read)


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """A value that is stored by itself: canonical JSON that names its format.

    Attributes:
        format: grows whenever a field is added, dropped or changes its meaning.
    """

    kind: Kind[T]
    format: int

    def encode(self, value: T) -> str:
        """Canonical JSON of ``value``; raises :class:`Undecodable` when it would not read back."""
        written = self.kind.write(value)
        assert isinstance(written, dict)  # documents are shapes
        return canonical({"format": self.format, **written})

    def decode(self, text: str) -> T:
        """The value that ``text`` holds; raises :class:`Undecodable` for anything :meth:`encode` does not write."""
        try:
            json_value = json.loads(text)
        except ValueError as problem:
            raise Undecodable(f"not JSON: {problem}") from None
        if not isinstance(json_value, dict):
            raise Undecodable("not an object")
        found = json_value.pop("format", None)
        if isinstance(found, bool) or found != self.format:
            raise Undecodable(f"in format {found!r}, this program reads format {self.format}")
        return self.kind.read(json_value)
