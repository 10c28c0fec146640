"""Starts under another pod's name, calls that no kubelet made, and a kubelet whose list flickers or is missing."""

from __future__ import annotations

import asyncio

import pytest

from scrubber.domain.assignment import KubeletReading, Pod, PodAbsence, Trust
from scrubber.domain.errors import ScrubberError
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Policy
from scrubber.domain.record import Grant
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import STRICT, TRUSTED, admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time


def last_grant(cluster: SimulatedCluster) -> Grant:
    grant = cluster.record().last_grant
    assert grant is not None
    return grant


# -- a start under another pod's name ----------------------------------------------------------------------------------


async def started_in_the_name_of_another(cluster: SimulatedCluster) -> tuple[Proc, Tenant]:
    """The kubelet gives a pod's device to another, and still requests and starts the first: its call names only ids.

    Returns:
        The running process, and the pod to which the device was granted instead.
    """
    first = await admitted(cluster, "acme", "train-0")
    await cluster.run(1.2 - cluster.clock.monotonic() % 1.0)  # the usage check has just run
    cluster.kubelet.force_delete(first, lives_on=0.0)
    second = await admitted(cluster, "umbrella", "serve-0")
    await request_start(cluster, first)
    assert last_grant(cluster).pod == second.pod
    container = f"{first.uid}/main#1"
    proc = cluster.process_table.start(
        first.uid, container, f"acme/{container}", mounted=frozenset(first.devices), first=True
    )
    cluster.process_table.open(proc, cluster.gpu().id)
    cluster.process_table.write(proc, cluster.gpu().id)
    return proc, second


@in_virtual_time
async def test_call_whose_device_is_allocated_to_another_pod_meanwhile_is_refused() -> None:
    """The kubelet is first read after the change, so that the reading never changes: it always names the other pod."""
    async with simulated_cluster(devices=1) as cluster:
        first = await admitted(cluster, "acme", "train-0")
        cluster.kubelet.delay = 0.2
        call = request_start(cluster, first)
        await cluster.run(0.01)
        cluster.kubelet.force_delete(first, lives_on=0.0)
        second = await admitted(cluster, "umbrella", "serve-0")
        assert (await refusal_of(call)).code == "reassigned"
        cluster.kubelet.delay = 0.0
        cluster.kubelet.retry_pre_start(second)
        await cluster.until(lambda: second.running)


@pytest.mark.parametrize("seconds", [3.0, 0.3], ids=["seen-by-the-watch", "between-two-looks"])
def test_restart_after_a_start_in_another_pods_name_needs_a_certificate(seconds: float) -> None:
    @in_virtual_time
    async def follow() -> None:
        async with simulated_cluster(devices=1) as cluster:
            proc, second = await started_in_the_name_of_another(cluster)
            await cluster.run(seconds)
            cluster.process_table.end(proc)
            cluster.kubelet.retry_pre_start(second)
            await cluster.until(lambda: second.running)
            await cluster.run(0.1)
            assert last_grant(cluster).basis is Basis.CERTIFICATE
            assert cluster.gpu().cells == [""] * 4

    follow()


@in_virtual_time
async def test_sandbox_created_after_a_grant_in_another_pods_name_is_no_container_run_and_blocks_no_start() -> None:
    """The named pod has just been admitted: none of its processes existed yet."""
    async with simulated_cluster(devices=1) as cluster:
        first = await admitted(cluster, "acme", "train-0")
        await cluster.run(1.2 - cluster.clock.monotonic() % 1.0)  # the usage check has just run
        cluster.kubelet.force_delete(first, lives_on=0.0)
        second = await admitted(cluster, "umbrella", "serve-0")
        assert second.sandbox is not None
        cluster.process_table.end(second.sandbox)
        await request_start(cluster, first)
        assert last_grant(cluster).baseline == ()
        container = f"{first.uid}/main#1"
        proc = cluster.process_table.start(first.uid, container, f"acme/{container}", mounted=frozenset(first.devices))
        cluster.process_table.open(proc, cluster.gpu().id)
        cluster.process_table.write(proc, cluster.gpu().id)
        cluster.process_table.end(proc)
        cluster.kubelet.remake_sandbox(second)
        await cluster.run(5.0)
        cluster.kubelet.retry_pre_start(second)
        await cluster.until(lambda: second.running, within=60.0)
        await cluster.run(0.1)
        assert last_grant(cluster).basis is Basis.CERTIFICATE


@in_virtual_time
async def test_process_started_in_another_pods_name_is_waited_for_and_neither_signalled_nor_cleared() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc, second = await started_in_the_name_of_another(cluster)
        cluster.kubelet.retry_pre_start(second)
        await cluster.run(60.0)
        assert proc.alive
        assert cluster.gpu().cells == [proc.label] * 4
        assert not second.running
        cluster.process_table.end(proc)
        await cluster.until(lambda: second.running, within=120.0)


# -- calls that no kubelet made ----------------------------------------------------------------------------------------


async def quietly(call: asyncio.Task[object]) -> None:
    try:
        await call
    except ScrubberError:
        return


