"""Use without a grant: it is found within two seconds, logged once, and handled as the policy defines."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from random import Random

import pytest

from scrubber.domain.assignment import Assignment, Pod, Trust
from scrubber.domain.certificate import certify
from scrubber.domain.device import Device
from scrubber.domain.evidence import ScrubTrigger
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement, Limits, Policy, UnauthorizedUseAction
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.telemetry import Holder, HolderReport
from scrubber.engine.device.controller import DeviceController, NodeContext
from scrubber.engine.device.occupancy import MAX_WATCH_GAP
from scrubber.ports.device import Holders
from scrubber.ports.record import Event
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.service import Pace
from tests.simulation.sharing import RESOURCE, shared_device_cluster
from tests.simulation.timeline import in_virtual_time

END = replace(
    DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=10.0)
)
QUARANTINE = replace(DEFAULT, unauthorized_use=UnauthorizedUseAction.QUARANTINE)


async def running(cluster: SimulatedCluster, name: str = "train-0", devices: tuple[int, ...] = (0,)) -> Tenant:
    tenant = await cluster.admit("acme", name, devices)
    assert tenant is not None
    await cluster.until(lambda: tenant.running)
    await cluster.run(0.1)
    cluster.write_all(tenant)
    return tenant


def intruder(cluster: SimulatedCluster, pod: str | None = None, device: int = 0) -> Proc:
    """Start a process that opens a device without a grant: one of the host, or of a (privileged) pod."""
    gpu = cluster.gpu(device).id
    container = f"{pod}/other#1" if pod else "host/miner#1"
    proc = cluster.process_table.start(pod, container, f"x/{container}", mounted=frozenset({gpu}))
    cluster.process_table.open(proc, gpu)
    return proc


def logged(cluster: SimulatedCluster, name: str = "unauthorized.use.detected") -> list[Event]:
    assert cluster.journal is not None
    return [event for event in cluster.journal.events if event.name == name]


# -- checks ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_use_timed_between_regular_checks_is_detected_within_a_minute() -> None:
    """Ten devices, each used for all but a tenth of a second of every second: another tenth for each."""
    async with simulated_cluster(10, pace=Pace(draw=Random(12).random)) as cluster:

        async def use_between_looks(number: int) -> None:
            gpu = cluster.gpu(number).id
            proc = cluster.process_table.start(None, f"host/miner#{number}", f"x/{number}", mounted=frozenset({gpu}))
            await cluster.run(number / 10)
            while not any(event.device == gpu for event in logged(cluster, "device.marked-dirty")):
                cluster.process_table.open(proc, gpu)
                await cluster.run(0.9)
                proc.holds.clear()
                await cluster.run(0.1)

        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(use_between_looks(number))


# -- unauthorized users ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_use_beside_an_authorized_tenant_is_found_within_two_seconds() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster)
        proc = intruder(cluster)
        await cluster.run(2.0)
        (event,) = logged(cluster)
        assert event.device == cluster.gpu().id
        assert (event.fields["use"], event.fields["pid"]) == ("unauthorized-process", proc.pid)
        assert not cluster.record().exclusive_use


@in_virtual_time
async def test_unauthorized_user_is_listed_in_the_device_status_while_the_use_lasts() -> None:
    async with simulated_cluster() as cluster:
        assert cluster.controller().view.unauthorized_users == ()
        proc = intruder(cluster)
        await cluster.run(2.0)
        (message,) = cluster.controller().view.unauthorized_users
        assert message == f"PID {proc.pid} ({proc.command}) outside all pods uses the device without a grant."
        assert cluster.controller(1).view.unauthorized_users == ()
        cluster.process_table.end(proc)
        await cluster.run(2.0)
        assert cluster.controller().view.unauthorized_users == ()


@in_virtual_time
async def test_authorized_tenant_is_not_listed_as_an_unauthorized_user() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster)
        await cluster.run(5.0)
        assert cluster.controller().view.unauthorized_users == ()


@in_virtual_time
async def test_unauthorized_use_is_detected_while_the_kubelet_does_not_answer() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster)
        cluster.kubelet.delay = 1000.0
        intruder(cluster)
        await cluster.run(2.0)
        assert len(logged(cluster)) == 1


@in_virtual_time
async def test_use_by_a_pod_without_a_grant_is_logged_with_the_uid_of_that_pod() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster)
        other = await running(cluster, "train-1", (1,))
        intruder(cluster, other.uid)
        await cluster.run(2.0)
        (event,) = logged(cluster)
        assert event.fields["pod_uid"] == other.uid


@in_virtual_time
async def test_unauthorized_use_is_logged_once_a_minute_whatever_the_number_of_processes() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster)
        for _ in range(30):
            cluster.process_table.end(intruder(cluster))
            intruder(cluster)
            await cluster.run(1.0)
        assert len(logged(cluster)) == 1
        await cluster.run(60.0)
        assert len(logged(cluster)) == 2


@in_virtual_time
async def test_restart_of_the_same_container_after_unauthorized_use_needs_a_certificate() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        proc = intruder(cluster)
        await cluster.run(2.0)
        cluster.process_table.end(proc)
        starts = tenant.starts
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts > starts)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_child_processes_of_an_authorized_tenant_are_no_unauthorized_users() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        assert tenant.first is not None
        cluster.process_table.fork(tenant.first)
        await cluster.run(10.0)
        assert logged(cluster) == []
        assert cluster.record().exclusive_use


@in_virtual_time
async def test_use_of_a_device_granted_to_an_unnamed_pod_is_not_logged_as_unauthorized() -> None:
    async with simulated_cluster() as cluster:
        cluster.kubelet.trust = Trust.UNREADABLE
        await running(cluster)
        await cluster.run(10.0)
        assert logged(cluster) == []


@in_virtual_time
async def test_unauthorized_process_is_not_killed_by_default_and_blocks_the_next_pod() -> None:
    async with simulated_cluster() as cluster:
        proc = intruder(cluster)
        await cluster.run(3.0)
        waiting = await cluster.admit("acme", "train-0")
        assert waiting is not None
        await cluster.run(300.0)
        assert proc.alive
        assert not waiting.running
        cluster.process_table.end(proc)
        await cluster.until(lambda: waiting.running)


# -- other settings of the policy --------------------------------------------------------------------------------------


@in_virtual_time
async def test_policy_may_quarantine_a_device_for_unauthorized_use_until_the_device_was_scrubbed() -> None:
    async with simulated_cluster(policy=QUARANTINE) as cluster:
        proc = intruder(cluster)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=3.0)
        cause = cluster.record().cause
        assert cause is not None
        assert cause.code == "unauthorized-use"
        await cluster.run(30.0)
        assert cluster.record().health is Health.QUARANTINED
        cluster.process_table.end(proc)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=120.0)


@in_virtual_time
async def test_authorized_tenant_keeps_a_device_that_is_quarantined_for_unauthorized_use() -> None:
    async with simulated_cluster(policy=QUARANTINE) as cluster:
        tenant = await running(cluster)
        intruder(cluster)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=3.0)
        await cluster.run(60.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert cluster.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_open_descriptor_in_another_pod_blocks_a_device_no_longer_than_the_policy_allows() -> None:
    async with simulated_cluster(policy=END) as cluster:
        other = await running(cluster, "train-1", (1,))
        proc = intruder(cluster, other.uid)
        waiting = await cluster.admit("acme", "train-0")
        assert waiting is not None
        await cluster.run(9.0)
        assert proc in cluster.process_table.living(other.uid)
        await cluster.until(lambda: waiting.running, within=100.0)
        assert proc not in cluster.process_table.living(other.uid)
        assert other.first is not None
        assert other.first.alive
        assert logged(cluster, "unauthorized.process.killed")


@pytest.mark.parametrize("policy", [END, replace(END, enforcement=Enforcement.OBSERVE)], ids=["end", "observe"])
def test_unauthorized_process_outside_any_pod_is_never_killed(policy: Policy) -> None:
    @in_virtual_time
    async def keep_it() -> None:
        async with simulated_cluster(policy=policy) as cluster:
            await running(cluster)
            proc = intruder(cluster)
            await cluster.run(300.0)
            assert proc.alive

    keep_it()


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_unauthorized_process_is_not_killed_while_the_kubelets_list_is_untrusted(trust: Trust) -> None:
    @in_virtual_time
    async def keep_it() -> None:
        async with simulated_cluster(policy=END) as cluster:
            other = await running(cluster, "train-1", (1,))
            cluster.kubelet.trust = trust
            proc = intruder(cluster, other.uid)
            await cluster.run(60.0)
            assert proc.alive

    keep_it()


# -- starts that the kubelet did not announce --------------------------------------------------------------------------


async def unannounced(cluster: SimulatedCluster, name: str = "sudden-0") -> tuple[Tenant, Proc]:
    """Start a pod that the kubelet lists for the device, and whose container was started without PreStartContainer."""
    tenant = await cluster.admit("acme", name, starts=False)
    assert tenant is not None
    return tenant, intruder(cluster, tenant.uid)


@in_virtual_time
async def test_container_started_without_a_grant_is_adopted_and_its_device_scrubbed_afterwards() -> None:
    async with simulated_cluster() as cluster:
        tenant, proc = await unannounced(cluster)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.IN_USE, within=3.0)
        assert [event.fields["use"] for event in logged(cluster)] == ["start-without-handover"]
        grant = cluster.record().last_grant
        assert grant is not None
        assert (grant.pod, grant.basis) == (tenant.pod, Basis.ADOPTED)
        cluster.process_table.write(proc, cluster.gpu().id)
        await cluster.run(60.0)
        assert proc.alive
        cluster.process_table.end(proc)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=60.0)
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_container_started_without_a_grant_on_a_device_recorded_as_in_use_is_logged() -> None:
    async with simulated_cluster() as cluster:
        earlier = await running(cluster)
        cluster.kubelet.trust = Trust.EMPTY_AFTER_RESTART  # the earlier pod's absence proves nothing yet
        cluster.kubelet.delete(earlier)
        await unannounced(cluster)
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(2.0)
        assert [event.fields["use"] for event in logged(cluster)] == ["start-without-handover"]


@in_virtual_time
async def test_pod_that_only_waits_for_its_start_is_not_treated_as_started() -> None:
    async with simulated_cluster() as cluster:
        waiting = await cluster.admit("acme", "train-0", starts=False)
        assert waiting is not None
        await cluster.run(30.0)
        assert logged(cluster) == []
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_certificate_is_voided_by_a_kubelet_restart() -> None:
    async with simulated_cluster() as cluster:
        before = cluster.record().certificate
        assert before is not None
        cluster.kubelet.starts += 1
        await cluster.until(lambda: cluster.record().certificate not in (None, before), within=30.0)
        assert [event.fields["reason"] for event in logged(cluster, "certificate.voided")] == ["kubelet-restart"] * 2


# -- watch gaps --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_certificate_is_voided_by_a_watch_gap() -> None:
    async with simulated_cluster() as cluster:
        before = cluster.record().certificate
        assert before is not None
        cluster.pause(11.0)
        tenant = await cluster.admit("acme", "train-0")
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.certificate is not None
        assert cluster.ledger_store.certificates[before.id].next_grant is None
        assert {event.fields["reason"] for event in logged(cluster, "certificate.voided")} == {"watch-gap"}


@in_virtual_time
async def test_scrub_longer_than_the_maximum_watch_gap_leaves_a_valid_certificate() -> None:
    """No usage check runs on a device that is being scrubbed: that is no watch gap."""
    patient = replace(DEFAULT, limits=replace(Limits(), clear_timeout_base=60.0))
    async with simulated_cluster(devices=1, policy=patient) as cluster:
        cluster.gpu().slow = 20.0
        began = cluster.clock.monotonic()
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        finished = await job.wait()
        assert cluster.clock.monotonic() - began > MAX_WATCH_GAP
        await cluster.run(5.0)
        issued = cluster.record().certificate
        assert issued is not None
        assert issued.scrub == finished.id


@in_virtual_time
async def test_scrub_interrupted_by_a_watch_gap_issues_no_certificate() -> None:
    """The service stalls once the eraser is done: a process comes and leaves before the service continues."""
    async with simulated_cluster(devices=1) as cluster:
        await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.until(lambda: bool(cluster.erasers.running))
        erasing = cluster.erasers.running[cluster.gpu().id]
        erasing.task.add_done_callback(lambda _: leave_something(cluster))
        await cluster.until(erasing.task.done)
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.SCRUBBING, within=60.0)
        assert cluster.record().hygiene is Hygiene.DIRTY
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=60.0)


def leave_something(cluster: SimulatedCluster) -> None:
    proc = intruder(cluster)
    cluster.process_table.write(proc, cluster.gpu().id)
    cluster.process_table.end(proc)
    cluster.pause(30.0)


@in_virtual_time
async def test_restart_of_the_same_container_after_a_watch_gap_needs_a_certificate() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.pause(11.0)
        await cluster.run(2.0)
        starts = tenant.starts
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts > starts)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_slow_watch_without_a_gap_voids_no_certificate() -> None:
    async with simulated_cluster() as cluster:
        before = cluster.record().certificate
        cluster.pause(5.0)
        await cluster.run(3.0)
        assert cluster.record().certificate == before


# -- grants without a known pod, and unreadable pods -------------------------------------------------------------------


@in_virtual_time
async def test_grant_made_while_the_kubelet_was_unreadable_gets_its_pod_once_the_kubelet_is_readable() -> None:
    async with simulated_cluster() as cluster:
        cluster.kubelet.trust = Trust.UNREADABLE
        tenant = await running(cluster)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.pod is None
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(2.0)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.pod == tenant.pod
        assert cluster.record().open_grants == (grant,)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=10.0)


@in_virtual_time
async def test_unreadable_pod_keeps_its_device_no_longer_than_its_grace_period() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        assert tenant.first is not None
        cluster.unreadable.add(tenant.uid)
        cluster.kubelet.force_delete(tenant, lives_on=1000.0)
        await cluster.run(29.0)
        assert tenant.first in cluster.process_table.living()
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=60.0)
        assert list(cluster.process_table.living(tenant.uid)) == []
        assert logged(cluster, "leftover.pod.killed")


@in_virtual_time
async def test_pod_whose_sandbox_was_recreated_starts() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster)
        cluster.kubelet.remake_sandbox(tenant)
        starts = tenant.starts
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts > starts, within=60.0)


# -- assignments by another plugin -------------------------------------------------------------------------------------


@in_virtual_time
async def test_assignment_by_another_plugin_is_logged_as_unauthorized_use_and_voids_the_certificate() -> None:
    async with shared_device_cluster() as cluster:
        pod, before = Pod("rival", "train-9", "uid-9"), cluster.record().certificate
        cluster.elsewhere = (Assignment(pod, "main", frozenset({cluster.gpu().id}), "vendor.example/gpu"),)
        await cluster.node.announce(RESOURCE, {})
        await cluster.run(30.0)
        (event,) = logged(cluster)
        assert event.fields["use"] == "assigned-by-another-plugin"
        assert "rival/train-9" in str(event.fields["message"])
        assert cluster.record().certificate != before


# -- claims ------------------------------------------------------------------------------------------------------------


class Blinkered:
    """:class:`scrubber.ports.Holders` whose quick query misses a user."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders

    async def is_held(self, device: Device) -> bool:
        return await self._holders.is_held(device)

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        return await self._holders.list_holders(device, pod_uids, scrub)

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        return await self._holders.list_users(device)

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return ("holders: processes of other nodes",)


@in_virtual_time
async def test_fast_certificate_covers_only_the_checks_that_the_driver_could_answer() -> None:
    async with simulated_cluster() as cluster:
        assert cluster.service is not None
        tools = cluster.service.dependencies
        controller = DeviceController(
            cluster.gpu().device,
            cluster.record(),
            dependencies=replace(tools, holders=Blinkered(tools.holders)),
            node=NodeContext(
                on_change=lambda: None,
                pods=cluster.node.pods,
                keep_out_of_use=cluster.node.devices.keep_out_of_use,
                resources=lambda _: frozenset({RESOURCE}),
                records=lambda: [cluster.record()],
                breaker=cluster.node.devices.breaker,
                eraser_pool=cluster.node.devices.eraser_pool,
            ),
        )
        check = await controller.scrubs.check(ScrubTrigger.CONTAINER_START)
        certificate = certify(
            check,
            check.steps,
            cluster.record(),
            identity=cluster.identity,
            policy=cluster.policy,
            certificate_id="cert-1",
            now=cluster.clock.wall(),
        )
        assert "holders: processes of other nodes" in certificate.not_covered
