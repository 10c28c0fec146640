"""A combination of the kubelet's sources is reused only while it would come out the same."""

from collections.abc import Callable, Mapping

import pytest

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.crosscheck import Crosschecker, ListedPod
from scrubber.adapters.kubelet.pod_logs import PodLogs, index_pod_logs
from scrubber.domain.resource_mapping import MappedDevice

GPU = "nvidia.com/gpu"
UID, OTHER = "0c1d", "7f3e"
OURS = frozenset({"gpu-0", "gpu-1"})


def pod(name: str, *ids: str) -> ListedPod:
    return ListedPod("team-a", name, {"main": frozenset((GPU, each) for each in ids)})


def entry(uid: str, *ids: str) -> CheckpointEntry:
    return CheckpointEntry(uid, "main", GPU, frozenset(ids))


def logs(**uids: str) -> PodLogs:
    return index_pod_logs([f"team-a_{name}_{uid}" for name, uid in uids.items()])


LISTED = (pod("train", "gpu-0"),)
CHECKPOINT = Checkpoint((entry(UID, "gpu-0"),))
LOGS = logs(train=UID, serve=OTHER)


class Announced:
    """The plugins' meanings of their own IDs, which change."""

    def __init__(self, meanings: Mapping[str, str]) -> None:
        self.meanings = dict(meanings)

    def __call__(self, resource: str, kubelet_id: str) -> MappedDevice | None:
        device = self.meanings.get(kubelet_id)
        return None if device is None else MappedDevice(device)


def test_equal_sources_are_combined_once() -> None:
    combine = Crosschecker()
    first = combine(LISTED, CHECKPOINT, LOGS, OURS)
    assert (
        combine((pod("train", "gpu-0"),), Checkpoint((entry(UID, "gpu-0"),)), logs(train=UID, serve=OTHER), set(OURS))
        is first
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda listed, checkpoint, found, ours: ((pod("train", "gpu-1"),), checkpoint, found, ours),
        lambda listed, checkpoint, found, ours: ((), checkpoint, found, ours),
        lambda listed, checkpoint, found, ours: (
            listed,
            Checkpoint((*checkpoint.entries, entry(OTHER, "gpu-1"))),
            found,
            ours,
        ),
        lambda listed, checkpoint, found, ours: (listed, checkpoint, logs(train=OTHER), ours),
        lambda listed, checkpoint, found, ours: (listed, checkpoint, found, frozenset({"gpu-1"})),
    ],
    ids=["list", "empty list", "checkpoint", "logs", "devices"],
)
def test_changed_source_is_combined_again_there_and_back(change: Callable[..., tuple[object, ...]]) -> None:
    combine = Crosschecker()
    sources = (LISTED, CHECKPOINT, LOGS, OURS)
    before = combine(*sources)
    changed = change(*sources)
    assert combine(*changed) == Crosschecker()(*changed) != before  # type: ignore[arg-type]
    assert combine(*sources) == before


@pytest.mark.parametrize("later", [{"a": "gpu-1"}, {}, {"a": "gpu-0", "b": "gpu-1"}])
def test_new_meaning_of_an_id_is_combined_again(later: Mapping[str, str]) -> None:
    announced = Announced({"a": "gpu-0"})
    combine = Crosschecker(announced)
    sources = ((pod("train", "a"), pod("serve", "b")), CHECKPOINT, LOGS, OURS)
    before = combine(*sources)
    assert combine(*sources) is before
    announced.meanings = dict(later)
    assert combine(*sources) == Crosschecker(Announced(later))(*sources) != before


def test_failure_to_resolve_an_id_leaves_no_result_behind() -> None:
    announced = Announced({"a": "gpu-0"})
    failing = False

    def resolve(resource: str, kubelet_id: str) -> MappedDevice | None:
        if failing and kubelet_id == "b":
            raise RuntimeError("no meanings")
        return announced(resource, kubelet_id)

    combine = Crosschecker(resolve)
    sources = ((pod("train", "a"),), CHECKPOINT, LOGS, OURS)
    before = combine(*sources)
    failing = True
    with pytest.raises(RuntimeError):
        combine((pod("train", "b"),), CHECKPOINT, LOGS, OURS)
    announced.meanings = {"a": "gpu-1"}
    assert combine(*sources) != before
