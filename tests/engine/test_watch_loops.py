"""Background loops: release, use without a grant, and driver events."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scrubber.domain.assignment import KubeletReading, Trust
from scrubber.domain.device import Device
from scrubber.domain.errors import ResetInProgress, Unavailable
from scrubber.domain.evidence import FindingCode
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.infrastructure import NamedHolder, ProcessOwner
from scrubber.domain.policy import RequiredProof
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.telemetry import Holder, HolderKind, Snapshot
from scrubber.engine.loops.health import watch_health
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.service import HEALTH_EVERY, Pace
from tests.simulation.timeline import in_virtual_time


async def running(cluster: SimulatedCluster, opens_after: float = 0.0) -> Tenant:
    tenant = await cluster.admit("acme", "train-0", opens_after=opens_after)
    assert tenant is not None
    await cluster.until(lambda: tenant.running)
    await cluster.run(0.1)
    cluster.write_all(tenant)
    return tenant


# -- release -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_of_a_finished_pod_is_scrubbed_before_the_next_request() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=5.0)
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_device_is_not_released_while_a_process_of_its_pod_lives() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.kubelet.force_delete(tenant, lives_on=20.0)
        await cluster.run(19.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=5.0)


@in_virtual_time
async def test_device_is_not_released_while_a_pod_process_that_does_not_hold_the_device_lives() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster, opens_after=50.0)
        assert cluster.process_table.holders(cluster.gpu().id) == []
        cluster.kubelet.force_delete(tenant, lives_on=20.0)
        await cluster.run(19.0)
        assert cluster.record().hygiene is Hygiene.IN_USE


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_device_of_a_pod_without_cgroups_is_not_released_on_an_untrusted_kubelet_list(trust: Trust) -> None:
    @in_virtual_time
    async def release_it() -> None:
        async with simulated_cluster() as cluster:
            cluster.process_table.has_cgroups = False
            tenant = await running(cluster)
            cluster.kubelet.trust = trust
            cluster.kubelet.delete(tenant)
            await cluster.run(120.0)
            assert cluster.record().hygiene is Hygiene.IN_USE
            cluster.kubelet.trust = Trust.TRUSTED
            await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=5.0)

    release_it()


@in_virtual_time
async def test_a_crash_looping_pod_keeps_its_device_between_two_starts() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        assert tenant.worker is not None
        tenant.worker.cancel()  # the kubelet backs off for a long time
        cluster.kubelet.exit(tenant, again=True)
        await cluster.run(300.0)
        assert cluster.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_completed_pod_releases_its_device() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.kubelet.exit(tenant, again=False)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=10.0)


@in_virtual_time
async def test_leftover_processes_of_a_pod_are_killed_once_its_first_process_is_dead() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        await cluster.run(2.0)  # its first process was sampled
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=10.0)
        assert not child.alive
        assert cluster.gpu().cells == [""] * 4
        ended = [
            event.fields["pid"] for event in cluster.ledger_store.events if event.name == "leftover.process.killed"
        ]
        assert ended == [child.pid]


@in_virtual_time
async def test_leftover_process_that_holds_the_device_is_killed_although_the_pod_of_another_grant_is_over() -> None:
    trusted = replace(
        DEFAULT, required_proofs={**DEFAULT.required_proofs, HandOverKind.SAME_TENANT: RequiredProof.CHECKS}
    )
    async with simulated_cluster(policy=trusted) as cluster:
        first = await running(cluster)
        await cluster.run(2.0)
        cluster.kubelet.force_delete(first, lives_on=3.4)
        second = await cluster.admit("acme", "train-1")
        assert second is not None
        await cluster.until(lambda: second.running)
        await cluster.run(2.0)
        assert len(cluster.record().open_grants) == 2
        assert second.first is not None
        child = cluster.process_table.fork(second.first)
        cluster.kubelet.delete(second)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=10.0)
        assert not child.alive


@in_virtual_time
async def test_unkillable_leftover_process_quarantines_the_device_until_the_process_is_gone() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        await cluster.run(2.0)
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        child.killable = False
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=20.0)
        cause = cluster.record().cause
        assert cause is not None
        assert cause.code == "holder-unkillable"
        child.killable = True
        await cluster.until(lambda: cluster.record().state == "clean", within=120.0)


async def unnamed_pod(cluster: SimulatedCluster) -> Tenant:
    """Return a pod that runs on a grant without a known pod; it does not hold its device."""
    tenant = await cluster.admit("acme", "train-0", starts=False)
    assert tenant is not None
    cluster.kubelet.trust = Trust.UNREADABLE
    cluster.kubelet.retry_pre_start(tenant)
    await cluster.until(lambda: tenant.running)
    grant = cluster.record().last_grant
    assert grant is not None
    assert grant.pod is None
    assert tenant.first is not None
    tenant.first.holds.clear()
    return tenant


@in_virtual_time
async def test_unheld_device_granted_to_an_unnamed_pod_is_not_released() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await unnamed_pod(cluster)
        await cluster.run(120.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(5.0)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.pod is not None, "it gets its name as soon as there is one"


@pytest.mark.parametrize("why", ["untrusted", "allocated-again"])
def test_grant_to_an_unnamed_pod_gets_no_pod_name_while_another_pod_is_possible(why: str) -> None:
    @in_virtual_time
    async def name_it() -> None:
        async with simulated_cluster(devices=1) as cluster:
            tenant = await unnamed_pod(cluster)
            if why == "untrusted":
                listed = cluster.kubelet.reading

                def doubtful() -> KubeletReading:
                    return replace(listed(), trust=Trust.EMPTY_AFTER_RESTART)

                cluster.kubelet.trust = Trust.TRUSTED
                cluster.kubelet.reading = doubtful  # type: ignore[method-assign]
            else:
                cluster.kubelet.force_delete(tenant, lives_on=100.0)
                await cluster.admit("umbrella", "serve-0", starts=False)
                cluster.kubelet.trust = Trust.TRUSTED
            await cluster.run(5.0)
            grant = cluster.record().last_grant
            assert grant is not None
            assert grant.pod is None

    name_it()


@in_virtual_time
async def test_kubelet_restart_during_an_unreadable_period_voids_certificates() -> None:
    """The kubelet requested no grants for what it started meanwhile: no earlier proof counts."""
    async with simulated_cluster(devices=1) as cluster:
        certificate = cluster.record().certificate
        assert certificate is not None
        await cluster.run(2.0)
        cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.run(2.0)
        cluster.kubelet.trust, cluster.kubelet.starts = Trust.TRUSTED, 2
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.CLEAN, within=3.0)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert cluster.record().certificate != certificate


# -- use without a grant -----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_use_voids_the_certificate_within_two_seconds() -> None:
    async with simulated_cluster() as cluster:
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        await cluster.run(2.0)
        assert cluster.record().certificate is None
        assert cluster.record().hygiene is not Hygiene.CLEAN
        cluster.process_table.end(host)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert any(event.name == "device.marked-dirty" for event in cluster.ledger_store.events)


@in_virtual_time
async def test_container_started_without_a_grant_is_never_signalled_and_its_memory_never_cleared() -> None:
    """The kubelet skips PreStart between its own restart and the plugin's next registration."""
    async with simulated_cluster() as cluster:
        device = cluster.gpu().id
        tenant = await cluster.admit("acme", "train-0", starts=False)
        assert tenant is not None
        proc = cluster.process_table.start(
            tenant.uid, f"{tenant.uid}/main#1", f"acme/{tenant.uid}/main#1", mounted=frozenset([device])
        )
        cluster.process_table.open(proc, device)
        cluster.process_table.write(proc, device)
        await cluster.run(120.0)
        assert proc.alive
        assert cluster.gpu().cells == [proc.label] * 4
        assert cluster.record().certificate is None


