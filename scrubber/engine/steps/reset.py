"""Reset step: runs when a recovery or the policy needs it. Precondition: the holders step showed the device free.

Devices that are reset together with it are kept out of use: none of them may be in use, and none is granted until the
reset has finished.
"""

from __future__ import annotations

from scrubber.domain.errors import DeviceBusy, DeviceFault
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.policy import ResetMode
from scrubber.engine.steps.context import ScrubContext

__all__ = ["reset_device"]


# See docs/decisions/0023-resets.md.
async def reset_device(context: ScrubContext) -> StepResult:
    dependencies = context.dependencies
    start = dependencies.clock.monotonic()

    plan = await dependencies.resetter.plan(context.device)

    def done(verdict: Verdict, *findings: Finding, not_covered: tuple[str, ...] = ()) -> StepResult:
        seconds = dependencies.clock.monotonic() - start
        return StepResult(Step.RESET, verdict, seconds, findings, {"method": plan.method}, not_covered)

    if plan.unavailable is not None:
        if context.plan.reset is ResetMode.REQUIRED:
            message = f"A reset is required but not possible here: {plan.unavailable}"
            return done(Verdict.FAILED, Finding(Step.RESET, FindingCode.RESET_UNAVAILABLE, Severity.FAULT, message))
        message = f"A reset would help but is not possible here: {plan.unavailable}"
        note = Finding(Step.RESET, FindingCode.RESET_UNAVAILABLE, Severity.NOTE, message)
        return done(Verdict.NOT_COVERED, note, not_covered=(f"reset: {plan.unavailable}",))
    if plan.blockers:
        return done(
            Verdict.FAILED, context.blocking_finding(Step.RESET, FindingCode.DEVICE_BUSY, " ".join(plan.blockers))
        )
    try:
        async with context.keep_out_of_use(plan.also_reset):
            await dependencies.resetter.reset(context.device, context.policy.limits.reset)
    except DeviceBusy as held:  # untraceable, e.g. a descriptor in flight: no reset ends it, and the device is healthy
        return done(Verdict.FAILED, context.blocking_finding(Step.RESET, FindingCode.DEVICE_BUSY, str(held)))
    except DeviceFault as fault:
        return done(Verdict.FAILED, Finding(Step.RESET, FindingCode.RESET_FAILED, Severity.FAULT, str(fault)))
    return done(Verdict.PASSED)
