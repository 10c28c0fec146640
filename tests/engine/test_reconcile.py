"""Service start: devices in use stay assigned, all others are dirty, and nothing left behind is overlooked."""

from __future__ import annotations

from scrubber.domain.assignment import Trust
from scrubber.domain.handover_kind import Basis
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Health, Hygiene
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


async def running(world: World, opens_after: float = 0.0) -> Tenant:
    tenant = await world.admit("acme", "train-0", opens_after=opens_after)
    assert tenant is not None
    await world.until(lambda: tenant.running)
    await world.run(0.1)
    return tenant


async def restart(world: World) -> None:
    world.kill()
    await world.start_service()


def last_grant(record: DeviceRecord) -> Grant:
    assert record.last_grant is not None
    return record.last_grant


@in_virtual_time
async def test_certificates_are_void_after_a_service_restart_and_free_devices_are_scrubbed_at_once() -> None:
    async with a_world() as world:
        certificate = world.record().certificate
        await restart(world)
        assert world.record().certificate is None
        assert world.record().hygiene in (Hygiene.DIRTY, Hygiene.SCRUBBING)
        await world.until(world.settled)
        assert world.record().certificate != certificate


@in_virtual_time
async def test_device_stays_with_its_running_pod_across_a_service_restart() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.write_all(tenant)
        bytes_before = list(world.gpu().cells)
        await restart(world)
        await world.run(60.0)
        assert world.record().hygiene is Hygiene.IN_USE
        assert world.gpu().cells == bytes_before


@in_virtual_time
async def test_device_in_use_counts_as_allocated_after_a_service_restart() -> None:
    async with a_world() as world:
        await running(world)
        assert not world.controller().state.allocated_since
        await restart(world)
        assert world.controller().state.allocated_since


@in_virtual_time
async def test_device_stays_across_a_service_restart_with_a_pod_that_has_not_opened_it_yet() -> None:
    async with a_world() as world:
        tenant = await running(world, opens_after=20.0)
        assert world.matter.holders(world.gpu().id) == []
        await restart(world)
        await world.run(60.0)
        assert world.record().hygiene is Hygiene.IN_USE
        assert last_grant(world.record()).pod == tenant.pod


@in_virtual_time
async def test_device_stays_across_a_service_restart_with_a_listed_pod_that_has_no_process() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.kubelet.exit(tenant, again=True)
        await restart(world)
        assert world.controller().state.record.hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_container_restart_after_a_service_restart_needs_a_certificate() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.write_all(tenant)
        await restart(world)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        assert last_grant(world.record()).basis is Basis.CERTIFICATE
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_device_of_a_pod_that_ended_while_the_service_was_down_is_cleared_at_the_next_start() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.write_all(tenant)
        world.kill()
        world.kubelet.delete(tenant)
        await world.start_service()
        await world.until(world.settled)
        assert world.record().hygiene is Hygiene.CLEAN
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_running_pod_that_an_empty_ledger_does_not_know_is_adopted() -> None:
    async with a_world(settled=False) as world:
        tenant = stranger(world)
        world.matter.write(tenant, world.gpu().id)
        await world.start_service()
        await world.run(60.0)
        grant = last_grant(world.record())
        assert grant.basis is Basis.ADOPTED
        assert grant.pod is not None
        assert grant.pod.uid == tenant.pod
        assert world.record().hygiene is Hygiene.IN_USE
        assert world.gpu().cells == [tenant.label] * 4


@in_virtual_time
async def test_running_pod_is_adopted_although_the_grant_of_an_earlier_pod_is_recorded() -> None:
    async with a_world(devices=1) as world:
        gone = await running(world)
        world.kill()
        world.kubelet.delete(gone)
        tenant = stranger(world)
        world.matter.write(tenant, world.gpu().id)
        await world.start_service()
        await world.run(60.0)
        assert world.gpu().cells == [tenant.label] * 4
        grant = last_grant(world.record())
        assert grant.pod is not None
        assert grant.pod.uid == tenant.pod


