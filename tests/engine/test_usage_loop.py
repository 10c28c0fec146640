"""Use without a grant: it is found within two seconds, logged once, and handled as the policy says."""

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
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.service import Pace
from tests.world.sharing import RESOURCE, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

END = replace(
    DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=10.0)
)
QUARANTINE = replace(DEFAULT, unauthorized_use=UnauthorizedUseAction.QUARANTINE)


async def running(world: World, name: str = "train-0", devices: tuple[int, ...] = (0,)) -> Tenant:
    tenant = await world.admit("acme", name, devices)
    assert tenant is not None
    await world.until(lambda: tenant.running)
    await world.run(0.1)
    world.write_all(tenant)
    return tenant


def intruder(world: World, pod: str | None = None, device: int = 0) -> Proc:
    """Start a process that opens a device without a grant: one of the host, or of a (privileged) pod."""
    gpu = world.gpu(device).id
    container = f"{pod}/other#1" if pod else "host/miner#1"
    proc = world.matter.start(pod, container, f"x/{container}", mounted=frozenset({gpu}))
    world.matter.open(proc, gpu)
    return proc


def told(world: World, name: str = "unauthorized.use.detected") -> list[Event]:
    assert world.journal is not None
    return [event for event in world.journal.events if event.name == name]


# -- checks ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_use_timed_between_regular_checks_is_detected_within_a_minute() -> None:
    """Ten devices, each used for all but a tenth of a second of every second: another tenth for each."""
    async with a_world(10, pace=Pace(draw=Random(12).random)) as world:

        async def use_between_looks(number: int) -> None:
            gpu = world.gpu(number).id
            proc = world.matter.start(None, f"host/miner#{number}", f"x/{number}", mounted=frozenset({gpu}))
            await world.run(number / 10)
            while not any(event.device == gpu for event in told(world, "device.marked-dirty")):
                world.matter.open(proc, gpu)
                await world.run(0.9)
                proc.holds.clear()
                await world.run(0.1)

        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(use_between_looks(number))


# -- unauthorized users ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_use_beside_an_authorized_tenant_is_found_within_two_seconds() -> None:
    async with a_world() as world:
        await running(world)
        proc = intruder(world)
        await world.run(2.0)
        (event,) = told(world)
        assert event.device == world.gpu().id
        assert (event.fields["use"], event.fields["pid"]) == ("unauthorized-process", proc.pid)
        assert not world.record().exclusive_use


@in_virtual_time
async def test_unauthorized_user_is_listed_in_the_device_status_while_the_use_lasts() -> None:
    async with a_world() as world:
        assert world.controller().view.unauthorized_users == ()
        proc = intruder(world)
        await world.run(2.0)
        (sentence,) = world.controller().view.unauthorized_users
        assert sentence == f"PID {proc.pid} ({proc.command}) of no pod uses it without a grant."
        assert world.controller(1).view.unauthorized_users == ()
        world.matter.end(proc)
        await world.run(2.0)
        assert world.controller().view.unauthorized_users == ()


@in_virtual_time
async def test_authorized_tenant_is_not_listed_as_an_unauthorized_user() -> None:
    async with a_world() as world:
        await running(world)
        await world.run(5.0)
        assert world.controller().view.unauthorized_users == ()


@in_virtual_time
async def test_unauthorized_use_is_detected_while_the_kubelet_does_not_answer() -> None:
    async with a_world() as world:
        await running(world)
        world.kubelet.delay = 1000.0
        intruder(world)
        await world.run(2.0)
        assert len(told(world)) == 1


@in_virtual_time
async def test_use_by_a_pod_without_a_grant_is_logged_with_the_uid_of_that_pod() -> None:
    async with a_world() as world:
        await running(world)
        other = await running(world, "train-1", (1,))
        intruder(world, other.uid)
        await world.run(2.0)
        (event,) = told(world)
        assert event.fields["pod_uid"] == other.uid


