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
from scrubber.ports.record import AuditRow, Event, Head

__all__ = ["ChainReport", "Walk", "append", "check", "computed_hash", "event_of"]


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


def computed_hash(row: AuditRow) -> str:
    """What the hash of ``row`` has to be, given everything else in it."""
    hashed: dict[str, Json] = {
        "actor": row.actor,
        "at": row.at,
        "device": row.device,
        "fields": row.fields,
        "name": row.name,
        "scrub": row.scrub,
        "sequence": row.sequence,
    }
    return hashlib.sha256((row.prev_hash + canonical(hashed)).encode("ascii")).hexdigest()


def event_of(row: AuditRow) -> Event:
    """The event that ``row`` remembers; raises ``Undecodable`` when its fields make no sense."""
    return Event(row.name, row.at, row.device, row.scrub, row.actor, decode_fields(row.fields))


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
        row = replace(row, hash=computed_hash(row))
        rows.append(row)
        head = row.head
    return tuple(rows)


class Walk:
    """A trail, checked row by row in the order in which it is read: :meth:`step` for each, then :meth:`report`.

    Args:
        pruned: what the first row has to follow.
    """

    def __init__(self, pruned: Head) -> None:
        self._pruned = self._at = pruned
        self._rows = 0
        self._flaw = ""

    def step(self, row: AuditRow) -> None:
        """Go on to ``row``. After the first flaw rows are only counted."""
        self._rows += 1
        self._flaw = self._flaw or _flaw(self._at, row)
        self._at = row.head

    def report(self, head: Head) -> ChainReport:
        """What was found, given that the trail has to end at ``head``."""
        at, flaw = self._at, self._flaw
        if not flaw and at.sequence < head.sequence:
            flaw = f"The audit trail ends at row {at.sequence}, but {head.sequence} rows were written: its end was cut off."
        if not flaw and at != head:
            flaw = f"The audit trail ends at row {at.sequence}, which is not the recorded head (row {head.sequence})."
        verdict = flaw or f"The audit trail is intact: {self._rows} rows."
        return ChainReport(not flaw, verdict, self._rows, self._pruned, head)


def check(rows: Iterable[AuditRow], pruned: Head, head: Head) -> ChainReport:
    """Walk a trail from where it was pruned to its recorded head; ``rows`` come in order of their sequence."""
    walk = Walk(pruned)
    for row in rows:
        walk.step(row)
    return walk.report(head)


def _flaw(before: Head, row: AuditRow) -> str:
    expected = before.sequence + 1
    if row.sequence > expected:
        return f"Audit row {expected} is missing."
    if row.sequence < expected:
        return f"Audit row {row.sequence} stands where row {expected} belongs."
    if row.prev_hash != before.hash:
        return f"Audit row {row.sequence} does not follow the row before it: one of them was replaced."
    if row.hash != computed_hash(row):
        return f"Audit row {row.sequence} was changed after it was written."
    return ""
