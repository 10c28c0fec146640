"""A blocked reset is no evidence against the device; a failed one is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DriverTimeout, Unreadable
from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger, Severity, Step, Verdict
from scrubber.domain.policy import ResetMode
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import Hygiene
from scrubber.engine import scrub
from scrubber.engine.scrub import ScrubResult
from scrubber.engine.steps.context import ScrubContext
from scrubber.ports.device import Resetter
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.timeline import in_virtual_time


@dataclass
class Answering:
    """:class:`scrubber.ports.Resetter` that can reset everything and responds as the test sets."""

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
    """Run a slow path with a reset, on a device that a ghost may hold."""

    @in_virtual_time
    async def run() -> ScrubResult:
        async with simulated_cluster(devices=1) as cluster:
            cluster.gpu().ghost = ghost
            return await scrub.run_scrub(resetting(cluster, answering, required=required), lambda _: None)

    return run()


def resetting(cluster: SimulatedCluster, answering: Resetter, *, required: bool = True) -> ScrubContext:
    assert cluster.service is not None
    controller = cluster.controller()
    policy = replace(cluster.policy, reset=ResetMode.REQUIRED if required else ResetMode.BEST_EFFORT)
    plan = policy.plan(PathKind.SLOW, ScrubTrigger.CONTAINER_START, must_reset=True)
    assert Step.RESET in plan.steps
    return ScrubContext(
        scrub="scrub-1",
        device=controller.state.device,
        record=controller.state.record,
        plan=replace(plan, steps=(Step.HOLDERS, Step.RESET, Step.HEALTH)),
        policy=policy,
        dependencies=replace(cluster.service.dependencies, resetter=answering),
        pods=controller.pods,
        pod_liveness=controller.occupancy.pod_liveness,
        unauthorized_use=controller.occupancy.unauthorized_use,
        progress=lambda _: None,
        keep_out_of_use=cluster.service.node.devices.keep_out_of_use,
    )


@pytest.mark.parametrize("ghost", [False, True])
def test_device_held_during_its_reset_blocks_the_scrub_and_is_not_faulted(ghost: bool) -> None:
    result = scrubbed(Answering(DeviceBusy("the device is held")), ghost=ghost)
    assert result.outcome is Outcome.BLOCKED
    assert not result.was_reset
    last = result.steps[-1]
    assert (last.step, last.verdict) == (Step.RESET, Verdict.FAILED)
    assert [(finding.code, finding.severity) for finding in last.findings] == [("device-busy", Severity.BLOCKING)]


@pytest.mark.parametrize("fault", [Unreadable("it failed"), DriverTimeout("it did not end")])
def test_failed_reset_is_a_fault_of_the_device(fault: Exception) -> None:
    result = scrubbed(Answering(fault))
    assert result.outcome is Outcome.FAILED
    assert [finding.code for finding in result.findings] == ["reset-failed"]


def test_blockers_of_a_reset_block_the_scrub_and_become_its_message() -> None:
    result = scrubbed(Answering(blockers=("dcgm.service has it open.", "Instance 0:1 is in use.")))
    assert result.outcome is Outcome.BLOCKED
    assert result.findings[-1].message == "dcgm.service has it open. Instance 0:1 is in use."


def test_unavailable_reset_fails_the_scrub_where_a_reset_is_required() -> None:
    result = scrubbed(Answering(unavailable="The node is a virtual machine."))
    assert result.outcome is Outcome.FAILED
    assert [finding.code for finding in result.findings] == ["reset-unavailable"]


def test_unavailable_reset_is_recorded_as_not_covered_where_no_reset_is_required() -> None:
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
    """:class:`scrubber.ports.Resetter` whose resets include another device."""

    cluster: SimulatedCluster
    other: str
    seen: list[str]

    async def plan(self, device: Device) -> ResetPlan:
        return ResetPlan(device.id, "by decree", ("reset",), also_reset=(self.other, "GPU-unknown"))

    async def reset(self, device: Device, deadline: float) -> None:
        self.seen.append(self.cluster.controller(1).state.record.hygiene.value)


@in_virtual_time
async def test_device_reset_together_with_another_loses_its_certificate_before_the_reset() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.until(lambda: cluster.controller(1).state.record.hygiene is Hygiene.CLEAN)
        resetter = TakingOthersAlong(cluster, cluster.controller(1).id, [])
        result = await scrub.run_scrub(resetting(cluster, resetter), lambda _: None)
        assert result.was_reset
        assert resetter.seen == ["dirty"]


@in_virtual_time
async def test_device_in_use_is_never_reset_together_with_another() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.until(lambda: cluster.controller(1).state.record.hygiene is Hygiene.CLEAN)
        tenant = await cluster.admit("acme", "train-0", devices=(1,))
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        assert cluster.controller(1).state.record.hygiene is Hygiene.IN_USE
        resetter = TakingOthersAlong(cluster, cluster.controller(1).id, [])
        result = await scrub.run_scrub(resetting(cluster, resetter), lambda _: None)
        assert result.outcome is Outcome.BLOCKED
        assert resetter.seen == []


@in_virtual_time
async def test_device_that_is_being_scrubbed_is_never_reset_together_with_another() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.controller(1).scrubs.start(ScrubTrigger.ON_DEMAND)
        with pytest.raises(DeviceBusy, match="scrubbing"):
            async with cluster.controller(1).occupancy.keep_out_of_use():
                raise AssertionError("the device was kept still in the middle of its scrub")
