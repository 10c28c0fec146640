"""Break-glass: for a time a person has a device handed out whatever is known of it, and answers for it by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scrubber.domain.basis import Basis
from scrubber.domain.errors import InvalidRequest, Quarantined, Refused
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Limits, Policy
from scrubber.engine.views import DeviceView
from scrubber.ports.record import Event
from tests.world.asking import admitted, answered, ask, started
from tests.world.kubelet import Tenant
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

HOUR = 3600.0
WHY, WHO = "the trial must not stop tonight", "uid:1000"


@asynccontextmanager
async def a_world_out_of_service(devices: int = 1, policy: Policy = DEFAULT) -> AsyncIterator[World]:
    """Device 0 waits for a reboot that nobody makes."""
    world = World(devices, policy)
    try:
        await world.start_service()
        await world.until(world.settled)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        yield world
        world.look()
        assert world.laws.breaches == []
    finally:
        await world.end()


def view(world: World, number: int = 0) -> DeviceView:
    return world.node.view().devices[number]


def told(world: World, name: str) -> list[Event]:
    """What the audit has."""
    return [event for event in world.vault.events if event.name == name]


async def broken(world: World, seconds: float = HOUR) -> DeviceView:
    return await world.node.actions.break_glass("0", seconds, WHY, WHO)


async def restarted(world: World) -> None:
    world.kill()
    await world.start_service()


async def refused(world: World) -> None:
    """Neither an allocation nor a start goes through."""
    assert not view(world).offered
    with pytest.raises(Quarantined):
        await world.node.reserve([world.gpu().id])
    tenant = world.kubelet.admit("hooli", "late-0", [world.gpu().id], starts=False)
    refusal = await answered(ask(world, tenant, wait=1.0))
    assert isinstance(refusal, Quarantined)
    world.kubelet.delete(tenant)


# -- while it is broken ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_quarantined_device_is_offered_and_granted_until_the_time_is_over() -> None:
    async with a_world_out_of_service() as world:
        await refused(world)
        shown = await broken(world, HOUR)
        assert shown.offered
        assert view(world).offered
        tenant = await admitted(world)
        (granted,) = await ask(world, tenant)
        assert granted.basis is Basis.BREAK_GLASS
        assert world.record().health is Health.QUARANTINED
        world.kubelet.delete(tenant)
        await world.run(HOUR - 60.0)
        assert view(world).offered
        await world.run(120.0)
        assert world.record().glass is None
        await refused(world)


@in_virtual_time
async def test_the_grant_its_certificate_and_its_event_name_the_exception() -> None:
    async with a_world_out_of_service() as world:
        await broken(world)
        (granted,) = await ask(world, await admitted(world))
        assert granted.certificate is not None
        issued = world.vault.certificates[granted.certificate]
        assert "memory: left as it was, because a person broke the glass" in issued.not_covered
        assert issued.rests_on is None
        (event,) = told(world, "handover.granted")
        assert event.fields["exception"] == "break-glass"
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.BREAK_GLASS


@in_virtual_time
async def test_it_is_said_who_did_it_why_and_until_when() -> None:
    async with a_world_out_of_service() as world:
        now = world.clock.wall()
        await broken(world, HOUR)
        (event,) = told(world, "glass.broken")
        assert (event.device, event.actor) == (world.gpu().id, WHO)
        assert event.fields == {"reason": WHY, "seconds": HOUR, "until": now + HOUR, "state": "quarantined"}
        glass = world.record().glass
        assert glass is not None
        assert (glass.until, glass.reason, glass.actor) == (now + HOUR, WHY, WHO)


@in_virtual_time
async def test_it_is_that_device_s_alone() -> None:
    async with a_world_out_of_service(2) as world:
        world.gpu(1).xids[79] = 1
        world.signal(1)
        await world.until(lambda: world.record(1).health is Health.QUARANTINED)
        await broken(world)
        assert [each.offered for each in world.node.view().devices] == [True, False]
        with pytest.raises(Quarantined):
            await world.node.reserve([world.gpu(1).id])


@in_virtual_time
async def test_a_condemned_device_can_be_had_too() -> None:
    async with a_world_out_of_service() as world:
        world.gpu().mend()
        world.gpu().wont_clear = True
        await world.node.actions.unquarantine("0", "it looked well", WHO)
        await world.until(lambda: world.record().health is Health.CONDEMNED, within=600.0)
        await broken(world)
        assert view(world).offered
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.BREAK_GLASS


@in_virtual_time
async def test_a_device_that_is_well_is_judged_as_ever() -> None:
    """A certificate is used where there is one: the exception stands in only for what is missing."""
    async with a_world(1) as world:
        await broken(world)
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_nobody_is_ended_and_no_device_reset_under_it() -> None:
    async with a_world(1) as world:
        tenant = await started(world)
        await world.run(3.0)
        assert tenant.first is not None
        child = world.matter.fork(tenant.first)
        await broken(world, HOUR)
        world.gpu().xids[95] = 1
        world.signal(0)
        world.kubelet.delete(tenant)
        await world.run(HOUR / 2)
        assert (child.alive, world.gpu().resets) == (True, 0)
        await world.run(HOUR)
        assert world.record().state == "clean"
        assert (child.alive, world.gpu().resets) == (False, 1)


# -- when it is over ---------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_nothing_rests_on_what_was_granted_meanwhile() -> None:
    """The second pod was let onto the bytes of the first; its own restart would be an exception, and is none afterwards."""
    async with a_world(1) as world:
        first = await started(world, "acme", "train-0")
        world.kubelet.force_delete(first, lives_on=300.0)
        await broken(world, 60.0)
        second = await world.admit("acme", "train-1")
        assert second is not None
        await world.until(lambda: second.running)
        grant = world.record().last_grant
        assert grant is not None
        assert (grant.basis, grant.pod) == (Basis.BREAK_GLASS, second.pod)
        assert world.record().previous is None
        await world.run(400.0)  # the first is over, and so is the time
        assert first.first is not None
        assert not first.first.alive
        world.write_all(second)
        world.kubelet.exit(second, again=True)
        await world.until(lambda: second.starts == 2)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_a_pod_that_has_the_device_keeps_it_and_the_device_is_proved_clean_after_it() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        tenant = await started(world)
        await world.run(HOUR + 60.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert not view(world).offered
        world.kubelet.delete(tenant)
        world.gpu().mend()
        await world.node.actions.unquarantine("0", "the board was changed", WHO)
        await world.until(lambda: world.record().state == "clean", within=300.0)
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_its_end_is_told_with_who_had_asked_for_it() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.run(HOUR + 60.0)
        (event,) = told(world, "glass.mended")
        assert (event.device, event.actor) == (world.gpu().id, "service")
        assert WHO in str(event.fields["sentence"])
        assert HOUR <= event.at - told(world, "glass.broken")[0].at < HOUR + 15.0


@in_virtual_time
async def test_a_person_may_end_it_before() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        shown = await world.node.actions.break_glass("0", 0, "the trial is over", "uid:7")
        assert not shown.offered
        assert world.record().glass is None
        (event,) = told(world, "glass.mended")
        assert event.actor == "uid:7"
        assert "the trial is over" in str(event.fields["sentence"])
        await refused(world)
        await world.run(HOUR + 60.0)
        assert len(told(world, "glass.mended")) == 1


@in_virtual_time
async def test_whoever_breaks_it_again_sets_the_time_anew() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.run(HOUR / 2)
        await broken(world, HOUR)
        await world.run(HOUR * 3 / 4)
        assert view(world).offered
        await world.run(HOUR / 2)
        assert not view(world).offered
        assert len(told(world, "glass.broken")) == 2
        assert len(told(world, "glass.mended")) == 1


@in_virtual_time
async def test_break_glass_override_that_is_renewed_as_it_expires_is_not_ended() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        health = world.controller().health
        world.pause(HOUR)
        await asyncio.gather(health.break_glass(HOUR, WHY, WHO), health.end_expired_break_glass())
        assert world.record().glass is not None


# -- over restarts -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_restart_of_the_service_neither_ends_nor_prolongs_it() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await restarted(world)
        assert view(world).offered
        tenant = await admitted(world)
        (granted,) = await ask(world, tenant)
        assert granted.basis is Basis.BREAK_GLASS
        world.kubelet.delete(tenant)
        await world.run(HOUR - 120.0)
        await restarted(world)
        assert view(world).offered
        await world.run(180.0)
        assert len(told(world, "glass.mended")) == 1
        await refused(world)


@in_virtual_time
async def test_a_time_that_was_over_while_the_service_was_down_is_over_when_it_starts() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        world.kill()
        await world.run(HOUR + 1.0)
        await world.start_service()
        await refused(world)
        await world.until(lambda: world.record().glass is None, within=10.0)
        assert len(told(world, "glass.mended")) == 1


@in_virtual_time
async def test_a_ledger_that_is_full_when_the_time_is_over_prolongs_nothing() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.run(HOUR - 10.0)
        world.vault.refuses = "no space left"
        await world.run(60.0)
        with pytest.raises(Quarantined):
            await world.node.reserve([world.gpu().id])
        world.vault.refuses = None
        await world.until(lambda: world.record().glass is None, within=10.0)
        await refused(world)


# -- what a person may not order ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_policy_says_for_how_long_at_most() -> None:
    short = replace(DEFAULT, limits=replace(Limits(), break_glass=600.0))
    async with a_world_out_of_service(policy=short) as world:
        with pytest.raises(Refused, match=r"for 10 min at most, not 601 s \(limits: break-glass\)"):
            await broken(world, 601.0)
        assert world.record().glass is None
        assert (await broken(world, 600.0)).offered


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_it_needs_a_reason_and_so_does_its_end(reason: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world_out_of_service() as world:
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await world.node.actions.break_glass("0", HOUR, reason, WHO)
            await broken(world)
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await world.node.actions.break_glass("0", 0, reason, WHO)
            assert view(world).offered

    play()


@in_virtual_time
async def test_there_must_be_such_a_device_and_something_to_end() -> None:
    async with a_world_out_of_service() as world:
        with pytest.raises(InvalidRequest):
            await world.node.actions.break_glass("7", HOUR, WHY, WHO)
        with pytest.raises(Refused, match="no broken glass"):
            await world.node.actions.break_glass("0", 0, WHY, WHO)
        assert told(world, "glass.broken") == told(world, "glass.mended") == []


@in_virtual_time
async def test_what_a_person_took_out_has_to_be_released_first() -> None:
    async with a_world(1) as world:
        await world.node.actions.quarantine("0", "kept for the lab", "uid:7")
        with pytest.raises(Refused, match="uid:7: release it first"):
            await broken(world)
        assert not view(world).offered
        assert world.record().glass is None


@in_virtual_time
async def test_a_device_that_a_person_released_may_have_its_glass_broken() -> None:
    async with a_world(1) as world:
        await world.node.actions.quarantine("0", "kept for the lab", "uid:7")
        holder = world.matter.start(None, "host", "host")
        world.matter.open(holder, world.gpu().id)  # its probation cannot begin
        await world.node.actions.unquarantine("0", "the lab is done", "uid:7")
        assert world.record().health is Health.PROBATION
        assert (await broken(world)).offered


@in_virtual_time
async def test_a_persons_quarantine_ends_it() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.node.actions.quarantine("0", "it burns", "uid:7")
        assert world.record().glass is None
        (event,) = told(world, "glass.mended")
        assert event.actor == "uid:7"
        assert len(told(world, "operator.quarantined")) == 1
        await refused(world)


# -- what it is not ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_it_changes_nothing_of_what_is_known() -> None:
    async with a_world_out_of_service() as world:
        before = world.record()
        await broken(world, 60.0)
        await world.run(120.0)
        after = world.record()
        assert (after.health, after.cause, after.strikes) == (before.health, before.cause, before.strikes)
        assert after.hygiene in (Hygiene.CLEAN, Hygiene.DIRTY)


@in_virtual_time
async def test_a_scrub_under_way_is_waited_for() -> None:
    """Whatever a person wants: nothing is handed over under an eraser."""
    async with a_world(1) as world:
        tenant: Tenant = await started(world)
        world.gpu().slow = 4.0
        world.kubelet.delete(tenant)
        await world.until(lambda: bool(world.erasers.running))
        await broken(world)
        follower = await world.admit("umbrella", "serve-0")
        assert follower is not None
        await world.until(lambda: follower.running)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
