"""Panels on the state of a node's two daemons: the lower half of the node board."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.panels import Query, event_count_panel, state_timeline_panel, time_series_panel
from dashboards.queries import aggregate, increase_per_step, per_minute, quantile
from dashboards.value_mappings import Colour, State, state_mapping

__all__ = ["plugin_panels", "service_panels"]

_LIGHT_AND_DARK: Final = {"median": "light-blue", "p99": "semi-dark-blue"}

_REGISTRATION: Final = (
    State(0, "not registered", Colour.QUARANTINED),
    State(1, "registered", Colour.CLEAN),
    State(2, "disconnected", Colour.QUARANTINED),
    State(3, "connected", Colour.CLEAN),
    State(4, "in use", Colour.CLEAN),
    State(5, "yielded", Colour.RECOVERING),
    State(6, "not paused", Colour.CLEAN),
    State(7, "paused", Colour.RECOVERING),
    State(8, "no driver", Colour.QUARANTINED),
)


def service_panels() -> list[model.Panel]:
    """Return panels on whether the service responds, stores changes, and keeps its child processes running."""
    commit = "scrubber_ledger_commit_duration_seconds"
    return [
        time_series_panel(
            "Calls to the service, p99",
            "How fast does the service respond, by method?",
            Query(quantile(0.99, "scrubber_rpc_duration_seconds", by=("method",)), "{{method}}"),
            rare=True,
            unit="s",
            colours={},
            nothing="No call in this range",
        ),
        time_series_panel(
            "Calls per minute by code",
            "How many calls does the service answer, and with which code?",
            Query(per_minute("scrubber_rpc_duration_seconds_count", by=("code",)), "{{code}}"),
            hue=Colour.QUARANTINED,
            unit="short",
            stacked=True,
            colours={"OK": Colour.CLEAN},
            nothing="No call in this range",
        ),
        time_series_panel(
            "Streams",
            "Which streams are open? The plugin's should be one of them.",
            Query(aggregate("sum", "scrubber_rpc_streams", by=("method",)), "{{method}}"),
            unit="none",
            decimals=0,
            colours={},
        ),
        time_series_panel(
            "Ledger commits",
            "How long does it take to store a decision? (Failures are under Other problems.)",
            Query(quantile(0.5, commit), "median"),
            Query(quantile(0.99, commit), "p99"),
            rare=True,
            unit="s",
            span=6,
            colours=_LIGHT_AND_DARK,
            nothing="Nothing was stored in this range",
        ),
        time_series_panel(
            "Ledger size",
            "How much disk space do the database and its write-ahead log take? (The log grows to about 16 MiB and is then "
            "overwritten from its beginning: growth up to that size is normal.)",
            Query(
                aggregate("sum", "scrubber_ledger_size_bytes", by=("cluster", "instance")), "{{instance}} {{cluster}}"
            ),
            unit="bytes",
            span=6,
            colours={},
        ),
        event_count_panel(
            "Child processes started",
            "Which child processes are started? Scrubs start erasers; resets start the driver and events children.",
            Query(increase_per_step("scrubber_child_process_starts_total", by=("child",)), "{{child}}"),
            Query(increase_per_step("scrubber_child_processes_abandoned_total"), "could not be killed"),
            span=6,
            colours={
                "driver": Colour.DIRTY,
                "events": "super-light-yellow",
                "walker": Colour.RECOVERING,
                "zygote": Colour.PROBATION,
                "eraser": Colour.IN_USE,
                "diagnosis": "super-light-blue",
                "nvidia-smi": Colour.CONDEMNED,
                "could not be killed": Colour.QUARANTINED,
            },
            nothing="No service was up in this range",
        ),
        event_count_panel(
            "Other problems",
            "Did the ledger fail, were devices used without a grant, did the kubelet restart, were log lines lost?",
            Query(increase_per_step("scrubber_ledger_failures_total"), "ledger failed"),
            Query(increase_per_step("scrubber_unauthorized_uses_total"), "unauthorized uses"),
            Query(increase_per_step("scrubber_kubelet_restarts_total"), "kubelet restarted"),
            Query(increase_per_step("scrubber_log_lines_lost_total"), "log lines lost, service"),
            Query(increase_per_step("scrubber_plugin_log_lines_lost_total"), "log lines lost, plugin"),
            span=6,
            colours={
                "ledger failed": Colour.QUARANTINED,
                "unauthorized uses": Colour.DIRTY,
                "kubelet restarted": Colour.IN_USE,
                "log lines lost, service": Colour.RECOVERING,
                "log lines lost, plugin": Colour.PROBATION,
            },
            nothing="No service was up in this range",
        ),
    ]


def plugin_panels() -> list[model.Panel]:
    """Return panels on whether the plugin is registered and responds, and what it reports."""
    registered = aggregate(
        "min",
        "scrubber_plugin_registered",
        by=("cluster", "instance", "resource"),
    )
    up = f"{aggregate('min', 'scrubber_plugin_service_up', by=('cluster', 'instance'))} + 2"
    yielded = f"{aggregate('max', 'scrubber_node_yielded', by=('cluster', 'instance'))} + 4"
    waiting = f"{aggregate('max', 'scrubber_waiting_for_driver', by=('cluster', 'instance'))} * 8 == 8"
    paused = f"({aggregate('max', 'scrubber_agent_pause_seconds', by=('cluster', 'instance'))} > bool 0) + 6"
    return [
        state_timeline_panel(
            "Registration",
            "Were the resources registered with the kubelet, was the plugin connected to the service, was the node "
            "yielded, and were agents paused for a reset?",
            Query(registered, "{{instance}} / {{resource}} {{cluster}}"),
            Query(up, "{{instance}} / service {{cluster}}"),
            Query(f"({waiting}) or ({yielded})", "{{instance}} / driver {{cluster}}"),
            Query(paused, "{{instance}} / agents {{cluster}}"),
            mappings=[state_mapping(_REGISTRATION)],
            span=16,
            height=7,
        ),
        time_series_panel(
            "Calls to the plugin, p99",
            "How fast does the plugin respond to the kubelet, by method?",
            Query(quantile(0.99, "scrubber_plugin_rpc_duration_seconds", by=("method",)), "{{method}}"),
            rare=True,
            unit="s",
            colours={},
            nothing="No call in this range",
        ),
        event_count_panel(
            "Registrations",
            "How often does the plugin register, how often does a registration end, and why? How often are agents paused?",
            Query(
                increase_per_step("scrubber_plugin_registrations_total", by=("mode", "outcome")),
                "by {{mode}}: {{outcome}}",
            ),
            Query(increase_per_step("scrubber_plugin_registration_ends_total", by=("reason",)), "ended: {{reason}}"),
            Query(increase_per_step("scrubber_plugin_service_outages_total"), "service disconnected"),
            Query(increase_per_step("scrubber_plugin_agent_pauses_total", 'outcome=~"paused|reset"'), "agents paused"),
            Query(
                increase_per_step("scrubber_plugin_agent_pauses_total", 'outcome="failed"'), "pause of agents failed"
            ),
            colours={
                "by classic: ok": Colour.CLEAN,
                "by watcher: ok": Colour.CLEAN,
                "service disconnected": Colour.QUARANTINED,
            },
            nothing="No plugin was up in this range",
        ),
        time_series_panel(
            "Devices advertised to the kubelet",
            "How many ids does the plugin advertise, by health? (Each share of a device is one.)",
            Query(aggregate("sum", "scrubber_plugin_devices", by=("health",)), "{{health}}"),
            unit="none",
            decimals=0,
            stacked=True,
        ),
        event_count_panel(
            "Starts refused by the gate",
            "With which code were container starts refused?",
            Query(increase_per_step("scrubber_plugin_handover_refusals_total", by=("code",)), "{{code}}"),
            nothing="No start was refused in this range",
        ),
        time_series_panel(
            "Streams to the kubelet",
            "Does the kubelet watch each resource?",
            Query(aggregate("sum", "scrubber_plugin_listandwatch_streams", by=("resource",)), "{{resource}}"),
            span=6,
            unit="none",
            decimals=0,
            colours={},
        ),
        event_count_panel(
            "ListAndWatch updates",
            "How often is a new list sent to the kubelet?",
            Query(increase_per_step("scrubber_plugin_listandwatch_updates_total", by=("resource",)), "{{resource}}"),
            span=6,
            nothing="No list was sent in this range",
        ),
        event_count_panel(
            "API server writes",
            "Do events, conditions, labels and evictions reach the API server?",
            Query(
                increase_per_step("scrubber_plugin_cluster_writes_total", by=("kind", "outcome")),
                "{{kind}}: {{outcome}}",
            ),
            span=6,
            nothing="Nothing was written: nothing changed, or the plugin has no credentials",
        ),
        event_count_panel(
            "Health events for NVSentinel",
            "Do the events of devices reach NVSentinel's platform connector on the node?",
            Query(increase_per_step("scrubber_plugin_health_events_total", by=("outcome",)), "{{outcome}}"),
            span=6,
            nothing="No event was sent: nothing changed, or --nvsentinel-socket is not set",
        ),
    ]
