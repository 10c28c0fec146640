"""What the ledger's documents look like: every field of every stored value, named once.

A change to one of these dataclasses is a change of format: raise the number of each document that contains it, and
:data:`scrubber.adapters.ledger.schema.SCHEMA`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from scrubber.adapters.ledger.shapes import (
    COUNTS,
    FLAG,
    INTEGER,
    NUMBER,
    PAIRS,
    SCALARS,
    TEXT,
    Document,
    Undecodable,
    canonical,
    choice,
    listed,
    optional,
    shape,
    unordered,
)
from scrubber.domain.assignment import Assignment, Pod, Process
from scrubber.domain.baseline import Baseline
from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.evidence import (
    Certificate,
    Finding,
    Occasion,
    Outcome,
    Path,
    ScrubRecord,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.record import DeviceRecord, Glass, Grant, Lasting
from scrubber.domain.tally import Attempt, Strike

__all__ = ["CERTIFICATE", "GRANT", "RECORD", "SCRUB", "decode_fields", "encode_fields"]

_POD = shape(Pod, namespace=TEXT, name=TEXT, uid=optional(TEXT))
_ASSIGNMENT = shape(Assignment, pod=_POD, container=TEXT, devices=unordered, resource=TEXT, shares=unordered)
_PROCESS = shape(Process, pid=INTEGER, started=INTEGER, container=TEXT)

_GRANT = shape(
    Grant,
    sequence=INTEGER,
    assignment=optional(_ASSIGNMENT),
    kind=choice(HandOver),
    at=NUMBER,
    boot=TEXT,
    certificate=optional(TEXT),
    basis=choice(Basis),
    baseline=listed(_PROCESS),
    cgroups=listed(TEXT),
)

_CERTIFICATE = shape(
    Certificate,
    id=TEXT,
    node=TEXT,
    boot=TEXT,
    driver=TEXT,
    device=TEXT,
    sequence=INTEGER,
    previous_grant=INTEGER,
    path=choice(Path),
    scrub=TEXT,
    covered=listed(TEXT),
    not_covered=listed(TEXT),
    policy=TEXT,
    policy_digest=TEXT,
    issued_at=NUMBER,
    next_grant=optional(INTEGER),
    rests_on=optional(TEXT),
    key_id=optional(TEXT),
    signature=optional(TEXT),
)

_CAUSE = shape(Cause, code=TEXT, sentence=TEXT, way_back=choice(WayBack), since=NUMBER, actor=TEXT)

_LASTING = shape(Lasting, code=TEXT, since=NUMBER)
_STRIKE = shape(Strike, at=NUMBER, code=TEXT, tenant=optional(TEXT))
_ATTEMPT = shape(Attempt, at=NUMBER, reset=FLAG, ordered=FLAG)
_GLASS = shape(Glass, until=NUMBER, reason=TEXT, actor=TEXT)
_BASELINE = shape(Baseline, facts=PAIRS, conditions=PAIRS, at=NUMBER, actor=TEXT, reason=TEXT)

_RECORD = shape(
    DeviceRecord,
    device=TEXT,
    version=INTEGER,
    hygiene=choice(Hygiene),
    health=choice(Health),
    cause=optional(_CAUSE),
    certificate=optional(_CERTIFICATE),
    rests_on=optional(TEXT),
    last_grant=optional(_GRANT),
    open_grants=listed(_GRANT),
    certificates=INTEGER,
    failures=INTEGER,
    waits=INTEGER,
    clean_scrubs=INTEGER,
    retry_at=optional(NUMBER),
    must_reset=FLAG,
    watched=FLAG,
    tainted=FLAG,
    boot=TEXT,
    lifetime=COUNTS,
    lasting=listed(_LASTING),
    strikes=listed(_STRIKE),
    attempts=listed(_ATTEMPT),
    forgiven=optional(NUMBER),
    glass=optional(_GLASS),
    baseline=optional(_BASELINE),
)

_FINDING = shape(Finding, step=choice(Step), code=TEXT, severity=choice(Severity), sentence=TEXT, evidence=SCALARS)

_STEP_RESULT = shape(
    StepResult,
    step=choice(Step),
    verdict=choice(Verdict),
    seconds=NUMBER,
    findings=listed(_FINDING),
    measured=SCALARS,
    not_covered=listed(TEXT),
)

_SCRUB = shape(
    ScrubRecord,
    id=TEXT,
    device=TEXT,
    path=choice(Path),
    occasion=choice(Occasion),
    started=NUMBER,
    ended=optional(NUMBER),
    outcome=optional(choice(Outcome)),
    steps=listed(_STEP_RESULT),
    certificate=optional(TEXT),
    actor=TEXT,
)


RECORD: Document[DeviceRecord] = Document(_RECORD, format=1)
GRANT: Document[Grant] = Document(_GRANT, format=1)
CERTIFICATE: Document[Certificate] = Document(_CERTIFICATE, format=1)
SCRUB: Document[ScrubRecord] = Document(_SCRUB, format=1)


def encode_fields(values: Mapping[str, str | int | float | bool | None]) -> str:
    """An event's fields as canonical JSON; raises :class:`Undecodable` for anything but scalars."""
    return canonical(SCALARS.write(values))


def decode_fields(text: str) -> Mapping[str, str | int | float | bool | None]:
    """The fields that :func:`encode_fields` wrote; raises :class:`Undecodable` for anything else."""
    try:
        return SCALARS.read(json.loads(text))
    except json.JSONDecodeError as problem:
        raise Undecodable(f"not JSON: {problem}") from None
