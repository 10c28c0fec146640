"""Quarantine and the way back: from findings and scrubs to the next record. Pure; the keeper commits the result."""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.domain.evidence import Finding, Outcome, Severity
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.signals import way_back

__all__ = ["after_findings", "after_scrub"]

_WEIGHT = {WayBack.SCRUB: 0, WayBack.WAIT: 0, WayBack.RESET: 1, WayBack.REBOOT: 2, WayBack.PERSON: 3}


def _worst(findings: Iterable[Finding], severity: Severity, policy: Policy) -> Finding | None:
    matching = [finding for finding in findings if finding.severity is severity]
    return max(matching, key=lambda finding: _WEIGHT[way_back(finding.code, policy)], default=None)


def _cause(finding: Finding, policy: Policy, now: float) -> Cause:
    return Cause(finding.code, finding.sentence, way_back(finding.code, policy), now)


def _spent(record: DeviceRecord, policy: Policy, now: float) -> DeviceRecord:
    """Condemned, once the attempts are used up. A cause that has to end by itself may take as long as it takes."""
    cause = record.cause
    if cause is None or cause.by_person or cause.way_back is WayBack.WAIT:
        return record
    if record.failures < policy.recovery.attempts:
        return record
    sentence = f"{cause.sentence} {record.failures} attempts to recover it failed; a person has to look at it."
    return record.condemned(Cause(cause.code, sentence, WayBack.PERSON, now))


def after_findings(record: DeviceRecord, findings: Iterable[Finding], policy: Policy, now: float) -> DeviceRecord:
    """The record once a look at the device's health found ``findings`` (all of them; none means quiet).

    While a recovery is under way its own last step judges: the condition that it is to lift may still stand.
    """
    everything = tuple(findings)
    record = _noted(record, everything)
    fault = _worst(everything, Severity.FAULT, policy)
    if record.health in (Health.CONDEMNED, Health.RECOVERING):
        return record
    if fault is not None:
        return _faulted(record, fault, policy, now)
    warning = _worst(everything, Severity.WARNING, policy)
    if warning is not None and record.health is Health.HEALTHY:
        return record.suspected(_cause(warning, policy, now))
    if warning is None and record.health is Health.SUSPECT:
        return record.calmed()
    return record


def _noted(record: DeviceRecord, findings: Iterable[Finding]) -> DeviceRecord:
    """With the counters on record that ``findings`` tell of: what was found once is not found again as news."""
    counters = {
        str(finding.evidence["counter"]): int(finding.evidence["value"] or 0)
        for finding in findings
        if "counter" in finding.evidence
    }
    return record.noted(counters) if counters else record


def _faulted(record: DeviceRecord, fault: Finding, policy: Policy, now: float) -> DeviceRecord:
    cause = _cause(fault, policy, now)
    if record.health is Health.QUARANTINED:
        known = record.cause
        if known is not None and (known.by_person or _WEIGHT[cause.way_back] <= _WEIGHT[known.way_back]):
            return record
    relapse = record.health is Health.PROBATION
    failures = record.failures + (1 if relapse else 0)
    return _spent(record.faulted(cause, retry_at=now + policy.recovery.backoff(failures), counts=relapse), policy, now)


def after_scrub(
    record: DeviceRecord, outcome: Outcome, findings: Iterable[Finding], policy: Policy, now: float
) -> DeviceRecord:
    """What a finished slow path means for health; ``record`` already has its hygiene.

    A scrub that was held up or abandoned says nothing about the device, so it neither proves nor costs an attempt.
    """
    rule = policy.recovery
    findings = tuple(findings)
    record = _noted(record, findings)
    if outcome is Outcome.FAILED:
        fault = _worst(findings, Severity.FAULT, policy)
        if fault is None or record.health is Health.CONDEMNED:
            return record
        if record.health is Health.RECOVERING:
            retry_at = now + rule.backoff(record.failures + 1)
            return _spent(record.faulted(_cause(fault, policy, now), retry_at=retry_at, counts=True), policy, now)
        return _faulted(record, fault, policy, now)
    if record.health is Health.RECOVERING:
        if outcome is Outcome.PASSED:
            return record.recovered(retry_at=now + rule.probation_interval)
        return record.recovery_failed(retry_at=now + rule.backoff(record.failures), counts=False)
    if record.health is Health.PROBATION and outcome is Outcome.PASSED:
        return record.proved_again(rule.probation_scrubs, retry_at=now + rule.probation_interval)
    return record
