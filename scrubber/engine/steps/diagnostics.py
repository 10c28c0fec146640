"""Diagnostics step: runs a workload on the device and checks the results against the policy's minimum rates."""

from __future__ import annotations

from scrubber.domain.device import SharedResource
from scrubber.domain.diagnostics import diagnostic_findings, min_rates_of
from scrubber.domain.errors import DeviceBusy, DeviceFault, DeviceLost
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.health.signals import fault_finding
from scrubber.engine.steps.context import ScrubContext

__all__ = ["diagnose"]

_SLACK = 15.0
"""Seconds on top of those of the level: the child has to start, and a loaded node is not a broken device."""

_NO_CHECKS = "diagnostics: the command has none"
_RATES = SharedResource("rates of diagnostics", 1)
"""Transfers share the host's memory and bus, and instances share the power of their GPU. A device whose rates are
compared with a minimum is therefore diagnosed alone: beside others, a healthy one could be too slow."""


# See docs/decisions/0005-scrub-order-and-pauses.md.
async def diagnose(context: ScrubContext) -> StepResult:
    dependencies, level = context.dependencies, context.plan.diagnostics
    start = dependencies.clock.monotonic()
    measured: dict[str, str | int | float | bool | None] = {"level": level.value}
    findings: tuple[Finding, ...]
    has_minimum = bool(min_rates_of(context.device.model, context.policy.diagnostics.min_rates))
    try:
        async with context.eraser_slot(_RATES if has_minimum else context.device.shared_resource):
            checks = await dependencies.diagnostics.diagnose(context.device, level, level.seconds + _SLACK)
    except DeviceBusy as held:
        findings = (context.blocking_finding(Step.DIAGNOSTICS, FindingCode.DEVICE_BUSY, str(held)),)
    except DeviceLost as lost:
        findings = (fault_finding(Step.DIAGNOSTICS, lost),)
    except DeviceFault as fault:
        findings = (Finding(Step.DIAGNOSTICS, FindingCode.DIAGNOSTICS_FAILED, Severity.FAULT, str(fault)),)
    else:
        findings = diagnostic_findings(checks, context.device.model, context.policy.diagnostics.min_rates)
        if not checks and context.device.claimed_by:
            seconds = dependencies.clock.monotonic() - start
            return StepResult(Step.DIAGNOSTICS, Verdict.NOT_COVERED, seconds, (), measured, (_NO_CHECKS,))
        if not checks:
            message = "The diagnostics returned no checks."
            findings = (Finding(Step.DIAGNOSTICS, FindingCode.DIAGNOSTICS_FAILED, Severity.FAULT, message),)
        measured["checks"] = len(checks)
        for check in checks:
            measured.update({f"{check.name} {name}": value for name, value in check.measured.items()})
    verdict = Verdict.FAILED if findings else Verdict.PASSED
    return StepResult(Step.DIAGNOSTICS, verdict, dependencies.clock.monotonic() - start, findings, measured)
