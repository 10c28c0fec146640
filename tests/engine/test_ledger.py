"""A ledger that cannot be written: hand-overs are refused with that reason, memory is not updated, and it recovers."""

from __future__ import annotations

import asyncio

import pytest

from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import Outcome, PathKind
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.world.asking import started
from tests.world.kubelet import Gone
from tests.world.timeline import in_virtual_time
from tests.world.vault import CrashPoint
from tests.world.world import World, a_world

FULL = "the disk is full"


async def ask(world: World) -> tuple[GrantedDevice, ...]:
    """Request the first device for a pod."""
    if not world.kubelet.tenants:
        await world.admit("acme", "train-0", starts=False)
    assert world.service is not None
    return await world.service.hand_over(HandOverCall((world.gpu().id,)))


@in_virtual_time
async def test_hand_over_is_refused_with_the_reason_that_the_ledger_cannot_be_written() -> None:
    async with a_world() as world:
        world.vault.refuses = FULL
        with pytest.raises(LedgerFailure, match=FULL) as refusal:
            await ask(world)
        assert "cannot keep its record" in refusal.value.public_message
        assert world.node.view().ledger_status == FULL


@in_virtual_time
async def test_changes_that_were_not_stored_do_not_become_current() -> None:
    async with a_world() as world:
        world.vault.refuses = FULL
        before = {device: controller.state.record for device, controller in world.node.devices.controllers.items()}
        with pytest.raises(LedgerFailure):
            await ask(world)
        with pytest.raises(LedgerFailure):
            await world.node.actions.quarantine("0", "it smells", "uid:0")
        world.gpu(1).xids[95] = 1
        world.signal(1)
        await world.run(3.0)
        assert {
            device: controller.state.record for device, controller in world.node.devices.controllers.items()
        } == before


@in_virtual_time
async def test_everything_resumes_as_soon_as_the_ledger_can_be_written_again() -> None:
    async with a_world() as world:
        world.vault.refuses = FULL
        world.gpu(1).xids[95] = 1
        with pytest.raises(LedgerFailure):
            await ask(world)
        await world.run(30.0)
        assert world.serving
        world.vault.refuses = None
        (granted,) = await ask(world)
        assert granted.grant == 1
        await world.until(lambda: world.record(1).health is Health.QUARANTINED)
        assert world.node.view().ledger_status == "ok"


@in_virtual_time
async def test_scrub_that_cannot_be_stored_does_not_start() -> None:
    async with a_world() as world:
        erasers = world.erasers.started
        world.vault.refuses = FULL
        assert world.service is not None
        with pytest.raises(LedgerFailure):
            await world.service.scrub(world.gpu().id)
        assert world.erasers.started == erasers
        assert world.controller().state.record.hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_scrub_whose_end_cannot_be_stored_proves_nothing_and_is_corrected_later() -> None:
    async with a_world(devices=1) as world:
        assert world.service is not None
        scrub = asyncio.create_task(world.service.scrub(world.gpu().id))
        await world.until(lambda: bool(world.erasers.running))
        world.vault.refuses = FULL
        news = await scrub
        assert news[-1].finished is not None
        assert news[-1].finished.outcome is Outcome.ABANDONED
        assert news[-1].certificate is None
        assert world.controller().state.record.hygiene is Hygiene.SCRUBBING
        await world.run(10.0)
        world.vault.refuses = None
        await world.until(world.settled)
        assert world.record().hygiene is Hygiene.CLEAN
        assert [scrub for scrub in world.vault.scrubs.values() if scrub.ended is None] == []
        assert world.journal is not None
        assert sorted(each.id for each in world.journal.scrubs) == sorted(world.vault.scrubs)  # each is counted once


@in_virtual_time
async def test_scrub_end_that_is_stored_late_names_the_tenant_whose_memory_it_cleared() -> None:
    async with a_world(devices=1) as world:
        world.kubelet.delete(await started(world))
        await world.until(lambda: bool(world.erasers.running))
        world.vault.refuses = FULL
        await world.run(10.0)
        world.vault.refuses = None
        await world.until(world.settled)
        ends = [each for each in world.vault.events if each.name == "scrub.finished"]
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
        async with a_world(devices=1, settled=False) as world:
            await world.start_service()
            world.vault.point = CrashPoint(writes, durable)
            await world.admit("acme", "train-0")
            await world.until(lambda: not world.serving)
            reached = world.record().hygiene
            assert reached is not Hygiene.CLEAN or (writes, durable) in ((2, True), (3, False))
            await world.start_service()
            assert world.record().certificate is None
            assert world.record().hygiene is not Hygiene.CLEAN
            tenant = world.kubelet.tenants[0]
            await world.until(lambda: tenant.running)
            grant = world.record().last_grant
            assert grant is not None
            assert grant.sequence == (2 if (writes, durable) == (3, True) else 1)

    die_and_come_back()


@in_virtual_time
async def test_scrub_cut_short_by_a_crash_is_recorded_as_abandoned() -> None:
    async with a_world(devices=1, settled=False) as world:
        await world.start_service()
        await world.until(lambda: bool(world.erasers.running))
        world.kill()
        (cut,) = (scrub for scrub in world.vault.scrubs.values() if scrub.path is PathKind.SLOW)
        assert cut.outcome is None
        await world.start_service()
        assert world.vault.scrubs[cut.id].outcome is Outcome.ABANDONED


@in_virtual_time
async def test_stopped_service_answers_no_call() -> None:
    async with a_world() as world:
        world.kill()
        with pytest.raises(Gone):
            await ask(world)
