"""Notices for pod owners: a start that is refused repeatedly, and a device that was quarantined in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.policy import Enforcement, HealthRule, Limits, QuarantineTiming, StuckPodsRule
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.notices import RefusedStarts
from scrubber.engine.views import HandOverCall, PodNotice
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.sharing import shared_device_cluster
from tests.simulation.start_requests import request_start, started
from tests.simulation.timeline import in_virtual_time

NOTIFYING = replace(DEFAULT, stuck_pods=StuckPodsRule(notify_after=60.0))
PATIENT = replace(NOTIFYING, limits=replace(Limits(), leftover_grace_period=5_000.0))
EVICT = replace(DEFAULT, stuck_pods=StuckPodsRule(notify_after=60.0, evict_after=300.0))


def stuck(cluster: SimulatedCluster) -> list[PodNotice]:
    return [notice for notice in cluster.node.view().notices if notice.reason == "GpuHandOverRefused"]


def out(cluster: SimulatedCluster) -> list[PodNotice]:
    return [notice for notice in cluster.node.view().notices if notice.reason == "GpuOutOfService"]


async def waiting(cluster: SimulatedCluster, *devices: int, lives_on: float = 10_000.0) -> tuple[Tenant, Tenant]:
    """Return a deleted pod whose process lives on, and one that waits for its devices."""
    first = await started(cluster, "acme-secret", "steal-0", *devices)
    cluster.kubelet.force_delete(first, lives_on)
    second = await cluster.admit("umbrella", "serve-0", devices or (0,))
    assert second is not None
    await cluster.until(lambda: bool(second.refusals))
    return first, second


# -- refused starts ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_refused_for_long_gets_a_notice_with_its_device_and_the_reason() -> None:
    async with simulated_cluster(1, PATIENT) as cluster:
        _, second = await waiting(cluster)
        assert stuck(cluster) == []
        began = cluster.clock.wall()
        await cluster.until(lambda: bool(stuck(cluster)), within=200.0)
        assert cluster.clock.wall() - began >= 59.0
        (notice,) = stuck(cluster)
        assert (notice.pod, notice.devices) == (second.pod, (cluster.gpu().id,))
        assert cluster.gpu().id in notice.message
        assert notice.message == second.refusals[-1].public_message
        assert notice.since <= began
        assert not notice.evict


@in_virtual_time
async def test_notice_for_a_refused_pod_names_no_other_tenant() -> None:
    async with simulated_cluster(1, PATIENT) as cluster:
        first, _ = await waiting(cluster)
        await cluster.until(lambda: bool(stuck(cluster)), within=200.0)
        (notice,) = stuck(cluster)
        for word in (first.pod.namespace, first.pod.name, first.uid, "PID", "python"):
            assert word not in notice.message


@in_virtual_time
async def test_notice_for_a_pod_refused_for_a_quarantine_names_state_cause_and_way_back() -> None:
    async with simulated_cluster(1, NOTIFYING) as cluster:
        tenant = await cluster.admit("umbrella", "serve-0", starts=False)
        assert tenant is not None
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        cluster.kubelet.retry_pre_start(tenant)
        await cluster.until(lambda: bool(stuck(cluster)))
        (notice,) = stuck(cluster)
        assert "quarantined (xid-79)" in notice.message
        assert "reboot" in notice.message


@in_virtual_time
async def test_notice_carries_the_message_of_the_last_refusal() -> None:
    async with simulated_cluster(1, PATIENT) as cluster:
        _, second = await waiting(cluster)
        await cluster.until(lambda: bool(stuck(cluster)), within=200.0)
        (before,) = stuck(cluster)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: isinstance(second.refusals[-1], Quarantined))
        (after,) = stuck(cluster)
        assert "xid-79" in after.message
        assert after.since == before.since


@in_virtual_time
async def test_pod_that_waits_within_the_allowed_time_gets_no_notice() -> None:
    async with simulated_cluster(1, NOTIFYING) as cluster:
        _, second = await waiting(cluster, lives_on=40.0)
        await cluster.until(lambda: second.running)
        await cluster.run(120.0)
        assert cluster.node.view().notices == ()


@in_virtual_time
async def test_notice_is_withdrawn_once_the_pod_is_granted_its_device() -> None:
    async with simulated_cluster(1, PATIENT) as cluster:
        _, second = await waiting(cluster, lives_on=150.0)
        await cluster.until(lambda: bool(stuck(cluster)))
        await cluster.until(lambda: second.running)
        await cluster.until(lambda: stuck(cluster) == [], within=2.0)


@in_virtual_time
async def test_notice_is_withdrawn_once_the_pod_is_gone() -> None:
    async with simulated_cluster(1, PATIENT) as cluster:
        _, second = await waiting(cluster)
        await cluster.until(lambda: bool(stuck(cluster)), within=200.0)
        cluster.kubelet.delete(second)
        await cluster.until(lambda: stuck(cluster) == [], within=3.0)


@in_virtual_time
async def test_pod_with_several_devices_gets_one_notice_that_names_all_of_them() -> None:
    async with simulated_cluster(2, PATIENT) as cluster:
        _, second = await waiting(cluster, 0, 1)
        await cluster.until(lambda: bool(stuck(cluster)), within=200.0)
        (notice,) = stuck(cluster)
        assert (notice.pod, notice.devices) == (second.pod, (cluster.gpu(0).id, cluster.gpu(1).id))


@in_virtual_time
async def test_no_notice_is_published_while_two_pods_may_be_the_refused_one() -> None:
    """The wrong pod must not be evicted, nor be informed about another pod's device."""
    async with simulated_cluster(1, EVICT) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        tenants = [cluster.kubelet.admit("umbrella", f"serve-{number}", [cluster.gpu().id]) for number in range(2)]
        await cluster.run(600.0)
        assert all(tenant.refusals for tenant in tenants)
        assert cluster.node.view().notices == ()


