"""On-chip step: evaluates the eraser's measurements on every processor separately from the memory."""

from __future__ import annotations

from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.engine.steps.context import ScrubContext

__all__ = ["evaluate_on_chip"]


async def evaluate_on_chip(context: ScrubContext) -> StepResult:
    """Evaluate the on-chip report. The eraser made it with the memory run, because a device context is expensive."""
    found = next((report.on_chip for report in context.erase_reports), None)
    seconds = sum(
        duration
        for report in context.erase_reports
        for phase, duration in report.seconds_by_phase
        if phase == "on-chip"
    )
    if found is None:
        unknown = ("on-chip: not known to the command",) if context.device.claimed_by else ()
        return StepResult(Step.ON_CHIP, Verdict.NOT_COVERED, seconds, not_covered=unknown)
    findings: list[Finding] = []
    if found.units_cleared < found.units or found.units < 1:
        message = f"Only {found.units_cleared} of {found.units} processors ran and were cleared."
        evidence = {"units": found.units, "units_cleared": found.units_cleared}
        findings.append(Finding(Step.ON_CHIP, FindingCode.ON_CHIP_FAILED, Severity.FAULT, message, evidence))
    elif found.failed_bytes:
        message = f"{found.failed_bytes} bytes of on-chip memory did not read back as zeros."
        evidence = {"failed_bytes": found.failed_bytes}
        findings.append(Finding(Step.ON_CHIP, FindingCode.ON_CHIP_FAILED, Severity.FAULT, message, evidence))
    bad = bool(findings)
    if found.residue_bytes:
        message = f"{found.residue_bytes} bytes of residue were found in on-chip memory."
        evidence = {"residue_bytes": found.residue_bytes}
        findings.append(Finding(Step.ON_CHIP, FindingCode.ON_CHIP_RESIDUE, Severity.NOTE, message, evidence))
    measured = {
        "units": found.units,
        "units_cleared": found.units_cleared,
        "shared_bytes": found.shared_bytes,
        "register_bytes": found.register_bytes,
        "residue_bytes": found.residue_bytes,
    }
    return StepResult(Step.ON_CHIP, Verdict.FAILED if bad else Verdict.PASSED, seconds, tuple(findings), measured)
