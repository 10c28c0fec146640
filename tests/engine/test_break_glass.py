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
from tests.simulation.cluster import DEFAULT, LEISURELY, SimulatedCluster, leisurely_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

HOUR = 3600.0
WHY, WHO = "the trial must not stop tonight", "uid:1000"


@asynccontextmanager
async def cluster_out_of_service(devices: int = 1, policy: Policy = DEFAULT) -> AsyncIterator[SimulatedCluster]:
    """Provide a simulated cluster in which device 0 waits for a reboot that never comes."""
    cluster = SimulatedCluster(devices, policy, pace=LEISURELY)
    try:
        await cluster.start_service()
        await cluster.until(cluster.settled)
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        yield cluster
        cluster.check_laws()
        assert cluster.laws.breaches == []
    finally:
        await cluster.end()


def view(cluster: SimulatedCluster, number: int = 0) -> DeviceView:
    return cluster.node.view().devices[number]


def logged(cluster: SimulatedCluster, name: str) -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in cluster.ledger_store.events if event.name == name]


async def broken(cluster: SimulatedCluster, seconds: float = HOUR) -> DeviceView:
    return await cluster.node.actions.break_glass("0", seconds, WHY, WHO)


async def restarted(cluster: SimulatedCluster) -> None:
    cluster.kill()
    await cluster.start_service()


async def refused(cluster: SimulatedCluster) -> None:
    """Assert that neither an allocation nor a start succeeds."""
    assert not view(cluster).advertised
    with pytest.raises(Quarantined):
        await cluster.node.reserve([cluster.gpu().id])
    tenant = cluster.kubelet.admit("hooli", "late-0", [cluster.gpu().id], starts=False)
    refusal = await refusal_of(request_start(cluster, tenant, wait=1.0))
    assert isinstance(refusal, Quarantined)
    cluster.kubelet.delete(tenant)


# -- while it is active ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_quarantined_device_is_advertised_and_granted_until_its_break_glass_override_expires() -> None:
    async with cluster_out_of_service() as cluster:
        await refused(cluster)
        shown = await broken(cluster, HOUR)
        assert shown.advertised
        assert view(cluster).advertised
        tenant = await admitted(cluster)
        (granted,) = await request_start(cluster, tenant)
        assert granted.basis is Basis.BREAK_GLASS
        assert cluster.record().health is Health.QUARANTINED
        cluster.kubelet.delete(tenant)
        await cluster.run(HOUR - 60.0)
        assert view(cluster).advertised
        await cluster.run(120.0)
        assert cluster.record().break_glass is None
        await refused(cluster)


@in_virtual_time
async def test_grant_certificate_and_event_name_the_break_glass_override() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster)
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.certificate is not None
        issued = cluster.ledger_store.certificates[granted.certificate]
        assert "memory: not cleared, because of a break-glass override" in issued.not_covered
        assert issued.rests_on is None
        (event,) = logged(cluster, "handover.granted")
        assert event.fields["exception"] == "break-glass"
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.BREAK_GLASS


@in_virtual_time
async def test_break_glass_override_is_audited_with_actor_reason_and_expiry() -> None:
    async with cluster_out_of_service() as cluster:
        now = cluster.clock.wall()
        await broken(cluster, HOUR)
        (event,) = logged(cluster, "break-glass.started")
        assert (event.device, event.actor) == (cluster.gpu().id, WHO)
        assert event.fields == {
            "reason": WHY,
            "duration_seconds": HOUR,
            "expires_at": now + HOUR,
            "state": "quarantined",
        }
        override = cluster.record().break_glass
        assert override is not None
        assert (override.until, override.reason, override.actor) == (now + HOUR, WHY, WHO)


@in_virtual_time
async def test_break_glass_override_applies_to_its_device_only() -> None:
    async with cluster_out_of_service(2) as cluster:
        cluster.gpu(1).xids[79] = 1
        cluster.signal(1)
        await cluster.until(lambda: cluster.record(1).health is Health.QUARANTINED)
        await broken(cluster)
        assert [each.advertised for each in cluster.node.view().devices] == [True, False]
        with pytest.raises(Quarantined):
            await cluster.node.reserve([cluster.gpu(1).id])


@in_virtual_time
async def test_condemned_device_is_granted_under_a_break_glass_override() -> None:
    async with cluster_out_of_service() as cluster:
        cluster.gpu().clear_faults()
        cluster.gpu().wont_clear = True
        await cluster.node.actions.unquarantine("0", "it looked well", WHO)
        await cluster.until(lambda: cluster.record().health is Health.CONDEMNED, within=600.0)
        await broken(cluster)
        assert view(cluster).advertised
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.basis is Basis.BREAK_GLASS