@in_virtual_time
async def test_device_held_for_long_without_a_grant_does_not_fill_the_ledger() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        cluster.kubelet.delete(tenant)
        await cluster.run(30.0)
        writes = cluster.ledger_store.writes
        await cluster.run(600.0)
        assert cluster.ledger_store.writes - writes < 60
        cluster.process_table.end(host)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)


# -- driver events -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_signal_of_a_fault_takes_effect_at_once() -> None:
    async with simulated_cluster() as cluster:
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.run(0.01)
        assert cluster.record().health is not Health.HEALTHY
        assert cluster.record(1).health is Health.HEALTHY


@in_virtual_time
async def test_missed_signal_is_compensated_by_the_next_health_check() -> None:
    async with simulated_cluster() as cluster:
        cluster.gpu().xids[95] = 1
        await cluster.until(lambda: cluster.record().health is not Health.HEALTHY, within=10.0)


@in_virtual_time
async def test_application_fault_is_not_a_fault_of_the_device() -> None:
    async with simulated_cluster() as cluster:
        cluster.gpu().xids[31] = 3
        cluster.signal(0)
        await cluster.run(20.0)
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_warning_makes_a_device_suspect_until_a_quiet_period_after_the_warning_has_passed() -> None:
    async with simulated_cluster() as cluster:
        cluster.gpu().celsius = 120
        await cluster.until(lambda: cluster.record().health is Health.SUSPECT, within=10.0)
        assert cluster.controller().view.record.advertised
        cluster.gpu().celsius = 40
        cooled = cluster.clock.monotonic()
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.clock.monotonic() - cooled >= cluster.policy.health.quiet_period - HEALTH_EVERY


