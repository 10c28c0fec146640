"""Which labels of the metrics pages can name a tenant or a pod: any local user may be able to read these pages."""

from __future__ import annotations

from scrubber.observability.registry.plugin_metrics import PLUGIN_METRICS
from scrubber.observability.registry.service_metrics import SERVICE_METRICS

NEVER_A_TENANT = frozenset(
    [
        "backend",
        "cause_class",
        "code",
        "device",
        "digest",
        "driver",
        "index",
        "key_id",
        "method",
        "model",
        "outcome",
        "part",
        "policy",
        "python",
        "resource",
        "service",
        "version",
    ]
)
"""Labels with values of the node, its drivers, its policy, its plugins and its own code."""


def test_labels_that_can_name_a_tenant_or_a_pod_are_those_of_two_metrics() -> None:
    """Row S7 of the threat model, SECURITY.md and the network policy of the metrics name these two."""
    found = {
        (metric.name, label.name)
        for metric in (*SERVICE_METRICS, *PLUGIN_METRICS)
        for label in metric.labels
        if not label.values and label.name not in NEVER_A_TENANT
    }
    assert found == {
        ("scrubber_tenant_quarantines_total", "tenant"),
        ("scrubber_device_held_start_timestamp_seconds", "holder"),
    }