@in_virtual_time
async def test_healthy_device_under_a_break_glass_override_is_granted_on_its_certificate() -> None:
    """A certificate is used if there is one: the override only replaces what is missing."""
    async with leisurely_cluster(1) as cluster:
        await broken(cluster)
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_no_process_is_killed_and_no_device_is_reset_under_a_break_glass_override() -> None:
    async with leisurely_cluster(1) as cluster:
        tenant = await started(cluster)
        await cluster.run(3.0)
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        await broken(cluster, HOUR)
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        cluster.kubelet.delete(tenant)
        await cluster.run(HOUR / 2)
        assert (child.alive, cluster.gpu().resets) == (True, 0)
        await cluster.run(HOUR)
        assert cluster.record().state == "clean"
        assert (child.alive, cluster.gpu().resets) == (False, 1)


# -- after it has ended ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_restart_after_a_grant_by_break_glass_override_needs_a_certificate() -> None:
    """The second pod was started on the bytes of the first; the exception for its own restart no longer applies."""
    async with leisurely_cluster(1) as cluster:
        first = await started(cluster, "acme", "train-0")
        cluster.kubelet.force_delete(first, lives_on=300.0)
        await broken(cluster, 60.0)
        second = await cluster.admit("acme", "train-1")
        assert second is not None
        await cluster.until(lambda: second.running)
        grant = cluster.record().last_grant
        assert grant is not None
        assert (grant.basis, grant.pod) == (Basis.BREAK_GLASS, second.pod)
        assert cluster.record().previous_assignment is None
        await cluster.run(400.0)  # the first pod is gone, and the override has expired
        assert first.first is not None
        assert not first.first.alive
        cluster.write_all(second)
        cluster.kubelet.exit(second, again=True)
        await cluster.until(lambda: second.starts == 2)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_pod_granted_by_break_glass_override_keeps_the_device_and_a_scrub_follows_the_pod() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        tenant = await started(cluster)
        await cluster.run(HOUR + 60.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert not view(cluster).advertised
        cluster.kubelet.delete(tenant)
        cluster.gpu().clear_faults()
        await cluster.node.actions.unquarantine("0", "the board was changed", WHO)
        await cluster.until(lambda: cluster.record().state == "clean", within=300.0)
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_expiry_of_a_break_glass_override_is_audited_with_the_operator_that_requested_it() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        await cluster.run(HOUR + 60.0)
        (event,) = logged(cluster, "break-glass.ended")
        assert (event.device, event.actor) == (cluster.gpu().id, "service")
        assert WHO in str(event.fields["message"])
        assert HOUR <= event.at - logged(cluster, "break-glass.started")[0].at < HOUR + 15.0


@in_virtual_time
async def test_operator_may_end_a_break_glass_override_early() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        shown = await cluster.node.actions.break_glass("0", 0, "the trial is over", "uid:7")
        assert not shown.advertised
        assert cluster.record().break_glass is None
        (event,) = logged(cluster, "break-glass.ended")
        assert event.actor == "uid:7"
        assert "the trial is over" in str(event.fields["message"])
        await refused(cluster)
        await cluster.run(HOUR + 60.0)
        assert len(logged(cluster, "break-glass.ended")) == 1


@in_virtual_time
async def test_repeated_break_glass_override_restarts_its_duration() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        await cluster.run(HOUR / 2)
        await broken(cluster, HOUR)
        await cluster.run(HOUR * 3 / 4)
        assert view(cluster).advertised
        await cluster.run(HOUR / 2)
        assert not view(cluster).advertised
        assert len(logged(cluster, "break-glass.started")) == 2
        assert len(logged(cluster, "break-glass.ended")) == 1


@in_virtual_time
async def test_break_glass_override_that_is_renewed_as_it_expires_is_not_ended() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        health = cluster.controller().health
        cluster.pause(HOUR)
        await asyncio.gather(health.break_glass(HOUR, WHY, WHO), health.end_expired_break_glass())
        assert cluster.record().break_glass is not None


# -- over restarts -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_service_restart_neither_ends_nor_prolongs_a_break_glass_override() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        await restarted(cluster)
        assert view(cluster).advertised
        tenant = await admitted(cluster)
        (granted,) = await request_start(cluster, tenant)
        assert granted.basis is Basis.BREAK_GLASS
        cluster.kubelet.delete(tenant)
        await cluster.run(HOUR - 120.0)
        await restarted(cluster)
        assert view(cluster).advertised
        await cluster.run(180.0)
        assert len(logged(cluster, "break-glass.ended")) == 1
        await refused(cluster)


@in_virtual_time
async def test_break_glass_override_that_expired_while_the_service_was_down_has_ended_when_it_starts() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        cluster.kill()
        await cluster.run(HOUR + 1.0)
        await cluster.start_service()
        await refused(cluster)
        await cluster.until(lambda: cluster.record().break_glass is None, within=10.0)
        assert len(logged(cluster, "break-glass.ended")) == 1


@in_virtual_time
async def test_full_ledger_does_not_prolong_an_expired_break_glass_override() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        await cluster.run(HOUR - 10.0)
        cluster.ledger_store.refuses = "no space left"
        await cluster.run(60.0)
        with pytest.raises(Quarantined):
            await cluster.node.reserve([cluster.gpu().id])
        cluster.ledger_store.refuses = None
        await cluster.until(lambda: cluster.record().break_glass is None, within=10.0)
        await refused(cluster)


# -- what an operator may not order ------------------------------------------------------------------------------------


@in_virtual_time
async def test_policy_limits_the_duration_of_a_break_glass_override() -> None:
    short = replace(DEFAULT, limits=replace(Limits(), break_glass=600.0))
    async with cluster_out_of_service(policy=short) as cluster:
        with pytest.raises(Refused, match=r"at most 10 min, not 601 s \(limits\.breakGlass\)"):
            await broken(cluster, 601.0)
        assert cluster.record().break_glass is None
        assert (await broken(cluster, 600.0)).advertised


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_starting_and_ending_a_break_glass_override_need_a_reason(reason: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with cluster_out_of_service() as cluster:
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await cluster.node.actions.break_glass("0", HOUR, reason, WHO)
            await broken(cluster)
            with pytest.raises(InvalidRequest, match="needs a reason"):
                await cluster.node.actions.break_glass("0", 0, reason, WHO)
            assert view(cluster).advertised

    play()


@in_virtual_time
async def test_break_glass_override_of_an_unknown_device_and_ending_an_absent_override_are_refused() -> None:
    async with cluster_out_of_service() as cluster:
        with pytest.raises(InvalidRequest):
            await cluster.node.actions.break_glass("7", HOUR, WHY, WHO)
        with pytest.raises(Refused, match="no active break-glass override to end"):
            await cluster.node.actions.break_glass("0", 0, WHY, WHO)
        assert logged(cluster, "break-glass.started") == logged(cluster, "break-glass.ended") == []


@in_virtual_time
async def test_device_quarantined_by_an_operator_gets_no_break_glass_override_before_its_release() -> None:
    async with leisurely_cluster(1) as cluster:
        await cluster.node.actions.quarantine("0", "kept for the lab", "uid:7")
        with pytest.raises(Refused, match="uid:7: release it first"):
            await broken(cluster)
        assert not view(cluster).advertised
        assert cluster.record().break_glass is None


@in_virtual_time
async def test_device_released_by_an_operator_may_get_a_break_glass_override() -> None:
    async with leisurely_cluster(1) as cluster:
        await cluster.node.actions.quarantine("0", "kept for the lab", "uid:7")
        holder = cluster.process_table.start(None, "host", "host")
        cluster.process_table.open(holder, cluster.gpu().id)  # prevents its probation from starting
        await cluster.node.actions.unquarantine("0", "the lab is done", "uid:7")
        assert cluster.record().health is Health.PROBATION
        assert (await broken(cluster)).advertised


@in_virtual_time
async def test_operator_quarantine_ends_a_break_glass_override() -> None:
    async with cluster_out_of_service() as cluster:
        await broken(cluster, HOUR)
        await cluster.node.actions.quarantine("0", "it burns", "uid:7")
        assert cluster.record().break_glass is None
        (event,) = logged(cluster, "break-glass.ended")
        assert event.actor == "uid:7"
        assert len(logged(cluster, "operator.quarantined")) == 1
        await refused(cluster)


# -- what it does not change -------------------------------------------------------------------------------------------


@in_virtual_time
async def test_break_glass_override_leaves_health_cause_and_quarantine_history_unchanged() -> None:
    async with cluster_out_of_service() as cluster:
        before = cluster.record()
        await broken(cluster, 60.0)
        await cluster.run(120.0)
        after = cluster.record()
        assert (after.health, after.cause, after.recent_quarantines) == (
            before.health,
            before.cause,
            before.recent_quarantines,
        )
        assert after.hygiene in (Hygiene.CLEAN, Hygiene.DIRTY)


@in_virtual_time
async def test_start_under_a_break_glass_override_waits_for_a_running_scrub() -> None:
    """Even with an override, a device is not handed over while an eraser runs."""
    async with leisurely_cluster(1) as cluster:
        tenant: Tenant = await started(cluster)
        cluster.gpu().slow = 4.0
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: bool(cluster.erasers.running))
        await broken(cluster)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        await cluster.until(lambda: follower.running)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
