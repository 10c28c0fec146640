"""The kubelet's checkpoint, its log directories, and what they say together about who a listed pod is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.kubelet.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointEntry,
    parse_checkpoint,
    read_checkpoint,
)
from scrubber.adapters.kubelet.corroboration import ListedPod, assignments_of, hints_of, missing_from
from scrubber.adapters.kubelet.pod_logs import PodLogs, index_pod_logs, read_pod_logs
from scrubber.domain.assignment import Assignment, Pod, Reading, Trust

GPU = "scrubber.dev/gpu"
FIRST, SECOND = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11", "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"


def recorded(*entries: dict[str, Any]) -> bytes:
    """The shape that Kubernetes 1.36 writes."""
    data = {"PodDeviceEntries": list(entries), "RegisteredDevices": {GPU: ["gpu-0", "gpu-1"]}}
    return json.dumps({"Data": data, "Checksum": 2493384021}).encode()


def entry(uid: str, container: str, *devices: str, resource: str = GPU) -> dict[str, Any]:
    ids = {"-1": list(devices)}
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": ids,
        "AllocResp": "CgoKA0ZPTxIDYmFy",
    }


def known(*entries: tuple[str, str, str]) -> Checkpoint:
    return Checkpoint(tuple(CheckpointEntry(uid, name, GPU, frozenset({device})) for uid, name, device in entries))


def listed(name: str = "train", devices: tuple[str, ...] = ("gpu-0",), container: str = "main") -> ListedPod:
    return ListedPod("team-a", name, {container: frozenset((GPU, device) for device in devices)})


def logs(*pods: tuple[str, str]) -> PodLogs:
    return index_pod_logs([f"team-a_{name}_{uid}" for name, uid in pods])


def uid_of(*, directories: tuple[str, ...], checkpoint: Checkpoint) -> str | None:
    found = logs(*(("train", uid) for uid in directories))
    [assignment] = assignments_of([listed()], checkpoint, found, {"gpu-0"})
    return assignment.pod.uid


# --- the file ---


def test_every_entry_is_read_and_numa_nodes_are_merged() -> None:
    split = entry(FIRST, "main")
    split["DeviceIDs"] = {"0": ["gpu-0"], "1": ["gpu-1"], "2": None}
    parsed = parse_checkpoint(recorded(split, entry(SECOND, "init", "gpu-2", resource="other.dev/gpu")))
    assert parsed == Checkpoint(
        (
            CheckpointEntry(FIRST, "main", GPU, frozenset({"gpu-0", "gpu-1"})),
            CheckpointEntry(SECOND, "init", "other.dev/gpu", frozenset({"gpu-2"})),
        )
    )


@pytest.mark.parametrize("entries", [None, []])
def test_a_kubelet_that_allocated_nothing_has_an_empty_checkpoint(entries: list[str] | None) -> None:
    text = json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}).encode()
    assert parse_checkpoint(text) == Checkpoint()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"Data": null, "Checksum": 1}',
        b'{"Data": {"PodDeviceEntries": {}}}',
        b'{"Data": {"PodDeviceEntries": [{"PodUID": 5}]}}',
        recorded({"PodUID": FIRST, "ContainerName": "main", "ResourceName": GPU, "DeviceIDs": ["gpu-0"]}),
        recorded(entry(FIRST, "main", "gpu-0"), entry("", "main", "gpu-1")),
    ],
)
def test_a_checkpoint_of_another_shape_is_left_aside_whole_and_says_why(text: bytes) -> None:
    parsed = parse_checkpoint(text)
    assert parsed.entries == ()
    assert "shape" in parsed.unreadable


def test_a_checkpoint_that_is_missing_says_that_nothing_was_allocated(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) == Checkpoint()


def test_a_checkpoint_that_cannot_be_opened_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).mkdir(parents=True)
    assert "cannot be read" in read_checkpoint(tmp_path).unreadable


# --- the log directories ---


def test_log_directories_give_names_and_uids_both_ways(tmp_path: Path) -> None:
    for name in (f"team-a_train_{FIRST}", f"team-a_train_{SECOND}", "lost+found", "a_b", "a_b_c_d", "__"):
        (tmp_path / name).mkdir()
    found = read_pod_logs(tmp_path)
    assert found.uids == {("team-a", "train"): {FIRST, SECOND}}
    assert found.names == {FIRST: ("team-a", "train"), SECOND: ("team-a", "train")}


def test_missing_log_directories_are_said_aloud(tmp_path: Path) -> None:
    assert "no directory" in read_pod_logs(tmp_path / "pods").unreadable


# --- together: the UID ---


def test_one_log_directory_names_the_pod() -> None:
    assert uid_of(directories=(FIRST,), checkpoint=Checkpoint()) == FIRST


def test_of_a_recreated_pods_two_directories_the_checkpoint_picks_one() -> None:
    assert uid_of(directories=(FIRST, SECOND), checkpoint=known((SECOND, "main", "gpu-0"))) == SECOND


def test_a_recreated_pod_that_the_checkpoint_cannot_tell_apart_has_no_uid() -> None:
    assert uid_of(directories=(FIRST, SECOND), checkpoint=Checkpoint()) is None
    both = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-0"))
    assert uid_of(directories=(FIRST, SECOND), checkpoint=both) is None


def test_a_directory_of_the_predecessor_does_not_lend_its_uid_to_a_recreated_pod() -> None:
    assert uid_of(directories=(FIRST,), checkpoint=known((SECOND, "main", "gpu-0"))) is None


def test_the_checkpoint_alone_gives_no_uid() -> None:
    assert uid_of(directories=(), checkpoint=known((FIRST, "main", "gpu-0"))) is None


def test_another_container_or_device_in_the_checkpoint_is_no_witness() -> None:
    others = known((SECOND, "init", "gpu-0"), (SECOND, "main", "gpu-1"))
    assert uid_of(directories=(FIRST,), checkpoint=others) == FIRST


def test_two_pods_of_one_name_that_are_listed_at_once_get_their_own_uids() -> None:
    old, new = listed(devices=("gpu-0",)), listed(devices=("gpu-1",))
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    found = assignments_of([old, new], checkpoint, logs(("train", FIRST), ("train", SECOND)), {"gpu-0", "gpu-1"})
    assert [(each.pod.uid, each.devices) for each in found] == [
        (FIRST, frozenset({"gpu-0"})),
        (SECOND, frozenset({"gpu-1"})),
    ]


# --- together: devices that are ours ---


def test_only_our_devices_are_kept() -> None:
    [found] = assignments_of([listed(devices=("gpu-0", "nic-7"))], Checkpoint(), PodLogs(), {"gpu-0", "gpu-1"})
    assert found == Assignment(Pod("team-a", "train"), "main", frozenset({"gpu-0"}))


def test_a_listed_pod_whose_device_is_not_known_any_more_is_not_absent() -> None:
    found = assignments_of([listed(devices=("gpu-0",))], Checkpoint(), logs(("train", FIRST)), ours=())
    reading = Reading(Trust.TRUSTED, found)
    assert reading.lists(Pod("team-a", "train", FIRST))
    assert reading.having("gpu-0") == ()


# --- together: what only the checkpoint knows ---


def test_an_init_containers_device_is_hinted_beside_the_pods_own() -> None:
    checkpoint = known((FIRST, "init", "gpu-1"), (FIRST, "main", "gpu-0"))
    found = logs(("train", FIRST))
    assignments = assignments_of([listed()], checkpoint, found, {"gpu-0", "gpu-1"})
    hints = hints_of(assignments, checkpoint, found, {"gpu-0", "gpu-1"}, active_only=True)
    assert hints == (Assignment(Pod("team-a", "train", FIRST), "init", frozenset({"gpu-1"})),)


def test_an_old_entry_of_a_pod_that_is_over_is_no_hint_once_the_list_is_trusted() -> None:
    checkpoint, found = known((FIRST, "main", "gpu-0")), logs(("train", FIRST))
    assert hints_of((), checkpoint, found, {"gpu-0"}, active_only=True) == ()
    [hint] = hints_of((), checkpoint, found, {"gpu-0"}, active_only=False)
    assert hint.pod == Pod("team-a", "train", FIRST)


def test_an_entry_without_log_directory_or_without_our_devices_is_no_hint() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "nic-7"))
    assert hints_of((), checkpoint, logs(("other", SECOND)), {"gpu-0"}, active_only=False) == ()


def test_a_list_lacks_the_pods_that_the_checkpoint_still_assigns_and_that_left_logs() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    found = logs(("train", FIRST), ("infer", SECOND))
    ours = {"gpu-0", "gpu-1"}
    assignments = assignments_of([listed()], checkpoint, found, ours)
    assert missing_from(assignments, checkpoint, found, ours) == ("team-a/infer",)
    assert missing_from(assignments, checkpoint, logs(("train", FIRST)), ours) == ()
    assert missing_from(assignments, checkpoint, found, {"gpu-0"}) == ()
