"""Verification of the service's own audit log while it continues to grow, and publication of its head.

Guarantee: neither the event loop nor a change is blocked for longer than one page takes. An audit log that could not be
read to its end is reported neither as intact nor as broken. A broken audit log is reported and does not block
hand-overs: dealing with the cause is left to people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.ledger.verification import AuditLogVerification, AuditLogVerifier, ChainVerdict
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.ports.record import AuditLog, Event, Journal
from scrubber.ports.runtime import Clock

__all__ = ["log_head", "verify_audit_log", "verify_periodically"]

_PAGE_PAUSE = 0.02
"""Seconds between two pages, for other users of the ledger's thread."""
_HEAD_POLL_INTERVAL = 1.0
"""Seconds between two reads of the audit log's head."""
_HEAD_LOG_INTERVAL = 60.0
"""Minimum seconds between two log lines with the head."""
_RETRY_DELAY = 60.0
"""Seconds after which an audit log that could not be read is verified again."""


async def verify_audit_log(audit_log: AuditLog, clock: Clock) -> AuditLogVerification:
    """Verify all pages and return the result.

    Raises:
        NotReady: Rows were pruned while they were read.
        LedgerFailure: The disk did not return them.
    """
    examination = AuditLogVerifier()
    try:
        async for page in audit_log.pages(0):
            await asyncio.to_thread(examination.add_page, page)
            await clock.sleep(_PAGE_PAUSE)
    except LedgerFailure as failure:
        if isinstance(failure.__cause__, CodecError):  # it was readable, but is not what was written
            return examination.result(str(failure))
        raise
    return examination.result()


async def log_head(ledger: SqliteLedger, clock: Clock, log: structlog.typing.FilteringBoundLogger) -> None:
    """Log the head of the audit log as a copy elsewhere: a truncated or rewritten audit log does not match it."""
    logged, at = "", -_HEAD_LOG_INTERVAL
    while True:
        head, now = ledger.head(), clock.monotonic()
        if str(head) != logged and now - at >= _HEAD_LOG_INTERVAL:
            log.info("audit.head-published", head=str(head))
            logged, at = str(head), now
        await clock.sleep(_HEAD_POLL_INTERVAL)


# See docs/decisions/0034-audit-log-is-verified-by-its-reader.md.
async def verify_periodically(
    audit_log: AuditLog, journal: Journal, clock: Clock, interval: float, *, on_verified: Callable[[bool, float], None]
) -> None:
    """Verify the whole audit log every ``interval`` seconds; the first verification is made when the ledger is loaded.

    Args:
        on_verified: called with whether the audit log is intact, and when its verification began (wall-clock seconds).
    """
    pause = interval
    while True:
        await clock.sleep(pause)
        pause, began = interval, clock.wall()
        try:
            found = await verify_audit_log(audit_log, clock)
        except (NotReady, LedgerFailure) as failure:
            journal.record([Event("audit.unverified", clock.wall(), fields={"message": str(failure)})])
            pause = min(interval, _RETRY_DELAY)
            continue
        intact = found.verdict is ChainVerdict.INTACT
        on_verified(intact, began)
        if not intact:
            journal.record([Event("audit.broken", clock.wall(), fields={"message": found.message})])
