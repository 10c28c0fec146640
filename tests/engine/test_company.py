"""Beside whom a container would start: only what is certain counts, for whoever asks and for whoever is there."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.basis import Basis
from scrubber.domain.errors import Quarantined
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.engine.refusals import foreign_assignment
from tests.world.asking import answered, ask, started
from tests.world.sharing import RESOURCE, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import a_world

MINE = Pod("acme", "train-0", "uid-1")


@in_virtual_time
async def test_a_pod_that_only_a_hint_names_joins_nobody() -> None:
    """The checkpoint says whose the share is; the kubelet's list, which has just begun anew, does not yet."""
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
async def test_a_pod_that_one_list_lacks_is_not_forgotten_by_the_next_that_joins() -> None:
    """One list proves nothing: the pod may be there again in the next one, and its bytes are."""
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        left = await world.start("acme", "train-1", world.share(1))
        joining = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        await world.run(1.2 - world.clock.monotonic() % 1.0)  # the watch has just looked
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
def test_only_the_pod_that_asks_may_have_the_device_under_another_plugins_resource_too(
    owner: Pod, asking: Pod | None, refused: bool
) -> None:
    reading = Reading(Trust.TRUSTED, (Assignment(owner, "main", frozenset({"gpu"}), resource="vendor.com/gpu"),))
    other = reading.second_owner("gpu", frozenset({RESOURCE}), asking)
    assert (other is not None) is refused
    assert other is None or owner.name not in foreign_assignment("gpu", other, {RESOURCE}).public
    assert reading.second_owner("gpu", frozenset(), asking) is None, "nothing is foreign while nothing is our own"


@in_virtual_time
async def test_a_device_does_not_heal_for_who_waits_while_an_earlier_tenant_lives_on_it() -> None:
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
