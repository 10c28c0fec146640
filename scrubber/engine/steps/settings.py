"""Settings step: restores the same settings for every container start, and reads them back."""

from __future__ import annotations

from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.health.signals import expected_settings, settings_differences
from scrubber.engine.steps.context import ScrubContext

__all__ = ["check_settings", "restore_settings"]


async def check_settings(context: ScrubContext) -> StepResult:
    """Check whether the settings are as expected; changes nothing."""
    start = context.dependencies.clock.monotonic()
    off = settings_differences(await context.shared_snapshot(), context.policy)
    findings = tuple(
        context.blocking_finding(Step.SETTINGS, FindingCode.SETTINGS_MISMATCH, f"{name} is {found}, not {expected}.")
        for name, (found, expected) in sorted(off.items())
    )
    verdict = Verdict.FAILED if off else Verdict.PASSED
    return StepResult(
        Step.SETTINGS, verdict, context.dependencies.clock.monotonic() - start, findings, {"off": len(off)}
    )


async def restore_settings(context: ScrubContext) -> StepResult:
    """Restore all settings, including unreadable ones. A setting that cannot be restored is a fault of the device."""
    dependencies = context.dependencies
    start = dependencies.clock.monotonic()
    snapshot = await dependencies.telemetry.snapshot(context.device)
    off = settings_differences(snapshot, context.policy)
    expected = expected_settings(snapshot, context.policy)
    after = await dependencies.settings.restore(context.device, expected)
    findings = [
        Finding(
            Step.SETTINGS,
            FindingCode.SETTINGS_NOT_RESTORED,
            Severity.FAULT,
            f"{name} could not be restored: it is {after.get(name)}, not {expected[name]}.",
        )
        for name in sorted(name for name in expected if after.get(name) != expected[name])
    ] or [
        Finding(
            Step.SETTINGS,
            FindingCode.SETTINGS_RESTORED,
            Severity.NOTE,
            f"{name} was {found} and has been restored to {value}.",
        )
        for name, (found, value) in sorted(off.items())
    ]
    bad = any(finding.severity is Severity.FAULT for finding in findings)
    return StepResult(
        Step.SETTINGS,
        Verdict.FAILED if bad else Verdict.PASSED,
        dependencies.clock.monotonic() - start,
        tuple(findings),
        {"checked": len(snapshot.settings), "restored": 0 if bad else len(off)},
    )
