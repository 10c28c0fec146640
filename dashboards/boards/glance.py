"""What the fleet's and the node's boards say first, asked in the same words, so that their numbers can be compared."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.frame import TO_NODE
from dashboards.meaning import Colour, words
from dashboards.panels import Column, listing, number
from dashboards.queries import OUT, count, fold, increase, or_zero, quantile_of_range, ratio

__all__ = [
    "ANSWERS",
    "DEVICES",
    "GRANTED",
    "SLOW_WAIT",
    "WAIT",
    "alerts",
    "devices",
    "fast_share",
    "out_of_service",
    "wait",
    "waiting",
]

DEVICES: Final = "scrubber_device_state"
WAIT: Final = "scrubber_handover_duration_seconds"
GRANTED: Final = 'outcome="granted"'

ANSWERS: Final = "instance:scrubber_handover_answers:p99_5m"
"""Waits of starts that were refused, too: what the alert looks at. Who waits in vain is not among those that were granted."""

SLOW_WAIT: Final = 20.0
"""Seconds. The kubelet gives a start 30, the gate answers after 25; the alert speaks from here on."""


def devices(span: int) -> model.Panel:
    """How many there are."""
    return number("Devices", "How many devices are looked after?", count(DEVICES), unit="none", span=span)


def out_of_service(span: int) -> model.Panel:
    """How many of them are handed to nobody."""
    return number(
        "Out of service",
        "How many devices are handed to nobody: quarantined, recovering, on probation or condemned?",
        or_zero(count(DEVICES, OUT), count(DEVICES)),
        unit="none",
        span=span,
        steps=((None, Colour.CLEAN), (1.0, Colour.QUARANTINED)),
    )


def waiting(span: int) -> model.Panel:
    """How many starts wait."""
    return number(
        "Starts that wait",
        "How many containers wait for their device at this moment?",
        fold("sum", "scrubber_handovers_waiting"),
        unit="none",
        span=span,
    )


def wait(span: int) -> model.Panel:
    """How long they waited."""
    return number(
        "Wait, p99",
        "How long did the slowest hundredth of the granted starts wait for their device, over the time range?",
        quantile_of_range(0.99, WAIT, GRANTED),
        unit="s",
        span=span,
        steps=((None, Colour.CLEAN), (10.0, Colour.SCRUBBING), (SLOW_WAIT, Colour.QUARANTINED)),
        nothing="no hand-over",
    )


def fast_share(span: int) -> model.Panel:
    """How many of them met a device that was proved clean before they came."""
    fast = increase("scrubber_handovers_total", GRANTED, 'path="fast"')
    return number(
        "Fast-path share",
        "What share of the grants of the time range found its device already proved clean?",
        ratio(fast, increase("scrubber_handovers_total", GRANTED)),
        unit="percentunit",
        span=span,
        steps=((None, Colour.DIRTY), (0.5, Colour.SCRUBBING), (0.8, Colour.CLEAN)),
        decimals=1,
        nothing="no hand-over",
    )


def alerts(span: int, height: int) -> model.Panel:
    """What the alerts say at present. One that is about no node, but about a tenant, is in Alertmanager alone."""
    urgency = {"critical": Colour.QUARANTINED, "warning": Colour.DIRTY, "info": Colour.IN_USE}
    return listing(
        "Alerts",
        "What is wrong at this moment, and where? Each alert has a runbook of its name.",
        fold(
            "max",
            "ALERTS",
            'alertname=~"Scrubber.+"',
            'alertstate="firing"',
            by=("instance", "alertname", "severity"),
        ),
        columns=[
            Column("severity", "Severity", width=110, mappings=[words(urgency)]),
            Column("alertname", "Alert"),
            Column("instance", "Node", link=TO_NODE),
        ],
        span=span,
        height=height,
        sort="Severity",
        smallest_first=True,  # critical, info, warning
        nothing="No alert fires",
    )
