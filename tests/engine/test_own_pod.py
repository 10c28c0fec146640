"""A pod's own earlier use of a device: its other containers do not block its start, and other pods still wait."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.assignment import KubeletReading
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.states import Health
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import STRICT, started
from tests.simulation.timeline import in_virtual_time


def plain_container(cluster: SimulatedCluster, uid: str, name: str) -> Proc:
    """Start a container of the pod that has no device."""
    return cluster.process_table.start(uid, f"{uid}/{name}#1", f"acme/{name}")


def left_behind(cluster: SimulatedCluster, tenant: Tenant) -> Proc:
    """Fork a child of the running container that holds no device, and outlives its parent in a shared PID namespace."""
    assert tenant.first is not None
    child = cluster.process_table.fork(tenant.first)
    child.holds.clear()
    return child


async def restart_service(cluster: SimulatedCluster) -> None:
    cluster.kill()
    await cluster.start_service()


@in_virtual_time
async def test_gpu_container_beside_a_plain_container_restarts_after_a_service_restart() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        plain_container(cluster, tenant.uid, "logs")
        await cluster.run(3.0)
        await restart_service(cluster)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_main_container_starts_beside_a_sidecar_that_started_after_the_init_container() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await cluster.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        cluster.kubelet.exit(tenant, again=False)
        plain_container(cluster, tenant.uid, "proxy")
        await cluster.until(lambda: tenant.running and tenant.container == "main", within=60.0)


@in_virtual_time
async def test_pod_that_was_about_to_start_while_the_service_was_down_starts_whatever_its_sandbox_process_is() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.kill()
        tenant = await cluster.admit("acme", "train-0", (0,))
        assert tenant is not None
        assert tenant.sandbox is not None
        cluster.process_table.fork(tenant.sandbox)
        await cluster.start_service()
        assert not any(event.name == "device.adopted" for event in cluster.ledger_store.events)
        await cluster.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_device_cleared_for_a_restart_goes_to_no_other_pod_while_a_container_of_the_first_pod_lives() -> None:
    """The device is cleared for a restart of the first pod, which is deleted then; its other container lives on."""
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        first = await started(cluster)
        logs = plain_container(cluster, first.uid, "logs")
        cluster.kubelet.exit(first, again=True)
        await cluster.until(lambda: cluster.controller().state.job is not None)
        cluster.kubelet.force_delete(first, lives_on=0.0)
        await cluster.until(lambda: cluster.record().certificate is not None)
        second = await cluster.admit("umbrella", "serve-0", (0,))
        assert second is not None
        await cluster.run(20.0)
        assert not second.running
        cluster.process_table.end(logs)
        await cluster.until(lambda: second.running, within=90.0)


@in_virtual_time
async def test_every_restart_of_a_container_that_crashes_at_once_takes_the_fast_path() -> None:
    """The container ends before the pod's processes are sampled again; its creation was still noticed."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        scrubs = len(cluster.ledger_store.scrubs)
        for _ in range(5):
            cluster.kubelet.exit(tenant, again=True)
            await cluster.until(lambda: tenant.running, within=30.0)
        slow = [scrub for scrub in list(cluster.ledger_store.scrubs.values())[scrubs:] if scrub.path == "slow"]
        assert slow == []


@in_virtual_time
async def test_grant_of_an_init_container_names_the_init_container_although_the_kubelets_list_does_not() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await cluster.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        for container in ("init", "main"):
            await cluster.until(lambda: tenant.running, within=60.0)
            last = cluster.record().last_grant
            assert last is not None
            assert last.assignment is not None
            assert last.assignment.container == container
            cluster.kubelet.exit(tenant, again=False)


