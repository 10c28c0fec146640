"""Reading the audit log from one end to the other, in bounded pages read separately; nothing stays open in between.

Guarantee: the pages of one reading contain everything between its two ends, or the reading raises an error.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.queries import AUDIT_COLUMNS, audit_log_bounds
from scrubber.domain.errors import InvalidRequest, NotReady
from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow

__all__ = ["ROWS_PER_PAGE", "check_before", "first_page", "next_page", "past_end_error", "pruned_error"]

ROWS_PER_PAGE = 500

_BYTES_PER_PAGE = 1024 * 1024
"""Approximate size of the text in a page. A page of longer rows has fewer of them, so that it fits into a message."""


def first_page(connection: sqlite3.Connection, after: int) -> AuditLogPage:
    """Return the first page of the current audit log, without the rows up to sequence ``after``.

    Raises:
        InvalidRequest: The audit log ends before row ``after``.
    """
    pruned, head = audit_log_bounds(connection)
    if after > head.sequence:
        raise past_end_error(after, head)
    start = pruned
    if after > pruned.sequence:
        found = connection.execute("SELECT hash FROM audit WHERE sequence = ?", (after,)).fetchone()
        if found is None:
            raise CodecError(f"audit row {after} is missing")
        start = AuditHead(after, found[0])
    return AuditLogPage(start, head, _rows(connection, start.sequence, head))


def next_page(connection: sqlite3.Connection, page: AuditLogPage) -> AuditLogPage | None:
    """Return the page after ``page``; None when that was the last one.

    Raises:
        NotReady: The rows that follow were pruned.
    """
    if not page.rows or page.rows[-1].sequence >= page.head.sequence:
        return None
    last = page.rows[-1].sequence
    pruned, _ = audit_log_bounds(connection)
    if pruned.sequence > last:
        raise pruned_error(last, pruned)
    rows = _rows(connection, last, page.head)
    return AuditLogPage(page.preceding_head, page.head, rows) if rows else None


def check_before(before: int | None, head: AuditHead) -> None:
    """Check that a query may start below row ``before``, which may be at most the row that follows ``head``.

    Raises:
        InvalidRequest: It lies beyond that.
    """
    if before is not None and before > head.sequence + 1:
        raise InvalidRequest(f"The audit log ends at row {head.sequence}: there is no row {before} to start before.")


def past_end_error(after: int, head: AuditHead) -> InvalidRequest:
    """Return the error for a audit log without rows after row ``after``."""
    return InvalidRequest(f"The audit log ends at row {head.sequence}: there is no row {after} to continue after.")


def pruned_error(last: int, pruned: AuditHead) -> NotReady:
    """Return the error for a reading that has reached row ``last`` and cannot continue."""
    return NotReady(
        f"Audit rows {last + 1} to {pruned.sequence} were pruned while the audit log was being read; retry."
    )


def _rows(connection: sqlite3.Connection, above: int, head: AuditHead) -> tuple[AuditRow, ...]:
    rows: list[AuditRow] = []
    size = 0
    # Closed explicitly: a cursor that is only partly read would keep SQLite's lock, and no change could be stored.
    with closing(
        connection.execute(
            f"SELECT {AUDIT_COLUMNS} FROM audit WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
            (above, head.sequence, ROWS_PER_PAGE),
        )
    ) as found:
        for each in found:
            rows.append(AuditRow(*each))
            size += sum(len(value) for value in each if isinstance(value, str))
            if size >= _BYTES_PER_PAGE:
                break
    return tuple(rows)