@in_virtual_time
async def test_no_notice_is_published_for_a_request_for_devices_of_two_pods() -> None:
    async with simulated_cluster(2, EVICT) as cluster:
        for number in (0, 1):
            await cluster.node.actions.quarantine(str(number), "it burns", "uid:0")
            cluster.kubelet.admit("umbrella", f"serve-{number}", [cluster.gpu(number).id], starts=False)
        assert cluster.service is not None
        for _ in range(10):
            with pytest.raises(Quarantined):
                await cluster.service.hand_over(HandOverCall((cluster.gpu(0).id, cluster.gpu(1).id), 1.0))
            await cluster.run(30.0)
        assert cluster.node.view().notices == ()


@in_virtual_time
async def test_no_notice_is_published_while_the_kubelets_list_cannot_be_read() -> None:
    async with simulated_cluster(1, EVICT) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        cluster.kubelet.trust = Trust.UNREADABLE
        tenant = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.run(600.0)
        assert tenant.refusals
        assert cluster.node.view().notices == ()


@in_virtual_time
async def test_notice_requests_an_eviction_only_after_the_time_that_the_policy_sets() -> None:
    async with simulated_cluster(1, EVICT) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        began = cluster.clock.monotonic()
        cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.until(lambda: bool(stuck(cluster)))
        assert not stuck(cluster)[0].evict
        await cluster.until(lambda: stuck(cluster)[0].evict, within=400.0)
        assert 299.0 <= cluster.clock.monotonic() - began < 320.0


@in_virtual_time
async def test_kubelet_restart_does_not_withdraw_the_notice_of_a_waiting_pod() -> None:
    async with simulated_cluster(1, NOTIFYING) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.until(lambda: bool(stuck(cluster)))
        (before,) = stuck(cluster)
        cluster.restart_kubelet()
        await cluster.run(30.0)
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(5.0)
        (after,) = stuck(cluster)
        assert (after.pod, after.since) == (tenant.pod, before.since)


@in_virtual_time
async def test_service_restart_withdraws_notices_until_the_pod_is_refused_for_long_again() -> None:
    async with simulated_cluster(1, EVICT) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.until(lambda: bool(stuck(cluster)) and stuck(cluster)[0].evict, within=400.0)
        cluster.kill()
        await cluster.start_service()
        await cluster.run(30.0)
        assert stuck(cluster) == []
        await cluster.until(lambda: bool(stuck(cluster)))
        assert not stuck(cluster)[0].evict


