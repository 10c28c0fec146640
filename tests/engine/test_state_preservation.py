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
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import CELLS
from tests.simulation.samples import NOW, record
from tests.simulation.start_requests import STRICT, admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

REQUIRED = replace(STRICT, reset=ResetMode.REQUIRED)
OBSERVE = replace(DEFAULT, enforcement=Enforcement.OBSERVE)
AT_RELEASE = replace(DEFAULT, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE))
WHO, WHY = "uid:1", "a deadline"
HOUR = 3600.0


async def struck(cluster: SimulatedCluster, number: int = 0) -> None:
    cluster.gpu(number).report_xid(95, 1)
    cluster.signal(number)
    await cluster.until(lambda: cluster.record(number).health is Health.QUARANTINED)


async def cancelled_before_the_answer(cluster: SimulatedCluster, tenant: Tenant) -> None:
    """Cancel the caller of its granted start before the answer."""
    call = request_start(cluster, tenant)
    cluster.ledger_store.granting = call.cancel
    await asyncio.wait({call})
    cluster.ledger_store.granting = None
    assert call.cancelled()
    await cluster.run(1.0)


# -- an undelivered answer ---------------------------------------------------------------------------------------------


@in_virtual_time
async def test_undelivered_grant_is_returned_again_to_the_pod_it_was_made_for() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)
        await cancelled_before_the_answer(cluster, tenant)
        grants = cluster.record().grant_sequence
        (again,) = await request_start(cluster, tenant)
        assert again.grant == grants


@in_virtual_time
async def test_undelivered_grant_is_not_returned_after_unauthorized_use_of_the_device() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)
        await cancelled_before_the_answer(cluster, tenant)
        unauthorized = cluster.process_table.start(
            "uid-x", "uid-x/main", "evil/uid-x", mounted=frozenset({cluster.gpu().id})
        )
        cluster.process_table.open(unauthorized, cluster.gpu().id)
        cluster.process_table.write(unauthorized, cluster.gpu().id)
        await cluster.until(lambda: cluster.record().contaminated)
        cluster.process_table.end(unauthorized)
        await cluster.run(20.0)
        await request_start(cluster, tenant)
        assert cluster.gpu().cells == [""] * CELLS


@in_virtual_time
async def test_undelivered_grant_made_by_an_observing_policy_is_not_returned_under_an_enforcing_policy() -> None:
    async with simulated_cluster(1, OBSERVE) as cluster:
        first = await started(cluster)
        cluster.kubelet.force_delete(first, lives_on=10.0)
        second = await admitted(cluster)
        await cancelled_before_the_answer(cluster, second)
        await cluster.run(20.0)
        cluster.policy = DEFAULT
        cluster.node.on_policy_change()
        await request_start(cluster, second)
        assert cluster.gpu().cells == [""] * CELLS


# -- a required or owed reset ------------------------------------------------------------------------------------------


def leave_observing(cluster: SimulatedCluster) -> None:
    cluster.policy = REQUIRED
    cluster.node.on_policy_change()


@pytest.mark.parametrize("with_override", [True, False], ids=["a-glass", "a-policy"])
def test_scrub_without_a_required_reset_counts_only_while_nothing_is_enforced(with_override: bool) -> None:
    @in_virtual_time
    async def play() -> None:
        policy = REQUIRED if with_override else replace(REQUIRED, enforcement=Enforcement.OBSERVE)
        async with simulated_cluster(1, policy) as cluster:
            if with_override:
                await cluster.node.actions.break_glass("0", 60.0, WHY, WHO)
            tenant = await started(cluster)
            before = cluster.gpu().resets
            cluster.kubelet.delete(tenant)
            await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
            assert cluster.gpu().resets == before
            await cluster.run(120.0)
            if not with_override:
                leave_observing(cluster)
            await request_start(cluster, await admitted(cluster))
            assert cluster.gpu().resets > before

    play()


