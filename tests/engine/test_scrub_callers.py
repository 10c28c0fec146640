"""Callers that join a scrub, run out of time, or are cancelled before the answer: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.evidence import Outcome, PathKind
from scrubber.domain.policy import Limits
from scrubber.domain.states import Hygiene
from tests.world.asking import admitted, answered, ask, started
from tests.world.kubelet import Tenant
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

# -- joining -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_callers_join_the_scrub_that_is_under_way() -> None:
    async with a_world(settled=False) as world:
        await world.start_service()
        await world.until(lambda: bool(world.erasers.running))
        tenant = await admitted(world)
        assert world.service is not None
        news = await world.service.scrub(world.gpu().id)
        (granted,) = await ask(world, tenant)
        assert news[-1].finished is not None
        assert news[-1].joined
        assert world.erasers.started == 2  # one for each of the two devices
        assert granted.grant == 1


@in_virtual_time
async def test_call_that_times_out_names_the_running_scrub_and_the_next_call_joins_it() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.gpu().slow = 5.0
        world.kubelet.delete(first)
        tenant = await admitted(world)
        refusal = await answered(ask(world, tenant, wait=2.0))
        assert isinstance(refusal, NotReady)
        job = world.controller().state.job
        assert job is not None
        assert job.id in refusal.public_message
        started_before = world.erasers.started
        await ask(world, tenant)
        assert world.erasers.started == started_before


@in_virtual_time
async def test_a_call_never_waits_longer_than_the_policy_allows() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.kubelet.force_delete(first, lives_on=300.0)
        tenant = await admitted(world)
        began = world.clock.monotonic()
        await answered(ask(world, tenant, wait=1_000.0))
        assert world.clock.monotonic() - began == pytest.approx(world.policy.limits.hand_over, abs=1.0)


@in_virtual_time
async def test_scrub_that_a_caller_waits_for_is_the_first_to_get_an_eraser_slot() -> None:
    one_slot = replace(DEFAULT, limits=replace(Limits(), eraser_slots=1))
    async with a_world(devices=3, policy=one_slot, settled=False) as world:
        service = await world.start_service()
        last = await world.admit("acme", "train-0", [2])
        assert last is not None
        await world.until(lambda: last.running)
        assert Hygiene.SCRUBBING in {world.record(0).hygiene, world.record(1).hygiene}
        assert service.life.alive


# -- cancelled, and repeated -------------------------------------------------------------------------------------------


async def granted_unheard(world: World, tenant: Tenant) -> None:
    """Cancel the caller at the moment the grant becomes durable."""
    call = ask(world, tenant)
    world.vault.granting = call.cancel
    await asyncio.wait({call})
    world.vault.granting = None
    assert call.cancelled()
    await world.run(0.1)


@in_virtual_time
async def test_caller_that_did_not_receive_its_grant_gets_the_same_answer_again() -> None:
    async with a_world() as world:
        tenant = await admitted(world)
        await granted_unheard(world, tenant)
        assert world.record().grant_sequence == 1
        (granted,) = await ask(world, tenant)
        assert granted.grant == 1
        assert world.record().grant_sequence == 1


@in_virtual_time
async def test_undelivered_grant_is_never_returned_to_another_pod() -> None:
    async with a_world() as world:
        tenant = await admitted(world)
        await granted_unheard(world, tenant)
        world.kubelet.delete(tenant)
        other = world.kubelet.admit("acme", "train-0", [world.gpu().id], starts=False)  # its Allocate was not reported
        (granted,) = await ask(world, other)
        assert granted.grant == 2
        grant = world.record().last_grant
        assert grant is not None
        assert grant.pod == other.pod


@in_virtual_time
async def test_undelivered_grant_is_not_returned_after_the_device_was_quarantined() -> None:
    async with a_world() as world:
        tenant = await admitted(world)
        await granted_unheard(world, tenant)
        await world.node.actions.quarantine("0", "it smells", "uid:0")
        assert isinstance(await answered(ask(world, tenant, wait=1.0)), Quarantined)


@in_virtual_time
async def test_cancelled_call_stops_waiting_and_its_scrub_goes_on() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.kubelet.delete(first)
        tenant = await admitted(world)
        call = ask(world, tenant)
        await world.until(lambda: bool(world.erasers.running))
        call.cancel()
        await asyncio.wait({call})
        await world.until(world.settled)
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_call_cancelled_while_its_scrub_is_stored_leaves_the_scrub_running() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.kubelet.delete(first)
        tenant = await admitted(world)
        call = ask(world, tenant)
        world.vault.scrubbing = call.cancel
        await asyncio.wait({call})
        world.vault.scrubbing = None
        assert call.cancelled()
        await world.until(world.settled)
        assert all(
            scrub.outcome is Outcome.PASSED for scrub in world.vault.scrubs.values() if scrub.path is PathKind.SLOW
        )