# -- a grant that was not recognized -----------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_granted_its_device_while_the_kubelet_was_unreadable_gets_no_notice() -> None:
    """Otherwise a running pod would get a notice, and be evicted where the policy evicts."""
    async with simulated_cluster(1, EVICT) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.until(lambda: bool(stuck(cluster)) and stuck(cluster)[0].evict, within=400.0)
        await cluster.node.actions.unquarantine("0", "it was the neighbour", "uid:0")
        cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.until(lambda: tenant.running)
        await cluster.run(5.0)
        assert stuck(cluster) == []
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(60.0)
        assert tenant.running
        assert stuck(cluster) == []


@in_virtual_time
async def test_pod_whose_grant_could_not_be_delivered_gets_no_notice() -> None:
    async with simulated_cluster(1, EVICT) as cluster:
        await cluster.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.until(lambda: bool(stuck(cluster)), within=100.0)
        assert tenant.worker is not None
        tenant.worker.cancel()
        await cluster.node.actions.unquarantine("0", "it was the neighbour", "uid:0")
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        call = request_start(cluster, tenant)
        # Its caller is cancelled at the moment the grant is in the ledger.
        cluster.ledger_store.granting = call.cancel
        await asyncio.wait({call})
        cluster.ledger_store.granting = None
        assert call.cancelled()
        assert cluster.record().hygiene is Hygiene.IN_USE
        await request_start(cluster, tenant)
        await cluster.run(5.0)
        assert stuck(cluster) == []


@in_virtual_time
async def test_grants_to_other_pods_of_a_shared_device_do_not_restart_the_waiting_time_of_a_pod() -> None:
    """A tenant whose pods come and go can keep a shared device forever; the pod that waits for it must get a notice."""
    async with shared_device_cluster(1, NOTIFYING) as cluster:
        await cluster.start("acme", "train-0", cluster.share(0), writes=False)
        waiting = await cluster.admit_shares("umbrella", "serve-0", cluster.share(1), starts=False)
        cluster.kubelet.retry_pre_start(waiting)
        for number in range(10):
            other = await cluster.start("acme", f"more-{number}", cluster.share(2), writes=False)
            await cluster.run(20.0)
            cluster.kubelet.delete(other)
            await cluster.run(5.0)
        assert waiting.refusals
        assert [notice.pod for notice in stuck(cluster)] == [waiting.pod]


# -- devices that are quarantined in use -------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_whose_device_is_quarantined_in_use_gets_a_notice() -> None:
    async with simulated_cluster(2, NOTIFYING) as cluster:
        tenant = await started(cluster)
        await started(cluster, "umbrella", "serve-0", 1)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: bool(out(cluster)), within=5.0)
        (notice,) = out(cluster)
        cause = cluster.record().cause
        assert cause is not None
        assert (notice.pod, notice.devices, notice.since) == (tenant.pod, (cluster.gpu().id,), cause.since)
        assert "quarantined (xid-79)" in notice.message
        assert not notice.evict
        assert stuck(cluster) == []


@in_virtual_time
async def test_notice_of_a_quarantine_in_use_is_withdrawn_once_the_pod_is_gone() -> None:
    async with simulated_cluster(1, NOTIFYING) as cluster:
        tenant = await started(cluster)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: bool(out(cluster)), within=5.0)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: out(cluster) == [], within=10.0)
        assert not cluster.record().advertised
        assert cluster.record().open_grants != (), "what it left was not cleared yet, and that is no more its business"


@in_virtual_time
async def test_one_notice_names_all_quarantined_devices_of_a_pod() -> None:
    async with simulated_cluster(2, NOTIFYING) as cluster:
        tenant = await started(cluster, "acme", "train-0", 0, 1)
        for number in (0, 1):
            cluster.gpu(number).xids[79] = 1
            cluster.signal(number)
        await cluster.until(lambda: bool(out(cluster)) and len(out(cluster)[0].devices) == 2, within=5.0)
        (notice,) = out(cluster)
        assert notice.pod == tenant.pod
        assert all(cluster.gpu(number).id in notice.message for number in (0, 1))


@in_virtual_time
async def test_pod_gets_its_quarantine_notice_although_the_policy_withdraws_the_device_at_release() -> None:
    async with simulated_cluster(
        1, replace(NOTIFYING, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE))
    ) as cluster:
        await started(cluster)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: bool(out(cluster)), within=5.0)
        assert cluster.node.view().devices[0].advertised


