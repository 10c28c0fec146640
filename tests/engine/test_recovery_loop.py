"""The recovery loop: after each kind of failure the device recovers automatically, waits, or needs an operator."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.errors import DeviceBusy, InvalidRequest, NotReady, Refused
from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger
from scrubber.domain.policy import ResetMode
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.timeline import in_virtual_time


async def running(cluster: SimulatedCluster) -> Tenant:
    tenant = await cluster.admit("acme", "train-0")
    assert tenant is not None
    await cluster.until(lambda: tenant.running)
    await cluster.run(0.1)
    cluster.write_all(tenant)
    return tenant


def code(cluster: SimulatedCluster) -> str:
    cause = cluster.record().cause
    return "" if cause is None else cause.code


def slow_scrubs(cluster: SimulatedCluster) -> int:
    return sum(scrub.path is PathKind.SLOW for scrub in cluster.ledger_store.scrubs.values())


async def rescrub(cluster: SimulatedCluster) -> None:
    """Scrub the first device on demand, to the end."""
    assert cluster.service is not None
    await cluster.service.scrub(cluster.gpu().id)


@in_virtual_time
async def test_device_with_an_xid_that_a_reset_clears_returns_after_a_reset_and_two_more_clean_scrubs() -> None:
    async with simulated_cluster() as cluster:
        scrubs = slow_scrubs(cluster)
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.PROBATION)
        assert cluster.gpu().resets == 1
        assert not cluster.record().advertised
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert slow_scrubs(cluster) == scrubs + 3
        assert cluster.record().hygiene is Hygiene.CLEAN
        assert cluster.record(1).version < cluster.record(0).version


@in_virtual_time
async def test_failed_reset_is_retried_with_growing_pauses_until_the_device_needs_an_operator() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().reset_fails = "the reset did not take"
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.CONDEMNED, within=300.0)
        starts = [scrub.started for scrub in cluster.ledger_store.scrubs.values() if scrub.trigger.value == "recovery"]
        pauses = [late - early for early, late in itertools.pairwise(starts)]
        assert len(starts) == cluster.policy.recovery.max_attempts
        assert pauses == sorted(pauses)
        assert cluster.record().cause is not None
        attempts = slow_scrubs(cluster)
        await cluster.run(1_000.0)
        assert slow_scrubs(cluster) == attempts
        cluster.gpu().clear_faults()
        await cluster.node.actions.unquarantine("0", "a new board", "uid:0")
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_device_that_cannot_be_reset_needs_an_operator_at_once_where_resets_are_required() -> None:
    async with simulated_cluster(devices=1, policy=replace(DEFAULT, reset=ResetMode.REQUIRED)) as cluster:
        cluster.gpu().reset_missing = "this platform has none"
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: code(cluster) == "reset-unavailable")
        cause = cluster.record().cause
        assert cause is not None
        assert cause.recovery_method is RecoveryMethod.OPERATOR


@in_virtual_time
async def test_device_returns_without_a_reset_once_its_condition_is_gone_where_no_reset_is_required() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().reset_missing = "this platform has none"
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: code(cluster) == "xid-95")
        await cluster.run(10.0)
        assert cluster.record().health is not Health.HEALTHY
        cluster.gpu().xids.clear()
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.gpu().resets == 0


@in_virtual_time
async def test_device_that_does_not_answer_until_a_reset_is_reset_once_its_tenant_is_gone() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.gpu().lost = True
        cluster.signal(0)
        await cluster.until(lambda: code(cluster) == "device-lost")
        assert cluster.record().hygiene is Hygiene.IN_USE
        await cluster.run(10.0)
        assert cluster.gpu().resets == 0  # not under its tenant
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_hung_driver_is_waited_for_without_costing_a_recovery_attempt() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().stuck = True
        await cluster.until(lambda: code(cluster) == "driver-timeout")
        await cluster.run(600.0)
        assert cluster.record().failures == 0
        cluster.gpu().stuck = False
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_device_returns_although_the_clock_was_set_back_by_hours_while_its_recovery_waited() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().stuck = True
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        cluster.gpu().stuck = False
        cluster.clock.offset = -5 * 3600.0
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=600.0)


@in_virtual_time
async def test_device_whose_memory_does_not_clear_is_quarantined_and_never_granted() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.gpu().wont_clear = True
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: code(cluster) == "verification-failed")
        follower = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.run(300.0)
        assert not follower.running
        assert cluster.record().health is Health.CONDEMNED


@in_virtual_time
async def test_eraser_that_exceeds_its_time_limit_is_killed_and_the_scrub_is_retried_after_a_pause() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().slow = 100.0
        await rescrub(cluster)
        assert code(cluster) == "erase-timeout"
        assert not cluster.erasers.running
        cluster.gpu().slow = 1.0
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_unkillable_eraser_is_waited_for_before_the_next_eraser_starts() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().slow, cluster.erasers.unkillable = 20.0, True
        await rescrub(cluster)
        assert code(cluster) == "erase-timeout"
        (orphan,) = cluster.erasers.running.values()
        cluster.gpu().slow, cluster.erasers.unkillable = 1.0, False
        await cluster.until(orphan.task.done, within=60.0)
        orphan.killable = True
        await cluster.until(lambda: cluster.record().state == "clean", within=200.0)


@in_virtual_time
async def test_ghost_holder_is_found_by_the_next_start_and_cleared_by_a_reset() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.gpu().ghost = True
        cluster.kubelet.delete(tenant)
        await cluster.run(10.0)
        follower = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id])
        await cluster.until(lambda: code(cluster) == "untraceable-holder", within=60.0)
        await cluster.until(lambda: follower.running, within=120.0)
        assert cluster.gpu().resets >= 1
        assert not cluster.gpu().ghost


@in_virtual_time
async def test_device_with_an_xid_that_requires_a_reboot_waits_for_the_reboot() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: code(cluster) == "xid-79")
        scrubs = slow_scrubs(cluster)
        await cluster.run(1_000.0)
        assert slow_scrubs(cluster) == scrubs
        cluster.gpu().clear_faults()
        cluster.reboot()
        await cluster.start_service()
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_fault_on_probation_counts_as_a_failed_recovery_attempt() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.PROBATION)
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        assert cluster.record().failures == 1
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.record().failures == 0


@in_virtual_time
async def test_device_that_faults_under_a_running_pod_is_recovered_after_the_pod() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        await cluster.run(60.0)
        assert cluster.gpu().resets == 0
        assert cluster.record().hygiene is Hygiene.IN_USE
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_pod_that_waits_for_a_faulted_device_starts_once_the_device_has_recovered() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.run(0.1)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2, within=120.0)
        assert cluster.record().health is Health.HEALTHY
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_device_quarantined_by_an_operator_is_not_recovered_before_its_release() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.node.actions.quarantine("0", "it smells", "uid:1000")
        scrubs = slow_scrubs(cluster)
        await cluster.run(1_000.0)
        assert slow_scrubs(cluster) == scrubs
        view = await cluster.node.actions.unquarantine("0", "it was the neighbour", "uid:1000")
        assert view.record.health is Health.PROBATION
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_operator_action_needs_a_reason_and_a_release_needs_a_quarantine() -> None:
    async with simulated_cluster(devices=1) as cluster:
        for act in (cluster.node.actions.quarantine, cluster.node.actions.unquarantine):
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await act("0", "  ", "uid:0")
        with pytest.raises(Refused, match="not quarantined"):
            await cluster.node.actions.unquarantine("0", "why not", "uid:0")


@in_virtual_time
async def test_blocked_recovery_scrub_costs_no_attempt_and_is_repeated_only_after_a_pause() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.node.actions.quarantine("0", "it smells", "uid:0")
        await cluster.node.actions.unquarantine("0", "it does not", "uid:0")
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        await cluster.run(2.0)
        scrubs = slow_scrubs(cluster)
        await cluster.run(60.0)
        assert slow_scrubs(cluster) - scrubs < 20
        assert cluster.record().failures == 0
        cluster.process_table.end(host)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_device_under_a_policy_without_resets_is_recovered_by_scrubs_or_condemned() -> None:
    never = replace(DEFAULT, reset=ResetMode.NEVER)
    async with simulated_cluster(devices=1, policy=never) as cluster:
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.CONDEMNED, within=300.0)
        assert cluster.gpu().resets == 0


# -- on demand ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_scrub_on_demand_reports_progress_and_result() -> None:
    async with simulated_cluster(devices=1) as cluster:
        assert cluster.service is not None
        updates = await cluster.service.scrub("0")
        steps = [each.step for each in updates if each.step is not None]
        assert len(set(steps)) > 1
        assert any(each.progress is not None for each in updates)
        assert updates[-1].finished is not None
        assert updates[-1].finished.outcome is Outcome.PASSED
        assert updates[-1].certificate == cluster.record().certificate


@in_virtual_time
async def test_fast_scrub_on_demand_checks_the_device_and_changes_nothing() -> None:
    async with simulated_cluster(devices=1) as cluster:
        assert cluster.service is not None
        certificate = cluster.record().certificate
        (updates,) = await cluster.service.scrub("0", PathKind.FAST)
        assert updates.finished is not None
        assert updates.finished.outcome is Outcome.PASSED
        assert cluster.record().certificate == certificate


@in_virtual_time
async def test_scrub_on_demand_of_a_device_in_use_is_refused() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        assert cluster.service is not None
        with pytest.raises(DeviceBusy, match="in use by acme/train-0"):
            await cluster.service.scrub("0")
        assert tenant.running
        assert set(cluster.gpu().cells) != {""}


@in_virtual_time
async def test_scrub_on_demand_kills_no_process_of_a_pod_that_still_lives() -> None:
    """Regardless of the record, the scrub itself checks earlier pods, and changes nothing while one lives."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await running(cluster)
        bytes_before = list(cluster.gpu().cells)
        await cluster.controller().occupancy.release(cluster.controller().state.record)
        assert cluster.service is not None
        updates = await cluster.service.scrub("0")
        assert updates[-1].finished is not None
        assert updates[-1].finished.outcome is Outcome.BLOCKED
        assert tenant.first is not None
        assert tenant.first.alive
        assert cluster.gpu().cells == bytes_before


