"""Reset: when a recovery or the policy needs it. Precondition: the holders step showed the device free.

Devices that are reset with it stay still meanwhile: none of them may be in use, and none is granted until it is over.
"""

from __future__ import annotations

from scrubber.domain.errors import DeviceFault, Held
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.policy import ResetUse
from scrubber.engine.steps.work import Work

__all__ = ["reset_device"]


async def reset_device(work: Work) -> StepResult:
    dependencies = work.dependencies
    start = dependencies.clock.monotonic()

    plan = await dependencies.resetter.plan(work.device)

    def done(verdict: Verdict, *findings: Finding, not_covered: tuple[str, ...] = ()) -> StepResult:
        seconds = dependencies.clock.monotonic() - start
        return StepResult(Step.RESET, verdict, seconds, findings, {"method": plan.method}, not_covered)

    if plan.unavailable is not None:
        if work.plan.reset is ResetUse.REQUIRED:
            sentence = f"A reset is required and cannot be done here: {plan.unavailable}"
            return done(Verdict.FAILED, Finding(Step.RESET, FindingCode.RESET_UNAVAILABLE, Severity.FAULT, sentence))
        sentence = f"A reset would help and cannot be done here: {plan.unavailable}"
        note = Finding(Step.RESET, FindingCode.RESET_UNAVAILABLE, Severity.NOTE, sentence)
        return done(Verdict.NOT_COVERED, note, not_covered=(f"reset: {plan.unavailable}",))
    if plan.blockers:
        return done(Verdict.FAILED, work.dirty(Step.RESET, FindingCode.HELD, " ".join(plan.blockers)))
    try:
        async with work.still(plan.together):
            await dependencies.resetter.reset(work.device, work.policy.limits.reset)
    except Held as held:  # a ghost, say, that is a descriptor in flight: no reset ends it, and the device is well
        return done(Verdict.FAILED, work.dirty(Step.RESET, FindingCode.HELD, str(held)))
    except DeviceFault as fault:
        return done(Verdict.FAILED, Finding(Step.RESET, FindingCode.RESET_FAILED, Severity.FAULT, str(fault)))
    return done(Verdict.PASSED)
