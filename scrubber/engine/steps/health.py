"""Health step: compares a snapshot from the driver with what the policy accepts, and has the device attest itself."""

from __future__ import annotations

from scrubber.domain.attestation import attestation_nonce
from scrubber.domain.evidence import Attestation, PathKind, Severity, Step, StepResult, Verdict
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
    if fresh and not bad:
        await _attest(context)
    verdict = Verdict.FAILED if bad else Verdict.PASSED
    return StepResult(
        Step.HEALTH, verdict, context.dependencies.clock.monotonic() - start, findings, {"findings": len(findings)}
    )


async def _attest(context: ScrubContext) -> None:
    """Request the report of a device in a confidential-computing mode; without a report there is no certificate."""
    confidential, record = context.dependencies.confidential, context.record
    if confidential is None or not confidential.enabled:
        return
    identity = context.dependencies.identity.for_device(context.device)
    nonce = attestation_nonce(
        node=identity.node,
        boot=identity.boot,
        device=record.device,
        scrub=context.scrub,
        previous_grant=record.grant_sequence,
    )
    digest = await confidential.attest(context.device, nonce)
    if digest is not None:
        context.attestations.append(Attestation(digest, nonce.hex()))
