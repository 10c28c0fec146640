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
from tests.world.asking import admitted, ask, started
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

END = replace(
    DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=10.0)
)
QUARANTINE = replace(DEFAULT, unauthorized_use=UnauthorizedUseAction.QUARANTINE)


def intruder(world: World, pod: str | None = None, device: int = 0) -> Proc:
    """Start a process that opens a device without a grant: one of the host, or of a (privileged) pod."""
    gpu = world.gpu(device).id
    container = f"{pod}/other#1" if pod else "host/miner#1"
    proc = world.matter.start(pod, container, f"x/{container}", mounted=frozenset({gpu}))
    world.matter.open(proc, gpu)
    return proc


def told(world: World, name: str = "unauthorized.use.detected") -> int:
    assert world.journal is not None
    return sum(event.name == name for event in world.journal.events)


async def restarted(world: World, tenant: Tenant) -> Grant:
    """Restart the tenant's container and return the grant of that start."""
    starts = tenant.starts
    world.kubelet.exit(tenant, again=True)
    await world.until(lambda: tenant.starts > starts)
    grant = world.record().last_grant
    assert grant is not None
    return grant


# -- unauthorized use after similar use was logged -------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_use_voids_exclusive_use_although_similar_use_was_logged_a_moment_ago() -> None:
    """A host process shows itself first, so that the next one, within the minute, is not logged as new."""
    async with a_world(devices=1) as world:
        decoy = intruder(world)
        await world.run(2.0)
        world.matter.end(decoy)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        tenant = await started(world)
        proc = intruder(world)
        await world.run(2.0)
        assert told(world) == 2
        assert not world.record().exclusive_use
        assert world.record().contaminated
        world.matter.end(proc)
        assert (await restarted(world, tenant)).basis is Basis.CERTIFICATE


@in_virtual_time
async def test_unauthorized_use_that_could_not_be_stored_is_recorded_once_the_disk_has_room() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        world.vault.refuses = "the disk is full"
        intruder(world)
        await world.run(3.0)
        world.vault.refuses = None
        await world.run(2.0)
        assert told(world) == 1
        assert world.record().contaminated
        assert tenant.running


@in_virtual_time
async def test_unauthorized_use_that_could_not_be_stored_voids_the_certificate_after_the_use_has_ended() -> None:
    async with a_world(devices=1) as world:
        world.vault.refuses = "the disk is full"
        proc = intruder(world)
        world.matter.write(proc, world.gpu().id)
        await world.run(3.0)
        world.matter.end(proc)
        world.vault.refuses = None
        await started(world)


@pytest.mark.parametrize("look", [1, 2], ids=["by-the-checks", "by-the-look-before-the-grant"])
def test_brief_use_found_while_a_grant_is_prepared_voids_the_certificate(
    look: int,
) -> None:
    @in_virtual_time
    async def use_it() -> None:
        async with a_world(devices=1) as world:
            assert world.service is not None
            holders, looks = world.service.dependencies.holders, count(1)
            tenant = await admitted(world)
            await world.run(1.2 - world.clock.monotonic() % 1.0)  # the usage check has just run
            asked = holders.is_held

            async def held(device: Device) -> bool:
                if next(looks) != look:
                    return await asked(device)
                proc = intruder(world)
                world.matter.write(proc, device.id)
                found = await asked(device)
                world.matter.end(proc)
                return found

            holders.is_held = held  # type: ignore[method-assign]
            await ask(world, tenant)
            assert next(looks) > 3
            assert world.gpu().cells == [""] * 4

    use_it()


# -- unauthorized users that change during the check -------------------------------------------------------------------


@in_virtual_time
async def test_unauthorized_pod_that_passes_the_device_between_processes_is_killed() -> None:
    """No process of the pod lives as long as the grace period."""
    async with a_world(policy=END) as world:
        other = await started(world, "acme", "train-1", 1)
        proc = intruder(world, other.uid)
        waiting = await world.admit("acme", "train-0")
        assert waiting is not None
        for _ in range(20):
            await world.run(6.0)
            if not proc.alive:
                break
            heir = intruder(world, other.uid)
            world.matter.end(proc)
            proc = heir
        assert not proc.alive
        assert other.first is not None
        assert other.first.alive
        await world.until(lambda: waiting.running, within=100.0)


@in_virtual_time
async def test_unauthorized_process_that_keeps_changing_its_name_is_logged_once() -> None:
    async with a_world(devices=1) as world:
        await started(world)
        proc = intruder(world)
        for number in range(250):
            proc.command = f"kworker/{number}"
            await world.run(0.01)
        assert told(world) == 1


@in_virtual_time
async def test_more_unauthorized_processes_than_the_service_remembers_are_all_killed() -> None:
    async with a_world(policy=END) as world:
        other = await started(world, "acme", "train-1", 1)
        crowd = [intruder(world, other.uid) for _ in range(1100)]
        await world.run(40.0)
        assert not any(proc.alive for proc in crowd)


# -- effects on others -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unkillable_unauthorized_processes_do_not_void_the_certificate_of_another_device() -> None:
    async with a_world(devices=3, policy=END) as world:
        other = await started(world, "acme", "train-1", 1)
        before = world.record(2).certificate
        assert before is not None
        for _ in range(10):
            intruder(world, other.uid).killable = False
        await world.run(120.0)
        assert world.record(2).certificate == before


@in_virtual_time
async def test_device_with_recurring_unauthorized_use_is_never_condemned() -> None:
    """A process that may open a device must not be able to force an operator to intervene."""
    async with a_world(devices=1, policy=QUARANTINE) as world:
        for _ in range(8):
            proc = intruder(world)
            await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
            world.matter.end(proc)
            await world.until(lambda: world.record().health is Health.PROBATION, within=4000.0)
        assert world.record().health is not Health.CONDEMNED
        await world.until(lambda: world.record().health is Health.HEALTHY, within=4000.0)


# -- adoption during other operations ----------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_found_during_a_scrub_is_not_adopted() -> None:
    """A scrub may begin between the check that found the pod and its adoption."""
    async with a_world(devices=1) as world:
        world.gpu().slow = 30.0
        job = await world.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await world.until(lambda: bool(world.erasers.running))
        pod = Pod("acme", "sudden-0", "uid-7")
        await world.controller().occupancy.adopt(Assignment(pod, "main", frozenset({world.gpu().id})))
        assert world.record().hygiene is Hygiene.SCRUBBING
        assert world.record().open_grants == ()
        world.gpu().slow = 1.0
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
    async with a_world(policy=END) as world:
        assert world.service is not None
        pods = world.node.pods
        other = await started(world, "acme", "train-1", 1)
        old = pods.reading
        proc = intruder(world, other.uid)
        world.kubelet.delay = 1000.0
        for _ in range(60):
            await world.run(0.5)
            pods.reading = old
        assert proc.alive


@in_virtual_time
async def test_unauthorized_pod_takes_no_device_out_of_service_while_the_kubelets_list_cannot_be_read() -> None:
    async with a_world(policy=QUARANTINE) as world:
        other = await started(world, "acme", "train-1", 1)
        await started(world)
        world.kubelet.trust = Trust.UNREADABLE
        intruder(world, other.uid)
        await world.run(5.0)
        assert told(world) == 1
        assert world.record().health is Health.HEALTHY
        world.kubelet.trust = Trust.TRUSTED
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
