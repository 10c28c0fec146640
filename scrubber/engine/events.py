"""Events: what the audit log, the log and the metrics say about a change. Pure."""

from __future__ import annotations

from scrubber.domain.evidence import Certificate, Finding, FindingCode, Outcome, ScrubRecord, Step, Verdict
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Health
from scrubber.ports.record import Event

__all__ = [
    "granted",
    "health_changed",
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
    FindingCode.UNAUTHORIZED_PROCESS_KILLED: "stranger.ended",
    FindingCode.LEFTOVER_POD_KILLED: "leftover.pod-ended",
    FindingCode.UNINSPECTED_PROCESS_KILLED: "uninspected.ended",
}
"""Findings of a scrub that ended processes: acts that have an audit row of their own."""


def health_changed(
    before: DeviceRecord, after: DeviceRecord, now: float, scrub: str | None = None
) -> tuple[Event, ...]:
    """The event of a change of health, or of its cause; none when neither changed."""
    if (before.health, before.cause) == (after.health, after.cause):
        return ()
    fields: dict[str, str | int | float | bool | None] = {}
    if after.cause is not None:
        fields = {
            "cause": after.cause.code,
            "sentence": after.cause.message,
            "way_back": after.cause.recovery_method.value,
        }
    if len(after.recent_quarantines) and after.recent_quarantines[-1:] != before.recent_quarantines[-1:]:
        fields["tenant_namespace"] = after.recent_quarantines[-1].tenant
    name = _HEALTH_EVENTS[after.health]
    if before.health is Health.RECOVERING and after.health is Health.QUARANTINED:
        name = "health.recovery-failed"
    return (Event(name, now, after.device, scrub, fields=fields),)


def signal(finding: Finding, tenant: str | None, device: str, now: float) -> Event:
    """Return the event of errors of one code that came since they were last reported."""
    seen = finding.evidence
    fields = {"code": finding.code, "class": seen["class"], "new": seen["new"], "total": seen["count"]}
    return Event(
        "health.signal", now, device, fields={**fields, "tenant_namespace": tenant, "sentence": finding.message}
    )


def scrub_started(scrub: ScrubRecord, tenant: str | None) -> Event:
    fields = {"path": scrub.path.value, "occasion": scrub.trigger.value, "tenant_namespace": tenant}
    return Event("scrub.started", scrub.started, scrub.device, scrub.id, scrub.actor, fields)


def scrub_finished(scrub: ScrubRecord, certificate: Certificate | None, tenant: str | None = None) -> tuple[Event, ...]:
    """Return the events of a scrub's end, and of what it did to processes and devices.

    Args:
        tenant: the only tenant that had the device before; None when there was none, or that is not certain.
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
                    Event("leftover.ended", now, scrub.device, scrub.id, fields={"pid": int(pid)}) for pid in pids
                ]
            if finding.code == FindingCode.UNINSPECTED_PROCESSES and finding.evidence.get("news"):
                fields = {**finding.evidence, "sentence": finding.message, "tenant_namespace": None}
                del fields["news"]
                events.append(Event("process.uninspected", now, scrub.device, scrub.id, fields=fields))
            if finding.code in _ENDED:
                # An unauthorized process belongs to no tenant of the device; of a pod that had it, the scrub's tenant is the pod's.
                unowned = {} if finding.code == FindingCode.LEFTOVER_POD_KILLED else {"tenant_namespace": None}
                acts = {**finding.evidence, **unowned}
                events.append(Event(_ENDED[finding.code], now, scrub.device, scrub.id, fields=acts))
            if finding.code in (FindingCode.ORPHANED_ERASER_KILLED, FindingCode.ERASER_UNKILLABLE):
                ended = finding.code == FindingCode.ORPHANED_ERASER_KILLED
                fields = {"pid": finding.evidence.get("pid"), "ended": ended}
                events.append(Event("eraser.orphan", now, scrub.device, scrub.id, fields=fields))
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
                "occasion": scrub.trigger.value,
                "outcome": outcome.value,
                "seconds": round(now - scrub.started, 6),
                "residue_bytes": scrub.measurement(Step.MEMORY, "residue_bytes"),
                "cleared_bytes": scrub.measurement(Step.MEMORY, "cleared_bytes"),
                "leftovers": leftovers,
                "tenant_namespace": tenant,
                "sentence": why or None,
            },
        )
    )
    if certificate is not None:
        fields = {"certificate": certificate.id, "path": certificate.path.value}
        events.append(Event("certificate.issued", now, scrub.device, scrub.id, fields=fields))
    return tuple(events)


_WRITERS = frozenset({Step.RESET, Step.DIAGNOSTICS})
"""Steps before the audit of the memory that may leave bytes on it themselves."""


def unexplained_residue_message(scrub: ScrubRecord, previous_certificate: Certificate | None) -> str:
    """Return why residue is unexplained: the device was certified clean when the scrub began.

    Args:
        previous_certificate: the unused certificate that the device had then; None when it had none.

    Returns:
        The sentence that says so; empty when nothing was found, or what was has an explanation.
    """
    residue = scrub.measurement(Step.MEMORY, "residue_bytes")
    ran = {step.step for step in scrub.steps if step.verdict is not Verdict.NOT_COVERED}
    if previous_certificate is None or not residue or ran & _WRITERS:
        return ""
    return (
        f"{residue} bytes of residue were found although certificate {previous_certificate.id} says that the device was clean, and nobody "
        "was granted it since."
    )


def residue_unexplained(scrub: ScrubRecord, previous_certificate: Certificate | None) -> tuple[Event, ...]:
    """The event of what :func:`unexplained_residue_message` says."""
    message = unexplained_residue_message(scrub, previous_certificate)
    if previous_certificate is None or not message:
        return ()
    now = scrub.ended if scrub.ended is not None else scrub.started
    fields: dict[str, str | int | float | bool | None]
    fields = {
        "residue_bytes": scrub.measurement(Step.MEMORY, "residue_bytes"),
        "certificate": previous_certificate.id,
        "sentence": message,
    }
    return (Event("residue.unexplained", now, scrub.device, scrub.id, fields=fields),)


def granted(grant: Grant, proof: Certificate, path: str, seconds: float) -> Event:
    """A grant, and the ``proof`` that it used: of a fast path, which the ledger has as a scrub."""
    assignment = grant.assignment
    return Event(
        "handover.granted",
        grant.at,
        proof.device,
        proof.scrub,
        actor="plugin",
        fields={
            "kind": grant.kind.value,
            "path": path,
            "grant": grant.sequence,
            "certificate": proof.id,
            "rests_on": proof.rests_on,
            "exception": grant.basis.exception,
            "tenant_namespace": None if assignment is None else assignment.pod.namespace,
            "pod": None if assignment is None else assignment.pod.name,
            "container": None if assignment is None else assignment.container,
            "seconds": round(seconds, 6),
        },
    )
