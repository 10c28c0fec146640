"""Floods of signals: they cost one audit row a minute for each code, and do not delay other devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scrubber.domain.handover_kind import Basis
from scrubber.domain.states import Health
from scrubber.domain.telemetry import Signal
from scrubber.ports.record import Event
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.service import HEALTH_EVERY
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

OWN_FAULT, CONTEXT, UNKNOWN_XID = 31, 154, 999
"""XIDs caused by the application, depending on their context, and in no table."""


def logged_xids(cluster: SimulatedCluster, code: int | None = None) -> list[Event]:
    """Return the audit events about XIDs."""
    events = [event for event in cluster.ledger_store.events if event.name == "health.errors-reported"]
    return [event for event in events if code is None or event.fields["code"] == f"xid-{code}"]


def sums(cluster: SimulatedCluster, code: int) -> list[object]:
    return [event.fields["new"] for event in logged_xids(cluster, code)]


def reported(cluster: SimulatedCluster, code: int, times: int = 1, number: int = 0) -> None:
    xids = cluster.gpu(number).xids
    xids[code] = xids.get(code, 0) + times
    cluster.signal(number)


async def storm(cluster: SimulatedCluster, seconds: float, *, per_second: int, codes: int = 1, number: int = 0) -> int:
    """Report each of ``codes`` application XIDs ``per_second`` times a second; return how many there were of each."""
    steps, apart = round(seconds * 10), per_second // 10
    for _ in range(steps):
        for code in range(codes):
            reported(cluster, OWN_FAULT + code, apart, number)
        await cluster.run(0.1)
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
    async with simulated_cluster(1) as cluster:
        await started(cluster)
        reported(cluster, OWN_FAULT)
        await cluster.run(0.01)
        (event,) = logged_xids(cluster)
        assert event.device == cluster.gpu().id
        assert (event.fields["code"], event.fields["class"]) == ("xid-31", "application")
        assert (event.fields["new"], event.fields["total"], event.fields["tenant"]) == (1, 1, "acme")
        assert "XID 31" in str(event.fields["message"])


@in_virtual_time
async def test_repeated_xids_of_a_code_are_logged_once_a_minute_with_their_sum() -> None:
    async with simulated_cluster(1) as cluster:
        times = await storm(cluster, 130.0, per_second=1_000)
        await cluster.run(70.0)
        events = logged_xids(cluster, OWN_FAULT)
        assert len(events) <= 4
        assert sum(int(str(each)) for each in sums(cluster, OWN_FAULT)) == times
        assert [event.fields["total"] for event in events][-1] == times
        pauses = [after.at - before.at for before, after in itertools.pairwise(events)]
        assert all(pause >= 60.0 for pause in pauses)


@in_virtual_time
async def test_different_xid_codes_are_counted_separately() -> None:
    async with simulated_cluster(1) as cluster:
        reported(cluster, OWN_FAULT, 3)
        await cluster.run(10.0)
        reported(cluster, CONTEXT, 2)
        await cluster.run(0.01)
        assert (sums(cluster, OWN_FAULT), sums(cluster, CONTEXT)) == ([3], [2])


@in_virtual_time
async def test_xids_of_different_devices_are_counted_separately() -> None:
    async with simulated_cluster(2) as cluster:
        for number in (0, 1):
            reported(cluster, OWN_FAULT, number + 1, number)
        await cluster.run(0.01)
        assert {event.device: event.fields["new"] for event in logged_xids(cluster)} == {
            cluster.gpu(0).id: 1,
            cluster.gpu(1).id: 2,
        }


@in_virtual_time
async def test_number_of_xid_codes_logged_per_minute_is_bounded_and_the_rest_are_logged_later() -> None:
    async with simulated_cluster(1, OWN) as cluster:
        for code in range(100):
            reported(cluster, OWN_FAULT + code)
        await cluster.run(50.0)
        assert len(logged_xids(cluster)) == 32
        await cluster.run(180.0)
        assert len(logged_xids(cluster)) == 100
        assert {event.fields["code"] for event in logged_xids(cluster)} == {
            f"xid-{OWN_FAULT + code}" for code in range(100)
        }


@in_virtual_time
async def test_storm_of_many_xid_codes_writes_a_bounded_number_of_audit_rows() -> None:
    async with simulated_cluster(1, OWN) as cluster:
        rows, writes = len(cluster.ledger_store.events), cluster.ledger_store.writes
        await storm(cluster, 65.0, per_second=50, codes=50)
        assert len(cluster.ledger_store.events) - rows <= 2 * 32
        assert cluster.ledger_store.writes - writes <= 2 * 32


@in_virtual_time
async def test_xid_that_the_driver_still_lists_is_not_logged_again() -> None:
    async with simulated_cluster(1) as cluster:
        reported(cluster, OWN_FAULT, 5)
        await cluster.run(1_000.0)
        assert sums(cluster, OWN_FAULT) == [5]
        writes = cluster.ledger_store.writes
        await cluster.run(1_000.0)
        assert cluster.ledger_store.writes == writes


# -- what is not lost --------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_xids_reported_while_the_ledger_failed_are_logged_once_it_works_again() -> None:
    async with simulated_cluster(1) as cluster:
        reported(cluster, OWN_FAULT, 2)
        await cluster.run(1.0)
        cluster.ledger_store.refuses = "no space left"
        reported(cluster, OWN_FAULT, 3)
        reported(cluster, OWN_FAULT + 1, 4)
        await cluster.run(30.0)
        cluster.ledger_store.refuses = None
        await cluster.run(HEALTH_EVERY)
        assert sums(cluster, OWN_FAULT + 1) == [4]  # the minute begins when the event was logged, not when it was due
        await cluster.run(60.0)
        assert sums(cluster, OWN_FAULT) == [2, 3]


@in_virtual_time
async def test_xids_still_listed_after_a_service_restart_are_logged_again() -> None:
    """Earlier counts are unknown then: drivers, and their listeners, count from their own start."""
    async with simulated_cluster(1) as cluster:
        reported(cluster, OWN_FAULT, 5)
        await cluster.run(1.0)
        cluster.kill()
        await cluster.start_service()
        await cluster.run(HEALTH_EVERY)
        assert sums(cluster, OWN_FAULT) == [5, 5]
        reported(cluster, OWN_FAULT, 2)
        await cluster.run(70.0)
        assert sums(cluster, OWN_FAULT) == [5, 5, 2]


@in_virtual_time
async def test_xid_that_occurred_while_no_service_ran_quarantines_the_device_at_the_next_start() -> None:
    async with simulated_cluster(1) as cluster:
        cluster.kill()
        cluster.gpu().xids[95] = 1
        await cluster.start_service()
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=5.0)
        assert sums(cluster, 95) == [1]


@in_virtual_time
async def test_xid_that_occurs_again_after_a_reset_counts_as_new() -> None:
    """After a reset the driver no longer lists the XID, and counts from zero."""
    async with simulated_cluster(1) as cluster:
        reported(cluster, CONTEXT, 2)
        reported(cluster, 95)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.gpu().resets == 1
        await cluster.run(120.0)
        reported(cluster, CONTEXT)
        await cluster.run(1.0)
        assert sums(cluster, CONTEXT) == [2, 1]
        assert cluster.record().health is Health.SUSPECT


@in_virtual_time
async def test_xid_that_occurs_again_after_an_external_reset_counts_as_new() -> None:
    async with simulated_cluster(1) as cluster:
        reported(cluster, CONTEXT, 2)
        await cluster.run(120.0)
        cluster.gpu().xids.clear()
        await cluster.run(HEALTH_EVERY)
        assert cluster.gpu().resets == 0
        reported(cluster, CONTEXT, 2)
        await cluster.run(1.0)
        assert sums(cluster, CONTEXT) == [2, 2]
        assert cluster.record().health is Health.SUSPECT


# -- effects on the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [CONTEXT, UNKNOWN_XID], ids=["context", "unknown"])
def test_xid_of_a_soft_class_makes_a_device_suspect_when_new_and_not_while_it_stays_listed(
    code: int,
) -> None:
    @in_virtual_time
    async def play() -> None:
        async with simulated_cluster(1) as cluster:
            reported(cluster, code)
            await cluster.run(0.01)
            assert cluster.record().health is Health.SUSPECT
            await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
            assert code in cluster.gpu().xids
            await cluster.run(600.0)
            assert cluster.record().health is Health.HEALTHY
            reported(cluster, code)
            await cluster.run(0.01)
            assert cluster.record().health is Health.SUSPECT

    play()


@in_virtual_time
async def test_old_xid_of_a_soft_class_does_not_force_a_restart_onto_a_certificate() -> None:
    async with simulated_cluster(1) as cluster:
        reported(cluster, CONTEXT)
        await cluster.run(0.01)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        tenant = await started(cluster)
        await cluster.run(3.0)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.SAME_CONTAINER
        assert cluster.record().health is Health.HEALTHY
        assert sums(cluster, CONTEXT) == [1]


@in_virtual_time
async def test_soft_xid_that_keeps_recurring_keeps_the_device_suspect_and_in_service() -> None:
    async with simulated_cluster(1) as cluster:
        for _ in range(60):
            reported(cluster, CONTEXT)
            await cluster.run(10.0)
            assert cluster.record().health is Health.SUSPECT
            assert cluster.node.view().devices[0].advertised
        assert len([event for event in cluster.ledger_store.events if event.name.startswith("health.")]) <= 1 + 12


@in_virtual_time
async def test_fault_during_a_signal_storm_takes_the_device_out_at_once() -> None:
    async with simulated_cluster(1) as cluster:
        await storm(cluster, 5.0, per_second=1_000)
        reported(cluster, 95)
        await cluster.run(0.5)
        assert cluster.record().health is not Health.HEALTHY
        assert sums(cluster, 95) == [1]


# -- effects on others -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_in_a_signal_storm_is_inspected_a_bounded_number_of_times() -> None:
    async with simulated_cluster(1) as cluster:
        assert cluster.telemetry is not None
        looks, ask_driver = 0, cluster.telemetry.snapshot

        async def counted(device):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return await ask_driver(device)

        cluster.telemetry.snapshot = counted  # type: ignore[method-assign]
        for _ in range(2_000):
            reported(cluster, OWN_FAULT)
            await cluster.run(0.005)
        assert looks <= 10 * 25


@in_virtual_time
async def test_signal_storm_delays_neither_the_inspection_of_another_device_nor_a_hand_over() -> None:
    async with simulated_cluster(2) as cluster:
        for _ in range(1_000):
            reported(cluster, OWN_FAULT)
        await cluster.run(0.1)
        for _ in range(1_000):
            reported(cluster, OWN_FAULT)
        cluster.gpu(1).xids[79] = 1
        cluster.signal(1)
        await cluster.run(0.01)
        assert cluster.record(1).health is Health.QUARANTINED
        before = cluster.clock.monotonic()
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.basis is Basis.CERTIFICATE
        assert cluster.clock.monotonic() - before < 0.5


@in_virtual_time
async def test_device_that_hangs_during_a_signal_storm_delays_no_other_device() -> None:
    async with simulated_cluster(2) as cluster:
        cluster.gpu(0).stuck = True
        for _ in range(100):
            reported(cluster, OWN_FAULT)
        cluster.gpu(1).xids[79] = 1
        cluster.signal(1)
        await cluster.run(0.01)
        assert cluster.record(1).health is Health.QUARANTINED


@in_virtual_time
async def test_signals_of_unknown_devices_are_ignored() -> None:
    async with simulated_cluster(1) as cluster:
        assert cluster.telemetry is not None
        writes = cluster.ledger_store.writes
        for number in range(1_000):
            cluster.telemetry.happened.put_nowait(Signal(f"GPU-none-{number}", "xid", 95))
        await cluster.run(1.0)
        assert cluster.ledger_store.writes == writes
        assert cluster.serving
        reported(cluster, 95)
        await cluster.run(0.01)
        assert cluster.record().health is not Health.HEALTHY
