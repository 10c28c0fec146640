"""The service's own look at its whole trail, while it goes on writing it, and the head that others keep.

The promise: it holds up neither the event loop nor a change for longer than one page takes; a trail that could not be
read to its end is called neither intact nor broken; and one that is found to be broken is told of and stops no hand-over:
whoever broke it is met by people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.ledger.verification import ChainVerdict, TrailVerification, TrailVerifier
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.ports.record import AuditTrail, Event, Journal
from scrubber.ports.runtime import Clock

__all__ = ["log_head", "verify_periodically", "verify_trail"]

_PAGE_PAUSE = 0.02
"""Seconds between two pages, for whoever else wants the ledger's thread."""
_HEAD_POLL_INTERVAL = 1.0
"""Seconds between two looks at the audit's head."""
_HEAD_LOG_INTERVAL = 60.0
"""Seconds between two log lines with it, at least."""
_RETRY_DELAY = 60.0
"""Seconds after which a trail that could not be read is looked through again."""


async def verify_trail(trail: AuditTrail, clock: Clock) -> TrailVerification:
    """What an examination of all pages finds.

    Raises:
        NotReady: rows were given up while they were read.
        LedgerFailure: the disk did not give them.
    """
    examination = TrailVerifier()
    try:
        async for page in trail.pages(0):
            await asyncio.to_thread(examination.add_page, page)
            await clock.sleep(_PAGE_PAUSE)
    except LedgerFailure as failure:
        if isinstance(failure.__cause__, CodecError):  # it was read, and is not what was written
            return examination.result(str(failure))
        raise
    return examination.result()


async def log_head(ledger: SqliteLedger, clock: Clock, log: structlog.typing.FilteringBoundLogger) -> None:
    """Have the audit's head kept by others: a trail that was cut or written anew agrees with itself, and not with them."""
    told, at = "", -_HEAD_LOG_INTERVAL
    while True:
        head, now = ledger.head(), clock.monotonic()
        if str(head) != told and now - at >= _HEAD_LOG_INTERVAL:
            log.info("audit.head", head=str(head))
            told, at = str(head), now
        await clock.sleep(_HEAD_POLL_INTERVAL)


async def verify_periodically(
    trail: AuditTrail, journal: Journal, clock: Clock, interval: float, *, on_verified: Callable[[bool, float], None]
) -> None:
    """Look through the whole trail each ``interval`` seconds; the first time was when the ledger was loaded.

    Args:
        on_verified: is told whether the trail is intact, and when the look at it began (wall-clock seconds).
    """
    pause = interval
    while True:
        await clock.sleep(pause)
        pause, began = interval, clock.wall()
        try:
            found = await verify_trail(trail, clock)
        except (NotReady, LedgerFailure) as failure:
            journal.record([Event("audit.unread", clock.wall(), fields={"sentence": str(failure)})])
            pause = min(interval, _RETRY_DELAY)
            continue
        intact = found.verdict is ChainVerdict.INTACT
        on_verified(intact, began)
        if not intact:
            journal.record([Event("audit.broken", clock.wall(), fields={"sentence": found.message})])
