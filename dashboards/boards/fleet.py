"""The board of the fleet: safety of tenants' data, availability of devices, waiting starts, and links to details."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.summary import (
    ANSWER_P99_METRIC,
    DEVICE_STATE_METRIC,
    FAST_MATCHER,
    GRANT_P99_METRIC,
    GRANTED_MATCHER,
    HANDOVER_RATE_METRIC,
    SLOW_WAIT,
    alerts_panel,
    device_count_panel,
    fast_path_share_panel,
    out_of_service_panel,
    out_of_service_table,
    start_wait_panel,
    waiting_pods_table,
    waiting_starts_panel,
)
from dashboards.dashboard import DEVICE_LINK, NODE_LINK, DashboardName, Row, build_dashboard, node_series_link
from dashboards.panels import (
    CLUSTER_COLUMN,
    PanelColumn,
    Query,
    heat_map_panel,
    histogram_over_time_panel,
    stat_panel,
    table_panel,
    time_series_panel,
)
from dashboards.queries import (
    MAX_HEAT_MAP_NODES,
    MAX_ROWS,
    OUT_OF_SERVICE_MATCHER,
    aggregate,
    occurrences,
    or_zero,
    rate,
    ratio,
    recorded_per_minute,
    selector,
    series_count,
    top,
    with_most_problems,
    worst_nodes,
)
from dashboards.value_mappings import (
    STATE_COLOURS,
    Colour,
    State,
    below_zero_mapping,
    boolean_mapping,
    label_text,
    objective_mapping,
    severity_mapping,
    state_mapping,
)

__all__ = ["fleet_dashboard"]

_ZERO_IS_GOOD: Final = ((None, Colour.CLEAN), (1.0, Colour.QUARANTINED))
_ZERO_IS_USUAL: Final = ((None, Colour.CLEAN), (1.0, Colour.SCRUBBING))
_WAIT_THRESHOLDS: Final = ((None, Colour.CLEAN), (10.0, Colour.SCRUBBING), (SLOW_WAIT, Colour.QUARANTINED))
_OUT_OF_SERVICE_THRESHOLDS: Final = ((None, Colour.CLEAN), (0.001, Colour.SCRUBBING), (0.25, Colour.QUARANTINED))
_NODE: Final = PanelColumn("instance", "Node", width=150, link=NODE_LINK)
_DEVICE: Final = PanelColumn("device", "Device", link=DEVICE_LINK)


def fleet_dashboard() -> model.Dashboard:
    """Return the board of all nodes that the variables select."""
    return build_dashboard(
        DashboardName.FLEET,
        "GPU scrubber / Fleet",
        "Are GPUs clean when they are handed over, are they available, and which nodes have problems?",
        [
            Row(None, [*_summary(), alerts_panel(24, 7)]),
            Row("Devices", _devices()),
            Row("Hand-overs", _handovers()),
            Row("Service levels", _service_levels()),
            Row("Findings and quarantines", _findings()),
            Row("Policy and audit", _rules()),
        ],
        since="now-6h",
        refresh="1m",
    )


def _summary() -> list[model.Panel]:
    answering = f"count ({series_count('scrubber_build_info', by=('cluster', 'instance'))})"
    # Seen within the time range, and not up now: with every job selected, "up" alone would count other services'
    # targets.
    known = f"last_over_time({selector('scrubber_build_info')}[$__range])"
    known_plugins = f"last_over_time({selector('scrubber_plugin_build_info')}[$__range])"
    away = f"count ({selector('up')} == 0 and on (cluster, job, instance) ({known} or {known_plugins}))"
    return [
        stat_panel("Nodes", "On how many nodes does the service respond?", answering, unit="none"),
        stat_panel(
            "Daemons down",
            "How many services and plugins does Prometheus fail to scrape?",
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
            "How many bytes were found on devices that were proved clean and not granted since? Any value above 0 is an incident.",
            or_zero(
                occurrences("device:scrubber_unexplained_residue_bytes:total"), series_count("scrubber_build_info")
            ),
            unit="bytes",
            steps=_ZERO_IS_GOOD,
        ),
        stat_panel(
            "Unauthorized uses",
            "How often was a device used without a grant, within the time range?",
            or_zero(occurrences("device:scrubber_unauthorized_uses:total"), series_count("scrubber_build_info")),
            unit="none",
            decimals=0,
            steps=_ZERO_IS_GOOD,
        ),
        stat_panel(
            "Break-glass active",
            "How many devices bypass all checks because of a break-glass override?",
            or_zero(aggregate("sum", "scrubber_break_glass_active"), series_count(DEVICE_STATE_METRIC)),
            unit="none",
            steps=_ZERO_IS_GOOD,
        ),
        stat_panel(
            "Observe-only devices",
            "For how many devices is no hand-over refused, because their policy only observes? (One with a break-glass override is among them.)",
            aggregate("sum", "scrubber_devices", 'enforcement="observe"'),
            unit="none",
            steps=_ZERO_IS_USUAL,
        ),
        stat_panel(
            "Broken audit logs",
            "On how many nodes did the verification of the audit log fail?",
            or_zero(f"count ({selector('scrubber_audit_intact')} == 0)", series_count("scrubber_audit_intact")),
            unit="none",
            steps=_ZERO_IS_GOOD,
        ),
    ]


def _devices() -> list[model.Panel]:
    return [
        out_of_service_table(16, 7),
        waiting_pods_table(8, 7),
        time_series_panel(
            "Devices by state",
            "How many devices are in each state, and how does that change?",
            *(
                Query(aggregate("sum", "instance:scrubber_devices:by_state", f'state="{state}"'), label_text(state))
                for state in STATE_COLOURS
            ),
            unit="none",
            height=9,
            stacked=True,
            colours={label_text(state): colour for state, colour in STATE_COLOURS.items()},
        ),
        heat_map_panel(
            "Nodes with devices out of service",
            f"On which nodes was which share of the devices out of service, and did several nodes have that at the same time? (The "
            f"{MAX_HEAT_MAP_NODES} nodes with the largest shares in the time range. Click a cell to open the node's dashboard.)",
            Query(worst_nodes("instance:scrubber_devices_out_of_service:ratio"), "{{instance}} {{cluster}}"),
            unit="percentunit",
            span=8,
            decimals=1,
            steps=_OUT_OF_SERVICE_THRESHOLDS,
            link=node_series_link(),
            nothing="No device was out of service in this range",
        ),
        histogram_over_time_panel(
            "Waits of all starts",
            "How long did starts wait for a response, refusals included, and are a few of them slow or all? (Each row is a range of "
            "waits up to the number beside it. The stronger the colour, the more responses had such a wait within five minutes. The nodes "
            "with long waits are in the node overview.)",
            aggregate("sum", "instance_le:scrubber_handover_response:increase5m", by=("le",)),
            unit="s",
            span=8,
            nothing="No hand-over in this range",
        ),
        table_panel(
            "Node overview",
            f"Which nodes need attention? (The {MAX_ROWS} with the most problems: devices out of service, waiting starts, daemons that "
            "do not work. Click a node to open its dashboard; the picker there has all nodes.)",
            *map(with_most_problems, _node_overview()),
            columns=[
                CLUSTER_COLUMN,
                PanelColumn("instance", "Node", link=NODE_LINK),
                PanelColumn("Value #A", "Devices", unit="none"),
                PanelColumn("Value #B", "In use", unit="none"),
                PanelColumn(
                    "Value #C",
                    "Out of service",
                    unit="percentunit",
                    decimals=0,
                    steps=_OUT_OF_SERVICE_THRESHOLDS,
                ),
                PanelColumn("Value #D", "Waiting starts", unit="none"),
                PanelColumn(
                    "Value #E",
                    "Response p99, 5 min",
                    unit="s",
                    steps=_WAIT_THRESHOLDS,
                ),
                PanelColumn("Value #F", "Fast-path share, 5 min", unit="percentunit", decimals=0),
                PanelColumn("Value #G", "Ledger", unit="none", mappings=[boolean_mapping("ok", "failing")]),
                PanelColumn(
                    "Value #H", "Plugin", unit="none", mappings=[boolean_mapping("registered", "not registered")]
                ),
            ],
            height=8,
            sort="Out of service",
        ),
    ]


def _node_overview() -> list[str]:
    node = ("cluster", "instance")
    devices = series_count(DEVICE_STATE_METRIC, by=node)
    in_use = series_count(DEVICE_STATE_METRIC, 'hygiene="in-use"', by=node)
    # Not the recorded share: it would be one evaluation older than the number of devices beside it.
    out_of_service = series_count(DEVICE_STATE_METRIC, OUT_OF_SERVICE_MATCHER, by=node)
    return [
        devices,
        f"({or_zero(in_use, devices)})",
        ratio(out_of_service, devices),
        aggregate("sum", "scrubber_handovers_waiting", by=node),
        aggregate("max", ANSWER_P99_METRIC, by=node),
        aggregate("min", "instance:scrubber_handovers:fast_ratio5m", by=node),
        aggregate("min", "scrubber_ledger_ok", by=node),
        aggregate("min", "scrubber_plugin_registered", by=node),
    ]


def _handovers() -> list[model.Panel]:
    fast = aggregate("sum", HANDOVER_RATE_METRIC, GRANTED_MATCHER, FAST_MATCHER)
    return [
        time_series_panel(
            "Hand-overs per minute",
            "How many starts were granted their device, by path, and how many were refused?",
            Query(recorded_per_minute(HANDOVER_RATE_METRIC, GRANTED_MATCHER, by=("path",)), "{{path}} path"),
            Query(recorded_per_minute(HANDOVER_RATE_METRIC, 'outcome="refused"'), "refused"),
            unit="short",
            stacked=True,
        ),
        time_series_panel(
            "Fast-path share over time",
            "On what share of the grants was the device already proved clean when it was requested?",
            Query(ratio(fast, aggregate("sum", HANDOVER_RATE_METRIC, GRANTED_MATCHER)), "fleet"),
            Query(aggregate("min", "instance:scrubber_handovers:fast_ratio5m"), "lowest node"),
            rare=True,
            unit="percentunit",
            top=1,
            colours={"fleet": Colour.IN_USE, "lowest node": Colour.DIRTY},
            nothing="No hand-over in this range",
        ),
        time_series_panel(
            "Hand-over wait on the slowest node",
            "How long did starts of the last five minutes wait for their device, and how long for any response, including "
            "refusals? (The alert fires when the p99 of all responses stays above 20 s; a dashed line marks that value when "
            "waits come close to it.)",
            Query(aggregate("max", ANSWER_P99_METRIC), "all responses, p99 of 5 min"),
            Query(aggregate("max", GRANT_P99_METRIC), "granted, p99 of 5 min"),
            Query(aggregate("max", "instance:scrubber_handover_wait:p50_5m"), "granted, median of 5 min"),
            rare=True,
            unit="s",
            steps=((None, "transparent"), (SLOW_WAIT, Colour.QUARANTINED)),
            colours={
                "all responses, p99 of 5 min": Colour.NEUTRAL,
                "granted, p99 of 5 min": Colour.IN_USE,
                "granted, median of 5 min": Colour.CLEAN,
            },
            nothing="No hand-over in this range",
        ),
    ]


def _service_levels() -> list[model.Panel]:
    def burn_rate(window: str) -> str:
        bad, allowed = (
            f"sum by (slo) (avg_over_time({selector(f'instance:scrubber_slo_{each}:rate5m')}[{window}]))"
            for each in ("bad", "allowed")
        )
        return f"{bad} / ({allowed} > 0)"

    return [
        table_panel(
            "Error budgets",
            "How much of each error budget of the time range is left? (Missed: more than all of it was used; the burn rate says how fast.)",
            f"1 - {burn_rate('$__range')}",
            columns=[
                PanelColumn("slo", "Service level", mappings=[objective_mapping()]),
                PanelColumn(
                    "Value",
                    "Left",
                    unit="percentunit",
                    width=120,
                    decimals=0,
                    mappings=[below_zero_mapping("missed")],
                    steps=((None, Colour.QUARANTINED), (0.0, Colour.SCRUBBING), (0.25, Colour.CLEAN)),
                ),
            ],
            span=8,
            height=7,
            nothing="No hand-over and no scrub in this range",
        ),
        time_series_panel(
            "Burn rate of the error budgets",
            "How fast are the error budgets used up? (1, the dashed line: exactly as fast as the objective allows. Over one hour.)",
            Query(burn_rate("1h"), "{{slo}}"),
            rare=True,
            unit="none",
            span=16,
            steps=((None, "transparent"), (1.0, Colour.SCRUBBING)),
            colours={"handover": Colour.IN_USE, "scrub": Colour.PROBATION},
            nothing="No hand-over and no scrub in this range",
        ),
    ]


def _findings() -> list[model.Panel]:
    return [
        time_series_panel(
            "Residue",
            "How much data of earlier tenants do scrubs find, and is any of it on devices that should have been clean?",
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
            "How many scrubs end per minute, with which outcome?",
            Query(recorded_per_minute("instance:scrubber_scrubs:rate5m", by=("outcome",)), "{{outcome}}"),
            unit="short",
            stacked=True,
            nothing="No scrub in this range",
        ),
        table_panel(
            "Why devices went out of service",
            "Why did devices go out of service within the time range, and how often? (The XID is on the device's dashboard.)",
            f"{occurrences('instance:scrubber_quarantines:total', by=('cause_class',))} > 0",
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
            "What did scrubs and checks find within the time range? (The device of a fault is in the alert, in the log, and in its history.)",
            f"{occurrences('instance:scrubber_findings:total', by=('severity', 'step', 'code'))} > 0",
            columns=[
                PanelColumn("severity", "Severity", width=110, mappings=[severity_mapping()]),
                PanelColumn("step", "Step", width=120),
                PanelColumn("code", "Code"),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=100),
            ],
            span=10,
            height=8,
            sort="Severity",
            smallest_first=True,  # blocking, fault, note, warning
            nothing="Nothing was found in this range",
        ),
        table_panel(
            "Tenants with quarantines",
            "Which tenants had a device when it went out of service within the time range, and how often?",
            top(f"{occurrences('scrubber_tenant_quarantines_total', by=('cluster', 'tenant'))} > 0"),
            columns=[
                CLUSTER_COLUMN,
                PanelColumn("tenant", "Tenant's namespace"),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=80),
            ],
            span=5,
            height=8,
            sort="Times",
            nothing="No device of a tenant went out of service in this range",
        ),
        table_panel(
            "Unauthorized uses by node",
            "Which devices were used without a grant within the time range, on which nodes, and how?",
            top(
                f"{occurrences('device:scrubber_unauthorized_uses:total', by=('cluster', 'instance', 'device', 'use'))} > 0"
            ),
            columns=[
                CLUSTER_COLUMN,
                PanelColumn("instance", "Node", link=NODE_LINK),
                _DEVICE,
                PanelColumn("use", "Use", width=180),
                PanelColumn("Value", "Times", unit="none", decimals=0, width=80),
            ],
            span=9,
            height=8,
            sort="Times",
            nothing="No unauthorized use in this range",
        ),
    ]


def _rules() -> list[model.Panel]:
    ends = f"max by (cluster, instance, device) ({selector('scrubber_break_glass_expiry_timestamp_seconds')}) - time()"
    return [
        table_panel(
            "Break-glass overrides",
            "Which devices have a break-glass override, and when does it end?",
            top(ends),
            columns=[CLUSTER_COLUMN, _NODE, _DEVICE, PanelColumn("Value", "Ends in", unit="s", width=130)],
            span=12,
            height=6,
            nothing="No break-glass override is active",
        ),
        table_panel(
            "Yielded nodes",
            "Which nodes leave their GPU driver to others and hand over no GPU, at whose request, and for how long?",
            top(
                f"time() - min by (cluster, instance, requester) ({selector('scrubber_yield_start_timestamp_seconds')})"
            ),
            columns=[
                CLUSTER_COLUMN,
                _NODE,
                PanelColumn("requester", "Requested by"),
                PanelColumn("Value", "For", unit="s", width=130),
            ],
            span=12,
            height=6,
            nothing="No node is yielded",
        ),
        table_panel(
            "Devices held without a grant",
            "Which processes keep devices from being scrubbed, and for how long?",
            top(
                "time() - min by (cluster, instance, device, code, holder) "
                f"({selector('scrubber_device_held_start_timestamp_seconds')})"
            ),
            columns=[
                CLUSTER_COLUMN,
                _NODE,
                _DEVICE,
                PanelColumn("holder", "Pod or unit"),
                PanelColumn("code", "Finding", width=160),
                PanelColumn("Value", "For", unit="s", width=110),
            ],
            span=16,
            height=6,
            nothing="No device is held by a process without a grant",
        ),
        _booted(),
        table_panel(
            "Circuit breakers",
            "Which nodes have stopped recovering devices automatically, because too many went out of service at once?",
            top(f"max by (cluster, instance, breaker) ({selector('scrubber_breaker_open')}) == 1"),
            columns=[
                CLUSTER_COLUMN,
                PanelColumn("instance", "Node", link=NODE_LINK),
                PanelColumn("breaker", "Breaker", width=120),
                PanelColumn(
                    "Value",
                    "State",
                    unit="none",
                    width=100,
                    mappings=[state_mapping((State(1, "open", Colour.DIRTY),))],
                ),
            ],
            span=12,
            height=6,
            nothing="No circuit breaker is open",
        ),
        time_series_panel(
            "Devices by enforcement",
            "How many devices does the policy protect by refusing hand-overs, and how many does it only observe?",
            Query(aggregate("sum", "scrubber_devices", by=("enforcement",)), "{{enforcement}}"),
            unit="none",
            span=12,
            height=6,
            stacked=True,
            colours={"enforce": Colour.CLEAN, "observe": Colour.SCRUBBING},
        ),
        table_panel(
            "Policies",
            "Which policies are in force, on how many nodes, and where was a newer one rejected?",
            series_count("scrubber_policy_info", by=("policy", "digest")),
            f"sum by (policy, digest) ({selector('scrubber_policy_rejected')} "
            f"* on (cluster, job, instance) group_right () {selector('scrubber_policy_info')})",
            columns=[
                PanelColumn("policy", "Policy"),
                PanelColumn("digest", "Digest", width=140),
                PanelColumn("Value #A", "Nodes", unit="none", width=80),
                PanelColumn("Value #B", "Newer one rejected", unit="none", width=180, steps=_ZERO_IS_USUAL),
            ],
            span=12,
            height=5,
        ),
        table_panel(
            "Versions",
            "Which versions run, and on how many nodes?",
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
        time_series_panel(
            "Versions over time",
            "When was which version of the service, the plugin and the driver rolled out, and to how many nodes?",
            Query(
                series_count("scrubber_build_info", by=("version", "driver")), "service {{version}}, driver {{driver}}"
            ),
            Query(series_count("scrubber_plugin_build_info", by=("version",)), "plugin {{version}}"),
            unit="none",
            decimals=0,
            span=24,
            height=6,
            colours={},
        ),
        table_panel(
            "Audit log",
            f"Is each audit log intact, when was it last verified, and how many rows does it have? (The {MAX_ROWS} nodes whose audit log "
            "is broken, or has not been verified for the longest time. A hash is shown without leading zeros.)",
            *_audit_logs(),
            columns=[
                CLUSTER_COLUMN,
                _NODE,
                PanelColumn(
                    "Value #A", "Audit log", unit="none", width=100, mappings=[boolean_mapping("intact", "broken")]
                ),
                PanelColumn("Value #B", "Last verified, ago", unit="s", width=150),
                PanelColumn("Value #C", "Rows", unit="locale", width=120),
                PanelColumn("Value #D", "Last hash, first 32 bits", unit="hex", width=210),
                PanelColumn("key_id", "Signing key"),
            ],
            height=7,
            sort="Last verified, ago",
        ),
    ]


def _booted() -> model.Panel:
    """Return a table from node-exporter; it is empty where that is not scraped."""
    booted = selector("instance:scrubber_node_boot:timestamp_seconds")
    return table_panel(
        "Nodes booted last",
        "Which nodes were booted last? (From node-exporter. Nothing that was proved clean outlives a boot.)",
        f"bottomk({MAX_ROWS}, time() - max by (cluster, instance) ({booted}))",
        columns=[CLUSTER_COLUMN, _NODE, PanelColumn("Value", "Booted, ago", unit="s", width=130)],
        span=8,
        height=6,
        sort="Booted, ago",
        smallest_first=True,
        nothing="node-exporter is not scraped",
    )


def _audit_logs() -> list[str]:
    node = ("cluster", "instance")
    intact = aggregate("min", "scrubber_audit_intact", by=node)
    age = f"time() - max by (cluster, instance) ({selector('scrubber_audit_verified_timestamp_seconds')})"
    shown = top(f"({age}) + 1e9 * (1 - {intact})")
    return [
        f"{query} and on (cluster, instance) {shown}"
        for query in (
            intact,
            f"({age})",
            aggregate("max", "scrubber_audit_head_sequence", by=node),
            aggregate("max", "scrubber_audit_head_hash", 'part="0"', by=node),
            aggregate("max", "scrubber_signing_key_info", by=(*node, "key_id")),
        )
    ]
