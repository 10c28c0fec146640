"""Builds events: what the audit log, the log and the metrics record about a change. Pure."""

from __future__ import annotations

from scrubber.domain.evidence import Certificate, Finding, FindingCode, Outcome, ScrubRecord, Step, Verdict
from scrubber.domain.jobs import job_of
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Health
from scrubber.ports.record import Event

__all__ = [
    "granted",
    "grantee_fields",
    "health_changed",
    "release_requested",
    "residue_unexplained",
    "scrub_finished",
    "scrub_started",
    "signal",
    "unexplained_residue_message",
]

_HEALTH_EVENTS = {
    Health.HEALTHY: "health.healthy",
    Health.SUSPECT: "health.suspect",
    Health.QUARANTINED: "health.quarantined",
    Health.RECOVERING: "health.recovering",
    Health.PROBATION: "health.probation",
    Health.CONDEMNED: "health.condemned",
}


_ENDED: dict[str, str] = {
    FindingCode.UNAUTHORIZED_PROCESS_KILLED: "unauthorized.process.killed",
    FindingCode.LEFTOVER_POD_KILLED: "leftover.pod.killed",
    FindingCode.UNINSPECTED_PROCESS_KILLED: "uninspected.process.killed",
}
"""Findings of a scrub that killed processes: each has a separate audit row."""


def health_changed(
    before: DeviceRecord, after: DeviceRecord, now: float, scrub: str | None = None
) -> tuple[Event, ...]:
    """Return the event for a change of health or of its cause; none when neither changed."""
    if (before.health, before.cause) == (after.health, after.cause):
        return ()
    fields: dict[str, str | int | float | bool | None] = {}
    if after.cause is not None:
        fields = {
            "cause": after.cause.code,
            "message": after.cause.message,
            "recovery_method": after.cause.recovery_method.value,
        }
    if len(after.recent_quarantines) and after.recent_quarantines[-1:] != before.recent_quarantines[-1:]:
        fields["tenant"] = after.recent_quarantines[-1].tenant
    name = _HEALTH_EVENTS[after.health]
    if before.health is Health.RECOVERING and after.health is Health.QUARANTINED:
        name = "health.recovery-failed"
    return (Event(name, now, after.device, scrub, fields=fields),)


def signal(finding: Finding, tenant: str | None, device: str, now: float) -> Event:
    """Return the event for errors of one code that occurred since they were last reported."""
    seen = finding.evidence
    fields = {"code": finding.code, "class": seen["class"], "new": seen["new"], "total": seen["count"]}
    return Event(
        "health.errors-reported",
        now,
        device,
        fields={**fields, "tenant": tenant, "message": finding.message},
    )


def scrub_started(scrub: ScrubRecord, tenant: str | None) -> Event:
    fields = {"path": scrub.path.value, "trigger": scrub.trigger.value, "tenant": tenant}
    return Event("scrub.started", scrub.started, scrub.device, scrub.id, scrub.actor, fields)


def scrub_finished(scrub: ScrubRecord, certificate: Certificate | None, tenant: str | None = None) -> tuple[Event, ...]:
    """Return the events for the end of a scrub and for what it did to processes and devices.

    Args:
        tenant: the only tenant that had the device before; None when there was none, or when that is not certain.
    """
    now = scrub.ended if scrub.ended is not None else scrub.started
    events: list[Event] = []
    leftovers = 0
    for step in scrub.steps:
        for finding in step.findings:
            if finding.code == FindingCode.LEFTOVERS_KILLED:
                pids = str(finding.evidence.get("pids", "")).split()
                leftovers += len(pids)
                events += [
                    Event("leftover.process.killed", now, scrub.device, scrub.id, fields={"pid": int(pid)})
                    for pid in pids
                ]
            if finding.code == FindingCode.UNINSPECTED_PROCESSES and finding.evidence.get("news"):
                fields = {**finding.evidence, "message": finding.message, "tenant": None}
                del fields["news"]
                events.append(Event("uninspected.process.found", now, scrub.device, scrub.id, fields=fields))
            if finding.code in _ENDED:
                # An unauthorized process belongs to no tenant of the device. A leftover pod's tenant is the tenant of
                # the scrub.
                unowned = {} if finding.code == FindingCode.LEFTOVER_POD_KILLED else {"tenant": None}
                acts = {**finding.evidence, **unowned}
                events.append(Event(_ENDED[finding.code], now, scrub.device, scrub.id, fields=acts))
            if finding.code in (FindingCode.ORPHANED_ERASER_KILLED, FindingCode.ERASER_UNKILLABLE):
                ended = finding.code == FindingCode.ORPHANED_ERASER_KILLED
                fields = {"pid": finding.evidence.get("pid"), "killed": ended}
                events.append(Event("eraser.orphan.found", now, scrub.device, scrub.id, fields=fields))
        if step.step is Step.RESET:
            outcome = "ok" if step.verdict is Verdict.PASSED else step.findings[0].code
            events.append(Event("reset.finished", now, scrub.device, scrub.id, fields={"outcome": outcome}))
    outcome = scrub.outcome or Outcome.ABANDONED
    why = next((f.message for step in scrub.steps for f in step.findings if step.verdict is Verdict.FAILED), "")
    events.append(
        Event(
            "scrub.finished",
            now,
            scrub.device,
            scrub.id,
            scrub.actor,
            {
                "path": scrub.path.value,
                "trigger": scrub.trigger.value,
                "outcome": outcome.value,
                "duration_seconds": round(now - scrub.started, 6),
                "residue_bytes": scrub.measurement(Step.MEMORY, "residue_bytes"),
                "cleared_bytes": scrub.measurement(Step.MEMORY, "cleared_bytes"),
                "leftovers_killed": leftovers,
                "tenant": tenant,
                "message": why or None,
            },
        )
    )
    if certificate is not None:
        fields = {"certificate": certificate.id, "path": certificate.path.value}
        events.append(Event("certificate.issued", now, scrub.device, scrub.id, fields=fields))
    return tuple(events)


