"""Diagnostics: the device is given something to do, and what comes out is checked against the policy's floors."""

from __future__ import annotations

from scrubber.domain.diagnosis import diagnostic_findings
from scrubber.domain.errors import DeviceFault, Held, Lost
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.signals import fault_finding
from scrubber.engine.steps.work import Work

__all__ = ["diagnose"]

_SLACK = 15.0
"""Seconds on top of a level's own: a child has to start, and a loaded node is not a broken device."""


async def diagnose(work: Work) -> StepResult:
    dependencies, level = work.dependencies, work.plan.diagnostics
    start = dependencies.clock.monotonic()
    measured: dict[str, str | int | float | bool | None] = {"level": level.value}
    findings: tuple[Finding, ...]
    try:
        async with work.eraser_slot():
            checks = await dependencies.diagnostics.diagnose(work.device, level, level.seconds + _SLACK)
    except Held as held:
        findings = (work.dirty(Step.DIAGNOSTICS, FindingCode.HELD, str(held)),)
    except Lost as lost:
        findings = (fault_finding(Step.DIAGNOSTICS, lost),)
    except DeviceFault as fault:
        findings = (Finding(Step.DIAGNOSTICS, FindingCode.DIAGNOSTICS_FAILED, Severity.FAULT, str(fault)),)
    else:
        findings = diagnostic_findings(checks, work.device.model, work.policy.diagnostics.floors)
        if not checks:
            sentence = "The diagnostics came back without a single check."
            findings = (Finding(Step.DIAGNOSTICS, FindingCode.DIAGNOSTICS_FAILED, Severity.FAULT, sentence),)
        measured["checks"] = len(checks)
        for check in checks:
            measured.update({f"{check.name} {name}": value for name, value in check.measured.items()})
    verdict = Verdict.FAILED if findings else Verdict.PASSED
    return StepResult(Step.DIAGNOSTICS, verdict, dependencies.clock.monotonic() - start, findings, measured)
