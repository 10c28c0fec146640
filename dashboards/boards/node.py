"""A node: what its devices went through, how its scrubs and hand-overs went, and whether both of its daemons are well."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.daemons import plugin, service
from dashboards.boards.glance import (
    DEVICES,
    GRANTED,
    NOT_VERIFIED,
    SLOW_WAIT,
    WAIT,
    alerts,
    devices,
    fast_share,
    not_verified,
    out_of_service,
    wait,
    waiting,
)
from dashboards.frame import TO_DEVICE, Board, Row, board, to_device
from dashboards.meaning import (
    KIND_COLOURS,
    PATH_COLOURS,
    STATES,
    STEP_COLOURS,
    Colour,
    health,
    hygiene,
    mapping,
    numbered,
    yes_or_no,
)
from dashboards.panels import Column, Query, graph, listing, number, tally, timeline
from dashboards.queries import (
    counted,
    fold,
    of,
    per_minute,
    quantile,
    rate,
)

__all__ = ["node"]

_SLOW: Final = 'path="slow"'


def node() -> model.Dashboard:
    """One node, or several that are picked; all of them at once is the fleet's board."""
    return board(
        Board.NODE,
        "GPU scrubber / Node",
        "What happened to this node's devices, and are its service and its plugin well?",
        [
            Row(None, [*_glance(), alerts(24, 7)]),
            Row("Devices", _devices()),
            Row("Hand-overs", _handovers()),
            Row("Scrubs", _scrubs()),
            Row("The service", service()),
            Row("The plugin", plugin()),
        ],
        since="now-3h",
        refresh="30s",
    )


def _glance() -> list[model.Panel]:
    return [
        devices(3),
        out_of_service(3),
        waiting(3),
        wait(3),
        fast_share(3),
        _said("Plugin", "Is every resource registered at the kubelet?", "plugin_registered", "registered", "is not"),
        _said("Ledger", "Does the ledger store what is decided? While it does not, nothing is granted.", "ledger_ok"),
        _said("Kubelet's lists", "Are the kubelet's lists believed?", "kubelet_trusted", "believed", "not believed"),
    ]


def _said(title: str, question: str, name: str, yes: str = "stores", no: str = "fails") -> model.Panel:
    return number(
        title, question, f"min ({of(f'scrubber_{name}')})", unit="none", span=3, mappings=[yes_or_no(yes, no)], size=30
    )


def _devices() -> list[model.Panel]:
    indexed = f"({numbered(STATES)}) * on (job, instance, device) group_left (index) {of('scrubber_device_info')}"
    described = f"{of(DEVICES)} * on (job, instance, device) group_left (index, model) {of('scrubber_device_info')}"
    return [
        timeline(
            "What each device went through",
            "In which state was each device, and for how long? Out of service outweighs everything else.",
            Query(f'label_join({indexed}, "at", " / ", "instance", "index")', "{{at}}"),
            mappings=[mapping(STATES)],
            height=9,
            link=to_device(),
        ),
        listing(
            "Each device now",
            "Which devices are there, what may be done with each, and what was last proved of it?",
            f"max by (instance, device, index, model, hygiene, health) ({described})",
            fold(
                "max",
                "scrubber_device_offered",
                by=("instance", "device"),
            ),
            f"time() - max by (instance, device) ({of('scrubber_certificate_issued_timestamp_seconds')})",
            not_verified(by=("instance", "device")),
            columns=[
                Column("instance", "Node", width=140),
                Column("index", "Index", width=70),
                Column("device", "Device", width=400, link=TO_DEVICE),
                Column("model", "Model"),
                Column("hygiene", "Hygiene", width=100, mappings=[hygiene()]),
                Column("health", "Health", width=110, mappings=[health()], filled=True),
                Column(
                    "Value #B", "To the kubelet", unit="none", width=120, mappings=[yes_or_no("offered", "not offered")]
                ),
                Column("Value #C", "Unused certificate, age", unit="s", width=180),
                Column("Value #D", "Memory not verified", unit="percentunit", width=150, steps=NOT_VERIFIED),
            ],
            height=11,
            sort="Index",
            smallest_first=True,
        ),
    ]


