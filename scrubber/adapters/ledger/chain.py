"""The audit chain: each row carries the hash of the row before it, so that history cannot be rewritten unnoticed.

Tamper-evident, not tamper-proof: whoever can write the file can compute a new chain from any row on, and only a copy
of the head kept elsewhere shows it. What is noticed by the file alone: an edited row, a deleted one, a swapped pair,
and a tail that was cut behind the recorded head.

``hash`` is SHA-256, in hexadecimal, over the ASCII bytes of the previous row's hash (empty for the first row) followed
by the row as canonical JSON without its two hashes; ``fields`` is in it as text, so that not even a blank can change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scrubber.adapters.ledger.codec import decode_fields, encode_fields
from scrubber.adapters.ledger.shapes import NUMBER, Json, canonical
from scrubber.ports.journal import Event

__all__ = ["START", "AuditRow", "ChainReport", "Head", "append", "check"]


@dataclass(frozen=True, slots=True)
class Head:
    """A place in the chain: the sequence of a row and its hash; 0 and empty before the first row."""

    sequence: int = 0
    hash: str = ""


START = Head()


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row of the trail. ``at`` is in wall-clock seconds; ``fields`` is canonical JSON."""

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

    @property
    def event(self) -> Event:
        """The event that this row remembers; raises ``Undecodable`` when its fields make no sense."""
        return Event(self.name, self.at, self.device, self.scrub, self.actor, decode_fields(self.fields))

    def computed_hash(self) -> str:
        """What :attr:`hash` has to be, given everything else in the row."""
        row: dict[str, Json] = {
            "actor": self.actor,
            "at": self.at,
            "device": self.device,
            "fields": self.fields,
            "name": self.name,
            "scrub": self.scrub,
            "sequence": self.sequence,
        }
        return hashlib.sha256((self.prev_hash + canonical(row)).encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What a look at a whole trail found.

    Attributes:
        sentence: what is wrong and where, or that nothing is.
        rows: how many rows were looked at.
        pruned: the last row that was given up to keep the trail bounded; the first row present follows it.
        head: the last row as recorded beside the trail. Compare it with a copy kept elsewhere.
    """

    intact: bool
    sentence: str
    rows: int
    pruned: Head
    head: Head


def append(head: Head, events: Iterable[Event]) -> tuple[AuditRow, ...]:
    """The rows of ``events``, chained to ``head``; raises ``Undecodable`` when one cannot be stored."""
    rows: list[AuditRow] = []
    for event in events:
        # SQLite stores -0.0 as 0.0: adding 0.0 makes both the same before the hash is taken.
        at = NUMBER.read(event.at) + 0.0
        fields = encode_fields(event.fields)
        row = AuditRow(
            head.sequence + 1, at, event.name, event.device, event.scrub, event.actor, fields, head.hash, hash=""
        )
        row = replace(row, hash=row.computed_hash())
        rows.append(row)
        head = row.head
    return tuple(rows)


def check(rows: Iterable[AuditRow], pruned: Head, head: Head) -> ChainReport:
    """Walk a trail from where it was pruned to its recorded head; ``rows`` come in order of their sequence."""
    at, seen, flaw = pruned, 0, ""
    for row in rows:
        seen += 1
        flaw = flaw or _flaw(at, row)
        at = row.head
    if not flaw and at.sequence < head.sequence:
        flaw = f"The audit trail ends at row {at.sequence}, but {head.sequence} rows were written: its end was cut off."
    if not flaw and at != head:
        flaw = f"The audit trail ends at row {at.sequence}, which is not the recorded head (row {head.sequence})."
    return ChainReport(not flaw, flaw or f"The audit trail is intact: {seen} rows.", seen, pruned, head)


def _flaw(before: Head, row: AuditRow) -> str:
    expected = before.sequence + 1
    if row.sequence > expected:
        return f"Audit row {expected} is missing."
    if row.sequence < expected:
        return f"Audit row {row.sequence} stands where row {expected} belongs."
    if row.prev_hash != before.hash:
        return f"Audit row {row.sequence} does not follow the row before it: one of them was replaced."
    if row.hash != row.computed_hash():
        return f"Audit row {row.sequence} was changed after it was written."
    return ""
