"""Grants: a hand-over from request to answer, in a simulated cluster with labelled bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from scrubber.domain.assignment import Assignment, Pod, Process, Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.record import Grant
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.ports import SimulatedContainers
from tests.simulation.start_requests import STRICT, TRUSTED, admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

# -- the basis of a grant ----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_with_a_certificate_is_granted_at_once_and_the_certificate_is_consumed() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster)
        rests_on = cluster.record().certificate
        assert rests_on is not None
        before = cluster.clock.monotonic()
        (granted,) = await request_start(cluster, tenant)
        assert cluster.clock.monotonic() - before < 0.1
        assert granted.path is PathKind.FAST
        assert cluster.ledger_store.certificates[rests_on.id].next_grant == granted.grant
        assert granted.certificate is not None
        assert cluster.ledger_store.certificates[granted.certificate].rests_on == rests_on.id
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.record().certificate is None


@in_virtual_time
async def test_next_tenant_waits_for_the_last_tenant_and_then_reads_zeros() -> None:
    async with simulated_cluster() as cluster:
        first = await started(cluster)
        cluster.kubelet.force_delete(first, lives_on=4.0)
        second = await cluster.admit("umbrella", "serve-0")
        assert second is not None
        await cluster.run(3.9)
        assert not second.running
        await cluster.until(lambda: second.running)
        await cluster.run(1.0)
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_container_that_was_granted_its_start_is_waited_for_although_its_pod_was_deleted() -> None:
    """The pod was force-deleted between the answer and the start: the runtime may still start the container."""
    async with simulated_cluster(devices=1) as cluster:
        first = await cluster.admit("acme", "train-0", starts_after=3.0)
        assert first is not None
        await cluster.until(lambda: first.starting)
        cluster.kubelet.force_delete(first, lives_on=10.0)
        second = await cluster.admit("umbrella", "serve-0")
        assert second is not None
        await cluster.until(lambda: first.starts == 1)
        assert not second.running
        await cluster.until(lambda: second.running)


@in_virtual_time
async def test_granted_container_of_a_deleted_pod_is_waited_for_although_an_earlier_start_left_a_process() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        await cluster.run(3.0)
        assert first.first is not None
        cluster.process_table.fork(first.first).holds.clear()
        first.starts_after = 3.0
        cluster.kubelet.exit(first, again=True)
        await cluster.until(lambda: first.starting)
        cluster.kubelet.force_delete(first, lives_on=10.0)
        second = await cluster.admit("umbrella", "serve-0")
        assert second is not None
        await cluster.until(lambda: first.starts == 2)
        assert not second.running
        await cluster.until(lambda: second.running)


@in_virtual_time
async def test_container_restart_needs_no_scrub() -> None:
    async with simulated_cluster() as cluster:
        tenant = await started(cluster)
        await cluster.run(2.0)  # and was observed running
        scrubs = cluster.erasers.started
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        assert cluster.erasers.started == scrubs
        grant = cluster.record().last_grant
        assert grant is not None
        assert (grant.kind, grant.basis) == (HandOverKind.SAME_CONTAINER, Basis.SAME_CONTAINER)


@pytest.mark.parametrize(
    ("unreported", "basis"), [(False, Basis.SAME_CONTAINER), (True, Basis.CERTIFICATE)], ids=["reported", "unreported"]
)
def test_restart_after_an_allocation_that_could_not_be_reported_needs_a_certificate(
    unreported: bool, basis: Basis
) -> None:
    @in_virtual_time
    async def restart() -> None:
        async with simulated_cluster(devices=1) as cluster:
            tenant = await started(cluster)
            await cluster.run(2.0)  # and was observed running
            assert cluster.service is not None
            assert tenant.worker is not None
            assert tenant.first is not None
            tenant.worker.cancel()
            cluster.process_table.end(tenant.first)
            call = HandOverCall(tenant.devices, None, frozenset(tenant.devices if unreported else ()))
            assert [each.basis for each in await cluster.service.hand_over(call)] == [basis]

    restart()


@in_virtual_time
async def test_container_restart_under_a_strict_policy_needs_a_certificate() -> None:
    async with simulated_cluster(policy=STRICT) as cluster:
        tenant = await started(cluster)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_memory_that_an_init_container_wrote_is_cleared_for_the_main_container() -> None:
    async with simulated_cluster() as cluster:
        tenant = await cluster.admit("acme", "train-0", init=True)
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        cluster.write_all(tenant)
        cluster.kubelet.exit(tenant, again=False)
        await cluster.until(lambda: tenant.running and tenant.container == "main")
        grant = cluster.record().last_grant
        assert grant is not None
        assert (grant.kind, grant.basis) == (HandOverKind.SAME_POD, Basis.CERTIFICATE)


@in_virtual_time
async def test_setting_changed_by_a_tenant_sends_the_container_restart_through_the_slow_path() -> None:
    async with simulated_cluster() as cluster:
        tenant = await started(cluster)
        cluster.gpu().settings["compute-mode"] = "exclusive"
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        assert cluster.gpu().settings["compute-mode"] == "default"
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_a_pod_that_the_kubelet_cannot_name_is_granted_on_a_certificate_only() -> None:
    async with simulated_cluster() as cluster:
        tenant = await started(cluster)
        cluster.kubelet.trust = Trust.UNREADABLE
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        grant = cluster.record().last_grant
        assert grant is not None
        assert (grant.kind, grant.assignment, grant.basis) == (HandOverKind.UNKNOWN, None, Basis.CERTIFICATE)


@in_virtual_time
async def test_grant_to_a_pod_that_only_the_checkpoint_names_does_not_count_as_exclusive_use() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)
        cluster.kubelet.trust = Trust.EMPTY_AFTER_RESTART
        (granted,) = await request_start(cluster, tenant)
        assert granted.basis is Basis.CERTIFICATE
        assert not cluster.record().exclusive_use


@in_virtual_time
async def test_start_on_a_device_that_the_kubelet_assigns_to_no_pod_is_refused() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)
        cluster.kubelet.delete(tenant)
        assert (await refusal_of(request_start(cluster, tenant, wait=1.0))).code == ErrorCode.UNASSIGNED
        assert cluster.record().grant_sequence == 0


@in_virtual_time
async def test_device_of_an_unknown_pod_is_not_free_because_it_was_free_before_the_grant() -> None:
    """A long time without holders before the grant proves nothing about a container that is about to open it."""
    async with simulated_cluster() as cluster:
        await cluster.run(60.0)
        cluster.kubelet.trust = Trust.UNREADABLE
        first = await admitted(cluster)
        await request_start(cluster, first)
        refusal = await refusal_of(request_start(cluster, first, wait=1.0))
        assert isinstance(refusal, NotReady)
        assert refusal.code == "earlier-pod-running"


@in_virtual_time
async def test_refusal_says_why_the_pod_that_starts_is_not_known() -> None:
    """Its own earlier use then counts as another pod's, and the name of that pod alone would mislead."""
    async with simulated_cluster(1) as cluster:
        pod = await admitted(cluster)
        await request_start(cluster, pod)
        cluster.kubelet.trust = Trust.UNREADABLE
        refusal = await refusal_of(request_start(cluster, pod, wait=1.0))
        assert refusal.code == ErrorCode.EARLIER_POD_RUNNING
        assert str(refusal).endswith("the kubelet's list could not be read: the kubelet does not answer.")
        assert "kubelet" not in refusal.public_message


