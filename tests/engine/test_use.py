"""Use that nobody granted: it is found within two seconds, told once, and met as the policy says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from random import Random

import pytest

from scrubber.domain.assignment import Assignment, Pod, Trust
from scrubber.domain.basis import Basis
from scrubber.domain.certify import certify
from scrubber.domain.device import Device
from scrubber.domain.evidence import Occasion
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Limits, Policy, Ungranted
from scrubber.domain.telemetry import Holder, HolderReport
from scrubber.engine.device.controller import DeviceController, NodeContext
from scrubber.engine.device.occupancy import GAP
from scrubber.ports.device import Holders
from scrubber.ports.record import Event
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.service import Pace
from tests.world.sharing import RESOURCE, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

END = replace(DEFAULT, ungranted=Ungranted.END, limits=replace(Limits(), dying_grace=10.0))
QUARANTINE = replace(DEFAULT, ungranted=Ungranted.QUARANTINE)


async def running(world: World, name: str = "train-0", devices: tuple[int, ...] = (0,)) -> Tenant:
    tenant = await world.admit("acme", name, devices)
    assert tenant is not None
    await world.until(lambda: tenant.running)
    await world.run(0.1)
    world.write_all(tenant)
    return tenant


def intruder(world: World, pod: str | None = None, device: int = 0) -> Proc:
    """A process that opens a device which is not its own: of the node, or of a pod that could (a privileged one)."""
    gpu = world.gpu(device).id
    container = f"{pod}/other#1" if pod else "host/miner#1"
    proc = world.matter.start(pod, container, f"x/{container}", mounted=frozenset({gpu}))
    world.matter.open(proc, gpu)
    return proc


def told(world: World, name: str = "use.ungranted") -> list[Event]:
    assert world.journal is not None
    return [event for event in world.journal.events if event.name == name]


# -- looks -------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_use_that_is_timed_between_regular_looks_is_seen_within_a_minute() -> None:
    """Ten devices, each used for all but a tenth of a second of every second: another tenth for each."""
    async with a_world(10, pace=Pace(draw=Random(12).random)) as world:

        async def use_between_looks(number: int) -> None:
            gpu = world.gpu(number).id
            proc = world.matter.start(None, f"host/miner#{number}", f"x/{number}", mounted=frozenset({gpu}))
            await world.run(number / 10)
            while not any(event.device == gpu for event in told(world, "device.touched")):
                world.matter.open(proc, gpu)
                await world.run(0.9)
                proc.holds.clear()
                await world.run(0.1)

        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(use_between_looks(number))


# -- strangers ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_stranger_beside_a_rightful_tenant_is_found_within_two_seconds() -> None:
    async with a_world() as world:
        await running(world)
        proc = intruder(world)
        await world.run(2.0)
        (event,) = told(world)
        assert event.device == world.gpu().id
        assert (event.fields["use"], event.fields["pid"]) == ("stranger", proc.pid)
        assert not world.record().watched


@in_virtual_time
async def test_who_uses_a_device_without_a_grant_is_shown_for_as_long_as_he_does() -> None:
    async with a_world() as world:
        assert world.controller().view.strangers == ()
        proc = intruder(world)
        await world.run(2.0)
        (sentence,) = world.controller().view.strangers
        assert sentence == f"PID {proc.pid} ({proc.command}) of no pod uses it without a grant."
        assert world.controller(1).view.strangers == ()
        world.matter.end(proc)
        await world.run(2.0)
        assert world.controller().view.strangers == ()


@in_virtual_time
async def test_a_rightful_tenant_is_nobody_to_be_shown_as_a_stranger() -> None:
    async with a_world() as world:
        await running(world)
        await world.run(5.0)
        assert world.controller().view.strangers == ()


@in_virtual_time
async def test_use_is_seen_while_the_kubelet_does_not_answer() -> None:
    async with a_world() as world:
        await running(world)
        world.kubelet.delay = 1000.0
        intruder(world)
        await world.run(2.0)
        assert len(told(world)) == 1


@in_virtual_time
async def test_a_pod_that_was_granted_nothing_is_a_stranger_and_is_named_by_its_uid() -> None:
    async with a_world() as world:
        await running(world)
        other = await running(world, "train-1", (1,))
        intruder(world, other.uid)
        await world.run(2.0)
        (event,) = told(world)
        assert event.fields["pod_uid"] == other.uid


@in_virtual_time
async def test_the_same_use_is_told_once_a_minute_whatever_number_of_processes_it_takes() -> None:
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
async def test_after_a_stranger_the_same_container_starts_again_by_certificate_only() -> None:
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
async def test_a_rightful_tenant_and_the_children_of_it_are_no_strangers() -> None:
    async with a_world() as world:
        tenant = await running(world)
        assert tenant.first is not None
        world.matter.fork(tenant.first)
        await world.run(10.0)
        assert told(world) == []
        assert world.record().watched


@in_virtual_time
async def test_while_the_device_is_granted_to_a_pod_that_nobody_can_name_nobody_is_called_a_stranger() -> None:
    async with a_world() as world:
        world.kubelet.trust = Trust.UNREADABLE
        await running(world)
        await world.run(10.0)
        assert told(world) == []


@in_virtual_time
async def test_by_default_nobody_is_ended_and_the_device_is_handed_to_nobody_while_a_stranger_has_it() -> None:
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


# -- the policy's other answers ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_policy_may_take_the_device_out_of_service_until_it_was_scrubbed() -> None:
    async with a_world(policy=QUARANTINE) as world:
        proc = intruder(world)
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
        cause = world.record().cause
        assert cause is not None
        assert cause.code == "ungranted-use"
        await world.run(30.0)
        assert world.record().health is Health.QUARANTINED
        world.matter.end(proc)
        await world.until(lambda: world.record().health is Health.HEALTHY, within=120.0)


@in_virtual_time
async def test_a_rightful_tenant_keeps_a_device_that_is_quarantined_for_a_stranger() -> None:
    async with a_world(policy=QUARANTINE) as world:
        tenant = await running(world)
        intruder(world)
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
        await world.run(60.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_a_descriptor_in_another_pods_hands_blocks_a_device_no_longer_than_the_policy_says() -> None:
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
        assert told(world, "stranger.ended")


@pytest.mark.parametrize("policy", [END, replace(END, enforcement=Enforcement.OBSERVE)], ids=["end", "observe"])
def test_a_process_of_the_node_is_never_ended(policy: Policy) -> None:
    @in_virtual_time
    async def keep_it() -> None:
        async with a_world(policy=policy) as world:
            await running(world)
            proc = intruder(world)
            await world.run(300.0)
            assert proc.alive

    keep_it()


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_nobody_is_ended_by_a_list_that_is_not_believed(trust: Trust) -> None:
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
    """A pod that has the device by the kubelet's word, and whose container was started without PreStartContainer."""
    tenant = await world.admit("acme", name, starts=False)
    assert tenant is not None
    return tenant, intruder(world, tenant.uid)


