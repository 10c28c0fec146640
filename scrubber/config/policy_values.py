"""How a policy's values are written: times with units, rates, sizes, ranges of XIDs, words out of a choice.

Each is read, refused with what to write instead, and described for editors in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from scrubber.config.quantities import parse_codes, parse_rate, parse_seconds, parse_size

__all__ = [
    "HIGHEST_XID",
    "SHORTEST_QUESTION_SECONDS",
    "SHORTEST_SECONDS",
    "Codes",
    "PositiveSeconds",
    "QuestionSeconds",
    "Rate",
    "Seconds",
    "Size",
    "choice",
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


def _time_schema(least: float) -> WithJsonSchema:
    written = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*(ms|s|m|h)$"}
    return WithJsonSchema({"anyOf": [{"type": "number", "minimum": least}, written]})


_RATE = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]i?)?[Bb]?(/s)?$"},
    ]
}
_SIZE = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]i?)?[Bb]?$"},
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
Rate = Annotated[int, BeforeValidator(reading(parse_rate)), WithJsonSchema(_RATE)]
Size = Annotated[int, BeforeValidator(reading(parse_size)), WithJsonSchema(_SIZE)]
Codes = Annotated[
    tuple[int, ...],
    BeforeValidator(reading(lambda written: parse_codes(written, HIGHEST_XID))),
    WithJsonSchema(_XIDS),
]
