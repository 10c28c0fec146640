"""The stored form of the ledger's documents: every field of every stored value, named once.

A change to one of these dataclasses is a change of format: increase the format number of each document that contains
it, and the number of :data:`scrubber.adapters.ledger.schema.CURRENT`, and add the step from the earlier schema to its
``upgrades``. The previous minor version drops the fields that it does not know: docs/decisions/0046-upgrades.md says
which fields may be added like that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from scrubber.adapters.ledger.json_codec import (
    COUNTS,
    FLAG,
    INTEGER,
    NUMBER,
    PAIRS,
    SCALARS,
    STRING_SET,
    TEXT,
    CodecError,
    Document,
    canonical_json,
    dataclass_codec,
    enum_codec,
    optional,
    tuple_of,
)
from scrubber.domain.agent_pause import AgentPause, AgentPauseRecord, LabelChange, PauseWay
from scrubber.domain.assignment import Assignment, Claim, JobManager, Pod, Process
from scrubber.domain.baseline import Baseline
from scrubber.domain.evidence import (
    Attestation,
    Certificate,
    Finding,
    Outcome,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.health.history import PastQuarantine, RecoveryAttempt
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord, Grant
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod

__all__ = [
    "ASSIGNMENT",
    "CERTIFICATE",
    "CLAIM",
    "GRANT",
    "NODE",
    "PAUSE",
    "RECORD",
    "SCRUB",
    "decode_fields",
    "encode_fields",
]

_POD = dataclass_codec(Pod, namespace=TEXT, name=TEXT, uid=optional(TEXT))
ASSIGNMENT = dataclass_codec(Assignment, pod=_POD, container=TEXT, devices=STRING_SET, resource=TEXT, shares=STRING_SET)
CLAIM = dataclass_codec(
    Claim,
    uid=TEXT,
    namespace=TEXT,
    name=TEXT,
    driver=TEXT,
    pods=tuple_of(_POD),
    listed_pods=tuple_of(_POD),
    released_at=optional(NUMBER),
    manager=optional(enum_codec(JobManager)),
)
_PROCESS = dataclass_codec(Process, pid=INTEGER, started=INTEGER, container=TEXT)

_GRANT = dataclass_codec(
    Grant,
    sequence=INTEGER,
    assignment=optional(ASSIGNMENT),
    kind=enum_codec(HandOverKind),
    at=NUMBER,
    boot=TEXT,
    certificate=optional(TEXT),
    basis=enum_codec(Basis),
    baseline=tuple_of(_PROCESS),
    cgroups=tuple_of(TEXT),
    started=TEXT,
    claim=optional(CLAIM),
    path=optional(enum_codec(PathKind)),
)

_CERTIFICATE = dataclass_codec(
    Certificate,
    id=TEXT,
    node=TEXT,
    boot=TEXT,
    driver=TEXT,
    device=TEXT,
    sequence=INTEGER,
    previous_grant=INTEGER,
    path=enum_codec(PathKind),
    scrub=TEXT,
    covered=tuple_of(TEXT),
    not_covered=tuple_of(TEXT),
    policy=TEXT,
    policy_digest=TEXT,
    issued_at=NUMBER,
    next_grant=optional(INTEGER),
    rests_on=optional(TEXT),
    attestation=optional(dataclass_codec(Attestation, digest=TEXT, nonce=TEXT)),
    key_id=optional(TEXT),
    signature=optional(TEXT),
)

_CAUSE = dataclass_codec(
    Cause, code=TEXT, message=TEXT, recovery_method=enum_codec(RecoveryMethod), since=NUMBER, actor=TEXT
)

_ACTIVE_WARNING = dataclass_codec(ActiveWarning, code=TEXT, since=NUMBER)
_PAST_QUARANTINE = dataclass_codec(PastQuarantine, at=NUMBER, code=TEXT, tenant=optional(TEXT))
_RECOVERY_ATTEMPT = dataclass_codec(RecoveryAttempt, at=NUMBER, reset=FLAG, operator_ordered=FLAG)
_BREAK_GLASS = dataclass_codec(BreakGlass, until=NUMBER, reason=TEXT, actor=TEXT)
_BASELINE = dataclass_codec(Baseline, facts=PAIRS, conditions=PAIRS, at=NUMBER, actor=TEXT, reason=TEXT)

_RECORD = dataclass_codec(
    DeviceRecord,
    device=TEXT,
    version=INTEGER,
    hygiene=enum_codec(Hygiene),
    health=enum_codec(Health),
    cause=optional(_CAUSE),
    certificate=optional(_CERTIFICATE),
    rests_on=optional(TEXT),
    last_grant=optional(_GRANT),
    open_grants=tuple_of(_GRANT),
    certificate_count=INTEGER,
    failures=INTEGER,
    deferred_attempts=INTEGER,
    clean_scrubs=INTEGER,
    retry_at=optional(NUMBER),
    must_reset=FLAG,
    externally_reset=FLAG,
    exclusive_use=FLAG,
    contaminated=FLAG,
    boot=TEXT,
    lifetime_counters=COUNTS,
    warnings=tuple_of(_ACTIVE_WARNING),
    recent_quarantines=tuple_of(_PAST_QUARANTINE),
    recovery_attempts=tuple_of(_RECOVERY_ATTEMPT),
    limits_count_from=optional(NUMBER),
    break_glass=optional(_BREAK_GLASS),
    baseline=optional(_BASELINE),
    admin_claims=tuple_of(CLAIM),
)

_FINDING = dataclass_codec(
    Finding, step=enum_codec(Step), code=TEXT, severity=enum_codec(Severity), message=TEXT, evidence=SCALARS
)

_STEP_RESULT = dataclass_codec(
    StepResult,
    step=enum_codec(Step),
    verdict=enum_codec(Verdict),
    seconds=NUMBER,
    findings=tuple_of(_FINDING),
    measured=SCALARS,
    not_covered=tuple_of(TEXT),
)

_SCRUB = dataclass_codec(
    ScrubRecord,
    id=TEXT,
    device=TEXT,
    path=enum_codec(PathKind),
    trigger=enum_codec(ScrubTrigger),
    started=NUMBER,
    ended=optional(NUMBER),
    outcome=optional(enum_codec(Outcome)),
    steps=tuple_of(_STEP_RESULT),
    certificate=optional(TEXT),
    actor=TEXT,
)

_YIELD_REQUEST = dataclass_codec(
    YieldRequest, requester=enum_codec(YieldRequester), reason=TEXT, actor=TEXT, since=NUMBER
)
_NODE = dataclass_codec(NodeRecord, yields=tuple_of(_YIELD_REQUEST), overridden=PAIRS)

_LABEL_CHANGE = dataclass_codec(LabelChange, key=TEXT, before=optional(TEXT), during=TEXT)
_AGENT_PAUSE = dataclass_codec(
    AgentPause,
    id=TEXT,
    way=enum_codec(PauseWay),
    devices=tuple_of(TEXT),
    since=NUMBER,
    ending=FLAG,
    changes=tuple_of(_LABEL_CHANGE),
)
_PAUSE = dataclass_codec(AgentPauseRecord, pause=optional(_AGENT_PAUSE), externally_reset=tuple_of(TEXT))


RECORD: Document[DeviceRecord] = Document(_RECORD, format=1)
GRANT: Document[Grant] = Document(_GRANT, format=1)
CERTIFICATE: Document[Certificate] = Document(_CERTIFICATE, format=1)
SCRUB: Document[ScrubRecord] = Document(_SCRUB, format=1)
NODE: Document[NodeRecord] = Document(_NODE, format=1)
PAUSE: Document[AgentPauseRecord] = Document(_PAUSE, format=1)


def encode_fields(values: Mapping[str, str | int | float | bool | None]) -> str:
    """Return an event's fields as canonical JSON; raises :class:`CodecError` for anything but scalars."""
    return canonical_json(SCALARS.encode(values))


def decode_fields(text: str) -> Mapping[str, str | int | float | bool | None]:
    """Return the fields that :func:`encode_fields` wrote; raises :class:`CodecError` for anything else."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise CodecError(f"not JSON: {problem}") from None
    return SCALARS.decode(fields)
