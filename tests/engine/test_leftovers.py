"""Leftover processes by kind: daemons without the device, children with it, and processes that cannot be killed."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.states import Health, Hygiene
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import admitted, started
from tests.simulation.timeline import in_virtual_time


async def seen_running(cluster: SimulatedCluster) -> Tenant:
    """Return a pod whose first process was sampled often enough to be identified."""
    tenant = await started(cluster)
    await cluster.run(3.0)
    return tenant


def first_of(tenant: Tenant) -> Proc:
    assert tenant.first is not None
    return tenant.first


def mps(cluster: SimulatedCluster, tenant: Tenant) -> tuple[Proc, Proc]:
    """Start a control daemon of a container, which has no device open, and its server, which has."""
    daemon = cluster.process_table.fork(first_of(tenant))
    daemon.holds.clear()
    server = cluster.process_table.fork(daemon)
    cluster.process_table.open(server, tenant.devices[0])
    return daemon, server


# -- MPS ---------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_mps_daemon_and_server_left_by_a_pod_are_both_killed() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        daemon, server = mps(cluster, tenant)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=20.0)
        assert not daemon.alive
        assert not server.alive
        ended = {
            event.fields["pid"] for event in cluster.ledger_store.events if event.name == "leftover.process.killed"
        }
        assert ended == {daemon.pid, server.pid}


@in_virtual_time
async def test_mps_daemon_left_by_a_pod_blocks_the_next_pod_until_it_is_killed() -> None:
    """The daemon holds nothing now, but would serve any process: no pod starts beside it."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        daemon, server = mps(cluster, tenant)
        cluster.process_table.end(server)
        cluster.kubelet.delete(tenant)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        await cluster.until(lambda: follower.running, within=20.0)
        assert not daemon.alive


@in_virtual_time
async def test_mps_daemon_of_a_pod_survives_the_restart_of_its_container_and_is_waited_for() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        daemon, server = mps(cluster, tenant)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.run(60.0)
        assert daemon.alive
        assert server.alive
        assert not tenant.running
        cluster.process_table.end(server)
        await cluster.until(lambda: tenant.running, within=60.0)


@in_virtual_time
async def test_mps_daemon_of_the_node_that_holds_the_device_is_waited_for_and_never_killed() -> None:
    async with simulated_cluster(devices=1) as cluster:
        server = cluster.process_table.start(None, "host/nvidia-cuda-mps", "host")
        cluster.process_table.open(server, cluster.gpu().id)
        tenant = await cluster.admit("acme", "train-0")
        assert tenant is not None
        await cluster.run(300.0)
        assert server.alive
        assert not tenant.running
        cluster.process_table.end(server)
        await cluster.until(lambda: tenant.running, within=120.0)


# -- children ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [1, 5])
def test_child_processes_that_inherited_the_device_are_killed_whatever_became_of_their_parents(
    generations: int,
) -> None:
    @in_virtual_time
    async def leave() -> None:
        async with simulated_cluster(devices=1) as cluster:
            tenant = await seen_running(cluster)
            child = first_of(tenant)
            for _ in range(generations):
                parent, child = child, cluster.process_table.fork(child)
                if parent is not tenant.first:
                    cluster.process_table.end(parent)
            cluster.kubelet.delete(tenant)
            follower = await cluster.admit("umbrella", "serve-0")
            assert follower is not None
            await cluster.until(lambda: follower.running, within=20.0)
            assert not child.alive

    leave()


@in_virtual_time
async def test_child_processes_that_keep_forking_during_the_cleanup_are_all_killed() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        cluster.process_table.fork(first_of(tenant))
        cluster.kubelet.delete(tenant)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        for _ in range(40):
            for proc in list(cluster.process_table.living(tenant.uid)):
                cluster.process_table.fork(proc)
                cluster.process_table.end(proc)
            await cluster.run(0.05)
        await cluster.until(lambda: follower.running, within=60.0)
        assert not any(cluster.process_table.living(tenant.uid))


# -- processes that cannot be killed -----------------------------------------------------------------------------------


@in_virtual_time
async def test_start_behind_an_unkillable_process_is_refused_and_succeeds_once_the_process_is_gone() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        child = cluster.process_table.fork(first_of(tenant))
        child.killable = False
        cluster.kubelet.delete(tenant)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=60.0)
        await cluster.run(10.0)
        assert any(refusal.code == "quarantined" for refusal in follower.refusals)
        child.killable = True
        cluster.process_table.end(child)
        await cluster.until(lambda: follower.running, within=200.0)


@in_virtual_time
async def test_unkillable_process_that_closed_the_device_still_blocks_the_next_pod() -> None:
    """A process that cannot be killed may open the device again."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        child = cluster.process_table.fork(first_of(tenant))
        child.killable = False
        child.holds.clear()
        cluster.kubelet.delete(tenant)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        await cluster.run(120.0)
        assert not follower.running
        child.killable = True
        cluster.process_table.end(child)
        await cluster.until(lambda: follower.running, within=200.0)


@in_virtual_time
async def test_tenant_that_is_gone_holds_a_device_no_longer_than_its_grace_period() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await seen_running(cluster)
        cluster.kubelet.force_delete(tenant, lives_on=10_000.0)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        grace = cluster.policy.limits.leftover_grace_period
        await cluster.run(grace - 1.0)
        assert first_of(tenant).alive
        await cluster.until(lambda: follower.running, within=30.0)


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_no_leftover_is_killed_while_the_kubelets_list_is_untrusted(trust: Trust) -> None:
    @in_virtual_time
    async def leave() -> None:
        async with simulated_cluster(devices=1) as cluster:
            tenant = await seen_running(cluster)
            child = cluster.process_table.fork(first_of(tenant))
            cluster.kubelet.trust = trust
            cluster.kubelet.delete(tenant)
            waits = await admitted(cluster)
            cluster.kubelet.retry_pre_start(waits)
            await cluster.run(300.0)
            assert child.alive
            assert not waits.running
            cluster.kubelet.trust = Trust.TRUSTED
            await cluster.until(lambda: waits.running, within=60.0)
            assert not child.alive

    leave()
