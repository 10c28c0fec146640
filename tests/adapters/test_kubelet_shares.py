"""Shares of a device in the kubelet's lists: each is somebody's own, and who has the whole device has no share."""

from __future__ import annotations

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.corroboration import ListedPod, assignments_of, hints_of, shares_of
from scrubber.adapters.kubelet.naming import Naming
from scrubber.adapters.kubelet.pod_logs import index_pod_logs
from scrubber.domain.assignment import Pod, Reading, Trust
from scrubber.domain.resources import Announced

GPU, VENDOR = "scrubber.dev/gpu", "vendor.dev/gpu"
FIRST, SECOND = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11", "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
DEVICES = frozenset({"gpu-0", "gpu-1"})
ANNOUNCED = Announced().announce(VENDOR, {"0-a": "gpu-0", "0-b": "gpu-0", "1": "gpu-1"}, DEVICES)
OURS = Naming(DEVICES, lambda resource, listed: ANNOUNCED.meaning(resource, listed, DEVICES))
TRAIN, INFER = Pod("team-a", "train", FIRST), Pod("team-a", "infer", SECOND)
LOGS = index_pod_logs([f"team-a_train_{FIRST}", f"team-a_infer_{SECOND}"])


def pod(name: str, *ids: str, resource: str = GPU, container: str = "main") -> ListedPod:
    return ListedPod("team-a", name, {container: frozenset((resource, each) for each in ids)})


def entry(uid: str, container: str, *ids: str) -> CheckpointEntry:
    return CheckpointEntry(uid, container, GPU, frozenset(ids))


def reading(*pods: ListedPod, checkpoint: tuple[CheckpointEntry, ...] = ()) -> Reading:
    known = Checkpoint(checkpoint)
    assignments = assignments_of(pods, known, LOGS, OURS)
    hinted = hints_of(assignments, known, LOGS, OURS, active_only=True)
    return Reading(Trust.TRUSTED, assignments, hinted, shares=shares_of(pods, known, LOGS, OURS))


def share(*ids: str) -> frozenset[str]:
    return frozenset(ids)


def test_each_share_is_its_own_pods_and_the_device_is_both_pods() -> None:
    two = reading(pod("train", "gpu-0::0"), pod("infer", "gpu-0::1"))
    first, second = two.assignment_of("gpu-0", share("gpu-0::0")), two.assignment_of("gpu-0", share("gpu-0::1"))
    assert first is not None
    assert second is not None
    assert (first.pod, second.pod) == (TRAIN, INFER)
    assert two.assignment_of("gpu-0") is None
    assert len(two.having("gpu-0")) == 2
    assert two.containers_with("gpu-0", share("gpu-0::0")) == 1


def test_a_share_that_two_pods_are_said_to_have_is_nobodys_for_certain() -> None:
    assert reading(pod("train", "gpu-0::0"), pod("infer", "gpu-0::0")).assignment_of("gpu-0", share("gpu-0::0")) is None


def test_a_share_that_nobody_has_is_nobodys() -> None:
    one = reading(pod("train", "gpu-0::0"))
    assert one.assignment_of("gpu-0", share("gpu-0::1")) is None
    assert one.having("gpu-0", share("gpu-0::1")) == ()


def test_announced_ids_of_one_device_are_shares_and_a_single_one_is_the_device() -> None:
    both = reading(pod("train", "0-a", "1", resource=VENDOR), pod("infer", "0-b", resource=VENDOR))
    found = both.assignment_of("gpu-0", share("0-b"))
    assert found is not None
    assert found.pod == INFER
    whole = both.assignment_of("gpu-1")
    assert whole is not None
    assert whole.pod == TRAIN


def test_whoever_has_the_whole_device_has_no_share_of_it() -> None:
    both = reading(pod("train", "gpu-0", "gpu-0::0"))
    assert both.assignment_of("gpu-0", share("gpu-0::0")) is None


def test_several_shares_of_one_container_are_found_by_any_of_them() -> None:
    one = reading(pod("train", "gpu-0::0", "gpu-0::4"), pod("infer", "gpu-0::1"))
    found = one.assignment_of("gpu-0", share("gpu-0::0", "gpu-0::4"))
    assert found is not None
    assert found.pod == TRAIN
    assert one.shares_of(TRAIN, "gpu-0") == {"gpu-0::0", "gpu-0::4"}


def test_an_init_container_is_known_by_its_share_too() -> None:
    checkpoint = (entry(FIRST, "main", "gpu-0::0"), entry(FIRST, "init", "gpu-0::0"), entry(SECOND, "main", "gpu-0::1"))
    both = reading(pod("train", "gpu-0::0"), pod("infer", "gpu-0::1"), checkpoint=checkpoint)
    assert both.containers_with("gpu-0", share("gpu-0::0")) == 2
    assert both.containers_with("gpu-0", share("gpu-0::1")) == 1
    found = both.assignment_of("gpu-0", share("gpu-0::0"))
    assert found is not None
    assert (found.pod, found.container) == (TRAIN, "main")


def test_a_share_of_an_init_container_alone_is_a_hint() -> None:
    checkpoint = (entry(FIRST, "init", "gpu-0::2"), entry(SECOND, "main", "gpu-0::1"))
    both = reading(pod("train"), pod("infer", "gpu-0::1"), checkpoint=checkpoint)
    assert both.assignment_of("gpu-0", share("gpu-0::2")) is None
    hint = both.hint_of("gpu-0", share("gpu-0::2"))
    assert hint is not None
    assert hint.pod == TRAIN


def test_of_several_resources_of_one_pod_the_one_that_is_asked_for_names_the_assignment() -> None:
    twice = ListedPod("team-a", "train", {"main": frozenset({(VENDOR, "1"), ("another.dev/gpu", "gpu-1")})})
    one = reading(twice)
    named = one.assignment_of("gpu-1", resource=VENDOR)
    assert named is not None
    assert named.resource == VENDOR
