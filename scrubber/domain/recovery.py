"""Quarantine and the way back: from findings and scrubs to the next record. Pure; the controller commits the result."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from scrubber.domain.evidence import Finding, Outcome, Severity
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.policy import Policy, ResetUse
from scrubber.domain.record import DeviceRecord
from scrubber.domain.signals import way_back
from scrubber.domain.tally import DAY, of_the_day

__all__ = ["after_findings", "after_scrub", "spent", "stands"]

_WEIGHT = {WayBack.SCRUB: 0, WayBack.WAIT: 0, WayBack.RESET: 1, WayBack.REBOOT: 2, WayBack.PERSON: 3}


def _worst(findings: Iterable[Finding], severity: Severity, policy: Policy) -> Finding | None:
    matching = [finding for finding in findings if finding.severity is severity]
    return max(matching, key=lambda finding: _WEIGHT[way_back(finding.code, policy)], default=None)


def _cause(finding: Finding, policy: Policy, now: float) -> Cause:
    return Cause(finding.code, finding.sentence, way_back(finding.code, policy), now)


_RESTS = "it rests until a day has passed."


def spent(record: DeviceRecord, policy: Policy, now: float) -> DeviceRecord:
    """``record`` itself while another attempt may be made; else the device is condemned, or rests.

    A cause that has to end by itself may take as long as it takes, so it condemns nobody.
    """
    cause = record.cause
    if record.health is not Health.QUARANTINED or cause is None or cause.by_person:
        return record
    waits = cause.way_back is WayBack.WAIT
    if record.failures >= policy.recovery.attempts and not waits:
        return _condemned(record, cause, f"{record.failures} attempts to recover it failed", now)
    attempts = [each for each in of_the_day(record.attempts, now, after=record.forgiven) if not each.ordered]
    resets = [each for each in attempts if each.reset]
    resets_again = record.must_reset or policy.reset is ResetUse.REQUIRED
    if len(resets) >= policy.recovery.resets_per_day and resets_again:
        used_up, oldest = f"It was reset {len(resets)} times within a day", resets[0].at
    elif len(attempts) >= policy.recovery.attempts_per_day:
        used_up, oldest = f"It was recovered {len(attempts)} times within a day", attempts[0].at
    else:
        return record
    tenants = {strike.tenant for strike in of_the_day(record.strikes, now, after=record.forgiven)}
    one_tenants = len(tenants) == 1 and None not in tenants
    if not waits and not one_tenants:
        return _condemned(record, cause, used_up, now)
    # A device that one tenant brings to its knees, and that is well without him, is not to be had for a person's time.
    who = ", each time while the same tenant had it" if one_tenants else ""
    told = cause.sentence.endswith(_RESTS)
    sentence = cause.sentence if told else f"{cause.sentence} {used_up}{who}; {_RESTS}"
    rest = max(record.retry_at or now, oldest + DAY)
    return replace(record, cause=replace(cause, sentence=sentence), retry_at=rest)


def _condemned(record: DeviceRecord, cause: Cause, why: str, now: float) -> DeviceRecord:
    first = next((each.code for each in reversed(record.strikes)), cause.code)
    taken = f" It had been taken out for {first}." if first != cause.code else ""
    sentence = f"{cause.sentence}{taken} {why}; a person has to look at it."
    return record.condemned(Cause(cause.code, sentence, WayBack.PERSON, now))


def after_findings(
    record: DeviceRecord,
    findings: Iterable[Finding],
    policy: Policy,
    now: float,
    *,
    ended: Collection[str] | None = None,
    soft_stopped: bool = False,
) -> DeviceRecord:
    """The record once a look at the device's health found ``findings`` (all of them; none means quiet).

    While a recovery is under way its own last step judges: the condition that it is to lift may still stand.

    Args:
        ended: codes of warnings on record that were not seen for long enough to be over; None: all that are not found now.
        soft_stopped: the breaker lets no soft signal take a device out.
    """
    everything = tuple(findings)
    record = _noted(record, everything)
    warned = {finding.code for finding in everything if finding.severity is Severity.WARNING}
    standing = set() if ended is None else {each.code for each in record.lasting} - set(ended)
    record = record.warned(warned | standing, now, policy.signals)
    if record.health is Health.RECOVERING:
        return record
    if record.health is Health.CONDEMNED:
        wants = any(
            each.severity is Severity.FAULT and way_back(each.code, policy) is WayBack.RESET for each in everything
        )
        return record.owing_reset() if wants else record
    overdue = [
        each
        for each in _overdue(record, everything, policy, now)
        if not (soft_stopped and each.code in policy.signals.spared)
    ]
    fault = _worst((*everything, *overdue), Severity.FAULT, policy)
    if fault is not None:
        return _faulted(record, fault, policy, now)
    warning = _worst(everything, Severity.WARNING, policy)
    if warning is not None and record.health is Health.HEALTHY:
        return record.suspected(_cause(warning, policy, now))
    if not record.lasting and record.health is Health.SUSPECT:
        return record.calmed()
    return record


def _overdue(record: DeviceRecord, findings: Iterable[Finding], policy: Policy, now: float) -> list[Finding]:
    """The warnings that have lasted for longer than the policy bears, as faults."""
    since = {each.code: each.since for each in record.lasting}
    found = []
    for finding in findings:
        limit = policy.health.sustained.get(finding.code)
        if finding.severity is Severity.WARNING and limit is not None and finding.code in since:
            lasted = now - since[finding.code]
            if lasted >= limit:
                sentence = f"{finding.sentence} It has lasted for {lasted:.0f} s."
                found.append(replace(finding, severity=Severity.FAULT, sentence=sentence))
    return found


def stands(record: DeviceRecord, findings: Iterable[Finding]) -> bool:
    """Whether what has to end by itself before the device can return goes on."""
    if any(finding.severity is Severity.FAULT for finding in findings):
        return True
    return record.cause is not None and any(each.code == record.cause.code for each in record.lasting)


def _noted(record: DeviceRecord, findings: Iterable[Finding]) -> DeviceRecord:
    """With the counters on record that ``findings`` tell of: what was found once is not found again as news."""
    counters = {
        str(finding.evidence["counter"]): int(finding.evidence["value"] or 0)
        for finding in findings
        if "counter" in finding.evidence
    }
    return record.noted(counters) if counters.items() - dict(record.lifetime).items() else record


def _pause(record: DeviceRecord, policy: Policy, failures: int, now: float) -> float:
    """Before the next attempt: longer with each one that brought nothing, and with each quarantine of the same day."""
    strikes = of_the_day(record.strikes, now, after=record.forgiven)
    return policy.recovery.backoff(max(failures + record.waits, len(strikes)))


def _faulted(record: DeviceRecord, fault: Finding, policy: Policy, now: float) -> DeviceRecord:
    cause = _cause(fault, policy, now)
    if record.health is Health.QUARANTINED:
        known = record.cause
        if known is not None and (known.by_person or _WEIGHT[cause.way_back] <= _WEIGHT[known.way_back]):
            return record.owing_reset() if cause.way_back is WayBack.RESET else record
    # What comes while a tenant has it, by a broken glass say, is not the device's own failing.
    relapse = record.health is Health.PROBATION and record.tenant is None
    retry_at = now + _pause(record, policy, record.failures + (1 if relapse else 0), now)
    if relapse and cause.way_back is WayBack.WAIT:
        return spent(record.has_to_wait(cause, retry_at=retry_at), policy, now)
    return spent(record.faulted(cause, retry_at=retry_at, counts=relapse), policy, now)


def after_scrub(
    record: DeviceRecord,
    outcome: Outcome,
    findings: Iterable[Finding],
    policy: Policy,
    now: float,
    *,
    reset: bool = False,
) -> DeviceRecord:
    """What a finished slow path means for health; ``record`` already has its hygiene.

    A scrub that was held up or abandoned says nothing about the device, so it neither proves nor costs an attempt. One
    that passes while the soft signal stands for which the device was taken out has not lifted its cause.

    Args:
        reset: the device was reset on the way, or that was tried.
    """
    rule = policy.recovery
    findings = tuple(findings)
    # What only warns is the next look's to find, and to put on record with what it means.
    record = _noted(record, (each for each in findings if each.severity is not Severity.WARNING))
    if record.health is Health.RECOVERING and outcome is not Outcome.ABANDONED:
        met_something = outcome is not Outcome.HELD_UP and not _has_to_wait(findings, policy)
        record = record.attempted(made=reset or met_something, reset=reset)
    fault = _worst(findings, Severity.FAULT, policy)
    if record.health is Health.RECOVERING and outcome is Outcome.PASSED:
        code = record.cause.code if record.cause is not None else None
        soft = (each for each in findings if each.code == code and each.severity is Severity.WARNING)
        fault = next(soft, None)
        outcome = Outcome.PASSED if fault is None else Outcome.FAILED
    if outcome is Outcome.FAILED:
        if fault is None or record.health is Health.CONDEMNED:
            return record
        if record.health is Health.RECOVERING:
            cause, retry_at = _cause(fault, policy, now), now + _pause(record, policy, record.failures + 1, now)
            if cause.way_back is WayBack.WAIT:
                return spent(record.has_to_wait(cause, retry_at=retry_at), policy, now)
            return spent(record.faulted(cause, retry_at=retry_at, counts=True), policy, now)
        return _faulted(record, fault, policy, now)
    if record.health is Health.RECOVERING:
        if outcome is Outcome.PASSED:
            return record.recovered(retry_at=now + rule.probation_interval)
        retry_at = now + _pause(record, policy, record.failures, now)
        return spent(record.recovery_failed(retry_at=retry_at), policy, now)
    if record.health is Health.PROBATION and outcome is Outcome.PASSED:
        return record.proved_again(rule.probation_scrubs, retry_at=now + rule.probation_interval)
    return record


def _has_to_wait(findings: Iterable[Finding], policy: Policy) -> bool:
    """Whether what a scrub failed by has to end by itself."""
    fault = _worst(findings, Severity.FAULT, policy)
    return fault is not None and way_back(fault.code, policy) is WayBack.WAIT
