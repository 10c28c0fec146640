"""How much room text takes on a terminal, and how it is made to take less.

Promise: no line that comes from here is wider than was asked for, whatever letters it is made of: wide ones take two
cells, combining ones none. Everything is still there but what an ellipsis (…) stands for.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator
from itertools import accumulate

__all__ = ["shortened", "width", "wrapped"]

_LEAST_PREFIX = 12
"""Characters of an id that are always shown: ``SIM-GPU-1f3a`` or ``GPU-1f3a09c2`` is what people recognise."""
_JOINTS = "/-,;:=_."
"""After these a word that is too long is broken."""


def width(text: str) -> int:
    """Cells that ``text`` takes; it holds printable characters only."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(letter: str) -> int:
    if letter < "\u0300":
        return 1
    # The vowels and final consonants of Korean join the syllable before them.
    if unicodedata.category(letter) in ("Mn", "Me") or "\u1160" <= letter <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


def wrapped(text: str, room: int) -> list[str]:
    """``text`` in lines of at most ``room`` cells (two at least), broken between words where there are any."""
    room = max(room, 2)
    lines: list[str] = []
    line: str | None = None
    for word in text.split(" "):
        if line is not None and width(line) + 1 + width(word) <= room:
            line = f"{line} {word}"
            continue
        if line is not None:
            lines.append(line)
        *whole, line = _pieces(word, room)
        lines.extend(whole)
    lines.append(line or "")
    return [each.rstrip() for each in lines]


def _pieces(word: str, room: int) -> Iterator[str]:
    """``word`` in pieces that fit; at least one."""
    while width(word) > room:
        ends = accumulate(map(_cells, word))
        end = next(place for place, taken in enumerate(ends) if taken > room)
        joint = max(word.rfind(each, 0, end) for each in _JOINTS) + 1
        cut = joint if joint > end // 3 else end
        yield word[:cut]
        word = word[cut:]
    yield word


def shortened(ids: Collection[str]) -> dict[str, str]:
    """Each of ``ids`` as a beginning that no other of them has, with an ellipsis; whole where that is no shorter."""
    found = set(ids)
    in_order = sorted(found)
    short = {}
    for place, each in enumerate(in_order):
        neighbours = in_order[max(0, place - 1) : place] + in_order[place + 1 : place + 2]
        shared = max((_shared(each, other) for other in neighbours), default=0)
        length = max(shared + 1, _LEAST_PREFIX)
        short[each] = f"{each[:length]}…" if length + 1 < len(each) else each
    return short


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))
