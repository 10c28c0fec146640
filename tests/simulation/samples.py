"""Domain values for tests of one decision: each with a sensible default for what the test does not specify."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.assignment import Assignment, Pod, Process
from scrubber.domain.device import NodeIdentity
from scrubber.domain.evidence import (
    Certificate,
    Finding,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.handover import FastPathChecks, HandoverDecision, HandoverFacts, decide
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import Policy, RequiredProof
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod

__all__ = [
    "DEVICE",
    "NODE",
    "NOW",
    "POLICY",
    "assignment",
    "cause",
    "certificate",
    "certificates",
    "finding",
    "grant",
    "pod",
    "policies",
    "process",
    "record",
    "records",
    "result",
    "scrub",
]

DEVICE = "GPU-0000"
NODE = NodeIdentity("node-1", "boot-1", "driver-1")
NOW = 1_800_000_000.0
POLICY = Policy(
    digest="sha256:here",
    signals=NVIDIA_SIGNALS,
    error_classes={
        31: ErrorClass.APPLICATION,
        79: ErrorClass.REBOOT,
        95: ErrorClass.RESET,
        122: ErrorClass.REPAIR,
        154: ErrorClass.CONTEXT,
    },
)


def pod(namespace: str = "acme", name: str = "train-0", uid: str | None = "uid-1") -> Pod:
    return Pod(namespace, name, uid)


def assignment(of: Pod | None = None, container: str = "main", *devices: str) -> Assignment:
    return Assignment(of or pod(), container, frozenset(devices or (DEVICE,)))


def process(pid: int, container: str = "main#1", started: int | None = None) -> Process:
    return Process(pid, pid * 10 if started is None else started, container)


def grant(sequence: int = 1, to: Assignment | None = None, **more: object) -> Grant:
    """Return a grant, by default to the default pod; ``to=None`` with ``unknown=True`` is one to an unknown pod."""
    unknown = more.pop("unknown", False)
    given = Grant(sequence, None if unknown else to or assignment(), HandOverKind.UNKNOWN, NOW, NODE.boot)
    return replace(given, **more)  # type: ignore[arg-type]


def by_record(device: DeviceRecord, kind: HandOverKind, policy: Policy, *, ran: bool = True) -> HandoverDecision:
    """Return the decision for a whole device without problems other than those in its record."""
    facts = HandoverFacts(record=device, kind=kind, policy=policy, identity=NODE, last_pod_ran=ran)
    return decide(replace(facts, earlier_pods=frozenset(), checks=FastPathChecks(passed=True)))


def certificate(**more: object) -> Certificate:
    """Return a certificate: unused, of this device, node, boot, driver and policy, issued before any grant."""
    issued = Certificate(
        id="cert-1",
        node=NODE.node,
        boot=NODE.boot,
        driver=NODE.driver,
        device=DEVICE,
        sequence=1,
        previous_grant=0,
        path=PathKind.SLOW,
        scrub="scrub-1",
        covered=("memory: all",),
        not_covered=("on-chip: not part of this path",),
        policy=POLICY.name,
        policy_digest=POLICY.digest,
        issued_at=NOW,
    )
    return replace(issued, **more)  # type: ignore[arg-type]


def cause(code: str = "xid-95", recovery_method: RecoveryMethod = RecoveryMethod.RESET, **more: object) -> Cause:
    return replace(Cause(code, f"{code} was seen.", recovery_method, NOW), **more)  # type: ignore[arg-type]


def record(hygiene: Hygiene = Hygiene.DIRTY, health: Health = Health.HEALTHY, **more: object) -> DeviceRecord:
    return replace(DeviceRecord(DEVICE, 7, hygiene, health, boot=NODE.boot), **more)  # type: ignore[arg-type]


def finding(code: str = "xid-95", severity: Severity = Severity.FAULT, step: Step = Step.HEALTH) -> Finding:
    return Finding(step, code, severity, f"{code} was found.")


def result(step: Step, verdict: Verdict = Verdict.PASSED, **more: object) -> StepResult:
    return replace(StepResult(step, verdict, 0.1), **more)  # type: ignore[arg-type]


def scrub(path: PathKind = PathKind.SLOW, *steps: StepResult) -> ScrubRecord:
    return ScrubRecord("scrub-9", DEVICE, path, ScrubTrigger.CONTAINER_START, NOW, steps=steps)


# -- strategies --------------------------------------------------------------------------------------------------------

certificates: st.SearchStrategy[Certificate] = st.builds(
    lambda device, boot, driver, node, digest, previous, used: certificate(
        device=device,
        boot=boot,
        driver=driver,
        node=node,
        policy_digest=digest,
        previous_grant=previous,
        next_grant=used,
    ),
    st.sampled_from((DEVICE, DEVICE, DEVICE, "GPU-0001")),
    st.sampled_from(("boot-1", "boot-1", "boot-1", "boot-0")),
    st.sampled_from(("driver-1", "driver-1", "driver-1", "driver-0")),
    st.sampled_from(("node-1", "node-1", "node-1", "node-2")),
    st.sampled_from((POLICY.digest, POLICY.digest, "sha256:elsewhere")),
    st.integers(0, 2),
    st.sampled_from((None, None, None, 1)),
)
"""Certificates with at most a few flaws; most have none."""

_pods = st.builds(
    pod, st.sampled_from(("acme", "umbrella")), st.just("train-0"), st.sampled_from((None, "uid-1", "uid-2"))
)
_grants = st.one_of(
    st.none(),
    st.builds(lambda sequence, to: grant(sequence, assignment(to)), st.integers(1, 2), _pods),
    st.builds(lambda sequence: grant(sequence, unknown=True), st.integers(1, 2)),
)

records: st.SearchStrategy[DeviceRecord] = st.builds(
    lambda hygiene, health, issued, last, watched: record(
        hygiene, health, certificate=issued, last_grant=last, exclusive_use=watched
    ),
    st.sampled_from(Hygiene),
    st.sampled_from((Health.HEALTHY, Health.HEALTHY, *Health)),
    st.one_of(st.none(), certificates),
    _grants,
    st.booleans(),
)
"""Any record, including those that no history leads to: decisions must be safe for any content of the ledger."""

policies: st.SearchStrategy[Policy] = st.builds(
    lambda proofs: replace(POLICY, required_proofs=proofs),
    st.dictionaries(st.sampled_from(HandOverKind), st.sampled_from(RequiredProof)),
)
