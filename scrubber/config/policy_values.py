"""How a policy's values are written: times with units, rates, sizes, ranges of XIDs, names, words out of a choice.

Each is read, refused with what to write instead, and described for editors in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from scrubber.config.quantities import parse_codes, parse_rate, parse_seconds, parse_size, parse_window

__all__ = [
    "HIGHEST_XID",
    "SHORTEST_QUESTION_SECONDS",
    "SHORTEST_SECONDS",
    "WRITTEN_AS",
    "Codes",
    "DnsName",
    "Name",
    "PositiveSeconds",
    "PositiveSecondsOrNever",
    "QuestionSeconds",
    "Rate",
    "Resource",
    "Seconds",
    "SecondsOrNever",
    "Setting",
    "Size",
    "Unit",
    "Window",
    "choice",
    "one_of",
    "refuse",
]

HIGHEST_XID = 9999
_T = TypeVar("_T")


def refuse(sentence: str, *at: str | int) -> NoReturn:
    """Refuse a value; ``at`` leads from the value under validation to the part that is to be changed."""
    raise PydanticCustomError("policy", "{sentence}", {"sentence": sentence, "at": at})


def reading(parse: Callable[[Any], _T]) -> Callable[[Any], _T]:
    def read(written: object) -> _T:
        try:
            return parse(written)
        except ValueError as error:
            refuse(str(error))

    return read


def one_of(words: Iterable[str]) -> BeforeValidator:
    """One of ``words``, in whatever order they come."""
    choices = sorted(words)

    def choose(written: object) -> str:
        if isinstance(written, str) and written in choices:
            return written
        raise PydanticCustomError("choice", "{written}", {"written": str(written), "choices": choices})

    return BeforeValidator(choose)


def choice(kind: type[StrEnum]) -> BeforeValidator:
    def choose(written: object) -> StrEnum:
        for member in kind:
            if member.value == written:
                return member
        raise PydanticCustomError(
            "choice", "{written}", {"written": str(written), "choices": [each.value for each in kind]}
        )

    return BeforeValidator(choose, json_schema_input_type=kind)


SHORTEST_SECONDS = 0.01
"""Below it nothing could be done in time, or the service would do nothing but try again."""
SHORTEST_QUESTION_SECONDS = 0.05
"""Below it a healthy driver on a busy node would count as stuck."""


def _at_least(least: float) -> BeforeValidator:
    def read(written: object) -> float:
        seconds = reading(parse_seconds)(written)
        if seconds < least:
            refuse(f"a time of {seconds:g} s is impossible here; write at least {least * 1000:g}ms")
        return seconds

    return BeforeValidator(read)


def _or_never(least: float) -> BeforeValidator:
    def read(written: object) -> float | None:
        if written == "never":
            return None
        try:
            seconds = parse_seconds(written)
        except ValueError as error:
            refuse(str(error).replace("write seconds", "write never, seconds"))
        if seconds < least:
            refuse(f"a time of {seconds:g} s is impossible here; write at least {least * 1000:g}ms, or never")
        return seconds

    return BeforeValidator(read)


def _time_schema(least: float, *words: str) -> WithJsonSchema:
    written = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*(ms|s|m|h)$"}
    fixed = [{"const": word} for word in words]
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": least}, written, *fixed]})


def _window(written: object) -> tuple[float, float] | None:
    if written == "always":
        return None
    try:
        return parse_window(written)
    except ValueError as error:
        refuse(f"{error}, or always")


_RATE = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]([iI][bB]?|[bB])|[bB])?(/s)?$"},
    ]
}
_SIZE = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]([iI][bB]?|[bB])|[bB])?$"},
    ]
}
_XIDS = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": HIGHEST_XID},
        {"type": "string", "pattern": r"^[0-9]+\s*-\s*[0-9]+$"},
    ]
}

Seconds = Annotated[float, _at_least(0), _time_schema(0)]
PositiveSeconds = Annotated[float, _at_least(SHORTEST_SECONDS), _time_schema(SHORTEST_SECONDS)]
QuestionSeconds = Annotated[float, _at_least(SHORTEST_QUESTION_SECONDS), _time_schema(SHORTEST_QUESTION_SECONDS)]
SecondsOrNever = Annotated[float | None, _or_never(0), _time_schema(0, "never")]
PositiveSecondsOrNever = Annotated[float | None, _or_never(SHORTEST_SECONDS), _time_schema(SHORTEST_SECONDS, "never")]
Window = Annotated[
    tuple[float, float] | None,
    BeforeValidator(_window),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "always"},
                {"type": "string", "pattern": r"^[0-9]{1,2}:[0-9]{2}\s*-\s*[0-9]{1,2}:[0-9]{2}$"},
            ]
        }
    ),
]
Rate = Annotated[int, BeforeValidator(reading(parse_rate)), WithJsonSchema(_RATE)]
Size = Annotated[int, BeforeValidator(reading(parse_size)), WithJsonSchema(_SIZE)]
Codes = Annotated[
    tuple[int, ...],
    BeforeValidator(reading(lambda written: parse_codes(written, HIGHEST_XID))),
    WithJsonSchema(_XIDS),
]


def _setting(written: object) -> str:
    if isinstance(written, bool) or not isinstance(written, str | int | float):
        refuse('a setting is a word or a number; quote it if it must read true or false, as in "true"')
    return str(written)


Setting = Annotated[str, BeforeValidator(_setting), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]})]

_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_DNS = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
_UNIT = r"^[A-Za-z0-9:_.@-]+\.service$"
_RESOURCE = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"

WRITTEN_AS: Mapping[str, str] = {
    _NAME: "no name; use small letters, digits and hyphens, such as my-policy",
    _DNS: "no name; use small letters, digits and hyphens, such as gpu-operator",
    _UNIT: "no service of systemd; write all of its name, such as nvidia-dcgm.service",
    _RESOURCE: "no resource; write all of its name, such as nvidia.com/gpu",
}
"""What a word that does not match a pattern is not, and how such words are written."""

Name = Annotated[str, Field(pattern=_NAME)]
DnsName = Annotated[str, Field(pattern=_DNS)]
Unit = Annotated[str, Field(pattern=_UNIT)]
Resource = Annotated[str, Field(pattern=_RESOURCE)]
