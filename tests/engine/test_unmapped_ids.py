"""Pods on ids without a mapping: their plugin is away, or has not yet announced it to a restarted service.

Such pods cannot be attributed to devices of this service, and are still authorized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.crosscheck import ClaimedDevice, ListedPod, pods_with_unmapped_ids
from scrubber.adapters.kubelet.device_ids import DeviceIdResolver
from scrubber.adapters.kubelet.pod_logs import index_pod_logs
from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.policy import Limits, UnauthorizedUseAction
from scrubber.domain.states import Hygiene
from scrubber.domain.usage import UseKind, classify_use, may_be_killed
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.timeline import in_virtual_time

END = replace(
    DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=10.0)
)
GPU = "vendor.example/gpu"
FIRST = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11"
LOGS = index_pod_logs([f"team-a_train_{FIRST}"])
TRAIN = Pod("team-a", "train", FIRST)
OURS = DeviceIdResolver(frozenset({"gpu-0"}))


class Ids:
    """The kubelet's list as it is read while the meaning of its ids is unknown."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.explained = False
        self._list: Callable[[], KubeletReading] = cluster.kubelet.reading
        cluster.kubelet.reading = self.reading  # type: ignore[method-assign]

    def reading(self) -> KubeletReading:
        listed = self._list()
        if self.explained:
            return listed
        pods = [each.pod for each in listed.assignments]
        nothing = tuple(Assignment(pod, "", frozenset()) for pod in pods)
        return replace(listed, assignments=nothing, checkpoint_only=(), with_unmapped_ids=frozenset(pods))


async def started(cluster: SimulatedCluster) -> tuple[Tenant, Proc]:
    """Return a pod that the kubelet started without a request."""
    tenant = await cluster.admit("acme", "train-0", starts=False)
    assert tenant is not None
    gpu = cluster.gpu().id
    proc = cluster.process_table.start(
        tenant.uid, f"{tenant.uid}/main#1", "acme/train-0/main#1", mounted=frozenset({gpu})
    )
    cluster.process_table.open(proc, gpu)
    return tenant, proc


@in_virtual_time
async def test_pod_with_unmapped_ids_is_never_killed_as_unauthorized_and_is_adopted_once_the_ids_are_mapped() -> None:
    async with simulated_cluster(policy=END) as cluster:
        ids = Ids(cluster)
        tenant, proc = await started(cluster)
        cluster.process_table.write(proc, cluster.gpu().id)
        await cluster.run(END.limits.leftover_grace_period * 6)
        assert proc.alive
        ids.explained = True
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.IN_USE, within=5.0)
        assert [grant.pod for grant in cluster.record().open_grants] == [tenant.pod]


@in_virtual_time
async def test_granted_pod_with_unmapped_ids_survives_its_grace_period_and_a_service_restart() -> None:
    async with simulated_cluster(policy=END) as cluster:
        ids = Ids(cluster)
        ids.explained = True
        tenant = await cluster.admit("acme", "train-0")
        assert tenant is not None
        await cluster.until(lambda: bool(tenant.running and tenant.first and tenant.first.holds))
        cluster.write_all(tenant)
        ids.explained = False
        for _ in range(2):
            await cluster.run(END.limits.leftover_grace_period * 3)
            cluster.kill()
            await cluster.start_service()
        await cluster.run(END.limits.leftover_grace_period * 3)
        assert tenant.first is not None
        assert tenant.first.alive
        assert cluster.record().hygiene is Hygiene.IN_USE
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)


def test_use_that_an_unmapped_id_may_explain_is_unauthorized_but_not_killed() -> None:
    for unexplained in (TRAIN, replace(TRAIN, uid=None)):
        reading = KubeletReading(Trust.TRUSTED, with_unmapped_ids=frozenset({unexplained}))
        assert classify_use(FIRST, "gpu-0", (), reading) is UseKind.UNAUTHORIZED
        assert not may_be_killed(FIRST, "gpu-0", (), reading)
    assert may_be_killed(FIRST, "gpu-0", (), KubeletReading(Trust.TRUSTED))


@pytest.mark.parametrize(
    ("listed", "checkpoint", "unexplained"),
    [
        (ListedPod("team-a", "train", {"main": frozenset({(GPU, "0")})}), Checkpoint(), {TRAIN}),
        (ListedPod("team-a", "train", {"main": frozenset({(GPU, "gpu-0::3")})}), Checkpoint(), set()),
        (ListedPod("team-a", "train", {"main": frozenset()}), Checkpoint(), set()),
        (
            ListedPod("team-a", "train", {}, {"main": frozenset({ClaimedDevice("gpu.vendor.example", "gpu-7")})}),
            Checkpoint(),
            {TRAIN},
        ),
        (
            ListedPod("team-a", "train", {"main": frozenset()}),
            Checkpoint((CheckpointEntry(FIRST, "init", GPU, frozenset({"0"})),)),
            {TRAIN},
        ),
    ],
    ids=["an-id-of-the-plugins-own", "a-share", "nothing", "a-claim", "an-init-container"],
)
def test_pods_with_unmapped_ids_are_found_in_list_checkpoint_and_logs(
    listed: ListedPod, checkpoint: Checkpoint, unexplained: set[Pod]
) -> None:
    assert pods_with_unmapped_ids([listed], checkpoint, LOGS, OURS) == unexplained
