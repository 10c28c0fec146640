"""Reads the values of a driver's response, which a child sends: a value that is missing or malformed is never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from scrubber.domain.errors import Unreadable

__all__ = [
    "count",
    "counts",
    "is_count",
    "malformed",
    "objects",
    "optional_count",
    "optional_number",
    "optional_text",
    "text",
    "texts",
]

_COUNT_BITS = 63
"""Bits of a count: the ledger and the API's messages have no larger numbers."""


def text(answer: Mapping[str, object], key: str) -> str:
    """Return the text under ``key``.

    Raises:
        Unreadable: there is none. This holds for all functions that follow.
    """
    found = answer.get(key)
    if not isinstance(found, str) or not found:
        raise malformed(key, "is not a string")
    return found


def optional_text(answer: Mapping[str, object], key: str) -> str | None:
    """Return the text under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else text(answer, key)


def count(answer: Mapping[str, object], key: str, *, bits: int = _COUNT_BITS) -> int:
    """Return the number under ``key``: whole, not negative, and of at most ``bits`` bits."""
    found = answer.get(key)
    if not is_count(found, bits):
        raise malformed(key, "is not a count")
    return found


def optional_count(answer: Mapping[str, object], key: str, *, bits: int = _COUNT_BITS) -> int | None:
    """Return the count under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else count(answer, key, bits=bits)


def optional_number(answer: Mapping[str, object], key: str) -> int | None:
    """Return the whole number under ``key``, which may be negative; None where it does not apply."""
    found = answer.get(key)
    if found is None:
        return None
    if type(found) is not int or abs(found) >> _COUNT_BITS:
        raise malformed(key, "is not a number")
    return found


def texts(answer: Mapping[str, object], key: str) -> dict[str, str]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise malformed(key, "is not an object of strings")
    return found


def counts(answer: Mapping[str, object], key: str) -> dict[str, int]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(is_count(each) for each in found.values()):
        raise malformed(key, "is not an object of counts")
    return found


def is_count(value: object, bits: int = _COUNT_BITS) -> TypeGuard[int]:
    """Whether ``value`` is a whole number that is not negative and has at most ``bits`` bits."""
    return type(value) is int and 0 <= value < 1 << bits


def objects(answer: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    """Return the list of objects under ``key``."""
    found = answer.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise malformed(key, "is not a list of objects")
    return found


def malformed(key: str, what: str) -> Unreadable:
    """Return the error for the value under ``key``; ``what`` is wrong with it."""
    return Unreadable(f"The driver's response is invalid: {key!r} {what}.")
