"""Background loops: release, use without a grant, and driver events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.assignment import KubeletReading, Trust
from scrubber.domain.device import Device
from scrubber.domain.errors import ResetInProgress, Unavailable
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import RequiredProof
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.telemetry import Snapshot
from tests.world.kubelet import Tenant
from tests.world.service import HEALTH_EVERY
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world


async def running(world: World, opens_after: float = 0.0) -> Tenant:
    tenant = await world.admit("acme", "train-0", opens_after=opens_after)
    assert tenant is not None
    await world.until(lambda: tenant.running)
    await world.run(0.1)
    world.write_all(tenant)
    return tenant


# -- release -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_of_a_finished_pod_is_scrubbed_before_the_next_request() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=5.0)
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_device_is_not_released_while_a_process_of_its_pod_lives() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.kubelet.force_delete(tenant, lives_on=20.0)
        await world.run(19.0)
        assert world.record().hygiene is Hygiene.IN_USE
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=5.0)


@in_virtual_time
async def test_device_is_not_released_while_a_pod_process_that_does_not_hold_the_device_lives() -> None:
    async with a_world() as world:
        tenant = await running(world, opens_after=50.0)
        assert world.matter.holders(world.gpu().id) == []
        world.kubelet.force_delete(tenant, lives_on=20.0)
        await world.run(19.0)
        assert world.record().hygiene is Hygiene.IN_USE


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_device_is_not_released_on_an_untrusted_kubelet_list(trust: Trust) -> None:
    @in_virtual_time
    async def release_it() -> None:
        async with a_world() as world:
            tenant = await running(world)
            world.kubelet.trust = trust
            world.kubelet.delete(tenant)
            await world.run(120.0)
            assert world.record().hygiene is Hygiene.IN_USE
            world.kubelet.trust = Trust.TRUSTED
            await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=5.0)

    release_it()


@in_virtual_time
async def test_a_crash_looping_pod_keeps_its_device_between_two_starts() -> None:
    async with a_world() as world:
        tenant = await running(world)
        assert tenant.worker is not None
        tenant.worker.cancel()  # the kubelet backs off for a long time
        world.kubelet.exit(tenant, again=True)
        await world.run(300.0)
        assert world.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_completed_pod_releases_its_device() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.kubelet.exit(tenant, again=False)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=10.0)


@in_virtual_time
async def test_leftover_processes_of_a_pod_are_killed_once_its_first_process_is_dead() -> None:
    async with a_world() as world:
        tenant = await running(world)
        await world.run(2.0)  # its first process was sampled
        assert tenant.first is not None
        child = world.matter.fork(tenant.first)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=10.0)
        assert not child.alive
        assert world.gpu().cells == [""] * 4
        ended = [event.fields["pid"] for event in world.vault.events if event.name == "leftover.process.killed"]
        assert ended == [child.pid]


@in_virtual_time
async def test_leftover_process_that_holds_the_device_is_killed_although_the_pod_of_another_grant_is_over() -> None:
    trusted = replace(
        DEFAULT, required_proofs={**DEFAULT.required_proofs, HandOverKind.SAME_TENANT: RequiredProof.CHECKS}
    )
    async with a_world(policy=trusted) as world:
        first = await running(world)
        await world.run(2.0)
        world.kubelet.force_delete(first, lives_on=3.4)
        second = await world.admit("acme", "train-1")
        assert second is not None
        await world.until(lambda: second.running)
        await world.run(2.0)
        assert len(world.record().open_grants) == 2
        assert second.first is not None
        child = world.matter.fork(second.first)
        world.kubelet.delete(second)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=10.0)
        assert not child.alive


@in_virtual_time
async def test_unkillable_leftover_process_quarantines_the_device_until_the_process_is_gone() -> None:
    async with a_world() as world:
        tenant = await running(world)
        await world.run(2.0)
        assert tenant.first is not None
        child = world.matter.fork(tenant.first)
        child.killable = False
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=20.0)
        cause = world.record().cause
        assert cause is not None
        assert cause.code == "holder-unkillable"
        child.killable = True
        await world.until(lambda: world.record().state == "clean", within=120.0)


async def nobody_can_name(world: World) -> Tenant:
    """Return a pod that runs on a grant without a known pod; it does not hold its device."""
    tenant = await world.admit("acme", "train-0", starts=False)
    assert tenant is not None
    world.kubelet.trust = Trust.UNREADABLE
    world.kubelet.ask_again(tenant)
    await world.until(lambda: tenant.running)
    grant = world.record().last_grant
    assert grant is not None
    assert grant.pod is None
    assert tenant.first is not None
    tenant.first.holds.clear()
    return tenant


@in_virtual_time
async def test_unheld_device_granted_to_an_unnamed_pod_is_not_released() -> None:
    async with a_world(devices=1) as world:
        await nobody_can_name(world)
        await world.run(120.0)
        assert world.record().hygiene is Hygiene.IN_USE
        world.kubelet.trust = Trust.TRUSTED
        await world.run(5.0)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.pod is not None, "it gets its name as soon as there is one"


@pytest.mark.parametrize("why", ["not-believed", "allocated-anew"])
def test_grant_to_an_unnamed_pod_gets_no_pod_name_while_another_pod_is_possible(why: str) -> None:
    @in_virtual_time
    async def name_it() -> None:
        async with a_world(devices=1) as world:
            tenant = await nobody_can_name(world)
            if why == "not-believed":
                listed = world.kubelet.reading

                def doubtful() -> KubeletReading:
                    return replace(listed(), trust=Trust.EMPTY_AFTER_RESTART)

                world.kubelet.trust = Trust.TRUSTED
                world.kubelet.reading = doubtful  # type: ignore[method-assign]
            else:
                world.kubelet.force_delete(tenant, lives_on=100.0)
                await world.admit("umbrella", "serve-0", starts=False)
                world.kubelet.trust = Trust.TRUSTED
            await world.run(5.0)
            grant = world.record().last_grant
            assert grant is not None
            assert grant.pod is None

    name_it()


@in_virtual_time
async def test_kubelet_restart_during_an_unreadable_period_voids_certificates() -> None:
    """The kubelet requested no grants for what it started meanwhile: no earlier proof counts."""
    async with a_world(devices=1) as world:
        certificate = world.record().certificate
        assert certificate is not None
        await world.run(2.0)
        world.kubelet.trust = Trust.UNREADABLE
        await world.run(2.0)
        world.kubelet.trust, world.kubelet.starts = Trust.TRUSTED, 2
        await world.until(lambda: world.record().hygiene is not Hygiene.CLEAN, within=3.0)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        assert world.record().certificate != certificate


# -- use without a grant -----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_use_voids_the_certificate_within_two_seconds() -> None:
    async with a_world() as world:
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu().id)
        await world.run(2.0)
        assert world.record().certificate is None
        assert world.record().hygiene is not Hygiene.CLEAN
        world.matter.end(host)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        assert any(event.name == "device.marked-dirty" for event in world.vault.events)


@in_virtual_time
async def test_container_started_without_a_grant_is_never_signalled_and_its_memory_never_cleared() -> None:
    """The kubelet skips PreStart between its own restart and the plugin's next registration."""
    async with a_world() as world:
        device = world.gpu().id
        tenant = await world.admit("acme", "train-0", starts=False)
        assert tenant is not None
        proc = world.matter.start(
            tenant.uid, f"{tenant.uid}/main#1", f"acme/{tenant.uid}/main#1", mounted=frozenset([device])
        )
        world.matter.open(proc, device)
        world.matter.write(proc, device)
        await world.run(120.0)
        assert proc.alive
        assert world.gpu().cells == [proc.label] * 4
        assert world.record().certificate is None


