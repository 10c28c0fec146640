"""Shares of a device in the kubelet's lists: each has one pod, and an assignment of the whole device is not a share."""

from __future__ import annotations

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.crosscheck import ListedPod, assignments_of, checkpoint_only_assignments, shares_of
from scrubber.adapters.kubelet.device_ids import DeviceIdResolver
from scrubber.adapters.kubelet.pod_logs import index_pod_logs
from scrubber.domain.assignment import KubeletReading, Pod, Trust
from scrubber.domain.resource_mapping import ResourceMappings

GPU, VENDOR = "scrubber.dev/gpu", "vendor.dev/gpu"
FIRST, SECOND = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11", "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
DEVICES = frozenset({"gpu-0", "gpu-1"})
ANNOUNCED = ResourceMappings().with_mapping(VENDOR, {"0-a": "gpu-0", "0-b": "gpu-0", "1": "gpu-1"}, DEVICES)
OURS = DeviceIdResolver(DEVICES, lambda resource, listed: ANNOUNCED.resolve(resource, listed, DEVICES))
TRAIN, INFER = Pod("team-a", "train", FIRST), Pod("team-a", "infer", SECOND)
LOGS = index_pod_logs([f"team-a_train_{FIRST}", f"team-a_infer_{SECOND}"])


def pod(name: str, *ids: str, resource: str = GPU, container: str = "main") -> ListedPod:
    return ListedPod("team-a", name, {container: frozenset((resource, each) for each in ids)})


def entry(uid: str, container: str, *ids: str) -> CheckpointEntry:
    return CheckpointEntry(uid, container, GPU, frozenset(ids))


def reading(*pods: ListedPod, checkpoint: tuple[CheckpointEntry, ...] = ()) -> KubeletReading:
    known = Checkpoint(checkpoint)
    assignments = assignments_of(pods, known, LOGS, OURS)
    hinted = checkpoint_only_assignments(assignments, known, LOGS, OURS, active_only=True)
    return KubeletReading(Trust.TRUSTED, assignments, hinted, shares=shares_of(pods, known, LOGS, OURS))


def share(*ids: str) -> frozenset[str]:
    return frozenset(ids)


def test_each_share_is_assigned_to_its_own_pod_and_the_device_to_both_pods() -> None:
    two = reading(pod("train", "gpu-0::0"), pod("infer", "gpu-0::1"))
    first, second = two.assignment_of("gpu-0", share("gpu-0::0")), two.assignment_of("gpu-0", share("gpu-0::1"))
    assert first is not None
    assert second is not None
    assert (first.pod, second.pod) == (TRAIN, INFER)
    assert two.assignment_of("gpu-0") is None
    assert len(two.listed_assignments("gpu-0")) == 2
    assert two.container_count("gpu-0", share("gpu-0::0")) == 1


def test_share_listed_for_two_pods_has_no_certain_assignment() -> None:
    assert reading(pod("train", "gpu-0::0"), pod("infer", "gpu-0::0")).assignment_of("gpu-0", share("gpu-0::0")) is None


def test_unlisted_share_has_no_assignment() -> None:
    one = reading(pod("train", "gpu-0::0"))
    assert one.assignment_of("gpu-0", share("gpu-0::1")) is None
    assert one.listed_assignments("gpu-0", share("gpu-0::1")) == ()


def test_mapped_ids_of_one_device_are_shares_and_a_single_id_is_the_device() -> None:
    both = reading(pod("train", "0-a", "1", resource=VENDOR), pod("infer", "0-b", resource=VENDOR))
    found = both.assignment_of("gpu-0", share("0-b"))
    assert found is not None
    assert found.pod == INFER
    whole = both.assignment_of("gpu-1")
    assert whole is not None
    assert whole.pod == TRAIN


def test_pod_with_the_whole_device_has_no_share_of_it() -> None:
    both = reading(pod("train", "gpu-0", "gpu-0::0"))
    assert both.assignment_of("gpu-0", share("gpu-0::0")) is None


def test_any_share_of_a_container_with_several_shares_finds_its_assignment() -> None:
    one = reading(pod("train", "gpu-0::0", "gpu-0::4"), pod("infer", "gpu-0::1"))
    found = one.assignment_of("gpu-0", share("gpu-0::0", "gpu-0::4"))
    assert found is not None
    assert found.pod == TRAIN
    assert one.shares_of(TRAIN, "gpu-0") == {"gpu-0::0", "gpu-0::4"}


def test_init_container_is_found_by_its_share() -> None:
    checkpoint = (entry(FIRST, "main", "gpu-0::0"), entry(FIRST, "init", "gpu-0::0"), entry(SECOND, "main", "gpu-0::1"))
    both = reading(pod("train", "gpu-0::0"), pod("infer", "gpu-0::1"), checkpoint=checkpoint)
    assert both.container_count("gpu-0", share("gpu-0::0")) == 2
    assert both.container_count("gpu-0", share("gpu-0::1")) == 1
    found = both.assignment_of("gpu-0", share("gpu-0::0"))
    assert found is not None
    assert (found.pod, found.container) == (TRAIN, "main")


def test_share_of_an_init_container_alone_is_a_checkpoint_only_assignment() -> None:
    checkpoint = (entry(FIRST, "init", "gpu-0::2"), entry(SECOND, "main", "gpu-0::1"))
    both = reading(pod("train"), pod("infer", "gpu-0::1"), checkpoint=checkpoint)
    assert both.assignment_of("gpu-0", share("gpu-0::2")) is None
    hint = both.checkpoint_assignment("gpu-0", share("gpu-0::2"))
    assert hint is not None
    assert hint.pod == TRAIN


def test_requested_resource_selects_the_assignment_of_a_pod_with_several_resources() -> None:
    twice = ListedPod("team-a", "train", {"main": frozenset({(VENDOR, "1"), ("another.dev/gpu", "gpu-1")})})
    one = reading(twice)
    named = one.assignment_of("gpu-1", resource=VENDOR)
    assert named is not None
    assert named.resource == VENDOR