@in_virtual_time
async def test_pod_whose_processes_cannot_be_read_is_granted_nothing() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster)
        cluster.unreadable.add(tenant.uid)
        refusal = await refusal_of(request_start(cluster, tenant, wait=1.0))
        assert (type(refusal), refusal.code) == (NotReady, "pod-unreadable")
        assert cluster.record().hygiene is Hygiene.CLEAN
        cluster.unreadable.clear()
        await request_start(cluster, tenant)


@in_virtual_time
async def test_start_under_a_policy_that_trusts_the_tenant_still_waits_for_its_last_pod_to_end() -> None:
    async with simulated_cluster(policy=TRUSTED) as cluster:
        first = await started(cluster)
        assert first.first is not None
        first.first.holds.clear()
        await cluster.run(2.0)
        cluster.kubelet.force_delete(first, lives_on=10.4)
        second = await cluster.admit("acme", "train-1")
        assert second is not None
        await cluster.run(10.0)
        assert not second.running
        await cluster.until(lambda: second.running)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.SAME_TENANT


@in_virtual_time
async def test_start_under_a_policy_that_trusts_the_tenant_kills_leftover_processes_of_its_last_pod() -> None:
    async with simulated_cluster(policy=TRUSTED) as cluster:
        first = await started(cluster)
        await cluster.run(2.0)
        assert first.first is not None
        child = cluster.process_table.fork(first.first)
        child.holds.clear()
        cluster.kubelet.force_delete(first, lives_on=3.4)
        second = await cluster.admit("acme", "train-1")
        assert second is not None
        await cluster.until(lambda: second.running)
        assert not child.alive


