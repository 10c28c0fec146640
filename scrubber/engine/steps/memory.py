"""Memory step: audits, clears and verifies the memory in an eraser child that is killed at its deadline."""

from __future__ import annotations

from scrubber.domain.errors import DeviceBusy, DriverTimeout
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.engine.steps.context import ScrubContext
from scrubber.ports.device import EraseReport, EraseRequest

__all__ = ["clear_memory"]


async def clear_memory(context: ScrubContext) -> StepResult:
    """Clear all memory.

    The deadline counts from the request to the eraser, so a node that starts it slowly uses none of it.
    """
    dependencies = context.dependencies
    if context.device.claimed_by and not context.policy.memory.accept_claims:
        return _claim_not_accepted(context)
    limit = context.policy.limits.memory_deadline(context.device.memory_bytes)
    rule = context.policy.memory
    request = EraseRequest(
        context.scrub,
        audit=rule.count_residue,
        pattern=rule.pattern_pass,
        deadline=limit,
        on_chip=Step.ON_CHIP in context.plan.steps,
    )
    async with context.eraser_slot(context.device.shared_resource):
        start = dependencies.clock.monotonic()
        try:
            report = await dependencies.eraser.erase(context.device, request, context.progress)
        except DeviceBusy as held:
            finding = context.blocking_finding(Step.MEMORY, FindingCode.DEVICE_BUSY, str(held))
            return StepResult(Step.MEMORY, Verdict.FAILED, dependencies.clock.monotonic() - start, (finding,))
        except DriverTimeout as stuck:
            message = f"The memory was not cleared within {limit:.0f} s: {stuck}"
            finding = Finding(Step.MEMORY, FindingCode.ERASE_TIMEOUT, Severity.FAULT, message)
            return StepResult(Step.MEMORY, Verdict.FAILED, dependencies.clock.monotonic() - start, (finding,))
        context.erase_reports.append(report)
        return _judge(context, report, dependencies.clock.monotonic() - start)


def _claim_not_accepted(context: ScrubContext) -> StepResult:
    message = (
        f"That the memory is cleared would only be claimed by {context.device.claimed_by}, which the policy does not "
        "accept; to accept it, set memory.acceptClaims: true in the policy."
    )
    finding = context.blocking_finding(Step.MEMORY, FindingCode.CLAIM_NOT_ACCEPTED, message)
    return StepResult(Step.MEMORY, Verdict.FAILED, 0.0, (finding,))


def _is_unaccounted(report: EraseReport, max_uncovered: int) -> bool:
    """Whether some memory is unaccounted for, or too much is not covered, because another process may have it.

    Unaccounted bytes are neither proved clear nor counted as not covered with a message that names them.
    """
    reached = report.total_bytes - report.not_covered_bytes
    unnamed = report.not_covered_bytes > 0 and not report.not_covered
    verified = report.cleared_bytes if report.verified_bytes is None else report.verified_bytes
    short = reached <= 0 or min(report.cleared_bytes, verified) < reached
    return short or unnamed or report.not_covered_bytes - report.reserved_bytes > max_uncovered


def _judge(context: ScrubContext, report: EraseReport, seconds: float) -> StepResult:
    findings: list[Finding] = []
    # A device of a claimant may have none; what remains on it is then named as not covered.
    has_memory = report.total_bytes > 0 or not context.device.claimed_by
    if report.fence_broken:
        message = (
            "The fence was broken while the device was cleared: a process tried to open the device or "
            "removed the fence."
        )
        findings.append(context.blocking_finding(Step.MEMORY, FindingCode.FENCE_BROKEN, message))
    elif report.failed_bytes:
        message = f"{report.failed_bytes} bytes did not read back as they were written."
        evidence = {"failed_bytes": report.failed_bytes}
        findings.append(Finding(Step.MEMORY, FindingCode.VERIFICATION_FAILED, Severity.FAULT, message, evidence))
    elif has_memory and _is_unaccounted(report, context.policy.memory.max_uncovered):
        message = (
            f"{report.cleared_bytes} cleared and {report.verified_bytes} verified of {report.total_bytes} "
            f"bytes, {report.not_covered_bytes} unreachable; the driver reserves {report.reserved_bytes}."
        )
        findings.append(Finding(Step.MEMORY, FindingCode.CLEARING_INCOMPLETE, Severity.FAULT, message))
    if report.residue_bytes:
        message = f"{report.residue_bytes} bytes of residue were found and cleared."
        evidence = {"residue_bytes": report.residue_bytes}
        findings.append(Finding(Step.MEMORY, FindingCode.RESIDUE, Severity.NOTE, message, evidence))
    if report.unreleased_bytes:
        message = f"{report.unreleased_bytes} bytes stay in use although no process holds the device."
        evidence = {"unreleased_bytes": report.unreleased_bytes}
        findings.append(Finding(Step.MEMORY, FindingCode.MEMORY_NOT_RELEASED, Severity.FAULT, message, evidence))
    if report.size_restored is not None:
        findings.append(Finding(Step.MEMORY, FindingCode.SIZE_RESTORED, Severity.NOTE, report.size_restored))
    bad = any(finding.severity in (Severity.BLOCKING, Severity.FAULT) for finding in findings)
    measured: dict[str, str | int | float | bool | None] = {
        "total_bytes": report.total_bytes,
        "cleared_bytes": report.cleared_bytes,
        "verified_bytes": report.verified_bytes,
        "residue_bytes": report.residue_bytes,
        "reserved_bytes": report.reserved_bytes,
        "not_covered_bytes": report.not_covered_bytes,
        "residue_map": " ".join(map(str, report.residue_map)) if report.residue_bytes else "",
        **{f"{phase}_seconds": round(duration, 6) for phase, duration in report.seconds_by_phase},
    }
    verdict = Verdict.PASSED if has_memory else Verdict.NOT_COVERED
    return StepResult(
        Step.MEMORY, Verdict.FAILED if bad else verdict, seconds, tuple(findings), measured, report.not_covered
    )
