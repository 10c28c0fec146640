"""Service messages with every field set, for the tests of the command line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import Message

from scrubber.api import scrubber_pb2 as pb

__all__ = ["AT", "CERTIFICATE", "DEVICE", "ENTRY", "SCRUB", "lately"]

_M = TypeVar("_M", bound=Message)

AT = 1_795_000_000.0
"""2026-11-18T11:06:40Z."""

CERTIFICATE = pb.Certificate(
    id="cert-5b1f8c2e90ad",
    node_name="node-a",
    boot_id="3f0c7a5e",
    driver_version="580.65.06",
    device_id="GPU-1f3a09c2-7d51-4e0b-9a77-0c5d2b1e4f60",
    sequence=7,
    previous_grant=3,
    next_grant=4,
    path="slow",
    scrub_id="scrub-77aa01",
    covered=["memory: 268435456 of 268435456 bytes cleared and verified"],
    not_covered=["on-chip memory: no probe for this device"],
    policy="default",
    policy_digest="9c1e" * 16,
    issued_at=AT,
    base_certificate_id="cert-0c44d1aa9b02",
    key_id="sha256:" + "5e" * 32,
    signature=b"\x01" * 64,
    attestation=pb.Attestation(digest="a7" * 32, nonce="c3" * 32),
)
DEVICE = pb.Device(
    id=CERTIFICATE.device_id,
    index="3",
    model="NVIDIA H200",
    memory_bytes=141 * 2**30,
    state="quarantined",
    hygiene="in-use",
    health="quarantined",
    cause=pb.Cause(code="xid-95", message="XID 95 was seen.", recovery_method="reset", since=AT, actor="service"),
    certificate=CERTIFICATE,
    tenant="team-a",
    pod="train-0",
    container="main",
    grant_count=4,
    active_scrub_id="scrub-77aa02",
    parent="GPU-00000000-7d51-4e0b-9a77-0c5d2b1e4f60",
    numa_node=1,
    next_attempt_at=AT + 600,
    last_hand_over_kind="other-tenant",
    profile="1g.18gb",
    peers=["GPU-2b77c0de-7d51-4e0b-9a77-0c5d2b1e4f60"],
    attributes={"pci_address": "0000:3b:00.0", "vbios": "96.00.89.00.01"},
    advertised=True,
    policy="h200",
    enforcement="observe",
    break_glass=pb.BreakGlass(expires_at=AT + 1800, reason="a deadline", actor="uid:1000"),
    failed_recoveries=2,
    recovery_blocker="Its reset waits for device 4, which is in use.",
    unauthorized_users=["PID 4711 (python) outside all pods uses the device without a grant."],
    uninspected_processes=["PID 4712 (crowd) of pod 77aa could not be fully inspected in 4 walks."],
    holders=[
        pb.DeviceHolder(
            pid=4711,
            command="dcgm-exporter",
            kind="process",
            code="unknown-holder",
            namespace="monitoring",
            pod="dcgm-exporter-2jklm",
            pod_uid="9f1d2c1b-51a4-4d53-8a19-6c3f5e1d2b7a",
            unit="dcgm-exporter.service",
            since=AT,
            blocking=True,
            memory_bytes=4 * 2**20,
        ),
    ],
    open_grants=[
        pb.OpenGrant(
            sequence=4,
            tenant="team-a",
            pod="train-0",
            pod_uid="8e0c1b0e-51a4-4d53-8a19-6c3f5e1d2b7a",
            container="main",
            hand_over_kind="other-tenant",
            granted_at=AT,
            certificate_id=CERTIFICATE.id,
            exception="same-container",
            claim=pb.Claim(uid="claim-uid-1", namespace="team-a", name="gpus"),
            claim_pods=[pb.ClaimPod(uid="8e0c1b0e-51a4-4d53-8a19-6c3f5e1d2b7a", namespace="team-a", name="train-0")],
            claim_releasing=True,
            job=pb.Job(manager="slurm", id="4711", user="alice", user_id=1000),
            job_ended=True,
        )
    ],
    claim=pb.Claim(uid="claim-uid-1", namespace="team-a", name="gpus"),
    job=pb.Job(manager="slurm", id="4711", user="alice", user_id=1000),
    admin_claims=[pb.Claim(uid="claim-uid-2", namespace="monitoring", name="all-gpus")],
    conditions=[pb.Condition(code="retired-pages", since=AT)],
    lifetime_counters={"retired_pages": 3},
    reset_pending=True,
    probation_scrubs_passed=1,
    probation_scrubs_required=2,
    quarantines=[pb.QuarantineRecord(timestamp=AT, code="xid-95", tenant="team-a")],
    recovery_attempts=[pb.RecoveryAttempt(timestamp=AT, reset=True, by_operator=True)],
    baseline=pb.Baseline(
        recorded_at=AT,
        actor="uid:1000",
        reason="new firmware",
        facts=[
            pb.Fact(name="model", expected="NVIDIA H200", actual="NVIDIA H200"),
            pb.Fact(name="vbios", expected="96.00.89.00.00", actual="96.00.89.00.01"),
        ],
        accepted_conditions=[pb.Fact(name="pcie-width", expected="x8 of x16", actual="x8 of x16")],
    ),
)
SCRUB = pb.Scrub(
    id="scrub-77aa01",
    device_id=DEVICE.id,
    path="slow",
    trigger="on-demand",
    started_at=AT,
    finished_at=AT + 2,
    outcome="passed",
    certificate_id=CERTIFICATE.id,
    actor="uid:1000",
    steps=[
        pb.StepResult(
            step="memory",
            verdict="passed",
            duration_seconds=0.25,
            measurements_json='{"residue_bytes": 12}',
            not_covered=["two pages: retired"],
            findings=[
                pb.Finding(
                    step="memory",
                    code="residue",
                    severity="note",
                    message="12 bytes were not zero.",
                    evidence_json='{"first_offset": 0}',
                )
            ],
        )
    ],
)
ENTRY = pb.HistoryEntry(
    sequence=41,
    hash="ab" * 32,
    event="scrub.finished",
    timestamp=AT,
    device_id=DEVICE.id,
    scrub_id=SCRUB.id,
    actor="uid:1000",
    fields_json='{"outcome": "passed", "duration_seconds": 0.5}',
    scrub=SCRUB,
    certificate=CERTIFICATE,
)


def lately(sample: _M, seconds: float = 200.0) -> _M:
    """Return a copy of ``sample`` with :data:`AT` moved to ``seconds`` ago, so that ages are the same in every run."""
    moved = type(sample)()
    moved.CopyFrom(sample)
    _move(moved, time.time() - seconds - AT)
    return moved


def _move(message: Message, by: float) -> None:
    for field, value in message.ListFields():
        if field.type == field.TYPE_DOUBLE and value >= AT:
            setattr(message, field.name, value + by)
        elif field.type == field.TYPE_MESSAGE and not isinstance(value, Mapping):
            for each in [value] if isinstance(value, Message) else value:
                _move(each, by)
