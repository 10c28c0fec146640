"""Derives findings from driver reports, using the signal table in the device's policy."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.domain.baseline import Baseline, baseline_differences
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault
from scrubber.domain.evidence import Evidence, Finding, Severity, Step
from scrubber.domain.health.signal_table import (
    COMMON_SIGNALS,
    ERROR_CLASSES,
    UNKNOWN_CONDITION,
    ErrorClass,
    SignalTable,
)
from scrubber.domain.policy import Policy
from scrubber.domain.states import RecoveryMethod
from scrubber.domain.telemetry import LIFETIME_COUNTERS, Signal, Snapshot

__all__ = [
    "baseline_findings",
    "expected_settings",
    "fault_finding",
    "lifetime_findings",
    "recovery_method",
    "reported_fault",
    "settings_differences",
    "snapshot_findings",
]


def recovery_method(code: str, policy: Policy) -> RecoveryMethod:
    """Return how a device quarantined for ``code`` can recover; for a code in no table only by an operator."""
    number = policy.signals.errors.parse(code)
    if number is not None:
        return ERROR_CLASSES[policy.error_class(number)].recovery_method
    return policy.signals.classify(code).recovery_method


def reported_fault(signal: Signal, policy: Policy) -> str:
    """Return the error in ``signal`` that takes its device out of service, with its meaning; empty if there is none.

    No answer of the driver can change that: where the driver requests an action itself, its request is a fault as well.
    """
    errors = policy.signals.errors
    if signal.code != errors.prefix or signal.value is None:
        return ""
    meaning = ERROR_CLASSES[policy.error_class(signal.value)]
    return f"{errors.name} {signal.value}, which {meaning.message}" if meaning.severity is Severity.FAULT else ""


def snapshot_findings(
    snapshot: Snapshot,
    policy: Policy,
    known_counts: Mapping[str, int] | None = None,
    baseline: Baseline | None = None,
) -> tuple[Finding, ...]:
    """Return the findings of a snapshot. An absent value is not applicable and produces no finding.

    Args:
        known_counts: how often each error code had occurred at the last record.
        baseline: the device's baseline; a condition that an operator accepted as normal for it is a note.
    """
    normal = {} if baseline is None else dict(baseline.conditions)
    found = [
        _error(code, times, snapshot, policy, known_counts or {}) for code, times in sorted(snapshot.errors.items())
    ]
    if snapshot.ecc_uncorrected:
        message = f"{snapshot.ecc_uncorrected} uncorrected ECC errors since the driver was loaded."
        found.append(_found("ecc-uncorrected", message, {"errors": snapshot.ecc_uncorrected}))
    if snapshot.recovery_action not in (None, "none"):
        found.append(
            _found(_recovery_code(str(snapshot.recovery_action)), f"The driver requests: {snapshot.recovery_action}.")
        )
    found += [
        _condition(policy.signals, code, read, normal.get(code)) for code, read in sorted(snapshot.conditions.items())
    ]
    heat = snapshot.temperature_celsius
    if heat is not None and heat > policy.limits.max_temperature_celsius:
        message = f"{heat} °C is above the policy's limit of {policy.limits.max_temperature_celsius} °C."
        found.append(_found("too-hot", message, {"celsius": heat}))
    return tuple(found)


def _found(code: str, message: str, evidence: Evidence | None = None) -> Finding:
    return Finding(Step.HEALTH, code, COMMON_SIGNALS.classify(code).severity, message, evidence or {})


def _error(code: int, times: int, snapshot: Snapshot, policy: Policy, known: Mapping[str, int]) -> Finding:
    """Return the finding for an error code; the driver's own recovery action takes precedence over the code's class.

    A driver lists an error until the device is reset. An error that does not lead to a quarantine is a warning once,
    and then a note.
    """
    errors, kind = policy.signals.errors, policy.error_class(code)
    name = errors.format(code)
    severity, before = ERROR_CLASSES[kind].severity, known.get(name, 0)
    new = times - before if times >= before else times
    text = f"{errors.name} {code} was reported: it {ERROR_CLASSES[kind].message}"
    if severity is Severity.WARNING and not new:
        severity, text = Severity.NOTE, f"{text}, and has not recurred"
    if snapshot.recovery_action is not None and (kind is ErrorClass.CONTEXT or snapshot.recovery_action != "none"):
        severity, text = Severity.NOTE, f"{text}; the driver requests: {snapshot.recovery_action}"
    note = policy.error_notes.get(code)
    message = f"{text} ({note})." if note else f"{text}."
    evidence: Evidence = {errors.prefix: code, "class": kind.value, "count": times, "new": new}
    return Finding(Step.HEALTH, name, severity, message, evidence)


def _recovery_code(recovery: str) -> str:
    """Return the code for the action that the driver requests.

    Actions beyond this GPU (its fabric, its peers) need an operator.
    """
    if "reboot" in recovery:
        return "driver-requests-reboot"
    return "driver-requests-operator" if recovery in ("imex", "drain-p2p") else "driver-requests-reset"


def _condition(table: SignalTable, code: str, read: str, normal: str | None) -> Finding:
    meaning = table.classify(code)
    text = f"{code} ({read})" if read else code
    message = f"{text}: {meaning.message or UNKNOWN_CONDITION.message}."
    if read == normal and meaning.acceptable:
        return Finding(
            Step.HEALTH,
            code,
            Severity.NOTE,
            f"{message} An operator accepted this as normal for the device.",
            {"read": read},
        )
    return Finding(Step.HEALTH, code, meaning.severity, message, {"read": read})


def baseline_findings(device: Device, baseline: Baseline | None) -> tuple[Finding, ...]:
    """Return one finding if the device differs from its baseline, else none."""
    changed = baseline_differences(device, baseline)
    if not changed:
        return ()
    changes = "; ".join(str(each) for each in changed)
    message = (
        f"The device differs from its baseline: {changes}. If the change is intended, run: scrubber baseline "
        "accept DEVICE --reason …"
    )
    return (_found("baseline-mismatch", message, {"changed": " ".join(each.name for each in changed)}),)


def lifetime_findings(snapshot: Snapshot, known_counters: Mapping[str, int]) -> tuple[Finding, ...]:
    """Return findings for errors since the last check, from the counters that survive resets and driver reloads.

    Args:
        known_counters: the counters at the last recorded check. A counter that is new to the record produces a note,
            and so does one that decreased: the device was serviced.
    """
    found: list[Finding] = []
    for name in LIFETIME_COUNTERS:
        now, before = snapshot.counters.get(name), known_counters.get(name)
        if now is None or now == before:
            continue
        code = f"lifetime-{name.replace('_', '-')}"
        errors, grown = COMMON_SIGNALS.classify(code).message, before is not None and now > before
        more = f"{now - (before or 0)} new {errors} ({now} in total)" if grown else f"{now} {errors} in total"
        kind = COMMON_SIGNALS.classify(code).severity if grown else Severity.NOTE
        evidence: Evidence = {"counter": name, "value": now}
        if grown:
            evidence = {**evidence, "class": "lifetime", "count": now, "new": now - (before or 0)}
        found.append(Finding(Step.HEALTH, code, kind, f"{more}.", evidence))
    return tuple(found)


def fault_finding(step: Step, fault: DeviceFault) -> Finding:
    """Return a device fault that a port raised as a finding of the step that met it."""
    return Finding(step, fault.code, Severity.FAULT, str(fault))


# See docs/decisions/0025-device-settings.md.
def expected_settings(snapshot: Snapshot, policy: Policy) -> dict[str, str]:
    """Return the policy's values over the driver's defaults, for the settings that the device has.

    Never the values found at first start: that would legitimize a tenant's change.
    """
    expected = dict(snapshot.defaults)
    expected.update({name: value for name, value in policy.settings.items() if name in snapshot.settings})
    return expected


def settings_differences(snapshot: Snapshot, policy: Policy) -> dict[str, tuple[str | None, str]]:
    """Return the settings that differ from the expected values: name → (found, expected)."""
    expected = expected_settings(snapshot, policy)
    found = snapshot.settings
    return {name: (found.get(name), value) for name, value in expected.items() if found.get(name) != value}