@pytest.mark.parametrize("policy", [DEFAULT, STRICT, TRUSTED], ids=["default", "strict", "trusted"])
def test_forged_kubelet_calls_clear_and_signal_no_tenant_and_expose_no_other_tenants_bytes(
    policy: Policy,
) -> None:
    @in_virtual_time
    async def call_in() -> None:
        async with simulated_cluster(policy=policy) as cluster:
            tenant = await started(cluster)
            first, written = tenant.first, list(cluster.gpu().cells)
            for _ in range(20):
                hostile = asyncio.create_task(quietly(request_start(cluster, tenant, wait=1.0)))
                await cluster.node.reserve([cluster.gpu().id])
                await cluster.run(0.7)
                await hostile
            assert first is not None
            assert first.alive
            assert cluster.gpu().cells == written
            cluster.kubelet.delete(tenant)
            follower = await started(cluster, "umbrella", "serve-0")
            assert follower.running

    call_in()


@pytest.mark.parametrize("starts_after", [0.4, 3.0], ids=["within-a-scrub", "after-it"])
@pytest.mark.parametrize("policy", [DEFAULT, STRICT, TRUSTED], ids=["default", "strict", "trusted"])
def test_forged_kubelet_calls_between_a_grant_and_its_first_process_clear_and_signal_no_tenant(
    policy: Policy, starts_after: float
) -> None:
    """A scrub may have begun by then. Its fence makes the container or the scrub fail: no data of others is read."""

    @in_virtual_time
    async def call_in() -> None:
        cluster = SimulatedCluster(1, policy)
        await cluster.start_service()
        await cluster.until(cluster.settled)
        earlier = await started(cluster, "umbrella", "serve-0")
        cluster.kubelet.delete(earlier)
        tenant = await cluster.admit("acme", "train-0", starts_after=starts_after)
        assert tenant is not None
        await cluster.until(lambda: tenant.starting)
        hostile = asyncio.create_task(quietly(request_start(cluster, tenant, wait=1.0)))
        await cluster.until(lambda: tenant.running)
        first = tenant.first
        await hostile
        await cluster.run(30.0)
        assert [each for each in cluster.laws.breaches if ": 1: " in each or "signalled" in each] == []
        assert first is not None
        assert first.alive
        cluster.kubelet.delete(tenant)
        await cluster.until(cluster.settled)
        await cluster.end()

    call_in()


# -- a kubelet that flickers, or does not answer -----------------------------------------------------------------------


def test_two_absences_within_one_flicker_of_the_kubelets_list_count_as_one() -> None:
    gone = Pod("acme", "train-0", "uid-1")
    absence = PodAbsence()
    for at in (10.0, 10.02, 10.04, 10.1, 10.19):
        absence = absence.with_reading(KubeletReading(Trust.TRUSTED, started_at=at), gone)
    assert not absence.proved
    assert absence.with_reading(KubeletReading(Trust.TRUSTED, started_at=10.25), gone).proved


@in_virtual_time
async def test_pod_that_flickers_while_another_pod_waits_for_its_device_loses_no_process() -> None:
    """Between two starts only a child of the pod lives, so that one more absence would prove it a leftover."""
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        await cluster.run(40.0)  # no start on its grant is pending any more
        assert tenant.first is not None
        assert tenant.worker is not None
        child = cluster.process_table.fork(tenant.first)
        tenant.worker.cancel()
        cluster.kubelet.exit(tenant, again=True)
        waits = await admitted(cluster)
        for _ in range(4):
            tenant.gone_since = cluster.clock.monotonic()
            call = asyncio.create_task(quietly(request_start(cluster, waits, wait=0.12)))
            await cluster.run(0.15)
            tenant.gone_since = None
            await call
            await cluster.run(1.2)  # the usage check finds it again
        assert child.alive


@in_virtual_time
async def test_unauthorized_use_is_found_within_two_seconds_although_the_kubelet_hangs() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster)
        cluster.kubelet.delay = 1_000.0
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        await cluster.run(2.0)
        assert any(event.name == "unauthorized.use.detected" for event in cluster.ledger_store.events)
        assert not cluster.record().exclusive_use


@in_virtual_time
async def test_certificate_of_a_device_used_while_the_kubelet_hangs_is_voided() -> None:
    async with simulated_cluster() as cluster:
        cluster.kubelet.delay = 1_000.0
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu().id)
        await cluster.run(2.0)
        assert cluster.record().certificate is None


# -- a pod that waits for itself ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_plain_container_of_a_pod_does_not_block_the_restart_of_its_gpu_container() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        tenant = await started(cluster)
        cluster.process_table.start(tenant.uid, f"{tenant.uid}/sidecar#1", "acme/sidecar")
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.running, within=60.0)
        fast = cluster.ledger_store.certificates[last_grant(cluster).certificate or ""]
        slow = cluster.ledger_store.certificates[fast.rests_on or ""]
        assert any("pod's other containers" in each for each in slow.not_covered)


@in_virtual_time
async def test_refusal_names_another_container_of_the_pod_that_holds_the_device() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        tenant = await started(cluster)
        mounted = frozenset(tenant.devices)
        sidecar = cluster.process_table.start(tenant.uid, f"{tenant.uid}/sidecar#1", "acme/sidecar", mounted=mounted)
        cluster.process_table.open(sidecar, cluster.gpu().id)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.run(60.0)
        assert not tenant.running
        assert any(
            f"PID {sidecar.pid} (python train.py) in container {sidecar.container}" in str(refusal)
            for refusal in tenant.refusals
        )
        cluster.process_table.end(sidecar)
        await cluster.until(lambda: tenant.running, within=90.0)
