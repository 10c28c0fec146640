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
    State(2, "away", Colour.QUARANTINED),
    State(3, "answers", Colour.CLEAN),
)


def service_panels() -> list[model.Panel]:
    """Return panels on whether the service responds, stores changes, and keeps its child processes running."""
    commit = "scrubber_ledger_commit_duration_seconds"
    return [
        time_series_panel(
            "Calls to the service, p99",
            "How quickly does the service answer, by method?",
            Query(quantile(0.99, "scrubber_rpc_duration_seconds", by=("method",)), "{{method}}"),
            rare=True,
            unit="s",
            colours={},
            nothing="No call in this range",
        ),
        time_series_panel(
            "Calls per minute, by answer",
            "How many calls are answered, and with which code?",
            Query(per_minute("scrubber_rpc_duration_seconds_count", by=("code",)), "{{code}}"),
            hue=Colour.QUARANTINED,
            unit="short",
            stacked=True,
            colours={"OK": Colour.CLEAN},
            nothing="No call in this range",
        ),
        time_series_panel(
            "Streams",
            "Who watches: is the plugin's stream open?",
            Query(aggregate("sum", "scrubber_rpc_streams", by=("method",)), "{{method}}"),
            unit="none",
            decimals=0,
            colours={},
        ),
        time_series_panel(
            "Ledger, commits",
            "How long does it take to store a decision, and does it ever fail?",
            Query(quantile(0.5, commit), "median"),
            Query(quantile(0.99, commit), "p99"),
            rare=True,
            unit="s",
            span=6,
            colours=_LIGHT_AND_DARK,
            nothing="Nothing was stored in this range",
        ),
        time_series_panel(
            "Ledger, size",
            "How much disk do the database and its log take? (The log grows to about 16 MiB and is then written over from its "
            "beginning: up to there a slope is no disk that fills.)",
            Query(aggregate("sum", "scrubber_ledger_size_bytes", by=("instance",)), "{{instance}}"),
            unit="bytes",
            span=6,
            colours={},
        ),
        event_count_panel(
            "Children started",
            "Which child processes are started? Erasers come with scrubs, the driver's and the events' with resets.",
            Query(increase_per_step("scrubber_child_process_starts_total", by=("child",)), "{{child}}"),
            Query(increase_per_step("scrubber_child_processes_abandoned_total"), "could not be ended"),
            span=6,
            colours={
                "driver": Colour.DIRTY,
                "events": "super-light-yellow",
                "walker": Colour.RECOVERING,
                "zygote": Colour.PROBATION,
                "eraser": Colour.IN_USE,
                "diagnosis": "super-light-blue",
                "could not be ended": Colour.QUARANTINED,
            },
            nothing="No service answered in this range",
        ),
        event_count_panel(
            "Other things that went wrong",
            "Did the ledger fail, were devices used without a grant, did the kubelet restart, were log lines lost?",
            Query(increase_per_step("scrubber_ledger_failures_total"), "ledger failed"),
            Query(increase_per_step("scrubber_unauthorized_uses_total"), "ungranted uses"),
            Query(increase_per_step("scrubber_kubelet_restarts_total"), "kubelet restarted"),
            Query(increase_per_step("scrubber_log_lines_lost_total"), "log lines lost, service"),
            Query(increase_per_step("scrubber_plugin_log_lines_lost_total"), "log lines lost, plugin"),
            span=6,
            colours={
                "ledger failed": Colour.QUARANTINED,
                "ungranted uses": Colour.DIRTY,
                "kubelet restarted": Colour.IN_USE,
                "log lines lost, service": Colour.RECOVERING,
                "log lines lost, plugin": Colour.PROBATION,
            },
            nothing="No service answered in this range",
        ),
    ]


def plugin_panels() -> list[model.Panel]:
    """Return panels on whether the plugin is registered and responds, and what it reports."""
    registered = aggregate(
        "min",
        "scrubber_plugin_registered",
        by=("instance", "resource"),
    )
    up = f"{aggregate('min', 'scrubber_plugin_service_up', by=('instance',))} + 2"
    return [
        state_timeline_panel(
            "Registration",
            "Were the resources registered at the kubelet, and did the service answer the plugin?",
            Query(registered, "{{instance}} / {{resource}}"),
            Query(up, "{{instance}} / service"),
            mappings=[state_mapping(_REGISTRATION)],
            span=16,
            height=7,
        ),
        time_series_panel(
            "Calls to the plugin, p99",
            "How quickly does the plugin answer the kubelet, by method?",
            Query(quantile(0.99, "scrubber_plugin_rpc_duration_seconds", by=("method",)), "{{method}}"),
            rare=True,
            unit="s",
            colours={},
            nothing="No call in this range",
        ),
        event_count_panel(
            "Registrations",
            "How often does the plugin register, how often does a registration end, and why?",
            Query(
                increase_per_step("scrubber_plugin_registrations_total", by=("mode", "outcome")),
                "by {{mode}}: {{outcome}}",
            ),
            Query(increase_per_step("scrubber_plugin_registration_ends_total", by=("reason",)), "ended: {{reason}}"),
            Query(increase_per_step("scrubber_plugin_service_outages_total"), "service went away"),
            colours={
                "by classic: ok": Colour.CLEAN,
                "by watcher: ok": Colour.CLEAN,
                "service went away": Colour.QUARANTINED,
            },
            nothing="No plugin answered in this range",
        ),
        time_series_panel(
            "Devices told to the kubelet",
            "How many ids does the kubelet know as healthy? (Each share of a device is one.)",
            Query(aggregate("sum", "scrubber_plugin_devices", by=("health",)), "{{health}}"),
            unit="none",
            decimals=0,
            stacked=True,
        ),
        event_count_panel(
            "Starts refused at the gate",
            "With which code were container starts refused?",
            Query(increase_per_step("scrubber_plugin_handover_refusals_total", by=("code",)), "{{code}}"),
            nothing="No start was refused in this range",
        ),
        time_series_panel(
            "Streams to the kubelet",
            "Does the kubelet listen to each resource?",
            Query(aggregate("sum", "scrubber_plugin_listandwatch_streams", by=("resource",)), "{{resource}}"),
            unit="none",
            decimals=0,
            colours={},
        ),
        event_count_panel(
            "Lists to the kubelet",
            "How often is the kubelet told something new?",
            Query(increase_per_step("scrubber_plugin_listandwatch_updates_total", by=("resource",)), "{{resource}}"),
            nothing="Nothing new to tell in this range",
        ),
        event_count_panel(
            "Words to the cluster",
            "Do events, conditions, labels and evictions reach the API server?",
            Query(
                increase_per_step("scrubber_plugin_cluster_writes_total", by=("kind", "outcome")),
                "{{kind}}: {{outcome}}",
            ),
            nothing="Nothing was written: there was nothing to say, or there are no credentials",
        ),
    ]
