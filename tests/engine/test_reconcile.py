"""Service start: devices in use stay assigned, all others are dirty, and nothing left behind is overlooked."""

from __future__ import annotations

from scrubber.domain.assignment import Trust
from scrubber.domain.handover_kind import Basis
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Health, Hygiene
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.timeline import in_virtual_time


async def running(cluster: SimulatedCluster, opens_after: float = 0.0) -> Tenant:
    tenant = await cluster.admit("acme", "train-0", opens_after=opens_after)
    assert tenant is not None
    await cluster.until(lambda: tenant.running)
    await cluster.run(0.1)
    return tenant


async def restart(cluster: SimulatedCluster) -> None:
    cluster.kill()
    await cluster.start_service()


def last_grant(record: DeviceRecord) -> Grant:
    assert record.last_grant is not None
    return record.last_grant


@in_virtual_time
async def test_certificates_are_void_after_a_service_restart_and_free_devices_are_scrubbed_at_once() -> None:
    async with simulated_cluster() as cluster:
        certificate = cluster.record().certificate
        await restart(cluster)
        assert cluster.record().certificate is None
        assert cluster.record().hygiene in (Hygiene.DIRTY, Hygiene.SCRUBBING)
        await cluster.until(cluster.settled)
        assert cluster.record().certificate != certificate


@in_virtual_time
async def test_device_stays_with_its_running_pod_across_a_service_restart() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.write_all(tenant)
        bytes_before = list(cluster.gpu().cells)
        await restart(cluster)
        await cluster.run(60.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().cells == bytes_before


@in_virtual_time
async def test_device_in_use_counts_as_allocated_after_a_service_restart() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster)
        assert not cluster.controller().state.allocated_since
        await restart(cluster)
        assert cluster.controller().state.allocated_since