@in_virtual_time
async def test_memory_is_not_cleared_for_a_restart_while_a_process_of_an_earlier_start_lives() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        tenant = await started(cluster)
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        child.holds.clear()
        cluster.kubelet.exit(tenant, again=True)
        await cluster.run(60.0)
        assert tenant.starts == 1
        cluster.process_table.end(child)
        await cluster.until(lambda: tenant.starts == 2)


@in_virtual_time
async def test_process_left_by_an_earlier_start_never_counts_as_the_pods_sandbox() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        child.holds.clear()
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        cluster.kubelet.delete(tenant)
        follower = await cluster.admit("umbrella", "serve-0")
        assert follower is not None
        await cluster.until(lambda: follower.running)
        assert not child.alive


@in_virtual_time
async def test_sandbox_of_an_earlier_boot_is_not_expected_after_a_reboot() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        tenant = await started(cluster)
        cluster.reboot()
        await cluster.start_service()
        await cluster.until(lambda: tenant.starts == 2)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 3)


# -- all or none -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_several_devices_are_granted_in_one_transaction() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster, "acme", "train-0", 0, 1)
        writes = cluster.ledger_store.writes
        granted = await request_start(cluster, tenant)
        assert [each.device for each in granted] == list(tenant.devices)
        assert cluster.ledger_store.writes == writes + 1


@in_virtual_time
async def test_pod_is_read_once_for_a_grant_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster, "acme", "train-0", 0, 1)
        processes, read = SimulatedContainers.processes, list[Pod]()

        async def counted(containers: SimulatedContainers, pod: Pod) -> tuple[Process, ...]:
            read.append(pod)
            return await processes(containers, pod)

        monkeypatch.setattr(SimulatedContainers, "processes", counted)
        read_before_the_grant: list[Pod] = []
        cluster.ledger_store.granting = lambda: read_before_the_grant.extend(read)
        granted = await request_start(cluster, tenant)
        assert len(granted) == 2
        assert read_before_the_grant == [tenant.pod]


@in_virtual_time
async def test_one_quarantined_device_refuses_the_whole_request_and_grants_none() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster, "acme", "train-0", 0, 1)
        await cluster.node.actions.quarantine("1", "it smells", "uid:0")
        refusal = await refusal_of(request_start(cluster, tenant))
        assert isinstance(refusal, Quarantined)
        assert cluster.gpu(1).id in refusal.public_message
        assert "operator" in refusal.public_message
        assert [cluster.record(number).grant_sequence for number in (0, 1)] == [0, 0]
        assert cluster.record(0).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_allocation_during_the_commit_of_a_grant_is_newer_than_the_grant() -> None:
    async with simulated_cluster(1) as cluster:
        tenant, state = await admitted(cluster), cluster.controller().state
        cluster.ledger_store.granting = state.count_allocation
        await request_start(cluster, tenant)
        assert state.allocated_since


@in_virtual_time
async def test_pod_that_was_granted_its_device_is_no_longer_waiting_for_it() -> None:
    async with simulated_cluster(1) as cluster:
        tenant, state = await admitted(cluster), cluster.controller().state
        await cluster.run(1.0)
        state.note_waiting(tenant.pod)
        assert state.waiting_pod == tenant.pod
        await request_start(cluster, tenant)
        assert state.waiting_pod is None


@in_virtual_time
async def test_device_does_not_count_as_free_after_its_grant() -> None:
    async with simulated_cluster(1) as cluster:
        tenant, coverage = await admitted(cluster), cluster.controller().occupancy.coverage
        assert coverage.free_for > 0
        await request_start(cluster, tenant)
        assert coverage.free_for == 0


