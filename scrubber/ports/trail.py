"""The audit trail as values: its rows, its places, and how it is read from one end to the other.

What is in here is exactly what is stored and hashed; the rule of the hash is the ledger's (``adapters/ledger/chain.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["START", "AuditRow", "Head", "TrailPage"]


@dataclass(frozen=True, slots=True)
class Head:
    """A place in the chain: the sequence of a row and its hash; 0 and empty before the first row."""

    sequence: int = 0
    hash: str = ""

    def __str__(self) -> str:
        """As people keep it, and ``scrubber audit verify --head`` takes it."""
        return f"{self.sequence}:{self.hash}"


START = Head()


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row of the trail. ``at`` is in wall-clock seconds; ``fields`` is canonical JSON, as text."""

    sequence: int
    at: float
    name: str
    device: str | None
    scrub: str | None
    actor: str
    fields: str
    prev_hash: str
    hash: str

    @property
    def head(self) -> Head:
        return Head(self.sequence, self.hash)


@dataclass(frozen=True, slots=True)
class TrailPage:
    """A part of the trail; every page of one reading has the same two ends.

    Attributes:
        pruned: what the first row of the first page follows: the last row that was given up to keep the trail bounded,
            or the last one that the reader did not want.
        head: the last row as recorded when the reading began.
        rows: oldest first; together with those of the other pages, everything between the two ends.
    """

    pruned: Head
    head: Head
    rows: tuple[AuditRow, ...] = ()
