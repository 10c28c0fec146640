"""A pod's own earlier use of a device: its other containers do not block its start, and other pods still wait."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.assignment import KubeletReading
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.states import Health
from tests.world.asking import STRICT, started
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


def plain_container(world: World, uid: str, name: str) -> Proc:
    """Start a container of the pod that has no device."""
    return world.matter.start(uid, f"{uid}/{name}#1", f"acme/{name}")


def left_behind(world: World, tenant: Tenant) -> Proc:
    """Fork a child of the running container that holds no device, and outlives its parent in a shared PID namespace."""
    assert tenant.first is not None
    child = world.matter.fork(tenant.first)
    child.holds.clear()
    return child


async def restart_service(world: World) -> None:
    world.kill()
    await world.start_service()


@in_virtual_time
async def test_gpu_container_beside_a_plain_container_restarts_after_a_service_restart() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        plain_container(world, tenant.uid, "logs")
        await world.run(3.0)
        await restart_service(world)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_main_container_starts_beside_a_sidecar_that_started_after_the_init_container() -> None:
    async with a_world(devices=1) as world:
        tenant = await world.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await world.until(lambda: tenant.running)
        world.kubelet.exit(tenant, again=False)
        plain_container(world, tenant.uid, "proxy")
        await world.until(lambda: tenant.running and tenant.container == "main", within=60.0)


@in_virtual_time
async def test_pod_that_was_about_to_start_while_the_service_was_down_starts_whatever_its_sandbox_process_is() -> None:
    async with a_world(devices=1) as world:
        world.kill()
        tenant = await world.admit("acme", "train-0", (0,))
        assert tenant is not None
        assert tenant.sandbox is not None
        world.matter.fork(tenant.sandbox)
        await world.start_service()
        assert not any(event.name == "device.adopted" for event in world.vault.events)
        await world.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_device_cleared_for_a_restart_goes_to_no_other_pod_while_a_container_of_the_first_pod_lives() -> None:
    """The device is cleared for a restart of the first pod, which is deleted then; its other container lives on."""
    async with a_world(devices=1, policy=STRICT) as world:
        first = await started(world)
        logs = plain_container(world, first.uid, "logs")
        world.kubelet.exit(first, again=True)
        await world.until(lambda: world.controller().state.job is not None)
        world.kubelet.force_delete(first, lives_on=0.0)
        await world.until(lambda: world.record().certificate is not None)
        second = await world.admit("umbrella", "serve-0", (0,))
        assert second is not None
        await world.run(20.0)
        assert not second.running
        world.matter.end(logs)
        await world.until(lambda: second.running, within=90.0)


@in_virtual_time
async def test_every_restart_of_a_container_that_crashes_at_once_takes_the_fast_path() -> None:
    """The container ends before the pod's processes are sampled again; its creation was still noticed."""
    async with a_world(devices=1) as world:
        tenant = await started(world)
        scrubs = len(world.vault.scrubs)
        for _ in range(5):
            world.kubelet.exit(tenant, again=True)
            await world.until(lambda: tenant.running, within=30.0)
        slow = [scrub for scrub in list(world.vault.scrubs.values())[scrubs:] if scrub.path == "slow"]
        assert slow == []


@in_virtual_time
async def test_grant_of_an_init_container_names_the_init_container_although_the_kubelets_list_does_not() -> None:
    async with a_world(devices=1) as world:
        tenant = await world.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        for container in ("init", "main"):
            await world.until(lambda: tenant.running, within=60.0)
            last = world.record().last_grant
            assert last is not None
            assert last.assignment is not None
            assert last.assignment.container == container
            world.kubelet.exit(tenant, again=False)


@in_virtual_time
async def test_grant_is_named_after_the_init_container_that_restarted_on_it() -> None:
    """Before it starts, it is unknown whether a failed init container restarts or the main container follows."""
    async with a_world(devices=1) as world:
        tenant = await world.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await world.until(lambda: tenant.running)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.running and tenant.starts == 2, within=60.0)
        await world.run(2.0)
        last = world.record().last_grant
        assert last is not None
        assert last.assignment is not None
        assert (last.assignment.container, last.cgroups[-1]) == ("init", f"{tenant.uid}/init#2")


@in_virtual_time
async def test_grant_of_a_finished_pod_does_not_stay_open_beside_the_next_tenants_grant() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        first = await started(world)
        world.kubelet.exit(first, again=True)
        await world.until(lambda: world.controller().state.job is not None)
        world.kubelet.force_delete(first, lives_on=0.0)  # deleted while the device is cleared for its restart
        await world.until(lambda: world.record().certificate is not None)
        second = await world.admit("umbrella", "serve-0", (0,))
        assert second is not None
        await world.until(lambda: second.running, within=90.0)
        assert world.record().tenant == "umbrella"
        assert [each.pod for each in world.record().open_grants] == [second.pod]


@in_virtual_time
async def test_faulted_device_recovers_although_the_pod_that_waited_for_it_is_gone_and_left_a_holder() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        first = await started(world)
        side = world.matter.start(first.uid, f"{first.uid}/side#1", "acme/side", mounted=frozenset(first.devices))
        world.matter.open(side, world.gpu().id)
        world.gpu().came(95, 1)
        world.signal(0)
        await world.run(1.0)
        world.kubelet.exit(first, again=True)
        await world.run(10.0)
        world.kubelet.force_delete(first, lives_on=0.0)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=900.0)
        assert not side.alive


@in_virtual_time
async def test_main_container_waits_for_a_process_of_the_init_container_while_the_checkpoint_cannot_be_read() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        tenant = await world.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await world.until(lambda: tenant.running)
        await world.run(3.0)
        child, reading = left_behind(world, tenant), world.kubelet.reading

        def without_checkpoint() -> KubeletReading:
            return replace(reading(), checkpoint_only=(), init_containers_known=False)

        world.kubelet.reading = without_checkpoint  # type: ignore[method-assign]
        world.kubelet.exit(tenant, again=False)
        await world.run(60.0)
        assert not tenant.running
        world.matter.end(child)
        await world.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_restart_needs_a_certificate_while_the_checkpoint_cannot_be_read() -> None:
    """An init container of the pod may have had the device since, and only the checkpoint names those."""
    async with a_world(devices=1) as world:
        tenant, reading = await started(world), world.kubelet.reading
        world.kubelet.reading = lambda: replace(reading(), init_containers_known=False)  # type: ignore[method-assign]
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.running and tenant.starts == 2, within=60.0)
        last = world.record().last_grant
        assert last is not None
        assert (last.kind, last.basis) == (HandOverKind.SAME_POD, Basis.CERTIFICATE)


@in_virtual_time
async def test_init_container_that_alone_has_the_device_starts_again_beside_another_container_of_its_pod() -> None:
    async with a_world(devices=1) as world:
        tenant = await world.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await world.until(lambda: tenant.running)
        plain_container(world, tenant.uid, "side")
        reading = world.kubelet.reading
        world.kubelet.reading = lambda: replace(reading(), assignments=())  # type: ignore[method-assign]
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.running and tenant.starts == 2, within=60.0)


@in_virtual_time
async def test_process_left_by_an_earlier_run_is_waited_for_although_a_later_run_had_the_device_last() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        await world.run(3.0)
        left = left_behind(world, tenant)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.running)  # by the policy's exception for the same container
        await world.run(3.0)
        await restart_service(world)  # from here on it needs a certificate
        world.kubelet.exit(tenant, again=True)
        await world.run(60.0)
        assert not tenant.running
        world.matter.end(left)
        await world.until(lambda: tenant.running, within=60.0)
