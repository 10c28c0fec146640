"""Every signal, its meaning and how a device recovers from it: the specification as a table, run against the engine.

Each row of the table (``tests/simulation/recovery_table.py``) is run twice in virtual time: once with its recovery blocked, for
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
from tests.depth import depth
from tests.simulation.cluster import DEFAULT, LEISURELY, SimulatedCluster, leisurely_cluster
from tests.simulation.process_table import gpu, instance
from tests.simulation.recovery_table import TABLE, XID, Row, do
from tests.simulation.timeline import in_virtual_time

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


def past(cluster: SimulatedCluster, number: int = 0) -> list[tuple[float, DeviceRecord]]:
    return [(at, each) for at, each in cluster.laws.health.past if each.device == cluster.gpu(number).id]


def named(cluster: SimulatedCluster, row: Row, *healths: Health) -> bool:
    record = cluster.record()
    return record.health in healths and record.cause is not None and record.cause.code == row.cause_code


async def brought_about(cluster: SimulatedCluster, row: Row) -> None:
    """Put the fault of ``row`` into the cluster and wait for its effect, at once or once it has lasted."""
    begun = cluster.clock.wall()
    await do(row.put, cluster)
    cluster.signal(0)
    await cluster.until(lambda: named(cluster, row, row.at_once), within=300.0)
    if row.takes_out and row.at_once is SUSPECT:
        assert cluster.controller().advertised
        await cluster.until(lambda: named(cluster, row, QUARANTINED), within=SUSTAINED + 3 * LEISURELY.health)
        first_out = next(at for at, each in past(cluster) if each.health is QUARANTINED)
        assert first_out - begun >= SUSTAINED
    cause = cluster.record().cause
    assert cause is not None
    assert cause.recovery_method is row.way
    assert cause.message


async def the_service_starts_again(cluster: SimulatedCluster) -> None:
    cluster.kill()
    await cluster.start_service()


async def without_faults(cluster: SimulatedCluster) -> None:
    """Remove every fault from the world."""
    for each in cluster.process_table.gpus.values():
        each.clear_faults()
    cluster.erasers.unkillable = False
    for erasing in list(cluster.erasers.running.values()):
        erasing.killable = True
    for proc in cluster.process_table.living():
        proc.killable = True
        cluster.process_table.end(proc)


async def opened(cluster: SimulatedCluster, row: Row) -> None:
    match row.opens:
        case "condition":
            await without_faults(cluster)
        case "reboot":
            cluster.reboot()
            await cluster.start_service()
        case "operator":
            await without_faults(cluster)
            await cluster.node.actions.unquarantine("0", "looked at", "uid:0")


async def returns(cluster: SimulatedCluster) -> None:
    """Wait for the return over probation; a law of the cluster checks how many clean scrubs that takes."""
    await cluster.until(lambda: cluster.record().health is HEALTHY, within=2 * LONG)
    await cluster.until(cluster.settled)
    ways = [each.health for _, each in past(cluster)]
    assert Health.PROBATION in ways[len(ways) - 1 - ways[::-1].index(QUARANTINED) :]
    assert cluster.controller().advertised


def no_other_device_was_out(cluster: SimulatedCluster) -> None:
    assert all(each.health is HEALTHY for _, each in past(cluster, 1))


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
    assert recovery_method(row.cause_code, POLICY) is row.way


@every_row_that_takes_out
def test_device_never_returns_without_its_recovery_method_despite_restarts(row: Row) -> None:
    @in_virtual_time
    async def play() -> None:
        async with leisurely_cluster(policy=replace(POLICY, **row.policy)) as cluster:
            if row.opens == "reset":
                cluster.gpu().reset_fails = "it does not take"
            await brought_about(cluster, row)
            out = len(past(cluster))
            await cluster.run(LONG / 2)
            await the_service_starts_again(cluster)
            if row.opens == "operator":
                cluster.reboot()
                await cluster.start_service()
            await cluster.run(LONG / 2)
            later = [each for _, each in past(cluster)[out:]]
            assert not any(each.health in ADVERTISED for each in later)
            assert cluster.record().health is row.meanwhile or (
                cluster.record().health is Health.RECOVERING and row.meanwhile is QUARANTINED
            )
            assert not cluster.controller().advertised
            no_other_device_was_out(cluster)

    play()


@every_row_that_takes_out
def test_device_returns_through_probation_once_its_recovery_method_is_available(row: Row) -> None:
    @in_virtual_time
    async def play() -> None:
        async with leisurely_cluster(policy=replace(POLICY, **row.policy)) as cluster:
            await brought_about(cluster, row)
            await opened(cluster, row)
            await returns(cluster)
            assert bool(cluster.gpu().resets) >= (row.opens == "reset")
            no_other_device_was_out(cluster)

    play()


@pytest.mark.parametrize("row", [row for row in AWAY if row.meanwhile is CONDEMNED], ids=lambda row: row.code)
def test_condemned_device_returns_through_probation_after_its_release_by_an_operator(row: Row) -> None:
    @in_virtual_time
    async def play() -> None:
        async with leisurely_cluster(policy=replace(POLICY, **row.policy)) as cluster:
            if row.opens == "reset":
                cluster.gpu().reset_fails = "it does not take"
            await brought_about(cluster, row)
            await cluster.until(lambda: cluster.record().health is CONDEMNED, within=LONG)
            cause = cluster.record().cause
            assert cause is not None
            assert "an operator must inspect it" in cause.message
            assert not cluster.controller().advertised
            await without_faults(cluster)
            await cluster.run(LONG)
            assert cluster.record().health is CONDEMNED
            await cluster.node.actions.unquarantine("0", "a new board", "uid:0")
            await returns(cluster)

    play()


# -- signals without effect on service ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in TABLE if row.at_once is HEALTHY], ids=lambda row: row.code)
@in_virtual_time
async def test_signal_without_meaning_for_the_device_changes_neither_health_nor_certificate(row: Row) -> None:
    async with leisurely_cluster(policy=POLICY) as cluster:
        certificate = cluster.record().certificate
        await do(row.put, cluster)
        cluster.signal(0)
        await cluster.run(LONG)
        assert {each.health for _, each in past(cluster)} == {HEALTHY}
        assert cluster.record().certificate == certificate


@pytest.mark.parametrize("row", [row for row in TABLE if row.opens == "calm"], ids=lambda row: row.code)
@in_virtual_time
async def test_event_signal_makes_a_device_suspect_for_the_quiet_period_although_the_driver_still_lists_it(
    row: Row,
) -> None:
    async with leisurely_cluster(policy=POLICY) as cluster:
        await brought_about(cluster, row)
        assert cluster.controller().advertised
        began = cluster.clock.monotonic()
        await cluster.until(
            lambda: cluster.record().health is HEALTHY, within=POLICY.health.quiet_period + 2 * LEISURELY.health
        )
        assert cluster.clock.monotonic() - began >= POLICY.health.quiet_period - LEISURELY.health
        await cluster.run(LONG)
        assert cluster.record().health is HEALTHY
        assert QUARANTINED not in {each.health for _, each in past(cluster)}


# -- transient conditions ----------------------------------------------------------------------------------------------

SOFT = [row for row in TABLE if row.code in NVIDIA_SIGNALS.soft]
soft_ones = pytest.mark.parametrize("row", SOFT[:: depth().every_soft_signal], ids=lambda row: row.code)


@soft_ones
@in_virtual_time
async def test_soft_signal_with_regular_quiet_periods_never_quarantines_the_device(row: Row) -> None:
    calm = POLICY.health.quiet_period
    async with leisurely_cluster(policy=POLICY) as cluster:
        for _ in range(6):
            await do(row.put, cluster)
            await cluster.run(SUSTAINED - calm - LEISURELY.health)
            assert cluster.record().health is SUSPECT
            cluster.gpu().clear_faults()
            await cluster.run(calm + 2 * LEISURELY.health)
            assert cluster.record().health is HEALTHY
        assert QUARANTINED not in {each.health for _, each in past(cluster)}


@soft_ones
@in_virtual_time
async def test_soft_signal_with_short_interruptions_counts_as_lasting(row: Row) -> None:
    async with leisurely_cluster(policy=POLICY) as cluster:
        for _ in range(int(SUSTAINED / 40) + 2):
            await do(row.put, cluster)
            await cluster.run(20.0)
            cluster.gpu().clear_faults()
            await cluster.run(20.0)
        assert QUARANTINED in {each.health for _, each in past(cluster)}


@soft_ones
@in_virtual_time
async def test_soft_signal_without_a_time_limit_keeps_the_device_suspect_while_the_signal_lasts(row: Row) -> None:
    limitless = replace(POLICY, health=replace(POLICY.health, quarantine_after={}))
    async with leisurely_cluster(policy=limitless) as cluster:
        await do(row.put, cluster)
        await cluster.run(LONG)
        await the_service_starts_again(cluster)
        await cluster.run(LONG)
        assert cluster.record().health is SUSPECT
        assert QUARANTINED not in {each.health for _, each in past(cluster)}
        cluster.gpu().clear_faults()
        await cluster.until(lambda: cluster.record().health is HEALTHY)


@soft_ones
@in_virtual_time
async def test_duration_of_a_soft_signal_survives_service_restarts(row: Row) -> None:
    async with leisurely_cluster(policy=POLICY) as cluster:
        await do(row.put, cluster)
        begun = cluster.clock.monotonic()
        for _ in range(5):
            await cluster.run(SUSTAINED / 6)
            await the_service_starts_again(cluster)
        await cluster.until(lambda: named(cluster, row, QUARANTINED), within=SUSTAINED)
        assert cluster.clock.monotonic() - begun <= SUSTAINED + 3 * LEISURELY.health


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
    async with leisurely_cluster(policy=POLICY) as cluster:
        cluster.gpu().recovery, cluster.gpu().reset_fails = word, "not now"
        cluster.gpu().report_xid(XID[kind])
        cluster.signal(0)
        await cluster.run(1.0)
        expected = WORD[word].get(kind, "")
        record = next(each for _, each in past(cluster)[::-1] if each.health is not Health.RECOVERING)
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
    async with leisurely_cluster(policy=POLICY, gpus=parts) as cluster:
        cluster.gpu().report_xid(XID[ErrorClass.RESET])
        cluster.signal(0)
        await cluster.until(lambda: {cluster.record(0).health, cluster.record(1).health} == {CONDEMNED}, within=LONG)
        for bystander in (2, 3):
            assert {each.health for _, each in past(cluster, bystander)} == {HEALTHY}
        for sibling in (0, 1):
            cluster.gpu(sibling).clear_faults()
            await cluster.node.actions.unquarantine(cluster.gpu(sibling).id, "its GPU was reset", "uid:0")
        await cluster.until(lambda: {cluster.record(0).health, cluster.record(1).health} == {HEALTHY}, within=LONG)


@in_virtual_time
async def test_peer_reset_together_with_a_device_stays_healthy_and_is_certified_again() -> None:
    async with leisurely_cluster(policy=POLICY) as cluster:
        cluster.gpu().together = (cluster.gpu(1).id,)
        certificate = cluster.record(1).certificate
        cluster.gpu().report_xid(XID[ErrorClass.RESET])
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is QUARANTINED)
        await returns(cluster)
        assert cluster.gpu(1).resets == cluster.gpu(0).resets == 1
        no_other_device_was_out(cluster)
        assert cluster.record(1).certificate not in (None, certificate)