@in_virtual_time
async def test_unauthorized_use_is_logged_once_a_minute_whatever_the_number_of_processes() -> None:
    async with a_world() as world:
        await running(world)
        for _ in range(30):
            world.matter.end(intruder(world))
            intruder(world)
            await world.run(1.0)
        assert len(told(world)) == 1
        await world.run(60.0)
        assert len(told(world)) == 2


@in_virtual_time
async def test_restart_of_the_same_container_after_unauthorized_use_needs_a_certificate() -> None:
    async with a_world() as world:
        tenant = await running(world)
        proc = intruder(world)
        await world.run(2.0)
        world.matter.end(proc)
        starts = tenant.starts
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts > starts)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_child_processes_of_an_authorized_tenant_are_no_unauthorized_users() -> None:
    async with a_world() as world:
        tenant = await running(world)
        assert tenant.first is not None
        world.matter.fork(tenant.first)
        await world.run(10.0)
        assert told(world) == []
        assert world.record().exclusive_use


@in_virtual_time
async def test_use_of_a_device_granted_to_an_unnamed_pod_is_not_logged_as_unauthorized() -> None:
    async with a_world() as world:
        world.kubelet.trust = Trust.UNREADABLE
        await running(world)
        await world.run(10.0)
        assert told(world) == []


@in_virtual_time
async def test_unauthorized_process_is_not_killed_by_default_and_blocks_the_next_pod() -> None:
    async with a_world() as world:
        proc = intruder(world)
        await world.run(3.0)
        waiting = await world.admit("acme", "train-0")
        assert waiting is not None
        await world.run(300.0)
        assert proc.alive
        assert not waiting.running
        world.matter.end(proc)
        await world.until(lambda: waiting.running)


# -- other settings of the policy --------------------------------------------------------------------------------------


@in_virtual_time
async def test_policy_may_quarantine_a_device_for_unauthorized_use_until_the_device_was_scrubbed() -> None:
    async with a_world(policy=QUARANTINE) as world:
        proc = intruder(world)
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
        cause = world.record().cause
        assert cause is not None
        assert cause.code == "unauthorized-use"
        await world.run(30.0)
        assert world.record().health is Health.QUARANTINED
        world.matter.end(proc)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=120.0)


