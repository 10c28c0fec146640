"""Heads that were kept outside the node, held against a trail: the only proof that it was not cut or written anew.

The promise: "found" is said of a row that is in the trail with that hash, and of nothing else. What the trail cannot tell
any more, because that row was given up, is neither yes nor no.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from scrubber.ports.record import AuditHead, AuditRow

__all__ = ["HeadComparison", "HeadStatus", "SavedHead", "SavedHeadChecker"]

_DIGITS = 64
"""Hexadecimal digits of a SHA-256. A beginning is no proof: another trail with the same one can be computed."""
_SHOWN_DIGITS = 12
"""Digits of a hash that a sentence shows, for a person to tell two apart."""
_HEXADECIMAL = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class SavedHead:
    """The sequence of a row, from 1, and its hash, in lower case."""

    sequence: int
    hash: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The head that is ``text`` as SEQ:HASH; raises ``ValueError`` with what is wrong with it."""
        sequence, colon, digits = text.strip().partition(":")
        digits = digits.lower()
        if not colon or not (sequence.isascii() and sequence.isdecimal()) or len(sequence) > 18 or int(sequence) == 0:
            raise ValueError(f'"{text}" is no SEQ:HASH; scrubber audit head prints one')
        if not digits or not _HEXADECIMAL.issuperset(digits):
            raise ValueError(f'the hash in "{text}" is not hexadecimal')
        if len(digits) != _DIGITS:
            raise ValueError(
                f'the hash in "{text}" has {len(digits)} digits; a SHA-256 has {_DIGITS}, and a part of one proves nothing'
            )
        return cls(int(sequence), digits)

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}"


class HeadStatus(StrEnum):
    """What a trail says of a head that was kept."""

    FOUND = "found"
    REPLACED = "replaced"
    """That row has another hash now, or is gone from the midst of the trail."""
    CUT_OFF = "cut-off"
    """The trail ends before it, whatever is recorded of its end."""
    CANNOT_TELL = "cannot-tell"
    """The trail begins behind it."""


@dataclass(frozen=True, slots=True)
class HeadComparison:
    """One head that was kept, and what a trail says of it."""

    saved_head: SavedHead
    status: HeadStatus
    message: str


class SavedHeadChecker:
    """Looks out for the rows of ``saved_heads`` while a trail is walked; see :meth:`compare`."""

    def __init__(self, saved_heads: Iterable[SavedHead]) -> None:
        self._saved_heads = tuple(dict.fromkeys(saved_heads))
        self._sequences = frozenset(each.sequence for each in self._saved_heads)
        self._hashes: dict[int, str] = {}
        self._last = 0

    def add_row(self, row: AuditRow) -> None:
        self._last = max(self._last, row.sequence)
        if row.sequence in self._sequences:
            self._hashes.setdefault(row.sequence, row.hash)

    def compare(self, pruned: AuditHead, head: AuditHead) -> Sequence[HeadComparison]:
        """What the trail between ``pruned`` and ``head`` says of each, once every row of it was shown."""
        return tuple(HeadComparison(each, *self._compare_head(each, pruned, head)) for each in self._saved_heads)

    def _compare_head(self, kept: SavedHead, pruned: AuditHead, head: AuditHead) -> tuple[HeadStatus, str]:
        row = kept.sequence
        found = pruned.hash if row == pruned.sequence else self._hashes.get(row)
        if found == kept.hash:
            return HeadStatus.FOUND, f"Row {row} is the one that was kept."
        if found is not None:
            return (
                HeadStatus.REPLACED,
                f"Row {row} has the hash {found[:_SHOWN_DIGITS]}… now: it, or a row before it, was written anew.",
            )
        if row < pruned.sequence:
            why = f"the rows up to {pruned.sequence} were given up, or left out. Compare a newer head."
            return HeadStatus.CANNOT_TELL, f"Row {row} cannot be compared any more: {why}"
        if row > head.sequence:
            return HeadStatus.CUT_OFF, f"The audit trail ends at row {head.sequence}: its end was cut off."
        last = max(self._last, pruned.sequence)
        if row > last:
            # The record of the end says that it was there: rows are missing behind the last one that was seen.
            return (
                HeadStatus.CUT_OFF,
                f"The audit trail ends at row {last} here: its end was cut off, or cannot be read.",
            )
        return HeadStatus.REPLACED, f"Row {row} is not there: the audit trail was written anew, or is not whole."
