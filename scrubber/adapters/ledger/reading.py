"""Reading a ledger back: everything is decoded in full, and what does not decode or agree is an error, never skipped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import TypeVar

from scrubber.adapters.ledger.chain import AuditRow, ChainReport, Head, check
from scrubber.adapters.ledger.codec import CERTIFICATE, RECORD, SCRUB
from scrubber.adapters.ledger.shapes import Document, Undecodable
from scrubber.domain.record import DeviceRecord
from scrubber.ports.ledger import HistoryEntry, HistoryQuery, LedgerState

__all__ = ["chain_report", "ends", "page", "records", "state"]

T = TypeVar("T")

_ROW = "sequence, at, name, device, scrub, actor, fields, prev_hash, hash"


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
    with closing(connection.execute(f"SELECT {_ROW} FROM audit ORDER BY sequence")) as rows:
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


def page(connection: sqlite3.Connection, query: HistoryQuery, below: int | None) -> tuple[HistoryEntry, ...]:
    """The newest ``query.limit`` audit rows with a sequence under ``below`` (None: the newest of all), newest first.

    Each comes with the scrub and the certificate that it names, as far as the ledger still has them.
    """
    asked = {"sequence < ?": below, "device = ?": query.device, "at >= ?": query.since}
    given = {condition: value for condition, value in asked.items() if value is not None}
    where = f"WHERE {' AND '.join(given)}" if given else ""
    rows = connection.execute(
        f"SELECT {_ROW} FROM audit {where} ORDER BY sequence DESC LIMIT ?", (*given.values(), query.limit)
    ).fetchall()
    return tuple(_entry(connection, AuditRow(*row)) for row in rows)


def _entry(connection: sqlite3.Connection, row: AuditRow) -> HistoryEntry:
    event = row.event
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
