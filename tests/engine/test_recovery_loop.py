"""The recovery loop: after each kind of failure the device recovers automatically, waits, or needs an operator."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.errors import DeviceBusy, InvalidRequest, NotReady, Refused
from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger
from scrubber.domain.policy import ResetMode
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.world.kubelet import Tenant
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world


async def running(world: World) -> Tenant:
    tenant = await world.admit("acme", "train-0")
    assert tenant is not None
    await world.until(lambda: tenant.running)
    await world.run(0.1)
    world.write_all(tenant)
    return tenant


def code(world: World) -> str:
    cause = world.record().cause
    return "" if cause is None else cause.code


def slow_scrubs(world: World) -> int:
    return sum(scrub.path is PathKind.SLOW for scrub in world.vault.scrubs.values())


async def rescrub(world: World) -> None:
    """Scrub the first device on demand, to the end."""
    assert world.service is not None
    await world.service.scrub(world.gpu().id)


@in_virtual_time
async def test_device_with_an_xid_that_a_reset_clears_returns_after_a_reset_and_two_more_clean_scrubs() -> None:
    async with a_world() as world:
        scrubs = slow_scrubs(world)
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.PROBATION)
        assert world.gpu().resets == 1
        assert not world.record().advertised
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert slow_scrubs(world) == scrubs + 3
        assert world.record().hygiene is Hygiene.CLEAN
        assert world.record(1).version < world.record(0).version


@in_virtual_time
async def test_failed_reset_is_retried_with_growing_pauses_until_the_device_needs_an_operator() -> None:
    async with a_world(devices=1) as world:
        world.gpu().reset_fails = "the reset did not take"
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.CONDEMNED, within=300.0)
        starts = [scrub.started for scrub in world.vault.scrubs.values() if scrub.trigger.value == "recovery"]
        pauses = [late - early for early, late in itertools.pairwise(starts)]
        assert len(starts) == world.policy.recovery.max_attempts
        assert pauses == sorted(pauses)
        assert world.record().cause is not None
        attempts = slow_scrubs(world)
        await world.run(1_000.0)
        assert slow_scrubs(world) == attempts
        world.gpu().mend()
        await world.node.actions.unquarantine("0", "a new board", "uid:0")
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_device_that_cannot_be_reset_needs_an_operator_at_once_where_resets_are_required() -> None:
    async with a_world(devices=1, policy=replace(DEFAULT, reset=ResetMode.REQUIRED)) as world:
        world.gpu().reset_missing = "this platform has none"
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: code(world) == "reset-unavailable")
        cause = world.record().cause
        assert cause is not None
        assert cause.recovery_method is RecoveryMethod.OPERATOR


@in_virtual_time
async def test_device_returns_without_a_reset_once_its_condition_is_gone_where_no_reset_is_required() -> None:
    async with a_world(devices=1) as world:
        world.gpu().reset_missing = "this platform has none"
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: code(world) == "xid-95")
        await world.run(10.0)
        assert world.record().health is not Health.HEALTHY
        world.gpu().xids.clear()
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.gpu().resets == 0


@in_virtual_time
async def test_device_that_does_not_answer_until_a_reset_is_reset_once_its_tenant_is_gone() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.gpu().lost = True
        world.signal(0)
        await world.until(lambda: code(world) == "device-lost")
        assert world.record().hygiene is Hygiene.IN_USE
        await world.run(10.0)
        assert world.gpu().resets == 0  # not under its tenant
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_hung_driver_is_waited_for_without_costing_a_recovery_attempt() -> None:
    async with a_world(devices=1) as world:
        world.gpu().stuck = True
        await world.until(lambda: code(world) == "driver-timeout")
        await world.run(600.0)
        assert world.record().failures == 0
        world.gpu().stuck = False
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_device_whose_memory_does_not_clear_is_quarantined_and_never_granted() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.gpu().wont_clear = True
        world.kubelet.delete(tenant)
        await world.until(lambda: code(world) == "verification-failed")
        follower = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.run(300.0)
        assert not follower.running
        assert world.record().health is Health.CONDEMNED


@in_virtual_time
async def test_eraser_that_exceeds_its_time_limit_is_killed_and_the_scrub_is_retried_after_a_pause() -> None:
    async with a_world(devices=1) as world:
        world.gpu().slow = 100.0
        await rescrub(world)
        assert code(world) == "erase-timeout"
        assert not world.erasers.running
        world.gpu().slow = 1.0
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_unkillable_eraser_is_waited_for_before_the_next_eraser_starts() -> None:
    async with a_world(devices=1) as world:
        world.gpu().slow, world.erasers.unkillable = 20.0, True
        await rescrub(world)
        assert code(world) == "erase-timeout"
        (orphan,) = world.erasers.running.values()
        world.gpu().slow, world.erasers.unkillable = 1.0, False
        await world.until(orphan.task.done, within=60.0)
        orphan.killable = True
        await world.until(lambda: world.record().state == "clean", within=200.0)


@in_virtual_time
async def test_ghost_holder_is_found_by_the_next_start_and_cleared_by_a_reset() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.gpu().ghost = True
        world.kubelet.delete(tenant)
        await world.run(10.0)
        follower = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: code(world) == "untraceable-holder", within=60.0)
        await world.until(lambda: follower.running, within=120.0)
        assert world.gpu().resets >= 1
        assert not world.gpu().ghost


@in_virtual_time
async def test_device_with_an_xid_that_requires_a_reboot_waits_for_the_reboot() -> None:
    async with a_world(devices=1) as world:
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: code(world) == "xid-79")
        scrubs = slow_scrubs(world)
        await world.run(1_000.0)
        assert slow_scrubs(world) == scrubs
        world.gpu().mend()
        world.reboot()
        await world.start_service()
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_fault_on_probation_counts_as_a_failed_recovery_attempt() -> None:
    async with a_world(devices=1) as world:
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.PROBATION)
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        assert world.record().failures == 1
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.record().failures == 0


@in_virtual_time
async def test_device_that_faults_under_a_running_pod_is_recovered_after_the_pod() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        await world.run(60.0)
        assert world.gpu().resets == 0
        assert world.record().hygiene is Hygiene.IN_USE
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_pod_that_waits_for_a_faulted_device_starts_once_the_device_has_recovered() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.run(0.1)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2, within=120.0)
        assert world.record().health is Health.HEALTHY
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_device_quarantined_by_an_operator_is_not_recovered_before_its_release() -> None:
    async with a_world(devices=1) as world:
        await world.node.actions.quarantine("0", "it smells", "uid:1000")
        scrubs = slow_scrubs(world)
        await world.run(1_000.0)
        assert slow_scrubs(world) == scrubs
        view = await world.node.actions.unquarantine("0", "it was the neighbour", "uid:1000")
        assert view.record.health is Health.PROBATION
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_operator_action_needs_a_reason_and_a_release_needs_a_quarantine() -> None:
    async with a_world(devices=1) as world:
        for act in (world.node.actions.quarantine, world.node.actions.unquarantine):
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await act("0", "  ", "uid:0")
        with pytest.raises(Refused, match="not quarantined"):
            await world.node.actions.unquarantine("0", "why not", "uid:0")


@in_virtual_time
async def test_blocked_recovery_scrub_costs_no_attempt_and_is_repeated_only_after_a_pause() -> None:
    async with a_world(devices=1) as world:
        await world.node.actions.quarantine("0", "it smells", "uid:0")
        await world.node.actions.unquarantine("0", "it does not", "uid:0")
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu().id)
        await world.run(2.0)
        scrubs = slow_scrubs(world)
        await world.run(60.0)
        assert slow_scrubs(world) - scrubs < 20
        assert world.record().failures == 0
        world.matter.end(host)
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_device_under_a_policy_without_resets_is_recovered_by_scrubs_or_condemned() -> None:
    never = replace(DEFAULT, reset=ResetMode.NEVER)
    async with a_world(devices=1, policy=never) as world:
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.CONDEMNED, within=300.0)
        assert world.gpu().resets == 0


# -- on demand ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_scrub_on_demand_reports_progress_and_result() -> None:
    async with a_world(devices=1) as world:
        assert world.service is not None
        news = await world.service.scrub("0")
        steps = [each.step for each in news if each.step is not None]
        assert len(set(steps)) > 1
        assert any(each.progress is not None for each in news)
        assert news[-1].finished is not None
        assert news[-1].finished.outcome is Outcome.PASSED
        assert news[-1].certificate == world.record().certificate


@in_virtual_time
async def test_fast_scrub_on_demand_checks_the_device_and_changes_nothing() -> None:
    async with a_world(devices=1) as world:
        assert world.service is not None
        certificate = world.record().certificate
        (news,) = await world.service.scrub("0", PathKind.FAST)
        assert news.finished is not None
        assert news.finished.outcome is Outcome.PASSED
        assert world.record().certificate == certificate


@in_virtual_time
async def test_scrub_on_demand_of_a_device_in_use_is_refused() -> None:
    async with a_world(devices=1) as world:
        tenant = await running(world)
        assert world.service is not None
        with pytest.raises(DeviceBusy, match="in use by acme/train-0"):
            await world.service.scrub("0")
        assert tenant.running
        assert set(world.gpu().cells) != {""}


@in_virtual_time
async def test_scrub_on_demand_kills_no_process_of_a_pod_that_still_lives() -> None:
    """Regardless of the record, the scrub itself checks earlier pods, and changes nothing while one lives."""
    async with a_world(devices=1) as world:
        tenant = await running(world)
        bytes_before = list(world.gpu().cells)
        await world.controller().occupancy.release(world.controller().state.record)
        assert world.service is not None
        news = await world.service.scrub("0")
        assert news[-1].finished is not None
        assert news[-1].finished.outcome is Outcome.BLOCKED
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.gpu().cells == bytes_before


@in_virtual_time
async def test_device_granted_between_two_checks_is_neither_scrubbed_nor_released() -> None:
    """A caller whose view of a free device is outdated gets an error; nothing happens to the device."""
    async with a_world(devices=1) as world:
        controller = world.controller()
        tenant = await world.admit("acme", "train-0")
        assert tenant is not None
        await world.until(lambda: tenant.running)
        seen = controller.state.record
        with pytest.raises(NotReady):
            await controller.scrubs.start(ScrubTrigger.ON_DEMAND)
        await controller.occupancy.release(replace(seen, last_grant=None))
        assert world.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_stopped_service_abandons_its_scrubs_and_leaves_their_devices_dirty() -> None:
    async with a_world(devices=1, settled=False) as world:
        service = await world.start_service()
        await world.until(lambda: bool(world.erasers.running))
        await service.stop()
        assert not world.erasers.running
        assert world.record().hygiene is Hygiene.DIRTY
        (scrub,) = world.vault.scrubs.values()
        assert scrub.outcome is Outcome.ABANDONED


@in_virtual_time
async def test_recovery_decided_before_an_operator_quarantine_does_not_lift_the_quarantine() -> None:
    async with a_world(devices=1) as world:
        controller = world.controller()
        await controller.health.quarantine("kept for the lab", "uid:0")
        with pytest.raises(NotReady):
            await controller.scrubs.start(ScrubTrigger.RECOVERY, recover=True)
        assert (world.record().health, code(world)) == (Health.QUARANTINED, "operator")
