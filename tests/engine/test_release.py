"""Release: a device is scrubbed as soon as its pod is done, never sooner, and the next pod needs no second scrub."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import PathKind, ScrubTrigger
from scrubber.domain.policy import Limits
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene
from scrubber.ports.record import Event
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.service import Pace
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

UNTRUSTED = [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART]


async def init_running(cluster: SimulatedCluster) -> Tenant:
    tenant = await cluster.admit("acme", "train-0", init=True)
    assert tenant is not None
    await cluster.until(lambda: tenant.running)
    cluster.write_all(tenant)
    return tenant


def backs_off(tenant: Tenant) -> None:
    """Make the kubelet start nothing of the pod for a long time."""
    assert tenant.worker is not None
    tenant.worker.cancel()


async def kept(cluster: SimulatedCluster, seconds: float) -> DeviceRecord:
    """Return the device's record after ``seconds`` in which it was neither released nor scrubbed."""
    scrubs, cells = scrubbed(cluster), list(cluster.gpu().cells)
    await cluster.run(seconds)
    assert cluster.record().hygiene is Hygiene.IN_USE
    assert (scrubbed(cluster), cluster.gpu().cells) == (scrubs, cells)
    return cluster.record()


def scrubbed(cluster: SimulatedCluster) -> int:
    """Return how many scrubs of the first device have started."""
    return sum(
        each.device == cluster.gpu().id and each.path is PathKind.SLOW for each in cluster.ledger_store.scrubs.values()
    )


# -- never sooner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", Trust)
def test_device_is_not_released_while_an_init_container_runs(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with simulated_cluster() as cluster:
            await init_running(cluster)
            cluster.kubelet.trust = trust
            await kept(cluster, 120.0)

    watch()


@pytest.mark.parametrize("trust", Trust)
def test_device_is_not_released_between_an_init_container_and_the_next_container(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with simulated_cluster() as cluster:
            tenant = await init_running(cluster)
            cluster.kubelet.trust = trust
            backs_off(tenant)
            cluster.kubelet.exit(tenant, again=False)
            await kept(cluster, 120.0)
            cluster.kubelet.trust = Trust.TRUSTED
            cluster.kubelet.retry_pre_start(tenant)
            await cluster.until(lambda: tenant.running and tenant.container == "main")

    watch()


@pytest.mark.parametrize("trust", UNTRUSTED)
def test_device_is_not_released_in_a_crash_loop_backoff_while_the_kubelet_is_untrusted(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with simulated_cluster() as cluster:
            tenant = await started(cluster)
            cluster.kubelet.trust = trust
            backs_off(tenant)
            cluster.kubelet.exit(tenant, again=True)
            await kept(cluster, 300.0)

    watch()


@in_virtual_time
async def test_absences_before_and_after_an_untrusted_kubelet_list_do_not_add_up_to_a_release() -> None:
    """The list lacked the pod once, then was untrusted, then contains the pod again."""
    async with simulated_cluster() as cluster:
        tenant = await started(cluster)
        backs_off(tenant)
        cluster.kubelet.exit(tenant, again=True)
        tenant.gone_since = cluster.clock.monotonic()
        await cluster.run(1.1)
        cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.run(60.0)
        tenant.gone_since = None
        cluster.kubelet.trust = Trust.TRUSTED
        await kept(cluster, 60.0)


@in_virtual_time
async def test_device_of_a_pod_adopted_between_two_of_its_containers_is_not_released() -> None:
    async with simulated_cluster() as cluster:
        tenant = await init_running(cluster)
        backs_off(tenant)
        cluster.kubelet.exit(tenant, again=False)
        cluster.kill()
        await cluster.start_service()
        await kept(cluster, 60.0)


@in_virtual_time
async def test_device_is_not_released_between_a_grant_and_its_container_although_the_sandbox_has_ended() -> None:
    async with simulated_cluster() as cluster:
        tenant = await cluster.admit("acme", "train-0", starts_after=20.0)
        assert tenant is not None
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.IN_USE)
        assert tenant.sandbox is not None
        cluster.process_table.end(tenant.sandbox)
        await kept(cluster, 10.0)


@in_virtual_time
async def test_device_is_not_released_while_a_child_outlives_its_container_and_the_sandbox() -> None:
    async with simulated_cluster() as cluster:
        tenant = await started(cluster)
        assert tenant.first is not None
        assert tenant.sandbox is not None
        child = cluster.process_table.fork(tenant.first)
        await cluster.run(2.0)
        backs_off(tenant)
        cluster.kubelet.exit(tenant, again=True)
        cluster.process_table.end(tenant.sandbox)
        await kept(cluster, 10.0)
        cluster.process_table.end(child)
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE, within=0.1)


# -- at once after the last use, and joined ----------------------------------------------------------------------------


@pytest.mark.parametrize("trust", Trust)
def test_device_is_released_when_its_pods_last_process_ends_whatever_the_kubelet_lists(trust: Trust) -> None:
    @in_virtual_time
    async def watch() -> None:
        async with simulated_cluster() as cluster:
            tenant = await started(cluster)
            await cluster.run(2.0)
            cluster.kubelet.trust = trust
            backs_off(tenant)
            cluster.kubelet.exit(tenant, again=True)
            assert tenant.sandbox is not None
            cluster.process_table.end(tenant.sandbox)
            await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE, within=0.1)

    watch()


