"""Reset step: runs when a recovery or the policy needs it. Precondition: the holders step showed the device free.

Agents that have the device open are paused for it, where a way to do that is offered. Devices that are reset together
with it are kept out of use: none of them may be in use, and none is granted until the reset has finished.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from scrubber.domain.errors import DeviceBusy, DeviceFault
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.policy import ResetMode
from scrubber.domain.reset_plan import ResetPlan
from scrubber.engine import refusals
from scrubber.engine.agent_pauses import NO_WAY_REMEDY, ClearedDevice
from scrubber.engine.steps.context import ScrubContext

__all__ = ["reset_device"]


# See docs/decisions/0023-resets.md and 0043-agents-are-paused-for-a-reset.md.
async def reset_device(context: ScrubContext, seconds: float) -> tuple[StepResult, float]:
    """Reset the device; return the result, and what is left of ``seconds``, the scrub's deadline.

    The wait for paused agents has a limit of its own, and takes nothing of the deadline.

    Raises:
        TimeoutError: the deadline has expired.
    """
    dependencies, clock = context.dependencies, context.dependencies.clock
    pauses = dependencies.agent_pauses
    start = clock.monotonic()
    async with clock.stall_tolerant_timeout(seconds) as counted:
        plan = await dependencies.resetter.plan(context.device)
        seconds -= counted()
    async with AsyncExitStack() as stack:
        cleared: ClearedDevice | None = None
        if plan.unavailable is None and pauses.concerns(context.device.id, plan):
            context.report_wait(refusals.AGENTS_ARE_PAUSED)
            cleared = await stack.enter_async_context(
                pauses.cleared(
                    context.device.id,
                    lambda: dependencies.resetter.plan(context.device),
                    context.policy.limits.agent_pause,
                )
            )
            context.report_wait("")
            plan = cleared.plan
        waited = clock.monotonic() - start
        async with clock.stall_tolerant_timeout(seconds) as counted:
            verdict, findings, not_covered = await _reset(context, plan, cleared)
            seconds -= counted()
    if plan.only_agents_block and (left := await _leave_to_others(context, plan, cleared)) is not None:
        verdict, findings, not_covered = _failed(left)
    measured: dict[str, str | int | float | bool | None] = {"method": plan.method}
    if cleared is not None and cleared.ways:
        measured |= {"agent_pause": cleared.ways[-1].value, "agent_wait_seconds": round(waited, 3)}
    result = StepResult(Step.RESET, verdict, clock.monotonic() - start, findings, measured, not_covered)
    return result, seconds


_Outcome = tuple[Verdict, tuple[Finding, ...], tuple[str, ...]]


async def _reset(context: ScrubContext, plan: ResetPlan, cleared: ClearedDevice | None) -> _Outcome:
    """Return verdict, findings, and what is not covered."""
    if plan.unavailable is not None:
        if context.plan.reset is ResetMode.REQUIRED:
            message = f"A reset is required but not possible here: {plan.unavailable}"
            return _failed(Finding(Step.RESET, FindingCode.RESET_UNAVAILABLE, Severity.FAULT, message))
        message = f"A reset would help but is not possible here: {plan.unavailable}"
        note = Finding(Step.RESET, FindingCode.RESET_UNAVAILABLE, Severity.NOTE, message)
        return Verdict.NOT_COVERED, (note,), (f"reset: {plan.unavailable}",)
    if plan.blockers:
        return _failed(_blocked(context, plan, cleared))
    try:
        async with context.keep_out_of_use(plan.also_reset):
            await context.dependencies.resetter.reset(context.device, context.policy.limits.reset)
    except DeviceBusy as held:  # untraceable, e.g. a descriptor in flight: no reset ends it, and the device is healthy
        return _failed(context.blocking_finding(Step.RESET, FindingCode.DEVICE_BUSY, str(held)))
    except DeviceFault as fault:
        return _failed(Finding(Step.RESET, FindingCode.RESET_FAILED, Severity.FAULT, str(fault)))
    if cleared is None or not cleared.ways:
        return Verdict.PASSED, (), ()
    message = f"Agents that had the device open were paused for the reset ({cleared.ways[-1]})."
    return Verdict.PASSED, (Finding(Step.RESET, FindingCode.AGENTS_PAUSED, Severity.NOTE, message),), ()


async def _leave_to_others(context: ScrubContext, plan: ResetPlan, cleared: ClearedDevice | None) -> Finding | None:
    """Have another service of the cluster reset the device, if that is allowed and offered; return the finding."""
    pauses = context.dependencies.agent_pauses
    if not context.plan.may_leave_reset or pauses.external_reset_offer is None:
        return None
    context.report_wait(refusals.AGENTS_ARE_PAUSED)
    try:
        async with context.keep_out_of_use(plan.also_reset):
            devices = (context.device.id, *plan.also_reset)
            failure = await pauses.begin_external_reset(devices, context.policy.limits.agent_pause)
    except DeviceBusy as used:
        return context.blocking_finding(Step.RESET, FindingCode.DEVICE_BUSY, str(used))
    finally:
        context.report_wait("")
    if failure:
        message = " ".join((*(cleared.failures if cleared is not None else ()), failure, *plan.blockers))
        return context.blocking_finding(Step.RESET, FindingCode.AGENT_PAUSE_FAILED, message)
    message = (
        "Agents have the device open, so another service of the cluster is asked to reset it. The node is yielded for "
        "that; the audit log has the result (external-reset), and the device is scrubbed again afterwards."
    )
    return context.blocking_finding(Step.RESET, FindingCode.RESET_LEFT_TO_OTHERS, message)


def _blocked(context: ScrubContext, plan: ResetPlan, cleared: ClearedDevice | None) -> Finding:
    holders = " ".join(plan.blockers)
    if cleared is not None and cleared.failures:
        message = f"{' '.join(cleared.failures)} {holders}"
        return context.blocking_finding(Step.RESET, FindingCode.AGENT_PAUSE_FAILED, message)
    pauses = context.dependencies.agent_pauses
    if plan.only_agents_block and (earlier := pauses.failure(context.device.id)):
        return context.blocking_finding(Step.RESET, FindingCode.AGENT_PAUSE_FAILED, f"{earlier} {holders}")
    remedy = f" {NO_WAY_REMEDY}" if plan.only_agents_block and not pauses.offers else ""
    return context.blocking_finding(Step.RESET, FindingCode.DEVICE_BUSY, f"{holders}{remedy}")


def _failed(finding: Finding) -> _Outcome:
    return Verdict.FAILED, (finding,), ()