@in_virtual_time
async def test_device_held_for_long_without_a_grant_does_not_fill_the_ledger() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu().id)
        world.kubelet.delete(tenant)
        await world.run(30.0)
        writes = world.vault.writes
        await world.run(600.0)
        assert world.vault.writes - writes < 60
        world.matter.end(host)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)


# -- driver events -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_signal_of_a_fault_takes_effect_at_once() -> None:
    async with a_world() as world:
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.run(0.01)
        assert world.record().health is not Health.HEALTHY
        assert world.record(1).health is Health.HEALTHY


@in_virtual_time
async def test_missed_signal_is_compensated_by_the_next_health_check() -> None:
    async with a_world() as world:
        world.gpu().xids[95] = 1
        await world.until(lambda: world.record().health is not Health.HEALTHY, within=10.0)


@in_virtual_time
async def test_application_fault_is_not_a_fault_of_the_device() -> None:
    async with a_world() as world:
        world.gpu().xids[31] = 3
        world.signal(0)
        await world.run(20.0)
        assert world.record().health is Health.HEALTHY


@in_virtual_time
async def test_warning_makes_a_device_suspect_until_a_quiet_period_after_the_warning_has_passed() -> None:
    async with a_world() as world:
        world.gpu().celsius = 120
        await world.until(lambda: world.record().health is Health.SUSPECT, within=10.0)
        assert world.controller().view.record.advertised
        world.gpu().celsius = 40
        cooled = world.clock.monotonic()
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.clock.monotonic() - cooled >= world.policy.health.quiet_period - HEALTH_EVERY


