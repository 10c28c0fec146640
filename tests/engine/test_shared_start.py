"""Sharing with existing users: only certain facts count, about the starting pod and about those present."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.errors import Quarantined
from scrubber.domain.handover_kind import Basis
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.refusals import assigned_by_another_plugin
from tests.world.asking import answered, ask, started
from tests.world.sharing import RESOURCE, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import a_world

MINE = Pod("acme", "train-0", "uid-1")


@in_virtual_time
async def test_shared_start_of_a_pod_that_only_the_checkpoint_names_is_refused() -> None:
    """The checkpoint names the pod of the share; the list of the restarted kubelet does not yet."""
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        joining = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        world.kubelet.trust = Trust.EMPTY_AFTER_RESTART
        refusal = await world.refused(joining)
        assert "no witness says for certain which pod is about to start" in str(refusal)
        world.kubelet.trust = Trust.TRUSTED
        (granted,) = await world.call(joining)
        assert granted.basis is Basis.SHARED


@in_virtual_time
async def test_grant_of_a_pod_missing_from_one_kubelet_list_is_kept_by_the_next_shared_start() -> None:
    """One list proves nothing: the pod may be in the next one, and its bytes are still there."""
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        left = await world.start("acme", "train-1", world.share(1))
        joining = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        await world.run(1.2 - world.clock.monotonic() % 1.0)  # the usage check has just run
        world.kubelet.delete(left)
        await world.call(joining)
        assert left.pod in [grant.pod for grant in world.record().open_grants]


@pytest.mark.parametrize(
    ("owner", "asking", "refused"),
    [
        (MINE, MINE, False),
        (MINE, None, True),
        (Pod("umbrella", "train-0", "uid-1"), MINE, True),
        (Pod("acme", "train-0", "uid-2"), MINE, True),
    ],
)
def test_device_assigned_through_another_plugins_resource_as_well_is_granted_to_the_owning_pod_only(
    owner: Pod, asking: Pod | None, refused: bool
) -> None:
    reading = KubeletReading(Trust.TRUSTED, (Assignment(owner, "main", frozenset({"gpu"}), resource="vendor.com/gpu"),))
    other = reading.second_owner("gpu", frozenset({RESOURCE}), asking)
    assert (other is not None) is refused
    assert other is None or owner.name not in assigned_by_another_plugin("gpu", other, {RESOURCE}).public_message
    assert reading.second_owner("gpu", frozenset(), asking) is None, "nothing is foreign while nothing is our own"


@in_virtual_time
async def test_faulted_device_is_not_recovered_for_a_waiting_pod_while_an_earlier_tenant_uses_it() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.gpu().xids[95] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        world.kubelet.force_delete(first, lives_on=20.0)
        waiting = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id], starts=False)
        assert isinstance(await answered(ask(world, waiting, wait=1.0)), Quarantined)
        assert world.record().hygiene is Hygiene.IN_USE
        assert world.gpu().resets == 0