def _handovers() -> list[model.Panel]:
    return [
        graph(
            "Hand-overs per minute",
            "Which starts got their device, and with which code were the others refused?",
            Query(per_minute("scrubber_handovers_total", by=("outcome",)), "{{outcome}}"),
            hue=Colour.DIRTY,
            unit="short",
            stacked=True,
            nothing="No hand-over in this range",
        ),
        graph(
            "Hand-overs per minute, by kind",
            "How did the container that got a device relate to the one before it?",
            Query(per_minute("scrubber_handovers_total", GRANTED, by=("kind",)), "{{kind}}"),
            unit="short",
            stacked=True,
            colours=KIND_COLOURS,
            nothing="No device was handed over in this range",
        ),
        graph(
            "Hand-over wait",
            "How long do starts wait for their grant, by its path, and how long for any answer, a refusal too? (The alert speaks "
            "when all answers of 5 minutes stay above 20 s; a dashed line is there, once waits come near it.)",
            Query(quantile(0.99, WAIT, new=True), "all answers, p99"),
            Query(quantile(0.5, WAIT, GRANTED, by=("path",)), "{{path}} path, median"),
            Query(quantile(0.99, WAIT, GRANTED, by=("path",)), "{{path}} path, p99"),
            rare=True,
            unit="s",
            steps=((None, "transparent"), (SLOW_WAIT, Colour.QUARANTINED)),
            colours={**PATH_COLOURS, "all answers, p99": Colour.PLAIN},
            nothing="No hand-over in this range",
        ),
    ]


def _scrubs() -> list[model.Panel]:
    duration = "scrubber_scrub_duration_seconds"
    unread = f"{rate('scrubber_cleared_bytes_total')} - {rate('scrubber_verified_bytes_total')}"
    return [
        graph(
            "Scrubs per minute",
            "How do scrubs end, by path?",
            Query(per_minute("scrubber_scrubs_total", by=("path", "outcome")), "{{path}}, {{outcome}}"),
            unit="short",
            stacked=True,
            colours={
                "fast, passed": "light-green",
                "slow, passed": "dark-green",
                "fast, held-up": "light-yellow",
                "slow, held-up": "dark-yellow",
                "fast, failed": "light-red",
                "slow, failed": "dark-red",
                "fast, abandoned": "light-orange",
                "slow, abandoned": "dark-orange",
            },
            nothing="No scrub in this range",
        ),
        graph(
            "Scrubs, how long",
            "How long do scrubs take? Points are single scrubs, with their id.",
            Query(quantile(0.5, duration, by=("path",)), "{{path}} path, median"),
            Query(quantile(0.95, duration, by=("path",)), "{{path}} path, p95", exemplars=True),
            rare=True,
            unit="s",
            colours=PATH_COLOURS,
            nothing="No scrub in this range",
        ),
        graph(
            "Steps of slow paths, p95",
            "Which step of a slow path takes the time?",
            Query(quantile(0.95, "scrubber_step_duration_seconds", _SLOW, by=("step",)), "{{step}}"),
            rare=True,
            unit="s",
            colours=STEP_COLOURS,
            nothing="No slow path in this range",
        ),
        graph(
            "Memory cleared and verified",
            "How much memory is cleared and read back, is any of it not read back, and how much held something?",
            Query(rate("scrubber_verified_bytes_total"), "cleared and verified"),
            Query(f"clamp_min({unread}, 0)", "cleared, not verified"),
            Query(rate("scrubber_residue_bytes_total"), "residue"),
            Query(
                rate("scrubber_unexplained_residue_bytes_total"),
                "unexplained residue",
            ),
            unit="binBps",
            colours={
                "cleared and verified": Colour.CLEAN,
                "cleared, not verified": Colour.SCRUBBING,
                "residue": Colour.DIRTY,
                "unexplained residue": Colour.QUARANTINED,
            },
        ),
        tally(
            "Leftovers and resets",
            "How often had something that outlived its pod to be ended, and how often a device to be reset?",
            Query(counted("scrubber_leftovers_ended_total", by=("act",)), "ended: {{act}}"),
            Query(counted("scrubber_resets_total", by=("outcome",)), "reset: {{outcome}}"),
            nothing="Nothing had to be ended or reset in this range",
        ),
        graph(
            "Erasers",
            "Are there enough erasers, or do scrubs wait for one?",
            Query(fold("sum", "scrubber_eraser_slots", by=("state",)), "{{state}}"),
            Query(fold("sum", "scrubber_erasers_waiting"), "scrubs that wait"),
            unit="none",
            decimals=0,
            stacked=True,
            colours={"busy": Colour.IN_USE, "free": Colour.CLEAN, "scrubs that wait": Colour.DIRTY},
        ),
    ]