@in_virtual_time
async def test_release_by_an_operator_does_not_cancel_an_owed_reset() -> None:
    async with simulated_cluster(1) as cluster:
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await cluster.run(20.0)
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await cluster.until(lambda: cluster.record().must_reset)
        await cluster.node.actions.unquarantine("0", WHY, WHO)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=600.0)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_fault_during_an_operator_quarantine_is_logged_and_leaves_a_reset_owed() -> None:
    async with simulated_cluster(1) as cluster:
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await cluster.run(20.0)
        await cluster.node.actions.quarantine("0", "a cable", WHO)
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await cluster.until(lambda: cluster.record().must_reset)
        (logged,) = [event for event in cluster.ledger_store.events if event.name == "health.errors-reported"]
        assert (logged.fields["code"], logged.fields["new"]) == ("lifetime-ecc-uncorrected-aggregate", 6)
        await cluster.node.actions.unquarantine("0", "the cable is repaired", WHO)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=600.0)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_error_counters_are_cleared_by_the_reset_and_not_by_the_health_check_after_it() -> None:
    async with simulated_cluster(1) as cluster:
        await struck(cluster)
        assert "xid-95" in dict(cluster.record().lifetime_counters)
        await cluster.until(lambda: cluster.record().health is Health.PROBATION)
        assert cluster.gpu().resets == 1
        assert "xid-95" not in dict(cluster.record().lifetime_counters)


@in_virtual_time
async def test_clean_scrub_that_made_no_reset_leaves_the_reset_owed() -> None:
    async with simulated_cluster(1) as cluster:
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await cluster.run(20.0)
        await cluster.node.actions.quarantine("0", "a cable", WHO)
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await cluster.until(lambda: cluster.record().must_reset)
        assert cluster.service is not None
        updates = await cluster.service.scrub("0")
        assert updates[-1].finished is not None
        assert updates[-1].finished.outcome is Outcome.PASSED
        assert cluster.gpu().resets == 0
        assert cluster.record().must_reset


@in_virtual_time
async def test_reset_on_probation_counts_towards_the_resets_of_the_day() -> None:
    async with simulated_cluster(1) as cluster:
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await cluster.run(20.0)
        await cluster.node.actions.quarantine("0", "a cable", WHO)
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 9
        await cluster.until(lambda: cluster.record().must_reset)
        await cluster.node.actions.unquarantine("0", "the cable is repaired", WHO)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=600.0)
        assert [attempt.reset for attempt in cluster.record().recovery_attempts] == [True]


@in_virtual_time
async def test_fault_of_a_condemned_device_leaves_a_reset_owed() -> None:
    async with simulated_cluster(1) as cluster:
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 3
        await cluster.run(20.0)
        cluster.gpu().wont_clear = True
        tenant = await started(cluster)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().health is Health.CONDEMNED, within=600.0)
        cluster.gpu().wont_clear = False
        cluster.gpu().counters["ecc_uncorrected_aggregate"] = 99
        await cluster.run(30.0)
        before = cluster.gpu().resets
        await cluster.node.actions.unquarantine("0", WHY, WHO)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=600.0)
        assert cluster.gpu().resets > before


@in_virtual_time
async def test_recovery_that_passed_the_breaker_because_no_reset_was_possible_makes_no_reset_later() -> None:
    one = replace(DEFAULT, breaker=BreakerRule(max_resets=1, window=7200.0))
    async with simulated_cluster(4, one) as cluster:
        for number in range(4):
            cluster.gpu(number).reset_missing = "its tool is being exchanged" if number else None
            cluster.gpu(number).report_xid(95, 1)
            cluster.signal(number)
        await cluster.run(120.0)
        for number in range(4):
            cluster.gpu(number).reset_missing = None
        await cluster.run(900.0)
        assert sum(cluster.gpu(number).resets for number in range(4)) == 1


# -- ways out ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [DEFAULT, AT_RELEASE], ids=["detection", "release"])
def test_device_that_faulted_in_use_and_has_a_ghost_holder_is_reset_once_its_pod_is_gone(policy: object) -> None:
    @in_virtual_time
    async def play() -> None:
        async with simulated_cluster(1, policy) as cluster:  # type: ignore[arg-type]
            tenant = await started(cluster)
            cluster.gpu().ghost = True
            await struck(cluster)
            cluster.kubelet.delete(tenant)
            await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=300.0)
            assert cluster.gpu().resets == 1

    play()


