"""Health step: compares a snapshot from the driver with what the policy accepts."""

from __future__ import annotations

from scrubber.domain.evidence import PathKind, Severity, Step, StepResult, Verdict
from scrubber.domain.health.signals import baseline_findings, lifetime_findings, snapshot_findings
from scrubber.engine.steps.context import ScrubContext

__all__ = ["check_health"]


async def check_health(context: ScrubContext) -> StepResult:
    """Check the device's health; the slow path takes a fresh snapshot, because the other steps may have changed it."""
    start = context.dependencies.clock.monotonic()
    fresh = context.plan.path is PathKind.SLOW
    snapshot = await (context.dependencies.telemetry.snapshot(context.device) if fresh else context.shared_snapshot())
    known = dict(context.record.lifetime_counters)
    findings = (
        *snapshot_findings(snapshot, context.policy, known, context.record.baseline),
        *baseline_findings(context.device, context.record.baseline),
        *lifetime_findings(snapshot, known),
    )
    bad = any(finding.severity is Severity.FAULT for finding in findings)
    verdict = Verdict.FAILED if bad else Verdict.PASSED
    return StepResult(
        Step.HEALTH, verdict, context.dependencies.clock.monotonic() - start, findings, {"findings": len(findings)}
    )
