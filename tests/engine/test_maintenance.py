"""Maintenance: idle devices are scrubbed and certified again, one at a time, in the hours that the policy specifies."""

from __future__ import annotations

import itertools
from dataclasses import replace

from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.evidence import Outcome, PathKind, ScrubRecord, ScrubTrigger, Step
from scrubber.domain.handover_kind import Basis
from scrubber.domain.health.history import DAY
from scrubber.domain.policy import MaintenanceRule, Policy
from scrubber.domain.states import Health, Hygiene
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.service import Pace
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import EPOCH, in_virtual_time

HOUR = 3600.0
CALM = Pace(watch=9.5, health=60.0)
START = EPOCH % DAY
"""The time of day at which a simulated cluster starts."""


def every(seconds: float, *, begin: float | None = None, lasts: float = 0.0, **more: object) -> Policy:
    """Return the default policy with maintenance.

    ``begin``: hours after the start of the cluster at which the window opens, for ``lasts`` seconds.
    """
    between = None
    if begin is not None:
        opens = (START + begin * HOUR) % DAY
        between = (opens, (opens + lasts) % DAY)
    return replace(DEFAULT, maintenance=replace(MaintenanceRule(seconds, between), **more))  # type: ignore[arg-type]


def scheduled(cluster: SimulatedCluster, number: int | None = None) -> list[ScrubRecord]:
    """Return the maintenance scrubs, in order of their start."""
    found = [scrub for scrub in cluster.ledger_store.scrubs.values() if scrub.trigger is ScrubTrigger.MAINTENANCE]
    mine = [scrub for scrub in found if number is None or scrub.device == cluster.gpu(number).id]
    return sorted(mine, key=lambda scrub: scrub.started)


def issued(cluster: SimulatedCluster, number: int = 0) -> float:
    certificate = cluster.record(number).certificate
    assert certificate is not None
    return certificate.issued_at


@in_virtual_time
async def test_unused_device_is_scrubbed_again_when_its_maintenance_is_due() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        proved = issued(cluster)
        await cluster.run(HOUR - 60.0)
        assert scheduled(cluster) == []
        assert issued(cluster) == proved
        await cluster.run(120.0)
        (scrub,) = scheduled(cluster)
        assert proved + HOUR <= scrub.started < proved + HOUR + 5.0
        assert scrub.outcome is Outcome.PASSED
        assert issued(cluster) > proved
        await cluster.run(3 * HOUR)
        assert len(scheduled(cluster)) == 4


@in_virtual_time
async def test_certificate_from_maintenance_is_accepted_for_a_grant() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        await cluster.run(HOUR + 60.0)
        (scrub,) = scheduled(cluster)
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.basis is Basis.CERTIFICATE
        assert cluster.ledger_store.certificates[granted.certificate or ""].rests_on == scrub.certificate


@in_virtual_time
async def test_policy_without_a_maintenance_interval_schedules_no_maintenance() -> None:
    async with simulated_cluster(1, pace=CALM) as cluster:
        proved = issued(cluster)
        await cluster.run(2 * HOUR)
        assert scheduled(cluster) == []
        assert issued(cluster) == proved


@in_virtual_time
async def test_maintenance_scrubs_one_device_at_a_time() -> None:
    async with simulated_cluster(4, every(HOUR), pace=CALM) as cluster:
        for number in range(4):
            cluster.gpu(number).slow = 4.0
        await cluster.run(HOUR + 120.0)
        scrubs = scheduled(cluster)
        assert len(scrubs) == 4
        for before, after in itertools.pairwise(scrubs):
            assert before.ended is not None
            assert before.ended <= after.started


@in_virtual_time
async def test_maintenance_starts_only_in_the_hours_that_the_policy_names() -> None:
    begin = 2.0
    async with simulated_cluster(1, every(HOUR, begin=begin, lasts=HOUR), pace=CALM) as cluster:
        await cluster.run(begin * HOUR - 30.0)
        assert scheduled(cluster) == []
        await cluster.run(HOUR)
        assert len(scheduled(cluster)) == 1
        await cluster.run(DAY)
        for scrub in scheduled(cluster):
            assert (scrub.started - EPOCH - begin * HOUR) % DAY < HOUR
        assert len(scheduled(cluster)) == 2


@in_virtual_time
async def test_no_maintenance_scrub_starts_after_the_window_has_closed() -> None:
    """However many are due, and however long each takes: the rest wait for the next day."""
    async with simulated_cluster(2, every(HOUR / 2, begin=1.0, lasts=4.0), pace=CALM) as cluster:
        for number in range(2):
            cluster.gpu(number).slow = 6.0  # about five seconds each
        await cluster.run(1.5 * HOUR)
        assert len(scheduled(cluster)) == 1
        await cluster.run(DAY)
        assert len(scheduled(cluster)) == 2
        for scrub in scheduled(cluster):
            assert (scrub.started - EPOCH - HOUR) % DAY < 4.0


@in_virtual_time
async def test_maintenance_that_could_not_start_during_the_window_waits_for_the_next_day() -> None:
    async with simulated_cluster(1, every(HOUR / 2, begin=1.0, lasts=60.0), pace=CALM) as cluster:
        await cluster.run(HOUR - 30.0)
        cluster.ledger_store.refuses = "no space left"
        await cluster.run(120.0)
        cluster.ledger_store.refuses = None
        await cluster.run(HOUR)
        assert scheduled(cluster) == []
        assert cluster.record().hygiene is Hygiene.CLEAN
        await cluster.run(DAY - HOUR)
        assert len(scheduled(cluster)) == 1


