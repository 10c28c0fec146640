"""A device used repeatedly without a grant: its scrubs and audit rows are bounded, and no start waits for that."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.domain.states import Hygiene
from scrubber.engine.device.disturbances import Disturbances
from scrubber.ports.record import Event
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import STRICT, admitted, request_start
from tests.simulation.timeline import in_virtual_time

MINUTE = 60.0


def rows(cluster: SimulatedCluster) -> list[Event]:
    """Return the audit events of the first device."""
    return [each for each in cluster.ledger_store.events if each.device == cluster.gpu().id]


@asynccontextmanager
async def touched(cluster: SimulatedCluster, *, scrubs_too: bool = False) -> AsyncIterator[Proc]:
    """Inside, a process opens the first device as soon as it is clean, until that is noticed.

    Args:
        scrubs_too: also during each scrub, which that delays.
    """
    gpu = cluster.gpu().id
    proc = cluster.process_table.start(None, "host/miner#1", "x/miner", mounted=frozenset({gpu}))
    targets = {Hygiene.CLEAN, *([Hygiene.SCRUBBING] if scrubs_too else [])}

    async def touch() -> None:
        while True:
            if cluster.record().hygiene not in targets:
                proc.holds.clear()
            elif gpu not in proc.holds:
                cluster.process_table.open(proc, gpu)
            await asyncio.sleep(0.5 if cluster.record().hygiene is Hygiene.DIRTY else 0.05)

    touching = asyncio.create_task(touch())
    try:
        yield proc
    finally:
        touching.cancel()
        proc.holds.clear()


class Now(SystemClock):
    def __init__(self) -> None:
        self.seconds = 5_000.0

    def monotonic(self) -> float:
        return self.seconds


def test_pause_before_a_scrub_doubles_with_each_disturbance_up_to_ten_minutes() -> None:
    disturbances = Disturbances(Now())
    pauses = []
    for _ in range(13):
        disturbances.count(1)
        pauses.append(disturbances.pause(1))
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


def test_pause_ends_with_time_and_an_undisturbed_device_starts_over_without_a_pause() -> None:
    disturbances = Disturbances(now := Now())
    for _ in range(5):
        disturbances.count(1)
    now.seconds += 6.0
    assert disturbances.pause(1) == 2.0
    now.seconds += 3_600.0
    assert disturbances.pause(1) == 0.0
    disturbances.count(1)
    assert disturbances.pause(1) == 0.0


def test_allocation_and_grant_end_the_pause() -> None:
    disturbances = Disturbances(Now())
    for _ in range(9):
        disturbances.count(1)
    assert disturbances.pause(1) > 0
    assert disturbances.pause(2) == 0.0
    disturbances.reset()
    assert disturbances.pause(1) == 0.0


def event(name: str, actor: str = "service", scrub: str | None = None, **fields: str | int) -> Event:
    return Event(name, 1.0, "GPU-a", scrub, actor, fields)


def stored(disturbances: Disturbances, *events: Event) -> list[tuple[str, object]]:
    """Return the rows stored for ``events``, and how many events each row represents."""
    rows = disturbances.coalesce(events)
    disturbances.note_stored(events, rows)
    return [(row.name, row.fields.get("times", 1)) for row in rows]


def test_events_of_one_kind_share_one_audit_row_per_minute_that_counts_them() -> None:
    disturbances = Disturbances(now := Now())
    touch = event("device.marked-dirty")
    made = []
    for _ in range(180):
        disturbances.count(1)
        made += stored(disturbances, touch)
        now.seconds += 1.0
    assert made == [("device.marked-dirty", 1), ("device.marked-dirty", 60), ("device.marked-dirty", 60)]


def test_events_with_another_name_cause_or_operator_get_audit_rows_of_their_own() -> None:
    disturbances = Disturbances(Now())
    for _ in range(2):
        disturbances.count(1)
    events = [
        event("unauthorized.use.detected", pod_uid="a"),
        event("unauthorized.use.detected", pod_uid="b"),
        event("scrub.finished", outcome="passed"),
        event("scrub.finished", outcome="blocked"),
        event("scrub.finished", outcome="passed", actor="uid:0"),
        event("health.quarantined"),
    ]
    assert len(stored(disturbances, *events)) == 6
    assert stored(disturbances, *events) == [("scrub.finished", 1), ("health.quarantined", 1)]


def test_every_scrub_that_found_residue_gets_an_audit_row() -> None:
    disturbances = Disturbances(Now())
    for _ in range(2):
        disturbances.count(1)
    for number in range(3):
        found = event("scrub.finished", scrub=f"scrub-{number}", outcome="passed", residue_bytes=8)
        assert stored(disturbances, found) == [("scrub.finished", 1)]


def test_every_event_gets_an_audit_row_until_the_device_was_disturbed_twice() -> None:
    disturbances = Disturbances(Now())
    disturbances.count(1)
    assert [len(stored(disturbances, event("scrub.finished"))) for _ in range(3)] == [1, 1, 1]


def disturbed(now: Now | None = None) -> Disturbances:
    """Return the disturbances of a device that was disturbed twice: events of one kind share rows."""
    disturbances = Disturbances(now or Now())
    for _ in range(2):
        disturbances.count(1)
    return disturbances


def test_omitted_events_are_counted_in_a_row_written_with_the_next_grant() -> None:
    disturbances = disturbed()
    for number in range(5):
        stored(disturbances, event("certificate.issued", certificate=f"cert-{number}"))
    (row,) = disturbances.omitted_rows()
    assert (row.fields["certificate"], row.fields["times"]) == ("cert-4", 4)
    disturbances.reset()
    assert disturbances.omitted_rows() == ()


def test_events_omitted_before_a_quiet_period_are_counted_in_the_next_row() -> None:
    disturbances = disturbed(now := Now())
    for _ in range(3):
        stored(disturbances, event("device.marked-dirty"))
    now.seconds += 3_600.0
    disturbances.count(1)
    assert stored(disturbances, event("device.marked-dirty")) == [("device.marked-dirty", 3)]


def test_events_omitted_over_a_minute_ago_get_a_row_with_the_next_change_of_the_device() -> None:
    disturbances = disturbed(now := Now())
    for _ in range(4):
        stored(disturbances, event("scrub.finished", outcome="blocked"))
    now.seconds += MINUTE
    assert stored(disturbances, event("health.suspect")) == [("scrub.finished", 3), ("health.suspect", 1)]
    assert stored(disturbances, event("health.suspect")) == [("health.suspect", 1)]


def test_row_of_a_scrub_requested_by_an_operator_does_not_reset_the_count_of_other_scrubs() -> None:
    disturbances = disturbed(now := Now())
    for _ in range(3):
        stored(disturbances, event("scrub.started"))
    stored(disturbances, event("scrub.started", actor="uid:0"))
    now.seconds += MINUTE
    assert stored(disturbances, event("scrub.started")) == [("scrub.started", 3)]


def test_touches_that_led_to_the_use_of_two_pods_are_counted_in_separate_rows() -> None:
    disturbances = disturbed()
    first, second = (event("unauthorized.use.detected", pod_uid=uid) for uid in "ab")
    made = []
    for user in (first, first, first, second, second):
        made += stored(disturbances, event("device.marked-dirty"))
        made += stored(disturbances, user)
    once = [("device.marked-dirty", 1), ("unauthorized.use.detected", 1)]
    assert made == [*once, ("device.marked-dirty", 2), *once]
    left = {(row.name, row.fields.get("pod_uid"), row.fields.get("times", 1)) for row in disturbances.omitted_rows()}
    assert left == {
        ("device.marked-dirty", None, 1),
        ("unauthorized.use.detected", "a", 2),
        ("unauthorized.use.detected", "b", 1),
    }


@pytest.mark.parametrize("scrubbed_before", [False, True], ids=["the start waits for the scrub", "the device is clean"])
@in_virtual_time
async def test_scrub_that_a_grant_rests_on_has_its_audit_rows_however_often_the_device_was_disturbed(
    scrubbed_before: bool,
) -> None:
    async with simulated_cluster(1, policy=STRICT) as cluster:
        for _ in range(4):
            await cluster.until(lambda: cluster.record().certificate is not None)
            user = cluster.process_table.start(None, "host", "host/x/y#1")
            cluster.process_table.open(user, cluster.gpu().id)
            await cluster.until(lambda: cluster.record().certificate is None)
            cluster.process_table.end(user)
        if scrubbed_before:
            await cluster.until(lambda: cluster.record().certificate is not None)
        tenant = await cluster.admit("umbrella", "serve-0", (0,))
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        (grant,) = [row for row in rows(cluster) if row.name == "handover.granted"]
        (issued,) = [row for row in rows(cluster) if row.fields.get("certificate") == grant.fields["base_certificate"]]
        assert issued.name == "certificate.issued"
        assert {row.name for row in rows(cluster) if row.scrub == issued.scrub} >= {"scrub.started", "scrub.finished"}
        assert cluster.journal is not None
        assert [each.fields.get("certificate") for each in cluster.journal.events].count(
            grant.fields["base_certificate"]
        ) == 1


@pytest.mark.parametrize("scrubs_too", [False, True])
@in_virtual_time
async def test_twenty_minutes_of_touches_write_fewer_than_a_hundred_audit_rows(scrubs_too: bool) -> None:
    async with simulated_cluster(1) as cluster:
        before = len(rows(cluster))
        async with touched(cluster, scrubs_too=scrubs_too):
            await cluster.run(20 * MINUTE)
        assert 10 < len(rows(cluster)) - before < 100


@in_virtual_time
async def test_start_does_not_wait_for_the_pause_that_touches_caused() -> None:
    async with simulated_cluster(1) as cluster:
        async with touched(cluster):
            await cluster.run(20 * MINUTE)
            await cluster.until(lambda: cluster.controller().scrubs.delay > 5 * MINUTE, 20 * MINUTE)
        assert cluster.record().hygiene is Hygiene.DIRTY
        tenant = await cluster.admit("acme", "train-0", (0,))
        assert tenant is not None
        await cluster.until(lambda: tenant.running, MINUTE)


@in_virtual_time
async def test_scrub_after_a_grant_is_not_delayed_by_unauthorized_use_before_the_grant() -> None:
    async with simulated_cluster(1) as cluster:
        tenant, controller = await admitted(cluster), cluster.controller()
        for _ in range(5):
            controller.state.disturbances.count(controller.state.allocations)
        assert controller.scrubs.delay > 0
        await request_start(cluster, tenant)
        assert controller.scrubs.delay == 0


@in_virtual_time
async def test_every_touch_of_a_device_reaches_log_and_metrics() -> None:
    async with simulated_cluster(1) as cluster:
        assert cluster.journal is not None
        async with touched(cluster):
            await cluster.run(5 * MINUTE)
        counts = Counter(each.name for each in cluster.journal.events)
        assert counts["device.marked-dirty"] > 1
        assert counts["device.marked-dirty"] == counts["certificate.issued"]
