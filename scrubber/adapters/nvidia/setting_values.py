"""The names of a GPU's settings, and the texts that are valid values of them.

A value is a text and is compared as a text, so each value has exactly one spelling, the one in which the driver's value
is written. Validation needs no driver, because the service rejects a policy with impossible values before it starts;
the child that writes the values must use the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = [
    "ACCESS_VALUES",
    "COMPUTE_VALUES",
    "NO_OFFSETS",
    "SWITCH_VALUES",
    "format_watts",
    "parse_choice",
    "parse_clocks",
    "parse_offsets",
    "parse_watts",
    "validation_errors",
]

SWITCH_VALUES: Mapping[int, str] = {0: "disabled", 1: "enabled"}
ACCESS_VALUES: Mapping[int, str] = {0: "unrestricted", 1: "restricted"}
COMPUTE_VALUES: Mapping[int, str] = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
"""Drivers no longer accept ``exclusive-thread``, so no policy can request it."""
NO_OFFSETS = "none"

_OFFSET_CLOCKS = ("graphics", "memory")
_OFFSET = re.compile(r"(graphics|memory) P([0-9]|[1-9][0-9]) ([+-][1-9][0-9]{0,4})")
_WATTS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,3})?")
_CLOCKS = re.compile(r"([1-9][0-9]{0,5}),([1-9][0-9]{0,5})")


def parse_choice(choices: Mapping[int, str], text: str) -> int:
    """Return the driver's number for a word.

    Raises:
        ValueError: the message contains what to write instead. This holds for all functions that follow.
    """
    for number, word in choices.items():
        if word == text:
            return number
    raise ValueError(f"write one of {', '.join(choices.values())}")


def format_watts(milliwatts: int) -> str:
    """Return the text of a power limit."""
    return f"{milliwatts / 1000:g}"


def parse_watts(text: str) -> int:
    if _WATTS.fullmatch(text) is None:
        raise ValueError("write watts, such as 300 or 312.5")
    found = round(float(text) * 1000)
    if format_watts(found) != text:
        raise ValueError(f"write {format_watts(found)}")
    return found


def parse_clocks(text: str) -> tuple[int, int]:
    """Return the clocks of memory and of graphics, in MHz."""
    matched = _CLOCKS.fullmatch(text)
    if matched is None:
        raise ValueError("write the clocks of memory and graphics in MHz, such as 3201,1980")
    return int(matched[1]), int(matched[2])


def parse_offsets(text: str) -> dict[tuple[str, int], int]:
    """Return MHz by clock and performance state; offsets that are not named are 0."""
    found: dict[tuple[str, int], int] = {}
    for part in () if text == NO_OFFSETS else text.split(", "):
        matched = _OFFSET.fullmatch(part)
        if matched is None:
            raise ValueError("write none, or offsets in MHz such as graphics P0 +100, memory P0 -50")
        found[matched[1], int(matched[2])] = int(matched[3])
    places = sorted(found, key=lambda place: (place[1], _OFFSET_CLOCKS.index(place[0])))
    spelling = ", ".join(f"{clock} P{state} {found[clock, state]:+d}" for clock, state in places) or NO_OFFSETS
    if spelling != text:
        raise ValueError(f"write {spelling}")
    return found


def validation_errors(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return why no GPU can have the settings of a policy: one message per setting; none when some GPU can.

    Whether a value is within the range of this node's GPUs is for their driver to decide.
    """
    found: list[str] = []
    for name, text in sorted(settings.items()):
        check = _CHECKS.get(name)
        if check is None:
            found.append(f"{name} is not a setting of an NVIDIA GPU; the settings are {', '.join(sorted(_CHECKS))}.")
            continue
        try:
            check(text)
        except ValueError as error:
            found.append(f'{name} cannot be "{text}"; {error}.')
    return tuple(found)


def _one_of(words: Mapping[int, str]) -> Callable[[str], object]:
    return lambda text: parse_choice(words, text)


_CHECKS: Mapping[str, Callable[[str], object]] = {
    "compute_mode": _one_of({number: word for number, word in COMPUTE_VALUES.items() if word != "exclusive-thread"}),
    "persistence_mode": _one_of(SWITCH_VALUES),
    "power_limit_watts": parse_watts,
    "application_clocks": parse_clocks,
    "clock_offsets": parse_offsets,
    "auto_boost": _one_of(SWITCH_VALUES),
    "accounting_mode": _one_of(SWITCH_VALUES),
    "api_restriction_application_clocks": _one_of(ACCESS_VALUES),
    "api_restriction_auto_boosted_clocks": _one_of(ACCESS_VALUES),
    "ecc_mode": _one_of(SWITCH_VALUES),
}