@in_virtual_time
async def test_unknown_pod_whose_processes_cannot_be_read_is_treated_as_running() -> None:
    async with a_world(settled=False, devices=1) as world:
        proc = stranger(world)
        world.matter.write(proc, world.gpu().id)
        proc.holds.clear()
        assert proc.pod is not None
        world.unreadable.add(proc.pod)
        await world.start_service()
        await world.run(30.0)
        assert world.record().hygiene is Hygiene.IN_USE
        assert world.gpu().cells == [proc.label] * 4


@in_virtual_time
async def test_a_pod_that_only_waits_for_its_start_is_not_adopted() -> None:
    async with a_world(settled=False) as world:
        world.kubelet.admit("acme", "train-0", [world.gpu().id], starts=False)
        await world.start_service()
        await world.until(world.settled)
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_orphaned_eraser_is_awaited_before_its_device_is_scrubbed_again() -> None:
    async with a_world(devices=1, settled=False) as world:
        await world.start_service()
        await world.until(lambda: bool(world.erasers.running))
        world.kill()
        orphan = world.erasers.running[world.gpu().id]
        await world.start_service()
        assert orphan.task.done()
        await world.until(world.settled)
        assert any(event.name == "eraser.orphan.found" for event in world.vault.events)


@in_virtual_time
async def test_orphaned_eraser_that_cannot_be_killed_quarantines_its_device() -> None:
    async with a_world(devices=1, settled=False) as world:
        world.gpu().slow, world.erasers.unkillable = 1000.0, True
        await world.start_service()
        await world.until(lambda: bool(world.erasers.running))
        world.kubelet.admit("acme", "train-0", [world.gpu().id], starts=False)
        world.kill()
        await world.start_service()
        assert world.record().grant_sequence == 0, "an eraser is not taken for the pod that waits"
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        cause = world.record().cause
        assert cause is not None
        assert cause.code == "eraser-unkillable"


@in_virtual_time
async def test_device_that_cannot_be_read_at_the_start_is_quarantined_and_delays_no_other_device() -> None:
    async with a_world(settled=False) as world:
        world.unreadable.add(world.gpu(0).id)
        await world.start_service()
        await world.until(lambda: world.record(1).hygiene is Hygiene.CLEAN)
        assert world.serving
        assert world.record(0).health is Health.QUARANTINED


@in_virtual_time
async def test_granted_device_that_cannot_be_read_at_the_start_stays_with_its_pod() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.write_all(tenant)
        world.unreadable.add(world.gpu().id)
        await restart(world)
        await world.run(10.0)
        assert world.record().hygiene is Hygiene.IN_USE
        assert world.record().health is Health.QUARANTINED


@in_virtual_time
async def test_grants_of_an_earlier_boot_are_closed_at_the_start() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.write_all(tenant)
        world.reboot()
        world.kubelet.delete(tenant)
        await world.start_service()
        assert world.record().open_grants == ()
        await world.until(world.settled)
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_recovery_interrupted_by_a_service_restart_returns_to_quarantine_and_is_retried() -> None:
    async with a_world(devices=1) as world:
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.RECOVERING)
        await restart(world)
        assert world.record().health is Health.QUARANTINED
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.gpu().resets >= 1


@in_virtual_time
async def test_operator_quarantine_survives_a_service_restart() -> None:
    async with a_world() as world:
        await world.node.actions.quarantine("0", "it smells", "uid:1000")
        await restart(world)
        await world.run(60.0)
        assert world.record().health is Health.QUARANTINED
        assert world.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_device_stays_with_its_pod_if_the_kubelet_lists_nothing_at_the_start() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.write_all(tenant)
        world.kubelet.trust = Trust.UNREADABLE
        await restart(world)
        await world.run(60.0)
        assert world.record().hygiene is Hygiene.IN_USE
        assert set(world.gpu().cells) != {""}


def stranger(world: World) -> Proc:
    """Start a pod on the first device without a request for a grant."""
    device = world.gpu().id
    tenant = world.kubelet.admit("acme", "stranger-0", [device], starts=False)
    proc = world.matter.start(
        tenant.uid, f"{tenant.uid}/main#1", f"acme/{tenant.uid}/main#1", mounted=frozenset([device]), first=True
    )
    tenant.first, tenant.running = proc, True
    world.matter.open(proc, device)
    return proc
