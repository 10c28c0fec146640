"""The board of the fleet: safety of tenants' data, availability of devices, waiting starts, and links to details."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.summary import (
    ANSWER_P99_METRIC,
    DEVICE_STATE_METRIC,
    GRANTED_MATCHER,
    SLOW_WAIT,
    alerts_panel,
    device_count_panel,
    fast_path_share_panel,
    out_of_service_panel,
    start_wait_panel,
    waiting_starts_panel,
)
from dashboards.dashboard import DEVICE_LINK, NODE_LINK, DashboardName, Row, build_dashboard
from dashboards.panels import PanelColumn, Query, stat_panel, table_panel, time_series_panel
from dashboards.queries import aggregate, occurrences, or_zero, per_minute, rate, ratio, selector, series_count
from dashboards.value_mappings import (
    STATE_COLOURS,
    Colour,
    State,
    boolean_mapping,
    health_mapping,
    label_text,
    severity_mapping,
    state_mapping,
)

__all__ = ["fleet_dashboard"]

_ZERO_IS_GOOD: Final = ((None, Colour.CLEAN), (1.0, Colour.QUARANTINED))
_ZERO_IS_USUAL: Final = ((None, Colour.CLEAN), (1.0, Colour.SCRUBBING))
_WAIT_THRESHOLDS: Final = ((None, Colour.CLEAN), (10.0, Colour.SCRUBBING), (SLOW_WAIT, Colour.QUARANTINED))
_NODE: Final = PanelColumn("instance", "Node", width=150, link=NODE_LINK)
_DEVICE: Final = PanelColumn("device", "Device", link=DEVICE_LINK)


def fleet_dashboard() -> model.Dashboard:
    """Return the board of all nodes that the variables select."""
    return build_dashboard(
        DashboardName.FLEET,
        "GPU scrubber / Fleet",
        "Are GPUs clean when they change hands, are they available, and where is something off?",
        [
            Row(None, [*_summary(), alerts_panel(24, 7)]),
            Row("Devices", _devices()),
            Row("Hand-overs", _handovers()),
            Row("What was found", _findings()),
            Row("Rules and record", _rules()),
        ],
        since="now-6h",
        refresh="1m",
    )


def _summary() -> list[model.Panel]:
    answering = f"count ({series_count('scrubber_build_info', by=('instance',))})"
    # Seen within the time range, and not up now: with every job selected, "up" alone would count other services'
    # targets.
    known = f"last_over_time({selector('scrubber_build_info')}[$__range])"
    known_plugins = f"last_over_time({selector('scrubber_plugin_build_info')}[$__range])"
    away = f"count ({selector('up')} == 0 and on (job, instance) ({known} or {known_plugins}))"
    return [
        stat_panel("Nodes", "On how many nodes does the service answer?", answering, unit="none"),
        stat_panel(
            "Daemons away",
            "How many services and plugins that should answer Prometheus do not?",
            or_zero(away, series_count("scrubber_build_info")),
            unit="none",
            steps=_ZERO_IS_GOOD,
        ),
        device_count_panel(4),
        out_of_service_panel(4),
        waiting_starts_panel(4),
        start_wait_panel(4),
        fast_path_share_panel(4),
        stat_panel(
            "Unexplained residue",
            "How many bytes were found where nobody had been since the device was proved clean? Any is an incident.",
            occurrences("scrubber_unexplained_residue_bytes_total"),
            unit="bytes",
            steps=_ZERO_IS_GOOD,
        ),
        stat_panel(
            "Ungranted uses",
            "How often was a device used by somebody to whom it was not granted, within the time range?",
            occurrences("scrubber_unauthorized_uses_total"),
            unit="none",
            decimals=0,
            steps=_ZERO_IS_GOOD,
        ),
        stat_panel(
            "Break-glass open",
            "How many devices are handed out on a person's word, whatever is known of them?",
            or_zero(aggregate("sum", "scrubber_break_glass_active"), series_count(DEVICE_STATE_METRIC)),
            unit="none",
            steps=_ZERO_IS_GOOD,
        ),
        stat_panel(
            "Devices only observed",
            "How many devices are judged but never refused, because their policy observes?",
            aggregate("sum", "scrubber_devices", 'enforcement="observe"'),
            unit="none",
            steps=_ZERO_IS_USUAL,
        ),
        stat_panel(
            "Audit trails broken",
            "On how many nodes does the audit trail not add up?",
            or_zero(f"count ({selector('scrubber_audit_intact')} == 0)", series_count("scrubber_audit_intact")),
            unit="none",
            steps=_ZERO_IS_GOOD,
        ),
    ]


def _devices() -> list[model.Panel]:
    since = selector("scrubber_quarantine_start_timestamp_seconds")
    quarantined = f"time() - ({since} * on (job, instance, device) group_left (health) {selector(DEVICE_STATE_METRIC)})"
    return [
        time_series_panel(
            "Devices by state",
            "What are the devices doing, and how does that change?",
            *(
                Query(aggregate("sum", "instance:scrubber_devices:by_state", f'state="{state}"'), label_text(state))
                for state in STATE_COLOURS
            ),
            unit="none",
            stacked=True,
            colours={label_text(state): colour for state, colour in STATE_COLOURS.items()},
        ),
        table_panel(
            "Devices out of service",
            "Which devices are out of service, since when, why, and what brings each of them back? (Which XID it was is on "
            "the device's board.)",
            f"max by (instance, device, health, cause_class, recovery_method) ({quarantined})",
            columns=[
                _NODE,
                _DEVICE,
                PanelColumn("health", "State", width=110, mappings=[health_mapping()], filled=True),
                PanelColumn("cause_class", "Cause", width=170),
                PanelColumn("Value", "For", unit="s", width=110),
                PanelColumn("recovery_method", "Way back", width=90),
            ],
            span=16,
            height=7,
            sort="For",
            nothing="No device is out of service",
        ),
        table_panel(
            "Each node now",
            "Which node needs somebody? Click on one to see it.",
            series_count(DEVICE_STATE_METRIC, by=("instance",)),
            or_zero(
                series_count(DEVICE_STATE_METRIC, 'hygiene="in-use"', by=("instance",)),
                series_count(DEVICE_STATE_METRIC, by=("instance",)),
            ),
            aggregate("max", "instance:scrubber_devices_out_of_service:ratio", by=("instance",)),
            aggregate("sum", "scrubber_handovers_waiting", by=("instance",)),
            aggregate("max", ANSWER_P99_METRIC, by=("instance",)),
            aggregate("min", "instance:scrubber_handovers:fast_ratio5m", by=("instance",)),
            aggregate("min", "scrubber_ledger_ok", by=("instance",)),
            aggregate("min", "scrubber_plugin_registered", by=("instance",)),
            columns=[
                PanelColumn("instance", "Node", link=NODE_LINK),
                PanelColumn("Value #A", "Devices", unit="none"),
                PanelColumn("Value #B", "In use", unit="none"),
                PanelColumn(
                    "Value #C",
                    "Out of service",
                    unit="percentunit",
                    decimals=0,
                    steps=((None, Colour.CLEAN), (0.001, Colour.SCRUBBING), (0.25, Colour.QUARANTINED)),
                ),
                PanelColumn("Value #D", "Starts that wait", unit="none"),
                PanelColumn(
                    "Value #E",
                    "Answers, p99 of 5 min",
                    unit="s",
                    steps=_WAIT_THRESHOLDS,
                ),
                PanelColumn("Value #F", "Fast-path share, 5 min", unit="percentunit", decimals=0),
                PanelColumn("Value #G", "Ledger", unit="none", mappings=[boolean_mapping("stores", "does not store")]),
                PanelColumn(
                    "Value #H", "Plugin", unit="none", mappings=[boolean_mapping("registered", "not registered")]
                ),
            ],
            height=8,
            sort="Out of service",
        ),
    ]


def _handovers() -> list[model.Panel]:
    refused = 'outcome!="granted"'
    return [
        time_series_panel(
            "Hand-overs per minute",
            "How many starts got their device, by which path, and how many were refused?",
            Query(per_minute("scrubber_handovers_total", GRANTED_MATCHER, by=("path",)), "{{path}} path"),
            Query(per_minute("scrubber_handovers_total", refused), "refused"),
            unit="short",
            stacked=True,
        ),
        time_series_panel(
            "Fast-path share, over time",
            "Are devices proved clean before somebody asks for them, and on which share of the grants not?",
            Query(_fast_share(), "fleet"),
            Query(f"min ({_fast_share(by=('instance',))})", "lowest node"),
            rare=True,
            unit="percentunit",
            top=1,
            colours={"fleet": Colour.IN_USE, "lowest node": Colour.DIRTY},
            nothing="No hand-over in this range",
        ),
        time_series_panel(
            "Hand-over wait on the slowest node",
            "How long did starts of the last five minutes wait for their device, and how long for any answer, a refusal too? "
            "(The alert speaks when all answers stay above 20 s; a dashed line is there, once waits come near it.)",
            Query(aggregate("max", ANSWER_P99_METRIC), "all answers, p99 of 5 min"),
            Query(aggregate("max", "instance:scrubber_handover_wait:p99_5m"), "granted, p99 of 5 min"),
            Query(aggregate("max", "instance:scrubber_handover_wait:p50_5m"), "granted, median of 5 min"),
            rare=True,
            unit="s",
            steps=((None, "transparent"), (SLOW_WAIT, Colour.QUARANTINED)),
            colours={
                "all answers, p99 of 5 min": Colour.NEUTRAL,
                "granted, p99 of 5 min": Colour.IN_USE,
                "granted, median of 5 min": Colour.CLEAN,
            },
            nothing="No hand-over in this range",
        ),
    ]


def _fast_share(*, by: Sequence[str] = ()) -> str:
    name = "scrubber_handovers_total"
    return ratio(rate(name, GRANTED_MATCHER, 'path="fast"', by=by), rate(name, GRANTED_MATCHER, by=by))


def _findings() -> list[model.Panel]:
    return [
        time_series_panel(
            "Residue",
            "How much of earlier tenants' data do scrubs meet, and is any of it where nobody should have been?",
            Query(rate("scrubber_residue_bytes_total"), "found and cleared"),
            Query(
                rate("scrubber_unexplained_residue_bytes_total"),
                "unexplained",
            ),
            unit="binBps",
            colours={"found and cleared": Colour.INFO, "unexplained": Colour.QUARANTINED},
        ),
        time_series_panel(
            "Scrubs per minute",
            "How do scrubs end?",
            Query(per_minute("scrubber_scrubs_total", by=("outcome",)), "{{outcome}}"),
            unit="short",
            stacked=True,
            nothing="No scrub in this range",
        ),
        table_panel(
            "Why devices went out of service",
            "For which reasons were devices taken out within the time range, and how often? (Which XID is on the board of each "
            "device.)",
            f"{occurrences('scrubber_quarantines_total', by=('cause_class',))} > 0",
            columns=[
                PanelColumn("cause_class", "Cause"),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=100),
            ],
            span=8,
            height=7,
            sort="Times",
            nothing="No device went out of service in this range",
        ),
        table_panel(
            "Findings",
            "What did scrubs and checks find within the time range? (On which device: in the log, and in its history.)",
            f"{occurrences('scrubber_findings_total', by=('severity', 'step', 'code'))} > 0",
            columns=[
                PanelColumn("severity", "Severity", width=110, mappings=[severity_mapping()]),
                PanelColumn("step", "Step", width=120),
                PanelColumn("code", "Code"),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=100),
            ],
            span=12,
            height=8,
            sort="Times",
            nothing="Nothing was found in this range",
        ),
        table_panel(
            "Tenants whose devices went out",
            "In whose hands did devices go out of service within the time range, and how often?",
            f"{occurrences('scrubber_tenant_quarantines_total', by=('tenant',))} > 0",
            columns=[
                PanelColumn("tenant", "Tenant's namespace"),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=80),
            ],
            span=6,
            height=8,
            sort="Times",
            nothing="No tenant in this range",
        ),
        table_panel(
            "Ungranted uses, by node",
            "On which nodes were devices used without a grant within the time range, and how?",
            f"{occurrences('scrubber_unauthorized_uses_total', by=('instance', 'use'))} > 0",
            columns=[
                PanelColumn("instance", "Node", link=NODE_LINK),
                PanelColumn("use", "Use", width=150),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=80),
            ],
            span=6,
            height=8,
            sort="Times",
            nothing="None in this range",
        ),
    ]


def _rules() -> list[model.Panel]:
    ends = f"max by (instance, device) ({selector('scrubber_break_glass_expiry_timestamp_seconds')}) - time()"
    return [
        table_panel(
            "Break-glass",
            "Which devices are handed out on a person's word, and for how long still?",
            ends,
            columns=[_NODE, _DEVICE, PanelColumn("Value", "Ends in", unit="s", width=130)],
            span=12,
            height=6,
            nothing="No glass is broken",
        ),
        table_panel(
            "Breakers",
            "Which nodes recover no more devices by themselves, because too many went out at once?",
            f"max by (instance, breaker) ({selector('scrubber_breaker_open')}) == 1",
            columns=[
                PanelColumn("instance", "Node", link=NODE_LINK),
                PanelColumn("breaker", "Stopped", width=120),
                PanelColumn(
                    "Value",
                    "Breaker",
                    unit="none",
                    width=100,
                    mappings=[state_mapping((State(1, "open", Colour.DIRTY),))],
                ),
            ],
            span=6,
            height=6,
            nothing="No breaker is open",
        ),
        time_series_panel(
            "Devices by enforcement",
            "Are hand-overs refused where they have to be, or only observed?",
            Query(aggregate("sum", "scrubber_devices", by=("enforcement",)), "{{enforcement}}"),
            unit="none",
            span=6,
            height=6,
            stacked=True,
            colours={"enforce": Colour.CLEAN, "observe": Colour.SCRUBBING},
        ),
        table_panel(
            "Policies",
            "Which policies are in force, on how many nodes, and where was a newer one rejected?",
            series_count("scrubber_policy_info", by=("policy", "digest")),
            f"sum by (policy, digest) ({selector('scrubber_policy_rejected')} "
            f"* on (job, instance) group_right () {selector('scrubber_policy_info')})",
            columns=[
                PanelColumn("policy", "Policy"),
                PanelColumn("digest", "Digest", width=140),
                PanelColumn("Value #A", "Nodes", unit="none", width=80),
                PanelColumn("Value #B", "Rejected a newer one", unit="none", width=180, steps=_ZERO_IS_USUAL),
            ],
            span=12,
            height=5,
        ),
        table_panel(
            "Versions",
            "What runs on how many nodes?",
            series_count("scrubber_build_info", by=("version", "backend", "driver")),
            columns=[
                PanelColumn("version", "Version"),
                PanelColumn("backend", "Backend"),
                PanelColumn("driver", "Driver"),
                PanelColumn("Value", "Nodes", unit="none", width=80),
            ],
            span=12,
            height=5,
            sort="Nodes",
        ),
        table_panel(
            "Audit",
            "Does each node's audit trail add up, when was that last looked at, and how far does it reach?",
            aggregate("min", "scrubber_audit_intact", by=("instance",)),
            f"time() - max by (instance) ({selector('scrubber_audit_verified_timestamp_seconds')})",
            aggregate("max", "scrubber_audit_head_sequence", by=("instance",)),
            aggregate("max", "scrubber_audit_head_hash", 'part="0"', by=("instance",)),
            aggregate(
                "max",
                "scrubber_signing_key_info",
                by=("instance", "key_id"),
            ),
            columns=[
                _NODE,
                PanelColumn(
                    "Value #A", "Trail", unit="none", width=100, mappings=[boolean_mapping("intact", "broken")]
                ),
                PanelColumn("Value #B", "Last look, ago", unit="s", width=130),
                PanelColumn("Value #C", "Rows", unit="locale", width=120),
                PanelColumn("Value #D", "Hash of the last row, first 32 bits", unit="hex", width=210),
                PanelColumn("key_id", "Signing key"),
            ],
            height=7,
            sort="Last look, ago",
        ),
    ]
