"""The board of one device: its states, scrubs, certificates and errors, and the reasons for its current state."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.summary import UNVERIFIED_THRESHOLDS, unverified_share_query
from dashboards.dashboard import RECOVERY_LINK, DashboardName, Row, build_dashboard
from dashboards.panels import (
    CLUSTER_COLUMN,
    PanelColumn,
    Query,
    stat_panel,
    state_timeline_panel,
    table_panel,
    time_series_panel,
)
from dashboards.queries import DEVICE_MATCHER, aggregate, increase_by_timestamp, occurrences, selector
from dashboards.value_mappings import (
    ADVERTISEMENT,
    HEALTH,
    HYGIENE,
    STATES,
    STEP_COLOURS,
    Colour,
    State,
    binary_state_query,
    health_mapping,
    hygiene_mapping,
    recovery_mapping,
    state_mapping,
    state_number_query,
    verdict_mapping,
)

__all__ = ["device_dashboard"]

_SLOW_CLEAR: Final = 0.7
"""Fraction of the device's own rate over the week; the alert fires below it."""

_OVERRIDE_STATES: Final = (State(51, "active", Colour.CONDEMNED),)
_SIGNAL_STATES: Final = (State(1, "active", Colour.SCRUBBING),)


def device_dashboard() -> model.Dashboard:
    """Return the board of the selected device."""
    return build_dashboard(
        DashboardName.DEVICE,
        "GPU scrubber / Device",
        "What happened to this device, what was proved of it, and can it be trusted?",
        [
            Row(None, _summary()),
            Row("States", _states()),
            Row("Scrubs", _scrubs()),
            Row("Health", _health()),
            Row("Guarantees", _guarantees()),
            Row("DCGM exporter", _dcgm()),
        ],
        since="now-24h",
        refresh="1m",
    )


