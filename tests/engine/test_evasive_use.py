"""Unauthorized users that evade the detection, and effects that handling them must never have on others."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.device import Device
from scrubber.domain.evidence import ScrubTrigger
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.policy import Limits, UnauthorizedUseAction
from scrubber.domain.record import Grant
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.usage import UseKind, classify_use, may_be_killed
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

END = replace(
    DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=10.0)
)
QUARANTINE = replace(DEFAULT, unauthorized_use=UnauthorizedUseAction.QUARANTINE)


def intruder(cluster: SimulatedCluster, pod: str | None = None, device: int = 0) -> Proc:
    """Start a process that opens a device without a grant: one of the host, or of a (privileged) pod."""
    gpu = cluster.gpu(device).id
    container = f"{pod}/other#1" if pod else "host/miner#1"
    proc = cluster.process_table.start(pod, container, f"x/{container}", mounted=frozenset({gpu}))
    cluster.process_table.open(proc, gpu)
    return proc


def logged_count(cluster: SimulatedCluster, name: str = "unauthorized.use.detected") -> int:
    assert cluster.journal is not None
    return sum(event.name == name for event in cluster.journal.events)


async def restarted(cluster: SimulatedCluster, tenant: Tenant) -> Grant:
    """Restart the tenant's container and return the grant of that start."""
    starts = tenant.starts
    cluster.kubelet.exit(tenant, again=True)
    await cluster.until(lambda: tenant.starts > starts)
    grant = cluster.record().last_grant
    assert grant is not None
    return grant


# -- unauthorized use after similar use was logged -------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_use_voids_exclusive_use_although_similar_use_was_logged_a_moment_ago() -> None:
    """A host process shows itself first, so that the next one, within the minute, is not logged as new."""
    async with simulated_cluster(devices=1) as cluster:
        decoy = intruder(cluster)
        await cluster.run(2.0)
        cluster.process_table.end(decoy)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        tenant = await started(cluster)
        proc = intruder(cluster)
        await cluster.run(2.0)
        assert logged_count(cluster) == 2
        assert not cluster.record().exclusive_use
        assert cluster.record().contaminated
        cluster.process_table.end(proc)
        assert (await restarted(cluster, tenant)).basis is Basis.CERTIFICATE


@in_virtual_time
async def test_unauthorized_use_that_could_not_be_stored_is_recorded_once_the_disk_has_room() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        cluster.ledger_store.refuses = "the disk is full"
        intruder(cluster)
        await cluster.run(3.0)
        cluster.ledger_store.refuses = None
        await cluster.run(2.0)
        assert logged_count(cluster) == 1
        assert cluster.record().contaminated
        assert tenant.running


@in_virtual_time
async def test_unauthorized_use_that_could_not_be_stored_voids_the_certificate_after_the_use_has_ended() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.ledger_store.refuses = "the disk is full"
        proc = intruder(cluster)
        cluster.process_table.write(proc, cluster.gpu().id)
        await cluster.run(3.0)
        cluster.process_table.end(proc)
        cluster.ledger_store.refuses = None
        await started(cluster)


@pytest.mark.parametrize("look", [1, 2], ids=["by-the-checks", "by-the-look-before-the-grant"])
def test_brief_use_found_while_a_grant_is_prepared_voids_the_certificate(
    look: int,
) -> None:
    @in_virtual_time
    async def use_it() -> None:
        async with simulated_cluster(devices=1) as cluster:
            assert cluster.service is not None
            holders, looks = cluster.service.dependencies.holders, count(1)
            tenant = await admitted(cluster)
            await cluster.run(1.2 - cluster.clock.monotonic() % 1.0)  # the usage check has just run
            is_held = holders.is_held

            async def held(device: Device) -> bool:
                if next(looks) != look:
                    return await is_held(device)
                proc = intruder(cluster)
                cluster.process_table.write(proc, device.id)
                found = await is_held(device)
                cluster.process_table.end(proc)
                return found

            holders.is_held = held  # type: ignore[method-assign]
            await request_start(cluster, tenant)
            assert next(looks) > 3
            assert cluster.gpu().cells == [""] * 4

    use_it()


# -- unauthorized users that change during the check -------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_pod_that_passes_the_device_between_processes_is_killed() -> None:
    """No process of the pod lives as long as the grace period."""
    async with simulated_cluster(policy=END) as cluster:
        other = await started(cluster, "acme", "train-1", 1)
        proc = intruder(cluster, other.uid)
        waiting = await cluster.admit("acme", "train-0")
        assert waiting is not None
        for _ in range(20):
            await cluster.run(6.0)
            if not proc.alive:
                break
            heir = intruder(cluster, other.uid)
            cluster.process_table.end(proc)
            proc = heir
        assert not proc.alive
        assert other.first is not None
        assert other.first.alive
        await cluster.until(lambda: waiting.running, within=100.0)


