"""The metrics of the service, a constant each."""

from __future__ import annotations

from typing import Final

from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import FindingCode, Outcome, PathKind, ScrubTrigger, Severity, Step, Verdict
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.policy import Enforcement
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from scrubber.domain.usage import UseKind
from scrubber.observability.registry.metric_declaration import (
    DURATION_BUCKETS,
    WAIT_BUCKETS,
    MetricDeclaration,
    MetricLabel,
    MetricType,
    declared_in,
)

_COUNTER, _GAUGE, _HISTOGRAM = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

_DEVICE = MetricLabel("device")
_PATH = MetricLabel("path", tuple(PathKind))
_STEP = MetricLabel("step", tuple(Step))
_VERDICT = MetricLabel("verdict", tuple(Verdict))
_TRIGGER = MetricLabel("trigger", tuple(ScrubTrigger))
_SCRUB_OUTCOME = MetricLabel("outcome", tuple(Outcome))
_HANDOVER_OUTCOME = MetricLabel("outcome", remark="granted, or the [code](codes.md) of the refusal")
_CAUSE_CLASS = MetricLabel("cause_class", remark="a code of [health](health.md), xid, operator")
_RPC_SERVICE, _RPC_METHOD = MetricLabel("service"), MetricLabel("method")

# -- the build, and the service itself --------------------------------------------------------------------------------

BUILD_INFO: Final = MetricDeclaration(
    "scrubber_build_info",
    _GAUGE,
    "1, labelled with the versions of the service, its backend, the driver and Python.",
    (MetricLabel("version"), MetricLabel("backend"), MetricLabel("driver"), MetricLabel("python")),
)
NODE_YIELDED: Final = MetricDeclaration(
    "scrubber_node_yielded",
    _GAUGE,
    "1 while the node is yielded: the driver is closed, and every device is withheld.",
)
WAITING_FOR_DRIVER: Final = MetricDeclaration(
    "scrubber_waiting_for_driver",
    _GAUGE,
    "1 while the service, which has been started, waits for the driver to answer: no device is known yet.",
)
YIELD_START: Final = MetricDeclaration(
    "scrubber_yield_start_timestamp_seconds",
    _GAUGE,
    "Time at which the operators, or the first of the plugins, requested that the node be yielded; absent without a request.",
    (MetricLabel("requester", tuple(YieldRequester)),),
)
AGENT_PAUSE: Final = MetricDeclaration(
    "scrubber_agent_pause_seconds",
    _GAUGE,
    "Seconds since agents of the node were paused for a reset, until they are restored; 0 while there is no pause.",
)
POLICY_INFO: Final = MetricDeclaration(
    "scrubber_policy_info",
    _GAUGE,
    "1 for the policy in force, labelled with its name and digest.",
    (MetricLabel("policy"), MetricLabel("digest", remark="12 digits")),
)
POLICY_REJECTED: Final = MetricDeclaration(
    "scrubber_policy_rejected",
    _GAUGE,
    "1 while the policy file is rejected and the previous policy stays in force.",
)
BREAKER_OPEN: Final = MetricDeclaration(
    "scrubber_breaker_open",
    _GAUGE,
    "1 while the node's circuit breaker is open: for resets by recoveries, or for quarantines on soft signals. Updated "
    "every 5 s.",
    (MetricLabel("breaker", ("resets", "soft-quarantines")),),
)
LOG_LINES_LOST: Final = MetricDeclaration(
    "scrubber_log_lines_lost_total", _COUNTER, "Log lines that could not be written."
)
CHILD_PROCESS_STARTS: Final = MetricDeclaration(
    "scrubber_child_process_starts_total",
    _COUNTER,
    "Child processes started, including replacements.",
    (MetricLabel("child", ("driver", "events", "walker", "zygote", "eraser", "diagnosis", "nvidia-smi")),),
)
CHILD_PROCESSES_ABANDONED: Final = MetricDeclaration(
    "scrubber_child_processes_abandoned_total", _COUNTER, "Child processes that did not end in time after SIGKILL."
)
KUBELET_TRUSTED: Final = MetricDeclaration(
    "scrubber_kubelet_trusted",
    _GAUGE,
    "1 while the kubelet's lists of pods are trusted; 0 also while the service has no driver, and does not read them.",
)
KUBELET_RESTARTS: Final = MetricDeclaration(
    "scrubber_kubelet_restarts_total", _COUNTER, "Restarts of the kubelet that the service detected."
)

