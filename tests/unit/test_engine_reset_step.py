"""A reset that somebody is in the way of says nothing against the device; one that fails does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import Held, Stuck, Unreadable
from scrubber.domain.evidence import Occasion, Outcome, Path, Severity, Step, Verdict
from scrubber.domain.policy import ResetUse
from scrubber.engine import scrub
from scrubber.engine.scrub import ScrubResult
from scrubber.engine.steps.work import Work
from tests.world.timeline import in_virtual_time
from tests.world.world import a_world


@dataclass
class Answering:
    """:class:`scrubber.ports.Resetter` that can reset everything and answers as it was told."""

    answer: Exception

    async def unavailable(self, device: Device) -> str | None:
        return None

    async def reset(self, device: Device, deadline: float) -> None:
        raise self.answer


def scrubbed(answer: Exception, *, ghost: bool = False) -> ScrubResult:
    """A slow path with a reset, on a device that a ghost may hold."""

    @in_virtual_time
    async def run() -> ScrubResult:
        async with a_world(devices=1) as world:
            assert world.service is not None
            world.gpu().ghost = ghost
            keeper = world.keeper()
            policy = replace(world.policy, reset=ResetUse.REQUIRED)
            work = Work(
                scrub="scrub-1",
                device=keeper.device,
                record=keeper.record,
                plan=policy.plan(Path.SLOW, Occasion.START),
                policy=policy,
                instruments=replace(world.service.instruments, resetter=Answering(answer)),
                standings=keeper.standings,
                urgent=lambda: False,
                progress=lambda _: None,
            )
            return await scrub.run(work, lambda _: None)

    return run()


@pytest.mark.parametrize("ghost", [False, True])
def test_a_device_that_is_held_during_the_reset_is_held_up_and_not_at_fault(ghost: bool) -> None:
    result = scrubbed(Held("somebody has it"), ghost=ghost)
    assert result.outcome is Outcome.HELD_UP
    assert not result.was_reset
    last = result.steps[-1]
    assert (last.step, last.verdict) == (Step.RESET, Verdict.FAILED)
    assert [(finding.code, finding.severity) for finding in last.findings] == [("held", Severity.DIRTY)]


@pytest.mark.parametrize("fault", [Unreadable("it failed"), Stuck("it did not end")])
def test_a_reset_that_fails_is_the_devices_fault(fault: Exception) -> None:
    result = scrubbed(fault)
    assert result.outcome is Outcome.FAILED
    assert [finding.code for finding in result.findings] == ["reset-failed"]
