"""What the fleet's and the node's boards say first, asked in the same words, so that their numbers can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.frame import TO_DEVICE, TO_NODE
from dashboards.meaning import Colour, words
from dashboards.panels import Column, listing, number
from dashboards.queries import OUT, count, fold, increase, or_zero, quantile_of_range, ratio

__all__ = [
    "ANSWERS",
    "DEVICES",
    "GRANTED",
    "NOT_VERIFIED",
    "SLOW_WAIT",
    "WAIT",
    "alerts",
    "devices",
    "fast_share",
    "not_verified",
    "out_of_service",
    "wait",
    "waiting",
]

DEVICES: Final = "scrubber_device_state"
WAIT: Final = "scrubber_handover_duration_seconds"
GRANTED: Final = 'outcome="granted"'

ANSWERS: Final = "instance:scrubber_handover_answers:p99_5m"
"""Waits of starts that were refused, too: what the alert looks at. Who waits in vain is not among those that were granted."""

_BLANK: Final = {"noValue": " "}
"""Of a cell for which there is nothing to say: Grafana would put there what the table says when it is empty."""

_ABOUT: Final = ("use", "code", "cause_class", "what", "child", "resource", "tenant_namespace")
"""Labels that say of an alert what it is about. No alert has more than one of them."""

NOT_VERIFIED: Final = ((None, Colour.CLEAN), (1e-16, Colour.DIRTY), (0.01, Colour.QUARANTINED))
"""Of a device's memory. Only none at all is green: nothing that a share of one can lack is less than that."""

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
    """How long they waited, where they waited longest."""
    return number(
        "Slowest wait, p99",
        "How long did the slowest hundredth of the granted starts wait for their device, on the node where that was longest? "
        "(Over the whole time range; single minutes can be worse.)",
        f"max ({quantile_of_range(0.99, WAIT, GRANTED, by=('instance',))})",
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


def not_verified(*matchers: str, by: Sequence[str]) -> str:
    """A query: the share of a device's memory that its last slow path did not clear and read back.

    The rest of one, not the share that was covered: beside 0.99999905 of it a reader is told 100 %.
    """
    return f"1 - {fold('min', 'scrubber_memory_coverage_ratio', *matchers, by=by)}"


def alerts(span: int, height: int) -> model.Panel:
    """What the alerts say at present, whichever job's series they are made of.

    An alert has the labels that its rule leaves: one that a service is away has no ``job``, and one that is about a tenant, or
    that there is no target at all, has no ``instance``. So jobs pick nothing here, and what is of no node is always shown.
    """
    urgency = {"critical": Colour.QUARANTINED, "warning": Colour.DIRTY, "info": Colour.IN_USE}
    picked = 'alertname=~"Scrubber.+", instance=~"$instance|"'
    since = f'ALERTS_FOR_STATE{{{picked}}} and ignoring (alertstate) ALERTS{{{picked}, alertstate="firing"}}'
    about = ", ".join(f'"{label}"' for label in _ABOUT)
    return listing(
        "Alerts",
        "What is wrong at this moment, where, and since when? Each alert has a runbook of its name.",
        f'time() - max by (severity, alertname, instance, device, about) (label_join({since}, "about", "", {about}))',
        columns=[
            Column("severity", "Severity", width=100, mappings=[words(urgency)]),
            Column("alertname", "Alert", width=310),
            Column("instance", "Node", width=150, link=TO_NODE, properties=_BLANK),
            Column("device", "Device", link=TO_DEVICE, properties=_BLANK),
            Column("about", "About", properties=_BLANK),
            Column("Value", "For", unit="s", width=110),
        ],
        span=span,
        height=height,
        sort="Severity",
        smallest_first=True,  # critical, info, warning
        nothing="No alert fires",
    )
