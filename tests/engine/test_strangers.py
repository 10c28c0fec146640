"""Strangers who know how they are looked for, and what meeting them must never cost anybody else."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.device import Device
from scrubber.domain.evidence import Occasion
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Limits, Ungranted
from scrubber.domain.record import Grant
from scrubber.domain.using import Use, judge_use, may_be_ended
from tests.world.asking import admitted, ask, started
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

END = replace(DEFAULT, ungranted=Ungranted.END, limits=replace(Limits(), dying_grace=10.0))
QUARANTINE = replace(DEFAULT, ungranted=Ungranted.QUARANTINE)


def intruder(world: World, pod: str | None = None, device: int = 0) -> Proc:
    """A process that opens a device which is not its own: of the node, or of a pod that could (a privileged one)."""
    gpu = world.gpu(device).id
    container = f"{pod}/other#1" if pod else "host/miner#1"
    proc = world.matter.start(pod, container, f"x/{container}", mounted=frozenset({gpu}))
    world.matter.open(proc, gpu)
    return proc


def told(world: World, name: str = "use.ungranted") -> int:
    assert world.journal is not None
    return sum(event.name == name for event in world.journal.events)


async def restarted(world: World, tenant: Tenant) -> Grant:
    """The grant by which its container started again."""
    starts = tenant.starts
    world.kubelet.exit(tenant, again=True)
    await world.until(lambda: tenant.starts > starts)
    grant = world.record().last_grant
    assert grant is not None
    return grant


# -- a stranger who was told of before -------------------------------------------------------------------------------


@in_virtual_time
async def test_a_stranger_voids_what_was_proved_although_his_like_was_told_of_a_moment_ago() -> None:
    """Somebody of the node shows himself first, so that the next one, within the minute, is no news."""
    async with a_world(devices=1) as world:
        decoy = intruder(world)
        await world.run(2.0)
        world.matter.end(decoy)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        tenant = await started(world)
        proc = intruder(world)
        await world.run(2.0)
        assert told(world) == 2
        assert not world.record().watched
        assert world.record().tainted
        world.matter.end(proc)
        assert (await restarted(world, tenant)).basis is Basis.CERTIFICATE


@in_virtual_time
async def test_a_stranger_who_could_not_be_recorded_is_recorded_once_the_disk_has_room() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        world.vault.refuses = "the disk is full"
        intruder(world)
        await world.run(3.0)
        world.vault.refuses = None
        await world.run(2.0)
        assert told(world) == 1
        assert world.record().tainted
        assert tenant.running


@in_virtual_time
async def test_a_use_that_could_not_be_recorded_voids_the_certificate_although_it_is_over_by_then() -> None:
    async with a_world(devices=1) as world:
        world.vault.refuses = "the disk is full"
        proc = intruder(world)
        world.matter.write(proc, world.gpu().id)
        await world.run(3.0)
        world.matter.end(proc)
        world.vault.refuses = None
        await started(world)


@pytest.mark.parametrize("look", [1, 2], ids=["by-the-checks", "by-the-look-before-the-grant"])
def test_a_use_that_was_seen_on_the_way_to_a_grant_voids_the_certificate_although_it_was_over_at_once(
    look: int,
) -> None:
    @in_virtual_time
    async def use_it() -> None:
        async with a_world(devices=1) as world:
            assert world.service is not None
            holders, looks = world.service.dependencies.holders, count(1)
            tenant = await admitted(world)
            await world.run(1.2 - world.clock.monotonic() % 1.0)  # the watch has just looked
            asked = holders.held

            async def held(device: Device) -> bool:
                if next(looks) != look:
                    return await asked(device)
                proc = intruder(world)
                world.matter.write(proc, device.id)
                found = await asked(device)
                world.matter.end(proc)
                return found

            holders.held = held  # type: ignore[method-assign]
            await ask(world, tenant)
            assert next(looks) > 3
            assert world.gpu().cells == [""] * 4

    use_it()


# -- a stranger who changes while he is looked at ----------------------------------------------------------------------


@in_virtual_time
async def test_a_stranger_pod_that_hands_the_device_from_process_to_process_is_ended_all_the_same() -> None:
    """No process of it lives as long as the grace."""
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
async def test_a_stranger_who_calls_himself_something_else_all_the_while_is_found() -> None:
    async with a_world(devices=1) as world:
        await started(world)
        proc = intruder(world)
        for number in range(250):
            proc.command = f"kworker/{number}"
            await world.run(0.01)
        assert told(world) == 1


@in_virtual_time
async def test_more_strangers_than_anybody_remembers_are_ended_all_the_same() -> None:
    async with a_world(policy=END) as world:
        other = await started(world, "acme", "train-1", 1)
        crowd = [intruder(world, other.uid) for _ in range(1100)]
        await world.run(40.0)
        assert not any(proc.alive for proc in crowd)


# -- what meeting a stranger costs others ------------------------------------------------------------------------------


@in_virtual_time
async def test_strangers_that_do_not_die_cost_no_other_device_its_certificate() -> None:
    async with a_world(devices=3, policy=END) as world:
        other = await started(world, "acme", "train-1", 1)
        before = world.record(2).certificate
        assert before is not None
        for _ in range(10):
            intruder(world, other.uid).killable = False
        await world.run(120.0)
        assert world.record(2).certificate == before


@in_virtual_time
async def test_a_device_that_strangers_come_back_to_is_never_condemned_for_them() -> None:
    """Whoever may open a device must not be able to have a person called for it."""
    async with a_world(devices=1, policy=QUARANTINE) as world:
        for _ in range(8):
            proc = intruder(world)
            await world.until(lambda: world.record().health is Health.QUARANTINED, within=3.0)
            world.matter.end(proc)
            await world.until(lambda: world.record().health is Health.PROBATION, within=4000.0)
        assert world.record().health is not Health.CONDEMNED
        await world.until(lambda: world.record().health is Health.HEALTHY, within=4000.0)


# -- adoption while other things happen --------------------------------------------------------------------------------


@in_virtual_time
async def test_a_pod_is_not_adopted_in_the_middle_of_a_scrub_and_the_service_lives() -> None:
    """A scrub may begin between the look that found the pod and its adoption."""
    async with a_world(devices=1) as world:
        world.gpu().slow = 30.0
        job = await world.controller().scrubs.start(Occasion.ON_DEMAND)
        await world.until(lambda: bool(world.erasers.running))
        pod = Pod("acme", "sudden-0", "uid-7")
        await world.controller().occupancy.adopt(Assignment(pod, "main", frozenset({world.gpu().id})))
        assert world.record().hygiene is Hygiene.SCRUBBING
        assert world.record().open_grants == ()
        world.gpu().slow = 1.0
        await job.over()


# -- pods that the kubelet has not come to yet -------------------------------------------------------------------------

LATE = Pod("acme", "late-0", "uid-9")
EARLIER = Grant(1, Assignment(Pod("acme", "first-0", "uid-1"), "main", frozenset({"gpu"})), HandOver.UNKNOWN, 0.0, "b")
NOT_COME_TO = Reading(Trust.TRUSTED, unproved=frozenset({LATE}))


def test_a_pod_that_a_restarted_kubelet_has_not_come_to_is_no_stranger_on_a_device_that_nobody_was_granted() -> None:
    assert judge_use(LATE.uid, "gpu", (), NOT_COME_TO) is Use.UNTELLABLE
    assert judge_use("uid-8", "gpu", (), NOT_COME_TO) is Use.STRANGER
    assert judge_use(LATE.uid, "gpu", (), Reading(Trust.TRUSTED)) is Use.STRANGER


def test_and_is_not_ended_on_one_that_somebody_was() -> None:
    assert judge_use(LATE.uid, "gpu", (EARLIER,), NOT_COME_TO) is Use.STRANGER
    assert not may_be_ended(LATE.uid, "gpu", (EARLIER,), NOT_COME_TO)
    assert may_be_ended(LATE.uid, "gpu", (EARLIER,), Reading(Trust.TRUSTED))


@in_virtual_time
async def test_nobody_is_ended_by_a_list_that_was_read_before_he_was_first_seen() -> None:
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
async def test_by_a_list_that_cannot_be_read_no_pod_takes_a_device_out_of_service() -> None:
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
