"""Callers that join a scrub, run out of time, or are cancelled before the answer: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger
from scrubber.domain.policy import Limits
from scrubber.domain.states import Hygiene
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

# -- joining -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_callers_join_the_scrub_that_is_under_way() -> None:
    async with simulated_cluster(settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: bool(cluster.erasers.running))
        tenant = await admitted(cluster)
        assert cluster.service is not None
        updates = await cluster.service.scrub(cluster.gpu().id)
        (granted,) = await request_start(cluster, tenant)
        assert updates[-1].finished is not None
        assert updates[-1].joined
        assert cluster.erasers.started == 2  # one for each of the two devices
        assert granted.grant == 1


@in_virtual_time
async def test_call_that_times_out_names_the_running_scrub_and_the_next_call_joins_it() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.gpu().slow = 5.0
        cluster.kubelet.delete(first)
        tenant = await admitted(cluster)
        refusal = await refusal_of(request_start(cluster, tenant, wait=2.0))
        assert isinstance(refusal, NotReady)
        job = cluster.controller().state.job
        assert job is not None
        assert job.id in refusal.public_message
        started_before = cluster.erasers.started
        await request_start(cluster, tenant)
        assert cluster.erasers.started == started_before


@in_virtual_time
async def test_a_call_never_waits_longer_than_the_policy_allows() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.kubelet.force_delete(first, lives_on=300.0)
        tenant = await admitted(cluster)
        began = cluster.clock.monotonic()
        await refusal_of(request_start(cluster, tenant, wait=1_000.0))
        assert cluster.clock.monotonic() - began == pytest.approx(cluster.policy.limits.hand_over, abs=1.0)


@in_virtual_time
async def test_scrub_that_a_caller_waits_for_is_the_first_to_get_an_eraser_slot() -> None:
    one_slot = replace(DEFAULT, limits=replace(Limits(), eraser_slots=1))
    async with simulated_cluster(devices=3, policy=one_slot, settled=False) as cluster:
        service = await cluster.start_service()
        last = await cluster.admit("acme", "train-0", [2])
        assert last is not None
        await cluster.until(lambda: last.running)
        assert Hygiene.SCRUBBING in {cluster.record(0).hygiene, cluster.record(1).hygiene}
        assert service.life.alive


@in_virtual_time
async def test_device_that_was_granted_after_the_callers_checks_is_not_scrubbed() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await started(cluster)
        erased = cluster.erasers.started
        with pytest.raises(NotReady):
            await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (cluster.record().hygiene, cluster.erasers.started) == (Hygiene.IN_USE, erased)


# -- cancelled, and repeated -------------------------------------------------------------------------------------------


async def cancelled_at_the_grant(cluster: SimulatedCluster, tenant: Tenant) -> None:
    """Cancel the caller at the moment the grant becomes durable."""
    call = request_start(cluster, tenant)
    cluster.ledger_store.granting = call.cancel
    await asyncio.wait({call})
    cluster.ledger_store.granting = None
    assert call.cancelled()
    await cluster.run(0.1)


@in_virtual_time
async def test_caller_that_did_not_receive_its_grant_gets_the_same_answer_again() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster)
        await cancelled_at_the_grant(cluster, tenant)
        assert cluster.record().grant_sequence == 1
        (granted,) = await request_start(cluster, tenant)
        assert granted.grant == 1
        assert cluster.record().grant_sequence == 1


@in_virtual_time
async def test_undelivered_grant_is_never_returned_to_another_pod() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster)
        await cancelled_at_the_grant(cluster, tenant)
        cluster.kubelet.delete(tenant)
        other = cluster.kubelet.admit(
            "acme", "train-0", [cluster.gpu().id], starts=False
        )  # its Allocate was not reported
        (granted,) = await request_start(cluster, other)
        assert granted.grant == 2
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.pod == other.pod


@in_virtual_time
async def test_undelivered_grant_is_not_returned_after_the_device_was_quarantined() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster)
        await cancelled_at_the_grant(cluster, tenant)
        await cluster.node.actions.quarantine("0", "it smells", "uid:0")
        assert isinstance(await refusal_of(request_start(cluster, tenant, wait=1.0)), Quarantined)


@in_virtual_time
async def test_cancelled_call_stops_waiting_and_its_scrub_goes_on() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.kubelet.delete(first)
        tenant = await admitted(cluster)
        call = request_start(cluster, tenant)
        await cluster.until(lambda: bool(cluster.erasers.running))
        call.cancel()
        await asyncio.wait({call})
        await cluster.until(cluster.settled)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_call_cancelled_while_its_scrub_is_stored_leaves_the_scrub_running() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.kubelet.delete(first)
        tenant = await admitted(cluster)
        call = request_start(cluster, tenant)
        cluster.ledger_store.scrubbing = call.cancel
        await asyncio.wait({call})
        cluster.ledger_store.scrubbing = None
        assert call.cancelled()
        await cluster.until(cluster.settled)
        assert all(
            scrub.outcome is Outcome.PASSED
            for scrub in cluster.ledger_store.scrubs.values()
            if scrub.path is PathKind.SLOW
        )
