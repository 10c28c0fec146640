"""A reset that somebody is in the way of says nothing against the device; one that fails does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import Held, Stuck, Unreadable
from scrubber.domain.evidence import Occasion, Outcome, Path, Severity, Step, Verdict
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import ResetUse
from scrubber.domain.reset import ResetPlan
from scrubber.engine import scrub
from scrubber.engine.scrub import ScrubResult
from scrubber.engine.steps.work import Work
from scrubber.ports.device import Resetter
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


@dataclass
class Answering:
    """:class:`scrubber.ports.Resetter` that can reset everything and answers as it was told."""

    answer: Exception | None = None
    unavailable: str | None = None
    blockers: tuple[str, ...] = ()

    async def plan(self, device: Device) -> ResetPlan:
        return ResetPlan(device.id, "by decree", ("reset",), self.unavailable, self.blockers)

    async def reset(self, device: Device, deadline: float) -> None:
        assert self.unavailable is None
        assert not self.blockers
        if self.answer is not None:
            raise self.answer


def scrubbed(answering: Answering, *, ghost: bool = False, required: bool = True) -> ScrubResult:
    """A slow path with a reset, on a device that a ghost may hold."""

    @in_virtual_time
    async def run() -> ScrubResult:
        async with a_world(devices=1) as world:
            world.gpu().ghost = ghost
            return await scrub.run(resetting(world, answering, required=required), lambda _: None)

    return run()


def resetting(world: World, answering: Resetter, *, required: bool = True) -> Work:
    assert world.service is not None
    controller = world.controller()
    policy = replace(world.policy, reset=ResetUse.REQUIRED if required else ResetUse.BEST_EFFORT)
    plan = policy.plan(Path.SLOW, Occasion.START, must_reset=True)
    assert Step.RESET in plan.steps
    return Work(
        scrub="scrub-1",
        device=controller.state.device,
        record=controller.state.record,
        plan=replace(plan, steps=(Step.HOLDERS, Step.RESET, Step.HEALTH)),
        policy=policy,
        dependencies=replace(world.service.dependencies, resetter=answering),
        pods=controller.pods,
        standings=controller.occupancy.standings,
        unauthorized_use=controller.occupancy.unauthorized_use,
        eraser_slot=lambda: world.node.devices.eraser_pool.slot(lambda: False),
        progress=lambda _: None,
        still=world.service.node.devices.still,
    )


@pytest.mark.parametrize("ghost", [False, True])
def test_a_device_that_is_held_during_the_reset_is_held_up_and_not_at_fault(ghost: bool) -> None:
    result = scrubbed(Answering(Held("somebody has it")), ghost=ghost)
    assert result.outcome is Outcome.HELD_UP
    assert not result.was_reset
    last = result.steps[-1]
    assert (last.step, last.verdict) == (Step.RESET, Verdict.FAILED)
    assert [(finding.code, finding.severity) for finding in last.findings] == [("held", Severity.DIRTY)]


@pytest.mark.parametrize("fault", [Unreadable("it failed"), Stuck("it did not end")])
def test_a_reset_that_fails_is_the_devices_fault(fault: Exception) -> None:
    result = scrubbed(Answering(fault))
    assert result.outcome is Outcome.FAILED
    assert [finding.code for finding in result.findings] == ["reset-failed"]


def test_what_stands_in_the_way_of_a_reset_holds_the_scrub_up_with_its_sentences() -> None:
    result = scrubbed(Answering(blockers=("dcgm.service has it open.", "Instance 0:1 is in use.")))
    assert result.outcome is Outcome.HELD_UP
    assert result.findings[-1].sentence == "dcgm.service has it open. Instance 0:1 is in use."


def test_a_reset_that_is_impossible_here_keeps_the_device_out_where_it_is_required() -> None:
    result = scrubbed(Answering(unavailable="The node is a virtual machine."))
    assert result.outcome is Outcome.FAILED
    assert [finding.code for finding in result.findings] == ["reset-unavailable"]


def test_where_it_is_not_required_the_scrub_goes_on_without_it_and_says_so() -> None:
    result = scrubbed(Answering(unavailable="The node is a virtual machine."), required=False)
    assert result.outcome is Outcome.PASSED
    assert not result.was_reset
    reset = next(step for step in result.steps if step.step is Step.RESET)
    assert (reset.verdict, reset.not_covered) == (
        Verdict.NOT_COVERED,
        ("reset: The node is a virtual machine.",),
    )


@dataclass
class TakingOthersAlong:
    """:class:`scrubber.ports.Resetter` whose resets concern another device as well."""

    world: World
    other: str
    seen: list[str]

    async def plan(self, device: Device) -> ResetPlan:
        return ResetPlan(device.id, "by decree", ("reset",), together=(self.other, "GPU-of-nobody"))

    async def reset(self, device: Device, deadline: float) -> None:
        self.seen.append(self.world.controller(1).state.record.hygiene.value)


@in_virtual_time
async def test_a_device_that_is_reset_with_another_loses_its_certificate_before() -> None:
    async with a_world(devices=2) as world:
        await world.until(lambda: world.controller(1).state.record.hygiene is Hygiene.CLEAN)
        resetter = TakingOthersAlong(world, world.controller(1).id, [])
        result = await scrub.run(resetting(world, resetter), lambda _: None)
        assert result.was_reset
        assert resetter.seen == ["dirty"]


@in_virtual_time
async def test_a_device_in_use_is_never_reset_with_another() -> None:
    async with a_world(devices=2) as world:
        await world.until(lambda: world.controller(1).state.record.hygiene is Hygiene.CLEAN)
        tenant = await world.admit("acme", "train-0", devices=(1,))
        assert tenant is not None
        await world.until(lambda: tenant.running)
        assert world.controller(1).state.record.hygiene is Hygiene.IN_USE
        resetter = TakingOthersAlong(world, world.controller(1).id, [])
        result = await scrub.run(resetting(world, resetter), lambda _: None)
        assert result.outcome is Outcome.HELD_UP
        assert resetter.seen == []


@in_virtual_time
async def test_device_that_is_being_scrubbed_is_never_reset_with_another() -> None:
    async with a_world(devices=2) as world:
        await world.controller(1).scrubs.start(Occasion.ON_DEMAND)
        with pytest.raises(Held, match="scrubbing"):
            async with world.controller(1).occupancy.still():
                raise AssertionError("the device was kept still in the middle of its scrub")