@in_virtual_time
async def test_device_that_waited_long_for_its_sibling_is_checked_again_before_the_grant() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster, "acme", "train-0", 0, 1)
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu(1).id)
        await cluster.run(2.0)
        call = request_start(cluster, tenant)
        await cluster.run(4.0)
        cluster.gpu(0).settings["compute-mode"] = "exclusive"
        cluster.process_table.end(host)
        await call
        assert cluster.gpu(0).settings["compute-mode"] == "default"


async def waiting_for_its_sibling(cluster: SimulatedCluster) -> asyncio.Task[tuple[GrantedDevice, ...]]:
    """A call for both devices: the first is ready, and the second is being scrubbed for a little longer."""
    tenant = await admitted(cluster, "acme", "train-0", 0, 1)
    assert cluster.service is not None
    cluster.service.life.start(cluster.service.scrub(cluster.gpu(1).id), "scrub")
    await cluster.until(lambda: bool(cluster.erasers.running))
    call = request_start(cluster, tenant, wait=5.0)
    await cluster.run(0.7)
    assert cluster.controller(1).state.job is not None
    return call


@in_virtual_time
async def test_device_that_was_quarantined_while_its_sibling_was_waited_for_is_not_granted() -> None:
    async with simulated_cluster() as cluster:
        call = await waiting_for_its_sibling(cluster)
        await cluster.node.actions.quarantine("0", "it smells", "uid:0")
        assert isinstance(await refusal_of(call), Quarantined)
        assert [cluster.record(number).grant_sequence for number in (0, 1)] == [0, 0]


@in_virtual_time
async def test_device_that_was_opened_while_its_sibling_was_waited_for_is_not_granted() -> None:
    async with simulated_cluster() as cluster:
        call = await waiting_for_its_sibling(cluster)
        host = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(host, cluster.gpu(0).id)
        assert isinstance(await refusal_of(call), NotReady)
        assert [cluster.record(number).grant_sequence for number in (0, 1)] == [0, 0]


@in_virtual_time
async def test_refusal_for_one_device_does_not_wait_for_the_earlier_pod_of_another() -> None:
    async with simulated_cluster() as cluster:
        earlier = await started(cluster, "acme", "train-0", 1)
        cluster.kubelet.force_delete(earlier, lives_on=300.0)
        tenant = await admitted(cluster, "umbrella", "serve-0", 0, 1)
        await cluster.node.actions.quarantine(cluster.gpu(0).id, "because", "uid:0")
        called_at = cluster.clock.monotonic()
        assert isinstance(await refusal_of(request_start(cluster, tenant, wait=60.0)), Quarantined)
        assert cluster.clock.monotonic() - called_at < 1.0


def before_the_next_grant(cluster: SimulatedCluster, change: Callable[[], Awaitable[object]]) -> None:
    """Run ``change`` once, when a device is prepared and not granted yet."""
    pods, changes = cluster.node.pods, [change]
    baseline = pods.baseline

    async def changed(assignment: Assignment | None, earlier_grants: Iterable[Grant]) -> tuple[Process, ...]:
        while changes:
            await changes.pop()()
        return await baseline(assignment, earlier_grants)

    pods.baseline = changed  # type: ignore[method-assign]


@in_virtual_time
async def test_device_that_is_allocated_again_before_its_grant_is_not_granted() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)

        async def allocate() -> None:
            cluster.controller().state.count_allocation()

        before_the_next_grant(cluster, allocate)
        assert (await refusal_of(request_start(cluster, tenant))).code == ErrorCode.REASSIGNED
        assert cluster.record().grant_sequence == 0


@in_virtual_time
async def test_device_of_a_node_that_is_yielded_before_the_grant_is_not_granted() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)
        before_the_next_grant(
            cluster, lambda: cluster.node.yields.request(YieldRequester.OPERATOR, "driver upgrade", "uid:1000")
        )
        assert (await refusal_of(request_start(cluster, tenant))).code == ErrorCode.NODE_YIELDED
        assert cluster.record().grant_sequence == 0
        await cluster.node.yields.withdraw(YieldRequester.OPERATOR, "done", "uid:1000")
        cluster.node.publish_yield()


