"""The board of a node: the history of its devices, its scrubs and hand-overs, and the state of both daemons."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.daemons import plugin_panels, service_panels
from dashboards.boards.summary import (
    DEVICE_STATE_METRIC,
    GRANTED_MATCHER,
    HANDOVER_DURATION_METRIC,
    SLOW_WAIT,
    UNVERIFIED_THRESHOLDS,
    alerts_panel,
    device_count_panel,
    fast_path_share_panel,
    out_of_service_panel,
    out_of_service_table,
    start_wait_panel,
    unverified_share_query,
    waiting_pods_table,
    waiting_starts_panel,
)
from dashboards.dashboard import DEVICE_LINK, DashboardName, Row, build_dashboard, device_series_link
from dashboards.panels import (
    CLUSTER_COLUMN,
    PanelColumn,
    Query,
    event_count_panel,
    stat_panel,
    state_timeline_panel,
    table_panel,
    time_series_panel,
)
from dashboards.queries import (
    MAX_NODES,
    aggregate,
    increase_per_step,
    per_minute,
    quantile,
    rate,
    selector,
    with_most_problems,
)
from dashboards.value_mappings import (
    KIND_COLOURS,
    PATH_COLOURS,
    STATES,
    STEP_COLOURS,
    Colour,
    boolean_mapping,
    health_mapping,
    hygiene_mapping,
    state_mapping,
    state_number_query,
)

__all__ = ["node_dashboard"]

_SLOW: Final = 'path="slow"'


def node_dashboard() -> model.Dashboard:
    """Return the board of one or several selected nodes; the fleet board covers all of them."""
    return build_dashboard(
        DashboardName.NODE,
        "GPU scrubber / Node",
        "What happened to this node's devices, and are its service and its plugin healthy?",
        [
            Row(None, [*_summary(), alerts_panel(24, 7)]),
            Row("Devices", _devices()),
            Row("Hand-overs", _handovers()),
            Row("Scrubs", _scrubs()),
            Row("Scrub service", service_panels()),
            Row("Device plugin", plugin_panels()),
        ],
        since="now-3h",
        refresh="30s",
    )


def _summary() -> list[model.Panel]:
    return [
        device_count_panel(3),
        out_of_service_panel(3),
        waiting_starts_panel(3),
        start_wait_panel(3),
        fast_path_share_panel(3),
        _boolean_panel(
            "Plugin",
            "Is every resource registered with the kubelet?",
            "plugin_registered",
            "registered",
            "unregistered",
        ),
        _boolean_panel(
            "Ledger", "Does the ledger store decisions? While it does not, no start is granted.", "ledger_ok"
        ),
        _boolean_panel(
            "Kubelet's lists",
            "Are the kubelet's lists, of which pod has which device, trusted? While they are not, no device is taken as released.",
            "kubelet_trusted",
            "trusted",
            "untrusted",
        ),
    ]


def _boolean_panel(title: str, question: str, name: str, yes: str = "ok", no: str = "failing") -> model.Panel:
    return stat_panel(
        title,
        question,
        f"min ({selector(f'scrubber_{name}')})",
        unit="none",
        span=3,
        mappings=[boolean_mapping(yes, no)],
        size=30,
    )


def _devices() -> list[model.Panel]:
    states = f"({state_number_query(STATES)})"
    indexed = f"{states} * on (cluster, job, instance, device) group_left (index) {selector('scrubber_device_info')}"
    described = f"{selector(DEVICE_STATE_METRIC)} * on (cluster, job, instance, device) group_left (index, model) {selector('scrubber_device_info')}"
    node = ("cluster", "instance", "device")
    overview = (
        f"max by (cluster, instance, device, index, model, hygiene, health) ({described})",
        aggregate("max", "scrubber_device_advertised", by=node),
        f"(time() - max by (cluster, instance, device) ({selector('scrubber_certificate_issued_timestamp_seconds')}))",
        f"({unverified_share_query(by=node)})",
    )
    return [
        out_of_service_table(16, 6),
        waiting_pods_table(8, 6),
        state_timeline_panel(
            "Device states over time",
            "In which state was each device, and for how long? Out of service takes precedence over everything else. "
            f"(Of more than {MAX_NODES} nodes, those with the most problems.)",
            Query(
                f'label_join({with_most_problems(indexed, limit=MAX_NODES)}, "at", " / ", "instance", "index")',
                "{{at}} {{cluster}}",
            ),
            mappings=[state_mapping(STATES)],
            height=9,
            link=device_series_link(),
        ),
        table_panel(
            "Device overview",
            "Which devices does the node have, what is the state of each, and what was last proved of it? "
            f"(Of more than {MAX_NODES} nodes, those with the most problems.)",
            *(with_most_problems(query, limit=MAX_NODES) for query in overview),
            columns=[
                CLUSTER_COLUMN,
                PanelColumn("instance", "Node", width=140),
                PanelColumn("index", "Index", width=70),
                PanelColumn("device", "Device", width=400, link=DEVICE_LINK),
                PanelColumn("model", "Model"),
                PanelColumn("hygiene", "Hygiene", width=100, mappings=[hygiene_mapping()]),
                PanelColumn("health", "Health", width=110, mappings=[health_mapping()], filled=True),
                PanelColumn(
                    "Value #B",
                    "Kubelet",
                    unit="none",
                    width=120,
                    mappings=[boolean_mapping("advertised", "not advertised")],
                ),
                PanelColumn("Value #C", "Proved clean, ago", unit="s", width=150),
                PanelColumn(
                    "Value #D", "Unverified memory", unit="percentunit", width=150, steps=UNVERIFIED_THRESHOLDS
                ),
            ],
            height=11,
            sort="Index",
            smallest_first=True,
        ),
    ]


def _handovers() -> list[model.Panel]:
    return [
        time_series_panel(
            "Hand-overs per minute",
            "How many starts were granted their device, and with which code were the others refused?",
            Query(per_minute("scrubber_handovers_total", by=("outcome",)), "{{outcome}}"),
            hue=Colour.DIRTY,
            unit="short",
            stacked=True,
            nothing="No hand-over in this range",
        ),
        time_series_panel(
            "Hand-overs per minute by kind",
            "How was the container that was granted a device related to the previous one?",
            Query(per_minute("scrubber_handovers_total", GRANTED_MATCHER, by=("kind",)), "{{kind}}"),
            unit="short",
            stacked=True,
            colours=KIND_COLOURS,
            nothing="No device was handed over in this range",
        ),
        time_series_panel(
            "Hand-over wait",
            "How long do starts wait for their grant, by path, and how long for any response, including refusals? (The alert "
            "fires when the p99 of all responses in 5 minutes stays above 20 s; a dashed line marks that value when waits "
            "come close to it. Points are individual hand-overs.)",
            Query(quantile(0.99, HANDOVER_DURATION_METRIC, new=True), "all responses, p99", exemplars=True),
            Query(quantile(0.5, HANDOVER_DURATION_METRIC, GRANTED_MATCHER, by=("path",)), "{{path}} path, median"),
            Query(quantile(0.99, HANDOVER_DURATION_METRIC, GRANTED_MATCHER, by=("path",)), "{{path}} path, p99"),
            rare=True,
            unit="s",
            steps=((None, "transparent"), (SLOW_WAIT, Colour.QUARANTINED)),
            colours={**PATH_COLOURS, "all responses, p99": Colour.NEUTRAL},
            nothing="No hand-over in this range",
        ),
        time_series_panel(
            "Resource claims and jobs",
            "How many claims and jobs have devices, and do any wait to be released?",
            Query(aggregate("sum", "scrubber_claims", by=("state",)), "{{state}}"),
            Query(aggregate("sum", "scrubber_jobs", by=("state",)), "jobs, {{state}}"),
            unit="none",
            decimals=0,
            stacked=True,
            colours={
                "prepared": Colour.IN_USE,
                "releasing": Colour.DIRTY,
                "jobs, running": Colour.INFO,
                "jobs, ending": Colour.SCRUBBING,
            },
            span=24,
            height=6,
        ),
    ]


def _scrubs() -> list[model.Panel]:
    duration = "scrubber_scrub_duration_seconds"
    unread = f"{rate('scrubber_cleared_bytes_total')} - {rate('scrubber_verified_bytes_total')}"
    return [
        time_series_panel(
            "Scrubs per minute",
            "How many scrubs end per minute, by path and outcome?",
            Query(per_minute("scrubber_scrubs_total", by=("path", "outcome")), "{{path}}, {{outcome}}"),
            unit="short",
            stacked=True,
            colours={
                "fast, passed": "light-green",
                "slow, passed": "dark-green",
                "fast, blocked": "light-yellow",
                "slow, blocked": "dark-yellow",
                "fast, failed": "light-red",
                "slow, failed": "dark-red",
                "fast, abandoned": "light-orange",
                "slow, abandoned": "dark-orange",
            },
            nothing="No scrub in this range",
        ),
        time_series_panel(
            "Scrub duration",
            "How long do scrubs take? Points are individual scrubs with their id.",
            Query(quantile(0.5, duration, by=("path",)), "{{path}} path, median"),
            Query(quantile(0.95, duration, by=("path",)), "{{path}} path, p95", exemplars=True),
            rare=True,
            unit="s",
            colours=PATH_COLOURS,
            nothing="No scrub in this range",
        ),
        time_series_panel(
            "Slow-path step duration, p95",
            "Which step of the slow path takes the most time? Points are individual steps with the id of their scrub.",
            Query(quantile(0.95, "scrubber_step_duration_seconds", _SLOW, by=("step",)), "{{step}}", exemplars=True),
            rare=True,
            unit="s",
            colours=STEP_COLOURS,
            nothing="No slow path in this range",
        ),
        time_series_panel(
            "Memory cleared and verified",
            "How much memory is cleared and read back, is any of it not read back, and how much contained data?",
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
        event_count_panel(
            "Leftovers and resets",
            "How often were leftover processes killed, and how often were devices reset?",
            Query(increase_per_step("scrubber_kills_total", by=("target",)), "killed: {{target}}"),
            Query(increase_per_step("scrubber_resets_total", by=("outcome",)), "reset: {{outcome}}"),
            nothing="Nothing was killed or reset in this range",
        ),
        time_series_panel(
            "Erasers",
            "Are there enough erasers, or do scrubs wait for one?",
            Query(aggregate("sum", "scrubber_eraser_slots", by=("state",)), "{{state}}"),
            Query(aggregate("sum", "scrubber_eraser_queue_length"), "waiting scrubs"),
            unit="none",
            decimals=0,
            stacked=True,
            colours={"busy": Colour.IN_USE, "free": Colour.CLEAN, "waiting scrubs": Colour.DIRTY},
        ),
    ]