# -- the ledger, the audit log and the key ----------------------------------------------------------------------------

LEDGER_OK: Final = MetricDeclaration("scrubber_ledger_ok", _GAUGE, "1 while the ledger can be written, else 0.")
LEDGER_SIZE: Final = MetricDeclaration(
    "scrubber_ledger_size_bytes", _GAUGE, "Size of the ledger's database and its write-ahead log."
)
LEDGER_COMMIT_DURATION: Final = MetricDeclaration(
    "scrubber_ledger_commit_duration_seconds",
    _HISTOGRAM,
    "Duration of ledger commits, including the wait for the ledger's thread.",
    buckets=DURATION_BUCKETS,
)
LEDGER_FAILURES: Final = MetricDeclaration("scrubber_ledger_failures_total", _COUNTER, "Ledger commits that failed.")
AUDIT_HEAD_SEQUENCE: Final = MetricDeclaration(
    "scrubber_audit_head_sequence", _GAUGE, "Sequence of the last row of the audit log."
)
AUDIT_HEAD_HASH: Final = MetricDeclaration(
    "scrubber_audit_head_hash",
    _GAUGE,
    "SHA-256 of the last row of the audit log, in eight parts of 32 bits; part 0 is the most significant.",
    (MetricLabel("part"),),
)
AUDIT_INTACT: Final = MetricDeclaration(
    "scrubber_audit_intact", _GAUGE, "1 if the whole audit log was intact at its last verification, else 0."
)
AUDIT_VERIFIED: Final = MetricDeclaration(
    "scrubber_audit_verified_timestamp_seconds", _GAUGE, "Time of the last verification of the audit log."
)
SIGNING_KEY_INFO: Final = MetricDeclaration(
    "scrubber_signing_key_info",
    _GAUGE,
    "1 for the key that signs certificates, labelled with its id.",
    (MetricLabel("key_id"),),
)

# -- calls on the sockets ---------------------------------------------------------------------------------------------

RPC_DURATION: Final = MetricDeclaration(
    "scrubber_rpc_duration_seconds",
    _HISTOGRAM,
    "Duration of calls on the service's sockets, without watch streams.",
    (_RPC_SERVICE, _RPC_METHOD, MetricLabel("code", remark="as gRPC names it")),
    DURATION_BUCKETS,
)
RPC_STREAMS: Final = MetricDeclaration(
    "scrubber_rpc_streams", _GAUGE, "Open watch streams on the service's sockets.", (_RPC_SERVICE, _RPC_METHOD)
)

# -- hand-overs -------------------------------------------------------------------------------------------------------

HANDOVERS: Final = MetricDeclaration(
    "scrubber_handovers_total",
    _COUNTER,
    "Hand-overs, by outcome: granted, or the code of the refusal.",
    (MetricLabel("kind", tuple(HandOverKind)), MetricLabel("path", (*PathKind, "none")), _HANDOVER_OUTCOME),
)
HANDOVER_DURATION: Final = MetricDeclaration(
    "scrubber_handover_duration_seconds",
    _HISTOGRAM,
    "Time a container start waited for each device, until the grant or the refusal.",
    (MetricLabel("path", (*PathKind, "none")), _HANDOVER_OUTCOME),
    WAIT_BUCKETS,
)
HANDOVERS_WAITING: Final = MetricDeclaration(
    "scrubber_handovers_waiting", _GAUGE, "Container starts and claims waiting for a hand-over."
)

# -- scrubs -----------------------------------------------------------------------------------------------------------

