"""Maintenance: idle devices are scrubbed and certified again, one at a time, in the hours that the policy specifies."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.evidence import Outcome, PathKind, ScrubRecord, ScrubTrigger, Step
from scrubber.domain.handover_kind import Basis
from scrubber.domain.health.history import DAY
from scrubber.domain.policy import MaintenanceRule, Policy
from scrubber.domain.states import Health, Hygiene
from tests.world.asking import admitted, ask, started
from tests.world.service import Pace
from tests.world.timeline import EPOCH, in_virtual_time
from tests.world.world import DEFAULT, World, a_world

HOUR = 3600.0
CALM = Pace(watch=8.0, health=60.0)
START = EPOCH % DAY
"""The time of day at which a world starts."""


def every(seconds: float, *, begin: float | None = None, lasts: float = 0.0, **more: object) -> Policy:
    """Return the default policy with maintenance.

    ``begin``: hours after the start of the world at which the window opens, for ``lasts`` seconds.
    """
    between = None
    if begin is not None:
        opens = (START + begin * HOUR) % DAY
        between = (opens, (opens + lasts) % DAY)
    return replace(DEFAULT, maintenance=replace(MaintenanceRule(seconds, between), **more))  # type: ignore[arg-type]


def scheduled(world: World, number: int | None = None) -> list[ScrubRecord]:
    """Return the maintenance scrubs, in order of their start."""
    found = [scrub for scrub in world.vault.scrubs.values() if scrub.trigger is ScrubTrigger.MAINTENANCE]
    mine = [scrub for scrub in found if number is None or scrub.device == world.gpu(number).id]
    return sorted(mine, key=lambda scrub: scrub.started)


def issued(world: World, number: int = 0) -> float:
    certificate = world.record(number).certificate
    assert certificate is not None
    return certificate.issued_at


@in_virtual_time
async def test_unused_device_is_scrubbed_again_when_its_maintenance_is_due() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        proved = issued(world)
        await world.run(HOUR - 60.0)
        assert scheduled(world) == []
        assert issued(world) == proved
        await world.run(120.0)
        (scrub,) = scheduled(world)
        assert proved + HOUR <= scrub.started < proved + HOUR + 5.0
        assert scrub.outcome is Outcome.PASSED
        assert issued(world) > proved
        await world.run(3 * HOUR)
        assert len(scheduled(world)) == 4


@in_virtual_time
async def test_certificate_from_maintenance_is_accepted_for_a_grant() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        await world.run(HOUR + 60.0)
        (scrub,) = scheduled(world)
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.CERTIFICATE
        assert world.vault.certificates[granted.certificate or ""].rests_on == scrub.certificate


@in_virtual_time
async def test_policy_without_a_maintenance_interval_schedules_no_maintenance() -> None:
    async with a_world(1, pace=CALM) as world:
        proved = issued(world)
        await world.run(DAY / 2)
        assert scheduled(world) == []
        assert issued(world) == proved


@in_virtual_time
async def test_maintenance_scrubs_one_device_at_a_time() -> None:
    async with a_world(4, every(HOUR), pace=CALM) as world:
        for number in range(4):
            world.gpu(number).slow = 4.0
        await world.run(HOUR + 120.0)
        scrubs = scheduled(world)
        assert len(scrubs) == 4
        for before, after in itertools.pairwise(scrubs):
            assert before.ended is not None
            assert before.ended <= after.started


@pytest.mark.parametrize("begin", [2.0, 15.5], ids=["by day", "over midnight"])
def test_maintenance_starts_only_in_the_hours_that_the_policy_names(begin: float) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world(2, every(HOUR, begin=begin, lasts=HOUR), pace=CALM) as world:
            await world.run(begin * HOUR - 30.0)
            assert scheduled(world) == []
            await world.run(HOUR)
            assert len(scheduled(world)) == 2
            await world.run(DAY)
            for scrub in scheduled(world):
                assert (scrub.started - EPOCH - begin * HOUR) % DAY < HOUR
            assert len(scheduled(world)) == 4

    play()


@in_virtual_time
async def test_no_maintenance_scrub_starts_after_the_window_has_closed() -> None:
    """However many are due, and however long each takes: the rest wait for the next day."""
    async with a_world(2, every(HOUR / 2, begin=1.0, lasts=4.0), pace=CALM) as world:
        for number in range(2):
            world.gpu(number).slow = 6.0  # about five seconds each
        await world.run(1.5 * HOUR)
        assert len(scheduled(world)) == 1
        await world.run(DAY)
        assert len(scheduled(world)) == 2
        for scrub in scheduled(world):
            assert (scrub.started - EPOCH - HOUR) % DAY < 4.0


@in_virtual_time
async def test_maintenance_that_could_not_start_during_the_window_waits_for_the_next_day() -> None:
    async with a_world(1, every(HOUR / 2, begin=1.0, lasts=60.0), pace=CALM) as world:
        await world.run(HOUR - 30.0)
        world.vault.refuses = "no space left"
        await world.run(120.0)
        world.vault.refuses = None
        await world.run(HOUR)
        assert scheduled(world) == []
        assert world.record().hygiene is Hygiene.CLEAN
        await world.run(DAY - HOUR)
        assert len(scheduled(world)) == 1


@in_virtual_time
async def test_device_in_use_gets_no_maintenance() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        tenant = await started(world)
        bytes_before = list(world.gpu().cells)
        await world.run(3 * HOUR)
        assert scheduled(world) == []
        assert world.gpu().cells == bytes_before
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        proved = issued(world)
        await world.run(HOUR + 60.0)
        (scrub,) = scheduled(world)
        assert scrub.started >= proved + HOUR


@in_virtual_time
async def test_scrub_on_demand_postpones_the_maintenance_of_its_device() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        await world.run(HOUR / 2)
        assert world.service is not None
        await world.service.scrub(world.gpu().id)
        await world.run(HOUR / 2 + 60.0)
        assert scheduled(world) == []
        await world.run(HOUR / 2)
        assert len(scheduled(world)) == 1


@in_virtual_time
async def test_maintenance_runs_the_diagnostics_level_of_its_policy_and_other_scrubs_do_not() -> None:
    async with a_world(1, every(HOUR, diagnostics=DiagnosticLevel.QUICK), pace=CALM) as world:
        await world.run(HOUR + 60.0)
        assert world.service is not None
        await world.service.scrub(world.gpu().id)
        tried = {
            scrub.trigger
            for scrub in world.vault.scrubs.values()
            if Step.DIAGNOSTICS in {step.step for step in scrub.steps}
        }
        assert tried == {ScrubTrigger.MAINTENANCE}


@in_virtual_time
async def test_start_during_maintenance_joins_the_maintenance_scrub() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        world.gpu().slow = 4.0
        await world.run(HOUR - 10.0)
        await world.until(lambda: bool(scheduled(world)) and bool(world.erasers.running))
        tenant = await admitted(world)
        (granted,) = await ask(world, tenant)
        (scrub,) = scheduled(world)
        assert world.vault.certificates[granted.certificate or ""].rests_on == scrub.certificate
        begun = [each for each in world.vault.scrubs.values() if each.trigger is ScrubTrigger.CONTAINER_START]
        assert {each.path for each in begun} == {PathKind.FAST}


@in_virtual_time
async def test_start_waits_for_the_maintenance_of_its_own_device_only() -> None:
    async with a_world(2, every(HOUR), pace=CALM) as world:
        for number in range(2):
            world.gpu(number).slow = 4.0
        await world.run(HOUR - 10.0)
        await world.until(lambda: bool(scheduled(world)))
        (scrub,) = scheduled(world)
        other = next(number for number in range(2) if world.gpu(number).id != scrub.device)
        before = world.clock.monotonic()
        await ask(world, await admitted(world, "acme", "train-0", other))
        assert world.clock.monotonic() - before < 0.5


@in_virtual_time
async def test_maintenance_finds_bad_memory_and_takes_the_device_out_of_service() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        world.gpu().wont_clear = True
        await world.run(HOUR + 60.0)
        (scrub,) = scheduled(world)
        assert scrub.outcome is Outcome.FAILED
        assert world.record().health not in (Health.HEALTHY, Health.SUSPECT)


@in_virtual_time
async def test_blocked_maintenance_of_one_device_does_not_block_the_maintenance_of_another() -> None:
    async with a_world(2, every(HOUR), pace=CALM) as world:
        host = world.matter.start(None, "host", "host")
        await world.run(HOUR / 2)
        world.matter.open(host, world.gpu(0).id)
        await world.run(HOUR)
        assert scheduled(world, 1) != []
        assert world.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_service_start_scrubs_every_device_and_restarts_the_maintenance_interval() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        await world.run(HOUR - 60.0)
        world.kill()
        await world.start_service()
        await world.until(world.settled)
        proved = issued(world)
        await world.run(HOUR / 2)
        assert scheduled(world) == []
        await world.run(HOUR / 2 + 60.0)
        (scrub,) = scheduled(world)
        assert scrub.started >= proved + HOUR


@in_virtual_time
async def test_quarantined_device_gets_no_maintenance() -> None:
    async with a_world(1, every(HOUR), pace=CALM) as world:
        await world.node.actions.quarantine("0", "kept for the lab", "uid:0")
        await world.run(3 * HOUR)
        assert scheduled(world) == []


@in_virtual_time
async def test_device_that_faults_while_it_waits_for_maintenance_is_recovered_instead() -> None:
    async with a_world(2, every(HOUR), pace=CALM) as world:
        for number in range(2):
            world.gpu(number).slow = 6.0
        await world.run(HOUR - 10.0)
        await world.until(lambda: bool(scheduled(world)))
        (first,) = scheduled(world)
        other = next(number for number in range(2) if world.gpu(number).id != first.device)
        world.gpu(other).xids[95] = 1
        world.signal(other)
        await world.until(lambda: world.record(other).health is Health.PROBATION)
        assert scheduled(world, other) == []
        (mine,) = [
            scrub
            for scrub in world.vault.scrubs.values()
            if scrub.device == world.gpu(other).id
            and scrub.started > first.started
            and scrub.trigger is ScrubTrigger.RECOVERY
        ]
        assert mine.outcome is Outcome.PASSED