@in_virtual_time
async def test_quarantine_of_an_unassigned_device_creates_no_notice() -> None:
    async with simulated_cluster(1, NOTIFYING) as cluster:
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.run(30.0)
        assert cluster.node.view().notices == ()


@in_virtual_time
async def test_notice_under_an_observing_policy_does_not_claim_that_restarts_are_refused() -> None:
    async with simulated_cluster(1, replace(NOTIFYING, enforcement=Enforcement.OBSERVE)) as cluster:
        tenant = await started(cluster)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        assert not any("is refused" in notice.message for notice in out(cluster))
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)


# -- its state ---------------------------------------------------------------------------------------------------------


class _Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000.0 + self.now

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        raise NotImplementedError

    def stall_tolerant_timeout(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        raise NotImplementedError


REFUSAL = NotReady("The name of another pod.", public_message="Device GPU-0 is dirty. The start is tried again.")


def refused(refusals: RefusedStarts, clock: _Clock, pod: Pod, *at: float) -> None:
    for moment in at:
        clock.now = moment
        refusals.record_refusal([pod], ["GPU-0"], REFUSAL)


def test_number_of_remembered_refused_pods_is_bounded_and_the_first_are_kept() -> None:
    clock = _Clock()
    refusals = RefusedStarts(clock)
    pods = [Pod("acme", f"train-{number}", f"uid-{number}") for number in range(5_000)]
    for moment in (0.0, 100.0):
        clock.now = moment
        for pod in pods:
            refusals.record_refusal([pod], ["GPU-0"], REFUSAL)
    notices = refusals.notices(StuckPodsRule(notify_after=60.0))
    assert len(notices) == 1024
    assert {notice.pod for notice in notices} == set(pods[:1024])


def test_pod_that_stops_requesting_is_forgotten_after_the_kubelets_longest_backoff() -> None:
    clock = _Clock()
    refusals, pod = RefusedStarts(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0, 300.0)
    clock.now = 1_190.0
    assert len(refusals.notices(StuckPodsRule())) == 1
    clock.now = 1_210.0
    assert refusals.notices(StuckPodsRule()) == ()
    refusals.prune(KubeletReading(Trust.TRUSTED, (Assignment(pod, "main", frozenset({"GPU-0"})),)))
    refused(refusals, clock, pod, 1_300.0, 1_350.0)
    assert refusals.notices(StuckPodsRule()) == (), "what it waited before counts no more"


def test_waiting_time_of_a_refused_pod_ends_at_its_last_refusal() -> None:
    """A pod without a later refusal may be starting at this moment."""
    clock = _Clock()
    refusals, pod = RefusedStarts(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0)
    clock.now = 500.0
    assert refusals.notices(StuckPodsRule()) == ()
    refused(refusals, clock, pod, 501.0)
    assert len(refusals.notices(StuckPodsRule())) == 1


@pytest.mark.parametrize(
    ("trust", "forgotten"),
    [(Trust.TRUSTED, True), (Trust.EMPTY_AFTER_RESTART, False), (Trust.UNREADABLE, False)],
)
def test_only_a_trusted_kubelet_list_shows_that_a_refused_pod_is_gone(trust: Trust, forgotten: bool) -> None:
    clock = _Clock()
    refusals = RefusedStarts(clock)
    refused(refusals, clock, Pod("acme", "train-0", "uid-0"), 0.0, 100.0)
    refusals.prune(KubeletReading(trust))
    assert (refusals.notices(StuckPodsRule()) == ()) is forgotten


def test_refused_pod_that_only_the_checkpoint_names_is_not_forgotten() -> None:
    clock = _Clock()
    refusals, pod = RefusedStarts(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0, 100.0)
    refusals.prune(KubeletReading(Trust.TRUSTED, checkpoint_only=(Assignment(pod, "init", frozenset({"GPU-0"})),)))
    assert len(refusals.notices(StuckPodsRule())) == 1


def test_notices_list_the_longest_waiting_pod_first() -> None:
    clock = _Clock()
    refusals = RefusedStarts(clock)
    young, old = Pod("acme", "young", "uid-1"), Pod("acme", "old", "uid-2")
    refused(refusals, clock, old, 0.0)
    refused(refusals, clock, young, 50.0, 200.0)
    refused(refusals, clock, old, 210.0)
    assert [notice.pod for notice in refusals.notices(StuckPodsRule())] == [old, young]
