"""Comparison of an audit log with heads saved outside the node: the only proof that it was not truncated or rewritten.

Guarantee: "found" is reported only for a row that is in the audit log with that hash. If the audit log cannot answer,
because the row was pruned, the result is neither yes nor no.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from scrubber.ports.record import AuditHead, AuditRow

__all__ = ["HeadComparison", "HeadStatus", "SavedHead", "SavedHeadChecker"]

_DIGITS = 64
"""Number of hexadecimal digits of a SHA-256. A prefix is no proof: another audit log with the same one can be computed."""
_SHOWN_DIGITS = 12
"""Number of digits of a hash in a message, for a person to distinguish two."""
_HEXADECIMAL = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class SavedHead:
    """The sequence of a row, starting at 1, and its hash, in lower case."""

    sequence: int
    hash: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``text`` in the form SEQ:HASH; raises ``ValueError`` with the reason when it is invalid."""
        sequence, colon, digits = text.strip().partition(":")
        digits = digits.lower()
        if not colon or not (sequence.isascii() and sequence.isdecimal()) or len(sequence) > 18 or int(sequence) == 0:
            raise ValueError(f'"{text}" is not SEQ:HASH; scrubber audit head prints one')
        if not digits or not _HEXADECIMAL.issuperset(digits):
            raise ValueError(f'the hash in "{text}" is not hexadecimal')
        if len(digits) != _DIGITS:
            raise ValueError(
                f'the hash in "{text}" has {len(digits)} digits; a SHA-256 has {_DIGITS}, and a part of one '
                "proves nothing"
            )
        return cls(int(sequence), digits)

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}"


class HeadStatus(StrEnum):
    """The result of comparing an audit log with a saved head."""

    FOUND = "found"
    REPLACED = "replaced"
    """The row has another hash now, or is missing from the middle of the audit log."""
    CUT_OFF = "truncated"
    """The audit log ends before the row, regardless of the recorded end."""
    CANNOT_TELL = "unknown"
    """The audit log begins after the row."""


@dataclass(frozen=True, slots=True)
class HeadComparison:
    """One saved head, and its status in an audit log."""

    saved_head: SavedHead
    status: HeadStatus
    message: str


class SavedHeadChecker:
    """Collects the rows of ``saved_heads`` while an audit log is read; see :meth:`compare`."""

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
        """Compare each saved head with the audit log between ``pruned`` and ``head``, once every row of it was added."""
        return tuple(HeadComparison(each, *self._compare_head(each, pruned, head)) for each in self._saved_heads)

    def _compare_head(self, kept: SavedHead, pruned: AuditHead, head: AuditHead) -> tuple[HeadStatus, str]:
        row = kept.sequence
        found = pruned.hash if row == pruned.sequence else self._hashes.get(row)
        if found == kept.hash:
            return HeadStatus.FOUND, f"Row {row} matches the saved head."
        if found is not None:
            return (
                HeadStatus.REPLACED,
                f"Row {row} now has the hash {found[:_SHOWN_DIGITS]}…: it, or a row before it, was rewritten.",
            )
        if row < pruned.sequence:
            why = f"the rows up to {pruned.sequence} were pruned, or omitted. Compare a newer head."
            return HeadStatus.CANNOT_TELL, f"Row {row} can no longer be compared: {why}"
        if row > head.sequence:
            return HeadStatus.CUT_OFF, f"The audit log ends at row {head.sequence}: its end was truncated."
        last = max(self._last, pruned.sequence)
        if row > last:
            # The recorded end shows that the row existed: rows are missing after the last one seen.
            return (
                HeadStatus.CUT_OFF,
                f"The audit log ends at row {last} here: its end was truncated, or cannot be read.",
            )
        return HeadStatus.REPLACED, f"Row {row} is missing: the audit log was rewritten, or is incomplete."
