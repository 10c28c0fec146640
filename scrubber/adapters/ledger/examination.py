"""A whole trail, judged: its chain, and the heads that were kept elsewhere, in one walk over its pages.

The promise: it is intact only when nothing speaks against it and every question that was put to it could be answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scrubber.adapters.ledger.chain import Walk
from scrubber.adapters.ledger.kept import Comparison, KeptHead, Standing, Witness
from scrubber.ports.record import START, AuditRow, Head, TrailPage

__all__ = ["ChainVerdict", "Examination", "Findings"]


class ChainVerdict(StrEnum):
    """What is to be thought of a trail."""

    INTACT = "intact"
    BROKEN = "broken"
    CANNOT_TELL = "cannot-tell"


@dataclass(frozen=True, slots=True)
class Findings:
    """What an examination found.

    Attributes:
        sentence: what is wrong and where, or that nothing is.
        rows: how many there were; ``first`` and ``last`` are None when there was none.
        pruned, head: the two ends of the trail, as recorded beside it.
        comparisons: one for each head that was kept.
    """

    verdict: ChainVerdict
    sentence: str
    rows: int
    first: AuditRow | None
    last: AuditRow | None
    pruned: Head
    head: Head
    comparisons: Sequence[Comparison]


class Examination:
    """Takes the pages of one reading in order: :meth:`take` for each, then :meth:`found`."""

    def __init__(self, kept: Iterable[KeptHead] = ()) -> None:
        self._witness = Witness(kept)
        self._walk: Walk | None = None
        self._pruned = self._head = START
        self._first: AuditRow | None = None
        self._last: AuditRow | None = None

    def take(self, page: TrailPage) -> None:
        if self._walk is None:
            self._walk = Walk(page.pruned)
            self._pruned, self._head = page.pruned, page.head
        for row in page.rows:
            self._walk.step(row)
            self._witness.step(row)
            self._first, self._last = self._first or row, row

    def found(self, flaw: str = "") -> Findings:
        """What there is to say.

        Args:
            flaw: why the rows stopped coming before the end, if they did.
        """
        report = (self._walk or Walk(START)).report(self._head)
        comparisons = self._witness.compare(self._pruned, self._head)
        against = [each for each in comparisons if each.standing in (Standing.REPLACED, Standing.CUT_OFF)]
        untold = [each for each in comparisons if each.standing is Standing.CANNOT_TELL]
        verdict, sentence = ChainVerdict.INTACT, report.sentence
        if flaw or not report.intact or against:
            verdict = ChainVerdict.BROKEN
            sentence = flaw or (report.sentence if not report.intact else against[0].sentence)
        elif untold:
            verdict, sentence = ChainVerdict.CANNOT_TELL, untold[0].sentence
        return Findings(verdict, sentence, report.rows, self._first, self._last, self._pruned, self._head, comparisons)
