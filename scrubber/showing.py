"""What the service shows of itself to whoever scrapes it: read from the engine and the adapters, and from nowhere twice.

Promise: a look changes nothing and waits for nobody, because the thread that scrapes takes it; and a trail that is found to be
broken is told of and stops no hand-over: whoever broke it is met by people.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from scrubber.adapters.ledger.auditor import look_through
from scrubber.adapters.ledger.examination import ChainVerdict
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.assignment import Trust
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.domain.policy import Policy
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.node import Node
from scrubber.engine.views import NodeView
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.metrics.facts import Facts, Shown
from scrubber.ports.device import ChildCounts
from scrubber.ports.record import AuditTrail, Event
from scrubber.ports.runtime import Clock

__all__ = ["facts_of", "tell_of_head", "watch_trail"]

_HEAD_EVERY = 1.0
"""Seconds between two looks at the audit's head."""
_HEAD_TOLD_EVERY = 60.0
"""Seconds between two log lines with it, at least."""
_TRIED_AGAIN = 60.0
"""Seconds after which a trail that could not be read is looked through again."""


def facts_of(
    node: Node, *, dependencies: Dependencies, ledger: SqliteLedger, children: ChildCounts, policy: Callable[[], Policy]
) -> Callable[[], Facts]:
    """A function that says what is so now. Any thread may call it: it reads values that are replaced, and never changed."""

    last: tuple[NodeView, tuple[Shown, ...]] | None = None

    def devices() -> tuple[Shown, ...]:
        nonlocal last
        view, told = node.view(), last
        if told is None or told[0] is not view:
            told = (
                view,
                tuple(Shown(each.device, each.record, each.offered, each.policy.enforcement) for each in view.devices),
            )
            last = told
        return told[1]

    def facts() -> Facts:
        slots, force = node.devices.eraser_pool, policy()
        return Facts(
            devices=devices(),
            handovers_waiting=node.waiting,
            slots_busy=slots.busy,
            slots_free=slots.free,
            erasers_waiting=slots.waiting,
            child_starts=dict(children.starts),
            children_abandoned=children.abandoned_total,
            ledger_ok=ledger.health() == "ok",
            ledger_bytes=ledger.size_bytes,
            audit_head=ledger.head(),
            kubelet_trusted=node.pods.reading.trust is Trust.TRUSTED,
            kubelet_restarts=node.kubelet_restarts,
            policy=(force.name, force.digest),
        )

    return facts


async def tell_of_head(ledger: SqliteLedger, clock: Clock, log: structlog.typing.FilteringBoundLogger) -> None:
    """Have the audit's head kept by others: a trail that was cut or written anew agrees with itself, and not with them."""
    told, at = "", -_HEAD_TOLD_EVERY
    while True:
        head, now = ledger.head(), clock.monotonic()
        if str(head) != told and now - at >= _HEAD_TOLD_EVERY:
            log.info("audit.head", head=str(head))
            told, at = str(head), now
        await clock.sleep(_HEAD_EVERY)


async def watch_trail(trail: AuditTrail, journal: StructlogJournal, clock: Clock, every: float) -> None:
    """Look through the whole trail each ``every`` seconds; the first time was when the ledger was loaded."""
    service, pause = journal.metrics.service, every
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
        service.audit(intact=intact, at=began)
        if not intact:
            journal.tell([Event("audit.broken", clock.wall(), fields={"sentence": found.sentence})])