@in_virtual_time
async def test_signal_storm_ends_in_the_latest_state_with_few_ledger_writes() -> None:
    async with a_world() as world:
        writes = world.vault.writes
        for _ in range(500):
            world.gpu().xids[154] = world.gpu().xids.get(154, 0) + 1
            world.signal(0)
        await world.run(5.0)
        assert world.record().health is Health.SUSPECT
        assert world.vault.writes - writes < 5


@in_virtual_time
async def test_device_that_cannot_be_queried_is_quarantined_as_unreadable() -> None:
    async with a_world() as world:
        nobody_answers(world, Unavailable("no child can be started"))
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=60.0)
        cause = world.record().cause
        assert cause is not None
        assert cause.code == "device-unreadable"


@in_virtual_time
async def test_device_with_a_long_reset_in_progress_stays_healthy() -> None:
    """It may be reset because of another device, or in a scrub that the policy requires: it stays in service."""
    async with a_world() as world:
        nobody_answers(world, ResetInProgress("it is being reset"))
        await world.run(120.0)
        assert world.record().health is Health.HEALTHY


@in_virtual_time
async def test_silence_of_a_device_is_measured_from_its_last_answer_or_reset() -> None:
    async with a_world() as world:
        assert world.telemetry is not None
        answers = world.telemetry.snapshot
        for between in (ResetInProgress("it is being reset"), None):
            nobody_answers(world, Unavailable("the driver hangs"))
            await world.run(10.0)
            if between is None:
                world.telemetry.snapshot = answers  # type: ignore[method-assign]
            else:
                nobody_answers(world, between)
            await world.run(10.0)
        nobody_answers(world, Unavailable("the driver hangs"))
        await world.run(10.0)
        assert world.record().health is Health.HEALTHY


def nobody_answers(world: World, away: Unavailable) -> None:
    async def snapshot(device: Device) -> Snapshot:
        raise away

    assert world.telemetry is not None
    world.telemetry.snapshot = snapshot  # type: ignore[method-assign]


# -- devices that come, go and move ------------------------------------------------------------------------------------


def moved(world: World, address: str) -> Device:
    """Return the first device, found again at ``address``."""
    gpu = world.gpu()
    gpu.device = replace(gpu.device, traits=(("pci_address", address),))
    world.node.devices.inventory_changed.set()
    return gpu.described


@in_virtual_time
async def test_device_that_moved_to_another_pci_address_is_read_there_and_scrubbed() -> None:
    """Two GPUs may have swapped places: a query by the old address would read the other one."""
    async with a_world() as world:
        certificate = world.record().certificate
        there = moved(world, "0000:3b:00.0")
        await world.until(lambda: world.controller().state.device == there)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        assert world.record().certificate != certificate
        assert world.controller(1).state.record.hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_device_that_moves_while_in_use_is_quarantined_until_it_is_free_and_found() -> None:
    async with a_world() as world:
        tenant = await running(world)
        there = moved(world, "0000:3b:00.0")
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        assert tenant.running
        assert world.controller().state.device != there
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().state == "clean")
        assert world.controller().state.device == there


@in_virtual_time
async def test_device_that_disappears_while_in_use_is_dropped_once_its_pod_is_over() -> None:
    async with a_world() as world:
        tenant = await running(world)
        gone = world.gpu()
        gone.listed, gone.lost, gone.reset_fails = False, True, "there is no such device"
        world.node.devices.inventory_changed.set()
        await world.run(60.0)
        assert world.record().health is Health.QUARANTINED
        world.kubelet.delete(tenant)
        await world.until(lambda: gone.id not in world.node.devices.controllers)
        gone.listed, gone.lost, gone.reset_fails = True, False, None
        world.node.devices.inventory_changed.set()
        await world.until(lambda: gone.id in world.node.devices.controllers and world.record().state == "clean")


@in_virtual_time
async def test_device_in_use_that_gets_a_new_peer_stays_with_its_pod() -> None:
    async with a_world() as world:
        tenant = await running(world)
        gpu = world.gpu()
        gpu.device = replace(gpu.device, peers=frozenset({world.gpu(1).id}))
        world.node.devices.inventory_changed.set()
        await world.until(lambda: world.controller().state.device.peers == {world.gpu(1).id})
        assert (world.record().hygiene, world.record().health) == (Hygiene.IN_USE, Health.HEALTHY)
        assert tenant.running
