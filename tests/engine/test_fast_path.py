"""What a start on checks alone must not ignore: holders without a process, warnings, and observe mode for both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import Grant
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.device.occupancy import Occupancy
from tests.world.asking import STRICT, TRUSTED, started
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

OBSERVE = Enforcement.OBSERVE


def last_grant(world: World) -> Grant:
    grant = world.record().last_grant
    assert grant is not None
    return grant


@in_virtual_time
async def test_restart_on_a_device_whose_memory_no_process_explains_starts_after_a_quarantine_and_a_reset() -> None:
    """No process will ever release the memory: the device is quarantined, is reset, and the pod starts on it."""
    async with a_world(devices=1) as world:
        tenant = await started(world)
        world.gpu().ghost = True
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=60.0)
        cause = world.record().cause
        assert cause is not None
        assert cause.code == "untraceable-holder"
        await world.until(lambda: tenant.running, within=120.0)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_time_before_a_device_was_free_does_not_count_towards_being_held_without_a_process() -> None:
    async with a_world(devices=1) as world:
        occupancy = world.controller().occupancy
        assert not await occupancy.is_held_without_process()
        await world.run(DEFAULT.limits.unknown_pod_idle_period / 2)
        assert not await occupancy.is_held()
        await world.run(DEFAULT.limits.unknown_pod_idle_period)
        assert not await occupancy.is_held_without_process()


@in_virtual_time
async def test_restart_waits_for_memory_that_the_driver_still_releases_and_needs_no_certificate_then() -> None:
    """A driver needs a moment to release the memory of a dead process: until then it is no ghost holder."""
    async with a_world(devices=1) as world:
        tenant = await started(world)
        await world.run(2.0)
        world.gpu().ghost = True
        world.kubelet.exit(tenant, again=True)
        await world.run(0.5)
        world.gpu().ghost = False
        await world.until(lambda: tenant.running, within=5.0)
        assert last_grant(world).basis is Basis.SAME_CONTAINER


@pytest.mark.parametrize("told", [True, False], ids=["told", "found-by-the-checks"])
def test_restart_on_a_device_with_a_driver_warning_needs_a_certificate(told: bool) -> None:
    @in_virtual_time
    async def warn() -> None:
        async with a_world(devices=1) as world:
            tenant = await started(world)
            world.write_all(tenant)
            world.gpu().celsius = 120
            if told:
                world.signal(0)
                await world.run(0.1)
            world.kubelet.exit(tenant, again=True)
            await world.until(lambda: tenant.starts == 2)
            assert last_grant(world).basis is Basis.CERTIFICATE
            assert world.gpu().cells == [""] * 4

    warn()


# -- observe mode ------------------------------------------------------------------------------------------------------


async def observed(policy: Policy) -> World:
    world = World(1, replace(policy, enforcement=OBSERVE))
    await world.start_service()
    await world.until(world.settled)
    return world


@in_virtual_time
async def test_observing_policy_allows_a_restart_while_the_device_is_held() -> None:
    world = await observed(DEFAULT)
    tenant = await started(world)
    world.gpu().ghost = True
    world.kubelet.exit(tenant, again=True)
    await world.until(lambda: tenant.running, within=5.0)
    assert tenant.refusals == []
    await world.end()


@in_virtual_time
async def test_observing_policy_with_an_exception_allows_a_start_beside_a_running_pod() -> None:
    world = await observed(TRUSTED)
    first = await started(world)
    world.kubelet.force_delete(first, lives_on=300.0)
    second = await world.admit("acme", "train-1")
    assert second is not None
    await world.until(lambda: second.running, within=5.0)
    assert first.first is not None
    assert first.first.alive
    await world.end()


@in_virtual_time
async def test_observing_policy_with_an_exception_kills_no_leftover_process() -> None:
    world = await observed(TRUSTED)
    first = await started(world)
    await world.run(3.0)
    assert first.first is not None
    child = world.matter.fork(first.first)
    world.kubelet.delete(first)
    second = await world.admit("acme", "train-1")
    assert second is not None
    await world.until(lambda: second.running, within=5.0)
    assert child.alive
    assert world.record().hygiene is Hygiene.IN_USE
    await world.end()


@in_virtual_time
async def test_policy_change_in_the_last_moment_of_a_hand_over_is_applied_to_that_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        await world.run(2.0)
        controller, asked = world.controller(), Occupancy.is_held

        async def held(self: Occupancy) -> bool:
            if controller.state.lock.locked():  # the last check, before the grant is written
                world.policy = STRICT
            return await asked(self)

        monkeypatch.setattr(Occupancy, "is_held", held)
        before = last_grant(world).sequence
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: world.policy is STRICT and world.record().grant_sequence > before)
        assert last_grant(world).basis is Basis.CERTIFICATE
        assert controller.state.record.grant_sequence == before + 1
