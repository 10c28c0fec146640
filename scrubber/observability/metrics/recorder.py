"""The metrics of the service. What happened is counted from events and from the records of scrubs, so that a dashboard and
the audit trail cannot disagree; what is so at present is looked up when somebody scrapes.

Every label is bounded: a value that the code does not know is counted as ``other``, whatever an event says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from scrubber.domain.evidence import ScrubRecord
from scrubber.domain.health.signal_table import SignalTable
from scrubber.observability.metrics.counters import HandoverMetrics, QuarantineMetrics, ScrubMetrics
from scrubber.observability.metrics.devices import DeviceMetrics
from scrubber.observability.metrics.labels import KnownCodes
from scrubber.observability.metrics.page import MetricGroup, MetricsPage
from scrubber.observability.metrics.rpc import RpcMetrics
from scrubber.observability.metrics.service import ServiceMetrics
from scrubber.observability.metrics.status import ServiceStatus
from scrubber.ports.record import Event

__all__ = ["MetricsRecorder"]


class MetricsRecorder:
    """All metrics of the service, in ``registry``; ``signals`` are the codes that have series of their own.

    Attributes:
        read_status: what is so now. Called by the thread that scrapes: it only looks at values, and never raises.
        page: what Prometheus reads; faster than ``registry`` is.
        service: what has no device, for whoever knows it.
        rpc: what the sockets' servers tell of.
    """

    def __init__(self, registry: CollectorRegistry, signals: SignalTable) -> None:
        self.read_status: Callable[[], ServiceStatus] = ServiceStatus
        self.page = MetricsPage(registry)
        self.service, self.rpc = ServiceMetrics(self.page), RpcMetrics(self.page)
        known = KnownCodes(signals)
        self._devices, handovers = DeviceMetrics(known), HandoverMetrics(self.page)
        self._scrubs, quarantines = ScrubMetrics(self.page, known), QuarantineMetrics(self.page, known)
        self.page.add_group(
            MetricGroup((*self._devices.members, *self.service.members, self.rpc.streams), self._refresh)
        )
        self.page.register_library_metrics()
        scrubs = self._scrubs

        def granted(event: Event) -> None:
            handovers.on_granted(event)
            quarantines.on_granted(event)

        self._handlers: Mapping[str, Callable[[Event], None]] = {
            "breaker.closed": self.service.on_breaker_event,
            "breaker.opened": self.service.on_breaker_event,
            "eraser.orphan": scrubs.on_killed,
            "handover.granted": granted,
            "handover.refused": handovers.on_refused,
            "health.condemned": quarantines.on_tenant_blamed,  # names a tenant only when it took the device out of his hands
            "health.quarantined": quarantines.on_quarantined,
            "health.signal": self._devices.on_signal,
            "leftover.ended": scrubs.on_killed,
            "leftover.pod-ended": scrubs.on_killed,
            "operator.quarantined": quarantines.on_operator_quarantine,
            "policy.accepted": self.service.on_policy_event,
            "policy.rejected": self.service.on_policy_event,
            "residue.unexplained": scrubs.on_unexplained_residue,
            "scrub.finished": scrubs.on_finished,
            "stranger.ended": scrubs.on_killed,
            "use.ungranted": quarantines.on_unauthorized_use,
        }

    def count(self, event: Event) -> None:
        """Move whatever ``event`` moves; most events move nothing. Never raises."""
        move = self._handlers.get(event.name)
        if move is not None:
            move(event)

    def record_scrub(self, record: ScrubRecord) -> None:
        """Move what the steps of a scrub move. Never raises."""
        self._scrubs.record_scrub(record)
        self._devices.record_scrub(record)

    def _refresh(self) -> None:
        facts = self.read_status()
        self._devices.update(facts.devices)
        self.service.update(facts)
