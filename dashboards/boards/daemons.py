"""Whether the two daemons of a node are well: the lower half of the node's board."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.meaning import Colour, State, mapping
from dashboards.panels import Query, graph, timeline
from dashboards.queries import fold, per_minute, quantile

__all__ = ["plugin", "service"]

_LIGHT_AND_DARK: Final = {"median": "light-blue", "p99": "semi-dark-blue"}

_REGISTRATION: Final = (
    State(0, "not registered", Colour.QUARANTINED),
    State(1, "registered", Colour.CLEAN),
    State(2, "away", Colour.QUARANTINED),
    State(3, "answers", Colour.CLEAN),
)


def service() -> list[model.Panel]:
    """Does the service answer, store, and keep its children?"""
    commit = "scrubber_ledger_commit_duration_seconds"
    return [
        graph(
            "Calls to the service, p99",
            "How quickly does the service answer, by method?",
            Query(quantile(0.99, "scrubber_rpc_duration_seconds", by=("method",)), "{{method}}"),
            rare=True,
            unit="s",
            colours={},
            nothing="No call in this range",
        ),
        graph(
            "Calls per minute, by answer",
            "How many calls are answered, and with which code?",
            Query(per_minute("scrubber_rpc_duration_seconds_count", by=("code",)), "{{code}}"),
            hue=Colour.QUARANTINED,
            unit="short",
            stacked=True,
            colours={"OK": Colour.CLEAN},
            nothing="No call in this range",
        ),
        graph(
            "Streams",
            "Who watches: is the plugin's stream open?",
            Query(fold("sum", "scrubber_rpc_streams", by=("method",)), "{{method}}"),
            unit="none",
            decimals=0,
            colours={},
        ),
        graph(
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
        graph(
            "Ledger, size",
            "How much disk do the database and its log take?",
            Query(fold("sum", "scrubber_ledger_size_bytes", by=("instance",)), "{{instance}}"),
            unit="bytes",
            span=6,
            colours={},
        ),
        graph(
            "Children started per minute",
            "Which child processes are started? The driver's, the events' and the walker are restarts beyond the first.",
            Query(per_minute("scrubber_child_starts_total", by=("child",)), "{{child}}"),
            Query(per_minute("scrubber_children_abandoned_total"), "could not be ended"),
            unit="short",
            span=6,
            colours={"could not be ended": Colour.QUARANTINED},
        ),
        graph(
            "Other things that went wrong, per minute",
            "Did the ledger fail, were devices used without a grant, did the kubelet restart, were log lines lost?",
            Query(per_minute("scrubber_ledger_failures_total"), "ledger failed"),
            Query(per_minute("scrubber_ungranted_uses_total"), "ungranted uses"),
            Query(per_minute("scrubber_kubelet_restarts_total"), "kubelet restarted"),
            Query(per_minute("scrubber_log_lines_lost_total"), "log lines lost"),
            unit="short",
            span=6,
            colours={
                "ledger failed": Colour.QUARANTINED,
                "ungranted uses": Colour.DIRTY,
                "kubelet restarted": Colour.IN_USE,
                "log lines lost": Colour.RETURNING,
            },
        ),
    ]


def plugin() -> list[model.Panel]:
    """Is the plugin registered, does it answer, and what does it say?"""
    registered = fold(
        "min",
        "scrubber_plugin_registered",
        by=("instance", "resource"),
    )
    up = f"{fold('min', 'scrubber_plugin_service_up', by=('instance',))} + 2"
    return [
        timeline(
            "Registration",
            "Were the resources registered at the kubelet, and did the service answer the plugin?",
            Query(registered, "{{instance}} / {{resource}}"),
            Query(up, "{{instance}} / service"),
            mappings=[mapping(_REGISTRATION)],
            span=16,
            height=7,
        ),
        graph(
            "Calls to the plugin, p99",
            "How quickly does the plugin answer the kubelet, by method?",
            Query(quantile(0.99, "scrubber_plugin_rpc_duration_seconds", by=("method",)), "{{method}}"),
            rare=True,
            unit="s",
            colours={},
            nothing="No call in this range",
        ),
        graph(
            "Registrations per minute",
            "How often does the plugin register, how often does a registration end, and why?",
            Query(per_minute("scrubber_plugin_registrations_total", by=("way", "outcome")), "by {{way}}: {{outcome}}"),
            Query(per_minute("scrubber_plugin_registration_ends_total", by=("why",)), "ended: {{why}}"),
            Query(per_minute("scrubber_plugin_service_outages_total"), "service went away"),
            unit="short",
            colours={"service went away": Colour.QUARANTINED},
        ),
        graph(
            "Devices told to the kubelet",
            "How many ids does the kubelet know as healthy? (Each share of a device is one.)",
            Query(fold("sum", "scrubber_plugin_devices", by=("health",)), "{{health}}"),
            unit="none",
            decimals=0,
            stacked=True,
        ),
        graph(
            "Starts refused at the gate, per minute",
            "With which code were container starts refused?",
            Query(per_minute("scrubber_plugin_gate_refusals_total", by=("code",)), "{{code}}"),
            hue=Colour.DIRTY,
            unit="short",
            stacked=True,
            nothing="No start was refused in this range",
        ),
        graph(
            "Streams to the kubelet",
            "Does the kubelet listen to each resource?",
            Query(fold("sum", "scrubber_plugin_streams", by=("resource",)), "{{resource}}"),
            unit="none",
            decimals=0,
            colours={},
        ),
        graph(
            "Lists to the kubelet, per minute",
            "How often is the kubelet told something new?",
            Query(per_minute("scrubber_plugin_lists_sent_total", by=("resource",)), "{{resource}}"),
            unit="short",
            colours={},
            nothing="Nothing new to tell in this range",
        ),
        graph(
            "Words to the cluster, per minute",
            "Do events, conditions, labels and evictions reach the API server?",
            Query(per_minute("scrubber_plugin_cluster_writes_total", by=("what", "outcome")), "{{what}}: {{outcome}}"),
            unit="short",
            colours={},
            nothing="Nothing was written: there was nothing to say, or there are no credentials",
        ),
    ]
