"""Quarantines are counted for the tenant that had the device, over all devices of the node and a day."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.health.history import DAY
from scrubber.domain.policy import HealthRule
from scrubber.domain.states import Health, Hygiene
from scrubber.ports.record import Event
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.service import Pace
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

TWICE = replace(DEFAULT, health=HealthRule(tenant_quarantine_threshold=2))


def logged(cluster: SimulatedCluster, name: str = "tenant.flagged") -> list[Event]:
    return [event for event in cluster.ledger_store.events if event.name == name]


def blamed(cluster: SimulatedCluster) -> list[tuple[object, object]]:
    return [(event.fields["tenant"], event.fields["quarantines"]) for event in logged(cluster)]


async def struck(cluster: SimulatedCluster, number: int = 0) -> None:
    cluster.gpu(number).xids[95] = 1
    cluster.signal(number)
    await cluster.until(lambda: not cluster.record(number).advertised, within=5.0)


async def healed(cluster: SimulatedCluster, number: int = 0) -> None:
    await cluster.until(lambda: cluster.record(number).health is Health.HEALTHY, within=300.0)


async def provokes(cluster: SimulatedCluster, namespace: str, number: int = 0) -> Tenant:
    """Quarantine a device while a pod has it, and wait until it recovers once the pod is gone."""
    tenant = await started(cluster, namespace, "train-0", number)
    await struck(cluster, number)
    cluster.kubelet.delete(tenant)
    await healed(cluster, number)
    return tenant


@in_virtual_time
async def test_quarantine_event_names_the_tenant_that_had_the_device() -> None:
    async with simulated_cluster(2) as cluster:
        await started(cluster, "acme", "train-0", 0)
        await started(cluster, "umbrella", "serve-0", 1)
        await struck(cluster, 0)
        await struck(cluster, 1)
        by_device = {event.device: event.fields["tenant"] for event in logged(cluster, "health.quarantined")}
        assert by_device == {cluster.gpu(0).id: "acme", cluster.gpu(1).id: "umbrella"}


@in_virtual_time
async def test_quarantine_event_of_an_unassigned_device_names_no_tenant() -> None:
    async with simulated_cluster(1) as cluster:
        await struck(cluster)
        (event,) = logged(cluster, "health.quarantined")
        assert event.fields["tenant"] is None
        assert [strike.tenant for strike in cluster.record().recent_quarantines] == [None]


@in_virtual_time
async def test_quarantines_of_a_tenant_on_all_devices_are_counted_together_and_logged_at_the_policys_threshold() -> (
    None
):
    async with simulated_cluster(3) as cluster:
        await provokes(cluster, "acme", 0)
        await provokes(cluster, "acme", 1)
        assert logged(cluster) == []
        await provokes(cluster, "acme", 2)
        (event,) = logged(cluster)
        assert event.device == cluster.gpu(2).id
        assert blamed(cluster) == [("acme", 3)]
        assert "3 times within a day while they were assigned to acme" in str(event.fields["message"])


@in_virtual_time
async def test_tenant_quarantines_are_logged_again_at_each_multiple_of_the_threshold() -> None:
    async with simulated_cluster(2, TWICE) as cluster:
        for turn in range(6):
            await provokes(cluster, "acme", turn % 2)
        assert blamed(cluster) == [("acme", 2), ("acme", 4), ("acme", 6)]


@in_virtual_time
async def test_quarantines_are_counted_separately_for_each_tenant() -> None:
    async with simulated_cluster(2, TWICE) as cluster:
        await provokes(cluster, "acme", 0)
        await provokes(cluster, "umbrella", 0)
        await provokes(cluster, "hooli", 1)
        assert logged(cluster) == []
        await provokes(cluster, "umbrella", 1)
        assert blamed(cluster) == [("umbrella", 2)]


@in_virtual_time
async def test_persistent_fault_counts_as_one_quarantine_however_often_it_is_signalled() -> None:
    async with simulated_cluster(1, TWICE) as cluster:
        await started(cluster, "acme")
        for _ in range(20):
            cluster.gpu().xids[95] = cluster.gpu().xids.get(95, 0) + 1
            cluster.signal(0)
            await cluster.run(30.0)
        assert len(cluster.record().recent_quarantines) == 1
        assert logged(cluster) == []


@in_virtual_time
async def test_fault_that_worsens_or_whose_recovery_fails_counts_as_one_quarantine() -> None:
    async with simulated_cluster(1, TWICE) as cluster:
        tenant = await started(cluster, "acme")
        await struck(cluster)
        cluster.gpu().reset_fails = "the reset did not take"
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().failures >= 2)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.run(30.0)
        assert len(cluster.record().recent_quarantines) == 1
        assert logged(cluster) == []


@in_virtual_time
async def test_quarantine_of_a_device_with_unauthorized_use_is_attributed_to_no_tenant() -> None:
    async with simulated_cluster(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as cluster:
        await started(cluster, "acme")
        host = cluster.process_table.start(None, "host", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        await cluster.until(lambda: cluster.record().contaminated, within=5.0)
        await struck(cluster)
        assert logged(cluster) == []
        (event,) = logged(cluster, "health.quarantined")
        assert event.fields["tenant"] is None


@in_virtual_time
async def test_quarantine_of_a_device_with_open_grants_of_two_tenants_is_attributed_to_neither_tenant() -> None:
    async with simulated_cluster(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as cluster:
        await started(cluster, "acme")
        await cluster.node.actions.break_glass("0", 600.0, "the trial must not stop", "uid:0")
        first = cluster.kubelet.tenants[0]
        cluster.kubelet.force_delete(first, lives_on=300.0)
        second = await cluster.admit("umbrella", "serve-0")
        assert second is not None
        await cluster.until(lambda: second.running)
        assert len(cluster.record().open_grants) == 2
        await struck(cluster)
        assert logged(cluster) == []


@in_virtual_time
async def test_quarantine_by_the_scrub_after_a_pod_is_attributed_to_the_tenant_of_that_pod() -> None:
    """No other tenant has had it since."""
    async with simulated_cluster(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as cluster:
        tenant = await started(cluster, "acme")
        cluster.gpu().wont_clear = True
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: not cluster.record().advertised)
        assert blamed(cluster) == [("acme", 1)]
        assert cluster.record().hygiene is not Hygiene.IN_USE


@in_virtual_time
async def test_quarantine_of_a_clean_device_is_not_attributed_to_its_last_tenant() -> None:
    async with simulated_cluster(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as cluster:
        tenant = await started(cluster, "acme")
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        await struck(cluster)
        assert logged(cluster) == []


@in_virtual_time
async def test_operator_quarantine_is_attributed_to_no_tenant() -> None:
    async with simulated_cluster(1, replace(TWICE, health=HealthRule(tenant_quarantine_threshold=1))) as cluster:
        await started(cluster, "acme")
        await cluster.node.actions.quarantine("0", "it smells", "uid:0")
        assert logged(cluster) == []
        assert cluster.record().recent_quarantines == ()


@in_virtual_time
async def test_tenant_quarantines_are_counted_across_restarts_and_for_one_day() -> None:
    async with simulated_cluster(2, TWICE, pace=Pace(watch=8.0, health=300.0)) as cluster:
        await provokes(cluster, "acme", 0)
        cluster.kill()
        await cluster.start_service()
        await cluster.until(cluster.settled)
        await provokes(cluster, "acme", 1)
        assert blamed(cluster) == [("acme", 2)]
        await cluster.run(DAY)
        await provokes(cluster, "acme", 0)
        assert blamed(cluster) == [("acme", 2)]
