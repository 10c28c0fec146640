"""One change, one transaction: records, grants, certificates, scrubs and audit rows are stored together or not at all.

Every function here runs on the ledger's thread, raises ``sqlite3.Error``, ``CodecError`` or ``LedgerFailure``, and
leaves no transaction open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from scrubber.adapters.ledger.chain import chain_events
from scrubber.adapters.ledger.documents import CERTIFICATE, GRANT, NODE, PAUSE, RECORD, SCRUB
from scrubber.adapters.ledger.failures import contradiction_message
from scrubber.adapters.ledger.queries import audit_log_bounds, read_records
from scrubber.adapters.ledger.retention import ReferencedRows, Retention
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import Certificate
from scrubber.domain.record import DeviceRecord
from scrubber.ports.record import AuditHead, Event, LedgerChange

__all__ = ["store_change"]


def store_change(connection: sqlite3.Connection, change: LedgerChange, retention: Retention) -> AuditHead:
    """Store ``change`` durably and prune rows beyond ``retention`` in the same transaction; return the new head."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        pruned, head = audit_log_bounds(connection)
        head = _add_events(connection, head, change.events)
        _put_records(connection, change.records)
        for scrub in change.scrubs:
            connection.execute(
                "INSERT INTO scrubs VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " device = excluded.device, finished = excluded.finished, seen = excluded.seen,"
                " document = excluded.document",
                (scrub.id, scrub.device, int(scrub.ended is not None), head.sequence, SCRUB.encode(scrub)),
            )
        for certificate in change.certificates:
            _put_certificate(connection, certificate, head)
        connection.executemany(
            "INSERT INTO grants VALUES (?, ?, ?, ?)",
            [(device, grant.sequence, head.sequence, GRANT.encode(grant)) for device, grant in change.grants],
        )
        if change.node is not None:
            connection.execute(
                "INSERT INTO node VALUES (1, ?) ON CONFLICT (only) DO UPDATE SET document = excluded.document",
                (NODE.encode(change.node),),
            )
        if change.agent_pause is not None:
            connection.execute(
                "INSERT INTO agent_pause VALUES (1, ?) ON CONFLICT (only) DO UPDATE SET document = excluded.document",
                (PAUSE.encode(change.agent_pause),),
            )
        cut = retention.cutoff(pruned.sequence, head.sequence, _live_bytes(connection))
        if cut is not None:
            _prune(connection, cut)
        connection.execute("COMMIT")
    except BaseException:
        # SQLite ends some failed transactions automatically.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return head


def _add_events(connection: sqlite3.Connection, head: AuditHead, events: Iterable[Event]) -> AuditHead:
    for row in chain_events(head, events):
        connection.execute(
            "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.sequence,
                row.at,
                row.name,
                row.device,
                row.scrub,
                row.actor,
                row.fields,
                row.prev_hash,
                row.hash,
            ),
        )
        head = row.head
    return head


def _put_records(connection: sqlite3.Connection, changed: Iterable[DeviceRecord]) -> None:
    for record in changed:
        found = connection.execute("SELECT version FROM devices WHERE device = ?", (record.device,)).fetchone()
        stored = 0 if found is None else found[0]
        if record.version != stored + 1:
            raise LedgerFailure(
                contradiction_message(
                    f"would set device {record.device} to version {record.version}, but the ledger has {stored}"
                )
            )
        connection.execute(
            "INSERT INTO devices VALUES (?, ?, ?, ?, ?) ON CONFLICT (device) DO UPDATE SET"
            " version = excluded.version, hygiene = excluded.hygiene, health = excluded.health,"
            " document = excluded.document",
            (record.device, record.version, record.hygiene.value, record.health.value, RECORD.encode(record)),
        )


def _put_certificate(connection: sqlite3.Connection, certificate: Certificate, head: AuditHead) -> None:
    """Store a certificate; the storage also enforces single use: a used certificate is never rewritten differently."""
    stored = connection.execute(
        "INSERT INTO certificates VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
        " device = excluded.device, next_grant = excluded.next_grant, seen = excluded.seen,"
        " document = excluded.document"
        " WHERE certificates.next_grant IS NULL OR certificates.document = excluded.document",
        (certificate.id, certificate.device, certificate.next_grant, head.sequence, CERTIFICATE.encode(certificate)),
    )
    if stored.rowcount != 1:
        raise LedgerFailure(contradiction_message(f"would change certificate {certificate.id}, which was already used"))


def _live_bytes(connection: sqlite3.Connection) -> int:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    return int((pages - free) * size)


def _prune(connection: sqlite3.Connection, cut: int) -> None:
    # The head of the pruned part is recorded first: the triggers permit deletion only up to that point.
    connection.execute(
        "UPDATE chain SET pruned_sequence = ?, pruned_hash = (SELECT hash FROM audit WHERE sequence = ?)", (cut, cut)
    )
    connection.execute("DELETE FROM audit WHERE sequence <= ?", (cut,))
    connection.execute("DELETE FROM scrubs WHERE seen <= ? AND finished = 1", (cut,))
    named = ReferencedRows.from_records(read_records(connection))
    old_certificates = connection.execute("SELECT id FROM certificates WHERE seen <= ?", (cut,)).fetchall()
    connection.executemany(
        "DELETE FROM certificates WHERE id = ?", [row for row in old_certificates if row[0] not in named.certificates]
    )
    old_grants = connection.execute("SELECT device, sequence FROM grants WHERE seen <= ?", (cut,)).fetchall()
    connection.executemany(
        "DELETE FROM grants WHERE device = ? AND sequence = ?", [row for row in old_grants if row not in named.grants]
    )
