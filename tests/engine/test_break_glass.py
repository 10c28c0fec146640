"""Break-glass: an operator has a device handed out for a limited time despite its state, audited under their name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scrubber.domain.errors import InvalidRequest, Quarantined, Refused
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Limits, Policy
from scrubber.domain.states import Health, Hygiene
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
    """Provide a world in which device 0 waits for a reboot that never comes."""
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
    """Return the audit events of that name."""
    return [event for event in world.vault.events if event.name == name]


async def broken(world: World, seconds: float = HOUR) -> DeviceView:
    return await world.node.actions.break_glass("0", seconds, WHY, WHO)


async def restarted(world: World) -> None:
    world.kill()
    await world.start_service()


async def refused(world: World) -> None:
    """Assert that neither an allocation nor a start succeeds."""
    assert not view(world).advertised
    with pytest.raises(Quarantined):
        await world.node.reserve([world.gpu().id])
    tenant = world.kubelet.admit("hooli", "late-0", [world.gpu().id], starts=False)
    refusal = await answered(ask(world, tenant, wait=1.0))
    assert isinstance(refusal, Quarantined)
    world.kubelet.delete(tenant)


# -- while it is active ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_quarantined_device_is_advertised_and_granted_until_its_break_glass_override_expires() -> None:
    async with a_world_out_of_service() as world:
        await refused(world)
        shown = await broken(world, HOUR)
        assert shown.advertised
        assert view(world).advertised
        tenant = await admitted(world)
        (granted,) = await ask(world, tenant)
        assert granted.basis is Basis.BREAK_GLASS
        assert world.record().health is Health.QUARANTINED
        world.kubelet.delete(tenant)
        await world.run(HOUR - 60.0)
        assert view(world).advertised
        await world.run(120.0)
        assert world.record().break_glass is None
        await refused(world)


@in_virtual_time
async def test_grant_certificate_and_event_name_the_break_glass_override() -> None:
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
async def test_break_glass_override_is_audited_with_actor_reason_and_expiry() -> None:
    async with a_world_out_of_service() as world:
        now = world.clock.wall()
        await broken(world, HOUR)
        (event,) = told(world, "break-glass.started")
        assert (event.device, event.actor) == (world.gpu().id, WHO)
        assert event.fields == {
            "reason": WHY,
            "duration_seconds": HOUR,
            "expires_at": now + HOUR,
            "state": "quarantined",
        }
        glass = world.record().break_glass
        assert glass is not None
        assert (glass.until, glass.reason, glass.actor) == (now + HOUR, WHY, WHO)


@in_virtual_time
async def test_break_glass_override_applies_to_its_device_only() -> None:
    async with a_world_out_of_service(2) as world:
        world.gpu(1).xids[79] = 1
        world.signal(1)
        await world.until(lambda: world.record(1).health is Health.QUARANTINED)
        await broken(world)
        assert [each.advertised for each in world.node.view().devices] == [True, False]
        with pytest.raises(Quarantined):
            await world.node.reserve([world.gpu(1).id])


@in_virtual_time
async def test_condemned_device_is_granted_under_a_break_glass_override() -> None:
    async with a_world_out_of_service() as world:
        world.gpu().mend()
        world.gpu().wont_clear = True
        await world.node.actions.unquarantine("0", "it looked well", WHO)
        await world.until(lambda: world.record().health is Health.CONDEMNED, within=600.0)
        await broken(world)
        assert view(world).advertised
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.BREAK_GLASS


@in_virtual_time
async def test_healthy_device_under_a_break_glass_override_is_granted_on_its_certificate() -> None:
    """A certificate is used if there is one: the override only replaces what is missing."""
    async with a_world(1) as world:
        await broken(world)
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_no_process_is_killed_and_no_device_is_reset_under_a_break_glass_override() -> None:
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


# -- after it has ended ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_restart_after_a_grant_by_break_glass_override_needs_a_certificate() -> None:
    """The second pod was started on the bytes of the first; the exception for its own restart no longer applies."""
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
        assert world.record().previous_assignment is None
        await world.run(400.0)  # the first pod is gone, and the override has expired
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
async def test_pod_granted_by_break_glass_override_keeps_the_device_and_a_scrub_follows_the_pod() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        tenant = await started(world)
        await world.run(HOUR + 60.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert not view(world).advertised
        world.kubelet.delete(tenant)
        world.gpu().mend()
        await world.node.actions.unquarantine("0", "the board was changed", WHO)
        await world.until(lambda: world.record().state == "clean", within=300.0)
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_expiry_of_a_break_glass_override_is_audited_with_the_operator_that_requested_it() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.run(HOUR + 60.0)
        (event,) = told(world, "break-glass.ended")
        assert (event.device, event.actor) == (world.gpu().id, "service")
        assert WHO in str(event.fields["message"])
        assert HOUR <= event.at - told(world, "break-glass.started")[0].at < HOUR + 15.0


@in_virtual_time
async def test_operator_may_end_a_break_glass_override_early() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        shown = await world.node.actions.break_glass("0", 0, "the trial is over", "uid:7")
        assert not shown.advertised
        assert world.record().break_glass is None
        (event,) = told(world, "break-glass.ended")
        assert event.actor == "uid:7"
        assert "the trial is over" in str(event.fields["message"])
        await refused(world)
        await world.run(HOUR + 60.0)
        assert len(told(world, "break-glass.ended")) == 1


@in_virtual_time
async def test_repeated_break_glass_override_restarts_its_duration() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.run(HOUR / 2)
        await broken(world, HOUR)
        await world.run(HOUR * 3 / 4)
        assert view(world).advertised
        await world.run(HOUR / 2)
        assert not view(world).advertised
        assert len(told(world, "break-glass.started")) == 2
        assert len(told(world, "break-glass.ended")) == 1


@in_virtual_time
async def test_break_glass_override_that_is_renewed_as_it_expires_is_not_ended() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        health = world.controller().health
        world.pause(HOUR)
        await asyncio.gather(health.break_glass(HOUR, WHY, WHO), health.end_expired_break_glass())
        assert world.record().break_glass is not None


# -- over restarts -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_service_restart_neither_ends_nor_prolongs_a_break_glass_override() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await restarted(world)
        assert view(world).advertised
        tenant = await admitted(world)
        (granted,) = await ask(world, tenant)
        assert granted.basis is Basis.BREAK_GLASS
        world.kubelet.delete(tenant)
        await world.run(HOUR - 120.0)
        await restarted(world)
        assert view(world).advertised
        await world.run(180.0)
        assert len(told(world, "break-glass.ended")) == 1
        await refused(world)


@in_virtual_time
async def test_break_glass_override_that_expired_while_the_service_was_down_has_ended_when_it_starts() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        world.kill()
        await world.run(HOUR + 1.0)
        await world.start_service()
        await refused(world)
        await world.until(lambda: world.record().break_glass is None, within=10.0)
        assert len(told(world, "break-glass.ended")) == 1


@in_virtual_time
async def test_full_ledger_does_not_prolong_an_expired_break_glass_override() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.run(HOUR - 10.0)
        world.vault.refuses = "no space left"
        await world.run(60.0)
        with pytest.raises(Quarantined):
            await world.node.reserve([world.gpu().id])
        world.vault.refuses = None
        await world.until(lambda: world.record().break_glass is None, within=10.0)
        await refused(world)


# -- what an operator may not order ------------------------------------------------------------------------------------


@in_virtual_time
async def test_policy_limits_the_duration_of_a_break_glass_override() -> None:
    short = replace(DEFAULT, limits=replace(Limits(), break_glass=600.0))
    async with a_world_out_of_service(policy=short) as world:
        with pytest.raises(Refused, match=r"for 10 min at most, not 601 s \(limits: break-glass\)"):
            await broken(world, 601.0)
        assert world.record().break_glass is None
        assert (await broken(world, 600.0)).advertised


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_starting_and_ending_a_break_glass_override_need_a_reason(reason: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world_out_of_service() as world:
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await world.node.actions.break_glass("0", HOUR, reason, WHO)
            await broken(world)
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await world.node.actions.break_glass("0", 0, reason, WHO)
            assert view(world).advertised

    play()


@in_virtual_time
async def test_break_glass_override_of_an_unknown_device_and_ending_an_absent_override_are_refused() -> None:
    async with a_world_out_of_service() as world:
        with pytest.raises(InvalidRequest):
            await world.node.actions.break_glass("7", HOUR, WHY, WHO)
        with pytest.raises(Refused, match="no broken glass"):
            await world.node.actions.break_glass("0", 0, WHY, WHO)
        assert told(world, "break-glass.started") == told(world, "break-glass.ended") == []


@in_virtual_time
async def test_device_quarantined_by_an_operator_gets_no_break_glass_override_before_its_release() -> None:
    async with a_world(1) as world:
        await world.node.actions.quarantine("0", "kept for the lab", "uid:7")
        with pytest.raises(Refused, match="uid:7: release it first"):
            await broken(world)
        assert not view(world).advertised
        assert world.record().break_glass is None


@in_virtual_time
async def test_device_released_by_an_operator_may_get_a_break_glass_override() -> None:
    async with a_world(1) as world:
        await world.node.actions.quarantine("0", "kept for the lab", "uid:7")
        holder = world.matter.start(None, "host", "host")
        world.matter.open(holder, world.gpu().id)  # prevents its probation from starting
        await world.node.actions.unquarantine("0", "the lab is done", "uid:7")
        assert world.record().health is Health.PROBATION
        assert (await broken(world)).advertised


@in_virtual_time
async def test_operator_quarantine_ends_a_break_glass_override() -> None:
    async with a_world_out_of_service() as world:
        await broken(world, HOUR)
        await world.node.actions.quarantine("0", "it burns", "uid:7")
        assert world.record().break_glass is None
        (event,) = told(world, "break-glass.ended")
        assert event.actor == "uid:7"
        assert len(told(world, "operator.quarantined")) == 1
        await refused(world)


# -- what it does not change -------------------------------------------------------------------------------------------


@in_virtual_time
async def test_break_glass_override_leaves_health_cause_and_quarantine_history_unchanged() -> None:
    async with a_world_out_of_service() as world:
        before = world.record()
        await broken(world, 60.0)
        await world.run(120.0)
        after = world.record()
        assert (after.health, after.cause, after.recent_quarantines) == (
            before.health,
            before.cause,
            before.recent_quarantines,
        )
        assert after.hygiene in (Hygiene.CLEAN, Hygiene.DIRTY)


@in_virtual_time
async def test_start_under_a_break_glass_override_waits_for_a_running_scrub() -> None:
    """Even with an override, a device is not handed over while an eraser runs."""
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
