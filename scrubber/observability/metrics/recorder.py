"""The metrics of the service.

Past events are counted from events and scrub records, so that a dashboard and the audit log cannot disagree; current
state is read at a scrape. Every label is bounded: a value that the code does not know is counted as ``other``, for any
event.
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
    """All metrics of the service, in ``registry``; ``signals`` are the codes with their own series.

    Attributes:
        read_status: returns the current status. Called by the thread of the scrape: it only reads values, and never
            raises.
        page: the page for Prometheus; faster than ``registry``.
        service: metrics without a device, for the modules that report them.
        rpc: metrics of the sockets' servers.
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
            "eraser.orphan.found": scrubs.on_killed,
            "handover.granted": granted,
            "handover.refused": handovers.on_refused,
            "health.condemned": quarantines.on_tenant_blamed,  # names a tenant only when the device was taken from it
            "health.quarantined": quarantines.on_quarantined,
            "health.errors-reported": self._devices.on_signal,
            "leftover.process.killed": scrubs.on_killed,
            "leftover.pod.killed": scrubs.on_killed,
            "operator.quarantined": quarantines.on_operator_quarantine,
            "policy.accepted": self.service.on_policy_event,
            "policy.rejected": self.service.on_policy_event,
            "residue.unexplained": self._devices.on_unexplained_residue,
            "scrub.finished": scrubs.on_finished,
            "unauthorized.process.killed": scrubs.on_killed,
            "uninspected.process.killed": scrubs.on_killed,
            "unauthorized.use.detected": self._devices.on_unauthorized_use,
        }

    def count(self, event: Event) -> None:
        """Update the metrics for ``event``; most events change none. Never raises."""
        move = self._handlers.get(event.name)
        if move is not None:
            move(event)

    def record_scrub(self, record: ScrubRecord) -> None:
        """Update the metrics for the steps of a scrub. Never raises."""
        self._scrubs.record_scrub(record)
        self._devices.record_scrub(record)

    def _refresh(self) -> None:
        facts = self.read_status()
        self._devices.update(facts.devices)
        self.service.update(facts)
