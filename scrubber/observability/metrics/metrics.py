"""The metrics of the service. What happened is counted from events and from the records of scrubs, so that a dashboard and
the audit trail cannot disagree; what is so at present is looked up when somebody scrapes.

Every label is bounded: a value that the code does not know is counted as ``other``, whatever an event says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from scrubber.domain.evidence import ScrubRecord
from scrubber.domain.signal_table import SignalTable
from scrubber.observability.metrics.calls import CallMetrics
from scrubber.observability.metrics.counted import HandoverMetrics, QuarantineMetrics, ScrubMetrics
from scrubber.observability.metrics.devices import DeviceMetrics
from scrubber.observability.metrics.facts import Facts
from scrubber.observability.metrics.labels import Codes
from scrubber.observability.metrics.page import Group, Page
from scrubber.observability.metrics.service import ServiceMetrics
from scrubber.ports.record import Event

__all__ = ["Metrics"]


class Metrics:
    """All metrics of the service, in ``registry``; ``signals`` are the codes that have series of their own.

    Attributes:
        ask: what is so now. Called by the thread that scrapes: it only looks at values, and never raises.
        page: what Prometheus reads; faster than ``registry`` is.
        service: what has no device, for whoever knows it.
        calls: what the sockets' servers tell of.
    """

    def __init__(self, registry: CollectorRegistry, signals: SignalTable) -> None:
        self.ask: Callable[[], Facts] = Facts
        self.page = Page(registry)
        self.service, self.calls = ServiceMetrics(self.page), CallMetrics(self.page)
        known = Codes(signals)
        self._devices, handovers = DeviceMetrics(known), HandoverMetrics(self.page)
        self._scrubs, quarantines = ScrubMetrics(self.page, known), QuarantineMetrics(self.page, known)
        self.page.show(Group((*self._devices.members, *self.service.members, self.calls.streams), self._look))
        self.page.complete()
        scrubs = self._scrubs

        def granted(event: Event) -> None:
            handovers.granted(event)
            quarantines.granted(event)

        self._moves: Mapping[str, Callable[[Event], None]] = {
            "breaker.closed": self.service.breaker,
            "breaker.opened": self.service.breaker,
            "eraser.orphan": scrubs.ended,
            "handover.granted": granted,
            "handover.refused": handovers.refused,
            "health.condemned": quarantines.blamed,  # names a tenant only when it took the device out of his hands
            "health.quarantined": quarantines.quarantined,
            "health.signal": self._devices.signal,
            "leftover.ended": scrubs.ended,
            "leftover.pod-ended": scrubs.ended,
            "operator.quarantined": quarantines.by_a_person,
            "policy.accepted": self.service.policy,
            "policy.rejected": self.service.policy,
            "residue.unexplained": scrubs.unexplained,
            "scrub.finished": scrubs.finished,
            "stranger.ended": scrubs.ended,
            "use.ungranted": quarantines.used,
        }

    def count(self, event: Event) -> None:
        """Move whatever ``event`` moves; most events move nothing. Never raises."""
        move = self._moves.get(event.name)
        if move is not None:
            move(event)

    def scrubbed(self, record: ScrubRecord) -> None:
        """Move what the steps of a scrub move. Never raises."""
        self._scrubs.scrubbed(record)
        self._devices.scrubbed(record)

    def _look(self) -> None:
        facts = self.ask()
        self._devices.show(facts.devices)
        self.service.show(facts)
