"""Runs one scrub: its plan, step by step, within its deadline; any number of callers may join. Changes no state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.errors import DeviceFault, RetryableError
from scrubber.domain.evidence import (
    Certificate,
    Finding,
    FindingCode,
    Outcome,
    PathKind,
    ScrubRecord,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.health.signals import fault_finding
from scrubber.engine import events
from scrubber.engine.steps.context import ScrubContext
from scrubber.engine.steps.diagnostics import diagnose
from scrubber.engine.steps.health import check_health
from scrubber.engine.steps.holders import check_holders, clear_holders
from scrubber.engine.steps.memory import clear_memory
from scrubber.engine.steps.on_chip import evaluate_on_chip
from scrubber.engine.steps.reset import reset_device
from scrubber.engine.steps.settings import check_settings, restore_settings
from scrubber.engine.views import ScrubUpdate
from scrubber.ports.device import EraseProgress

__all__ = ["ScrubJob", "ScrubResult", "run_scrub"]

StepFunction = Callable[[ScrubContext], Awaitable[StepResult]]

# See docs/decisions/0021-slow-path-order-and-coverage.md.
_SLOW: Mapping[Step, StepFunction] = {
    Step.HOLDERS: clear_holders,
    Step.DIAGNOSTICS: diagnose,
    Step.MEMORY: clear_memory,
    Step.ON_CHIP: evaluate_on_chip,
    Step.SETTINGS: restore_settings,
    Step.HEALTH: check_health,
}
_FAST: Mapping[Step, StepFunction] = {
    Step.HOLDERS: check_holders,
    Step.SETTINGS: check_settings,
    Step.HEALTH: check_health,
}


_ATTEMPTS = (FindingCode.RESET_FAILED, FindingCode.RESET_LEFT_TO_OTHERS)
_TIMED_BY_THEMSELVES = frozenset({Step.MEMORY, Step.DIAGNOSTICS})


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """The outcome of the plan and the result of each step that ran."""

    outcome: Outcome
    steps: tuple[StepResult, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for step in self.steps for finding in step.findings)

    @property
    def reset_attempted(self) -> bool:
        """Whether the device was reset, or a reset was started, or left to another service."""
        resets = (step for step in self.steps if step.step is Step.RESET)
        return any(
            step.verdict is Verdict.PASSED or any(finding.code in _ATTEMPTS for finding in step.findings)
            for step in resets
        )

    @property
    def was_reset(self) -> bool:
        return any(step.step is Step.RESET and step.verdict is Verdict.PASSED for step in self.steps)


async def run_scrub(context: ScrubContext, on_step: Callable[[Step], None]) -> ScrubResult:
    """Run ``context.plan``; the first step that fails ends it. ``on_step`` is called with each step as it starts.

    Clearing the memory has a separate deadline that depends on the device's size, and diagnostics have that of their
    level. The wait for an eraser slot, which both need, has no deadline. A reset's wait for agents has its own.
    """
    functions = _FAST if context.plan.path is PathKind.FAST else _SLOW
    clock = context.dependencies.clock
    results: list[StepResult] = []
    left = context.plan.deadline
    for step in context.plan.steps:
        on_step(step)
        with context.dependencies.tracer.span(f"step {step.value}") as span:
            start = clock.monotonic()
            try:
                if step is Step.RESET:
                    result, left = await reset_device(context, left)
                elif step in _TIMED_BY_THEMSELVES:
                    result = await functions[step](context)
                else:
                    async with clock.stall_tolerant_timeout(left) as counted:
                        result = await functions[step](context)
                        left -= counted()
            except TimeoutError:
                message = f"The scrub's deadline of {context.plan.deadline:g} s expired during the step {step.value}."
                finding = Finding(step, FindingCode.SCRUB_TIMEOUT, Severity.FAULT, message)
                result = StepResult(step, Verdict.FAILED, clock.monotonic() - start, (finding,))
            except RetryableError as away:
                finding = context.blocking_finding(step, away.code, str(away))
                result = StepResult(step, Verdict.FAILED, clock.monotonic() - start, (finding,))
            except DeviceFault as fault:
                result = StepResult(step, Verdict.FAILED, clock.monotonic() - start, (fault_finding(step, fault),))
            if context.device.claimed_by and step is not Step.HOLDERS:
                result = replace(result, measured={**result.measured, "claimed_by": context.device.claimed_by})
            span.set_attributes(
                verdict=result.verdict.value, findings=" ".join(each.code for each in result.findings) or None
            )
        results.append(result)
        if any(finding.severity is Severity.FAULT for finding in result.findings):
            return ScrubResult(Outcome.FAILED, tuple(results))
        if result.verdict is Verdict.FAILED:
            return ScrubResult(Outcome.BLOCKED, tuple(results))
    return ScrubResult(Outcome.PASSED, tuple(results))


class ScrubJob:
    """A scrub in progress.

    Updates are states, not a queue: a slow caller sees the newest and the last, and blocks no other.

    Attributes:
        operator_ordered: whether an operator requested a reset with it.
        waits_for: what it waits for, in words that may reach any tenant; empty while it works.
        previous_certificate: the unused certificate of a device that was clean at the start, so not granted since; else
            None.
    """

    def __init__(
        self, record: ScrubRecord, *, operator_ordered: bool = False, previous_certificate: Certificate | None = None
    ) -> None:
        self.record = record
        self.operator_ordered = operator_ordered
        self.previous_certificate = previous_certificate
        self.certificate: Certificate | None = None
        self.waiters = 0
        self.waits_for = ""
        self.task: asyncio.Task[None] | None = None
        self._update = ScrubUpdate(record.id, record.device)
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def has_waiters(self) -> bool:
        """Whether a caller waits for the scrub."""
        return self.waiters > 0

    @property
    def step(self) -> Step | None:
        return self._update.step

    def begin_step(self, step: Step) -> None:
        self._publish_update(ScrubUpdate(self.id, self.record.device, step=step))

    def report_progress(self, progress: EraseProgress) -> None:
        self._publish_update(ScrubUpdate(self.id, self.record.device, step=self._update.step, progress=progress))

    def report_wait(self, reason: str) -> None:
        self.waits_for = reason

    def finish(self, record: ScrubRecord, certificate: Certificate | None) -> None:
        """End the scrub; its result has been committed to the ledger (or could not be committed)."""
        self.record = record
        self.certificate = certificate
        self._ended.set()
        unexplained = events.unexplained_residue_message(record, self.previous_certificate)
        self._publish_update(
            ScrubUpdate(
                self.id, record.device, finished=record, certificate=certificate, unexplained_residue=unexplained
            )
        )

    def _publish_update(self, news: ScrubUpdate) -> None:
        self._update = news
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_without_urgency(self) -> None:
        """Wait for the end without making the scrub urgent."""
        await self._ended.wait()

    async def wait(self) -> ScrubRecord:
        """Join the scrub and return the finished record. Cancelling the wait does not affect the scrub."""
        self.waiters += 1
        try:
            await self._ended.wait()
        finally:
            self.waiters -= 1
        return self.record

    async def updates(self, *, joined: bool) -> AsyncIterator[ScrubUpdate]:
        """Yield updates until the end, the last one with ``finished`` set."""
        self.waiters += 1
        try:
            while True:
                news, moved = self._update, self._changed
                yield replace(news, joined=joined)
                if news.finished is not None:
                    return
                await moved.wait()
        finally:
            self.waiters -= 1
