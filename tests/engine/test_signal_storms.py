"""Floods of signals: they cost one audit row a minute for each code, and do not delay other devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.handover_kind import Basis
from scrubber.domain.states import Health
from scrubber.domain.telemetry import Signal
from scrubber.ports.record import Event
from tests.world.asking import admitted, ask, started
from tests.world.service import HEALTH_EVERY
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

OWN_FAULT, CONTEXT, UNHEARD_OF = 31, 154, 999
"""XIDs caused by the application, depending on their context, and in no table."""


def told(world: World, code: int | None = None) -> list[Event]:
    """Return the audit events about XIDs."""
    events = [event for event in world.vault.events if event.name == "health.errors-reported"]
    return [event for event in events if code is None or event.fields["code"] == f"xid-{code}"]


def sums(world: World, code: int) -> list[object]:
    return [event.fields["new"] for event in told(world, code)]


def reported(world: World, code: int, times: int = 1, number: int = 0) -> None:
    xids = world.gpu(number).xids
    xids[code] = xids.get(code, 0) + times
    world.signal(number)


async def storm(world: World, seconds: float, *, per_second: int, codes: int = 1, number: int = 0) -> int:
    """Report each of ``codes`` application XIDs ``per_second`` times a second; return how many there were of each."""
    steps, apart = round(seconds * 10), per_second // 10
    for _ in range(steps):
        for code in range(codes):
            reported(world, OWN_FAULT + code, apart, number)
        await world.run(0.1)
    return steps * apart


OWN = replace(
    DEFAULT,
    error_classes={
        **DEFAULT.error_classes,
        **{OWN_FAULT + code: DEFAULT.error_classes[OWN_FAULT] for code in range(200)},
    },
)
"""A policy under which every code of a storm counts as the application's own."""


# -- how often it is logged --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_first_xid_of_a_code_is_logged_at_once_with_the_tenant_that_has_the_device() -> None:
    async with a_world(1) as world:
        await started(world)
        reported(world, OWN_FAULT)
        await world.run(0.01)
        (event,) = told(world)
        assert event.device == world.gpu().id
        assert (event.fields["code"], event.fields["class"]) == ("xid-31", "application")
        assert (event.fields["new"], event.fields["total"], event.fields["tenant"]) == (1, 1, "acme")
        assert "XID 31" in str(event.fields["message"])


@in_virtual_time
async def test_repeated_xids_of_a_code_are_logged_once_a_minute_with_their_sum() -> None:
    async with a_world(1) as world:
        times = await storm(world, 130.0, per_second=1_000)
        await world.run(70.0)
        events = told(world, OWN_FAULT)
        assert len(events) <= 4
        assert sum(int(str(each)) for each in sums(world, OWN_FAULT)) == times
        assert [event.fields["total"] for event in events][-1] == times
        pauses = [after.at - before.at for before, after in itertools.pairwise(events)]
        assert all(pause >= 60.0 for pause in pauses)


@in_virtual_time
async def test_different_xid_codes_are_counted_separately() -> None:
    async with a_world(1) as world:
        reported(world, OWN_FAULT, 3)
        await world.run(10.0)
        reported(world, CONTEXT, 2)
        await world.run(0.01)
        assert (sums(world, OWN_FAULT), sums(world, CONTEXT)) == ([3], [2])


@in_virtual_time
async def test_xids_of_different_devices_are_counted_separately() -> None:
    async with a_world(2) as world:
        for number in (0, 1):
            reported(world, OWN_FAULT, number + 1, number)
        await world.run(0.01)
        assert {event.device: event.fields["new"] for event in told(world)} == {
            world.gpu(0).id: 1,
            world.gpu(1).id: 2,
        }


@in_virtual_time
async def test_number_of_xid_codes_logged_per_minute_is_bounded_and_the_rest_are_logged_later() -> None:
    async with a_world(1, OWN) as world:
        for code in range(100):
            reported(world, OWN_FAULT + code)
        await world.run(50.0)
        assert len(told(world)) == 32
        await world.run(180.0)
        assert len(told(world)) == 100
        assert {event.fields["code"] for event in told(world)} == {f"xid-{OWN_FAULT + code}" for code in range(100)}


@in_virtual_time
async def test_storm_of_many_xid_codes_writes_a_bounded_number_of_audit_rows() -> None:
    async with a_world(1, OWN) as world:
        rows, writes = len(world.vault.events), world.vault.writes
        await storm(world, 65.0, per_second=50, codes=50)
        assert len(world.vault.events) - rows <= 2 * 32
        assert world.vault.writes - writes <= 2 * 32


@in_virtual_time
async def test_xid_that_the_driver_still_lists_is_not_logged_again() -> None:
    async with a_world(1) as world:
        reported(world, OWN_FAULT, 5)
        await world.run(1_000.0)
        assert sums(world, OWN_FAULT) == [5]
        writes = world.vault.writes
        await world.run(1_000.0)
        assert world.vault.writes == writes


# -- what is not lost --------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_xids_reported_while_the_ledger_failed_are_logged_once_it_works_again() -> None:
    async with a_world(1) as world:
        reported(world, OWN_FAULT, 2)
        await world.run(1.0)
        world.vault.refuses = "no space left"
        reported(world, OWN_FAULT, 3)
        reported(world, OWN_FAULT + 1, 4)
        await world.run(30.0)
        world.vault.refuses = None
        await world.run(HEALTH_EVERY)
        assert sums(world, OWN_FAULT + 1) == [4]  # the minute begins when the event was logged, not when it was due
        await world.run(60.0)
        assert sums(world, OWN_FAULT) == [2, 3]


