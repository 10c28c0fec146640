"""What the fleet's and the node's boards say first, asked in the same words, so that their numbers can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.dashboard import DEVICE_LINK, NODE_LINK
from dashboards.panels import PanelColumn, stat_panel, table_panel
from dashboards.queries import (
    OUT_OF_SERVICE_MATCHER,
    aggregate,
    increase,
    or_zero,
    quantile_of_range,
    ratio,
    series_count,
)
from dashboards.value_mappings import Colour, text_mapping

__all__ = [
    "ANSWER_P99_METRIC",
    "DEVICE_STATE_METRIC",
    "GRANTED_MATCHER",
    "HANDOVER_DURATION_METRIC",
    "SLOW_WAIT",
    "UNVERIFIED_THRESHOLDS",
    "alerts_panel",
    "device_count_panel",
    "fast_path_share_panel",
    "out_of_service_panel",
    "start_wait_panel",
    "unverified_share_query",
    "waiting_starts_panel",
]

DEVICE_STATE_METRIC: Final = "scrubber_device_state"
HANDOVER_DURATION_METRIC: Final = "scrubber_handover_duration_seconds"
GRANTED_MATCHER: Final = 'outcome="granted"'

ANSWER_P99_METRIC: Final = "instance:scrubber_handover_answers:p99_5m"
"""Waits of starts that were refused, too: what the alert looks at. Who waits in vain is not among those that were granted."""

_BLANK: Final = {"noValue": " "}
"""Of a cell for which there is nothing to say: Grafana would put there what the table says when it is empty."""

_SUBJECT_LABELS: Final = ("use", "code", "cause_class", "what", "child", "resource", "tenant_namespace")
"""Labels that say of an alert what it is about. No alert has more than one of them."""

UNVERIFIED_THRESHOLDS: Final = ((None, Colour.CLEAN), (1e-16, Colour.DIRTY), (0.01, Colour.QUARANTINED))
"""Of a device's memory. Only none at all is green: nothing that a share of one can lack is less than that."""

SLOW_WAIT: Final = 20.0
"""Seconds. The kubelet gives a start 30, the gate answers after 25; the alert speaks from here on."""


def device_count_panel(span: int) -> model.Panel:
    """How many there are."""
    return stat_panel(
        "Devices", "How many devices are looked after?", series_count(DEVICE_STATE_METRIC), unit="none", span=span
    )


def out_of_service_panel(span: int) -> model.Panel:
    """How many of them are handed to nobody."""
    return stat_panel(
        "Out of service",
        "How many devices are handed to nobody: quarantined, recovering, on probation or condemned?",
        or_zero(series_count(DEVICE_STATE_METRIC, OUT_OF_SERVICE_MATCHER), series_count(DEVICE_STATE_METRIC)),
        unit="none",
        span=span,
        steps=((None, Colour.CLEAN), (1.0, Colour.QUARANTINED)),
    )


def waiting_starts_panel(span: int) -> model.Panel:
    """How many starts wait."""
    return stat_panel(
        "Starts that wait",
        "How many containers wait for their device at this moment?",
        aggregate("sum", "scrubber_handovers_waiting"),
        unit="none",
        span=span,
    )


def start_wait_panel(span: int) -> model.Panel:
    """How long they waited, where they waited longest."""
    return stat_panel(
        "Slowest wait, p99",
        "How long did the slowest hundredth of the granted starts wait for their device, on the node where that was longest? "
        "(Over the whole time range; single minutes can be worse.)",
        f"max ({quantile_of_range(0.99, HANDOVER_DURATION_METRIC, GRANTED_MATCHER, by=('instance',))})",
        unit="s",
        span=span,
        steps=((None, Colour.CLEAN), (10.0, Colour.SCRUBBING), (SLOW_WAIT, Colour.QUARANTINED)),
        nothing="no hand-over",
    )


def fast_path_share_panel(span: int) -> model.Panel:
    """How many of them met a device that was proved clean before they came."""
    fast = increase("scrubber_handovers_total", GRANTED_MATCHER, 'path="fast"')
    return stat_panel(
        "Fast-path share",
        "What share of the grants of the time range found its device already proved clean?",
        ratio(fast, increase("scrubber_handovers_total", GRANTED_MATCHER)),
        unit="percentunit",
        span=span,
        steps=((None, Colour.DIRTY), (0.5, Colour.SCRUBBING), (0.8, Colour.CLEAN)),
        decimals=1,
        nothing="no hand-over",
    )


def unverified_share_query(*matchers: str, by: Sequence[str]) -> str:
    """A query: the share of a device's memory that its last slow path did not clear and read back.

    The rest of one, not the share that was covered: beside 0.99999905 of it a reader is told 100 %.
    """
    return f"1 - {aggregate('min', 'scrubber_memory_coverage_ratio', *matchers, by=by)}"


def alerts_panel(span: int, height: int) -> model.Panel:
    """What the alerts say at present, whichever job's series they are made of.

    An alert has the labels that its rule leaves: one that a service is away has no ``job``, and one that is about a tenant, or
    that there is no target at all, has no ``instance``. So jobs pick nothing here, and what is of no node is always shown.
    """
    urgency = {"critical": Colour.QUARANTINED, "warning": Colour.DIRTY, "info": Colour.IN_USE}
    picked = 'alertname=~"Scrubber.+", instance=~"$instance|"'
    since = f'ALERTS_FOR_STATE{{{picked}}} and ignoring (alertstate) ALERTS{{{picked}, alertstate="firing"}}'
    about = ", ".join(f'"{label}"' for label in _SUBJECT_LABELS)
    return table_panel(
        "Alerts",
        "What is wrong at this moment, where, and since when? Each alert has a runbook of its name.",
        f'time() - max by (severity, alertname, instance, device, about) (label_join({since}, "about", "", {about}))',
        columns=[
            PanelColumn("severity", "Severity", width=100, mappings=[text_mapping(urgency)]),
            PanelColumn("alertname", "Alert", width=310),
            PanelColumn("instance", "Node", width=150, link=NODE_LINK, properties=_BLANK),
            PanelColumn("device", "Device", link=DEVICE_LINK, properties=_BLANK),
            PanelColumn("about", "About", properties=_BLANK),
            PanelColumn("Value", "For", unit="s", width=110),
        ],
        span=span,
        height=height,
        sort="Severity",
        smallest_first=True,  # critical, info, warning
        nothing="No alert fires",
    )
