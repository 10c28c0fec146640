"""Pods on ids that nobody has explained: their plugin is away, or has not yet told a service that was started anew. They are
not on our devices as far as anybody can tell, and are rightful all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.corroboration import ClaimedDevice, ListedPod, unexplained_among
from scrubber.adapters.kubelet.naming import Naming
from scrubber.adapters.kubelet.pod_logs import index_pod_logs
from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Limits, Ungranted
from scrubber.domain.using import Use, judge_use, may_be_ended
from tests.world.kubelet import Tenant
from tests.world.matter import Proc
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

END = replace(DEFAULT, ungranted=Ungranted.END, limits=replace(Limits(), dying_grace=10.0))
GPU = "vendor.example/gpu"
FIRST = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11"
LOGS = index_pod_logs([f"team-a_train_{FIRST}"])
TRAIN = Pod("team-a", "train", FIRST)
OURS = Naming(frozenset({"gpu-0"}))


class Ids:
    """The kubelet's list as it is read while nobody says what its ids mean."""

    def __init__(self, world: World) -> None:
        self.explained = False
        self._list: Callable[[], Reading] = world.kubelet.reading
        world.kubelet.reading = self.reading  # type: ignore[method-assign]

    def reading(self) -> Reading:
        listed = self._list()
        if self.explained:
            return listed
        pods = [each.pod for each in listed.assignments]
        nothing = tuple(Assignment(pod, "", frozenset()) for pod in pods)
        return replace(listed, assignments=nothing, hinted=(), unexplained=frozenset(pods))


async def started(world: World) -> tuple[Tenant, Proc]:
    """A pod that the kubelet started without asking."""
    tenant = await world.admit("acme", "train-0", starts=False)
    assert tenant is not None
    gpu = world.gpu().id
    proc = world.matter.start(tenant.uid, f"{tenant.uid}/main#1", "acme/train-0/main#1", mounted=frozenset({gpu}))
    world.matter.open(proc, gpu)
    return tenant, proc


@in_virtual_time
async def test_a_pod_whose_ids_nobody_has_explained_is_never_ended_as_a_stranger_and_is_adopted_once_they_are() -> None:
    async with a_world(policy=END) as world:
        ids = Ids(world)
        tenant, proc = await started(world)
        world.matter.write(proc, world.gpu().id)
        await world.run(END.limits.dying_grace * 6)
        assert proc.alive
        ids.explained = True
        await world.until(lambda: world.record().hygiene is Hygiene.IN_USE, within=5.0)
        assert [grant.pod for grant in world.record().open_grants] == [tenant.pod]


@in_virtual_time
async def test_a_granted_pod_whose_ids_nobody_explains_any_more_outlives_every_grace_and_a_restart_of_the_service() -> (
    None
):
    async with a_world(policy=END) as world:
        ids = Ids(world)
        ids.explained = True
        tenant = await world.admit("acme", "train-0")
        assert tenant is not None
        await world.until(lambda: bool(tenant.running and tenant.first and tenant.first.holds))
        world.write_all(tenant)
        ids.explained = False
        for _ in range(2):
            await world.run(END.limits.dying_grace * 3)
            world.kill()
            await world.start_service()
        await world.run(END.limits.dying_grace * 3)
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.record().hygiene is Hygiene.IN_USE
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)


def test_whoever_may_have_the_device_under_an_id_that_nobody_explained_is_told_of_and_not_ended() -> None:
    for unexplained in (TRAIN, replace(TRAIN, uid=None)):
        reading = Reading(Trust.TRUSTED, unexplained=frozenset({unexplained}))
        assert judge_use(FIRST, "gpu-0", (), reading) is Use.STRANGER
        assert not may_be_ended(FIRST, "gpu-0", (), reading)
    assert may_be_ended(FIRST, "gpu-0", (), Reading(Trust.TRUSTED))


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
def test_who_has_what_nobody_has_explained(listed: ListedPod, checkpoint: Checkpoint, unexplained: set[Pod]) -> None:
    assert unexplained_among([listed], checkpoint, LOGS, OURS) == unexplained