@in_virtual_time
async def test_grant_is_named_after_the_init_container_that_restarted_on_it() -> None:
    """Before it starts, it is unknown whether a failed init container restarts or the main container follows."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await cluster.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.running and tenant.starts == 2, within=60.0)
        await cluster.run(2.0)
        last = cluster.record().last_grant
        assert last is not None
        assert last.assignment is not None
        assert (last.assignment.container, last.cgroups[-1]) == ("init", f"{tenant.uid}/init#2")


@in_virtual_time
async def test_grant_of_a_finished_pod_does_not_stay_open_beside_the_next_tenants_grant() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        first = await started(cluster)
        cluster.kubelet.exit(first, again=True)
        await cluster.until(lambda: cluster.controller().state.job is not None)
        cluster.kubelet.force_delete(first, lives_on=0.0)  # deleted while the device is cleared for its restart
        await cluster.until(lambda: cluster.record().certificate is not None)
        second = await cluster.admit("umbrella", "serve-0", (0,))
        assert second is not None
        await cluster.until(lambda: second.running, within=90.0)
        assert cluster.record().tenant == "umbrella"
        assert [each.pod for each in cluster.record().open_grants] == [second.pod]


@in_virtual_time
async def test_faulted_device_recovers_although_the_pod_that_waited_for_it_is_gone_and_left_a_holder() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        first = await started(cluster)
        side = cluster.process_table.start(
            first.uid, f"{first.uid}/side#1", "acme/side", mounted=frozenset(first.devices)
        )
        cluster.process_table.open(side, cluster.gpu().id)
        cluster.gpu().report_xid(95, 1)
        cluster.signal(0)
        await cluster.run(1.0)
        cluster.kubelet.exit(first, again=True)
        await cluster.run(10.0)
        cluster.kubelet.force_delete(first, lives_on=0.0)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=900.0)
        assert not side.alive


@in_virtual_time
async def test_main_container_waits_for_a_process_of_the_init_container_while_the_checkpoint_cannot_be_read() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        tenant = await cluster.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        await cluster.run(3.0)
        child, reading = left_behind(cluster, tenant), cluster.kubelet.reading

        def without_checkpoint() -> KubeletReading:
            return replace(reading(), checkpoint_only=(), init_containers_known=False)

        cluster.kubelet.reading = without_checkpoint  # type: ignore[method-assign]
        cluster.kubelet.exit(tenant, again=False)
        await cluster.run(60.0)
        assert not tenant.running
        cluster.process_table.end(child)
        await cluster.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_restart_needs_a_certificate_while_the_checkpoint_cannot_be_read() -> None:
    """An init container of the pod may have had the device since, and only the checkpoint names those."""
    async with simulated_cluster(devices=1) as cluster:
        tenant, reading = await started(cluster), cluster.kubelet.reading
        cluster.kubelet.reading = lambda: replace(reading(), init_containers_known=False)  # type: ignore[method-assign]
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.running and tenant.starts == 2, within=60.0)
        last = cluster.record().last_grant
        assert last is not None
        assert (last.kind, last.basis) == (HandOverKind.SAME_POD, Basis.CERTIFICATE)


@in_virtual_time
async def test_init_container_that_alone_has_the_device_starts_again_beside_another_container_of_its_pod() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await cluster.admit("acme", "train-0", (0,), init=True)
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        plain_container(cluster, tenant.uid, "side")
        reading = cluster.kubelet.reading
        cluster.kubelet.reading = lambda: replace(reading(), assignments=())  # type: ignore[method-assign]
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.running and tenant.starts == 2, within=60.0)


@in_virtual_time
async def test_process_left_by_an_earlier_run_is_waited_for_although_a_later_run_had_the_device_last() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        await cluster.run(3.0)
        left = left_behind(cluster, tenant)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.running)  # by the policy's exception for the same container
        await cluster.run(3.0)
        await restart_service(cluster)  # from here on it needs a certificate
        cluster.kubelet.exit(tenant, again=True)
        await cluster.run(60.0)
        assert not tenant.running
        cluster.process_table.end(left)
        await cluster.until(lambda: tenant.running, within=60.0)