@in_virtual_time
async def test_xids_still_listed_after_a_service_restart_are_logged_again() -> None:
    """Earlier counts are unknown then: drivers, and their listeners, count from their own start."""
    async with a_world(1) as world:
        reported(world, OWN_FAULT, 5)
        await world.run(1.0)
        world.kill()
        await world.start_service()
        await world.run(HEALTH_EVERY)
        assert sums(world, OWN_FAULT) == [5, 5]
        reported(world, OWN_FAULT, 2)
        await world.run(70.0)
        assert sums(world, OWN_FAULT) == [5, 5, 2]


@in_virtual_time
async def test_xid_that_occurred_while_no_service_ran_quarantines_the_device_at_the_next_start() -> None:
    async with a_world(1) as world:
        world.kill()
        world.gpu().xids[95] = 1
        await world.start_service()
        await world.until(lambda: world.record().health is Health.QUARANTINED, within=5.0)
        assert sums(world, 95) == [1]


@in_virtual_time
async def test_xid_that_occurs_again_after_a_reset_counts_as_new() -> None:
    """After a reset the driver no longer lists the XID, and counts from zero."""
    async with a_world(1) as world:
        reported(world, CONTEXT, 2)
        reported(world, 95)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.gpu().resets == 1
        await world.run(120.0)
        reported(world, CONTEXT)
        await world.run(1.0)
        assert sums(world, CONTEXT) == [2, 1]
        assert world.record().health is Health.SUSPECT


@in_virtual_time
async def test_xid_that_occurs_again_after_an_external_reset_counts_as_new() -> None:
    async with a_world(1) as world:
        reported(world, CONTEXT, 2)
        await world.run(120.0)
        world.gpu().xids.clear()
        await world.run(HEALTH_EVERY)
        assert world.gpu().resets == 0
        reported(world, CONTEXT, 2)
        await world.run(1.0)
        assert sums(world, CONTEXT) == [2, 2]
        assert world.record().health is Health.SUSPECT


# -- effects on the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [CONTEXT, UNHEARD_OF], ids=["context", "unknown"])
def test_xid_of_a_soft_class_makes_a_device_suspect_when_new_and_not_while_it_stays_listed(
    code: int,
) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_world(1) as world:
            reported(world, code)
            await world.run(0.01)
            assert world.record().health is Health.SUSPECT
            await world.until(lambda: world.record().health is Health.HEALTHY)
            assert code in world.gpu().xids
            await world.run(600.0)
            assert world.record().health is Health.HEALTHY
            reported(world, code)
            await world.run(0.01)
            assert world.record().health is Health.SUSPECT

    play()


@in_virtual_time
async def test_old_xid_of_a_soft_class_does_not_force_a_restart_onto_a_certificate() -> None:
    async with a_world(1) as world:
        reported(world, CONTEXT)
        await world.run(0.01)
        await world.until(lambda: world.record().health is Health.HEALTHY)
        tenant = await started(world)
        await world.run(3.0)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.SAME_CONTAINER
        assert world.record().health is Health.HEALTHY
        assert sums(world, CONTEXT) == [1]


@in_virtual_time
async def test_soft_xid_that_keeps_recurring_keeps_the_device_suspect_and_in_service() -> None:
    async with a_world(1) as world:
        for _ in range(60):
            reported(world, CONTEXT)
            await world.run(10.0)
            assert world.record().health is Health.SUSPECT
            assert world.node.view().devices[0].advertised
        assert len([event for event in world.vault.events if event.name.startswith("health.")]) <= 1 + 12


@in_virtual_time
async def test_fault_during_a_signal_storm_takes_the_device_out_at_once() -> None:
    async with a_world(1) as world:
        await storm(world, 5.0, per_second=1_000)
        reported(world, 95)
        await world.run(0.5)
        assert world.record().health is not Health.HEALTHY
        assert sums(world, 95) == [1]


# -- effects on others -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_in_a_signal_storm_is_inspected_a_bounded_number_of_times() -> None:
    async with a_world(1) as world:
        assert world.telemetry is not None
        looks, ask_driver = 0, world.telemetry.snapshot

        async def counted(device):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return await ask_driver(device)

        world.telemetry.snapshot = counted  # type: ignore[method-assign]
        for _ in range(2_000):
            reported(world, OWN_FAULT)
            await world.run(0.005)
        assert looks <= 10 * 25


@in_virtual_time
async def test_signal_storm_delays_neither_the_inspection_of_another_device_nor_a_hand_over() -> None:
    async with a_world(2) as world:
        for _ in range(1_000):
            reported(world, OWN_FAULT)
        await world.run(0.1)
        for _ in range(1_000):
            reported(world, OWN_FAULT)
        world.gpu(1).xids[79] = 1
        world.signal(1)
        await world.run(0.01)
        assert world.record(1).health is Health.QUARANTINED
        before = world.clock.monotonic()
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.CERTIFICATE
        assert world.clock.monotonic() - before < 0.5


@in_virtual_time
async def test_device_that_hangs_during_a_signal_storm_delays_no_other_device() -> None:
    async with a_world(2) as world:
        world.gpu(0).stuck = True
        for _ in range(100):
            reported(world, OWN_FAULT)
        world.gpu(1).xids[79] = 1
        world.signal(1)
        await world.run(0.01)
        assert world.record(1).health is Health.QUARANTINED


@in_virtual_time
async def test_signals_of_unknown_devices_are_ignored() -> None:
    async with a_world(1) as world:
        assert world.telemetry is not None
        writes = world.vault.writes
        for number in range(1_000):
            world.telemetry.happened.put_nowait(Signal(f"GPU-none-{number}", "xid", 95))
        await world.run(1.0)
        assert world.vault.writes == writes
        assert world.serving
        reported(world, 95)
        await world.run(0.01)
        assert world.record().health is not Health.HEALTHY
