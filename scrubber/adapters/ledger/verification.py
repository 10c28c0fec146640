"""Verification of a whole audit log: its chain, and the heads saved elsewhere, in one pass over its pages.

Guarantee: an audit log is intact only when nothing contradicts it and every saved head could be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scrubber.adapters.ledger.chain import ChainVerifier
from scrubber.adapters.ledger.saved_heads import HeadComparison, HeadStatus, SavedHead, SavedHeadChecker
from scrubber.ports.record import CHAIN_START, AuditHead, AuditLogPage, AuditRow

__all__ = ["AuditLogVerification", "AuditLogVerifier", "ChainVerdict"]


class ChainVerdict(StrEnum):
    """The overall result of a verification."""

    INTACT = "intact"
    BROKEN = "broken"
    CANNOT_TELL = "unknown"


@dataclass(frozen=True, slots=True)
class AuditLogVerification:
    """The details of a verification.

    Attributes:
        message: what is wrong and where, or that nothing is.
        rows: number of rows; ``first`` and ``last`` are None when there are none.
        pruned, head: the two ends of the audit log, as recorded next to it.
        comparisons: one for each saved head.
    """

    verdict: ChainVerdict
    message: str
    rows: int
    first: AuditRow | None
    last: AuditRow | None
    pruned: AuditHead
    head: AuditHead
    comparisons: Sequence[HeadComparison]


# See docs/decisions/0034-audit-log-is-verified-by-its-reader.md.
class AuditLogVerifier:
    """Takes the pages of one reading in order: :meth:`add_page` for each, then :meth:`result`."""

    def __init__(self, saved_heads: Iterable[SavedHead] = ()) -> None:
        self._head_checker = SavedHeadChecker(saved_heads)
        self._chain_verifier: ChainVerifier | None = None
        self._pruned = self._head = CHAIN_START
        self._first: AuditRow | None = None
        self._last: AuditRow | None = None

    def add_page(self, page: AuditLogPage) -> None:
        if self._chain_verifier is None:
            self._chain_verifier = ChainVerifier(page.preceding_head)
            self._pruned, self._head = page.preceding_head, page.head
        for row in page.rows:
            self._chain_verifier.add_row(row)
            self._head_checker.add_row(row)
            self._first, self._last = self._first or row, row

    def result(self, flaw: str = "") -> AuditLogVerification:
        """Return the result of the verification.

        Args:
            flaw: why reading stopped before the end, if it did.
        """
        report = (self._chain_verifier or ChainVerifier(CHAIN_START)).report(self._head)
        comparisons = self._head_checker.compare(self._pruned, self._head)
        against = [each for each in comparisons if each.status in (HeadStatus.REPLACED, HeadStatus.CUT_OFF)]
        undecided = [each for each in comparisons if each.status is HeadStatus.CANNOT_TELL]
        verdict, message = ChainVerdict.INTACT, report.message
        if flaw or not report.intact or against:
            verdict = ChainVerdict.BROKEN
            message = flaw or (report.message if not report.intact else against[0].message)
        elif undecided:
            verdict, message = ChainVerdict.CANNOT_TELL, undecided[0].message
        return AuditLogVerification(
            verdict, message, report.rows, self._first, self._last, self._pruned, self._head, comparisons
        )
