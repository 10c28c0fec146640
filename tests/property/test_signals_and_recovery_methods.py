"""Every signal, its meaning and how a device recovers from it: the specification as a table, run against the engine.

Each row of the table (``tests/world/ways_back.py``) is run twice in virtual time: once with its recovery blocked, for
long enough, and once with it possible. A code without a row, and a row without a code, are failures.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.evidence import Severity
from scrubber.domain.health.signal_table import ERROR_CLASSES, ErrorClass
from scrubber.domain.health.signals import recovery_method
from scrubber.domain.policy import HealthRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, Health
from tests.world.matter import gpu, instance
from tests.world.service import Pace
from tests.world.timeline import in_virtual_time
from tests.world.ways_back import TABLE, XID, Row, do
from tests.world.world import DEFAULT, World, a_world

PACE = Pace(watch=4.0, health=10.0)
SUSTAINED = 300.0
LONG = 3_600.0
"""Seconds for which a device that must not return is watched."""
POLICY = replace(
    DEFAULT,
    error_classes={code: kind for kind, code in XID.items() if kind is not ErrorClass.UNKNOWN},
    health=HealthRule(quarantine_after=dict.fromkeys(NVIDIA_SIGNALS.soft, SUSTAINED)),
)
HEALTHY, SUSPECT, QUARANTINED, CONDEMNED = Health.HEALTHY, Health.SUSPECT, Health.QUARANTINED, Health.CONDEMNED

AWAY = [row for row in TABLE if row.takes_out]
every_row = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.code)
every_row_that_takes_out = pytest.mark.parametrize("row", AWAY, ids=lambda row: row.code)


# -- running a row -----------------------------------------------------------------------------------------------------


def past(world: World, number: int = 0) -> list[tuple[float, DeviceRecord]]:
    return [(at, each) for at, each in world.laws.health.past if each.device == world.gpu(number).id]


def named(world: World, row: Row, *healths: Health) -> bool:
    record = world.record()
    return record.health in healths and record.cause is not None and record.cause.code == row.told


async def brought_about(world: World, row: Row) -> None:
    """Put the fault of ``row`` into the world and wait for its effect, at once or once it has lasted."""
    begun = world.clock.wall()
    await do(row.put, world)
    world.signal(0)
    await world.until(lambda: named(world, row, row.at_once), within=300.0)
    if row.takes_out and row.at_once is SUSPECT:
        assert world.controller().advertised
        await world.until(lambda: named(world, row, QUARANTINED), within=SUSTAINED + 3 * PACE.health)
        first_out = next(at for at, each in past(world) if each.health is QUARANTINED)
        assert first_out - begun >= SUSTAINED
    cause = world.record().cause
    assert cause is not None
    assert cause.recovery_method is row.way
    assert cause.message


async def the_service_starts_again(world: World) -> None:
    world.kill()
    await world.start_service()


async def mended(world: World) -> None:
    """Remove every fault from the world."""
    for each in world.matter.gpus.values():
        each.mend()
    world.erasers.unkillable = False
    for erasing in list(world.erasers.running.values()):
        erasing.killable = True
    for proc in world.matter.living():
        proc.killable = True
        world.matter.end(proc)


async def opened(world: World, row: Row) -> None:
    match row.opens:
        case "condition":
            await mended(world)
        case "reboot":
            world.reboot()
            await world.start_service()
        case "operator":
            await mended(world)
            await world.node.actions.unquarantine("0", "looked at", "uid:0")


async def returns(world: World) -> None:
    """Wait for the return over probation; a law of the world checks how many clean scrubs that takes."""
    await world.until(lambda: world.record().health is HEALTHY, within=2 * LONG)
    await world.until(world.settled)
    ways = [each.health for _, each in past(world)]
    assert Health.PROBATION in ways[len(ways) - 1 - ways[::-1].index(QUARANTINED) :]
    assert world.controller().advertised


def nobody_else_was_out(world: World) -> None:
    assert all(each.health is HEALTHY for _, each in past(world, 1))


def test_every_signal_code_and_error_class_has_exactly_one_row() -> None:
    codes = [row.code for row in TABLE]
    assert len(codes) == len(set(codes))
    assert {*codes} == {*NVIDIA_SIGNALS.classifications} | {kind.value for kind in ErrorClass}


@every_row
def test_signal_tables_of_the_code_match_the_specification(row: Row) -> None:
    severity = {HEALTHY: Severity.NOTE, SUSPECT: Severity.WARNING, QUARANTINED: Severity.FAULT}[row.at_once]
    meaning = (
        NVIDIA_SIGNALS.classifications[row.code]
        if row.code in NVIDIA_SIGNALS.classifications
        else ERROR_CLASSES[ErrorClass(row.code)]
    )
    assert meaning.severity is severity
    assert recovery_method(row.told, POLICY) is row.way


@every_row_that_takes_out
def test_device_never_returns_without_its_recovery_method_despite_restarts(row: Row) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world(policy=replace(POLICY, **row.policy), pace=PACE) as world:
            if row.opens == "reset":
                world.gpu().reset_fails = "it does not take"
            await brought_about(world, row)
            out = len(past(world))
            await world.run(LONG / 2)
            await the_service_starts_again(world)
            if row.opens == "operator":
                world.reboot()
                await world.start_service()
            await world.run(LONG / 2)
            later = [each for _, each in past(world)[out:]]
            assert not any(each.health in ADVERTISED for each in later)
            assert world.record().health is row.meanwhile or (
                world.record().health is Health.RECOVERING and row.meanwhile is QUARANTINED
            )
            assert not world.controller().advertised
            nobody_else_was_out(world)

    play()


@every_row_that_takes_out
def test_device_returns_through_probation_once_its_recovery_method_is_available(row: Row) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world(policy=replace(POLICY, **row.policy), pace=PACE) as world:
            await brought_about(world, row)
            await opened(world, row)
            await returns(world)
            assert bool(world.gpu().resets) >= (row.opens == "reset")
            nobody_else_was_out(world)

    play()


@pytest.mark.parametrize("row", [row for row in AWAY if row.meanwhile is CONDEMNED], ids=lambda row: row.code)
def test_condemned_device_returns_through_probation_after_its_release_by_an_operator(row: Row) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world(policy=replace(POLICY, **row.policy), pace=PACE) as world:
            if row.opens == "reset":
                world.gpu().reset_fails = "it does not take"
            await brought_about(world, row)
            await world.until(lambda: world.record().health is CONDEMNED, within=LONG)
            cause = world.record().cause
            assert cause is not None
            assert "a person has to look at it" in cause.message
            assert not world.controller().advertised
            await mended(world)
            await world.run(LONG)
            assert world.record().health is CONDEMNED
            await world.node.actions.unquarantine("0", "a new board", "uid:0")
            await returns(world)

    play()


# -- signals without effect on service ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in TABLE if row.at_once is HEALTHY], ids=lambda row: row.code)
@in_virtual_time
async def test_signal_without_meaning_for_the_device_changes_neither_health_nor_certificate(row: Row) -> None:
    async with a_world(policy=POLICY, pace=PACE) as world:
        certificate = world.record().certificate
        await do(row.put, world)
        world.signal(0)
        await world.run(LONG)
        assert {each.health for _, each in past(world)} == {HEALTHY}
        assert world.record().certificate == certificate


@pytest.mark.parametrize("row", [row for row in TABLE if row.opens == "calm"], ids=lambda row: row.code)
@in_virtual_time
async def test_event_signal_makes_a_device_suspect_for_the_quiet_period_although_the_driver_still_lists_it(
    row: Row,
) -> None:
    async with a_world(policy=POLICY, pace=PACE) as world:
        await brought_about(world, row)
        assert world.controller().advertised
        began = world.clock.monotonic()
        await world.until(lambda: world.record().health is HEALTHY, within=POLICY.health.quiet_period + 2 * PACE.health)
        assert world.clock.monotonic() - began >= POLICY.health.quiet_period - PACE.health
        await world.run(LONG)
        assert world.record().health is HEALTHY
        assert QUARANTINED not in {each.health for _, each in past(world)}


# -- transient conditions ----------------------------------------------------------------------------------------------

soft_ones = pytest.mark.parametrize(
    "row", [row for row in TABLE if row.code in NVIDIA_SIGNALS.soft], ids=lambda row: row.code
)


@soft_ones
@in_virtual_time
async def test_soft_signal_with_regular_quiet_periods_never_quarantines_the_device(row: Row) -> None:
    calm = POLICY.health.quiet_period
    async with a_world(policy=POLICY, pace=PACE) as world:
        for _ in range(6):
            await do(row.put, world)
            await world.run(SUSTAINED - calm - PACE.health)
            assert world.record().health is SUSPECT
            world.gpu().mend()
            await world.run(calm + 2 * PACE.health)
            assert world.record().health is HEALTHY
        assert QUARANTINED not in {each.health for _, each in past(world)}


@soft_ones
@in_virtual_time
async def test_soft_signal_with_short_interruptions_counts_as_lasting(row: Row) -> None:
    async with a_world(policy=POLICY, pace=PACE) as world:
        for _ in range(int(SUSTAINED / 40) + 2):
            await do(row.put, world)
            await world.run(20.0)
            world.gpu().mend()
            await world.run(20.0)
        assert QUARANTINED in {each.health for _, each in past(world)}


@soft_ones
@in_virtual_time
async def test_soft_signal_without_a_time_limit_keeps_the_device_suspect_while_the_signal_lasts(row: Row) -> None:
    limitless = replace(POLICY, health=replace(POLICY.health, quarantine_after={}))
    async with a_world(policy=limitless, pace=PACE) as world:
        await do(row.put, world)
        await world.run(LONG)
        await the_service_starts_again(world)
        await world.run(LONG)
        assert world.record().health is SUSPECT
        assert QUARANTINED not in {each.health for _, each in past(world)}
        world.gpu().mend()
        await world.until(lambda: world.record().health is HEALTHY)


@soft_ones
@in_virtual_time
async def test_duration_of_a_soft_signal_survives_service_restarts(row: Row) -> None:
    async with a_world(policy=POLICY, pace=PACE) as world:
        await do(row.put, world)
        begun = world.clock.monotonic()
        for _ in range(5):
            await world.run(SUSTAINED / 6)
            await the_service_starts_again(world)
        await world.until(lambda: named(world, row, QUARANTINED), within=SUSTAINED)
        assert world.clock.monotonic() - begun <= SUSTAINED + 3 * PACE.health


# -- the driver's recommendation, and the table of XIDs where there is none --------------------------------------------

WORD: Mapping[str | None, Mapping[str, str]] = {
    # Recommendation of the driver → for each class of a listed XID: the cause of a quarantine, "suspect", or "".
    None: {"reset": "xid", "reboot": "xid", "repair": "xid", "context": "suspect", "unknown": "suspect"},
    "none": {"reset": "xid", "reboot": "xid", "repair": "xid", "context": "", "unknown": "suspect"},
    "reset": dict.fromkeys(ErrorClass, "driver-requests-reset"),
    "drain-and-reset": dict.fromkeys(ErrorClass, "driver-requests-reset"),
    "reboot": dict.fromkeys(ErrorClass, "driver-requests-reboot"),
    "imex": dict.fromkeys(ErrorClass, "driver-requests-operator"),
    "drain-p2p": dict.fromkeys(ErrorClass, "driver-requests-operator"),
}


@pytest.mark.parametrize(("word", "kind"), list(itertools.product(WORD, ErrorClass)))
@in_virtual_time
async def test_recovery_action_requested_by_the_driver_overrides_the_error_class(
    word: str | None, kind: ErrorClass
) -> None:
    async with a_world(policy=POLICY, pace=PACE) as world:
        world.gpu().recovery, world.gpu().reset_fails = word, "not now"
        world.gpu().came(XID[kind])
        world.signal(0)
        await world.run(1.0)
        expected = WORD[word].get(kind, "")
        record = next(each for _, each in past(world)[::-1] if each.health is not Health.RECOVERING)
        if expected == "suspect":
            assert record.health is SUSPECT
        elif not expected:
            assert record.health is HEALTHY
        else:
            assert record.health is QUARANTINED
            assert record.cause is not None
            assert record.cause.code == (f"xid-{XID[kind]}" if expected == "xid" else expected)


# -- effects on related devices ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_fault_of_a_mig_instance_affects_its_siblings_and_no_other_gpu() -> None:
    """Instances are not reset automatically: siblings are out until an operator resets their GPU and releases them."""
    parts = [instance(0, "GPU-A"), instance(1, "GPU-A"), instance(2, "GPU-B"), gpu(3)]
    async with a_world(policy=POLICY, pace=PACE, gpus=parts) as world:
        world.gpu().came(XID[ErrorClass.RESET])
        world.signal(0)
        await world.until(lambda: {world.record(0).health, world.record(1).health} == {CONDEMNED}, within=LONG)
        for bystander in (2, 3):
            assert {each.health for _, each in past(world, bystander)} == {HEALTHY}
        for sibling in (0, 1):
            world.gpu(sibling).mend()
            await world.node.actions.unquarantine(world.gpu(sibling).id, "its GPU was reset", "uid:0")
        await world.until(lambda: {world.record(0).health, world.record(1).health} == {HEALTHY}, within=LONG)


@in_virtual_time
async def test_peer_reset_together_with_a_device_stays_healthy_and_is_certified_again() -> None:
    async with a_world(policy=POLICY, pace=PACE) as world:
        world.gpu().together = (world.gpu(1).id,)
        certificate = world.record(1).certificate
        world.gpu().came(XID[ErrorClass.RESET])
        world.signal(0)
        await world.until(lambda: world.record().health is QUARANTINED)
        await returns(world)
        assert world.gpu(1).resets == world.gpu(0).resets == 1
        nobody_else_was_out(world)
        assert world.record(1).certificate not in (None, certificate)
