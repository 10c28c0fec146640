"""The panels of both the fleet and the node board, with the same queries, so that their numbers can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.dashboard import DEVICE_LINK, NODE_LINK, RECOVERY_LINK, RUNBOOK_LINK
from dashboards.panels import CLUSTER_COLUMN, PanelColumn, stat_panel, table_panel
from dashboards.queries import (
    MAX_ROWS,
    OUT_OF_SERVICE_MATCHER,
    aggregate,
    or_zero,
    over_range,
    ratio,
    selector,
    series_count,
    top,
)
from dashboards.value_mappings import Colour, health_mapping, recovery_mapping, text_mapping

__all__ = [
    "ANSWER_P99_METRIC",
    "DEVICE_STATE_METRIC",
    "FAST_MATCHER",
    "GRANTED_MATCHER",
    "GRANT_P99_METRIC",
    "HANDOVER_DURATION_METRIC",
    "HANDOVER_RATE_METRIC",
    "SLOW_WAIT",
    "UNVERIFIED_THRESHOLDS",
    "alerts_panel",
    "device_count_panel",
    "fast_path_share_panel",
    "out_of_service_panel",
    "out_of_service_table",
    "start_wait_panel",
    "unverified_share_query",
    "waiting_pods_table",
    "waiting_starts_panel",
]

DEVICE_STATE_METRIC: Final = "scrubber_device_state"
HANDOVER_DURATION_METRIC: Final = "scrubber_handover_duration_seconds"
GRANTED_MATCHER: Final = 'outcome="granted"'
FAST_MATCHER: Final = 'path="fast"'
HANDOVER_RATE_METRIC: Final = "instance:scrubber_handovers:rate5m"
GRANT_P99_METRIC: Final = "instance:scrubber_handover_wait:p99_5m"
"""A few series of each node instead of dozens, so that a fleet can be read over the whole time range."""

ANSWER_P99_METRIC: Final = "instance:scrubber_handover_response:p99_5m"
"""Waits including refused starts, as in the alert: a start that waited and was refused is not among the granted ones."""

_BLANK: Final = {"noValue": " "}
"""Property of a cell without a value: otherwise Grafana would show the text of an empty table there."""

_MAX_ALERTS: Final = 100

_SUBJECT_LABELS: Final = ("slo", "use", "code", "cause_class", "breaker", "child", "resource", "tenant")
"""Labels that say of an alert what it is about. No alert has more than one of them."""

UNVERIFIED_THRESHOLDS: Final = ((None, Colour.CLEAN), (1e-16, Colour.DIRTY), (0.01, Colour.QUARANTINED))
"""Thresholds for the unverified share of a device's memory. Only exactly none is green: any real share exceeds 1e-16.
"""

SLOW_WAIT: Final = 20.0
"""Seconds. The kubelet allows 30 for a start, and the gate answers after 25; the alert fires from this value on."""


def device_count_panel(span: int) -> model.Panel:
    """Return the panel with the number of devices."""
    return stat_panel(
        "Devices",
        "How many devices does the service manage?",
        series_count(DEVICE_STATE_METRIC),
        unit="none",
        span=span,
    )


def out_of_service_panel(span: int) -> model.Panel:
    """Return the panel with the number of devices that are not handed over."""
    return stat_panel(
        "Out of service",
        "How many devices are not handed over: quarantined, recovering, on probation or condemned?",
        or_zero(series_count(DEVICE_STATE_METRIC, OUT_OF_SERVICE_MATCHER), series_count(DEVICE_STATE_METRIC)),
        unit="none",
        span=span,
        steps=((None, Colour.CLEAN), (1.0, Colour.QUARANTINED)),
    )


def waiting_starts_panel(span: int) -> model.Panel:
    """Return the panel with the number of waiting starts."""
    return stat_panel(
        "Waiting starts",
        "How many containers are waiting for their device now?",
        aggregate("sum", "scrubber_handovers_waiting"),
        unit="none",
        span=span,
    )


def out_of_service_table(span: int, height: int) -> model.Panel:
    """Return the table of the devices that are not handed over, with the cause of each and how it recovers."""
    since = selector("scrubber_quarantine_start_timestamp_seconds")
    quarantined = (
        f"time() - ({since} * on (cluster, job, instance, device) group_left (health) {selector(DEVICE_STATE_METRIC)})"
    )
    return table_panel(
        "Devices out of service",
        f"Which devices are out of service, for how long, why, and how does each of them recover? (The {MAX_ROWS} that have been "
        "for the longest time. The XID is on the device's dashboard. Orange: it stays out until an operator acts; a click opens "
        "the runbook for that.)",
        top(f"max by (cluster, instance, device, health, cause_class, recovery_method) ({quarantined})"),
        columns=[
            CLUSTER_COLUMN,
            PanelColumn("instance", "Node", width=150, link=NODE_LINK),
            PanelColumn("device", "Device", link=DEVICE_LINK),
            PanelColumn("health", "State", width=110, mappings=[health_mapping()], filled=True),
            PanelColumn("cause_class", "Cause", width=170),
            PanelColumn("Value", "For", unit="s", width=110),
            PanelColumn("recovery_method", "Recovery", width=90, mappings=[recovery_mapping()], link=RECOVERY_LINK),
        ],
        span=span,
        height=height,
        sort="For",
        nothing="No device is out of service",
    )


def waiting_pods_table(span: int, height: int) -> model.Panel:
    """Return the table of waiting pods, from kube-state-metrics; it is empty where that is not scraped."""
    pods = aggregate("max", "pod:scrubber_waiting_starts:info", by=("cluster", "instance", "namespace", "pod"))
    return table_panel(
        "Pods that wait",
        "Which pods may be waiting for a GPU, on nodes on which a start waits? (From kube-state-metrics.)",
        top(pods),
        columns=[
            CLUSTER_COLUMN,
            PanelColumn("instance", "Node", width=120, link=NODE_LINK),
            PanelColumn("namespace", "Namespace", width=130),
            PanelColumn("pod", "Pod"),
        ],
        span=span,
        height=height,
        nothing="None while Waiting starts is 0 (needs kube-state-metrics)",
    )


def start_wait_panel(span: int) -> model.Panel:
    """Return the panel with the wait of starts, on the node with the longest waits."""
    return stat_panel(
        "Slowest wait, p99",
        "How long did the slowest 1 % of the granted starts wait for their device, on the node with the longest waits? "
        "(In the worst five minutes of the time range.)",
        f"max ({over_range('max_over_time', GRANT_P99_METRIC)} >= 0)",
        unit="s",
        span=span,
        steps=((None, Colour.CLEAN), (10.0, Colour.SCRUBBING), (SLOW_WAIT, Colour.QUARANTINED)),
        nothing="no hand-over",
    )


def fast_path_share_panel(span: int) -> model.Panel:
    """Return the panel with the share of starts whose device was certified clean beforehand."""
    granted = f"sum ({over_range('sum_over_time', HANDOVER_RATE_METRIC, GRANTED_MATCHER)})"
    fast = f"sum ({over_range('sum_over_time', HANDOVER_RATE_METRIC, GRANTED_MATCHER, FAST_MATCHER)})"
    return stat_panel(
        "Fast-path share",
        "On what share of the grants in the time range was the device already proved clean?",
        ratio(fast, granted),
        unit="percentunit",
        span=span,
        steps=((None, Colour.DIRTY), (0.5, Colour.SCRUBBING), (0.8, Colour.CLEAN)),
        decimals=1,
        nothing="no hand-over",
    )


def unverified_share_query(*matchers: str, by: Sequence[str]) -> str:
    """Return a query for the share of a device's memory that its last slow path did not clear and read back.

    The complement of the coverage, because 0.99999905 of it would be displayed as 100 %.
    """
    return f"1 - {aggregate('min', 'scrubber_memory_coverage_ratio', *matchers, by=by)}"


def alerts_panel(span: int, height: int) -> model.Panel:
    """Return the table of firing alerts, independent of the selected job.

    An alert has only the labels that its rule keeps: an alert that a service is away has no ``job``, and one about a
    tenant, or about missing targets, has no ``instance``. So jobs select nothing here, and alerts without a node are
    always shown.
    """
    urgency = {"critical": Colour.QUARANTINED, "warning": Colour.DIRTY, "info": Colour.IN_USE}
    picked = 'alertname=~"Scrubber.+", cluster=~"$cluster|", instance=~"$instance|"'
    since = f'ALERTS_FOR_STATE{{{picked}}} and ignoring (alertstate) ALERTS{{{picked}, alertstate="firing"}}'
    about = ", ".join(f'"{label}"' for label in _SUBJECT_LABELS)
    return table_panel(
        "Alerts",
        f"Which alerts are firing, where, and for how long? (The newest {_MAX_ALERTS}. A click on the alert opens its runbook. "
        "An alert about a finding has no device: Devices out of service lists it, with the same cause.)",
        f"bottomk({_MAX_ALERTS}, time() - max by (severity, alertname, cluster, instance, device, about) "
        f'(label_join({since}, "about", "", {about})))',
        columns=[
            PanelColumn("severity", "Severity", width=100, mappings=[text_mapping(urgency)]),
            PanelColumn("alertname", "Alert", width=310, link=RUNBOOK_LINK),
            CLUSTER_COLUMN,
            PanelColumn("instance", "Node", width=150, link=NODE_LINK, properties=_BLANK),
            PanelColumn("device", "Device", link=DEVICE_LINK, properties=_BLANK),
            PanelColumn("about", "About", properties=_BLANK),
            PanelColumn("Value", "For", unit="s", width=110),
        ],
        span=span,
        height=height,
        sort="Severity",
        smallest_first=True,  # critical, info, warning
        nothing="No alert is firing",
    )