@in_virtual_time
async def test_device_that_leaves_the_node_before_its_grant_is_not_granted() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await admitted(cluster)
        before_the_next_grant(cluster, cluster.controller().state.retire)
        assert isinstance(await refusal_of(request_start(cluster, tenant, wait=1.0)), NotReady)
        assert cluster.record().grant_sequence == 0


@in_virtual_time
async def test_certificate_older_than_a_watch_gap_before_the_grant_is_voided_instead_of_consumed() -> None:
    async with simulated_cluster(1) as cluster:
        tenant, proved = await admitted(cluster), cluster.record().certificate
        assert proved is not None

        missed: list[float] = []

        async def miss() -> None:
            missed.append(cluster.clock.wall())
            cluster.controller().occupancy.coverage.record_failure()

        before_the_next_grant(cluster, miss)
        await request_start(cluster, tenant)
        assert cluster.record().grant_sequence == 1
        assert cluster.ledger_store.certificates[proved.id].next_grant is None
        (voided,) = (event for event in cluster.ledger_store.events if event.name == "certificate.voided")
        assert voided.at - missed[0] < 0.1, "the start does not wait for the next look of the watch"


@in_virtual_time
async def test_call_for_a_pod_whose_device_was_reassigned_is_refused_and_never_granted_to_the_new_pod() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.kubelet.force_delete(first, lives_on=5.0)
        second = await admitted(cluster, "umbrella", "serve-0")
        call = request_start(cluster, second)
        await cluster.run(1.0)
        cluster.kubelet.delete(second)
        third = await admitted(cluster, "initech", "serve-1")
        refusal = await refusal_of(call)
        assert refusal.code == "reassigned"
        await request_start(cluster, third)


@in_virtual_time
async def test_hung_driver_of_one_device_does_not_delay_the_grant_of_another() -> None:
    async with simulated_cluster() as cluster:
        cluster.gpu(0).stuck = True
        tenant = await admitted(cluster, "acme", "train-0", 1)
        began = cluster.clock.monotonic()
        await request_start(cluster, tenant)
        assert cluster.clock.monotonic() - began < 0.1
        await cluster.run(10.0)
        assert cluster.record(0).health is Health.QUARANTINED
        assert cluster.record(1).health is Health.HEALTHY


@in_virtual_time
async def test_device_whose_holders_cannot_be_read_is_quarantined_and_the_start_is_refused_with_that_cause() -> None:
    async with simulated_cluster() as cluster:
        tenant = await admitted(cluster)
        cluster.unreadable.add(cluster.gpu().id)
        refusal = await refusal_of(request_start(cluster, tenant, wait=5.0))
        assert isinstance(refusal, Quarantined)
        assert "driver-timeout" in refusal.public_message


@in_virtual_time
async def test_recently_used_device_whose_holders_cannot_be_read_is_quarantined() -> None:
    async with simulated_cluster() as cluster:
        first = await started(cluster)
        cluster.kubelet.delete(first)
        cluster.unreadable.add(cluster.gpu().id)
        tenant = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id], starts=False)
        refusal = await refusal_of(request_start(cluster, tenant, wait=0.0))
        assert isinstance(refusal, NotReady | Quarantined)
        assert cluster.record().health is Health.QUARANTINED


@in_virtual_time
async def test_two_callers_for_overlapping_sets_of_devices_never_deadlock() -> None:
    async with simulated_cluster(devices=3) as cluster:
        one = await admitted(cluster, "acme", "train-0", 0, 1)
        two = await admitted(cluster, "umbrella", "serve-0", 1, 2)
        done, _ = await asyncio.wait({request_start(cluster, one, wait=20.0), request_start(cluster, two, wait=20.0)})
        assert len(done) == 2
        for call in done:
            call.exception()


@pytest.mark.parametrize(("namespace", "restarts"), [("acme", False), ("umbrella", True)])
@in_virtual_time
async def test_warning_of_heat_starts_again_with_another_tenant(namespace: str, restarts: bool) -> None:
    async with simulated_cluster(1) as cluster:
        first = await started(cluster, "acme")
        cluster.gpu().celsius = 120
        await cluster.until(lambda: bool(cluster.record().warnings))
        (before,) = cluster.record().warnings
        cluster.kubelet.delete(first)
        await started(cluster, namespace, "next-0")
        (after,) = cluster.record().warnings
        assert (after.code, after.since > before.since) == (before.code, restarts)