@in_virtual_time
async def test_start_that_waits_for_an_earlier_pod_begins_its_scrub_when_that_pods_last_process_ends() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        await cluster.run(2.0)
        cluster.kubelet.force_delete(first, lives_on=5.0)
        second = await admitted(cluster)
        call = request_start(cluster, second)
        await cluster.until(lambda: first.first is None or not first.first.alive, within=6.0)
        await cluster.until(lambda: bool(cluster.erasers.running), within=0.1)
        (granted,) = await call
        assert granted.path is PathKind.SLOW


@in_virtual_time
async def test_device_of_a_pod_that_ended_before_its_container_was_identified_is_released_once_it_is() -> None:
    async with simulated_cluster() as cluster:
        tenant = await cluster.admit("acme", "train-0")
        assert tenant is not None
        cluster.kubelet.unlogged.add(tenant.uid)
        await cluster.until(lambda: tenant.running)
        cluster.kubelet.trust = Trust.UNREADABLE
        backs_off(tenant)
        cluster.kubelet.exit(tenant, again=True)
        assert tenant.sandbox is not None
        cluster.process_table.end(tenant.sandbox)
        await cluster.run(0.2)
        assert cluster.record().hygiene is Hygiene.IN_USE
        cluster.kubelet.unlogged.clear()
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE, within=0.3)


@in_virtual_time
async def test_device_is_released_in_the_same_event_when_the_start_that_waits_for_it_is_refused() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        await cluster.run(2.0)
        cluster.kubelet.force_delete(first, lives_on=60.0)
        second = await admitted(cluster)
        call = request_start(cluster, second)
        await cluster.run(5.3)
        assert cluster.controller().occupancy.has_waiting_start
        cluster.kubelet.delete(second)
        assert first.first is not None
        assert first.sandbox is not None
        for proc in (first.first, first.sandbox):
            cluster.process_table.end(proc)
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE, within=0.1)
        assert (await refusal_of(call)).code is ErrorCode.REASSIGNED


@in_virtual_time
async def test_device_is_released_at_once_when_the_start_that_its_release_was_left_to_is_cancelled() -> None:
    async with simulated_cluster(devices=1, pace=Pace(watch=8.0)) as cluster:
        first = await started(cluster)
        await cluster.run(9.0)
        cluster.kubelet.force_delete(first, lives_on=60.0)
        second = await admitted(cluster)
        call = request_start(cluster, second)
        await cluster.run(9.0)
        assert cluster.controller().occupancy.has_waiting_start
        assert first.first is not None
        assert first.sandbox is not None
        noted = cluster.controller().occupancy.next_end
        for proc in (first.first, first.sandbox):
            cluster.process_table.end(proc)
        await noted.wait()
        call.cancel()
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE, within=0.5)


@in_virtual_time
async def test_end_of_a_container_while_a_start_is_being_decided_lets_it_decide_again_at_once() -> None:
    async with simulated_cluster() as cluster:
        occupancy = cluster.controller().occupancy
        before_the_decision = occupancy.next_end
        occupancy.note_container_end()
        began = cluster.clock.monotonic()
        assert await occupancy.wait_for_end(before_the_decision, 60.0)
        assert cluster.clock.monotonic() == began