@in_virtual_time
async def test_signal_storm_ends_in_the_latest_state_with_few_ledger_writes() -> None:
    async with simulated_cluster() as cluster:
        writes = cluster.ledger_store.writes
        for _ in range(500):
            cluster.gpu().xids[154] = cluster.gpu().xids.get(154, 0) + 1
            cluster.signal(0)
        await cluster.run(5.0)
        assert cluster.record().health is Health.SUSPECT
        assert cluster.ledger_store.writes - writes < 5


@in_virtual_time
async def test_device_that_cannot_be_queried_is_quarantined_as_unreadable() -> None:
    async with simulated_cluster() as cluster:
        service_unavailable(cluster, Unavailable("no child can be started"))
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=60.0)
        cause = cluster.record().cause
        assert cause is not None
        assert cause.code == "device-unreadable"


@in_virtual_time
async def test_device_with_a_long_reset_in_progress_stays_healthy() -> None:
    """It may be reset because of another device, or in a scrub that the policy requires: it stays in service."""
    async with simulated_cluster() as cluster:
        service_unavailable(cluster, ResetInProgress("it is being reset"))
        await cluster.run(120.0)
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_silence_of_a_device_is_measured_from_its_last_answer_or_reset() -> None:
    async with simulated_cluster() as cluster:
        assert cluster.telemetry is not None
        answers = cluster.telemetry.snapshot
        for between in (ResetInProgress("it is being reset"), None):
            service_unavailable(cluster, Unavailable("the driver hangs"))
            await cluster.run(10.0)
            if between is None:
                cluster.telemetry.snapshot = answers  # type: ignore[method-assign]
            else:
                service_unavailable(cluster, between)
            await cluster.run(10.0)
        service_unavailable(cluster, Unavailable("the driver hangs"))
        await cluster.run(10.0)
        assert cluster.record().health is Health.HEALTHY


def service_unavailable(cluster: SimulatedCluster, away: Unavailable) -> None:
    async def snapshot(device: Device) -> Snapshot:
        raise away

    assert cluster.telemetry is not None
    cluster.telemetry.snapshot = snapshot  # type: ignore[method-assign]


# -- devices that come, go and move ------------------------------------------------------------------------------------


def moved(cluster: SimulatedCluster, address: str) -> Device:
    """Return the first device, found again at ``address``."""
    gpu = cluster.gpu()
    gpu.device = replace(gpu.device, traits=(("pci_address", address),))
    cluster.node.devices.inventory_changed.set()
    return gpu.described


