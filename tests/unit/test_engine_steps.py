"""What each step of a scrub makes of what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault, Held, Stuck, Unreadable
from scrubber.domain.evidence import Occasion, Outcome, Path, Severity, Step, StepResult, Verdict
from scrubber.domain.policy import Limits
from scrubber.engine import scrub
from scrubber.engine.steps.memory import clear_memory
from scrubber.engine.steps.work import Work
from scrubber.ports import EraseReport, EraseRequest, Progress
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world

WHOLE = EraseReport(total_bytes=100, cleared_bytes=100, verified_bytes=100, residue_bytes=0, failed_bytes=0)


@dataclass
class Answering:
    """:class:`scrubber.ports.Eraser` that answers as it was told, after ``seconds``."""

    world: World
    answer: EraseReport | Exception
    seconds: float = 0.0

    async def erase(self, device: Device, request: EraseRequest, progress: Callable[[Progress], None]) -> EraseReport:
        await self.world.run(self.seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def orphan(self, device: Device) -> int | None:
        return None

    async def end_orphan(self, device: Device, deadline: float) -> bool:
        return True


def work(world: World, answer: EraseReport | Exception, *, seconds: float = 0.0, slow_path: float = 120.0) -> Work:
    """The context of a slow path on the first device whose eraser answers ``answer``."""
    assert world.service is not None
    policy = replace(world.policy, limits=replace(Limits(), slow_path=slow_path))
    keeper = world.keeper()
    return Work(
        scrub="scrub-1",
        device=keeper.device,
        record=keeper.record,
        plan=policy.plan(Path.SLOW, Occasion.START),
        policy=policy,
        instruments=replace(world.service.instruments, eraser=Answering(world, answer, seconds)),
        standings=keeper.standings,
        urgent=lambda: False,
        progress=lambda _: None,
    )


def judged(answer: EraseReport | Exception) -> StepResult:
    """What the memory step makes of it."""

    @in_virtual_time
    async def judge() -> StepResult:
        async with a_world(devices=1) as world:
            return await clear_memory(work(world, answer))

    return judge()


def test_everything_cleared_and_read_back_is_proved() -> None:
    result = judged(WHOLE)
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())
    assert result.measured["verified_bytes"] == 100


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"failed_bytes": 1}, "verification-failed", Severity.FAULT),
        ({"cleared_bytes": 99}, "not-all-cleared", Severity.FAULT),
        ({"verified_bytes": 99}, "not-all-cleared", Severity.FAULT),
        ({"total_bytes": 0, "cleared_bytes": 0, "verified_bytes": 0}, "not-all-cleared", Severity.FAULT),
        ({"fence_broken": True, "cleared_bytes": 5, "verified_bytes": 0}, "fence-broken", Severity.DIRTY),
        ({"fence_broken": True, "failed_bytes": 5}, "fence-broken", Severity.DIRTY),
    ],
)
def test_anything_less_is_not(changes: dict[str, Any], code: str, severity: Severity) -> None:
    result = judged(replace(WHOLE, **changes))
    assert result.verdict is Verdict.FAILED
    assert [(finding.code, finding.severity) for finding in result.findings] == [(code, severity)]


@pytest.mark.parametrize("changes", [{"residue_bytes": 7}, {"mended": "The size was put right."}])
def test_residue_and_a_mended_size_are_worth_a_note(changes: dict[str, Any]) -> None:
    result = judged(replace(WHOLE, **changes))
    assert result.verdict is Verdict.PASSED
    assert [finding.severity for finding in result.findings] == [Severity.NOTE]


@pytest.mark.parametrize(
    ("error", "code", "severity"),
    [
        (Held("somebody has it"), "held", Severity.DIRTY),
        (Stuck("killed"), "erase-timeout", Severity.FAULT),
    ],
)
def test_an_eraser_that_could_not_work_proves_nothing(error: Exception, code: str, severity: Severity) -> None:
    result = judged(error)
    assert result.verdict is Verdict.FAILED
    assert [(finding.code, finding.severity) for finding in result.findings] == [(code, severity)]


@in_virtual_time
async def test_the_first_step_that_fails_ends_the_plan() -> None:
    async with a_world(devices=1) as world:
        began: list[Step] = []
        result = await scrub.run(work(world, Held("somebody has it")), began.append)
        assert result.outcome is Outcome.HELD_UP
        assert began == [Step.HOLDERS, Step.MEMORY]


@pytest.mark.parametrize("fault", [Unreadable("nonsense"), DeviceFault("odd", code="odd")])
def test_a_fault_of_the_device_ends_the_plan_with_its_own_code(fault: DeviceFault) -> None:
    @in_virtual_time
    async def fail() -> None:
        async with a_world(devices=1) as world:
            result = await scrub.run(work(world, fault), lambda _: None)
            assert result.outcome is Outcome.FAILED
            assert result.findings[-1].code == fault.code

    fail()


@in_virtual_time
async def test_a_step_that_outlives_the_plan_fails_it() -> None:
    async with a_world(devices=1) as world:
        world.gpu().stuck = True
        result = await scrub.run(work(world, WHOLE, slow_path=0.5), lambda _: None)
        assert result.outcome is Outcome.FAILED
        assert [finding.code for finding in result.findings] == ["scrub-overdue"]


@in_virtual_time
async def test_clearing_has_a_deadline_of_its_own_beside_the_plans() -> None:
    async with a_world(devices=1) as world:
        result = await scrub.run(work(world, WHOLE, seconds=20.0, slow_path=10.0), lambda _: None)
        assert result.outcome is Outcome.PASSED


@in_virtual_time
async def test_time_spent_waiting_for_a_slot_is_not_the_scrubs() -> None:
    async with a_world(devices=3) as world:
        assert world.service is not None
        slots = world.service.instruments.slots
        async with slots.slot(lambda: True), slots.slot(lambda: True):
            waiting = world.service.life.start(scrub.run(work(world, WHOLE, slow_path=10.0), lambda _: None), "scrub")
            await world.run(60.0)
            assert not waiting.done()
        assert (await waiting).outcome is Outcome.PASSED