@in_virtual_time
async def test_a_start_that_the_kubelet_did_not_announce_is_found_and_its_device_scrubbed_after_it() -> None:
    async with a_world() as world:
        tenant, proc = await unannounced(world)
        await world.until(lambda: world.record().hygiene is Hygiene.IN_USE, within=3.0)
        assert [event.fields["use"] for event in told(world)] == ["unannounced"]
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
async def test_an_unannounced_start_on_a_device_that_the_ledger_still_calls_in_use_is_found_too() -> None:
    async with a_world() as world:
        earlier = await running(world)
        world.kubelet.trust = Trust.EMPTY_AFTER_RESTART  # the earlier pod's absence proves nothing yet
        world.kubelet.delete(earlier)
        await unannounced(world)
        world.kubelet.trust = Trust.TRUSTED
        await world.run(2.0)
        assert [event.fields["use"] for event in told(world)] == ["unannounced"]


@in_virtual_time
async def test_a_pod_that_only_waits_for_its_start_is_not_taken_for_one_that_was_started() -> None:
    async with a_world() as world:
        waiting = await world.admit("acme", "train-0", starts=False)
        assert waiting is not None
        await world.run(30.0)
        assert told(world) == []
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_no_certificate_outlives_a_restart_of_the_kubelet() -> None:
    async with a_world() as world:
        before = world.record().certificate
        assert before is not None
        world.kubelet.starts += 1
        await world.until(lambda: world.record().certificate not in (None, before), within=30.0)
        assert [event.fields["reason"] for event in told(world, "certificate.voided")] == ["kubelet-restart"] * 2


# -- gaps --------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_certificate_does_not_outlive_a_gap_in_the_watch() -> None:
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
        assert {event.fields["reason"] for event in told(world, "certificate.voided")} == {"gap"}


