"""Heads that were kept outside the node, held against a trail: the only proof that it was not cut or written anew.

The promise: "found" is said of a row that is in the trail with that hash, and of nothing else. What the trail cannot tell
any more, because that row was given up, is neither yes nor no.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from scrubber.ports.record import AuditRow, Head

__all__ = ["Comparison", "KeptHead", "Standing", "Witness"]

_DIGITS = 64
"""Hexadecimal digits of a SHA-256. A beginning is no proof: another trail with the same one can be computed."""
_SHOWN = 12
"""Digits of a hash that a sentence shows, for a person to tell two apart."""
_HEXADECIMAL = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class KeptHead:
    """The sequence of a row, from 1, and its hash, in lower case."""

    sequence: int
    hash: str

    @classmethod
    def read(cls, written: str) -> Self:
        """The head that is ``written`` as SEQ:HASH; raises ``ValueError`` with what is wrong with it."""
        sequence, colon, digits = written.strip().partition(":")
        digits = digits.lower()
        if not colon or not (sequence.isascii() and sequence.isdecimal()) or len(sequence) > 18 or int(sequence) == 0:
            raise ValueError(f'"{written}" is no SEQ:HASH; scrubber audit head prints one')
        if not digits or not _HEXADECIMAL.issuperset(digits):
            raise ValueError(f'the hash in "{written}" is not hexadecimal')
        if len(digits) != _DIGITS:
            raise ValueError(
                f'the hash in "{written}" has {len(digits)} digits; a SHA-256 has {_DIGITS}, and a part of one proves nothing'
            )
        return cls(int(sequence), digits)

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}"


class Standing(StrEnum):
    """What a trail says of a head that was kept."""

    FOUND = "found"
    REPLACED = "replaced"
    """That row has another hash now, or is gone from the midst of the trail."""
    CUT_OFF = "cut-off"
    """The trail ends before it, whatever is recorded of its end."""
    CANNOT_TELL = "cannot-tell"
    """The trail begins behind it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One head that was kept, and what a trail says of it."""

    kept: KeptHead
    standing: Standing
    sentence: str


class Witness:
    """Looks out for the rows of ``kept`` while a trail is walked; see :meth:`compare`."""

    def __init__(self, kept: Iterable[KeptHead]) -> None:
        self._kept = tuple(dict.fromkeys(kept))
        self._wanted = frozenset(each.sequence for each in self._kept)
        self._seen: dict[int, str] = {}
        self._last = 0

    def step(self, row: AuditRow) -> None:
        self._last = max(self._last, row.sequence)
        if row.sequence in self._wanted:
            self._seen.setdefault(row.sequence, row.hash)

    def compare(self, pruned: Head, head: Head) -> Sequence[Comparison]:
        """What the trail between ``pruned`` and ``head`` says of each, once every row of it was shown."""
        return tuple(Comparison(each, *self._judge(each, pruned, head)) for each in self._kept)

    def _judge(self, kept: KeptHead, pruned: Head, head: Head) -> tuple[Standing, str]:
        row = kept.sequence
        found = pruned.hash if row == pruned.sequence else self._seen.get(row)
        if found == kept.hash:
            return Standing.FOUND, f"Row {row} is the one that was kept."
        if found is not None:
            return (
                Standing.REPLACED,
                f"Row {row} has the hash {found[:_SHOWN]}… now: it, or a row before it, was written anew.",
            )
        if row < pruned.sequence:
            why = f"the rows up to {pruned.sequence} were given up, or left out. Compare a newer head."
            return Standing.CANNOT_TELL, f"Row {row} cannot be compared any more: {why}"
        if row > head.sequence:
            return Standing.CUT_OFF, f"The audit trail ends at row {head.sequence}: its end was cut off."
        last = max(self._last, pruned.sequence)
        if row > last:
            # The record of the end says that it was there: rows are missing behind the last one that was seen.
            return Standing.CUT_OFF, f"The audit trail ends at row {last} here: its end was cut off, or cannot be read."
        return Standing.REPLACED, f"Row {row} is not there: the audit trail was written anew, or is not whole."
