"""Reading a ledger: everything is decoded in full; malformed or inconsistent data is an error, never skipped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from scrubber.adapters.ledger.chain import ChainReport, event_of, verify_chain
from scrubber.adapters.ledger.documents import CERTIFICATE, NODE, PAUSE, RECORD, SCRUB
from scrubber.adapters.ledger.json_codec import CodecError, Document
from scrubber.domain.agent_pause import AgentPauseRecord
from scrubber.domain.evidence import Certificate
from scrubber.domain.node_record import NodeRecord
from scrubber.domain.record import DeviceRecord
from scrubber.ports.record import HAND_OVER_EVENTS, AuditHead, AuditRow, HistoryEntry, HistoryQuery, LedgerState

__all__ = [
    "AUDIT_COLUMNS",
    "MAX_ROWS_PER_BATCH",
    "HistoryBatch",
    "audit_log_bounds",
    "read_certificate",
    "read_history_batch",
    "read_records",
    "read_state",
    "verify_stored_chain",
]

T = TypeVar("T")

MAX_ROWS_PER_BATCH = 2_000
"""Maximum number of audit rows that one :func:`read_history_batch` scans, however few of them are requested."""

AUDIT_COLUMNS = "sequence, at, name, device, scrub, actor, fields, prev_hash, hash"
"""The columns of an :class:`AuditRow`, in order."""


def audit_log_bounds(connection: sqlite3.Connection) -> tuple[AuditHead, AuditHead]:
    """Return the point up to which the audit log was pruned, and its recorded head."""
    row = connection.execute("SELECT pruned_sequence, pruned_hash, head_sequence, head_hash FROM chain").fetchone()
    if row is None:
        raise CodecError("the recorded head of the audit log is missing")
    return AuditHead(row[0], row[1]), AuditHead(row[2], row[3])


def verify_stored_chain(connection: sqlite3.Connection) -> ChainReport:
    """Check the whole audit log."""
    pruned, head = audit_log_bounds(connection)
    # Closed explicitly: a cursor kept alive by the traceback of an exception would also keep SQLite's lock.
    with closing(connection.execute(f"SELECT {AUDIT_COLUMNS} FROM audit ORDER BY sequence")) as rows:
        return verify_chain((AuditRow(*row) for row in rows), pruned, head)


def read_records(connection: sqlite3.Connection) -> Iterator[DeviceRecord]:
    """Yield the current record of every device."""
    for device, version, hygiene, health, document in connection.execute(
        "SELECT device, version, hygiene, health, document FROM devices"
    ).fetchall():
        record = _decode(RECORD, "devices", device, document)
        if (record.device, record.version, record.hygiene, record.health) != (device, version, hygiene, health):
            raise CodecError(f"the columns of device {device} do not agree with its record")
        yield record


def read_state(connection: sqlite3.Connection) -> LedgerState:
    """Return the state needed at startup; the audit log is not checked here."""
    _, head = audit_log_bounds(connection)
    under_way = connection.execute("SELECT id, document FROM scrubs WHERE finished = 0 ORDER BY seen, id").fetchall()
    return LedgerState(
        records={record.device: record for record in read_records(connection)},
        node=_read_node(connection),
        agent_pause=_read_pause(connection),
        unfinished_scrubs=tuple(_decode(SCRUB, "scrubs", name, document) for name, document in under_way),
        head_sequence=head.sequence,
        head_hash=head.hash,
    )


def _read_node(connection: sqlite3.Connection) -> NodeRecord:
    found = connection.execute("SELECT document FROM node").fetchone()
    return NodeRecord() if found is None else _decode(NODE, "node", "1", found[0])


def _read_pause(connection: sqlite3.Connection) -> AgentPauseRecord:
    found = connection.execute("SELECT document FROM agent_pause").fetchone()
    return AgentPauseRecord() if found is None else _decode(PAUSE, "agent_pause", "1", found[0])


@dataclass(frozen=True, slots=True)
class HistoryBatch:
    """The result of scanning a part of the audit log, newest first.

    Attributes:
        below: the next batch scans rows below this sequence; None when nothing is left to scan.
    """

    entries: tuple[HistoryEntry, ...]
    below: int | None


def read_history_batch(connection: sqlite3.Connection, query: HistoryQuery, below: int | None) -> HistoryBatch:
    """Return the newest ``query.limit`` audit rows that match ``query`` with a sequence under ``below`` (None: of all).

    The scan covers a bounded number of rows, so it may find fewer, or none, although there are matches further below.
    Each row comes with the scrub and the certificate that it references, if the ledger still has them.
    """
    reach = _where({"sequence < ?": below, "device = ?": query.device})
    lowest = connection.execute(
        f"SELECT sequence FROM audit {reach.clause} ORDER BY sequence DESC LIMIT 1 OFFSET ?",
        (*reach.values, MAX_ROWS_PER_BATCH - 1),
    ).fetchone()
    floor: int | None = None if lowest is None else lowest[0]
    named = HAND_OVER_EVENTS.get(query.outcome or "")
    conditions = _where(
        {
            "sequence < ?": below,
            "sequence >= ?": floor,
            "device = ?": query.device,
            "at >= ?": query.since,
            "json_extract(fields, '$.tenant') = ?": query.tenant,
            "name = ?": named,
            "json_extract(fields, '$.outcome') = ?": query.outcome if named is None else None,
            _any_of(query.events): query.events or None,
        }
    )
    rows = connection.execute(
        f"SELECT {AUDIT_COLUMNS} FROM audit {conditions.clause} ORDER BY sequence DESC LIMIT ?",
        (*conditions.values, query.limit),
    ).fetchall()
    entries = tuple(_entry(connection, AuditRow(*row)) for row in rows)
    return HistoryBatch(entries, entries[-1].sequence if len(entries) == query.limit else floor)


def read_certificate(connection: sqlite3.Connection, certificate_id: str) -> Certificate | None:
    """Return the certificate with the ID ``certificate_id``, if the ledger still has it."""
    return _read_document(connection, CERTIFICATE, "certificates", certificate_id)


@dataclass(frozen=True, slots=True)
class _Where:
    clause: str
    values: tuple[object, ...]


def _where(parameters: dict[str, str | int | float | tuple[str, ...] | None]) -> _Where:
    """Combine the conditions that have a value; those with several question marks have a tuple of values."""
    given = {condition: value for condition, value in parameters.items() if value is not None}
    values = [value if isinstance(value, tuple) else (value,) for value in given.values()]
    return _Where(f"WHERE {' AND '.join(given)}" if given else "", tuple(each for some in values for each in some))


def _any_of(events: tuple[str, ...]) -> str:
    """Return the condition that an event's name matches one of ``events``, which are also its values."""
    alternatives = (f"substr(name, 1, {len(each)}) = ?" if each.endswith(".") else "name = ?" for each in events)
    return f"({' OR '.join(alternatives)})"


def _entry(connection: sqlite3.Connection, row: AuditRow) -> HistoryEntry:
    event = event_of(row)
    return HistoryEntry(
        sequence=row.sequence,
        hash=row.hash,
        event=event,
        scrub=_read_document(connection, SCRUB, "scrubs", event.scrub),
        certificate=_read_document(connection, CERTIFICATE, "certificates", event.fields.get("certificate")),
    )


def _read_document(connection: sqlite3.Connection, document: Document[T], table: str, name: object) -> T | None:
    if not isinstance(name, str):
        return None
    found = connection.execute(f"SELECT document FROM {table} WHERE id = ?", (name,)).fetchone()
    return None if found is None else _decode(document, table, name, found[0])


def _decode(document: Document[T], table: str, name: str, text: str) -> T:
    try:
        return document.decode(text)
    except CodecError as problem:
        raise CodecError(f"{table} {name}: {problem}") from None
