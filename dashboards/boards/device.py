"""One device: its states, its scrubs, what was proved of it, what it complained of, and why it is where it is."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.glance import NOT_VERIFIED, not_verified
from dashboards.frame import Board, Row, board
from dashboards.meaning import (
    HEALTH,
    HYGIENE,
    OFFERED,
    STATES,
    STEP_COLOURS,
    Colour,
    State,
    health,
    hygiene,
    mapping,
    numbered,
    one_number,
    verdicts,
)
from dashboards.panels import Column, Query, graph, listing, number, timeline
from dashboards.queries import ONE_DEVICE, each_time, fold, of

__all__ = ["device"]

_SLOW_CLEAR: Final = 0.7
"""Of its own week's rate; the alert speaks below it."""

_GLASS: Final = (State(51, "broken", Colour.CONDEMNED),)
_SIGNAL: Final = (State(1, "stands", Colour.SCRUBBING),)


def device() -> model.Dashboard:
    """The device that is picked."""
    return board(
        Board.DEVICE,
        "GPU scrubber / Device",
        "What did this device go through, what was proved of it, and can it be trusted?",
        [
            Row(None, _glance()),
            Row("States", _states()),
            Row("Scrubs", _scrubs()),
            Row("Health", _health()),
        ],
        since="now-24h",
        refresh="1m",
    )


def _glance() -> list[model.Panel]:
    out_since = of("scrubber_quarantine_start_timestamp_seconds", ONE_DEVICE)
    return [
        number(
            "State",
            "What is it doing at this moment?",
            numbered(STATES, ONE_DEVICE, by=("device",)),
            unit="none",
            span=4,
            mappings=[mapping(STATES)],
            filled=True,
        ),
        number(
            "To the kubelet",
            "Is it offered to new pods?",
            one_number("scrubber_device_offered", OFFERED, ONE_DEVICE, by=("device",)),
            unit="none",
            span=4,
            mappings=[mapping(OFFERED)],
        ),
        number(
            "Unused certificate, age",
            "How long ago was it proved clean for whoever comes next?",
            f"time() - max ({of('scrubber_certificate_issued_timestamp_seconds', ONE_DEVICE)})",
            unit="s",
            span=4,
            nothing="none",
        ),
        number(
            "Out of service for",
            "How long has it been out of service?",
            f"time() - min ({out_since})",
            unit="s",
            span=4,
            steps=((None, Colour.QUARANTINED),),
            nothing="in service",
        ),
        number(
            "Memory not verified",
            "Of how much of its memory was it not proved by the last slow path that it holds nothing? Only 0 % is green.",
            not_verified(ONE_DEVICE, by=("device",)),
            unit="percentunit",
            span=4,
            steps=NOT_VERIFIED,
            nothing="no slow path yet",
        ),
        number(
            "Clear rate, to its week",
            "Is its memory cleared as quickly as over its last week? Below 70 % twice in a row there is an alert.",
            fold("min", "device:scrubber_clear_rate:ratio_to_week", ONE_DEVICE),
            unit="percentunit",
            span=4,
            steps=((None, Colour.QUARANTINED), (_SLOW_CLEAR, Colour.SCRUBBING), (0.85, Colour.CLEAN)),
            decimals=0,
            nothing="no slow path yet",
        ),
    ]


