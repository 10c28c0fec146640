"""Reads the values of a driver's response, which a child sends: a value that is missing or malformed is never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scrubber.domain.errors import Unreadable

__all__ = ["count", "counts", "malformed", "objects", "optional_count", "optional_text", "text", "texts"]


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


def count(answer: Mapping[str, object], key: str) -> int:
    found = answer.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise malformed(key, "is not a number")
    return found


def optional_count(answer: Mapping[str, object], key: str) -> int | None:
    """Return the number under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else count(answer, key)


def texts(answer: Mapping[str, object], key: str) -> dict[str, str]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise malformed(key, "is not an object of strings")
    return found


def counts(answer: Mapping[str, object], key: str) -> dict[str, int]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(type(each) is int for each in found.values()):
        raise malformed(key, "is not an object of numbers")
    return found


def objects(answer: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    """Return the list of objects under ``key``."""
    found = answer.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise malformed(key, "is not a list of objects")
    return found


def malformed(key: str, what: str) -> Unreadable:
    """Return the error for the value under ``key``; ``what`` is wrong with it."""
    return Unreadable(f"The driver's response is invalid: {key!r} {what}.")
