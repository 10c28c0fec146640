"""An hour of a healthy node, in virtual time: what a scraper would have recorded every 15 seconds.

Engine, decisions and metrics are real; devices, pods, kubelet and ledger are those of ``tests/simulation``. Pods come and go
all the time, an application occasionally causes a fault, the service is restarted as in an upgrade, and killed once,
and the kubelet is restarted. Series of components missing there (the plugin, and whether a scrape succeeds) are added
here.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.assignment import Trust
from scrubber.domain.evidence import ScrubRecord
from scrubber.engine.dependencies import Dependencies
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.logging import make_logger
from scrubber.observability.metrics.status import DeviceStatus, ServiceStatus
from scrubber.ports.record import AuditHead, Event, Journal
from tests.simulation.cluster import DEFAULT, LEISURELY, SimulatedCluster
from tests.simulation.kubelet import Tenant
from tests.simulation.life import Life

__all__ = ["SCRAPE", "Recorded", "an_hour"]

SCRAPE: Final = 15.0
"""Seconds between two scrapes."""

_HOUR: Final = 3_600.0
_AWAY: Final = 45.0
"""Seconds for which a restart leaves no service; the alert for a missing service waits for two minutes."""
_DEVICES: Final = 4
_NAMESPACES: Final = ("acme-space", "umbrella-space")
_APPLICATION: Final = 31
_SERVICE: Final = 'job="scrubber",instance="node-1"'
_PLUGIN: Final = 'job="scrubber-plugin",instance="node-1"'


@dataclass(slots=True)
class Recorded:
    """Series (``name{labels}``) → its value at each scrape; None where it did not exist.

    Times are seconds since the first scrape.

    Attributes:
        grants: granted hand-overs within the hour.
        restarts: of the service.
    """

    series: dict[str, list[float | None]] = field(default_factory=dict)
    scrapes: int = 0
    grants: int = 0
    restarts: int = 0

    def add(self, samples: Iterable[tuple[str, float]]) -> None:
        """Add the samples of one scrape."""
        for name, value in samples:
            values = self.series.setdefault(name, [])
            values += [None] * (self.scrapes - len(values)) + [value]
        self.scrapes += 1


@dataclass(frozen=True, slots=True)
class _Both(Journal):
    """The cluster's journal, which the laws read, and the service's own."""

    cluster: Journal
    service: StructlogJournal
    life: Life

    def record(self, events: Sequence[Event]) -> None:
        self.cluster.record(events)
        if self.life.alive:
            self.service.record(events)

    def record_scrub(self, scrub: ScrubRecord) -> None:
        self.cluster.record_scrub(scrub)
        if self.life.alive:
            self.service.record_scrub(scrub)


class _Metered(SimulatedCluster):
    """A simulated cluster whose services have metrics: separate ones, as each is a separate process."""

    shown: StructlogJournal

    def _dependencies(self, life: Life) -> Dependencies:
        tools = super()._dependencies(life)
        logger = make_logger("json", "error", io.StringIO(), component="service")
        self.shown = StructlogJournal(registry=CollectorRegistry(), logger=logger, signals=NVIDIA_SIGNALS)
        self.shown.metrics.read_status = self._facts
        self.shown.metrics.service.set_build_info(version="0", backend="world", driver="driver-1")
        return replace(tools, journal=_Both(tools.journal, self.shown, life))

    def _facts(self) -> ServiceStatus:
        view = self.node.view()
        return ServiceStatus(
            devices=tuple(
                DeviceStatus(each.device, each.record, each.advertised, each.policy.enforcement, each.holders)
                for each in view.devices
            ),
            handovers_waiting=self.node.waiting_starts,
            ledger_ok=self.ledger_store.ledger.health() == "ok",
            audit_head=AuditHead(len(self.ledger_store.events), ""),
            kubelet_trusted=self.kubelet.trust is Trust.TRUSTED,
            kubelet_restarts=self.node.kubelet_restarts,
            policy=(self.policy.name, self.policy.digest),
        )


async def an_hour(seed: int, *, devices: int = _DEVICES, hours: float = 1.0) -> Recorded:
    """Run one hour, or several, in virtual time (:func:`tests.simulation.timeline.in_virtual_time`)."""
    cluster = _Metered(devices, DEFAULT, pace=LEISURELY)
    try:
        await cluster.start_service()
        await cluster.until(cluster.settled)
        recorded = Recorded()
        began = cluster.clock.wall()
        churn = _Churn(cluster, Random(seed))
        restarts = {600.0: "stop", 1_500.0: "kill", 2_400.0: "kubelet", 3_000.0: "stop"}
        back = 0.0
        for scrape in range(int(hours * _HOUR / SCRAPE) + 1):
            now = scrape * SCRAPE
            recorded.add(_scraped(cluster, began))
            what = restarts.get(now)
            if what == "kubelet":
                cluster.kubelet.starts += 1
            elif what is not None:
                recorded.restarts += 1
                back = now + _AWAY
                if what == "kill":
                    cluster.kill()
                else:
                    assert cluster.service is not None
                    await cluster.service.stop()
            if not cluster.serving and now >= back:
                await cluster.start_service()
            for _ in range(3):
                await churn.act()
                await cluster.run(SCRAPE / 3)
            cluster.check_laws()
        assert cluster.laws.breaches == []
        recorded.grants = len(cluster.ledger_store.grants)
        return recorded
    finally:
        await cluster.end()


def _scraped(cluster: _Metered, began: float) -> Iterator[tuple[str, float]]:
    """Yield the current contents of both daemons' pages; times since the epoch become times since ``began``."""
    yield f"up{{{_SERVICE}}}", float(cluster.serving)
    yield f"up{{{_PLUGIN}}}", 1.0
    yield f"scrubber_plugin_service_up{{{_PLUGIN}}}", float(cluster.serving)
    yield f'scrubber_plugin_registered{{{_PLUGIN},resource="scrubber.dev/gpu"}}', 1.0
    if cluster.serving:
        _, page = cluster.shown.metrics.page.render()
        for line in page.decode().splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                since = began if name.endswith("_timestamp_seconds") else 0.0
                yield f"{name}{{{_SERVICE}{',' if labels else '}'}{labels}", float(value) - since