_WRITERS = frozenset({Step.RESET, Step.DIAGNOSTICS})
"""Steps before the memory audit that may themselves write to the memory."""


def unexplained_residue_message(scrub: ScrubRecord, previous_certificate: Certificate | None) -> str:
    """Return why residue is unexplained: the device was certified clean when the scrub began.

    Args:
        previous_certificate: the device's unused certificate at that time; None when it had none.

    Returns:
        The message; empty when no residue was found, or when it is explained.
    """
    residue = scrub.measurement(Step.MEMORY, "residue_bytes")
    ran = {step.step for step in scrub.steps if step.verdict is not Verdict.NOT_COVERED}
    if previous_certificate is None or not residue or ran & _WRITERS:
        return ""
    return (
        f"{residue} bytes of residue were found although certificate {previous_certificate.id} states that "
        "the device was clean and it was not granted since."
    )


def residue_unexplained(scrub: ScrubRecord, previous_certificate: Certificate | None) -> tuple[Event, ...]:
    """Return the event with the message of :func:`unexplained_residue_message`."""
    message = unexplained_residue_message(scrub, previous_certificate)
    if previous_certificate is None or not message:
        return ()
    now = scrub.ended if scrub.ended is not None else scrub.started
    fields: dict[str, str | int | float | bool | None]
    fields = {
        "residue_bytes": scrub.measurement(Step.MEMORY, "residue_bytes"),
        "certificate": previous_certificate.id,
        "message": message,
    }
    return (Event("residue.unexplained", now, scrub.device, scrub.id, fields=fields),)


def grantee_fields(grant: Grant) -> dict[str, str | int | float | bool | None]:
    """Return who has the device by ``grant``, as far as a source named it. Of several pods of a claim none is named."""
    pod = grant.pods[0] if len(grant.pods) == 1 else None
    fields: dict[str, str | int | float | bool | None] = {}
    if grant.tenant is not None:
        fields = {"tenant": grant.tenant, "pod": None if pod is None else pod.name}
    if job := job_of(grant.claim):
        return fields | {"pod": None, "job": job}
    if grant.claim is not None:
        fields |= {"claim": str(grant.claim), "claim_uid": grant.claim.uid}
    return fields


def release_requested(grant: Grant, now: float, device: str, actor: str) -> Event:
    """Return the event for the end of a claim or a job, as far as ``actor`` says so."""
    name = "job.end-reported" if job_of(grant.claim) else "claim.unprepare-requested"
    return Event(name, now, device, actor=actor, fields=grantee_fields(grant))


def granted(grant: Grant, proof: Certificate, path: str, seconds: float, actor: str) -> Event:
    """Return the event for a grant that ``actor`` requested; ``proof`` is the fast path's certificate that the grant used."""
    return Event(
        "handover.granted",
        grant.at,
        proof.device,
        proof.scrub,
        actor=actor,
        fields={
            "kind": grant.kind.value,
            "path": path,
            "grant": grant.sequence,
            "certificate": proof.id,
            "base_certificate": proof.rests_on,
            "exception": grant.basis.exception,
            "tenant": None,
            "pod": None,
            "container": None if grant.assignment is None else grant.assignment.container,
            "claim": None,
            "claim_uid": None,
            "job": None,
            **grantee_fields(grant),
            "duration_seconds": round(seconds, 6),
        },
    )
