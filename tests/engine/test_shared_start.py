"""Sharing with existing users: only certain facts count, about the starting pod and about those present."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.errors import Quarantined
from scrubber.domain.handover_kind import Basis
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.refusals import assigned_by_another_plugin
from tests.simulation.cluster import simulated_cluster
from tests.simulation.sharing import RESOURCE, shared_device_cluster
from tests.simulation.start_requests import refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

MINE = Pod("acme", "train-0", "uid-1")


@in_virtual_time
async def test_shared_start_of_a_pod_that_only_the_checkpoint_names_is_refused() -> None:
    """The checkpoint names the pod of the share; the list of the restarted kubelet does not yet."""
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        second_pod = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        cluster.kubelet.trust = Trust.EMPTY_AFTER_RESTART
        refusal = await cluster.refused(second_pod)
        assert "no source identifies the starting pod with certainty" in str(refusal)
        cluster.kubelet.trust = Trust.TRUSTED
        (granted,) = await cluster.call(second_pod)
        assert granted.basis is Basis.SHARED


@in_virtual_time
async def test_grant_of_a_pod_without_cgroups_missing_from_one_kubelet_list_is_kept_by_the_next_shared_start() -> None:
    """One list proves nothing: the pod may be in the next one, and its bytes are still there."""
    async with shared_device_cluster() as cluster:
        cluster.process_table.has_cgroups = False
        await cluster.start("acme", "train-0", cluster.share(0))
        left = await cluster.start("acme", "train-1", cluster.share(1))
        second_pod = await cluster.admit_shares("acme", "train-2", cluster.share(2), starts=False)
        await cluster.run(1.2 - cluster.clock.monotonic() % 1.0)  # the usage check has just run
        cluster.kubelet.delete(left)
        await cluster.call(second_pod)
        assert left.pod in [grant.pod for grant in cluster.record().open_grants]


@pytest.mark.parametrize(
    ("owner", "starting", "refused"),
    [
        (MINE, MINE, False),
        (MINE, None, True),
        (Pod("umbrella", "train-0", "uid-1"), MINE, True),
        (Pod("acme", "train-0", "uid-2"), MINE, True),
    ],
)
def test_device_assigned_through_another_plugins_resource_as_well_is_granted_to_the_owning_pod_only(
    owner: Pod, starting: Pod | None, refused: bool
) -> None:
    reading = KubeletReading(Trust.TRUSTED, (Assignment(owner, "main", frozenset({"gpu"}), resource="vendor.com/gpu"),))
    other = reading.second_owner("gpu", frozenset({RESOURCE}), starting)
    assert (other is not None) is refused
    assert other is None or owner.name not in assigned_by_another_plugin("gpu", other, {RESOURCE}).public_message
    assert reading.second_owner("gpu", frozenset(), starting) is None, "nothing is foreign while nothing is our own"


@in_virtual_time
async def test_faulted_device_is_not_recovered_for_a_waiting_pod_while_an_earlier_tenant_uses_it() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster)
        cluster.gpu().xids[95] = 1
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        cluster.kubelet.force_delete(first, lives_on=20.0)
        waiting = cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id], starts=False)
        assert isinstance(await refusal_of(request_start(cluster, waiting, wait=1.0)), Quarantined)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().resets == 0