@in_virtual_time
async def test_device_in_use_gets_no_maintenance() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        tenant = await started(cluster)
        bytes_before = list(cluster.gpu().cells)
        await cluster.run(3 * HOUR)
        assert scheduled(cluster) == []
        assert cluster.gpu().cells == bytes_before
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        proved = issued(cluster)
        await cluster.run(HOUR + 60.0)
        (scrub,) = scheduled(cluster)
        assert scrub.started >= proved + HOUR


@in_virtual_time
async def test_scrub_on_demand_postpones_the_maintenance_of_its_device() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        await cluster.run(HOUR / 2)
        assert cluster.service is not None
        await cluster.service.scrub(cluster.gpu().id)
        await cluster.run(HOUR / 2 + 60.0)
        assert scheduled(cluster) == []
        await cluster.run(HOUR / 2)
        assert len(scheduled(cluster)) == 1


@in_virtual_time
async def test_maintenance_runs_the_diagnostics_level_of_its_policy_and_other_scrubs_do_not() -> None:
    async with simulated_cluster(1, every(HOUR, diagnostics=DiagnosticLevel.QUICK), pace=CALM) as cluster:
        await cluster.run(HOUR + 60.0)
        assert cluster.service is not None
        await cluster.service.scrub(cluster.gpu().id)
        tried = {
            scrub.trigger
            for scrub in cluster.ledger_store.scrubs.values()
            if Step.DIAGNOSTICS in {step.step for step in scrub.steps}
        }
        assert tried == {ScrubTrigger.MAINTENANCE}


@in_virtual_time
async def test_start_during_maintenance_joins_the_maintenance_scrub() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        cluster.gpu().slow = 4.0
        await cluster.run(HOUR - 10.0)
        await cluster.until(lambda: bool(scheduled(cluster)) and bool(cluster.erasers.running))
        tenant = await admitted(cluster)
        (granted,) = await request_start(cluster, tenant)
        (scrub,) = scheduled(cluster)
        assert cluster.ledger_store.certificates[granted.certificate or ""].rests_on == scrub.certificate
        begun = [each for each in cluster.ledger_store.scrubs.values() if each.trigger is ScrubTrigger.CONTAINER_START]
        assert {each.path for each in begun} == {PathKind.FAST}


@in_virtual_time
async def test_start_waits_for_the_maintenance_of_its_own_device_only() -> None:
    async with simulated_cluster(2, every(HOUR), pace=CALM) as cluster:
        for number in range(2):
            cluster.gpu(number).slow = 4.0
        await cluster.run(HOUR - 10.0)
        await cluster.until(lambda: bool(scheduled(cluster)))
        (scrub,) = scheduled(cluster)
        other = next(number for number in range(2) if cluster.gpu(number).id != scrub.device)
        before = cluster.clock.monotonic()
        await request_start(cluster, await admitted(cluster, "acme", "train-0", other))
        assert cluster.clock.monotonic() - before < 0.5


@in_virtual_time
async def test_maintenance_finds_bad_memory_and_takes_the_device_out_of_service() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        cluster.gpu().wont_clear = True
        await cluster.run(HOUR + 60.0)
        (scrub,) = scheduled(cluster)
        assert scrub.outcome is Outcome.FAILED
        assert cluster.record().health not in (Health.HEALTHY, Health.SUSPECT)


@in_virtual_time
async def test_blocked_maintenance_of_one_device_does_not_block_the_maintenance_of_another() -> None:
    async with simulated_cluster(2, every(HOUR), pace=CALM) as cluster:
        host = cluster.process_table.start(None, "host", "host")
        await cluster.run(HOUR / 2)
        cluster.process_table.open(host, cluster.gpu(0).id)
        await cluster.run(HOUR)
        assert scheduled(cluster, 1) != []
        assert cluster.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_service_start_scrubs_every_device_and_restarts_the_maintenance_interval() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        await cluster.run(HOUR - 60.0)
        cluster.kill()
        await cluster.start_service()
        await cluster.until(cluster.settled)
        proved = issued(cluster)
        await cluster.run(HOUR / 2)
        assert scheduled(cluster) == []
        await cluster.run(HOUR / 2 + 60.0)
        (scrub,) = scheduled(cluster)
        assert scrub.started >= proved + HOUR


@in_virtual_time
async def test_quarantined_device_gets_no_maintenance() -> None:
    async with simulated_cluster(1, every(HOUR), pace=CALM) as cluster:
        await cluster.node.actions.quarantine("0", "kept for the lab", "uid:0")
        await cluster.run(3 * HOUR)
        assert scheduled(cluster) == []


@in_virtual_time
async def test_device_that_faults_while_it_waits_for_maintenance_is_recovered_instead() -> None:
    async with simulated_cluster(2, every(HOUR), pace=CALM) as cluster:
        for number in range(2):
            cluster.gpu(number).slow = 6.0
        await cluster.run(HOUR - 10.0)
        await cluster.until(lambda: bool(scheduled(cluster)))
        (first,) = scheduled(cluster)
        other = next(number for number in range(2) if cluster.gpu(number).id != first.device)
        cluster.gpu(other).xids[95] = 1
        cluster.signal(other)
        await cluster.until(lambda: cluster.record(other).health is Health.PROBATION)
        assert scheduled(cluster, other) == []
        (mine,) = [
            scrub
            for scrub in cluster.ledger_store.scrubs.values()
            if scrub.device == cluster.gpu(other).id
            and scrub.started > first.started
            and scrub.trigger is ScrubTrigger.RECOVERY
        ]
        assert mine.outcome is Outcome.PASSED
