"""When a quarantined device in use is reported to the kubelet: at once, or when its pod releases it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.errors import Quarantined
from scrubber.domain.policy import HealthRule, QuarantineTiming
from scrubber.domain.states import Health, Hygiene
from tests.world.asking import started
from tests.world.kubelet import Tenant
from tests.world.sharing import RESOURCE, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

AT_RELEASE = replace(DEFAULT, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE))


def offered(world: World, number: int = 0) -> bool:
    return world.node.view().devices[number].advertised


async def struck(world: World, number: int = 0, xid: int = 95) -> None:
    """Quarantine the device, whether or not the kubelet is notified."""
    world.gpu(number).xids[xid] = 1
    world.signal(number)
    await world.until(lambda: world.record(number).health is Health.QUARANTINED, within=5.0)


async def in_use_and_struck(world: World) -> Tenant:
    tenant = await started(world)
    await struck(world)
    return tenant


@in_virtual_time
async def test_device_that_faults_in_use_is_withdrawn_from_the_kubelet_at_once_by_default() -> None:
    async with a_world(1) as world:
        tenant = await in_use_and_struck(world)
        assert not offered(world)
        assert tenant.first is not None
        assert tenant.first.alive


@in_virtual_time
async def test_device_that_faults_in_use_is_withdrawn_at_release_if_the_policy_says_so() -> None:
    """Until then, the kubelet would count a device that turns unhealthy in use twice."""
    async with a_world(1, AT_RELEASE) as world:
        tenant = await in_use_and_struck(world)
        await world.run(120.0)
        assert offered(world)
        assert world.record().hygiene is Hygiene.IN_USE
        # Never advertised as healthy before it is: from the release on it is withdrawn, and then it returns for good.
        seen: list[bool] = []

        def look() -> bool:
            seen.append(offered(world))
            return world.record().health is Health.HEALTHY

        world.kubelet.delete(tenant)
        await world.until(look)
        assert seen[-1]
        assert False in seen
        changes = [after for before, after in itertools.pairwise(seen) if before is not after]
        assert changes == [False, True]
        assert world.gpu().resets == 1


@in_virtual_time
async def test_withdrawal_at_release_is_postponed_while_the_kubelets_list_cannot_be_read() -> None:
    """The pod may still have the device: an unreadable list does not prove that the pod released it."""
    async with a_world(1, AT_RELEASE) as world:
        await in_use_and_struck(world)
        world.kubelet.trust = Trust.UNREADABLE
        await world.run(5.0)
        assert offered(world)


@in_virtual_time
async def test_fault_of_an_unused_device_withdraws_the_device_at_once() -> None:
    async with a_world(1, AT_RELEASE) as world:
        await struck(world, xid=79)
        assert not offered(world)


@in_virtual_time
async def test_device_whose_withdrawal_is_postponed_is_not_allocated() -> None:
    async with a_world(1, AT_RELEASE) as world:
        await in_use_and_struck(world)
        assert offered(world)
        with pytest.raises(Quarantined):
            await world.node.reserve([world.gpu().id])


@in_virtual_time
async def test_container_start_on_a_device_whose_withdrawal_is_postponed_is_refused_and_triggers_the_withdrawal() -> (
    None
):
    """The pod waits for the device, which counts as released for as long as it takes to recover."""
    async with a_world(1, AT_RELEASE) as world:
        tenant = await in_use_and_struck(world)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: bool(tenant.refusals))
        assert isinstance(tenant.refusals[0], Quarantined)
        assert not offered(world)
        await world.until(lambda: tenant.starts == 2)
        assert world.record().health is Health.HEALTHY
        assert offered(world)


@in_virtual_time
async def test_shared_device_that_faults_in_use_is_withdrawn_at_once() -> None:
    """Other pods would be given shares of it for as long as one pod stays."""
    async with a_shared_world(1, AT_RELEASE) as world:
        await world.start("acme", "train-0", world.share(0))
        await struck(world)
        assert world.record().hygiene is Hygiene.IN_USE
        assert not offered(world)
        with pytest.raises(Quarantined):
            await world.node.reserve([world.share(1)], RESOURCE)


@in_virtual_time
async def test_device_quarantined_by_an_operator_is_withdrawn_at_once() -> None:
    async with a_world(1, AT_RELEASE) as world:
        await started(world)
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        assert not offered(world)


@in_virtual_time
async def test_service_restart_does_not_end_the_postponed_withdrawal_of_a_device_in_use() -> None:
    async with a_world(1, AT_RELEASE) as world:
        await in_use_and_struck(world)
        world.kill()
        await world.start_service()
        assert world.record().hygiene is Hygiene.IN_USE
        assert offered(world)
        assert world.record().health is Health.QUARANTINED


@in_virtual_time
async def test_postponed_withdrawal_of_one_device_does_not_postpone_the_withdrawal_of_another() -> None:
    async with a_world(2, AT_RELEASE) as world:
        await in_use_and_struck(world)
        await struck(world, 1, xid=79)
        assert [offered(world, 0), offered(world, 1)] == [True, False]
