"""Restarts in every order, with pods that run, start, end and wait: no data or process is lost, and work continues.

The service (killed, or stopped gracefully), the plugin, the kubelet and the node are restarted alone, and in every
order of two or more, at once or with time between. Existing pods are adopted without a finding; their devices are
scrubbed when they end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.states import Hygiene
from tests.depth import depth
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.timeline import in_virtual_time

RUNS, STARTS, ENDS, CRASHES = range(4)
"""The devices, by what the pod on each does when the restarts begin."""
AT_ONCE, APART = 0.05, 6.0
"""Seconds between two restarts: within a scrub, or beyond one."""

Order = tuple[str, ...]


class Restarts:
    """The components that restart, by name; ``backing_off``: a pod that the kubelet does not try to start meanwhile."""

    def __init__(self, cluster: SimulatedCluster, backing_off: Tenant) -> None:
        self._cluster = cluster
        self._backing_off = backing_off

    async def service_killed(self) -> None:
        self._cluster.kill()
        await self._cluster.run(0.3)
        await self._cluster.start_service()

    async def service_stopped(self) -> None:
        assert self._cluster.service is not None
        await self._cluster.service.stop()
        await self._cluster.run(0.3)
        await self._cluster.start_service()

    async def plugin(self) -> None:
        """The plugin's calls to the service end with it, and the kubelet calls the next one."""
        self._ask_again()

    async def kubelet(self) -> None:
        """The kubelet lists nothing at first, and its calls are repeated."""
        kubelet = self._cluster.kubelet
        kubelet.trust, kubelet.starts = Trust.EMPTY_AFTER_RESTART, kubelet.starts + 1
        self._ask_again()

    async def node(self) -> None:
        self._cluster.reboot()
        await self._cluster.start_service()

    def _ask_again(self) -> None:
        for tenant in self._cluster.kubelet.tenants:
            if tenant.waiting and not tenant.starting and tenant is not self._backing_off:
                self._cluster.kubelet.retry_pre_start(tenant)


NAMES = ("service_killed", "service_stopped", "plugin", "kubelet", "node")


def orders(first: str, longest: int) -> Iterator[Order]:
    """Yield every order of up to ``longest`` that begins with ``first``."""
    for length in range(1, longest + 1):
        yield from (order for order in itertools.permutations(NAMES, length) if order[0] == first)


async def pod(cluster: SimulatedCluster, name: str, device: int, starts_after: float = 0.05) -> Tenant:
    tenant = await cluster.admit("acme-space", name, [device], starts_after=starts_after)
    assert tenant is not None
    return tenant


async def restart(order: Order, between: float) -> None:
    async with simulated_cluster(devices=4) as cluster:
        runs, ends, crashes = (
            await pod(cluster, "runs", RUNS),
            await pod(cluster, "ends", ENDS),
            await pod(cluster, "crashes", CRASHES),
        )
        await cluster.until(lambda: runs.running and ends.running and crashes.running)
        await cluster.run(2.5)
        for tenant in (runs, ends, crashes):
            cluster.write_all(tenant)
        starts = await pod(cluster, "starts", STARTS, starts_after=2.0)
        await cluster.until(lambda: starts.starting)
        cluster.kubelet.force_delete(ends, lives_on=4.0)
        follows = await cluster.admit("umbrella-space", "follows", [ENDS])
        assert follows is not None
        assert crashes.worker is not None
        crashes.worker.cancel()
        cluster.kubelet.exit(crashes, again=True)

        first, written = runs.first, [list(cluster.gpu(each).cells) for each in (RUNS, CRASHES)]
        acts = Restarts(cluster, crashes)
        for each in order:
            await getattr(acts, each)()
            await cluster.run(between)
            cluster.check_laws()
        cluster.kubelet.trust = Trust.TRUSTED
        if "node" not in order:
            kept = [cluster.gpu(each).cells for each in (RUNS, CRASHES)]
            assert kept == written, "the bytes of a pod that runs, or is about to run again, are its own"
            assert first is not None
            assert first.alive
            cluster.kubelet.retry_pre_start(crashes)

        everything = (runs, starts, follows, crashes)
        await cluster.until(lambda: all(tenant.running for tenant in everything), within=200.0)
        found = [
            str(event.fields.get("message"))
            for event in cluster.ledger_store.events
            if event.name == "unauthorized.use.detected"
        ]
        assert found == []

        for tenant in everything:
            cluster.write_all(tenant)
            cluster.kubelet.delete(tenant)
        await cluster.until(
            lambda: all(cluster.record(each).hygiene is Hygiene.CLEAN for each in range(4)), within=200.0
        )
        assert all(not any(cluster.gpu(each).cells) for each in range(4))


@pytest.mark.parametrize("between", [AT_ONCE, APART], ids=["detection", "apart"])
@pytest.mark.parametrize("first", NAMES)
def test_restarts_in_any_order_cost_no_pod_its_data_and_leave_no_pod_waiting(first: str, between: float) -> None:
    longest = depth().restarts if between == AT_ONCE else depth().restarts_apart
    for order in orders(first, longest):

        @in_virtual_time
        async def play(order: Order = order) -> None:
            await restart(order, between)

        try:
            play()
        except AssertionError as wrong:
            raise AssertionError(f"{', '.join(order)}: {wrong}") from wrong
