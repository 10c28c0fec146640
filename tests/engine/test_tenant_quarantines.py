"""Quarantines are counted for the tenant that had the device, over all devices of the node and a day."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.health.history import DAY
from scrubber.domain.policy import HealthRule
from scrubber.domain.states import Health, Hygiene
from scrubber.ports.record import Event
from tests.world.asking import started
from tests.world.kubelet import Tenant
from tests.world.service import Pace
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

TWICE = replace(DEFAULT, health=HealthRule(tenant_quarantine_threshold=2))


def told(world: World, name: str = "tenant.flagged") -> list[Event]:
    return [event for event in world.vault.events if event.name == name]


def blamed(world: World) -> list[tuple[object, object]]:
    return [(event.fields["tenant"], event.fields["quarantines"]) for event in told(world)]


async def struck(world: World, number: int = 0) -> None:
    world.gpu(number).xids[95] = 1
    world.signal(number)
    await world.until(lambda: not world.record(number).advertised, within=5.0)


async def healed(world: World, number: int = 0) -> None:
    await world.until(lambda: world.record(number).health is Health.HEALTHY, within=300.0)


async def provokes(world: World, namespace: str, number: int = 0) -> Tenant:
    """Quarantine a device while a pod has it, and wait until it recovers once the pod is gone."""
    tenant = await started(world, namespace, "train-0", number)
    await struck(world, number)
    world.kubelet.delete(tenant)
    await healed(world, number)
    return tenant


@in_virtual_time
async def test_quarantine_event_names_the_tenant_that_had_the_device() -> None:
    async with a_world(2) as world:
        await started(world, "acme", "train-0", 0)
        await started(world, "umbrella", "serve-0", 1)
        await struck(world, 0)
        await struck(world, 1)
        by_device = {event.device: event.fields["tenant"] for event in told(world, "health.quarantined")}
        assert by_device == {world.gpu(0).id: "acme", world.gpu(1).id: "umbrella"}


@in_virtual_time
async def test_quarantine_event_of_an_unassigned_device_names_no_tenant() -> None:
    async with a_world(1) as world:
        await struck(world)
        (event,) = told(world, "health.quarantined")
        assert event.fields["tenant"] is None
        assert [strike.tenant for strike in world.record().recent_quarantines] == [None]


@in_virtual_time
async def test_quarantines_of_a_tenant_on_all_devices_are_counted_together_and_logged_at_the_policys_threshold() -> (
    None
):
    async with a_world(3) as world:
        await provokes(world, "acme", 0)
        await provokes(world, "acme", 1)
        assert told(world) == []
        await provokes(world, "acme", 2)
        (event,) = told(world)
        assert event.device == world.gpu(2).id
        assert blamed(world) == [("acme", 3)]
        assert "3 times within a day while acme had them" in str(event.fields["message"])


@in_virtual_time
async def test_tenant_quarantines_are_logged_again_at_each_multiple_of_the_threshold() -> None:
    async with a_world(2, TWICE) as world:
        for turn in range(6):
            await provokes(world, "acme", turn % 2)
        assert blamed(world) == [("acme", 2), ("acme", 4), ("acme", 6)]


@in_virtual_time
async def test_quarantines_are_counted_separately_for_each_tenant() -> None:
    async with a_world(2, TWICE) as world:
        await provokes(world, "acme", 0)
        await provokes(world, "umbrella", 0)
        await provokes(world, "hooli", 1)
        assert told(world) == []
        await provokes(world, "umbrella", 1)
        assert blamed(world) == [("umbrella", 2)]


@in_virtual_time
async def test_persistent_fault_counts_as_one_quarantine_however_often_it_is_signalled() -> None:
    async with a_world(1, TWICE) as world:
        await started(world, "acme")
        for _ in range(20):
            world.gpu().xids[95] = world.gpu().xids.get(95, 0) + 1
            world.signal(0)
            await world.run(30.0)
        assert len(world.record().recent_quarantines) == 1
        assert told(world) == []


@in_virtual_time
async def test_fault_that_worsens_or_whose_recovery_fails_counts_as_one_quarantine() -> None:
    async with a_world(1, TWICE) as world:
        tenant = await started(world, "acme")
        await struck(world)
        world.gpu().reset_fails = "the reset did not take"
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().failures >= 2)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.run(30.0)
        assert len(world.record().recent_quarantines) == 1
        assert told(world) == []


@in_virtual_time
async def test_quarantine_of_a_device_with_unauthorized_use_is_attributed_to_no_tenant() -> None:
    async with a_world(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as world:
        await started(world, "acme")
        host = world.matter.start(None, "host", "host")
        world.matter.open(host, world.gpu().id)
        await world.until(lambda: world.record().contaminated, within=5.0)
        await struck(world)
        assert told(world) == []
        (event,) = told(world, "health.quarantined")
        assert event.fields["tenant"] is None


@in_virtual_time
async def test_quarantine_of_a_device_with_open_grants_of_two_tenants_is_attributed_to_neither_tenant() -> None:
    async with a_world(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as world:
        await started(world, "acme")
        await world.node.actions.break_glass("0", 600.0, "the trial must not stop", "uid:0")
        first = world.kubelet.tenants[0]
        world.kubelet.force_delete(first, lives_on=300.0)
        second = await world.admit("umbrella", "serve-0")
        assert second is not None
        await world.until(lambda: second.running)
        assert len(world.record().open_grants) == 2
        await struck(world)
        assert told(world) == []


@in_virtual_time
async def test_quarantine_by_the_scrub_after_a_pod_is_attributed_to_the_tenant_of_that_pod() -> None:
    """No other tenant has had it since."""
    async with a_world(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as world:
        tenant = await started(world, "acme")
        world.gpu().wont_clear = True
        world.kubelet.delete(tenant)
        await world.until(lambda: not world.record().advertised)
        assert blamed(world) == [("acme", 1)]
        assert world.record().hygiene is not Hygiene.IN_USE


@in_virtual_time
async def test_quarantine_of_a_clean_device_is_not_attributed_to_its_last_tenant() -> None:
    async with a_world(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as world:
        tenant = await started(world, "acme")
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        await struck(world)
        assert told(world) == []


@in_virtual_time
async def test_operator_quarantine_is_attributed_to_no_tenant() -> None:
    async with a_world(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as world:
        await started(world, "acme")
        await world.node.actions.quarantine("0", "it smells", "uid:0")
        assert told(world) == []
        assert world.record().recent_quarantines == ()


@in_virtual_time
async def test_tenant_quarantines_are_counted_across_restarts_and_for_one_day() -> None:
    async with a_world(2, TWICE, pace=Pace(watch=8.0, health=300.0)) as world:
        await provokes(world, "acme", 0)
        world.kill()
        await world.start_service()
        await world.until(world.settled)
        await provokes(world, "acme", 1)
        assert blamed(world) == [("acme", 2)]
        await world.run(DAY)
        await provokes(world, "acme", 0)
        assert blamed(world) == [("acme", 2)]
