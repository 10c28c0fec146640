"""The audit chain: each row carries the hash of the previous row, so that history cannot be rewritten unnoticed.

The chain is tamper-evident, not tamper-proof: a process with write access to the file can compute a new chain from any
row on, and only a copy of the head stored elsewhere reveals it. The file alone reveals an edited row, a deleted one, a
swapped pair, and a tail truncated before the recorded head.

``hash`` is SHA-256, in hexadecimal, over the ASCII bytes of the previous row's hash (empty for the first row) followed
by the row as canonical JSON without its two hashes; ``fields`` is included as text, so that not even whitespace can
change.
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
    """The result of checking a whole audit log.

    Attributes:
        message: what is wrong and where, or that nothing is.
        rows: number of rows checked.
        pruned: the last row pruned to keep the audit log bounded; the first row present follows it.
        head: the last row as recorded next to the audit log. Compare it with a copy stored elsewhere.
    """

    intact: bool
    message: str
    rows: int
    pruned: AuditHead
    head: AuditHead


def compute_hash(row: AuditRow) -> str:
    """Return the correct hash of ``row``, computed from all its other columns."""
    hashed: dict[str, Json] = {
        "actor": row.actor,
        "timestamp": row.at,
        "deviceID": row.device,
        "fields": row.fields,
        "event": row.name,
        "scrubID": row.scrub,
        "sequence": row.sequence,
    }
    return hashlib.sha256((row.prev_hash + canonical_json(hashed)).encode("ascii")).hexdigest()


def event_of(row: AuditRow) -> Event:
    """Return the event stored in ``row``; raises ``CodecError`` when its fields are malformed."""
    return Event(row.name, row.at, row.device, row.scrub, row.actor, decode_fields(row.fields))


def chain_events(head: AuditHead, events: Iterable[Event]) -> tuple[AuditRow, ...]:
    """Return the rows of ``events``, chained to ``head``; raises ``CodecError`` when one cannot be stored."""
    rows: list[AuditRow] = []
    for event in events:
        # SQLite stores -0.0 as 0.0: adding 0.0 makes them equal before the hash is computed.
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
    """Checks an audit log row by row in the order in which it is read: :meth:`add_row` for each, then :meth:`report`.

    Args:
        pruned: the head that the first row must follow.
    """

    def __init__(self, pruned: AuditHead) -> None:
        self._pruned = self._position = pruned
        self._rows = 0
        self._flaw = ""

    def add_row(self, row: AuditRow) -> None:
        """Check the next row. After the first flaw rows are only counted."""
        self._rows += 1
        self._flaw = self._flaw or _flaw(self._position, row)
        self._position = row.head

    def report(self, head: AuditHead) -> ChainReport:
        """Return the result, given that the audit log must end at ``head``."""
        at, flaw = self._position, self._flaw
        if not flaw and at.sequence < head.sequence:
            flaw = (
                f"The audit log ends at row {at.sequence}, but {head.sequence} rows were written: its end "
                "was truncated."
            )
        if not flaw and at != head:
            flaw = f"The audit log ends at row {at.sequence}, which is not the recorded head (row {head.sequence})."
        verdict = flaw or f"The audit log is intact: {self._rows} rows."
        return ChainReport(not flaw, verdict, self._rows, self._pruned, head)


def verify_chain(rows: Iterable[AuditRow], pruned: AuditHead, head: AuditHead) -> ChainReport:
    """Check an audit log from where it was pruned to its recorded head; ``rows`` are in order of their sequence."""
    walk = ChainVerifier(pruned)
    for row in rows:
        walk.add_row(row)
    return walk.report(head)


def _flaw(before: AuditHead, row: AuditRow) -> str:
    expected = before.sequence + 1
    if row.sequence > expected:
        return f"Audit row {expected} is missing."
    if row.sequence < expected:
        return f"Audit row {row.sequence} is where row {expected} is expected."
    if row.prev_hash != before.hash:
        return f"Audit row {row.sequence} does not continue the row before it: one of them was replaced."
    try:
        computed = compute_hash(row)
    except ValueError:  # an infinite time, or a hash that is not ASCII: nothing that could be hashed
        computed = ""
    if row.hash != computed or not computed:
        return f"Audit row {row.sequence} was changed after it was written."
    return ""
