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

from scrubber.adapters.ledger.documents import decode_fields, encode_fields
from scrubber.adapters.ledger.json_codec import NUMBER, Json, canonical_json
from scrubber.ports.record import AuditHead, AuditRow, Event

__all__ = ["ChainReport", "ChainVerifier", "chain_events", "compute_hash", "event_of", "verify_chain"]


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What a look at a whole trail found.

    Attributes:
        message: what is wrong and where, or that nothing is.
        rows: how many rows were looked at.
        pruned: the last row that was given up to keep the trail bounded; the first row present follows it.
        head: the last row as recorded beside the trail. Compare it with a copy kept elsewhere.
    """

    intact: bool
    message: str
    rows: int
    pruned: AuditHead
    head: AuditHead


def compute_hash(row: AuditRow) -> str:
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
    return hashlib.sha256((row.prev_hash + canonical_json(hashed)).encode("ascii")).hexdigest()


def event_of(row: AuditRow) -> Event:
    """The event that ``row`` remembers; raises ``CodecError`` when its fields make no sense."""
    return Event(row.name, row.at, row.device, row.scrub, row.actor, decode_fields(row.fields))


def chain_events(head: AuditHead, events: Iterable[Event]) -> tuple[AuditRow, ...]:
    """The rows of ``events``, chained to ``head``; raises ``CodecError`` when one cannot be stored."""
    rows: list[AuditRow] = []
    for event in events:
        # SQLite stores -0.0 as 0.0: adding 0.0 makes both the same before the hash is taken.
        at = NUMBER.decode(event.at) + 0.0
        fields = encode_fields(event.fields)
        row = AuditRow(
            head.sequence + 1, at, event.name, event.device, event.scrub, event.actor, fields, head.hash, hash=""
        )
        row = replace(row, hash=compute_hash(row))
        rows.append(row)
        head = row.head
    return tuple(rows)


class ChainVerifier:
    """A trail, checked row by row in the order in which it is read: :meth:`add_row` for each, then :meth:`report`.

    Args:
        pruned: what the first row has to follow.
    """

    def __init__(self, pruned: AuditHead) -> None:
        self._pruned = self._position = pruned
        self._rows = 0
        self._flaw = ""

    def add_row(self, row: AuditRow) -> None:
        """Go on to ``row``. After the first flaw rows are only counted."""
        self._rows += 1
        self._flaw = self._flaw or _flaw(self._position, row)
        self._position = row.head

    def report(self, head: AuditHead) -> ChainReport:
        """What was found, given that the trail has to end at ``head``."""
        at, flaw = self._position, self._flaw
        if not flaw and at.sequence < head.sequence:
            flaw = f"The audit trail ends at row {at.sequence}, but {head.sequence} rows were written: its end was cut off."
        if not flaw and at != head:
            flaw = f"The audit trail ends at row {at.sequence}, which is not the recorded head (row {head.sequence})."
        verdict = flaw or f"The audit trail is intact: {self._rows} rows."
        return ChainReport(not flaw, verdict, self._rows, self._pruned, head)


def verify_chain(rows: Iterable[AuditRow], pruned: AuditHead, head: AuditHead) -> ChainReport:
    """Walk a trail from where it was pruned to its recorded head; ``rows`` come in order of their sequence."""
    walk = ChainVerifier(pruned)
    for row in rows:
        walk.add_row(row)
    return walk.report(head)


def _flaw(before: AuditHead, row: AuditRow) -> str:
    expected = before.sequence + 1
    if row.sequence > expected:
        return f"Audit row {expected} is missing."
    if row.sequence < expected:
        return f"Audit row {row.sequence} stands where row {expected} belongs."
    if row.prev_hash != before.hash:
        return f"Audit row {row.sequence} does not follow the row before it: one of them was replaced."
    if row.hash != compute_hash(row):
        return f"Audit row {row.sequence} was changed after it was written."
    return ""
