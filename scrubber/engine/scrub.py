"""Runs a plan, step by step, within its deadline; returns evidence and changes no state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from scrubber.domain.errors import DeviceFault, Retry
from scrubber.domain.evidence import Finding, FindingCode, Outcome, Path, Severity, Step, StepResult, Verdict
from scrubber.domain.signals import fault_finding
from scrubber.engine.steps.diagnostics import diagnose
from scrubber.engine.steps.health import check_health
from scrubber.engine.steps.holders import check_holders, clear_holders
from scrubber.engine.steps.memory import clear_memory
from scrubber.engine.steps.on_chip import judge_on_chip
from scrubber.engine.steps.reset import reset_device
from scrubber.engine.steps.settings import check_settings, restore_settings
from scrubber.engine.steps.work import Work

__all__ = ["ScrubResult", "run"]

StepFunction = Callable[[Work], Awaitable[StepResult]]

_SLOW: Mapping[Step, StepFunction] = {
    Step.HOLDERS: clear_holders,
    Step.RESET: reset_device,
    Step.DIAGNOSTICS: diagnose,
    Step.MEMORY: clear_memory,
    Step.ON_CHIP: judge_on_chip,
    Step.SETTINGS: restore_settings,
    Step.HEALTH: check_health,
}
_FAST: Mapping[Step, StepFunction] = {
    Step.HOLDERS: check_holders,
    Step.SETTINGS: check_settings,
    Step.HEALTH: check_health,
}


_TIMED_BY_THEMSELVES = frozenset({Step.MEMORY, Step.DIAGNOSTICS})


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """How the plan ended and what each step that ran saw."""

    outcome: Outcome
    steps: tuple[StepResult, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for step in self.steps for finding in step.findings)

    @property
    def reset_tried(self) -> bool:
        """Whether the device was reset, or that was begun."""
        resets = (step for step in self.steps if step.step is Step.RESET)
        return any(
            step.verdict is Verdict.PASSED or any(finding.code == FindingCode.RESET_FAILED for finding in step.findings)
            for step in resets
        )

    @property
    def was_reset(self) -> bool:
        return any(step.step is Step.RESET and step.verdict is Verdict.PASSED for step in self.steps)


async def run(work: Work, begin: Callable[[Step], None]) -> ScrubResult:
    """Run ``work.plan``; the first step that fails ends it. ``begin`` is told each step as it starts.

    Clearing the memory has a deadline of its own, which goes by the device's size, and diagnostics have their level's;
    the wait for an eraser slot, which both need, has none.
    """
    functions = _FAST if work.plan.path is Path.FAST else _SLOW
    clock = work.dependencies.clock
    results: list[StepResult] = []
    left = work.plan.deadline
    for step in work.plan.steps:
        begin(step)
        with work.dependencies.tracer.span(f"step {step.value}") as span:
            start = clock.monotonic()
            try:
                if step in _TIMED_BY_THEMSELVES:
                    result = await functions[step](work)
                else:
                    async with clock.patience(left) as counted:
                        result = await functions[step](work)
                        left -= counted()
            except TimeoutError:
                sentence = f"The plan was not through with {step.value} when its {work.plan.deadline:g} s were over."
                finding = Finding(step, FindingCode.SCRUB_OVERDUE, Severity.FAULT, sentence)
                result = StepResult(step, Verdict.FAILED, clock.monotonic() - start, (finding,))
            except Retry as away:
                finding = work.dirty(step, away.code, str(away))
                result = StepResult(step, Verdict.FAILED, clock.monotonic() - start, (finding,))
            except DeviceFault as fault:
                result = StepResult(step, Verdict.FAILED, clock.monotonic() - start, (fault_finding(step, fault),))
            span.note(verdict=result.verdict.value, findings=" ".join(each.code for each in result.findings) or None)
        results.append(result)
        if any(finding.severity is Severity.FAULT for finding in result.findings):
            return ScrubResult(Outcome.FAILED, tuple(results))
        if result.verdict is Verdict.FAILED:
            return ScrubResult(Outcome.HELD_UP, tuple(results))
    return ScrubResult(Outcome.PASSED, tuple(results))