@in_virtual_time
async def test_scrub_that_takes_longer_than_a_watch_gap_leaves_a_certificate_that_lasts() -> None:
    """Nothing looks at a device while it is scrubbed: that is no gap in the watch."""
    patient = replace(DEFAULT, limits=replace(Limits(), memory_floor=60.0))
    async with a_world(devices=1, policy=patient) as world:
        world.gpu().slow = 20.0
        began = world.clock.monotonic()
        job = await world.controller().scrubs.start(Occasion.ON_DEMAND)
        finished = await job.wait()
        assert world.clock.monotonic() - began > GAP
        await world.run(5.0)
        issued = world.record().certificate
        assert issued is not None
        assert issued.scrub == finished.id


@in_virtual_time
async def test_no_certificate_is_issued_over_a_gap_in_the_watch() -> None:
    """The service stands still once the eraser is done: whoever comes meanwhile leaves before it goes on."""
    async with a_world(devices=1) as world:
        await world.controller().scrubs.start(Occasion.ON_DEMAND)
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
async def test_no_exception_outlives_a_gap_in_the_watch() -> None:
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
async def test_a_watch_that_is_merely_slow_voids_nothing() -> None:
    async with a_world() as world:
        before = world.record().certificate
        world.pause(5.0)
        await world.run(3.0)
        assert world.record().certificate == before


# -- pods that nobody could name, and pods that cannot be read ---------------------------------------------------------


@in_virtual_time
async def test_a_grant_made_while_the_kubelet_was_away_gets_its_pod_when_it_is_back() -> None:
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
async def test_a_pod_that_cannot_be_read_keeps_its_device_no_longer_than_its_grace() -> None:
    async with a_world() as world:
        tenant = await running(world)
        assert tenant.first is not None
        world.unreadable.add(tenant.uid)
        world.kubelet.force_delete(tenant, lives_on=1000.0)
        await world.run(29.0)
        assert tenant.first in world.matter.living()
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN, within=60.0)
        assert list(world.matter.living(tenant.uid)) == []
        assert told(world, "leftover.pod-ended")


@in_virtual_time
async def test_a_pod_whose_sandbox_was_made_anew_starts() -> None:
    async with a_world() as world:
        tenant = await running(world)
        world.kubelet.remake_sandbox(tenant)
        starts = tenant.starts
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts > starts, within=60.0)


# -- assignments that we did not make ----------------------------------------------------------------------------------


@in_virtual_time
async def test_an_assignment_that_we_did_not_make_is_a_finding() -> None:
    async with a_shared_world() as world:
        pod, before = Pod("rival", "train-9", "uid-9"), world.record().certificate
        world.elsewhere = (Assignment(pod, "main", frozenset({world.gpu().id}), "vendor.example/gpu"),)
        await world.node.announce(RESOURCE, {})
        await world.run(30.0)
        (event,) = told(world)
        assert event.fields["use"] == "foreign-assignment"
        assert "rival/train-9" in str(event.fields["sentence"])
        assert world.record().certificate != before


# -- claims ------------------------------------------------------------------------------------------------------------


class Blinkered:
    """:class:`scrubber.ports.Holders` whose quick question leaves something out."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders

    async def held(self, device: Device) -> bool:
        return await self._holders.held(device)

    async def holders(self, device: Device, had: Collection[str] = (), scrub: str | None = None) -> HolderReport:
        return await self._holders.holders(device, had, scrub)

    async def users(self, device: Device) -> tuple[Holder, ...]:
        return await self._holders.users(device)

    def not_asked(self, device: Device) -> tuple[str, ...]:
        return ("holders: nobody looked behind the curtain",)


@in_virtual_time
async def test_a_fast_certificate_claims_only_what_the_driver_was_asked() -> None:
    async with a_world() as world:
        assert world.service is not None
        tools = world.service.dependencies
        controller = DeviceController(
            world.gpu().device,
            world.record(),
            dependencies=replace(tools, holders=Blinkered(tools.holders)),
            node=NodeContext(
                changed=lambda: None,
                pods=world.node.pods,
                still=world.node.devices.still,
                resources=lambda _: frozenset({RESOURCE}),
                records=lambda: [world.record()],
                breaker=world.node.devices.breaker,
                eraser_pool=world.node.devices.eraser_pool,
            ),
        )
        check = await controller.scrubs.check(Occasion.START)
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
