"""A device that a process without a grant holds for a while attracts no pods, without a quarantine and without a deadlock."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.evidence import FindingCode
from scrubber.domain.policy import DeviceTaintRule, Enforcement
from scrubber.domain.states import BindingState, Health, Hygiene, TaintReason
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time


def unknown_holder(cluster: SimulatedCluster) -> Proc:
    gpu = cluster.gpu().id
    proc = cluster.process_table.start(None, "host/agent#1", "", mounted=frozenset({gpu}), command="agent")
    cluster.process_table.open(proc, gpu)
    return proc


def is_advertised(cluster: SimulatedCluster, number: int = 0) -> bool:
    return cluster.node.view().devices[number].advertised


@in_virtual_time
async def test_device_held_by_an_unknown_process_is_withheld_after_a_minute_and_returns_when_the_process_ends() -> None:
    async with simulated_cluster(devices=2) as cluster:
        proc = unknown_holder(cluster)
        await cluster.run(50.0)
        assert is_advertised(cluster)
        await cluster.until(lambda: not is_advertised(cluster), within=90.0)
        view = cluster.controller().view
        assert (view.record.health, view.record.hygiene, view.record.cause) == (Health.HEALTHY, Hygiene.DIRTY, None)
        assert view.refusal_message == (
            f"Device {cluster.gpu().id} is held by a process that has no grant for it. It is offered again when that has "
            "ended."
        )
        assert is_advertised(cluster, 1)
        cluster.process_table.end(proc)
        await cluster.until(lambda: is_advertised(cluster), within=15.0)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_allocation_of_a_withheld_device_is_not_refused_and_its_pod_starts_when_the_holder_ends() -> None:
    """The kubelet may have chosen the device a moment before: a refusal would fail the pod for good."""
    async with simulated_cluster(devices=1) as cluster:
        proc = unknown_holder(cluster)
        await cluster.until(lambda: not is_advertised(cluster), within=120.0)
        await cluster.node.reserve((cluster.gpu().id,))
        call = request_start(cluster, await admitted(cluster), wait=25.0)
        await cluster.run(5.0)
        cluster.process_table.end(proc)
        (granted,) = await call
        assert granted.device == cluster.gpu().id
        assert is_advertised(cluster)


@in_virtual_time
async def test_device_that_is_assigned_to_a_waiting_pod_stays_advertised() -> None:
    """The kubelet would count it twice, and it attracts no further pod."""
    async with simulated_cluster(devices=1) as cluster:
        unknown_holder(cluster)
        tenant = await admitted(cluster)
        await cluster.run(150.0)
        assert is_advertised(cluster)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: not is_advertised(cluster), within=120.0)


@in_virtual_time
async def test_policy_that_only_observes_withholds_no_device() -> None:
    async with simulated_cluster(devices=1, policy=replace(DEFAULT, enforcement=Enforcement.OBSERVE)) as cluster:
        unknown_holder(cluster)
        await cluster.run(150.0)
        assert any(each.code == FindingCode.UNKNOWN_HOLDER for each in cluster.controller().view.holders)
        assert is_advertised(cluster)


@in_virtual_time
async def test_device_that_cannot_be_scrubbed_gets_a_taint_after_the_policys_time_and_loses_it_when_it_is_clean() -> (
    None
):
    policy = replace(DEFAULT, device_taints=DeviceTaintRule(dirty_after=300.0))
    async with simulated_cluster(devices=1, policy=policy) as cluster:

        def taints() -> tuple[TaintReason, ...]:
            return cluster.node.view().devices[0].taints

        def binding() -> BindingState:
            return cluster.node.view().devices[0].binding

        assert binding() is BindingState.READY
        proc = unknown_holder(cluster)
        await cluster.until(lambda: binding() is BindingState.BEING_CLEANED)
        await cluster.until(lambda: taints() == (TaintReason("held"),))
        assert binding() is BindingState.OUT_OF_SERVICE
        await cluster.run(200.0)
        assert taints() == (TaintReason("held"),)
        await cluster.until(lambda: taints() == (TaintReason("held"), TaintReason("dirty")))
        cluster.process_table.end(proc)
        await cluster.until(lambda: taints() == (), within=600.0)
        assert cluster.record().hygiene is Hygiene.CLEAN
        assert binding() is BindingState.READY


@in_virtual_time
async def test_device_in_use_gets_no_taint_however_long_it_is_used() -> None:
    policy = replace(DEFAULT, device_taints=DeviceTaintRule(dirty_after=30.0))
    async with simulated_cluster(devices=1, policy=policy) as cluster:
        await started(cluster)
        await cluster.run(60.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.node.view().devices[0].taints == ()