@in_virtual_time
async def test_device_granted_between_two_checks_is_neither_scrubbed_nor_released() -> None:
    """A caller whose view of a free device is outdated gets an error; nothing happens to the device."""
    async with simulated_cluster(devices=1) as cluster:
        controller = cluster.controller()
        tenant = await cluster.admit("acme", "train-0")
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        seen = controller.state.record
        with pytest.raises(NotReady):
            await controller.scrubs.start(ScrubTrigger.ON_DEMAND)
        await controller.occupancy.release(replace(seen, last_grant=None))
        assert cluster.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_stopped_service_abandons_its_scrubs_and_leaves_their_devices_dirty() -> None:
    async with simulated_cluster(devices=1, settled=False) as cluster:
        service = await cluster.start_service()
        await cluster.until(lambda: bool(cluster.erasers.running))
        await service.stop()
        assert not cluster.erasers.running
        assert cluster.record().hygiene is Hygiene.DIRTY
        (scrub,) = cluster.ledger_store.scrubs.values()
        assert scrub.outcome is Outcome.ABANDONED


@in_virtual_time
async def test_recovery_decided_before_an_operator_quarantine_does_not_lift_the_quarantine() -> None:
    async with simulated_cluster(devices=1) as cluster:
        controller = cluster.controller()
        await controller.health.quarantine("kept for the lab", "uid:0")
        with pytest.raises(NotReady):
            await controller.scrubs.start(ScrubTrigger.RECOVERY, recover=True)
        assert (cluster.record().health, code(cluster)) == (Health.QUARANTINED, "operator")