@in_virtual_time
async def test_device_that_moved_to_another_pci_address_is_read_there_and_scrubbed() -> None:
    """Two GPUs may have swapped places: a query by the old address would read the other one."""
    async with simulated_cluster() as cluster:
        certificate = cluster.record().certificate
        moved_device = moved(cluster, "0000:3b:00.0")
        await cluster.until(lambda: cluster.controller().state.device == moved_device)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert cluster.record().certificate != certificate
        assert cluster.controller(1).state.record.hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_device_that_moves_while_in_use_is_quarantined_until_it_is_free_and_found() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        moved_device = moved(cluster, "0000:3b:00.0")
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        assert tenant.running
        assert cluster.controller().state.device != moved_device
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().state == "clean")
        assert cluster.controller().state.device == moved_device


@in_virtual_time
async def test_device_that_disappears_while_in_use_is_dropped_once_its_pod_is_over() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        gone = cluster.gpu()
        gone.listed, gone.lost, gone.reset_fails = False, True, "there is no such device"
        cluster.node.devices.inventory_changed.set()
        await cluster.run(60.0)
        assert cluster.record().health is Health.QUARANTINED
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: gone.id not in cluster.node.devices.controllers)
        gone.listed, gone.lost, gone.reset_fails = True, False, None
        cluster.node.devices.inventory_changed.set()
        await cluster.until(lambda: gone.id in cluster.node.devices.controllers and cluster.record().state == "clean")


@in_virtual_time
async def test_device_in_use_that_gets_a_new_peer_stays_with_its_pod() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        gpu = cluster.gpu()
        gpu.device = replace(gpu.device, peers=frozenset({cluster.gpu(1).id}))
        cluster.node.devices.inventory_changed.set()
        await cluster.until(lambda: cluster.controller().state.device.peers == {cluster.gpu(1).id})
        assert (cluster.record().hygiene, cluster.record().health) == (Hygiene.IN_USE, Health.HEALTHY)
        assert tenant.running


@in_virtual_time
async def test_device_whose_query_is_expensive_is_checked_as_rarely_as_its_backend_says_and_others_as_usual() -> None:
    async with simulated_cluster(devices=2, pace=Pace(health=1000.0)) as cluster:
        assert cluster.service is not None
        queries: Counter[str] = Counter()

        def controller(device: Device) -> SimpleNamespace:
            async def check() -> None:
                queries[device.id] += 1

            return SimpleNamespace(
                id=device.id, state=SimpleNamespace(device=device), health=SimpleNamespace(check=check)
            )

        controllers = {each.id: controller(each.device) for each in (cluster.gpu(0), cluster.gpu(1))}
        node = SimpleNamespace(devices=SimpleNamespace(controllers=controllers))
        loop = asyncio.create_task(
            watch_health(
                node,  # type: ignore[arg-type]
                dependencies=cluster.service.dependencies,
                interval=1.0,
                least=lambda device: 10.0 if device.id == cluster.gpu(1).id else 0.0,
            )
        )
        await cluster.run(99.5)
        loop.cancel()
        assert queries == {cluster.gpu(0).id: 100, cluster.gpu(1).id: 10}


# -- at rest -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_nothing_is_published_and_no_view_is_built_while_nothing_changes() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await running(cluster)
        await cluster.until(cluster.settled)
        await cluster.run(10.0)
        before, views = cluster.node.view(), [cluster.controller(number).view for number in range(2)]
        await cluster.run(60.0)
        assert cluster.node.view() is before
        assert all(cluster.controller(number).view is view for number, view in enumerate(views))


@in_virtual_time
async def test_each_change_of_a_device_at_rest_is_published() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.until(cluster.settled)
        occupancy, state = cluster.controller().occupancy, cluster.controller().state
        holder = NamedHolder(
            Holder(7, 1, HolderKind.PROCESS, "agent"), ProcessOwner(), FindingCode.UNAUTHORIZED_USE, 1.0
        )
        occupancy.set_unauthorized_users(("PID 7 uses it.",))
        assert cluster.node.view().devices[0].unauthorized_users == ("PID 7 uses it.",)
        occupancy.set_unauthorized_users(("PID 7 uses it.",), (holder,))
        assert cluster.node.view().devices[0].holders == (holder,)
        state.describe(replace(state.device, model="another model"))
        assert cluster.node.view().devices[0].device.model == "another model"