class _Churn:
    """Jobs of two tenants, each on a device for about a minute."""

    def __init__(self, cluster: SimulatedCluster, random: Random) -> None:
        self._cluster, self._random = cluster, random
        self._until: dict[str, float] = {}
        self._jobs = 0

    async def act(self) -> None:
        cluster, random = self._cluster, self._random
        for tenant in self._running():
            if cluster.clock.monotonic() >= self._until[tenant.uid]:
                cluster.write_all(tenant)
                cluster.kubelet.delete(tenant)
            elif random.random() < 0.02:
                self._fails(tenant)
        if not cluster.serving:
            return
        free = [each for each in cluster.kubelet.free() if cluster.node.devices.controllers[each].advertised]
        if free and random.random() < 0.4:
            number = list(cluster.process_table.gpus).index(random.choice(free))
            self._jobs += 1
            job = await cluster.admit(random.choice(_NAMESPACES), f"job-{self._jobs}", [number])
            if job is not None:
                self._until[job.uid] = cluster.clock.monotonic() + random.uniform(20.0, 120.0)

    def _running(self) -> list[Tenant]:
        return [
            each for each in self._cluster.kubelet.tenants if each.listed and each.running and each.uid in self._until
        ]

    def _fails(self, tenant: Tenant) -> None:
        """Let an application cause a fault, and its container restart."""
        cluster = self._cluster
        cluster.process_table.gpus[tenant.devices[0]].report_xid(_APPLICATION)
        cluster.signal(list(cluster.process_table.gpus).index(tenant.devices[0]))
        cluster.kubelet.exit(tenant, again=True)
