"""The kubelet's checkpoint, its log directories, and what they say together about who a listed pod is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.kubelet.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointEntry,
    CheckpointFile,
    parse_checkpoint,
    read_checkpoint,
)
from scrubber.adapters.kubelet.corroboration import (
    ClaimedDevice,
    ListedPod,
    assignments_of,
    hints_of,
    missing_from,
    spent_among,
    unconfirmed_by,
)
from scrubber.adapters.kubelet.naming import Naming
from scrubber.adapters.kubelet.pod_logs import PodLogs, index_pod_logs, read_pod_logs
from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.resources import Meaning

GPU = "scrubber.dev/gpu"
OURS = Naming({"gpu-0", "gpu-1"})
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
    [assignment] = assignments_of([listed()], checkpoint, found, OURS)
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


def test_fields_that_are_not_known_here_are_passed_over() -> None:
    later = entry(FIRST, "main", "gpu-0") | {"ClaimUID": "x", "ShareID": None}
    text = json.dumps({"Data": {"PodDeviceEntries": [later], "Zones": {}}, "Checksum": 1, "Version": "v2"}).encode()
    assert parse_checkpoint(text) == known((FIRST, "main", "gpu-0"))


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


def test_a_checkpoint_of_hundreds_of_kilobytes_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).parent.mkdir()
    (tmp_path / CHECKPOINT).write_bytes(recorded(*(entry(f"{FIRST}-{n}", "main", "gpu-0") for n in range(3_000))))
    assert len(read_checkpoint(tmp_path).entries) == 3_000


def test_a_checkpoint_that_is_read_again_and_again_is_parsed_when_it_says_something_else(tmp_path: Path) -> None:
    file, path = CheckpointFile(tmp_path), tmp_path / CHECKPOINT
    path.parent.mkdir()
    path.write_bytes(recorded(entry(FIRST, "main", "gpu-0")))
    times = path.stat()
    first = file.read()
    assert file.read() is first

    # The same inode, as many bytes, the same times: what it says is all that counts.
    path.write_bytes(recorded(entry(SECOND, "main", "gpu-0")))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert [each.pod_uid for each in file.read().entries] == [SECOND]

    path.unlink()
    assert file.read() == Checkpoint()


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


def test_a_uid_under_two_pod_names_names_nobody(tmp_path: Path) -> None:
    for name in (f"team-a_train_{FIRST}", f"team-b_train_{FIRST}", f"team-b_train_{SECOND}"):
        (tmp_path / name).mkdir()
    found = read_pod_logs(tmp_path)
    assert found.names == {SECOND: ("team-b", "train")}
    assert found.uids == {("team-b", "train"): {SECOND}}
    assert found.claimants(FIRST) == {("team-a", "train"), ("team-b", "train")}
    assert found.claimants(SECOND) == {("team-b", "train")}
    assert found.claimants("") == frozenset()


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
    found = assignments_of([old, new], checkpoint, logs(("train", FIRST), ("train", SECOND)), OURS)
    assert [(each.pod.uid, each.devices) for each in found] == [
        (FIRST, frozenset({"gpu-0"})),
        (SECOND, frozenset({"gpu-1"})),
    ]


# --- together: devices that are ours ---


def test_only_our_devices_are_kept() -> None:
    [found] = assignments_of([listed(devices=("gpu-0", "nic-7"))], Checkpoint(), PodLogs(), OURS)
    assert found == Assignment(Pod("team-a", "train"), "main", frozenset({"gpu-0"}))


def test_a_listed_pod_whose_device_is_not_known_any_more_is_not_absent() -> None:
    found = assignments_of([listed(devices=("gpu-0",))], Checkpoint(), logs(("train", FIRST)), Naming(()))
    reading = Reading(Trust.TRUSTED, found)
    assert reading.lists(Pod("team-a", "train", FIRST))
    assert reading.having("gpu-0") == ()


# --- together: what only the checkpoint knows ---


def test_an_init_containers_device_is_hinted_beside_the_pods_own() -> None:
    checkpoint = known((FIRST, "init", "gpu-1"), (FIRST, "main", "gpu-0"))
    found = logs(("train", FIRST))
    assignments = assignments_of([listed()], checkpoint, found, OURS)
    hints = hints_of(assignments, checkpoint, found, OURS, active_only=True)
    assert hints == (Assignment(Pod("team-a", "train", FIRST), "init", frozenset({"gpu-1"})),)


def test_an_old_entry_of_a_pod_that_is_over_is_no_hint_once_the_list_is_trusted() -> None:
    checkpoint, found = known((FIRST, "main", "gpu-0")), logs(("train", FIRST))
    assert hints_of((), checkpoint, found, OURS, active_only=True) == ()
    [hint] = hints_of((), checkpoint, found, OURS, active_only=False)
    assert hint.pod == Pod("team-a", "train", FIRST)


def test_an_entry_without_log_directory_or_without_our_devices_is_no_hint() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "nic-7"))
    assert hints_of((), checkpoint, logs(("other", SECOND)), OURS, active_only=False) == ()


def test_a_list_lacks_the_pods_that_the_checkpoint_still_assigns_and_that_left_logs() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    found = logs(("train", FIRST), ("infer", SECOND))
    assignments = assignments_of([listed()], checkpoint, found, OURS)
    assert missing_from(assignments, checkpoint, found, OURS) == {Pod("team-a", "infer", SECOND)}
    assert missing_from(assignments, checkpoint, logs(("train", FIRST)), OURS) == frozenset()
    assert missing_from(assignments, checkpoint, found, Naming({"gpu-0"})) == frozenset()


def test_a_pod_whose_uid_is_disputed_is_still_missing_from_a_list_that_lacks_it() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"))
    found = index_pod_logs([f"team-a_train_{FIRST}", f"team-b_train_{FIRST}"])
    claimants = {Pod("team-a", "train", FIRST), Pod("team-b", "train", FIRST)}
    assert missing_from((), checkpoint, found, OURS) == claimants
    assert missing_from(assignments_of([listed()], checkpoint, found, OURS), checkpoint, found, OURS) == frozenset()


# --- together: whose names devices go by ---


def test_a_replica_is_its_device_in_the_list_and_in_the_checkpoint() -> None:
    found = logs(("train", FIRST))
    checkpoint = known((FIRST, "main", "gpu-0::3"), (FIRST, "init", "gpu-1::0"))
    assignments = assignments_of([listed(devices=("gpu-0::3",))], checkpoint, found, OURS)
    assert [(each.pod.uid, each.devices) for each in assignments] == [(FIRST, frozenset({"gpu-0"}))]
    [hint] = hints_of(assignments, checkpoint, found, OURS, active_only=True)
    assert hint.devices == {"gpu-1"}


@pytest.mark.parametrize("listed_as", ["gpu-0::", "gpu-0::x", "gpu-9::1", "::1", "gpu-0:1", "GPU-0", "", "0"])
def test_what_only_looks_like_a_device_of_ours_is_not(listed_as: str) -> None:
    assert OURS.device(GPU, listed_as) is None


def test_a_plugins_own_names_are_asked_of_whoever_knows_them_and_by_resource() -> None:
    names = {("vendor.dev/gpu", "0"): Meaning("gpu-0"), ("vendor.dev/gpu", "7"): Meaning("gpu-7")}
    ours = Naming({"gpu-0"}, lambda resource, listed: names.get((resource, listed)))
    assert ours.device("vendor.dev/gpu", "0") == "gpu-0"
    assert ours.device("nics.dev/port", "0") is None
    assert ours.device("vendor.dev/gpu", "7") is None, "it is no device of ours"


def test_the_resource_that_gave_a_device_away_is_named() -> None:
    both = ListedPod("team-a", "train", {"main": frozenset({(GPU, "gpu-0"), ("vendor.dev/gpu", "gpu-1")})})
    found = assignments_of([both], Checkpoint(), PodLogs(), OURS)
    reading = Reading(Trust.TRUSTED, found)
    assert [(each.resource, each.devices) for each in found] == [
        (GPU, frozenset({"gpu-0"})),
        ("vendor.dev/gpu", frozenset({"gpu-1"})),
    ]
    assert reading.foreign("gpu-0", {GPU}) == ()
    assert reading.foreign("gpu-1", {GPU}) == (found[1],)
    assert reading.containers_with("gpu-1") == 1


@pytest.mark.parametrize(
    "claim",
    [
        ClaimedDevice("gpu.vendor.com", "gpu-4c1f-9d"),
        ClaimedDevice("gpu.vendor.com", "gpu-0", ("k8s.gpu.vendor.com/claim=8a7e-GPU-4c1f-9d",)),
        ClaimedDevice("gpu.vendor.com", "anything", ("vendor.com/gpu=nvme0", "vendor.com/gpu=GPU-4c1f-9d")),
        ClaimedDevice("named.vendor.com", "gpu-17"),
    ],
)
def test_a_claim_of_a_dra_driver_for_a_device_of_ours_is_an_assignment(claim: ClaimedDevice) -> None:
    ours = Naming({"GPU-4c1f-9d"}, _named)
    pod = ListedPod("team-b", "claims", {"main": frozenset()}, {"main": frozenset({claim})})
    [found] = assignments_of([pod], Checkpoint(), logs(("train", FIRST)), ours)
    assert (found.pod.name, found.container, found.devices) == ("claims", "main", frozenset({"GPU-4c1f-9d"}))
    assert found.resource == claim.driver


def _named(resource: str, listed: str) -> Meaning | None:
    return Meaning("GPU-4c1f-9d") if (resource, listed) == ("named.vendor.com", "gpu-17") else None


@pytest.mark.parametrize("name", ["gpu-4c1f-9", "4c1f-9d", "xgpu-4c1f-9d", "gpu-4c1f-9d-mig-1", ""])
def test_a_claim_of_something_else_is_none_of_ours(name: str) -> None:
    assert Naming({"GPU-4c1f-9d"}).claimed("gpu.vendor.com", name, (f"vendor.com/gpu={name}",)) == frozenset()


def test_a_device_that_is_claimed_and_allocated_has_no_certain_assignment() -> None:
    claim = frozenset({ClaimedDevice("gpu.vendor.com", "gpu-0")})
    claiming = ListedPod("team-b", "claims", {"main": frozenset()}, {"main": claim})
    reading = Reading(Trust.TRUSTED, assignments_of([listed(), claiming], Checkpoint(), PodLogs(), OURS))
    assert reading.assignment_of("gpu-0") is None
    assert [each.resource for each in reading.foreign("gpu-0", {GPU})] == ["gpu.vendor.com"]


# --- together: pods that have ended and are listed, and a checkpoint of another kubelet ---


def nothing(name: str = "train") -> ListedPod:
    return ListedPod("team-a", name, {"main": frozenset()})


def test_a_pod_that_is_listed_without_any_device_is_spent_and_may_not_start_on_one() -> None:
    found = logs(("train", FIRST))
    pod = Pod("team-a", "train", FIRST)
    spent = spent_among([nothing()], Checkpoint(), found)
    reading = Reading(Trust.TRUSTED, assignments_of([nothing()], Checkpoint(), found, OURS), spent=spent)
    assert spent == {pod}
    assert not reading.keeps(pod)
    assert reading.lists(pod), "it is not absent, so nothing is proved against its processes"
    assert reading.keeps(Pod("team-a", "train", SECOND)) is False
    assert not reading.keeps(Pod("team-a", "other", SECOND))


@pytest.mark.parametrize(
    ("pod", "checkpoint", "directories"),
    [
        (nothing(), known((FIRST, "init", "gpu-0")), (FIRST,)),
        (nothing(), Checkpoint(unreadable="no"), (FIRST,)),
        (nothing(), Checkpoint(), ()),
        (nothing(), Checkpoint(), (FIRST, SECOND)),
        (listed(devices=("nic-7",)), Checkpoint(), (FIRST,)),
        (ListedPod("team-a", "train", {}, {"main": frozenset({ClaimedDevice("d", "n")})}), Checkpoint(), (FIRST,)),
    ],
    ids=["init container", "no checkpoint", "no UID", "two UIDs", "another device", "a claim"],
)
def test_a_pod_that_may_have_a_device_is_not_spent(
    pod: ListedPod, checkpoint: Checkpoint, directories: tuple[str, ...]
) -> None:
    found = logs(*(("train", uid) for uid in directories))
    reading = Reading(
        Trust.TRUSTED, assignments_of([pod], checkpoint, found, OURS), spent=spent_among([pod], checkpoint, found)
    )
    assert reading.keeps(Pod("team-a", "train", FIRST))


def test_a_checkpoint_without_what_the_kubelet_lists_is_another_kubelets() -> None:
    other = listed("infer", ("gpu-1", "nic-7"))
    assert unconfirmed_by(known((FIRST, "main", "gpu-0")), [listed(), other], OURS) == ("team-a/infer",)
    both = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    assert unconfirmed_by(both, [listed(), other], OURS) == (), "devices that are not ours do not matter"
