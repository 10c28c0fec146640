"""Health: a snapshot of what the driver says, compared with what the policy accepts."""

from __future__ import annotations

from scrubber.domain.evidence import Path, Severity, Step, StepResult, Verdict
from scrubber.domain.signals import baseline_findings, lifetime_findings, snapshot_findings
from scrubber.engine.steps.work import Work

__all__ = ["check_health"]


async def check_health(work: Work) -> StepResult:
    """On the slow path a fresh snapshot: what the other steps did to the device counts."""
    start = work.dependencies.clock.monotonic()
    fresh = work.plan.path is Path.SLOW
    snapshot = await (work.dependencies.telemetry.snapshot(work.device) if fresh else work.one_snapshot())
    known = dict(work.record.lifetime)
    findings = (
        *snapshot_findings(snapshot, work.policy, known, work.record.baseline),
        *baseline_findings(work.device, work.record.baseline),
        *lifetime_findings(snapshot, known),
    )
    bad = any(finding.severity is Severity.FAULT for finding in findings)
    verdict = Verdict.FAILED if bad else Verdict.PASSED
    return StepResult(
        Step.HEALTH, verdict, work.dependencies.clock.monotonic() - start, findings, {"findings": len(findings)}
    )
