"""A week of a node with four devices: bursts of pods, faults at any hour, killed services, reboots, and operators.

Seven days of virtual time pass in seconds, because few checks run while nothing happens: a service started for the
quiet hours checks only every quarter of an hour. After such a watch gap every proof is void and is made again, which a
week tests as well. The laws of ``tests/simulation`` check every step. At the end the faults are removed and a day passes:
every device is healthy and clean automatically, or states in a message why it needs an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from scrubber.domain.health.history import DAY
from scrubber.domain.policy import BreakerRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health
from tests.depth import depth
from tests.simulation.cluster import simulated_cluster
from tests.simulation.scenario import POLICIES, Plot, Scenario, Step
from tests.simulation.service import Pace
from tests.simulation.timeline import in_virtual_time

DEVICES = 4
DAYS = 7
BUSY, QUIET = Pace(watch=2.0, health=10.0), Pace(watch=900.0, health=900.0)
BURSTS_A_DAY, ACTS_OF_A_BURST = 2, 14
HOUR = 3_600.0
FAULTS = (
    *("xid-31", "xid-79", "xid-95", "xid-95", "xid-154", "xid-999", "stuck", "lost", "silent", "nonsense", "odd"),
    *("wont_clear", "slow", "ghost", "reset_fails", "settings", "hot", "hot", "holders", "ecc", "ecc"),
    *("says:row-remap-pending", "says:row-remap-failure", "says:pcie-width", "says:nvlink-down", "says:hw-slowdown"),
    *("asks:reset", "asks:reboot", "counts:ecc_uncorrected_aggregate", "counts:retired_pages"),
    *("flaw:memory-short", "flaw:memory-kept", "flaw:on-chip", "flaw:settings-not-restored", "flaw:eraser-dies"),
)
MOMENTS = (0.0, 0.06, 1.1, 9.0, 35.0, 90.0, 240.0)
NAMESPACES = ("acme-space", "acme-space", "umbrella-space")
CHILDREN = ("none", "none", "holds", "lets-go")

Draw = Callable[[Random], dict[str, Any]]


def _some(**choices: tuple[object, ...] | range) -> Draw:
    return lambda random: {name: random.choice(among) for name, among in choices.items()}


PODS: tuple[tuple[str, Draw], ...] = (
    (
        "a_pod_is_admitted",
        _some(namespace=NAMESPACES, name=("web-0", "train-1"), device_count=(1, 2), kind=("plain", "init")),
    ),
    (
        "a_pod_is_admitted",
        _some(namespace=NAMESPACES, name=("job-2", "job-3"), device_count=(1, 1), kind=("plain", "slow")),
    ),
    (
        "a_pod_follows_another",
        _some(namespace=NAMESPACES, device_count=(1, 2), writes=(True,), lives_on=(0.5, 4.0, 60.0)),
    ),
    ("a_pod_writes_everywhere", _some(choice=range(6))),
    ("a_container_exits", _some(choice=range(6), again=(True, False), writes=(True, False), child=CHILDREN)),
    ("a_pod_is_deleted", _some(choice=range(6), lives_on=(None, 0.5, 60.0), child=CHILDREN)),
    ("the_machine_fails", _some(choice=range(6), what=("unreadable-pod", "unkillable", "erasers"))),
    ("a_host_process_writes_on_a_device", _some(number=range(DEVICES), stays=(0.0, 2.5, 20.0))),
    ("the_kubelet_starts_again", _some()),
    ("an_operator_acts", _some(number=range(DEVICES), action=("out", "back", "back", "slow", "glass"))),
    ("the_service_ends", _some(away=(0.1, 15.0), how=("kill", "kill", "stop", "reboot"))),
    ("the_service_will_be_killed_at_a_write", _some(writes=range(1, 7), durable=(True, False))),
)
TROUBLE: tuple[tuple[str, Draw], ...] = (
    ("a_device_fails", _some(number=range(DEVICES), fault=FAULTS, reported=(True, False))),
    ("a_device_is_well_again", _some(number=range(DEVICES))),
)


def draw(seed: int) -> Plot:
    """Draw a week: some bursts a day, and quiet hours between them in which devices fail as well."""
    random, steps = Random(seed), list[Step]()
    for _ in range(DAYS * BURSTS_A_DAY):
        steps.append(Step("work_begins", {"how": random.choice(("kill", "stop"))}, 30.0))
        for _ in range(ACTS_OF_A_BURST):
            act, choices = random.choice((*PODS, *PODS, *TROUBLE, *TROUBLE, *TROUBLE))
            steps.append(Step(act, choices(random), random.choice(MOMENTS)))
        steps.append(Step("the_node_is_left_alone", {"how": random.choice(("kill", "stop", "reboot"))}, 60.0))
        for _ in range(3):
            act, choices = random.choice(TROUBLE)
            steps.append(Step(act, choices(random), DAY / BURSTS_A_DAY / 3))
    return tuple(steps)


class Week(Scenario):
    """A scenario with quiet hours."""

    async def work_begins(self, how: str) -> None:
        self.cluster.pace = BUSY
        await self.the_service_ends(0.1, how)

    async def the_node_is_left_alone(self, how: str) -> None:
        """Running pods continue; waiting pods are deleted."""
        for tenant in self.cluster.kubelet.tenants:
            if tenant.waiting:
                self.cluster.kubelet.delete(tenant)
        self.cluster.pace = QUIET
        await self.the_service_ends(0.1, how)

    async def ends(self) -> None:
        """A day after the last fault is removed, every device is healthy or states what it waits for."""
        cluster = self.cluster
        self.clear_faults()
        for tenant in cluster.kubelet.tenants:
            if tenant.listed:
                cluster.kubelet.delete(tenant)
        await self.the_node_is_left_alone("reboot")
        await cluster.run(DAY + 2 * HOUR)
        for record in cluster.ledger_store.records.values():
            assert record.health is Health.HEALTHY or _waits_for_an_operator(record), (
                f"{record.health.value}: {record.cause}"
            )
        await self.work_begins("kill")
        await cluster.run(30.0)
        for device, record in list(cluster.ledger_store.records.items()):
            if _waits_for_an_operator(record):
                await cluster.node.actions.unquarantine(device, "looked at", "uid:0")
        await cluster.until(lambda: all(_is_well(each) for each in cluster.ledger_store.records.values()), within=HOUR)


def _waits_for_an_operator(record: DeviceRecord) -> bool:
    cause = record.cause
    out = record.health in (Health.QUARANTINED, Health.CONDEMNED)
    return out and cause is not None and "operator" in cause.recovery_message and bool(cause.message)


def _is_well(record: DeviceRecord) -> bool:
    unnamed = any(grant.pod is None for grant in record.open_grants)
    return record.health is Health.HEALTHY and (record.state == "clean" or unnamed)


@pytest.mark.parametrize(("seed", "policy"), [(6, "default"), (13, "strict"), (11, "trusted")][: depth().weeks])
def test_no_invariant_is_violated_in_a_week_and_devices_are_healthy_a_day_later_unless_they_need_an_operator(
    seed: int, policy: str
) -> None:
    week = Week(POLICIES[policy], DEVICES, BUSY)
    week.cluster.kubelet.longest_pause = 300.0
    began = week.cluster.clock.wall()
    try:
        wrong = week.play(draw(seed))
        took = week.cluster.clock.wall() - began
    finally:
        week.close()
    assert wrong is None
    assert took >= DAYS * DAY
    met = {record.health for _, record in week.cluster.laws.health.past}
    assert met == {*Health}, "a week in which a state of health was not met tries too little"


def _has_begun(recoveries: list[tuple[float, str]], number: int) -> bool:
    return len(recoveries) >= number


@in_virtual_time
async def test_service_that_dies_in_every_recovery_makes_no_more_recoveries_than_the_daily_limit() -> None:
    """Killing the service repeatedly, or a crash loop, wears no device out: started recoveries are recorded."""
    generous = replace(POLICIES["default"], breaker=BreakerRule(max_resets=1_000))
    async with simulated_cluster(1, generous, pace=BUSY) as cluster:
        cluster.gpu().report_xid(95)
        cluster.signal(0)
        recoveries = cluster.laws.health.recoveries
        for number in range(1, generous.recovery.max_resets_per_day + 1):
            await cluster.until(partial(_has_begun, recoveries, number), within=HOUR)
            cluster.kill()
            await cluster.start_service()
        await cluster.run(2 * HOUR)
        assert len(recoveries) == generous.recovery.max_resets_per_day
        assert cluster.record().health is Health.CONDEMNED
        cause = cluster.record().cause
        assert cause is not None
        assert "within a day" in cause.message
