"""The extent of the check: everything in under ten minutes, or a quick check in under four."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from scrubber.domain.diagnostics import DiagnosticLevel

__all__ = ["FULL", "QUICK", "Extent"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Extent:
    """The numbers are sample counts, unless stated otherwise.

    Attributes:
        limit_bytes: the size of the buffer whose reading and writing is the reference.
        limit_repeats: runs per launch shape, of which the median counts.
        part_seconds: maximum time of one part.
        all_seconds: maximum time of all parts together.
    """

    quick: bool
    attacks: int
    scrubs: int
    questions: int
    starts: int
    limit_bytes: int
    limit_repeats: int
    diagnostics: tuple[DiagnosticLevel, ...]
    part_seconds: float
    all_seconds: float

    def for_stand_ins(self) -> Self:
        """Return this extent with the limits of a dry run, whose stand-ins compute on a CPU that other tests use too."""
        return replace(self, part_seconds=500.0, all_seconds=550.0)


FULL = Extent(
    quick=False,
    attacks=2,
    scrubs=5,
    questions=300,
    starts=5,
    limit_bytes=16 * _GIB,
    limit_repeats=7,
    diagnostics=(DiagnosticLevel.QUICK, DiagnosticLevel.STANDARD),
    part_seconds=180.0,
    all_seconds=570.0,
)
QUICK = Extent(
    quick=True,
    attacks=1,
    scrubs=2,
    questions=50,
    starts=2,
    limit_bytes=4 * _GIB,
    limit_repeats=3,
    diagnostics=(DiagnosticLevel.QUICK,),
    part_seconds=60.0,
    all_seconds=240.0,
)