@in_virtual_time
async def test_scrub_of_a_device_whose_pod_has_ended_begins_although_the_kubelet_takes_long_to_list_pods() -> None:
    async with simulated_cluster() as cluster:
        tenant = await started(cluster)
        await cluster.run(3.0)
        cluster.kubelet.delay = 1000.0
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=5.0)


@in_virtual_time
async def test_pods_whose_ends_cannot_be_watched_are_reported_released_by_the_kubelets_list_and_tried_again() -> None:
    async with simulated_cluster(devices=3) as cluster:
        cluster.process_table.watch_error = "The end of a pod cannot be watched: no space left (see max_user_watches)."
        first, second = [await started(cluster, "acme", f"train-{number}", number) for number in range(2)]
        await cluster.run(25.0)
        assert [each.name for each in watches(cluster)] == ["pods.watch-failed"]
        assert watches(cluster)[0].fields["message"] == cluster.process_table.watch_error
        cluster.kubelet.delete(first)
        await cluster.until(lambda: cluster.record(0).hygiene is Hygiene.CLEAN, within=5.0)
        cluster.process_table.watch_error = ""
        await cluster.run(10.0)
        assert [each.name for each in watches(cluster)] == ["pods.watch-failed", "pods.watched"]
        cluster.kubelet.delete(second)
        await cluster.until(lambda: cluster.record(1).hygiene is not Hygiene.IN_USE, within=0.1)


def watches(cluster: SimulatedCluster) -> list[Event]:
    assert cluster.journal is not None
    return [each for each in cluster.journal.events if each.name.startswith("pods.watch")]


@in_virtual_time
async def test_next_pod_joins_the_scrub_that_a_release_started() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: bool(cluster.erasers.running), within=5.0)
        erasers = cluster.erasers.started
        second = await admitted(cluster)
        (granted,) = await request_start(cluster, second)
        assert cluster.erasers.started == erasers
        assert granted.path is PathKind.SLOW
        slow = [scrub for scrub in cluster.ledger_store.scrubs.values() if scrub.path is PathKind.SLOW]
        assert slow[-1].trigger is ScrubTrigger.RELEASE


@in_virtual_time
async def test_scrub_after_a_release_gets_an_eraser_slot_first_once_a_pod_waits_for_it() -> None:
    one_slot = replace(DEFAULT, limits=replace(Limits(), eraser_slots=1))
    async with simulated_cluster(devices=3, policy=one_slot) as cluster:
        pods = [await started(cluster, "acme", f"train-{number}", number) for number in range(3)]
        for each in pods:
            cluster.kubelet.delete(each)
        await cluster.until(lambda: bool(cluster.erasers.running), within=5.0)
        first, last = (number for number in range(3) if cluster.gpu(number).id not in cluster.erasers.running)
        second = await admitted(cluster, "umbrella", "serve-0", last)
        await request_start(cluster, second)
        assert cluster.record(first).hygiene is not Hygiene.CLEAN


@in_virtual_time
async def test_container_that_starts_without_a_grant_stops_the_scrub_of_its_device() -> None:
    """The fence breaks; the interrupted scrub proves nothing, and the pod is left alone."""
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.gpu().slow = 20.0
        cluster.kubelet.delete(first)
        await cluster.until(lambda: bool(cluster.erasers.running), within=5.0)
        tenant = await admitted(cluster)
        cluster.gpu().slow = 1.0
        device = cluster.gpu().id
        container = f"{tenant.uid}/main#1"
        proc = cluster.process_table.start(None, container, f"umbrella/{container}", mounted=frozenset({device}))
        cluster.process_table.open(proc, device)
        await cluster.run(10.0)
        assert not cluster.erasers.running
        assert cluster.record().certificate is None
        assert proc.alive
        assert cluster.record().grant_sequence == 1
        cluster.process_table.end(proc)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=120.0)


@in_virtual_time
async def test_scrub_after_a_release_goes_on_when_the_waiting_pod_gives_up() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: bool(cluster.erasers.running), within=5.0)
        second = await admitted(cluster)
        call = request_start(cluster, second)
        await cluster.run(0.1)
        call.cancel()
        await asyncio.wait({call})
        cluster.kubelet.delete(second)
        erasers = cluster.erasers.started
        await cluster.until(cluster.settled)
        assert cluster.record().hygiene is Hygiene.CLEAN
        assert cluster.erasers.started == erasers
