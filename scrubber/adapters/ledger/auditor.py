"""The service's own look at its whole trail, while it goes on writing it.

The promise: it holds up neither the event loop nor a change for longer than one page takes, and a trail that could not be
read to its end is called neither intact nor broken.
"""

from __future__ import annotations

import asyncio

from scrubber.adapters.ledger.examination import Examination, Findings
from scrubber.adapters.ledger.shapes import Undecodable
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import AuditTrail
from scrubber.ports.runtime import Clock

__all__ = ["look_through"]

_PAUSE = 0.02
"""Seconds between two pages, for whoever else wants the ledger's thread."""


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
