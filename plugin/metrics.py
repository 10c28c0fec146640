"""The Prometheus metrics of the plugin, fed by :mod:`plugin.observers`, in a separate registry.

Invariants: every label is bounded. A value that the code does not know becomes ``other``, and so does a resource after
the first :data:`MAX_RESOURCES`. Series whose labels are known in advance exist from the start at 0, because
``increase`` misses the first event of a counter that this event creates.
"""

from __future__ import annotations

import platform
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from plugin.kubelet.devices import AdvertisedDevices
from scrubber import __version__
from scrubber.domain.codes import ErrorCode
from scrubber.observability.metrics.create import create_counter, create_family, create_gauge, create_histogram
from scrubber.observability.registry import plugin_metrics as declared

__all__ = ["MAX_RESOURCES", "PluginMetrics"]

OTHER: Final = "other"

MAX_RESOURCES: Final = 64
"""Limit of resources shown by name during the life of a plugin; vendors' plugins choose their names."""

_MODES = frozenset(declared.REGISTRATIONS.label_values("mode"))
_OUTCOMES = frozenset(declared.REGISTRATIONS.label_values("outcome"))
_ENDS = frozenset(declared.REGISTRATION_ENDS.label_values("reason"))
_METHODS = frozenset(declared.RPC_DURATION.label_values("method"))
_STATUSES = frozenset(each.name for each in grpc.StatusCode)
_WRITES = frozenset(declared.CLUSTER_WRITES.label_values("kind"))
_HEALTH_EVENT_OUTCOMES = declared.HEALTH_EVENTS.label_values("outcome")
_REFUSALS: frozenset[str] = frozenset(ErrorCode)


def _one_of(known: frozenset[str], value: str) -> str:
    return value if value in known else OTHER


class PluginMetrics:
    """All metrics of the plugin, in ``registry``. Implements every observer of :mod:`plugin.observers`.

    Args:
        lists: returns resource → its list at the time of the scrape; called from another thread.
    """

    def __init__(self, registry: CollectorRegistry, lists: Callable[[], Mapping[str, AdvertisedDevices]]) -> None:
        create_gauge(declared.BUILD_INFO, registry).labels(__version__, platform.python_version()).set(1)
        self._service_up = create_gauge(declared.SERVICE_UP, registry)
        self._outages = create_counter(declared.SERVICE_OUTAGES, registry)
        self._lost_lines = create_counter(declared.LOG_LINES_LOST, registry)
        self._registrations = create_counter(declared.REGISTRATIONS, registry)
        self._registered = create_gauge(declared.REGISTERED, registry)
        self._ends = create_counter(declared.REGISTRATION_ENDS, registry)
        self._streams = create_gauge(declared.LISTANDWATCH_STREAMS, registry)
        self._lists = create_counter(declared.LISTANDWATCH_UPDATES, registry)
        self._calls = create_histogram(declared.RPC_DURATION, registry)
        self._refusals = create_counter(declared.HANDOVER_REFUSALS, registry)
        self._writes = create_counter(declared.CLUSTER_WRITES, registry)
        self._pauses = create_counter(declared.AGENT_PAUSES, registry)
        self._health_events = create_counter(declared.HEALTH_EVENTS, registry)
        self._resources: set[str] = set()
        self._up = False
        registry.register(_Devices(lists, self._scraped_label))
        for code in sorted(_REFUSALS | {OTHER}):
            self._refusals.labels(code)
        for what in sorted(_WRITES):
            for outcome in declared.CLUSTER_WRITES.label_values("outcome"):
                self._writes.labels(what, outcome)
        for outcome in declared.AGENT_PAUSES.label_values("outcome"):
            self._pauses.labels(outcome)
        for outcome in _HEALTH_EVENT_OUTCOMES:
            self._health_events.labels(outcome)

    def on_service_status(self, up: bool) -> None:
        if self._up and not up:
            self._outages.inc()
        self._up = up
        self._service_up.set(int(up))

    def count_lost_line(self) -> None:
        self._lost_lines.inc()

    def on_start_refused(self, code: str) -> None:
        self._refusals.labels(_one_of(_REFUSALS, code)).inc()

    def on_registration_status(self, resource: str, registered: bool) -> None:
        self._registered.labels(self._resource(resource)).set(int(registered))

    def on_registration_attempt(self, resource: str, mode: str, outcome: str) -> None:
        self._registrations.labels(self._resource(resource), _one_of(_MODES, mode), _one_of(_OUTCOMES, outcome)).inc()

    def on_registration_end(self, resource: str, reason: str) -> None:
        self._ends.labels(self._resource(resource), _one_of(_ENDS, reason)).inc()

    def on_resource_dropped(self, resource: str) -> None:
        """Remove the gauge, which would report a registration as lost; counters stay."""
        self._registered.remove(self._scraped_label(resource))

    def on_stream_status(self, resource: str, opened: bool) -> None:
        self._streams.labels(self._resource(resource)).inc(1 if opened else -1)

    def on_list_sent(self, resource: str) -> None:
        self._lists.labels(self._resource(resource)).inc()

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        self._calls.labels(_one_of(_METHODS, method), _one_of(_STATUSES, code)).observe(seconds)

    def on_cluster_write(self, kind: str, ok: bool) -> None:
        self._writes.labels(_one_of(_WRITES, kind), "ok" if ok else "failed").inc()

    def on_agent_pause(self, outcome: str) -> None:
        self._pauses.labels(outcome).inc()

    def on_health_events(self, outcome: str, count: int) -> None:
        self._health_events.labels(_one_of(frozenset(_HEALTH_EVENT_OUTCOMES), outcome)).inc(count)

    def _resource(self, name: str) -> str:
        """Return the label for a resource; the series of a new one start at 0."""
        shown = name if name in self._resources or len(self._resources) < MAX_RESOURCES else OTHER
        if shown not in self._resources:
            for way in sorted(_MODES):
                for outcome in sorted(_OUTCOMES):
                    self._registrations.labels(shown, way, outcome)
            for why in sorted(_ENDS):
                self._ends.labels(shown, why)
            for each in (self._registered, self._streams, self._lists):
                each.labels(shown)
            if shown is not OTHER:
                self._resources.add(shown)
        return shown

    def _scraped_label(self, name: str) -> str:
        """Return the label for a resource during a scrape, without creating series."""
        return name if name in self._resources or len(self._resources) < MAX_RESOURCES else OTHER


class _Devices(Collector):
    """The number of ids in each list, by health, at the time of the scrape."""

    def __init__(self, lists: Callable[[], Mapping[str, AdvertisedDevices]], shown: Callable[[str], str]) -> None:
        self._lists = lists
        self._shown = shown

    def describe(self) -> Iterator[Metric]:
        yield create_family(declared.DEVICES)

    def collect(self) -> Iterator[Metric]:
        family = create_family(declared.DEVICES)
        counts: Counts[tuple[str, str]] = Counts()
        for resource, advertised in dict(self._lists()).items():  # the copy is atomic; the plugin keeps running
            shown, health = self._shown(resource), advertised.health
            counts[shown, "healthy"] += sum(health)
            counts[shown, "unhealthy"] += len(health) - sum(health)
        for labels, number in counts.items():
            family.add_metric(labels, number)
        yield family
