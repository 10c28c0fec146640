"""What keeps a device dirty is named to operators, since when, and never to the pods that wait for it."""

from __future__ import annotations

from scrubber.domain.evidence import FindingCode
from scrubber.domain.infrastructure import NamedHolder, ProcessOwner
from scrubber.domain.states import Hygiene
from scrubber.domain.telemetry import HolderKind
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time


def opened_by(cluster: SimulatedCluster, tenant: Tenant | None = None) -> Proc:
    """Have a process of ``tenant``'s pod, or of the host, open the first device."""
    gpu, uid = cluster.gpu().id, None if tenant is None else tenant.uid
    proc = cluster.process_table.start(uid, f"{uid}/x#1", "", mounted=frozenset({gpu}), command="dcgm-exporter")
    cluster.process_table.open(proc, gpu)
    return proc


def blocking(cluster: SimulatedCluster) -> list[NamedHolder]:
    return [each for each in cluster.controller().view.holders if each.is_blocking]


@in_virtual_time
async def test_holder_of_a_dirty_device_is_named_with_its_pod_since_it_was_first_seen_until_it_ends() -> None:
    async with simulated_cluster(devices=2) as cluster:
        other = await started(cluster, "monitoring", "exporter-x", 1)
        proc = opened_by(cluster, other)
        await cluster.until(lambda: bool(blocking(cluster)))
        first = blocking(cluster)[0].since
        await cluster.run(30.0)
        assert cluster.record().hygiene is Hygiene.DIRTY
        (found,) = blocking(cluster)
        assert found.owner == ProcessOwner("monitoring", "exporter-x", other.uid)
        assert (found.holder.pid, found.holder.command) == (proc.pid, "dcgm-exporter")
        assert found.code in (FindingCode.UNKNOWN_HOLDER, FindingCode.UNAUTHORIZED_USE)
        assert found.since == first
        cluster.process_table.end(proc)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert cluster.controller().view.holders == ()


@in_virtual_time
async def test_infrastructure_that_the_policy_allows_is_named_as_not_blocking() -> None:
    async with simulated_cluster(devices=1) as cluster:
        gpu = cluster.gpu().id
        agent = cluster.process_table.start(
            "x", "x/main#1", "", mounted=frozenset({gpu}), agent=HolderKind.INFRASTRUCTURE
        )
        cluster.process_table.open(agent, gpu)
        tenant = await started(cluster)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        (found,) = cluster.controller().view.holders
        assert (found.holder.pid, found.is_blocking) == (agent.pid, False)


@in_virtual_time
async def test_refusal_names_the_holder_to_operators_and_not_in_the_pods_status() -> None:
    async with simulated_cluster(devices=2) as cluster:
        other = await started(cluster, "monitoring", "exporter-x", 1)
        proc = opened_by(cluster, other)
        await cluster.until(lambda: bool(blocking(cluster)))
        refusal = await refusal_of(request_start(cluster, await admitted(cluster), wait=5.0))
        assert "of monitoring/exporter-x holds the device without a grant" in str(refusal)
        for secret in ("monitoring", "exporter", str(proc.pid)):
            assert secret not in refusal.public_message
