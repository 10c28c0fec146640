"""Width of text on a terminal, and ways to reduce it.

Invariants: no resulting line exceeds the requested width, for any characters: wide ones take two cells, combining ones
none. Nothing is lost except what an ellipsis (…) replaces.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator
from itertools import accumulate

__all__ = ["display_width", "shorten_ids", "wrap"]

_MIN_PREFIX = 12
"""Minimum length of a shortened id: people recognise ``SIM-GPU-1f3a`` or ``GPU-1f3a09c2``."""
_BREAK_AFTER = "/-,;:=_."
"""Characters after which an overlong word may be broken."""


def display_width(text: str) -> int:
    """Return the cells that ``text`` takes; it contains printable characters only."""
    return len(text) if text.isascii() else sum(map(_letter_width, text))


def _letter_width(letter: str) -> int:
    if letter < "\u0300":
        return 1
    # Korean vowels and final consonants combine with the preceding syllable.
    if unicodedata.category(letter) in ("Mn", "Me") or "\u1160" <= letter <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


def wrap(text: str, max_width: int) -> list[str]:
    """Wrap ``text`` to lines of at most ``max_width`` cells (at least two), between words where possible."""
    max_width = max(max_width, 2)
    lines: list[str] = []
    line: str | None = None
    for word in text.split(" "):
        if line is not None and display_width(line) + 1 + display_width(word) <= max_width:
            line = f"{line} {word}"
            continue
        if line is not None:
            lines.append(line)
        *whole, line = _split_word(word, max_width)
        lines.extend(whole)
    lines.append(line or "")
    return [each.rstrip() for each in lines]


def _split_word(word: str, room: int) -> Iterator[str]:
    """Yield ``word`` in pieces that fit; at least one."""
    while display_width(word) > room:
        ends = accumulate(map(_letter_width, word))
        end = next(place for place, taken in enumerate(ends) if taken > room)
        joint = max(word.rfind(each, 0, end) for each in _BREAK_AFTER) + 1
        cut = joint if joint > end // 3 else end
        yield word[:cut]
        word = word[cut:]
    yield word


def shorten_ids(ids: Collection[str]) -> dict[str, str]:
    """Return a unique prefix of each of ``ids`` with an ellipsis; the whole id where that is no shorter."""
    found = set(ids)
    in_order = sorted(found)
    short = {}
    for place, each in enumerate(in_order):
        neighbours = in_order[max(0, place - 1) : place] + in_order[place + 1 : place + 2]
        shared = max((_common_prefix_length(each, other) for other in neighbours), default=0)
        length = max(shared + 1, _MIN_PREFIX)
        short[each] = f"{each[:length]}…" if length + 1 < len(each) else each
    return short


def _common_prefix_length(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))
