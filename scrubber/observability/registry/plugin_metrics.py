"""The metrics of the plugin, a constant each. Loads nothing that the plugin does not have before it registers."""

from __future__ import annotations

from typing import Final

from scrubber.observability.registry.metric_declaration import (
    WAIT_BUCKETS,
    MetricDeclaration,
    MetricLabel,
    MetricType,
    declared_in,
)

_COUNTER, _GAUGE, _HISTOGRAM = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

_RESOURCE = MetricLabel("resource")

BUILD_INFO: Final = MetricDeclaration(
    "scrubber_plugin_build_info",
    _GAUGE,
    "1, labelled with the versions of the plugin and Python.",
    (MetricLabel("version"), MetricLabel("python")),
)
LOG_LINES_LOST: Final = MetricDeclaration(
    "scrubber_plugin_log_lines_lost_total", _COUNTER, "Log lines that could not be written."
)
SERVICE_UP: Final = MetricDeclaration("scrubber_plugin_service_up", _GAUGE, "1 while the scrub service is connected.")
SERVICE_OUTAGES: Final = MetricDeclaration(
    "scrubber_plugin_service_outages_total",
    _COUNTER,
    "Times that the plugin lost its connection to the scrub service.",
)
REGISTERED: Final = MetricDeclaration(
    "scrubber_plugin_registered", _GAUGE, "1 while the resource is registered with the kubelet.", (_RESOURCE,)
)
REGISTRATIONS: Final = MetricDeclaration(
    "scrubber_plugin_registrations_total",
    _COUNTER,
    "Attempts to register with the kubelet: ok once its stream is open, refused by it, or failed.",
    (
        _RESOURCE,
        MetricLabel("mode", ("watcher", "classic")),
        MetricLabel("outcome", ("ok", "refused", "failed")),
    ),
)
REGISTRATION_ENDS: Final = MetricDeclaration(
    "scrubber_plugin_registration_ends_total",
    _COUNTER,
    "Ended registrations and registration attempts, by reason.",
    (
        _RESOURCE,
        MetricLabel(
            "reason", ("stream-ended", "no-stream", "socket-removed", "kubelet-restarted", "watcher-did-not-call")
        ),
    ),
)
LISTANDWATCH_STREAMS: Final = MetricDeclaration(
    "scrubber_plugin_listandwatch_streams", _GAUGE, "Open ListAndWatch streams.", (_RESOURCE,)
)
LISTANDWATCH_UPDATES: Final = MetricDeclaration(
    "scrubber_plugin_listandwatch_updates_total",
    _COUNTER,
    "Device lists sent to the kubelet on ListAndWatch.",
    (_RESOURCE,),
)
DEVICES: Final = MetricDeclaration(
    "scrubber_plugin_devices",
    _GAUGE,
    "Ids of devices and shares advertised to the kubelet, by health.",
    (_RESOURCE, MetricLabel("health", ("healthy", "unhealthy"))),
)
RPC_DURATION: Final = MetricDeclaration(
    "scrubber_plugin_rpc_duration_seconds",
    _HISTOGRAM,
    "Duration of the kubelet's calls, by gRPC status.",
    (
        MetricLabel(
            "method",
            (
                *("GetDevicePluginOptions", "GetPreferredAllocation", "Allocate", "PreStartContainer"),
                *("GetInfo", "NotifyRegistrationStatus"),
                *("NodePrepareResources", "NodeUnprepareResources"),
            ),
        ),
        MetricLabel("code", remark="as gRPC names it"),
    ),
    WAIT_BUCKETS,
)
HANDOVER_REFUSALS: Final = MetricDeclaration(
    "scrubber_plugin_handover_refusals_total",
    _COUNTER,
    "Refused container starts, by the service's code; unavailable: the service did not answer.",
    (MetricLabel("code", remark="a [code](codes.md)"),),
)
CLUSTER_WRITES: Final = MetricDeclaration(
    "scrubber_plugin_cluster_writes_total",
    _COUNTER,
    "Writes to the API server, by kind of object and outcome.",
    (
        MetricLabel(
            "kind",
            (
                *("event", "condition", "label", "taint", "eviction", "lease", "gpu-reset"),
                *("resource-slice", "claim-status"),
            ),
        ),
        MetricLabel("outcome", ("ok", "failed")),
    ),
)
AGENT_PAUSES: Final = MetricDeclaration(
    "scrubber_plugin_agent_pauses_total",
    _COUNTER,
    "Pauses of monitoring agents for a reset: begun, failed, or restored at their end; and resets by NVSentinel.",
    (MetricLabel("outcome", ("paused", "reset", "failed", "restored")),),
)
HEALTH_EVENTS: Final = MetricDeclaration(
    "scrubber_plugin_health_events_total",
    _COUNTER,
    "Events for NVSentinel: sent, dropped because a newer state of the device replaced them, or failed attempts to send.",
    (MetricLabel("outcome", ("sent", "failed", "dropped")),),
)

PLUGIN_METRICS: Final = declared_in(globals())
"""All of them, by name."""
