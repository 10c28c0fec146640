"""A device whose driver reports a fault is withheld at once, before any answer of the driver and before any commit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.policy import Enforcement, HealthRule, Policy, QuarantineTiming
from scrubber.domain.states import Health
from scrubber.domain.telemetry import Signal
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.service import HEALTH_EVERY
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

RESET_XID, OWN_FAULT, CONTEXT, UNLISTED = 95, 31, 154, 999


def is_advertised(cluster: SimulatedCluster, number: int = 0) -> bool:
    return cluster.node.view().devices[number].advertised


def report_xid(cluster: SimulatedCluster, code: int, *, listed: bool = True) -> None:
    """Let the driver report an XID of the first device; ``listed``: whether snapshots contain it as well."""
    if listed:
        cluster.gpu().xids[code] = 1
    cluster.signal_xid(0, code)


async def until_noted() -> None:
    """Let the service read the signal, and nothing for which time has to pass."""
    for _ in range(5):
        await asyncio.sleep(0)


@in_virtual_time
async def test_device_with_a_reported_fault_is_withheld_while_the_driver_does_not_answer() -> None:
    async with simulated_cluster(devices=2) as cluster:
        cluster.gpu().stuck = True
        report_xid(cluster, RESET_XID)
        await until_noted()
        view = cluster.controller().view
        assert (view.advertised, view.record.health) == (False, Health.HEALTHY)
        assert view.refusal_message == (
            f"Device {cluster.gpu().id} is withheld: its driver reported XID 95, which requires a GPU reset. The device is "
            "being checked."
        )
        assert not cluster.controller().refuses_allocation
        assert not is_advertised(cluster)
        assert is_advertised(cluster, 1)


@in_virtual_time
async def test_quarantine_replaces_the_withholding_of_a_reported_fault() -> None:
    async with simulated_cluster(devices=1) as cluster:
        seen: list[bool] = []
        report_xid(cluster, RESET_XID)

        def is_quarantined() -> bool:
            seen.append(is_advertised(cluster))
            return cluster.record().health is Health.QUARANTINED

        await until_noted()
        await cluster.until(is_quarantined, within=5.0)
        assert not any(seen)
        assert cluster.controller().view.withheld == ""
        assert "quarantined (xid-95)" in cluster.controller().view.refusal_message


@in_virtual_time
async def test_device_with_a_reported_fault_stays_withheld_while_its_quarantine_cannot_be_stored() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.ledger_store.refuses = "the disk is full"
        report_xid(cluster, RESET_XID)
        await until_noted()
        await cluster.run(3 * HEALTH_EVERY)
        assert cluster.record().health is Health.HEALTHY
        assert not is_advertised(cluster)
        cluster.ledger_store.refuses = None
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED, within=2 * HEALTH_EVERY)
        assert not is_advertised(cluster)


@in_virtual_time
async def test_device_returns_when_a_check_finds_no_fault() -> None:
    async with simulated_cluster(devices=1) as cluster:
        report_xid(cluster, RESET_XID, listed=False)
        await until_noted()
        await cluster.until(lambda: is_advertised(cluster), within=1.0)
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_check_that_began_before_the_report_does_not_return_the_device() -> None:
    async with simulated_cluster(devices=1) as cluster:
        health = cluster.controller().health
        earlier = asyncio.create_task(health.check())
        await asyncio.sleep(0)  # its query is on its way
        cluster.laws.health.reported(cluster.gpu().id)
        health.note_signal(Signal(cluster.gpu().id, "xid", RESET_XID))
        await earlier
        assert not is_advertised(cluster)
        await health.check()
        assert is_advertised(cluster)


@pytest.mark.parametrize("code", [OWN_FAULT, CONTEXT, UNLISTED])
@in_virtual_time
async def test_reported_error_that_does_not_quarantine_withholds_nothing(code: int) -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().stuck = True
        report_xid(cluster, code)
        await until_noted()
        assert is_advertised(cluster)


@pytest.mark.parametrize(
    "policy",
    [
        replace(DEFAULT, enforcement=Enforcement.OBSERVE),
        replace(DEFAULT, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE)),
    ],
    ids=["observe", "quarantineAt: release"],
)
@in_virtual_time
async def test_reported_fault_withholds_no_device_in_use_that_the_policy_advertises_in_quarantine(
    policy: Policy,
) -> None:
    async with simulated_cluster(devices=1, policy=policy) as cluster:
        await started(cluster)
        report_xid(cluster, RESET_XID)
        await until_noted()
        assert is_advertised(cluster)
        assert cluster.controller().view.withheld == ""
        await cluster.run(1.0)
        assert is_advertised(cluster)
