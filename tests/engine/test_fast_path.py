"""What a start on checks alone must not ignore: holders without a process, warnings, and observe mode for both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import Grant
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.device.occupancy import Occupancy
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.start_requests import STRICT, TRUSTED, started
from tests.simulation.timeline import in_virtual_time

OBSERVE = Enforcement.OBSERVE


def last_grant(cluster: SimulatedCluster) -> Grant:
    grant = cluster.record().last_grant
    assert grant is not None
    return grant


@in_virtual_time
async def test_restart_on_a_device_whose_memory_no_process_explains_starts_after_a_quarantine_and_a_reset() -> None:
    """No process will ever release the memory: the device is quarantined, is reset, and the pod starts on it."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        cluster.gpu().ghost = True
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=60.0)
        cause = cluster.record().cause
        assert cause is not None
        assert cause.code == "untraceable-holder"
        await cluster.until(lambda: tenant.running, within=120.0)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_time_before_a_device_was_free_does_not_count_towards_being_held_without_a_process() -> None:
    async with simulated_cluster(devices=1) as cluster:
        occupancy = cluster.controller().occupancy
        assert not await occupancy.is_held_without_process()
        await cluster.run(DEFAULT.limits.unknown_pod_idle_period / 2)
        assert not await occupancy.is_held()
        await cluster.run(DEFAULT.limits.unknown_pod_idle_period)
        assert not await occupancy.is_held_without_process()


@in_virtual_time
async def test_restart_waits_for_memory_that_the_driver_still_releases_and_needs_no_certificate_then() -> None:
    """A driver needs a moment to release the memory of a dead process: until then it is no ghost holder."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        await cluster.run(2.0)
        cluster.gpu().ghost = True
        cluster.kubelet.exit(tenant, again=True)
        await cluster.run(0.5)
        cluster.gpu().ghost = False
        await cluster.until(lambda: tenant.running, within=5.0)
        assert last_grant(cluster).basis is Basis.SAME_CONTAINER


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "found-by-the-checks"])
def test_restart_on_a_device_with_a_driver_warning_needs_a_certificate(reported: bool) -> None:
    @in_virtual_time
    async def warn() -> None:
        async with simulated_cluster(devices=1) as cluster:
            tenant = await started(cluster)
            cluster.write_all(tenant)
            cluster.gpu().celsius = 120
            if reported:
                cluster.signal(0)
                await cluster.run(0.1)
            cluster.kubelet.exit(tenant, again=True)
            await cluster.until(lambda: tenant.starts == 2)
            assert last_grant(cluster).basis is Basis.CERTIFICATE
            assert cluster.gpu().cells == [""] * 4

    warn()


# -- observe mode ------------------------------------------------------------------------------------------------------


async def observed(policy: Policy) -> SimulatedCluster:
    cluster = SimulatedCluster(1, replace(policy, enforcement=OBSERVE))
    await cluster.start_service()
    await cluster.until(cluster.settled)
    return cluster


@in_virtual_time
async def test_observing_policy_allows_a_restart_while_the_device_is_held() -> None:
    cluster = await observed(DEFAULT)
    tenant = await started(cluster)
    cluster.gpu().ghost = True
    cluster.kubelet.exit(tenant, again=True)
    await cluster.until(lambda: tenant.running, within=5.0)
    assert tenant.refusals == []
    await cluster.end()


@in_virtual_time
async def test_observing_policy_with_an_exception_allows_a_start_beside_a_running_pod() -> None:
    cluster = await observed(TRUSTED)
    first = await started(cluster)
    cluster.kubelet.force_delete(first, lives_on=300.0)
    second = await cluster.admit("acme", "train-1")
    assert second is not None
    await cluster.until(lambda: second.running, within=5.0)
    assert first.first is not None
    assert first.first.alive
    await cluster.end()


@in_virtual_time
async def test_observing_policy_with_an_exception_kills_no_leftover_process() -> None:
    cluster = await observed(TRUSTED)
    first = await started(cluster)
    await cluster.run(3.0)
    assert first.first is not None
    child = cluster.process_table.fork(first.first)
    cluster.kubelet.delete(first)
    second = await cluster.admit("acme", "train-1")
    assert second is not None
    await cluster.until(lambda: second.running, within=5.0)
    assert child.alive
    assert cluster.record().hygiene is Hygiene.IN_USE
    await cluster.end()


@in_virtual_time
async def test_policy_change_in_the_last_moment_of_a_hand_over_is_applied_to_that_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        await cluster.run(2.0)
        controller, is_held = cluster.controller(), Occupancy.is_held

        async def held(self: Occupancy) -> bool:
            if controller.state.lock.locked():  # the last check, before the grant is written
                cluster.policy = STRICT
            return await is_held(self)

        monkeypatch.setattr(Occupancy, "is_held", held)
        before = last_grant(cluster).sequence
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: cluster.policy is STRICT and cluster.record().grant_sequence > before)
        assert last_grant(cluster).basis is Basis.CERTIFICATE
        assert controller.state.record.grant_sequence == before + 1