@in_virtual_time
async def test_withdrawal_is_postponed_only_while_the_kubelet_assigns_the_device() -> None:
    async with simulated_cluster(1, AT_RELEASE) as cluster:
        tenant = await started(cluster)
        host = cluster.process_table.start(None, "host", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        await struck(cluster)
        assert cluster.node.view().devices[0].advertised
        cluster.kubelet.delete(tenant)
        await cluster.run(60.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert not cluster.node.view().devices[0].advertised


# -- attribution -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_overheating_under_one_tenant_is_not_counted_against_the_next_tenant() -> None:
    async with simulated_cluster(1) as cluster:
        first = await started(cluster, "mallory", "a")
        cluster.gpu().celsius = 120
        await cluster.run(570.0)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        await started(cluster, "acme", "b")
        await cluster.run(300.0)
        assert cluster.record().advertised
        assert cluster.record().recent_quarantines == ()


@in_virtual_time
async def test_device_moved_to_another_resource_follows_the_policy_of_that_resource() -> None:
    lax = PolicyOverride(replace(OBSERVE, name="lax"), resources=("nvidia.com/test",))
    async with simulated_cluster(1, replace(DEFAULT, overrides=(lax,))) as cluster:
        device = cluster.gpu().id
        await cluster.node.announce("nvidia.com/test", {device: device})
        tenant = await admitted(cluster)
        await cluster.node.hand_over(HandOverCall(tenant.devices, None, resource="nvidia.com/test"))
        assert cluster.controller().state.policy.name == "lax"
        await cluster.node.announce("nvidia.com/test", {})
        await cluster.node.announce("nvidia.com/gpu", {device: device})
        assert cluster.controller().state.policy.enforcement is Enforcement.ENFORCE


@in_virtual_time
async def test_clock_set_back_does_not_prolong_a_break_glass_override(monkeypatch: pytest.MonkeyPatch) -> None:
    async with simulated_cluster(1) as cluster:
        cluster.gpu().report_xid(79, 1)
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        await cluster.node.actions.break_glass("0", 600.0, WHY, WHO)
        wall = cluster.clock.wall
        monkeypatch.setattr(cluster.clock, "wall", lambda: wall() - 10 * HOUR)
        await cluster.run(10.0)
        assert cluster.record().break_glass is None
        assert not cluster.node.view().devices[0].advertised


# -- many at once ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_breaker_state_is_computed_once_per_view_however_many_devices_wait_for_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated_cluster(8, replace(DEFAULT, breaker=BreakerRule(max_resets=0))) as cluster:
        for number in range(8):
            await struck(cluster, number)
        worked_out, count = breaker_state, 0

        def counted(*args: object, **facts: object) -> object:
            nonlocal count
            count += 1
            return worked_out(*args, **facts)  # type: ignore[arg-type]

        monkeypatch.setattr("scrubber.engine.breaker.breaker_state", counted)
        cluster.node.devices.breaker.invalidate()
        assert all(controller.view.recovery_blocker for controller in cluster.node.devices.controllers.values())
        assert count == 1
        state = cluster.controller().state
        async with state.lock:
            state.apply(state.record)
        assert cluster.controller().view.recovery_blocker
        assert count == 2, "a record that changes is counted within the same second"


@in_virtual_time
async def test_joint_reset_of_two_devices_does_not_delay_the_health_check_of_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.simulation.ports.RESET_SECONDS", 25.0)
    async with simulated_cluster(3) as cluster:
        cluster.gpu(0).together = (cluster.gpu(1).id,)
        cluster.gpu(1).together = (cluster.gpu(0).id,)
        cluster.gpu(0).report_xid(95, 1)
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.RECOVERING)
        cluster.gpu(2).report_xid(79, 1)
        await cluster.until(lambda: not cluster.record(2).advertised, within=8.0)
        assert not [scrub for scrub in cluster.ledger_store.scrubs.values() if scrub.outcome is Outcome.FAILED]


def test_permanent_warnings_do_not_displace_a_warning_that_the_policy_tolerates_for_a_limited_time() -> None:
    many = {f"xid-{code}" for code in range(200, 264)}
    seen = (
        record().with_warnings(many, NOW, NVIDIA_SIGNALS).with_warnings({*many, "too-hot"}, NOW + 60.0, NVIDIA_SIGNALS)
    )
    assert ("too-hot", NOW + 60.0) in {(each.code, each.since) for each in seen.warnings}