@in_virtual_time
async def test_authorized_tenant_keeps_a_device_that_is_quarantined_for_unauthorized_use() -> None:
    async with a_world(policy=QUARANTINE) as world:
        tenant = await running(world)
        intruder(world)
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
        await world.run(60.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_open_descriptor_in_another_pod_blocks_a_device_no_longer_than_the_policy_allows() -> None:
    async with a_world(policy=END) as world:
        other = await running(world, "train-1", (1,))
        proc = intruder(world, other.uid)
        waiting = await world.admit("acme", "train-0")
        assert waiting is not None
        await world.run(9.0)
        assert proc in world.matter.living(other.uid)
        await world.until(lambda: waiting.running, within=100.0)
        assert proc not in world.matter.living(other.uid)
        assert other.first is not None
        assert other.first.alive
        assert told(world, "unauthorized.process.killed")


@pytest.mark.parametrize("policy", [END, replace(END, enforcement=Enforcement.OBSERVE)], ids=["end", "observe"])
def test_unauthorized_process_outside_any_pod_is_never_killed(policy: Policy) -> None:
    @in_virtual_time
    async def keep_it() -> None:
        async with a_world(policy=policy) as world:
            await running(world)
            proc = intruder(world)
            await world.run(300.0)
            assert proc.alive

    keep_it()


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_unauthorized_process_is_not_killed_while_the_kubelets_list_is_untrusted(trust: Trust) -> None:
    @in_virtual_time
    async def keep_it() -> None:
        async with a_world(policy=END) as world:
            other = await running(world, "train-1", (1,))
            world.kubelet.trust = trust
            proc = intruder(world, other.uid)
            await world.run(60.0)
            assert proc.alive

    keep_it()


# -- starts that the kubelet did not announce --------------------------------------------------------------------------


async def unannounced(world: World, name: str = "sudden-0") -> tuple[Tenant, Proc]:
    """Start a pod that the kubelet lists for the device, and whose container was started without PreStartContainer."""
    tenant = await world.admit("acme", name, starts=False)
    assert tenant is not None
    return tenant, intruder(world, tenant.uid)


@in_virtual_time
async def test_container_started_without_a_grant_is_adopted_and_its_device_scrubbed_afterwards() -> None:
    async with a_world() as world:
        tenant, proc = await unannounced(world)
        await world.until(lambda: world.record().hygiene is Hygiene.IN_USE, within=3.0)
        assert [event.fields["use"] for event in told(world)] == ["start-without-handover"]
        grant = world.record().last_grant
        assert grant is not None
        assert (grant.pod, grant.basis) == (tenant.pod, Basis.ADOPTED)
        world.matter.write(proc, world.gpu().id)
        await world.run(60.0)
        assert proc.alive
        world.matter.end(proc)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=60.0)
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_container_started_without_a_grant_on_a_device_recorded_as_in_use_is_logged() -> None:
    async with a_world() as world:
        earlier = await running(world)
        world.kubelet.trust = Trust.EMPTY_AFTER_RESTART  # the earlier pod's absence proves nothing yet
        world.kubelet.delete(earlier)
        await unannounced(world)
        world.kubelet.trust = Trust.TRUSTED
        await world.run(2.0)
        assert [event.fields["use"] for event in told(world)] == ["start-without-handover"]


@in_virtual_time
async def test_pod_that_only_waits_for_its_start_is_not_treated_as_started() -> None:
    async with a_world() as world:
        waiting = await world.admit("acme", "train-0", starts=False)
        assert waiting is not None
        await world.run(30.0)
        assert told(world) == []
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_certificate_is_voided_by_a_kubelet_restart() -> None:
    async with a_world() as world:
        before = world.record().certificate
        assert before is not None
        world.kubelet.starts += 1
        await world.until(lambda: world.record().certificate not in (None, before), within=30.0)
        assert [event.fields["reason"] for event in told(world, "certificate.voided")] == ["kubelet-restart"] * 2


# -- watch gaps --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_certificate_is_voided_by_a_watch_gap() -> None:
    async with a_world() as world:
        before = world.record().certificate
        assert before is not None
        world.pause(11.0)
        tenant = await world.admit("acme", "train-0")
        assert tenant is not None
        await world.until(lambda: tenant.running)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.certificate is not None
        assert world.vault.certificates[before.id].next_grant is None
        assert {event.fields["reason"] for event in told(world, "certificate.voided")} == {"watch-gap"}


@in_virtual_time
async def test_scrub_longer_than_the_maximum_watch_gap_leaves_a_valid_certificate() -> None:
    """No usage check runs on a device that is being scrubbed: that is no watch gap."""
    patient = replace(DEFAULT, limits=replace(Limits(), clear_timeout_base=60.0))
    async with a_world(devices=1, policy=patient) as world:
        world.gpu().slow = 20.0
        began = world.clock.monotonic()
        job = await world.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        finished = await job.wait()
        assert world.clock.monotonic() - began > MAX_WATCH_GAP
        await world.run(5.0)
        issued = world.record().certificate
        assert issued is not None
        assert issued.scrub == finished.id


@in_virtual_time
async def test_scrub_interrupted_by_a_watch_gap_issues_no_certificate() -> None:
    """The service stalls once the eraser is done: a process comes and leaves before the service continues."""
    async with a_world(devices=1) as world:
        await world.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await world.until(lambda: bool(world.erasers.running))
        erasing = world.erasers.running[world.gpu().id]
        erasing.task.add_done_callback(lambda _: leave_something(world))
        await world.until(erasing.task.done)
        await world.until(lambda: world.record().hygiene is not Hygiene.SCRUBBING, within=60.0)
        assert world.record().hygiene is Hygiene.DIRTY
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=60.0)


