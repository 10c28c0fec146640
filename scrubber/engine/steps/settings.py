"""Settings: the same state for every container run; brought back, and read back."""

from __future__ import annotations

from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.signals import settings_off, wanted_settings
from scrubber.engine.steps.work import Work

__all__ = ["check_settings", "restore_settings"]


async def check_settings(work: Work) -> StepResult:
    """Whether the settings are as wanted; changes nothing."""
    start = work.dependencies.clock.monotonic()
    off = settings_off(await work.one_snapshot(), work.policy)
    findings = tuple(
        work.dirty(Step.SETTINGS, FindingCode.SETTINGS_OFF, f"{name} is {found}, not {wanted}.")
        for name, (found, wanted) in sorted(off.items())
    )
    verdict = Verdict.FAILED if off else Verdict.PASSED
    return StepResult(Step.SETTINGS, verdict, work.dependencies.clock.monotonic() - start, findings, {"off": len(off)})


async def restore_settings(work: Work) -> StepResult:
    """Bring all of them back, also those that cannot be read. One that does not come back is the device's fault."""
    dependencies = work.dependencies
    start = dependencies.clock.monotonic()
    snapshot = await dependencies.telemetry.snapshot(work.device)
    off = settings_off(snapshot, work.policy)
    wanted = wanted_settings(snapshot, work.policy)
    after = await dependencies.settings.restore(work.device, wanted)
    findings = [
        Finding(
            Step.SETTINGS,
            FindingCode.SETTINGS_STAY,
            Severity.FAULT,
            f"{name} stays {after.get(name)}, not {wanted[name]}.",
        )
        for name in sorted(name for name in wanted if after.get(name) != wanted[name])
    ] or [
        Finding(Step.SETTINGS, FindingCode.SETTINGS_RESTORED, Severity.NOTE, f"{name} was {found}, is {value} again.")
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
