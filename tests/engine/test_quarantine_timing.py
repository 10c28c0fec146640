"""When a quarantined device in use is reported to the kubelet: at once, or when its pod releases it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.errors import Quarantined
from scrubber.domain.policy import HealthRule, QuarantineTiming
from scrubber.domain.states import Health, Hygiene
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.sharing import RESOURCE, shared_device_cluster
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

AT_RELEASE = replace(DEFAULT, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE))


def offered(cluster: SimulatedCluster, number: int = 0) -> bool:
    return cluster.node.view().devices[number].advertised


async def struck(cluster: SimulatedCluster, number: int = 0, xid: int = 95) -> None:
    """Quarantine the device, whether or not the kubelet is notified."""
    cluster.gpu(number).xids[xid] = 1
    cluster.signal(number)
    await cluster.until(lambda: cluster.record(number).health is Health.QUARANTINED, within=5.0)


async def in_use_and_struck(cluster: SimulatedCluster) -> Tenant:
    tenant = await started(cluster)
    await struck(cluster)
    return tenant


@in_virtual_time
async def test_device_that_faults_in_use_is_withdrawn_from_the_kubelet_at_once_by_default() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await in_use_and_struck(cluster)
        assert not offered(cluster)
        assert tenant.first is not None
        assert tenant.first.alive


@in_virtual_time
async def test_device_that_faults_in_use_is_withdrawn_at_release_if_the_policy_says_so() -> None:
    """Until then, the kubelet would count a device that turns unhealthy in use twice."""
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        tenant = await in_use_and_struck(cluster)
        await cluster.run(120.0)
        assert offered(cluster)
        assert cluster.record().hygiene is Hygiene.IN_USE
        # Never advertised as healthy before it is: from the release on it is withdrawn, and then it returns for good.
        seen: list[bool] = []

        def look() -> bool:
            seen.append(offered(cluster))
            return cluster.record().health is Health.HEALTHY

        cluster.kubelet.delete(tenant)
        await cluster.until(look)
        assert seen[-1]
        assert False in seen
        changes = [after for before, after in itertools.pairwise(seen) if before is not after]
        assert changes == [False, True]
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_withdrawal_at_release_is_postponed_while_the_kubelets_list_cannot_be_read() -> None:
    """The pod may still have the device: an unreadable list does not prove that the pod released it."""
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        await in_use_and_struck(cluster)
        cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.run(5.0)
        assert offered(cluster)


@in_virtual_time
async def test_fault_of_an_unused_device_withdraws_the_device_at_once() -> None:
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        await struck(cluster, xid=79)
        assert not offered(cluster)


@in_virtual_time
async def test_device_whose_withdrawal_is_postponed_is_not_allocated() -> None:
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        await in_use_and_struck(cluster)
        assert offered(cluster)
        with pytest.raises(Quarantined):
            await cluster.node.reserve([cluster.gpu().id])


@in_virtual_time
async def test_container_start_on_a_device_whose_withdrawal_is_postponed_is_refused_and_triggers_the_withdrawal() -> (
    None
):
    """The pod waits for the device, which counts as released for as long as it takes to recover."""
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        tenant = await in_use_and_struck(cluster)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: bool(tenant.refusals))
        assert isinstance(tenant.refusals[0], Quarantined)
        assert not offered(cluster)
        await cluster.until(lambda: tenant.starts == 2)
        assert cluster.record().health is Health.HEALTHY
        assert offered(cluster)


@in_virtual_time
async def test_shared_device_that_faults_in_use_is_withdrawn_at_once() -> None:
    """Other pods would be given shares of it for as long as one pod stays."""
    async with shared_device_cluster(1, AT_RELEASE) as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        await struck(cluster)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert not offered(cluster)
        with pytest.raises(Quarantined):
            await cluster.node.reserve([cluster.share(1)], RESOURCE)


@in_virtual_time
async def test_device_quarantined_by_an_operator_is_withdrawn_at_once() -> None:
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        await started(cluster)
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        assert not offered(cluster)


@in_virtual_time
async def test_service_restart_does_not_end_the_postponed_withdrawal_of_a_device_in_use() -> None:
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        await in_use_and_struck(cluster)
        cluster.kill()
        await cluster.start_service()
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert offered(cluster)
        assert cluster.record().health is Health.QUARANTINED


@in_virtual_time
async def test_postponed_withdrawal_of_one_device_does_not_postpone_the_withdrawal_of_another() -> None:
    async with simulated_cluster(2, AT_RELEASE) as cluster:
        await in_use_and_struck(cluster)
        await struck(cluster, 1, xid=79)
        assert [offered(cluster, 0), offered(cluster, 1)] == [True, False]
