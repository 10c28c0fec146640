"""An hour with a tenant who attacks the node, and the effect: figures, compared with limits.

The attacker may do what a pod may: cause XIDs, ECC errors and heat on assigned devices, leave processes behind that
hold them or cannot be killed, restart, keep a device busy, return on other devices, and use all of them but one.
Assigned devices can be spoiled, as far as the node's breaker and the daily limits permit. Devices of others cannot be
reached, no device is worn out, and none is condemned that is healthy without the attacker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest

from scrubber.domain.handover_kind import Basis
from scrubber.domain.health.history import DAY
from scrubber.domain.policy import BreakerRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, Health, Hygiene
from scrubber.ports.record import Event
from tests.depth import depth
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.service import Pace
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

HOUR = 3_600.0
PACE = Pace(watch=8.0, health=10.0)
MALLORY, OTHERS = "mallory-space", "acme-space"
RESET_XID, CONTEXT_XID, APPLICATION_XID = 95, 154, 31
LOGGED_A_MINUTE = 32
"""Codes of one device that are logged within a minute."""
ROWS_BESIDES = 10
"""Audit rows of a device and minute, on average, other than signals: its hand-overs, scrubs and changes of health."""
ACTS = (
    *("come", "come", "come", "xid", "xid", "xid", "ecc", "heat", "context", "unknown", "flood", "restart"),
    *("leave", "leave", "stuck"),
)


@dataclass(frozen=True)
class Achieved:
    """The result of an hour.

    Attributes:
        out_of_service: device-seconds, of ``devices`` times 3,600.
        others_out_of_service: device-seconds while another tenant had the device.
        starts, refused: of other tenants' containers, and answers that made them wait.
        exceptions: starts of others without a certificate.
        resets, most_of_one: by recoveries, on the node and of one device.
        condemned: devices.
        rows: of the audit log, without signals.
        signals_a_minute: the maximum logged for one device within a minute.
        blamed: number of notifications about the tenant whose pods the quarantines came under.
    """

    devices: int
    out_of_service: float
    others_out_of_service: float
    starts: int
    refused: int
    exceptions: int
    resets: int
    most_of_one: int
    condemned: int
    rows: int
    signals_a_minute: int
    blamed: int


class Mallory:
    """One hour of attacks, drawn from a seed, on all devices but one."""

    def __init__(self, cluster: SimulatedCluster, seed: int, *, spared: int) -> None:
        self._cluster = cluster
        self._random = Random(seed)
        self._spared = spared
        self._stuck: list[tuple[float, Proc]] = []
        self._pods = 0

    def mine(self) -> list[Tenant]:
        return [each for each in self._cluster.kubelet.tenants if each.pod.namespace == MALLORY and each.listed]

    def _mine_and_running(self) -> list[Tenant]:
        return [each for each in self.mine() if each.running and each.first is not None and each.first.holds]

    async def act(self) -> None:
        cluster, random = self._cluster, self._random
        self._let_go()
        act, running = random.choice(ACTS), self._mine_and_running()
        if act == "come":
            await self._come()
        elif running:
            tenant = random.choice(running)
            cluster.write_all(tenant)
            self._misbehave(act, tenant)

    async def _come(self) -> None:
        cluster = self._cluster
        numbers = [
            list(cluster.process_table.gpus).index(each)
            for each in cluster.kubelet.free()
            if cluster.node.devices.controllers[each].advertised
        ]
        numbers = [each for each in numbers if each != self._spared][: self._random.choice((1, 1, 2, 9))]
        if numbers:
            self._pods += 1
            await cluster.admit(MALLORY, f"miner-{self._pods}", numbers)

    def _misbehave(self, act: str, tenant: Tenant) -> None:
        cluster, random = self._cluster, self._random
        device = cluster.process_table.gpus[random.choice(tenant.devices)]
        match act:
            case "xid":
                device.report_xid(RESET_XID)
            case "ecc":
                device.ecc = (device.ecc or 0) + 1
            case "heat":
                device.celsius = 120
            case "context":
                device.report_xid(CONTEXT_XID)
            case "unknown":
                for code in range(1_000, 1_000 + random.choice((1, 5, 100))):
                    device.report_xid(code)
            case "flood":
                device.report_xid(random.choice((APPLICATION_XID, CONTEXT_XID, RESET_XID)), 50_000)
            case "restart":
                self._leave_behind(tenant, holds=random.random() < 0.5)
                cluster.kubelet.exit(tenant, again=True)
            case "stuck" | "leave":
                left = self._leave_behind(tenant, holds=True)
                if act == "stuck":
                    device.report_xid(RESET_XID)
                    left.killable = False
                    self._stuck.append((cluster.clock.monotonic() + random.choice((30.0, 300.0, 900.0)), left))
                cluster.kubelet.force_delete(tenant, random.choice((0.5, 20.0)))
        if random.random() < 0.7:
            cluster.signal(list(cluster.process_table.gpus).index(device.id))

    def _leave_behind(self, tenant: Tenant, *, holds: bool) -> Proc:
        assert tenant.first is not None
        left = self._cluster.process_table.fork(tenant.first)
        if not holds:
            left.holds.clear()
        return left

    def _let_go(self, *, all_of_them: bool = False) -> None:
        """Release processes that were stuck in the kernel, and cool down devices that the attacker no longer uses."""
        now = self._cluster.clock.monotonic()
        for until, proc in self._stuck:
            if until <= now or all_of_them:
                proc.killable = True
        worked = {device for each in self._mine_and_running() for device in each.devices}
        for device in self._cluster.process_table.gpus.values():
            if device.id not in worked:
                device.celsius = 40

    def leave(self) -> None:
        """Remove the attacker from the node; the last processes leave the kernel."""
        for tenant in self.mine():
            self._cluster.kubelet.delete(tenant)
        self._let_go(all_of_them=True)


class Others:
    """A tenant with one device for the whole hour, and with short jobs wherever there is room."""

    def __init__(self, cluster: SimulatedCluster, seed: int) -> None:
        self._cluster = cluster
        self._random = Random(seed)
        self._jobs: dict[str, float] = {}
        self._last = 0

    async def begin(self, spared: int) -> None:
        keeper = await self._cluster.admit(OTHERS, "train-0", [spared])
        assert keeper is not None
        await self._cluster.until(lambda: keeper.running)

    async def act(self) -> None:
        cluster = self._cluster
        now = cluster.clock.monotonic()
        for tenant in [each for each in cluster.kubelet.tenants if each.listed and each.uid in self._jobs]:
            if tenant.running and any(cluster.process_table.living(tenant.uid)):
                cluster.write_all(tenant)
            if now >= self._jobs[tenant.uid]:
                cluster.kubelet.delete(tenant)
        free = [each for each in cluster.kubelet.free() if cluster.node.devices.controllers[each].advertised]
        if free and self._random.random() < 0.3:
            self._last += 1
            number = list(cluster.process_table.gpus).index(self._random.choice(free))
            job = await cluster.admit(OTHERS, f"job-{self._last}", [number])
            if job is not None:
                self._jobs[job.uid] = now + 45.0

    def starts(self) -> list[Tenant]:
        return [each for each in self._cluster.kubelet.tenants if each.pod.namespace == OTHERS]


def _seconds(past: list[tuple[float, DeviceRecord]], until: float, *, others: bool) -> float:
    """Return device-seconds out of service; with ``others`` only those while a pod of theirs had the device."""
    total, since = 0.0, dict[str, float]()
    for at, record in past:
        grant = record.last_grant
        had = record.hygiene is Hygiene.IN_USE and grant is not None and grant.pod is not None
        counts = not others or (had and grant is not None and grant.pod is not None and grant.pod.namespace == OTHERS)
        out = record.health not in ADVERTISED and counts
        if out and record.device not in since:
            since[record.device] = at
        elif not out and record.device in since:
            total += at - since.pop(record.device)
    return total + sum(until - each for each in since.values())


def _most_in_a_minute(events: list[Event]) -> int:
    most = 0
    for device in {event.device for event in events}:
        times = [event.at for event in events if event.name == "health.errors-reported" and event.device == device]
        most = max([most, *(sum(at <= each < at + 60.0 for each in times) for at in times)])
    return most


async def _an_hour(cluster: SimulatedCluster, seed: int) -> Achieved:
    spared = len(cluster.process_table.gpus) - 1
    others, mallory = Others(cluster, seed), Mallory(cluster, seed, spared=spared)
    await others.begin(spared)
    began, rows = cluster.clock.wall(), len(cluster.ledger_store.events)
    while cluster.clock.wall() < began + HOUR:
        await mallory.act()
        await others.act()
        await cluster.run(7.0)
        cluster.check_laws()
    refused = sum(len(each.refusals) for each in others.starts())
    resets = Counter(device for _, device in cluster.laws.health.recoveries)
    grants = [
        grant
        for grant in cluster.ledger_store.grants.values()
        if grant.pod is not None and grant.pod.namespace == OTHERS
    ]
    until = cluster.clock.wall()
    past = cluster.laws.health.past
    mallory.leave()
    return Achieved(
        devices=len(cluster.process_table.gpus),
        out_of_service=_seconds(past, until, others=False),
        others_out_of_service=_seconds(past, until, others=True),
        starts=len(grants),
        refused=refused,
        exceptions=sum(grant.basis is not Basis.CERTIFICATE for grant in grants),
        resets=sum(resets.values()),
        most_of_one=max(resets.values(), default=0),
        condemned=len({each.device for _, each in past if each.health is Health.CONDEMNED}),
        rows=sum(event.name != "health.errors-reported" for event in cluster.ledger_store.events[rows:]),
        signals_a_minute=_most_in_a_minute(cluster.ledger_store.events),
        blamed=sum(event.name == "tenant.flagged" for event in cluster.ledger_store.events),
    )


@pytest.mark.parametrize(("devices", "seed"), depth().hostile_hours)
@in_virtual_time
async def test_hostile_tenant_affects_only_its_devices_and_they_recover_within_a_day(devices: int, seed: int) -> None:
    async with simulated_cluster(devices, DEFAULT, pace=PACE) as cluster:
        achieved = await _an_hour(cluster, seed)
        print(f"\n{achieved}")
        assert achieved.others_out_of_service == 0.0
        assert achieved.condemned == 0
        assert achieved.resets <= DEFAULT.breaker.max_resets
        assert achieved.most_of_one <= DEFAULT.recovery.max_resets_per_day
        assert achieved.out_of_service <= (devices - 1) * HOUR
        assert achieved.rows <= devices * ROWS_BESIDES * 60
        assert achieved.signals_a_minute <= LOGGED_A_MINUTE
        assert achieved.starts > 0
        assert achieved.exceptions == 0
        assert achieved.blamed > 0
        for tenant in cluster.kubelet.tenants:
            if tenant.listed:
                cluster.kubelet.delete(tenant)
        await cluster.until(
            lambda: {each.health for each in cluster.ledger_store.records.values()} == {Health.HEALTHY}, within=DAY
        )
        assert not any(event.actor.startswith("uid:") for event in cluster.ledger_store.events)


@in_virtual_time
async def test_device_repeatedly_faulted_by_one_tenant_rests_for_a_day_and_is_not_condemned() -> None:
    patient = replace(DEFAULT, breaker=BreakerRule(max_resets=1_000))
    async with simulated_cluster(1, patient, pace=PACE) as cluster:
        for _ in range(DEFAULT.recovery.max_resets_per_day + 1):
            await cluster.until(lambda: cluster.record().health is Health.HEALTHY and cluster.settled(), within=HOUR)
            tenant = await started(cluster, MALLORY, "miner-0")
            cluster.gpu().report_xid(RESET_XID)
            cluster.signal(0)
            await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
            cluster.kubelet.delete(tenant)
        await cluster.run(HOUR)
        cause = cluster.record().cause
        assert cause is not None
        assert "recovery resumes 24 hours after the first of them" in cause.message
        assert (cluster.record().health, cluster.gpu().resets) == (
            Health.QUARANTINED,
            DEFAULT.recovery.max_resets_per_day,
        )
        await _a_day_passes(cluster)
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_unkillable_process_with_an_xid_condemns_no_device_and_costs_no_reset() -> None:
    async with simulated_cluster(2, DEFAULT, pace=PACE) as cluster:
        tenant = await started(cluster, MALLORY, "miner-0")
        assert tenant.first is not None
        left = cluster.process_table.fork(tenant.first)
        left.killable = False
        cluster.gpu().report_xid(RESET_XID)
        cluster.signal(0)
        cluster.kubelet.delete(tenant)
        await cluster.run(6 * HOUR)
        assert cluster.gpu().resets == 0
        assert not cluster.node.devices.breaker.state.resets_stopped_reason, (
            "what resets nothing opens the breaker for others"
        )
        left.killable = True
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=DAY + HOUR)
        assert Health.CONDEMNED not in {each.health for _, each in cluster.laws.health.past}


async def _a_day_passes(cluster: SimulatedCluster) -> None:
    """Let a day pass, at a slower pace: no pod is on the node any more."""
    cluster.kill()
    cluster.pace = Pace(watch=8.0, health=60.0)
    await cluster.start_service()
    await cluster.run(DAY + HOUR)
