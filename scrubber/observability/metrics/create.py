"""Creates metrics of the client library from their declarations."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from scrubber.observability.registry.metric_declaration import MetricDeclaration, MetricType

__all__ = ["create_counter", "create_family", "create_gauge", "create_histogram"]


def create_counter(declared: MetricDeclaration, registry: CollectorRegistry) -> Counter:
    """Return the counter in ``registry``; the library adds ``_total`` to its series."""
    return Counter(declared.name, declared.help, declared.label_names, registry=registry)


def create_gauge(declared: MetricDeclaration, registry: CollectorRegistry) -> Gauge:
    """Return the gauge in ``registry``."""
    return Gauge(declared.name, declared.help, declared.label_names, registry=registry)


def create_histogram(declared: MetricDeclaration, registry: CollectorRegistry) -> Histogram:
    """Return the histogram, with its declared buckets, in ``registry``."""
    return Histogram(declared.name, declared.help, declared.label_names, buckets=declared.buckets, registry=registry)


def create_family(declared: MetricDeclaration) -> CounterMetricFamily | GaugeMetricFamily:
    """Return an empty family of samples, for a collector that makes all of them at each scrape."""
    kind = CounterMetricFamily if declared.type is MetricType.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(declared.name, declared.help, labels=declared.label_names)
    return family
