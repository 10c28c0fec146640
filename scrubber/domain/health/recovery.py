"""Quarantine and recovery: derives the next record from findings and scrubs. Pure; the controller commits it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from scrubber.domain.evidence import Finding, FindingCode, Outcome, Severity
from scrubber.domain.health.history import DAY, entries_of_last_day
from scrubber.domain.health.signals import recovery_method
from scrubber.domain.policy import Policy, ResetMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Cause, Health, RecoveryMethod

__all__ = ["after_findings", "after_scrub", "apply_attempt_limits", "condition_persists"]

_WEIGHT = {
    RecoveryMethod.SCRUB: 0,
    RecoveryMethod.WAIT: 0,
    RecoveryMethod.RESET: 1,
    RecoveryMethod.REBOOT: 2,
    RecoveryMethod.OPERATOR: 3,
}


def _worst(findings: Iterable[Finding], severity: Severity, policy: Policy) -> Finding | None:
    matching = [finding for finding in findings if finding.severity is severity]
    return max(matching, key=lambda finding: _WEIGHT[recovery_method(finding.code, policy)], default=None)


def _cause(finding: Finding, policy: Policy, now: float) -> Cause:
    return Cause(finding.code, finding.message, recovery_method(finding.code, policy), now)


_RESTING_NOTE = "recovery resumes 24 hours after the first of them."


def is_resting(record: DeviceRecord) -> bool:
    """Whether the next attempt waits until fewer than the permitted attempts of a day are on record."""
    return record.cause is not None and record.cause.message.endswith(_RESTING_NOTE)


# See docs/decisions/0028-recovery-and-probation.md.
def apply_attempt_limits(record: DeviceRecord, policy: Policy, now: float) -> DeviceRecord:
    """Return ``record`` unchanged while another attempt is allowed; otherwise condemned, or waiting.

    A cause that must end without intervention may last for any time, so it never condemns a device.
    """
    cause = record.cause
    if record.health is not Health.QUARANTINED or cause is None or cause.by_operator:
        return record
    waits = cause.recovery_method is RecoveryMethod.WAIT
    if record.failures >= policy.recovery.max_attempts and not waits:
        return _condemned(record, cause, f"{record.failures} recovery attempts failed", now)
    attempts = [
        each
        for each in entries_of_last_day(record.recovery_attempts, now, after=record.limits_count_from)
        if not each.operator_ordered
    ]
    resets = [each for each in attempts if each.reset]
    resets_again = record.owes_reset or policy.reset is ResetMode.REQUIRED
    if len(resets) >= policy.recovery.max_resets_per_day and resets_again:
        used_up, oldest = f"It was reset {len(resets)} times within a day", resets[0].at
    elif len(attempts) >= policy.recovery.max_attempts_per_day:
        used_up, oldest = f"It was recovered {len(attempts)} times within a day", attempts[0].at
    else:
        return record
    tenants = {
        strike.tenant for strike in entries_of_last_day(record.recent_quarantines, now, after=record.limits_count_from)
    }
    one_tenants = len(tenants) == 1 and None not in tenants
    if not waits and not one_tenants:
        return _condemned(record, cause, used_up, now)
    # If the faults occur only under one tenant, and the device works without that tenant, it must not require an
    # operator.
    who = ", each time while it was assigned to the same tenant" if one_tenants else ""
    message = cause.message if is_resting(record) else f"{cause.message} {used_up}{who}; {_RESTING_NOTE}"
    rest = max(record.retry_at or now, oldest + DAY)
    return replace(record, cause=replace(cause, message=message), retry_at=rest)


def _condemned(record: DeviceRecord, cause: Cause, reason: str, now: float) -> DeviceRecord:
    first = next((each.code for each in reversed(record.recent_quarantines)), cause.code)
    taken = f" It was quarantined for {first}." if first != cause.code else ""
    message = f"{cause.message}{taken} {reason}; an operator must inspect it."
    return record.after_condemnation(Cause(cause.code, message, RecoveryMethod.OPERATOR, now))


def after_findings(
    record: DeviceRecord,
    findings: Iterable[Finding],
    policy: Policy,
    now: float,
    *,
    ended: Collection[str] | None = None,
    soft_quarantines_stopped: bool = False,
) -> DeviceRecord:
    """Return the record after a health check with ``findings`` (all of them; none means no problem).

    During a recovery the result of the recovery's own last step decides: the condition that it must clear may still
    exist.

    Args:
        ended: codes of warnings on record that were not seen for long enough to be over; None: all that are not found
            now.
        soft_quarantines_stopped: whether the breaker prevents quarantines for soft signals.
    """
    everything = tuple(findings)
    record = _with_counters(record, everything)
    warned = {finding.code for finding in everything if finding.severity is Severity.WARNING}
    continuing = set() if ended is None else {each.code for each in record.warnings} - set(ended)
    record = record.with_warnings(warned | continuing, now, policy.signals)
    if record.health is Health.RECOVERING:
        return record
    if record.health is Health.CONDEMNED:
        wants = any(
            each.severity is Severity.FAULT and recovery_method(each.code, policy) is RecoveryMethod.RESET
            for each in everything
        )
        return record.with_reset_required() if wants else record
    overdue = [
        each
        for each in _overdue(record, everything, policy, now)
        if not (soft_quarantines_stopped and each.code in policy.signals.limited_by_breaker)
    ]
    fault = _worst((*everything, *overdue), Severity.FAULT, policy)
    if fault is not None:
        return _faulted(record, fault, policy, now)
    warning = _worst(everything, Severity.WARNING, policy)
    if warning is not None and record.health is Health.HEALTHY:
        return record.after_soft_signal(_cause(warning, policy, now))
    if not record.warnings and record.health is Health.SUSPECT:
        return record.after_signals_ended()
    return record


# See docs/decisions/0027-soft-signals.md.
def _overdue(record: DeviceRecord, findings: Iterable[Finding], policy: Policy, now: float) -> list[Finding]:
    """Return the warnings that have lasted for longer than the policy allows, as faults."""
    since = {each.code: each.since for each in record.warnings}
    found = []
    for finding in findings:
        limit = policy.health.quarantine_after.get(finding.code)
        if finding.severity is Severity.WARNING and limit is not None and finding.code in since:
            lasted = now - since[finding.code]
            if lasted >= limit:
                message = f"{finding.message} It has lasted for {lasted:.0f} s."
                found.append(replace(finding, severity=Severity.FAULT, message=message))
    return found


def condition_persists(record: DeviceRecord, findings: Iterable[Finding]) -> bool:
    """Whether a condition that must end without intervention before the device can return persists."""
    if any(finding.severity is Severity.FAULT for finding in findings):
        return True
    return record.cause is not None and any(each.code == record.cause.code for each in record.warnings)


def _with_counters(record: DeviceRecord, findings: Iterable[Finding]) -> DeviceRecord:
    """Return the record with the counters in ``findings``, so that the same counts are not reported as new again."""
    counters = {
        str(finding.evidence["counter"]): int(finding.evidence["value"] or 0)
        for finding in findings
        if "counter" in finding.evidence
    }
    return record.with_counters(counters) if counters.items() - dict(record.lifetime_counters).items() else record


def _pause(record: DeviceRecord, policy: Policy, failures: int, now: float) -> float:
    """Return the seconds before the next attempt.

    They increase with each failed attempt, and with each quarantine of the same day.
    """
    strikes = entries_of_last_day(record.recent_quarantines, now, after=record.limits_count_from)
    return policy.recovery.backoff(max(failures + record.deferred_attempts, len(strikes)))


def _faulted(record: DeviceRecord, fault: Finding, policy: Policy, now: float) -> DeviceRecord:
    cause = _cause(fault, policy, now)
    if record.health is Health.QUARANTINED:
        known = record.cause
        if known is not None and (
            known.by_operator or _WEIGHT[cause.recovery_method] <= _WEIGHT[known.recovery_method]
        ):
            return record.with_reset_required() if cause.recovery_method is RecoveryMethod.RESET else record
    # A fault while a tenant has the device, for example during a break-glass override, is no failure of the recovery.
    relapse = record.health is Health.PROBATION and record.tenant is None
    retry_at = now + _pause(record, policy, record.failures + (1 if relapse else 0), now)
    if relapse and cause.recovery_method is RecoveryMethod.WAIT:
        return apply_attempt_limits(record.after_deferred_attempt(cause, retry_at=retry_at), policy, now)
    return apply_attempt_limits(record.after_fault(cause, retry_at=retry_at, is_failed_attempt=relapse), policy, now)


def after_scrub(
    record: DeviceRecord,
    outcome: Outcome,
    findings: Iterable[Finding],
    policy: Policy,
    now: float,
    *,
    reset: bool = False,
) -> DeviceRecord:
    """Return the record after a finished slow path; ``record`` already has its hygiene.

    A scrub that was blocked or abandoned is no evidence about the device, so it neither proves anything nor counts as
    an attempt. A scrub that passes while the soft signal that caused the quarantine persists has not cleared its cause.

    Args:
        reset: whether the device was reset during the scrub, or a reset was tried.
    """
    rule = policy.recovery
    findings = tuple(findings)
    # Findings that only warn are left to the next health check, which records them with their consequences.
    record = _with_counters(record, (each for each in findings if each.severity is not Severity.WARNING))
    if record.health is Health.RECOVERING and outcome is not Outcome.ABANDONED:
        met_something = outcome is not Outcome.BLOCKED and not _is_deferred(findings, policy)
        record = record.with_attempt_result(counts=reset or met_something, reset=reset)
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
            if cause.recovery_method is RecoveryMethod.WAIT:
                return apply_attempt_limits(record.after_deferred_attempt(cause, retry_at=retry_at), policy, now)
            return apply_attempt_limits(
                record.after_fault(cause, retry_at=retry_at, is_failed_attempt=True), policy, now
            )
        return _faulted(record, fault, policy, now)
    if record.health is Health.RECOVERING:
        if outcome is Outcome.PASSED:
            return record.after_recovery(retry_at=now + rule.probation_interval)
        retry_at = now + _pause(record, policy, record.failures, now)
        blocked = record.after_recovery_failure(retry_at=retry_at)
        # The reset that was left to another service may end the recovery: its limits are checked before the next one.
        left = any(each.code == FindingCode.RESET_LEFT_TO_OTHERS for each in findings)
        return blocked if left else apply_attempt_limits(blocked, policy, now)
    if record.health is Health.PROBATION and outcome is Outcome.PASSED:
        return record.after_probation_scrub(rule.probation_scrubs, retry_at=now + rule.probation_interval)
    return record


def _is_deferred(findings: Iterable[Finding], policy: Policy) -> bool:
    """Whether the fault that failed the scrub must end without intervention."""
    fault = _worst(findings, Severity.FAULT, policy)
    return fault is not None and recovery_method(fault.code, policy) is RecoveryMethod.WAIT