SCRUBS: Final = MetricDeclaration(
    "scrubber_scrubs_total", _COUNTER, "Finished scrubs, by outcome.", (_PATH, _TRIGGER, _SCRUB_OUTCOME)
)
SCRUB_DURATION: Final = MetricDeclaration(
    "scrubber_scrub_duration_seconds",
    _HISTOGRAM,
    "Duration of scrubs.",
    (_PATH, _TRIGGER, _SCRUB_OUTCOME),
    DURATION_BUCKETS,
)
STEP_DURATION: Final = MetricDeclaration(
    "scrubber_step_duration_seconds",
    _HISTOGRAM,
    "Duration of scrub steps, including those of a hand-over's fast path.",
    (_STEP, _PATH, _VERDICT),
    DURATION_BUCKETS,
)
FINDINGS: Final = MetricDeclaration(
    "scrubber_findings_total",
    _COUNTER,
    "Findings of scrub steps, by code; all XIDs share one code.",
    (_STEP, MetricLabel("severity", tuple(Severity)), MetricLabel("code", remark="a [code](codes.md), xid for XIDs")),
)
CLEARED_BYTES: Final = MetricDeclaration(
    "scrubber_cleared_bytes_total", _COUNTER, "Bytes of device memory cleared by scrubs."
)
VERIFIED_BYTES: Final = MetricDeclaration(
    "scrubber_verified_bytes_total", _COUNTER, "Bytes of device memory that scrubs read back and found clear."
)
RESIDUE_BYTES: Final = MetricDeclaration(
    "scrubber_residue_bytes_total",
    _COUNTER,
    "Bytes of earlier tenants' data that scrubs counted before they cleared them.",
)
UNEXPLAINED_RESIDUE_BYTES: Final = MetricDeclaration(
    "scrubber_unexplained_residue_bytes_total",
    _COUNTER,
    "Bytes of residue on devices that had a certificate and no grant since, by device.",
    (_DEVICE,),
)
FAILED_VERIFICATIONS: Final = MetricDeclaration(
    "scrubber_failed_verifications_total",
    _COUNTER,
    "Scrubs after which memory, shared memory or registers did not read back as zeros, by device.",
    (_DEVICE, MetricLabel("code", (FindingCode.VERIFICATION_FAILED, FindingCode.ON_CHIP_FAILED))),
)
KILLS: Final = MetricDeclaration(
    "scrubber_kills_total",
    _COUNTER,
    "Kills by target: leftover processes, leftover pods, processes that used a device without a grant or that could not be "
    "inspected, and orphaned erasers.",
    (
        MetricLabel(
            "target",
            ("leftover-process", "leftover-pod", "unauthorized-process", "uninspected-process", "orphaned-eraser"),
        ),
    ),
)
RESETS: Final = MetricDeclaration(
    "scrubber_resets_total",
    _COUNTER,
    "Device resets during scrubs, by method and outcome.",
    (
        MetricLabel("method", ("nvidia-smi", "sim")),
        MetricLabel(
            "outcome",
            (
                "ok",
                FindingCode.RESET_FAILED,
                FindingCode.RESET_UNAVAILABLE,
                FindingCode.DEVICE_BUSY,
                FindingCode.AGENT_PAUSE_FAILED,
                FindingCode.SCRUB_TIMEOUT,
                ErrorCode.UNAVAILABLE,
            ),
        ),
    ),
)
ERASER_SLOTS: Final = MetricDeclaration(
    "scrubber_eraser_slots",
    _GAUGE,
    "Slots of the eraser pool, by state. Free ones: how many more devices of the node could be cleared now.",
    (MetricLabel("state", ("busy", "free")),),
)
ERASER_QUEUE_LENGTH: Final = MetricDeclaration(
    "scrubber_eraser_queue_length", _GAUGE, "Scrubs waiting for an eraser slot."
)

# -- quarantines and unauthorized use ---------------------------------------------------------------------------------

QUARANTINES: Final = MetricDeclaration(
    "scrubber_quarantines_total", _COUNTER, "Quarantines of devices, by cause.", (_CAUSE_CLASS,)
)
TENANT_QUARANTINES: Final = MetricDeclaration(
    "scrubber_tenant_quarantines_total",
    _COUNTER,
    "Quarantines of devices while a tenant had them, by tenant.",
    (MetricLabel("tenant"),),
)
UNAUTHORIZED_USES: Final = MetricDeclaration(
    "scrubber_unauthorized_uses_total",
    _COUNTER,
    "Detected uses of devices without a grant, by device and kind.",
    (
        _DEVICE,
        MetricLabel("use", (UseKind.UNAUTHORIZED, UseKind.STARTED_WITHOUT_HAND_OVER, "assigned-by-another-plugin")),
    ),
)

# -- devices ----------------------------------------------------------------------------------------------------------