def _summary() -> list[model.Panel]:
    out_since = selector("scrubber_quarantine_start_timestamp_seconds", DEVICE_MATCHER)
    return [
        stat_panel(
            "State",
            "What is its current state?",
            state_number_query(STATES, DEVICE_MATCHER, by=("device",)),
            unit="none",
            span=4,
            mappings=[state_mapping(STATES)],
            filled=True,
        ),
        stat_panel(
            "Kubelet",
            "Is it advertised to the kubelet for new pods?",
            binary_state_query("scrubber_device_advertised", ADVERTISEMENT, DEVICE_MATCHER, by=("device",)),
            unit="none",
            span=4,
            mappings=[state_mapping(ADVERTISEMENT)],
        ),
        stat_panel(
            "Proved clean, ago",
            "How long ago was it proved clean for its next hand-over? (None: it is in use, or not clean.)",
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
            "Unverified memory",
            "What share of its memory did the last slow path not prove to be clear? Only 0 % is green.",
            unverified_share_query(DEVICE_MATCHER, by=("device",)),
            unit="percentunit",
            span=4,
            steps=UNVERIFIED_THRESHOLDS,
            nothing="no slow path yet",
        ),
        stat_panel(
            "Clear rate vs. last week",
            "Is its memory cleared as fast as during its last week? An alert fires when it is below 70 % twice in a row.",
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
            "States over time",
            "What was its hygiene and its health, was it advertised, and was a break-glass override active?",
            Query(state_number_query(HYGIENE, DEVICE_MATCHER, by=by), "hygiene"),
            Query(state_number_query(HEALTH, DEVICE_MATCHER, by=by), "health"),
            Query(binary_state_query("scrubber_device_advertised", ADVERTISEMENT, DEVICE_MATCHER, by=by), "kubelet"),
            Query(glass, "break-glass"),
            mappings=[state_mapping((*HYGIENE, *HEALTH, *ADVERTISEMENT, *_OVERRIDE_STATES))],
        ),
        table_panel(
            "Why it is out of service",
            "Why did it go out of service, and how does it recover? (Its XID is below, under XIDs. Orange: an operator has to act; a click opens the runbook for that.)",
            f"time() - max by (cluster, instance, cause_class, recovery_method) "
            f"({selector('scrubber_quarantine_start_timestamp_seconds', DEVICE_MATCHER)})",
            columns=[
                CLUSTER_COLUMN,
                PanelColumn("instance", "Node"),
                PanelColumn("cause_class", "Cause"),
                PanelColumn("Value", "For", unit="s"),
                PanelColumn("recovery_method", "Recovery", mappings=[recovery_mapping()], link=RECOVERY_LINK),
            ],
            span=12,
            height=5,
            nothing="It is in service",
        ),
        table_panel(
            "Identity",
            "Which device is this, and where is it?",
            f"max by (cluster, instance, index, model, hygiene, health) ({selector('scrubber_device_state', DEVICE_MATCHER)} "
            f"* on (cluster, job, instance, device) group_left (index, model) {selector('scrubber_device_info', DEVICE_MATCHER)})",
            columns=[
                CLUSTER_COLUMN,
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
            "Slow-path steps",
            "How long did each step of its slow paths take? (Each value remains until the next slow path.)",
            Query(f"max by (step) ({steps})", "{{step}}"),
            unit="s",
            stacked=True,
            height=10,
            span=16,
            colours=STEP_COLOURS,
            nothing="No slow path yet",
        ),
        table_panel(
            "Last slow path",
            "What was the verdict of each step of its last slow path?",
            f"max by (step, verdict) ({steps})",
            columns=[
                PanelColumn("step", "Step"),
                PanelColumn("verdict", "Verdict", width=130, mappings=[verdict_mapping()]),
                PanelColumn("Value", "Duration", unit="s", width=110),
            ],
            span=8,
            height=10,
            sort="Duration",
            nothing="No slow path yet",
        ),
        time_series_panel(
            "Clear rate",
            "How fast is its memory cleared? A device that becomes slow often becomes faulty.",
            Query(f"max ({rate})", "last slow path"),
            unit="binBps",
            span=12,
            colours={"last slow path": Colour.IN_USE},
            nothing="No slow path yet",
        ),
        time_series_panel(
            "Unverified memory over time",
            "Is all of its memory cleared and read back each time? The line is then at 0 %.",
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
            "Active signals",
            "Which signals were active, and for how long?",
            Query(aggregate("max", "scrubber_device_condition", DEVICE_MATCHER, by=("code",)), "{{code}}"),
            mappings=[state_mapping(_SIGNAL_STATES)],
            span=24,
            height=6,
            nothing="No signal was active in this range",
        ),
        time_series_panel(
            "XIDs",
            "Which XIDs did its driver report, when, and how many? (Each is in exactly one bar, including the first of its number.)",
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
            "When was each XID last seen?",
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


def _guarantees() -> list[model.Panel]:
    """Return the panels on the events that fire the alerts about broken guarantees."""
    return [
        stat_panel(
            title,
            question,
            occurrences(metric, DEVICE_MATCHER),
            unit=unit,
            span=8,
            decimals=0,
            steps=((None, Colour.CLEAN), (1.0, Colour.QUARANTINED)),
        )
        for title, question, metric, unit in (
            (
                "Unauthorized uses",
                "How often was it used without a grant within the time range? (Reported once a minute while it lasts.)",
                "scrubber_unauthorized_uses_total",
                "none",
            ),
            (
                "Failed verifications",
                "After how many scrubs within the time range did it not read back as zeros?",
                "scrubber_failed_verifications_total",
                "none",
            ),
            (
                "Unexplained residue",
                "How many bytes were found on it within the time range although it was proved clean and not granted since?",
                "scrubber_unexplained_residue_bytes_total",
                "bytes",
            ),
        )
    ]


def _dcgm() -> list[model.Panel]:
    """Return panels on the series of DCGM exporter; they are empty where it is not scraped."""
    absent = "No DCGM exporter has this device"
    return [
        time_series_panel(
            "Temperature",
            "How hot was the device?",
            Query(aggregate("max", "device:scrubber_dcgm_temperature:celsius", DEVICE_MATCHER), "temperature"),
            unit="celsius",
            colours={"temperature": Colour.DIRTY},
            nothing=absent,
        ),
        time_series_panel(
            "Utilization",
            "How busy was the device, also while no pod should have used it?",
            Query(aggregate("max", "device:scrubber_dcgm_utilization:ratio", DEVICE_MATCHER), "utilization"),
            unit="percentunit",
            top=1,
            colours={"utilization": Colour.IN_USE},
            nothing=absent,
        ),
        stat_panel(
            "Last XID of DCGM",
            "Which XID did DCGM see last, and does the service know of it?",
            aggregate("max", "device:scrubber_dcgm_last_xid:code", DEVICE_MATCHER),
            unit="none",
            span=4,
            height=7,
            nothing="no exporter",
        ),
        stat_panel(
            "Uncorrected ECC errors",
            "How many uncorrected memory errors has DCGM counted since the driver was loaded?",
            aggregate("max", "device:scrubber_dcgm_uncorrected_ecc_errors:count", DEVICE_MATCHER),
            unit="none",
            span=4,
            height=7,
            steps=((None, Colour.CLEAN), (1.0, Colour.QUARANTINED)),
            nothing="no exporter",
        ),
    ]
