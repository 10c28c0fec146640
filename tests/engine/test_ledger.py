"""A ledger that cannot be written: hand-overs are refused with that reason, memory is not updated, and it recovers."""

from __future__ import annotations

import asyncio

import pytest

from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import Outcome, PathKind
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Gone
from tests.simulation.ledger_store import CrashPoint
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

FULL = "the disk is full"


async def request_first_device(cluster: SimulatedCluster) -> tuple[GrantedDevice, ...]:
    """Request the first device for a pod."""
    if not cluster.kubelet.tenants:
        await cluster.admit("acme", "train-0", starts=False)
    assert cluster.service is not None
    return await cluster.service.hand_over(HandOverCall((cluster.gpu().id,)))


@in_virtual_time
async def test_hand_over_is_refused_with_the_reason_that_the_ledger_cannot_be_written() -> None:
    async with simulated_cluster() as cluster:
        cluster.ledger_store.refuses = FULL
        with pytest.raises(LedgerFailure, match=FULL) as refusal:
            await request_first_device(cluster)
        assert "cannot write its ledger" in refusal.value.public_message
        assert cluster.node.view().ledger_status == FULL


@in_virtual_time
async def test_changes_that_were_not_stored_do_not_become_current() -> None:
    async with simulated_cluster() as cluster:
        cluster.ledger_store.refuses = FULL
        before = {device: controller.state.record for device, controller in cluster.node.devices.controllers.items()}
        with pytest.raises(LedgerFailure):
            await request_first_device(cluster)
        with pytest.raises(LedgerFailure):
            await cluster.node.actions.quarantine("0", "it smells", "uid:0")
        cluster.gpu(1).xids[95] = 1
        cluster.signal(1)
        await cluster.run(3.0)
        assert {
            device: controller.state.record for device, controller in cluster.node.devices.controllers.items()
        } == before


@in_virtual_time
async def test_everything_resumes_as_soon_as_the_ledger_can_be_written_again() -> None:
    async with simulated_cluster() as cluster:
        cluster.ledger_store.refuses = FULL
        cluster.gpu(1).xids[95] = 1
        with pytest.raises(LedgerFailure):
            await request_first_device(cluster)
        await cluster.run(30.0)
        assert cluster.serving
        cluster.ledger_store.refuses = None
        (granted,) = await request_first_device(cluster)
        assert granted.grant == 1
        await cluster.until(lambda: cluster.record(1).health is Health.QUARANTINED)
        assert cluster.node.view().ledger_status == "ok"


@in_virtual_time
async def test_scrub_that_cannot_be_stored_does_not_start() -> None:
    async with simulated_cluster() as cluster:
        erasers = cluster.erasers.started
        cluster.ledger_store.refuses = FULL
        assert cluster.service is not None
        with pytest.raises(LedgerFailure):
            await cluster.service.scrub(cluster.gpu().id)
        assert cluster.erasers.started == erasers
        assert cluster.controller().state.record.hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_scrub_whose_end_cannot_be_stored_proves_nothing_and_is_corrected_later() -> None:
    async with simulated_cluster(devices=1) as cluster:
        assert cluster.service is not None
        scrub = asyncio.create_task(cluster.service.scrub(cluster.gpu().id))
        await cluster.until(lambda: bool(cluster.erasers.running))
        cluster.ledger_store.refuses = FULL
        updates = await scrub
        assert updates[-1].finished is not None
        assert updates[-1].finished.outcome is Outcome.ABANDONED
        assert updates[-1].certificate is None
        assert cluster.controller().state.record.hygiene is Hygiene.SCRUBBING
        await cluster.run(10.0)
        cluster.ledger_store.refuses = None
        await cluster.until(cluster.settled)
        assert cluster.record().hygiene is Hygiene.CLEAN
        assert [scrub for scrub in cluster.ledger_store.scrubs.values() if scrub.ended is None] == []
        assert cluster.journal is not None
        assert sorted(each.id for each in cluster.journal.scrubs) == sorted(
            cluster.ledger_store.scrubs
        )  # each is counted once


@in_virtual_time
async def test_scrub_end_that_is_stored_late_names_the_tenant_whose_memory_it_cleared() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.kubelet.delete(await started(cluster))
        await cluster.until(lambda: bool(cluster.erasers.running))
        cluster.ledger_store.refuses = FULL
        await cluster.run(10.0)
        cluster.ledger_store.refuses = None
        await cluster.until(cluster.settled)
        ends = [each for each in cluster.ledger_store.events if each.name == "scrub.finished"]
        (late,) = [each for each in ends if each.fields["outcome"] == "abandoned"]
        assert late.fields["tenant"] == "acme"


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_service_that_dies_during_a_write_leaves_a_dirty_device_and_never_a_grant_without_a_record(
    writes: int, durable: bool
) -> None:
    """The first write starts the scrub, the second ends it, the third grants."""

    @in_virtual_time
    async def die_and_come_back() -> None:
        async with simulated_cluster(devices=1, settled=False) as cluster:
            await cluster.start_service()
            cluster.ledger_store.point = CrashPoint(writes, durable)
            await cluster.admit("acme", "train-0")
            await cluster.until(lambda: not cluster.serving)
            reached = cluster.record().hygiene
            assert reached is not Hygiene.CLEAN or (writes, durable) in ((2, True), (3, False))
            await cluster.start_service()
            assert cluster.record().certificate is None
            assert cluster.record().hygiene is not Hygiene.CLEAN
            tenant = cluster.kubelet.tenants[0]
            await cluster.until(lambda: tenant.running)
            grant = cluster.record().last_grant
            assert grant is not None
            assert grant.sequence == (2 if (writes, durable) == (3, True) else 1)

    die_and_come_back()


@in_virtual_time
async def test_scrub_cut_short_by_a_crash_is_recorded_as_abandoned() -> None:
    async with simulated_cluster(devices=1, settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: bool(cluster.erasers.running))
        cluster.kill()
        (cut,) = (scrub for scrub in cluster.ledger_store.scrubs.values() if scrub.path is PathKind.SLOW)
        assert cut.outcome is None
        await cluster.start_service()
        assert cluster.ledger_store.scrubs[cut.id].outcome is Outcome.ABANDONED


@in_virtual_time
async def test_stopped_service_answers_no_call() -> None:
    async with simulated_cluster() as cluster:
        cluster.kill()
        with pytest.raises(Gone):
            await request_first_device(cluster)
