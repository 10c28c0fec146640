"""The board of one device: its states, scrubs, certificates and errors, and the reasons for its current state."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.summary import UNVERIFIED_THRESHOLDS, unverified_share_query
from dashboards.dashboard import DashboardName, Row, build_dashboard
from dashboards.panels import PanelColumn, Query, stat_panel, state_timeline_panel, table_panel, time_series_panel
from dashboards.queries import DEVICE_MATCHER, aggregate, increase_by_timestamp, selector
from dashboards.value_mappings import (
    HEALTH,
    HYGIENE,
    OFFERED,
    STATES,
    STEP_COLOURS,
    Colour,
    State,
    binary_state_query,
    health_mapping,
    hygiene_mapping,
    state_mapping,
    state_number_query,
    verdict_mapping,
)

__all__ = ["device_dashboard"]

_SLOW_CLEAR: Final = 0.7
"""Fraction of the device's own rate over the week; the alert fires below it."""

_OVERRIDE_STATES: Final = (State(51, "broken", Colour.CONDEMNED),)
_SIGNAL_STATES: Final = (State(1, "stands", Colour.SCRUBBING),)


def device_dashboard() -> model.Dashboard:
    """Return the board of the selected device."""
    return build_dashboard(
        DashboardName.DEVICE,
        "GPU scrubber / Device",
        "What did this device go through, what was proved of it, and can it be trusted?",
        [
            Row(None, _summary()),
            Row("States", _states()),
            Row("Scrubs", _scrubs()),
            Row("Health", _health()),
        ],
        since="now-24h",
        refresh="1m",
    )


def _summary() -> list[model.Panel]:
    out_since = selector("scrubber_quarantine_start_timestamp_seconds", DEVICE_MATCHER)
    return [
        stat_panel(
            "State",
            "What is it doing at this moment?",
            state_number_query(STATES, DEVICE_MATCHER, by=("device",)),
            unit="none",
            span=4,
            mappings=[state_mapping(STATES)],
            filled=True,
        ),
        stat_panel(
            "To the kubelet",
            "Is it offered to new pods?",
            binary_state_query("scrubber_device_advertised", OFFERED, DEVICE_MATCHER, by=("device",)),
            unit="none",
            span=4,
            mappings=[state_mapping(OFFERED)],
        ),
        stat_panel(
            "Unused certificate, age",
            "How long ago was it proved clean for whoever comes next?",
            f"time() - max ({selector('scrubber_certificate_issued_timestamp_seconds', DEVICE_MATCHER)})",
            unit="s",
            span=4,
            nothing="none",
        ),
        stat_panel(
            "Out of service for",
            "How long has it been out of service?",
            f"time() - min ({out_since})",
            unit="s",
            span=4,
            steps=((None, Colour.QUARANTINED),),
            nothing="in service",
        ),
        stat_panel(
            "Memory not verified",
            "Of how much of its memory was it not proved by the last slow path that it holds nothing? Only 0 % is green.",
            unverified_share_query(DEVICE_MATCHER, by=("device",)),
            unit="percentunit",
            span=4,
            steps=UNVERIFIED_THRESHOLDS,
            nothing="no slow path yet",
        ),
        stat_panel(
            "Clear rate, to its week",
            "Is its memory cleared as quickly as over its last week? Below 70 % twice in a row there is an alert.",
            aggregate("min", "device:scrubber_clear_rate:ratio_to_week", DEVICE_MATCHER),
            unit="percentunit",
            span=4,
            steps=((None, Colour.QUARANTINED), (_SLOW_CLEAR, Colour.SCRUBBING), (0.85, Colour.CLEAN)),
            decimals=0,
            nothing="no slow path yet",
        ),
    ]