def _states() -> list[model.Panel]:
    by = ("device",)
    glass = f"max by (device) ({of('scrubber_break_glass', ONE_DEVICE)}) + {_GLASS[0].number - 1}"
    return [
        timeline(
            "What it went through",
            "What was on its memory, could it be trusted, was it offered, and was its glass broken?",
            Query(numbered(HYGIENE, ONE_DEVICE, by=by), "hygiene"),
            Query(numbered(HEALTH, ONE_DEVICE, by=by), "health"),
            Query(one_number("scrubber_device_offered", OFFERED, ONE_DEVICE, by=by), "to the kubelet"),
            Query(glass, "break-glass"),
            mappings=[mapping((*HYGIENE, *HEALTH, *OFFERED, *_GLASS))],
        ),
        listing(
            "Why it is out of service",
            "What took it out, and what brings it back? (Which XID it was is below, under XIDs.)",
            f"time() - max by (instance, cause_class, way_back) "
            f"({of('scrubber_quarantine_start_timestamp_seconds', ONE_DEVICE)})",
            columns=[
                Column("instance", "Node"),
                Column("cause_class", "Cause"),
                Column("Value", "For", unit="s"),
                Column("way_back", "Way back"),
            ],
            span=12,
            height=5,
            nothing="It is in service",
        ),
        listing(
            "What it is",
            "Which device is this, and where is it?",
            f"max by (instance, index, model, hygiene, health) ({of('scrubber_device_state', ONE_DEVICE)} "
            f"* on (job, instance, device) group_left (index, model) {of('scrubber_device_info', ONE_DEVICE)})",
            columns=[
                Column("instance", "Node"),
                Column("index", "Index", width=60),
                Column("model", "Model", width=220),
                Column("hygiene", "Hygiene", width=110, mappings=[hygiene()]),
                Column("health", "Health", width=110, mappings=[health()], filled=True),
            ],
            span=12,
            height=5,
        ),
    ]


def _scrubs() -> list[model.Panel]:
    steps = of("scrubber_last_scrub_step_duration_seconds", ONE_DEVICE)
    rate = of("scrubber_clear_rate_bytes_per_second", ONE_DEVICE)
    return [
        graph(
            "Slow paths, step by step",
            "What did its slow paths spend their time on? (Each level stands until the next slow path.)",
            Query(f"max by (step) ({steps})", "{{step}}"),
            unit="s",
            stacked=True,
            height=10,
            span=16,
            colours=STEP_COLOURS,
            nothing="No slow path yet",
        ),
        listing(
            "The last slow path",
            "What did each step of its last slow path say?",
            f"max by (step, verdict) ({steps})",
            columns=[
                Column("step", "Step"),
                Column("verdict", "Verdict", width=130, mappings=[verdicts()]),
                Column("Value", "Took", unit="s", width=110),
            ],
            span=8,
            height=10,
            sort="Took",
            nothing="No slow path yet",
        ),
        graph(
            "Clear rate",
            "How quickly is its memory cleared? A device that becomes slow is often a device that becomes bad.",
            Query(f"max ({rate})", "last slow path"),
            unit="binBps",
            span=12,
            colours={"last slow path": Colour.IN_USE},
            nothing="No slow path yet",
        ),
        graph(
            "Memory not verified, over time",
            "Is all of its memory cleared and read back, each time? Then the line is at 0 %.",
            Query(not_verified(ONE_DEVICE, by=("device",)), "last slow path"),
            unit="percentunit",
            span=12,
            colours={"last slow path": Colour.PLAIN},
            nothing="No slow path yet",
        ),
    ]


def _health() -> list[model.Panel]:
    last = "scrubber_xid_last_seen_timestamp_seconds"
    return [
        timeline(
            "What was off",
            "Which signals stood, and for how long?",
            Query(fold("max", "scrubber_device_signal", ONE_DEVICE, by=("code",)), "{{code}}"),
            mappings=[mapping(_SIGNAL)],
            span=24,
            height=6,
            nothing="Nothing was off in this range",
        ),
        graph(
            "XIDs",
            "Which XIDs did its driver report, when, and how many? (Each is in one bar, the first of its number too.)",
            Query(each_time("scrubber_xids_total", last, ONE_DEVICE, by=("code",)), "XID {{code}}"),
            hue=Colour.QUARANTINED,
            points=120,
            unit="none",
            decimals=0,
            bars=True,
            stacked=True,
            span=16,
            colours={},
            nothing="No XID in this range",
        ),
        listing(
            "XIDs, last seen",
            "When was each XID seen for the last time?",
            f"time() - max by (code) ({of(last, ONE_DEVICE)})",
            columns=[
                Column("code", "XID"),
                Column("Value", "Ago", unit="s"),
            ],
            height=7,
            span=8,
            nothing="No XID since the service started",
        ),
    ]
