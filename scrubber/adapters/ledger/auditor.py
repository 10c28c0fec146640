"""The service's own look at its whole trail, while it goes on writing it, and the head that others keep.

The promise: it holds up neither the event loop nor a change for longer than one page takes; a trail that could not be
read to its end is called neither intact nor broken; and one that is found to be broken is told of and stops no hand-over:
whoever broke it is met by people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from scrubber.adapters.ledger.examination import ChainVerdict, Examination, Findings
from scrubber.adapters.ledger.shapes import Undecodable
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.ports.record import AuditTrail, Event, Journal
from scrubber.ports.runtime import Clock

__all__ = ["look_through", "tell_of_head", "watch_trail"]

_PAUSE = 0.02
"""Seconds between two pages, for whoever else wants the ledger's thread."""
_HEAD_EVERY = 1.0
"""Seconds between two looks at the audit's head."""
_HEAD_TOLD_EVERY = 60.0
"""Seconds between two log lines with it, at least."""
_TRIED_AGAIN = 60.0
"""Seconds after which a trail that could not be read is looked through again."""


async def look_through(trail: AuditTrail, clock: Clock) -> Findings:
    """What an examination of all pages finds.

    Raises:
        NotReady: rows were given up while they were read.
        LedgerFailure: the disk did not give them.
    """
    examination = Examination()
    try:
        async for page in trail.pages(0):
            await asyncio.to_thread(examination.take, page)
            await clock.sleep(_PAUSE)
    except LedgerFailure as failure:
        if isinstance(failure.__cause__, Undecodable):  # it was read, and is not what was written
            return examination.found(str(failure))
        raise
    return examination.found()


async def tell_of_head(ledger: SqliteLedger, clock: Clock, log: structlog.typing.FilteringBoundLogger) -> None:
    """Have the audit's head kept by others: a trail that was cut or written anew agrees with itself, and not with them."""
    told, at = "", -_HEAD_TOLD_EVERY
    while True:
        head, now = ledger.head(), clock.monotonic()
        if str(head) != told and now - at >= _HEAD_TOLD_EVERY:
            log.info("audit.head", head=str(head))
            told, at = str(head), now
        await clock.sleep(_HEAD_EVERY)


async def watch_trail(
    trail: AuditTrail, journal: Journal, clock: Clock, every: float, *, examined: Callable[[bool, float], None]
) -> None:
    """Look through the whole trail each ``every`` seconds; the first time was when the ledger was loaded.

    Args:
        examined: is told whether the trail is intact, and when the look at it began (wall-clock seconds).
    """
    pause = every
    while True:
        await clock.sleep(pause)
        pause, began = every, clock.wall()
        try:
            found = await look_through(trail, clock)
        except (NotReady, LedgerFailure) as failure:
            journal.tell([Event("audit.unread", clock.wall(), fields={"sentence": str(failure)})])
            pause = min(every, _TRIED_AGAIN)
            continue
        intact = found.verdict is ChainVerdict.INTACT
        examined(intact, began)
        if not intact:
            journal.tell([Event("audit.broken", clock.wall(), fields={"sentence": found.sentence})])
