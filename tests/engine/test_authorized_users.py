"""Processes that never count as unauthorized users, and effects that the search for them must not have."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from scrubber.domain.device import Device
from scrubber.domain.evidence import Outcome, ScrubTrigger
from scrubber.domain.policy import Enforcement, Limits, UnauthorizedUseAction
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.telemetry import Holder, HolderKind
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Proc
from tests.simulation.sharing import shared_device_cluster
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time


def unauthorized_use_count(cluster: SimulatedCluster) -> int:
    assert cluster.journal is not None
    return sum(event.name == "unauthorized.use.detected" for event in cluster.journal.events)


def of_the_host(cluster: SimulatedCluster, pod: str | None = None) -> Proc:
    proc = cluster.process_table.start(pod, f"{pod or 'host'}/x#1", "host/x/x#1", mounted=frozenset({cluster.gpu().id}))
    cluster.process_table.open(proc, cluster.gpu().id)
    return proc


@in_virtual_time
async def test_daemon_named_by_the_administrator_may_use_every_device() -> None:
    end = replace(
        DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=5.0)
    )
    async with simulated_cluster(devices=1, policy=end) as cluster:
        await started(cluster)
        assert cluster.service is not None
        holders = cluster.service.dependencies.holders
        exporter = Holder(4242, 1, HolderKind.INFRASTRUCTURE, "dcgm-exporter")
        list_users = holders.list_users

        async def users(device: Device) -> tuple[Holder, ...]:
            return (exporter, *await list_users(device))

        holders.list_users = users  # type: ignore[method-assign]
        await cluster.run(30.0)
        assert unauthorized_use_count(cluster) == 0
        assert not cluster.record().contaminated


@in_virtual_time
async def test_tenant_process_read_without_its_pod_once_is_not_an_unauthorized_user() -> None:
    """Its pod cannot be read at times (as during ``execve``), while a real unauthorized user causes more inspections."""
    async with simulated_cluster(devices=2) as cluster:
        other = await started(cluster, "acme", "train-1", 1)
        tenant = await started(cluster)
        assert cluster.service is not None
        assert tenant.first is not None
        mine, looks = tenant.first.pid, count(1)
        containers = cluster.service.dependencies.containers
        uid_of = containers.pod_uid_of

        async def now_and_then(pid: int) -> str | None:
            return None if pid == mine and next(looks) % 2 == 0 else await uid_of(pid)

        containers.pod_uid_of = now_and_then  # type: ignore[method-assign]
        unauthorized = of_the_host(cluster, other.uid)
        await cluster.run(5.0)
        assert next(looks) > 4
        assert cluster.journal is not None
        reported_pids = {
            event.fields["pid"] for event in cluster.journal.events if event.name == "unauthorized.use.detected"
        }
        assert reported_pids == {unauthorized.pid}


@pytest.mark.parametrize("ungranted", [UnauthorizedUseAction.QUARANTINE, UnauthorizedUseAction.KILL])
def test_observing_policy_logs_unauthorized_use_and_takes_no_action(
    ungranted: UnauthorizedUseAction,
) -> None:
    policy = replace(
        DEFAULT,
        unauthorized_use=ungranted,
        enforcement=Enforcement.OBSERVE,
        limits=replace(Limits(), leftover_grace_period=5.0),
    )

    @in_virtual_time
    async def observe() -> None:
        async with simulated_cluster(devices=2, policy=policy) as cluster:
            other = await started(cluster, "acme", "train-1", 1)
            await started(cluster)
            proc = of_the_host(cluster, other.uid)
            await cluster.run(30.0)
            assert unauthorized_use_count(cluster) == 1
            assert proc.alive
            assert cluster.record().health is Health.HEALTHY

    observe()


@in_virtual_time
async def test_device_is_not_inspected_while_its_memory_is_cleared() -> None:
    """The inspection opens the device: an eraser that it disturbs starts again, and would never finish."""
    async with simulated_cluster(devices=1) as cluster:
        assert cluster.service is not None
        holders = cluster.service.dependencies.holders
        disturbed: list[str] = []

        held_by, used_by = holders.is_held, holders.list_users

        async def held(device: Device) -> bool:
            disturbed.extend(cluster.erasers.running)
            return await held_by(device)

        async def users(device: Device) -> tuple[Holder, ...]:
            disturbed.extend(cluster.erasers.running)
            return await used_by(device)

        holders.is_held, holders.list_users = held, users  # type: ignore[method-assign]
        cluster.gpu().slow = 4.0
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.PASSED
        assert disturbed == []
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_shared_start_beside_a_pod_that_was_started_without_a_grant_is_refused() -> None:
    """Its pod belongs to the same tenant, and the device was not proved clean before it."""
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        unasked = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        second_pod = await cluster.admit_shares("acme", "train-2", cluster.share(2), starts=False)
        cluster.use(cluster.gpu(), unasked.uid)
        refusal = await cluster.refused(second_pod, wait=0.05)
        assert refusal.code == "sharing-not-allowed"
        assert "without a grant" in str(refusal)
