"""Release: a device is scrubbed as soon as its pod is done, never sooner, and the next pod needs no second scrub."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.evidence import PathKind, ScrubTrigger
from scrubber.domain.policy import Limits
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene
from tests.world.asking import admitted, ask, started
from tests.world.kubelet import Tenant
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

UNTRUSTED = [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART]


async def init_running(world: World) -> Tenant:
    tenant = await world.admit("acme", "train-0", init=True)
    assert tenant is not None
    await world.until(lambda: tenant.running)
    world.write_all(tenant)
    return tenant


def backs_off(tenant: Tenant) -> None:
    """Make the kubelet start nothing of the pod for a long time."""
    assert tenant.worker is not None
    tenant.worker.cancel()


async def kept(world: World, seconds: float) -> DeviceRecord:
    """Return the device's record after ``seconds`` in which it was neither released nor scrubbed."""
    scrubs, cells = scrubbed(world), list(world.gpu().cells)
    await world.run(seconds)
    assert world.record().hygiene is Hygiene.IN_USE
    assert (scrubbed(world), world.gpu().cells) == (scrubs, cells)
    return world.record()


def scrubbed(world: World) -> int:
    """Return how many scrubs of the first device have started."""
    return sum(each.device == world.gpu().id and each.path is PathKind.SLOW for each in world.vault.scrubs.values())


# -- never sooner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", Trust)
def test_device_is_not_released_while_an_init_container_runs(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with a_world() as world:
            await init_running(world)
            world.kubelet.trust = trust
            await kept(world, 120.0)

    watch()


@pytest.mark.parametrize("trust", Trust)
def test_device_is_not_released_between_an_init_container_and_the_next_container(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with a_world() as world:
            tenant = await init_running(world)
            world.kubelet.trust = trust
            backs_off(tenant)
            world.kubelet.exit(tenant, again=False)
            await kept(world, 120.0)
            world.kubelet.trust = Trust.TRUSTED
            world.kubelet.ask_again(tenant)
            await world.until(lambda: tenant.running and tenant.container == "main")

    watch()


@pytest.mark.parametrize("trust", UNTRUSTED)
def test_device_is_not_released_in_a_crash_loop_backoff_while_the_kubelet_is_untrusted(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with a_world() as world:
            tenant = await started(world)
            world.kubelet.trust = trust
            backs_off(tenant)
            world.kubelet.exit(tenant, again=True)
            await kept(world, 300.0)

    watch()


@in_virtual_time
async def test_absences_before_and_after_an_untrusted_kubelet_list_do_not_add_up_to_a_release() -> None:
    """The list lacked the pod once, then was untrusted, then contains the pod again."""
    async with a_world() as world:
        tenant = await started(world)
        backs_off(tenant)
        world.kubelet.exit(tenant, again=True)
        tenant.gone_since = world.clock.monotonic()
        await world.run(1.1)
        world.kubelet.trust = Trust.UNREADABLE
        await world.run(60.0)
        tenant.gone_since = None
        world.kubelet.trust = Trust.TRUSTED
        await kept(world, 60.0)


@in_virtual_time
async def test_device_of_a_pod_adopted_between_two_of_its_containers_is_not_released() -> None:
    async with a_world() as world:
        tenant = await init_running(world)
        backs_off(tenant)
        world.kubelet.exit(tenant, again=False)
        world.kill()
        await world.start_service()
        await kept(world, 60.0)


# -- at once after the last use, and joined ----------------------------------------------------------------------------


@in_virtual_time
async def test_next_pod_joins_the_scrub_that_a_release_started() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.kubelet.delete(first)
        await world.until(lambda: bool(world.erasers.running), within=5.0)
        erasers = world.erasers.started
        second = await admitted(world)
        (granted,) = await ask(world, second)
        assert world.erasers.started == erasers
        assert granted.path is PathKind.SLOW
        slow = [scrub for scrub in world.vault.scrubs.values() if scrub.path is PathKind.SLOW]
        assert slow[-1].trigger is ScrubTrigger.RELEASE


@in_virtual_time
async def test_scrub_after_a_release_gets_an_eraser_slot_first_once_a_pod_waits_for_it() -> None:
    one_slot = replace(DEFAULT, limits=replace(Limits(), eraser_slots=1))
    async with a_world(devices=3, policy=one_slot) as world:
        pods = [await started(world, "acme", f"train-{number}", number) for number in range(3)]
        for each in pods:
            world.kubelet.delete(each)
        await world.until(lambda: bool(world.erasers.running), within=5.0)
        first, last = (number for number in range(3) if world.gpu(number).id not in world.erasers.running)
        second = await admitted(world, "umbrella", "serve-0", last)
        await ask(world, second)
        assert world.record(first).hygiene is not Hygiene.CLEAN


@in_virtual_time
async def test_container_that_starts_without_a_grant_stops_the_scrub_of_its_device() -> None:
    """The fence breaks; the interrupted scrub proves nothing, and the pod is left alone."""
    async with a_world(devices=1) as world:
        first = await started(world)
        world.gpu().slow = 20.0
        world.kubelet.delete(first)
        await world.until(lambda: bool(world.erasers.running), within=5.0)
        tenant = await admitted(world)
        world.gpu().slow = 1.0
        device = world.gpu().id
        container = f"{tenant.uid}/main#1"
        proc = world.matter.start(None, container, f"umbrella/{container}", mounted=frozenset({device}))
        world.matter.open(proc, device)
        await world.run(10.0)
        assert not world.erasers.running
        assert world.record().certificate is None
        assert proc.alive
        assert world.record().grant_sequence == 1
        world.matter.end(proc)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=120.0)


@in_virtual_time
async def test_scrub_after_a_release_goes_on_when_the_waiting_pod_gives_up() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.kubelet.delete(first)
        await world.until(lambda: bool(world.erasers.running), within=5.0)
        second = await admitted(world)
        call = ask(world, second)
        await world.run(0.1)
        call.cancel()
        await asyncio.wait({call})
        world.kubelet.delete(second)
        erasers = world.erasers.started
        await world.until(world.settled)
        assert world.record().hygiene is Hygiene.CLEAN
        assert world.erasers.started == erasers
