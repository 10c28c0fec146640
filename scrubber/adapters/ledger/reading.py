"""Reading a ledger back: everything is decoded in full, and what does not decode or agree is an error, never skipped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from scrubber.adapters.ledger.chain import ChainReport, check, event_of
from scrubber.adapters.ledger.codec import CERTIFICATE, RECORD, SCRUB
from scrubber.adapters.ledger.shapes import Document, Undecodable
from scrubber.domain.evidence import Certificate
from scrubber.domain.record import DeviceRecord
from scrubber.ports.record import HAND_OVERS, AuditRow, Head, HistoryEntry, HistoryQuery, LedgerState

__all__ = ["ROW", "ROWS_AT_A_VISIT", "Visit", "certificate", "chain_report", "ends", "records", "state", "visit"]

T = TypeVar("T")

ROWS_AT_A_VISIT = 2_000
"""How many audit rows one :func:`visit` looks at, however few of them are asked for."""

ROW = "sequence, at, name, device, scrub, actor, fields, prev_hash, hash"
"""The columns of an :class:`AuditRow`, in order."""


def ends(connection: sqlite3.Connection) -> tuple[Head, Head]:
    """Where the audit trail was pruned, and its recorded head."""
    row = connection.execute("SELECT pruned_sequence, pruned_hash, head_sequence, head_hash FROM chain").fetchone()
    if row is None:
        raise Undecodable("the recorded head of the audit trail is gone")
    return Head(row[0], row[1]), Head(row[2], row[3])


def chain_report(connection: sqlite3.Connection) -> ChainReport:
    """Walk the whole audit trail."""
    pruned, head = ends(connection)
    # Closed by hand: a cursor that an exception's traceback keeps alive would keep SQLite's lock, too.
    with closing(connection.execute(f"SELECT {ROW} FROM audit ORDER BY sequence")) as rows:
        return check((AuditRow(*row) for row in rows), pruned, head)


def records(connection: sqlite3.Connection) -> Iterator[DeviceRecord]:
    """The current record of every device."""
    for device, version, hygiene, health, document in connection.execute(
        "SELECT device, version, hygiene, health, document FROM devices"
    ).fetchall():
        record = _decoded(RECORD, "devices", device, document)
        if (record.device, record.version, record.hygiene, record.health) != (device, version, hygiene, health):
            raise Undecodable(f"the columns of device {device} do not agree with its record")
        yield record


def state(connection: sqlite3.Connection) -> LedgerState:
    """What a start finds; the audit trail is not walked here."""
    _, head = ends(connection)
    under_way = connection.execute("SELECT id, document FROM scrubs WHERE finished = 0 ORDER BY seen, id").fetchall()
    return LedgerState(
        records={record.device: record for record in records(connection)},
        unfinished=tuple(_decoded(SCRUB, "scrubs", name, document) for name, document in under_way),
        head_sequence=head.sequence,
        head_hash=head.hash,
    )


@dataclass(frozen=True, slots=True)
class Visit:
    """What one look at a part of the trail found, newest first.

    Attributes:
        below: the next visit looks at what lies below this sequence; None when nothing is left to look at.
    """

    entries: tuple[HistoryEntry, ...]
    below: int | None


def visit(connection: sqlite3.Connection, query: HistoryQuery, below: int | None) -> Visit:
    """The newest ``query.limit`` audit rows that ``query`` asks for with a sequence under ``below`` (None: of all).

    It looks at a bounded number of rows, so it may find fewer, or none, and there may still be some below. Each comes
    with the scrub and the certificate that it names, as far as the ledger still has them.
    """
    reach = _where({"sequence < ?": below, "device = ?": query.device})
    lowest = connection.execute(
        f"SELECT sequence FROM audit {reach.clause} ORDER BY sequence DESC LIMIT 1 OFFSET ?",
        (*reach.values, ROWS_AT_A_VISIT - 1),
    ).fetchone()
    floor: int | None = None if lowest is None else lowest[0]
    named = HAND_OVERS.get(query.outcome or "")
    wanted = _where(
        {
            "sequence < ?": below,
            "sequence >= ?": floor,
            "device = ?": query.device,
            "at >= ?": query.since,
            "json_extract(fields, '$.tenant_namespace') = ?": query.tenant,
            "name = ?": named,
            "json_extract(fields, '$.outcome') = ?": query.outcome if named is None else None,
            _any_of(query.events): query.events or None,
        }
    )
    rows = connection.execute(
        f"SELECT {ROW} FROM audit {wanted.clause} ORDER BY sequence DESC LIMIT ?", (*wanted.values, query.limit)
    ).fetchall()
    entries = tuple(_entry(connection, AuditRow(*row)) for row in rows)
    return Visit(entries, entries[-1].sequence if len(entries) == query.limit else floor)


def certificate(connection: sqlite3.Connection, name: str) -> Certificate | None:
    """The certificate that is called ``name``, as far as the ledger still has it."""
    return _stored(connection, CERTIFICATE, "certificates", name)


@dataclass(frozen=True, slots=True)
class _Where:
    clause: str
    values: tuple[object, ...]


def _where(asked: dict[str, str | int | float | tuple[str, ...] | None]) -> _Where:
    """The conditions that have a value; those with several question marks have a tuple of values."""
    given = {condition: value for condition, value in asked.items() if value is not None}
    values = [value if isinstance(value, tuple) else (value,) for value in given.values()]
    return _Where(f"WHERE {' AND '.join(given)}" if given else "", tuple(each for some in values for each in some))


def _any_of(events: tuple[str, ...]) -> str:
    """The condition that an event is called as one of ``events`` says; its values are those."""
    asked = (f"substr(name, 1, {len(each)}) = ?" if each.endswith(".") else "name = ?" for each in events)
    return f"({' OR '.join(asked)})"


def _entry(connection: sqlite3.Connection, row: AuditRow) -> HistoryEntry:
    event = event_of(row)
    return HistoryEntry(
        sequence=row.sequence,
        hash=row.hash,
        event=event,
        scrub=_stored(connection, SCRUB, "scrubs", event.scrub),
        certificate=_stored(connection, CERTIFICATE, "certificates", event.fields.get("certificate")),
    )


def _stored(connection: sqlite3.Connection, document: Document[T], table: str, name: object) -> T | None:
    if not isinstance(name, str):
        return None
    found = connection.execute(f"SELECT document FROM {table} WHERE id = ?", (name,)).fetchone()
    return None if found is None else _decoded(document, table, name, found[0])


def _decoded(document: Document[T], table: str, name: str, text: str) -> T:
    try:
        return document.decode(text)
    except Undecodable as problem:
        raise Undecodable(f"{table} {name}: {problem}") from None