def leave_something(world: World) -> None:
    proc = intruder(world)
    world.matter.write(proc, world.gpu().id)
    world.matter.end(proc)
    world.pause(30.0)


@in_virtual_time
async def test_restart_of_the_same_container_after_a_watch_gap_needs_a_certificate() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.pause(11.0)
        await world.run(2.0)
        starts = tenant.starts
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts > starts)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_slow_watch_without_a_gap_voids_no_certificate() -> None:
    async with a_world() as world:
        before = world.record().certificate
        world.pause(5.0)
        await world.run(3.0)
        assert world.record().certificate == before


# -- grants without a known pod, and unreadable pods -------------------------------------------------------------------


@in_virtual_time
async def test_grant_made_while_the_kubelet_was_unreadable_gets_its_pod_once_the_kubelet_is_readable() -> None:
    async with a_world() as world:
        world.kubelet.trust = Trust.UNREADABLE
        tenant = await running(world)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.pod is None
        world.kubelet.trust = Trust.TRUSTED
        await world.run(2.0)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.pod == tenant.pod
        assert world.record().open_grants == (grant,)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=10.0)


@in_virtual_time
async def test_unreadable_pod_keeps_its_device_no_longer_than_its_grace_period() -> None:
    async with a_world() as world:
        tenant = await running(world)
        assert tenant.first is not None
        world.unreadable.add(tenant.uid)
        world.kubelet.force_delete(tenant, lives_on=1000.0)
        await world.run(29.0)
        assert tenant.first in world.matter.living()
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=60.0)
        assert list(world.matter.living(tenant.uid)) == []
        assert told(world, "leftover.pod.killed")


@in_virtual_time
async def test_pod_whose_sandbox_was_recreated_starts() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.kubelet.remake_sandbox(tenant)
        starts = tenant.starts
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts > starts, within=60.0)


# -- assignments by another plugin -------------------------------------------------------------------------------------


@in_virtual_time
async def test_assignment_by_another_plugin_is_logged_as_unauthorized_use_and_voids_the_certificate() -> None:
    async with a_shared_world() as world:
        pod, before = Pod("rival", "train-9", "uid-9"), world.record().certificate
        world.elsewhere = (Assignment(pod, "main", frozenset({world.gpu().id}), "vendor.example/gpu"),)
        await world.node.announce(RESOURCE, {})
        await world.run(30.0)
        (event,) = told(world)
        assert event.fields["use"] == "assigned-by-another-plugin"
        assert "rival/train-9" in str(event.fields["message"])
        assert world.record().certificate != before


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
        return ("holders: nobody looked behind the curtain",)


@in_virtual_time
async def test_fast_certificate_covers_only_the_checks_that_the_driver_could_answer() -> None:
    async with a_world() as world:
        assert world.service is not None
        tools = world.service.dependencies
        controller = DeviceController(
            world.gpu().device,
            world.record(),
            dependencies=replace(tools, holders=Blinkered(tools.holders)),
            node=NodeContext(
                on_change=lambda: None,
                pods=world.node.pods,
                keep_out_of_use=world.node.devices.keep_out_of_use,
                resources=lambda _: frozenset({RESOURCE}),
                records=lambda: [world.record()],
                breaker=world.node.devices.breaker,
                eraser_pool=world.node.devices.eraser_pool,
            ),
        )
        check = await controller.scrubs.check(ScrubTrigger.CONTAINER_START)
        certificate = certify(
            check,
            check.steps,
            world.record(),
            identity=world.identity,
            policy=world.policy,
            certificate_id="cert-1",
            now=world.clock.wall(),
        )
        assert "holders: nobody looked behind the curtain" in certificate.not_covered
