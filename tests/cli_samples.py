"""Messages of the service in which every field is set, as the command's tests need them."""

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
    node="node-a",
    boot="3f0c7a5e",
    driver="580.65.06",
    device="GPU-1f3a09c2-7d51-4e0b-9a77-0c5d2b1e4f60",
    sequence=7,
    previous_grant=3,
    next_grant=4,
    path="slow",
    scrub="scrub-77aa01",
    covered=["memory: 268435456 of 268435456 bytes cleared and verified"],
    not_covered=["on-chip memory: no probe for this device"],
    policy="default",
    policy_digest="9c1e" * 16,
    issued_at=AT,
    rests_on="cert-0c44d1aa9b02",
    key_id="sha256:" + "5e" * 32,
    signature=b"\x01" * 64,
)
DEVICE = pb.Device(
    id=CERTIFICATE.device,
    index="3",
    model="NVIDIA H200",
    memory_bytes=141 * 2**30,
    state="quarantined",
    hygiene="in-use",
    health="quarantined",
    cause=pb.Cause(code="xid-95", sentence="XID 95 was seen.", way_back="reset", since=AT, actor="service"),
    certificate=CERTIFICATE,
    tenant_namespace="team-a",
    pod="train-0",
    container="main",
    grants=4,
    scrub="scrub-77aa02",
    parent="GPU-00000000-7d51-4e0b-9a77-0c5d2b1e4f60",
    numa_node=1,
    retry_at=AT + 600,
    kind="other-tenant",
    profile="1g.18gb",
    peers=["GPU-2b77c0de-7d51-4e0b-9a77-0c5d2b1e4f60"],
    traits={"pci_address": "0000:3b:00.0", "vbios": "96.00.89.00.01"},
    offered=True,
    policy="h200",
    enforcement="observe",
    glass=pb.Glass(until=AT + 1800, reason="a deadline", actor="uid:1000"),
    failures=2,
    waits="Its reset waits for device 4, which is in use.",
    strangers=["PID 4711 (python) of no pod uses it without a grant."],
    uninspected=["PID 4712 (crowd) of pod 77aa could not be looked through in 4 walks."],
    tenancies=[
        pb.Tenancy(
            grant=4,
            tenant_namespace="team-a",
            pod="train-0",
            uid="8e0c1b0e-51a4-4d53-8a19-6c3f5e1d2b7a",
            container="main",
            kind="other-tenant",
            at=AT,
            certificate=CERTIFICATE.id,
            exception="same-container",
        )
    ],
    lasting=[pb.Lasting(code="retired-pages", since=AT)],
    lifetime={"retired_pages": 3},
    must_reset=True,
    clean_scrubs=1,
    strikes=[pb.Strike(at=AT, code="xid-95", tenant_namespace="team-a")],
    attempts=[pb.Attempt(at=AT, reset=True, ordered=True)],
    baseline=pb.Baseline(
        at=AT,
        actor="uid:1000",
        reason="new firmware",
        facts=[
            pb.Fact(name="model", expected="NVIDIA H200", found="NVIDIA H200"),
            pb.Fact(name="vbios", expected="96.00.89.00.00", found="96.00.89.00.01"),
        ],
        conditions=[pb.Fact(name="pcie-width", expected="x8 of x16", found="x8 of x16")],
    ),
)
SCRUB = pb.Scrub(
    id="scrub-77aa01",
    device=DEVICE.id,
    path="slow",
    occasion="on-demand",
    started=AT,
    ended=AT + 2,
    outcome="passed",
    certificate=CERTIFICATE.id,
    actor="uid:1000",
    steps=[
        pb.StepResult(
            step="memory",
            verdict="passed",
            seconds=0.25,
            measured_json='{"residue_bytes": 12}',
            not_covered=["two pages: retired"],
            findings=[
                pb.Finding(
                    step="memory",
                    code="residue",
                    severity="note",
                    sentence="12 bytes were not zero.",
                    evidence_json='{"first_offset": 0}',
                )
            ],
        )
    ],
)
ENTRY = pb.HistoryEntry(
    sequence=41,
    hash="ab" * 32,
    name="scrub.finished",
    at=AT,
    device=DEVICE.id,
    scrub_id=SCRUB.id,
    actor="uid:1000",
    fields_json='{"outcome": "passed", "seconds": 0.5}',
    scrub=SCRUB,
    certificate=CERTIFICATE,
)


def lately(sample: _M, seconds: float = 200.0) -> _M:
    """A copy of ``sample`` in which :data:`AT` was so long ago, so that all ages are the same at each run."""
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