@in_virtual_time
async def test_unauthorized_process_that_keeps_changing_its_name_is_logged_once() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await started(cluster)
        proc = intruder(cluster)
        for number in range(250):
            proc.command = f"kworker/{number}"
            await cluster.run(0.01)
        assert logged_count(cluster) == 1


@in_virtual_time
async def test_more_unauthorized_processes_than_the_service_remembers_are_all_killed() -> None:
    async with simulated_cluster(policy=END) as cluster:
        other = await started(cluster, "acme", "train-1", 1)
        crowd = [intruder(cluster, other.uid) for _ in range(1100)]
        await cluster.run(40.0)
        assert not any(proc.alive for proc in crowd)


# -- effects on others -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unkillable_unauthorized_processes_do_not_void_the_certificate_of_another_device() -> None:
    async with simulated_cluster(devices=3, policy=END) as cluster:
        other = await started(cluster, "acme", "train-1", 1)
        before = cluster.record(2).certificate
        assert before is not None
        for _ in range(10):
            intruder(cluster, other.uid).killable = False
        await cluster.run(120.0)
        assert cluster.record(2).certificate == before


@in_virtual_time
async def test_device_with_recurring_unauthorized_use_is_never_condemned() -> None:
    """A process that may open a device must not be able to force an operator to intervene."""
    async with simulated_cluster(devices=1, policy=QUARANTINE) as cluster:
        for _ in range(8):
            proc = intruder(cluster)
            await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=3.0)
            cluster.process_table.end(proc)
            await cluster.until(lambda: cluster.record().health is Health.PROBATION, within=4000.0)
        assert cluster.record().health is not Health.CONDEMNED
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=4000.0)


# -- adoption during other operations ----------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_found_during_a_scrub_is_not_adopted() -> None:
    """A scrub may begin between the check that found the pod and its adoption."""
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().slow = 30.0
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.until(lambda: bool(cluster.erasers.running))
        pod = Pod("acme", "sudden-0", "uid-7")
        await cluster.controller().occupancy.adopt(Assignment(pod, "main", frozenset({cluster.gpu().id})))
        assert cluster.record().hygiene is Hygiene.SCRUBBING
        assert cluster.record().open_grants == ()
        cluster.gpu().slow = 1.0
        await job.wait_without_urgency()


# -- pods that the kubelet does not list yet ---------------------------------------------------------------------------

LATE = Pod("acme", "late-0", "uid-9")
EARLIER = Grant(
    1, Assignment(Pod("acme", "first-0", "uid-1"), "main", frozenset({"gpu"})), HandOverKind.UNKNOWN, 0.0, "b"
)
NOT_COME_TO = KubeletReading(Trust.TRUSTED, not_yet_listed=frozenset({LATE}))


def test_use_by_a_pod_that_a_restarted_kubelet_may_not_list_yet_is_undetermined_on_a_never_granted_device() -> None:
    assert classify_use(LATE.uid, "gpu", (), NOT_COME_TO) is UseKind.UNDETERMINED
    assert classify_use("uid-8", "gpu", (), NOT_COME_TO) is UseKind.UNAUTHORIZED
    assert classify_use(LATE.uid, "gpu", (), KubeletReading(Trust.TRUSTED)) is UseKind.UNAUTHORIZED


def test_unauthorized_pod_on_a_granted_device_is_not_killed_while_the_kubelets_list_may_be_incomplete() -> None:
    assert classify_use(LATE.uid, "gpu", (EARLIER,), NOT_COME_TO) is UseKind.UNAUTHORIZED
    assert not may_be_killed(LATE.uid, "gpu", (EARLIER,), NOT_COME_TO)
    assert may_be_killed(LATE.uid, "gpu", (EARLIER,), KubeletReading(Trust.TRUSTED))


@in_virtual_time
async def test_unauthorized_process_is_not_killed_by_a_kubelet_list_older_than_the_process_was_observed() -> None:
    async with simulated_cluster(policy=END) as cluster:
        assert cluster.service is not None
        pods = cluster.node.pods
        other = await started(cluster, "acme", "train-1", 1)
        old = pods.reading
        proc = intruder(cluster, other.uid)
        cluster.kubelet.delay = 1000.0
        for _ in range(60):
            await cluster.run(0.5)
            pods.reading = old
        assert proc.alive


@in_virtual_time
async def test_unauthorized_pod_takes_no_device_out_of_service_while_the_kubelets_list_cannot_be_read() -> None:
    async with simulated_cluster(policy=QUARANTINE) as cluster:
        other = await started(cluster, "acme", "train-1", 1)
        await started(cluster)
        cluster.kubelet.trust = Trust.UNREADABLE
        intruder(cluster, other.uid)
        await cluster.run(5.0)
        assert logged_count(cluster) == 1
        assert cluster.record().health is Health.HEALTHY
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=3.0)