def _states() -> list[model.Panel]:
    by = ("device",)
    glass = f"max by (device) ({selector('scrubber_break_glass_active', DEVICE_MATCHER)}) + {_OVERRIDE_STATES[0].number - 1}"
    return [
        state_timeline_panel(
            "What it went through",
            "What was on its memory, could it be trusted, was it offered, and was its glass broken?",
            Query(state_number_query(HYGIENE, DEVICE_MATCHER, by=by), "hygiene"),
            Query(state_number_query(HEALTH, DEVICE_MATCHER, by=by), "health"),
            Query(binary_state_query("scrubber_device_advertised", OFFERED, DEVICE_MATCHER, by=by), "to the kubelet"),
            Query(glass, "break-glass"),
            mappings=[state_mapping((*HYGIENE, *HEALTH, *OFFERED, *_OVERRIDE_STATES))],
        ),
        table_panel(
            "Why it is out of service",
            "What took it out, and what brings it back? (Which XID it was is below, under XIDs.)",
            f"time() - max by (instance, cause_class, recovery_method) "
            f"({selector('scrubber_quarantine_start_timestamp_seconds', DEVICE_MATCHER)})",
            columns=[
                PanelColumn("instance", "Node"),
                PanelColumn("cause_class", "Cause"),
                PanelColumn("Value", "For", unit="s"),
                PanelColumn("recovery_method", "Way back"),
            ],
            span=12,
            height=5,
            nothing="It is in service",
        ),
        table_panel(
            "What it is",
            "Which device is this, and where is it?",
            f"max by (instance, index, model, hygiene, health) ({selector('scrubber_device_state', DEVICE_MATCHER)} "
            f"* on (job, instance, device) group_left (index, model) {selector('scrubber_device_info', DEVICE_MATCHER)})",
            columns=[
                PanelColumn("instance", "Node"),
                PanelColumn("index", "Index", width=60),
                PanelColumn("model", "Model", width=220),
                PanelColumn("hygiene", "Hygiene", width=110, mappings=[hygiene_mapping()]),
                PanelColumn("health", "Health", width=110, mappings=[health_mapping()], filled=True),
            ],
            span=12,
            height=5,
        ),
    ]


def _scrubs() -> list[model.Panel]:
    steps = selector("scrubber_last_scrub_step_duration_seconds", DEVICE_MATCHER)
    rate = selector("scrubber_clear_rate_bytes_per_second", DEVICE_MATCHER)
    return [
        time_series_panel(
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
        table_panel(
            "The last slow path",
            "What did each step of its last slow path say?",
            f"max by (step, verdict) ({steps})",
            columns=[
                PanelColumn("step", "Step"),
                PanelColumn("verdict", "Verdict", width=130, mappings=[verdict_mapping()]),
                PanelColumn("Value", "Took", unit="s", width=110),
            ],
            span=8,
            height=10,
            sort="Took",
            nothing="No slow path yet",
        ),
        time_series_panel(
            "Clear rate",
            "How quickly is its memory cleared? A device that becomes slow is often a device that becomes bad.",
            Query(f"max ({rate})", "last slow path"),
            unit="binBps",
            span=12,
            colours={"last slow path": Colour.IN_USE},
            nothing="No slow path yet",
        ),
        time_series_panel(
            "Memory not verified, over time",
            "Is all of its memory cleared and read back, each time? Then the line is at 0 %.",
            Query(unverified_share_query(DEVICE_MATCHER, by=("device",)), "last slow path"),
            unit="percentunit",
            span=12,
            colours={"last slow path": Colour.NEUTRAL},
            nothing="No slow path yet",
        ),
    ]


def _health() -> list[model.Panel]:
    last = "scrubber_xid_last_seen_timestamp_seconds"
    return [
        state_timeline_panel(
            "What was off",
            "Which signals stood, and for how long?",
            Query(aggregate("max", "scrubber_device_condition", DEVICE_MATCHER, by=("code",)), "{{code}}"),
            mappings=[state_mapping(_SIGNAL_STATES)],
            span=24,
            height=6,
            nothing="Nothing was off in this range",
        ),
        time_series_panel(
            "XIDs",
            "Which XIDs did its driver report, when, and how many? (Each is in one bar, the first of its number too.)",
            Query(increase_by_timestamp("scrubber_xids_total", last, DEVICE_MATCHER, by=("code",)), "XID {{code}}"),
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
        table_panel(
            "XIDs, last seen",
            "When was each XID seen for the last time?",
            f"time() - max by (code) ({selector(last, DEVICE_MATCHER)})",
            columns=[
                PanelColumn("code", "XID"),
                PanelColumn("Value", "Ago", unit="s"),
            ],
            height=7,
            span=8,
            nothing="No XID since the service started",
        ),
    ]