DEVICE_INFO: Final = MetricDeclaration(
    "scrubber_device_info",
    _GAUGE,
    "1 for each device, labelled with its index and model.",
    (_DEVICE, MetricLabel("index"), MetricLabel("model")),
)
DEVICE_STATE: Final = MetricDeclaration(
    "scrubber_device_state",
    _GAUGE,
    "1 for the state of the device.",
    (_DEVICE, MetricLabel("hygiene", tuple(Hygiene)), MetricLabel("health", tuple(Health))),
)
DEVICE_ADVERTISED: Final = MetricDeclaration(
    "scrubber_device_advertised", _GAUGE, "1 while the device is advertised to the kubelet as healthy.", (_DEVICE,)
)
DEVICE_CONDITION: Final = MetricDeclaration(
    "scrubber_device_condition",
    _GAUGE,
    "1 while the device has the condition, by code.",
    (_DEVICE, MetricLabel("code", remark="a code of [health](health.md), xid")),
)
DEVICES: Final = MetricDeclaration(
    "scrubber_devices",
    _GAUGE,
    "Devices by the enforcement of their policy.",
    (MetricLabel("enforcement", tuple(Enforcement)),),
)
CLAIMS: Final = MetricDeclaration(
    "scrubber_claims",
    _GAUGE,
    "Resource claims that have devices: prepared, or waiting to be released until their pods have ended and the devices are "
    "clean.",
    (MetricLabel("state", ("prepared", "releasing")),),
)
JOBS: Final = MetricDeclaration(
    "scrubber_jobs",
    _GAUGE,
    "Jobs that have devices: running, or ending until they have no process left and the devices are clean.",
    (MetricLabel("state", ("running", "ending")),),
)
QUARANTINE_START: Final = MetricDeclaration(
    "scrubber_quarantine_start_timestamp_seconds",
    _GAUGE,
    "Time at which the device went out of service, by cause and recovery method.",
    (_DEVICE, _CAUSE_CLASS, MetricLabel("recovery_method", tuple(RecoveryMethod))),
)
DEVICE_HELD_START: Final = MetricDeclaration(
    "scrubber_device_held_start_timestamp_seconds",
    _GAUGE,
    "Time since which processes that have no grant hold the device, so that it cannot be scrubbed.",
    (
        _DEVICE,
        MetricLabel("code", remark="a [finding](codes.md#findings)"),
        MetricLabel("holder", remark="the pod, as namespace/name, or the systemd unit; empty for other processes"),
    ),
)
CERTIFICATE_ISSUED: Final = MetricDeclaration(
    "scrubber_certificate_issued_timestamp_seconds",
    _GAUGE,
    "Time at which the device's unused certificate was issued.",
    (_DEVICE,),
)
BREAK_GLASS_ACTIVE: Final = MetricDeclaration(
    "scrubber_break_glass_active", _GAUGE, "1 while a break-glass override is active for the device.", (_DEVICE,)
)
BREAK_GLASS_EXPIRY: Final = MetricDeclaration(
    "scrubber_break_glass_expiry_timestamp_seconds",
    _GAUGE,
    "Time at which the device's break-glass override expires.",
    (_DEVICE,),
)
MEMORY_COVERAGE: Final = MetricDeclaration(
    "scrubber_memory_coverage_ratio",
    _GAUGE,
    "Share of the device's memory that the last clearing slow path verified.",
    (_DEVICE,),
)
CLEAR_RATE: Final = MetricDeclaration(
    "scrubber_clear_rate_bytes_per_second",
    _GAUGE,
    "Rate at which the last slow path cleared the device's memory.",
    (_DEVICE,),
)
LAST_SCRUB_STEP_DURATION: Final = MetricDeclaration(
    "scrubber_last_scrub_step_duration_seconds",
    _GAUGE,
    "Duration of the steps of the device's last slow path.",
    (_DEVICE, _STEP, _VERDICT),
)
XIDS: Final = MetricDeclaration(
    "scrubber_xids_total",
    _COUNTER,
    "XIDs reported for the device, by number.",
    (_DEVICE, MetricLabel("code")),
)
XID_LAST_SEEN: Final = MetricDeclaration(
    "scrubber_xid_last_seen_timestamp_seconds",
    _GAUGE,
    "Time at which the driver last reported the XID for the device.",
    (_DEVICE, MetricLabel("code")),
)

SERVICE_METRICS: Final = declared_in(globals())
"""All of them, by name."""
