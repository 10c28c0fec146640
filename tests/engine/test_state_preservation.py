"""State that must survive: unauthorized use before a lost answer, an owed reset, a rule that was not checked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.evidence import Outcome
from scrubber.domain.health.breaker import breaker_state
from scrubber.domain.policy import BreakerRule, Enforcement, HealthRule, PolicyOverride, QuarantineTiming, ResetMode
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.views import HandOverCall
from tests.world.asking import STRICT, admitted, ask, started
from tests.world.kubelet import Tenant
from tests.world.matter import CELLS
from tests.world.samples import NOW, record
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

REQUIRED = replace(STRICT, reset=ResetMode.REQUIRED)
OBSERVE = replace(DEFAULT, enforcement=Enforcement.OBSERVE)
AT_RELEASE = replace(DEFAULT, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE))
WHO, WHY = "uid:1", "a deadline"
HOUR = 3600.0


async def struck(world: World, number: int = 0) -> None:
    world.gpu(number).came(95, 1)
    world.signal(number)
    await world.until(lambda: world.record(number).health is Health.QUARANTINED)


async def unheard(world: World, tenant: Tenant) -> None:
    """Cancel the caller of its granted start before the answer."""
    call = ask(world, tenant)
    world.vault.granting = call.cancel
    await asyncio.wait({call})
    world.vault.granting = None
    assert call.cancelled()
    await world.run(1.0)


# -- an undelivered answer ---------------------------------------------------------------------------------------------


@in_virtual_time
async def test_undelivered_grant_is_returned_again_to_the_pod_it_was_made_for() -> None:
    async with a_world(1) as world:
        tenant = await admitted(world)
        await unheard(world, tenant)
        grants = world.record().grant_sequence
        (again,) = await ask(world, tenant)
        assert again.grant == grants


@in_virtual_time
async def test_undelivered_grant_is_not_returned_after_unauthorized_use_of_the_device() -> None:
    async with a_world(1) as world:
        tenant = await admitted(world)
        await unheard(world, tenant)
        stranger = world.matter.start("uid-x", "uid-x/main", "evil/uid-x", mounted=frozenset({world.gpu().id}))
        world.matter.open(stranger, world.gpu().id)
        world.matter.write(stranger, world.gpu().id)
        await world.until(lambda: world.record().contaminated)
        world.matter.end(stranger)
        await world.run(20.0)
        await ask(world, tenant)
        assert world.gpu().cells == [""] * CELLS


@in_virtual_time
async def test_undelivered_grant_made_by_an_observing_policy_is_not_returned_under_an_enforcing_policy() -> None:
    async with a_world(1, OBSERVE) as world:
        first = await started(world)
        world.kubelet.force_delete(first, lives_on=10.0)
        second = await admitted(world)
        await unheard(world, second)
        await world.run(20.0)
        world.policy = DEFAULT
        world.node.on_policy_change()
        await ask(world, second)
        assert world.gpu().cells == [""] * CELLS


# -- a required or owed reset ------------------------------------------------------------------------------------------


def leave_observing(world: World) -> None:
    world.policy = REQUIRED
    world.node.on_policy_change()


@pytest.mark.parametrize("glass", [True, False], ids=["a-glass", "a-policy"])
def test_scrub_without_a_required_reset_counts_only_while_nothing_is_enforced(glass: bool) -> None:
    @in_virtual_time
    async def play() -> None:
        policy = REQUIRED if glass else replace(REQUIRED, enforcement=Enforcement.OBSERVE)
        async with a_world(1, policy) as world:
            if glass:
                await world.node.actions.break_glass("0", 60.0, WHY, WHO)
            tenant = await started(world)
            before = world.gpu().resets
            world.kubelet.delete(tenant)
            await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
            assert world.gpu().resets == before
            await world.run(120.0)
            if not glass:
                leave_observing(world)
            await ask(world, await admitted(world))
            assert world.gpu().resets > before

    play()


@in_virtual_time
async def test_release_by_an_operator_does_not_cancel_an_owed_reset() -> None:
    async with a_world(1) as world:
        world.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await world.run(20.0)
        world.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await world.until(lambda: world.record().must_reset)
        await world.node.actions.unquarantine("0", WHY, WHO)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=600.0)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_fault_during_an_operator_quarantine_is_logged_and_leaves_a_reset_owed() -> None:
    async with a_world(1) as world:
        world.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await world.run(20.0)
        await world.node.actions.quarantine("0", "a cable", WHO)
        world.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await world.until(lambda: world.record().must_reset)
        (told,) = [event for event in world.vault.events if event.name == "health.errors-reported"]
        assert (told.fields["code"], told.fields["new"]) == ("lifetime-ecc-uncorrected-aggregate", 6)
        await world.node.actions.unquarantine("0", "the cable is mended", WHO)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=600.0)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_error_counters_are_cleared_by_the_reset_and_not_by_the_health_check_after_it() -> None:
    async with a_world(1) as world:
        await struck(world)
        assert "xid-95" in dict(world.record().lifetime_counters)
        await world.until(lambda: world.record().health is Health.PROBATION)
        assert world.gpu().resets == 1
        assert "xid-95" not in dict(world.record().lifetime_counters)


@in_virtual_time
async def test_clean_scrub_that_made_no_reset_leaves_the_reset_owed() -> None:
    async with a_world(1) as world:
        world.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await world.run(20.0)
        await world.node.actions.quarantine("0", "a cable", WHO)
        world.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await world.until(lambda: world.record().must_reset)
        assert world.service is not None
        news = await world.service.scrub("0")
        assert news[-1].finished is not None
        assert news[-1].finished.outcome is Outcome.PASSED
        assert world.gpu().resets == 0
        assert world.record().must_reset


@in_virtual_time
async def test_reset_on_probation_counts_towards_the_resets_of_the_day() -> None:
    async with a_world(1) as world:
        world.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await world.run(20.0)
        await world.node.actions.quarantine("0", "a cable", WHO)
        world.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await world.until(lambda: world.record().must_reset)
        await world.node.actions.unquarantine("0", "the cable is mended", WHO)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=600.0)
        assert [attempt.reset for attempt in world.record().recovery_attempts] == [True]


@in_virtual_time
async def test_fault_of_a_condemned_device_leaves_a_reset_owed() -> None:
    async with a_world(1) as world:
        world.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await world.run(20.0)
        world.gpu().wont_clear = True
        tenant = await started(world)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().health is Health.CONDEMNED, within=600.0)
        world.gpu().wont_clear = False
        world.gpu().counters["ecc_uncorrected_aggregate"] = 99
        await world.run(30.0)
        before = world.gpu().resets
        await world.node.actions.unquarantine("0", WHY, WHO)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=600.0)
        assert world.gpu().resets > before


@in_virtual_time
async def test_recovery_that_passed_the_breaker_because_no_reset_was_possible_makes_no_reset_later() -> None:
    one = replace(DEFAULT, breaker=BreakerRule(max_resets=1, window=7200.0))
    async with a_world(4, one) as world:
        for number in range(4):
            world.gpu(number).reset_missing = "its tool is being exchanged" if number else None
            world.gpu(number).came(95, 1)
            world.signal(number)
        await world.run(120.0)
        for number in range(4):
            world.gpu(number).reset_missing = None
        await world.run(900.0)
        assert sum(world.gpu(number).resets for number in range(4)) == 1


# -- ways out ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [DEFAULT, AT_RELEASE], ids=["detection", "release"])
def test_device_that_faulted_in_use_and_has_a_ghost_holder_is_reset_once_its_pod_is_gone(policy: object) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world(1, policy) as world:  # type: ignore[arg-type]
            tenant = await started(world)
            world.gpu().ghost = True
            await struck(world)
            world.kubelet.delete(tenant)
            await world.until(lambda: world.record().health is Health.HEALTHY, within=300.0)
            assert world.gpu().resets == 1

    play()


@in_virtual_time
async def test_withdrawal_is_postponed_only_while_the_kubelet_assigns_the_device() -> None:
    async with a_world(1, AT_RELEASE) as world:
        tenant = await started(world)
        host = world.matter.start(None, "host", "host")
        world.matter.open(host, world.gpu().id)
        await struck(world)
        assert world.node.view().devices[0].advertised
        world.kubelet.delete(tenant)
        await world.run(60.0)
        assert world.record().hygiene is Hygiene.IN_USE
        assert not world.node.view().devices[0].advertised


# -- attribution -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_overheating_under_one_tenant_is_not_counted_against_the_next_tenant() -> None:
    async with a_world(1) as world:
        first = await started(world, "mallory", "a")
        world.gpu().celsius = 120
        await world.run(570.0)
        world.kubelet.delete(first)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        await started(world, "acme", "b")
        await world.run(300.0)
        assert world.record().advertised
        assert world.record().recent_quarantines == ()


@in_virtual_time
async def test_device_moved_to_another_resource_follows_the_policy_of_that_resource() -> None:
    lax = PolicyOverride(replace(OBSERVE, name="lax"), resources=("nvidia.com/test",))
    async with a_world(1, replace(DEFAULT, overrides=(lax,))) as world:
        device = world.gpu().id
        await world.node.announce("nvidia.com/test", {device: device})
        tenant = await admitted(world)
        await world.node.hand_over(HandOverCall(tenant.devices, None, resource="nvidia.com/test"))
        assert world.controller().state.policy.name == "lax"
        await world.node.announce("nvidia.com/test", {})
        await world.node.announce("nvidia.com/gpu", {device: device})
        assert world.controller().state.policy.enforcement is Enforcement.ENFORCE


@in_virtual_time
async def test_clock_set_back_does_not_prolong_a_break_glass_override(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_world(1) as world:
        world.gpu().came(79, 1)
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        await world.node.actions.break_glass("0", 600.0, WHY, WHO)
        wall = world.clock.wall
        monkeypatch.setattr(world.clock, "wall", lambda: wall() - 10 * HOUR)
        await world.run(10.0)
        assert world.record().break_glass is None
        assert not world.node.view().devices[0].advertised


# -- many at once ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_breaker_state_is_computed_once_per_view_however_many_devices_wait_for_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_world(8, replace(DEFAULT, breaker=BreakerRule(max_resets=0))) as world:
        for number in range(8):
            await struck(world, number)
        worked_out, count = breaker_state, 0

        def counted(*args: object, **facts: object) -> object:
            nonlocal count
            count += 1
            return worked_out(*args, **facts)  # type: ignore[arg-type]

        monkeypatch.setattr("scrubber.engine.breaker.breaker_state", counted)
        world.node.devices.breaker.invalidate()
        assert all(controller.view.recovery_blocker for controller in world.node.devices.controllers.values())
        assert count == 1
        state = world.controller().state
        async with state.lock:
            state.apply(state.record)
        assert world.controller().view.recovery_blocker
        assert count == 2, "a record that changes is counted within the same second"


@in_virtual_time
async def test_joint_reset_of_two_devices_does_not_delay_the_health_check_of_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.world.ports.RESET_SECONDS", 25.0)
    async with a_world(3) as world:
        world.gpu(0).together = (world.gpu(1).id,)
        world.gpu(1).together = (world.gpu(0).id,)
        world.gpu(0).came(95, 1)
        world.signal(0)
        await world.until(lambda: world.record().health is Health.RECOVERING)
        world.gpu(2).came(79, 1)
        await world.until(lambda: not world.record(2).advertised, within=8.0)
        assert not [scrub for scrub in world.vault.scrubs.values() if scrub.outcome is Outcome.FAILED]


def test_permanent_warnings_do_not_displace_a_warning_that_the_policy_tolerates_for_a_limited_time() -> None:
    many = {f"xid-{code}" for code in range(200, 264)}
    seen = (
        record().with_warnings(many, NOW, NVIDIA_SIGNALS).with_warnings({*many, "too-hot"}, NOW + 60.0, NVIDIA_SIGNALS)
    )
    assert ("too-hot", NOW + 60.0) in {(each.code, each.since) for each in seen.warnings}
