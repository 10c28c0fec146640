"""Reset: when a recovery or the policy needs it. Precondition: the holders step showed the device free."""

from __future__ import annotations

from scrubber.domain.errors import DeviceFault, Held
from scrubber.domain.evidence import Finding, Severity, Step, StepResult, Verdict
from scrubber.engine.steps.work import Work

__all__ = ["reset_device"]


async def reset_device(work: Work) -> StepResult:
    instruments = work.instruments
    start = instruments.clock.monotonic()

    def done(verdict: Verdict, *findings: Finding) -> StepResult:
        return StepResult(Step.RESET, verdict, instruments.clock.monotonic() - start, findings)

    why_not = await instruments.resetter.unavailable(work.device)
    if why_not is not None:
        sentence = f"A reset is required and cannot be done here: {why_not}"
        return done(Verdict.FAILED, Finding(Step.RESET, "reset-unavailable", Severity.FAULT, sentence))
    try:
        await instruments.resetter.reset(work.device, work.policy.limits.reset)
    except Held as held:  # a ghost, say, that is a descriptor in flight: no reset ends it, and the device is well
        return done(Verdict.FAILED, work.dirty(Step.RESET, "held", str(held)))
    except DeviceFault as fault:
        return done(Verdict.FAILED, Finding(Step.RESET, "reset-failed", Severity.FAULT, str(fault)))
    return done(Verdict.PASSED)