@in_virtual_time
async def test_device_stays_across_a_service_restart_with_a_pod_that_has_not_opened_it_yet() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster, opens_after=20.0)
        assert cluster.process_table.holders(cluster.gpu().id) == []
        await restart(cluster)
        await cluster.run(60.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert last_grant(cluster.record()).pod == tenant.pod


@in_virtual_time
async def test_device_stays_across_a_service_restart_with_a_listed_pod_that_has_no_process() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.kubelet.exit(tenant, again=True)
        await restart(cluster)
        assert cluster.controller().state.record.hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_container_restart_after_a_service_restart_needs_a_certificate() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.write_all(tenant)
        await restart(cluster)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        assert last_grant(cluster.record()).basis is Basis.CERTIFICATE
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_device_of_a_pod_that_ended_while_the_service_was_down_is_cleared_at_the_next_start() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.write_all(tenant)
        cluster.kill()
        cluster.kubelet.delete(tenant)
        await cluster.start_service()
        await cluster.until(cluster.settled)
        assert cluster.record().hygiene is Hygiene.CLEAN
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_running_pod_that_an_empty_ledger_does_not_know_is_adopted() -> None:
    async with simulated_cluster(settled=False) as cluster:
        tenant = pod_without_a_grant(cluster)
        cluster.process_table.write(tenant, cluster.gpu().id)
        await cluster.start_service()
        await cluster.run(60.0)
        grant = last_grant(cluster.record())
        assert grant.basis is Basis.ADOPTED
        assert grant.pod is not None
        assert grant.pod.uid == tenant.pod
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().cells == [tenant.label] * 4


@in_virtual_time
async def test_running_pod_is_adopted_although_the_grant_of_an_earlier_pod_is_recorded() -> None:
    async with simulated_cluster(devices=1) as cluster:
        gone = await running(cluster)
        cluster.kill()
        cluster.kubelet.delete(gone)
        tenant = pod_without_a_grant(cluster)
        cluster.process_table.write(tenant, cluster.gpu().id)
        await cluster.start_service()
        await cluster.run(60.0)
        assert cluster.gpu().cells == [tenant.label] * 4
        grant = last_grant(cluster.record())
        assert grant.pod is not None
        assert grant.pod.uid == tenant.pod


@in_virtual_time
async def test_unknown_pod_whose_processes_cannot_be_read_is_treated_as_running() -> None:
    async with simulated_cluster(settled=False, devices=1) as cluster:
        proc = pod_without_a_grant(cluster)
        cluster.process_table.write(proc, cluster.gpu().id)
        proc.holds.clear()
        assert proc.pod is not None
        cluster.unreadable.add(proc.pod)
        await cluster.start_service()
        await cluster.run(30.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().cells == [proc.label] * 4


@in_virtual_time
async def test_a_pod_that_only_waits_for_its_start_is_not_adopted() -> None:
    async with simulated_cluster(settled=False) as cluster:
        cluster.kubelet.admit("acme", "train-0", [cluster.gpu().id], starts=False)
        await cluster.start_service()
        await cluster.until(cluster.settled)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_orphaned_eraser_is_awaited_before_its_device_is_scrubbed_again() -> None:
    async with simulated_cluster(devices=1, settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: bool(cluster.erasers.running))
        cluster.kill()
        orphan = cluster.erasers.running[cluster.gpu().id]
        await cluster.start_service()
        assert orphan.task.done()
        await cluster.until(cluster.settled)
        assert any(event.name == "eraser.orphan.found" for event in cluster.ledger_store.events)


@in_virtual_time
async def test_orphaned_eraser_that_cannot_be_killed_quarantines_its_device() -> None:
    async with simulated_cluster(devices=1, settled=False) as cluster:
        cluster.gpu().slow, cluster.erasers.unkillable = 1000.0, True
        await cluster.start_service()
        await cluster.until(lambda: bool(cluster.erasers.running))
        cluster.kubelet.admit("acme", "train-0", [cluster.gpu().id], starts=False)
        cluster.kill()
        await cluster.start_service()
        assert cluster.record().grant_sequence == 0, "an eraser is not taken for the pod that waits"
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        cause = cluster.record().cause
        assert cause is not None
        assert cause.code == "eraser-unkillable"


@in_virtual_time
async def test_device_that_cannot_be_read_at_the_start_is_quarantined_and_delays_no_other_device() -> None:
    async with simulated_cluster(settled=False) as cluster:
        cluster.unreadable.add(cluster.gpu(0).id)
        await cluster.start_service()
        await cluster.until(lambda: cluster.record(1).hygiene is Hygiene.CLEAN)
        assert cluster.serving
        assert cluster.record(0).health is Health.QUARANTINED


@in_virtual_time
async def test_granted_device_that_cannot_be_read_at_the_start_stays_with_its_pod() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.write_all(tenant)
        cluster.unreadable.add(cluster.gpu().id)
        await restart(cluster)
        await cluster.run(10.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.record().health is Health.QUARANTINED


@in_virtual_time
async def test_grants_of_an_earlier_boot_are_closed_at_the_start() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.write_all(tenant)
        cluster.reboot()
        cluster.kubelet.delete(tenant)
        await cluster.start_service()
        assert cluster.record().open_grants == ()
        await cluster.until(cluster.settled)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_recovery_interrupted_by_a_service_restart_returns_to_quarantine_and_is_retried() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.RECOVERING)
        await restart(cluster)
        assert cluster.record().health is Health.QUARANTINED
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.gpu().resets >= 1


@in_virtual_time
async def test_audit_log_has_the_end_of_a_scrub_and_of_a_recovery_that_the_last_service_did_not_finish() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.RECOVERING)
        (unfinished,) = (each for each in cluster.ledger_store.scrubs.values() if each.outcome is None)
        await restart(cluster)
        events = {each.name: each for each in cluster.ledger_store.events}
        finished = events["scrub.finished"]
        assert (finished.scrub, finished.device) == (unfinished.id, cluster.gpu().id)
        assert (finished.fields["outcome"], finished.fields["duration_seconds"]) == ("abandoned", None)
        assert events["health.recovery-failed"].device == cluster.gpu().id


@in_virtual_time
async def test_operator_quarantine_survives_a_service_restart() -> None:
    async with simulated_cluster() as cluster:
        await cluster.node.actions.quarantine("0", "it smells", "uid:1000")
        await restart(cluster)
        await cluster.run(60.0)
        assert cluster.record().health is Health.QUARANTINED
        assert cluster.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_device_stays_with_its_pod_if_the_kubelet_lists_nothing_at_the_start() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.write_all(tenant)
        cluster.kubelet.trust = Trust.UNREADABLE
        await restart(cluster)
        await cluster.run(60.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert set(cluster.gpu().cells) != {""}


def pod_without_a_grant(cluster: SimulatedCluster) -> Proc:
    """Start a pod on the first device without a request for a grant."""
    device = cluster.gpu().id
    tenant = cluster.kubelet.admit("acme", "stranger-0", [device], starts=False)
    proc = cluster.process_table.start(
        tenant.uid, f"{tenant.uid}/main#1", f"acme/{tenant.uid}/main#1", mounted=frozenset([device]), first=True
    )
    tenant.first, tenant.running = proc, True
    cluster.process_table.open(proc, device)
    return proc
