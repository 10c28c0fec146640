"""One scrub: runs its plan, step by step, within its deadline, and lets any number of callers join. It changes no state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.errors import DeviceFault, Retry
from scrubber.domain.evidence import (
    Certificate,
    Finding,
    FindingCode,
    Outcome,
    Path,
    ScrubRecord,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.signals import fault_finding
from scrubber.engine import events
from scrubber.engine.steps.diagnostics import diagnose
from scrubber.engine.steps.health import check_health
from scrubber.engine.steps.holders import check_holders, clear_holders
from scrubber.engine.steps.memory import clear_memory
from scrubber.engine.steps.on_chip import judge_on_chip
from scrubber.engine.steps.reset import reset_device
from scrubber.engine.steps.settings import check_settings, restore_settings
from scrubber.engine.steps.work import Work
from scrubber.engine.views import ScrubNews
from scrubber.ports.device import Progress

__all__ = ["ScrubJob", "ScrubResult", "run"]

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
    """Run ``work.plan``; the first step that fails ends it. ``begin`` is called with each step as it starts.

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


class ScrubJob:
    """A scrub under way. Its news are states, not a queue: a slow caller sees the newest and the end, and blocks no other.

    Attributes:
        ordered: an operator ordered a reset with it.
        proved: the unused certificate of a device that was clean when it began: it was not granted since.
    """

    def __init__(self, record: ScrubRecord, *, ordered: bool = False, proved: Certificate | None = None) -> None:
        self.record = record
        self.ordered = ordered
        self.proved = proved
        self.certificate: Certificate | None = None
        self.waiters = 0
        self.task: asyncio.Task[None] | None = None
        self._news = ScrubNews(record.id, record.device)
        self._ended = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def urgent(self) -> bool:
        """Whether a caller waits for it."""
        return self.waiters > 0

    @property
    def step(self) -> Step | None:
        return self._news.step

    def begin(self, step: Step) -> None:
        self._tell(ScrubNews(self.id, self.record.device, step=step))

    def progress(self, progress: Progress) -> None:
        self._tell(ScrubNews(self.id, self.record.device, step=self._news.step, progress=progress))

    def end(self, record: ScrubRecord, certificate: Certificate | None) -> None:
        """The scrub is over and what it means is in the ledger (or could not be put there)."""
        self.record = record
        self.certificate = certificate
        self._ended.set()
        unexplained = events.unexplained(record, self.proved)
        self._tell(ScrubNews(self.id, record.device, finished=record, certificate=certificate, unexplained=unexplained))

    def _tell(self, news: ScrubNews) -> None:
        self._news = news
        self._moved.set()
        self._moved = asyncio.Event()

    async def over(self) -> None:
        """Wait for the end without making the scrub urgent."""
        await self._ended.wait()

    async def wait(self) -> ScrubRecord:
        """Join: the finished record. Cancelling this leaves the scrub alone."""
        self.waiters += 1
        try:
            await self._ended.wait()
        finally:
            self.waiters -= 1
        return self.record

    async def news(self, *, joined: bool) -> AsyncIterator[ScrubNews]:
        """Updates until the end, the last one with ``finished`` set."""
        self.waiters += 1
        try:
            while True:
                news, moved = self._news, self._moved
                yield replace(news, joined=joined)
                if news.finished is not None:
                    return
                await moved.wait()
        finally:
            self.waiters -= 1
