"""The kubelet's checkpoint, its log directories, and how together they identify a listed pod."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.kubelet import pod_logs
from scrubber.adapters.kubelet.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointEntry,
    CheckpointFile,
    parse_checkpoint,
    read_checkpoint,
)
from scrubber.adapters.kubelet.crosscheck import (
    ClaimedDevice,
    ListedPod,
    assignments_of,
    checkpoint_only_assignments,
    missing_pods,
    pods_without_devices,
    unconfirmed_pods,
)
from scrubber.adapters.kubelet.device_ids import DeviceIdResolver
from scrubber.adapters.kubelet.pod_logs import PodLogs, index_pod_logs, read_pod_logs
from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.resource_mapping import MappedDevice

GPU = "scrubber.dev/gpu"
OURS = DeviceIdResolver({"gpu-0", "gpu-1"})
FIRST, SECOND = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11", "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"


def recorded(*entries: dict[str, Any]) -> bytes:
    """Return a checkpoint in the format of Kubernetes 1.36."""
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


def test_every_checkpoint_entry_is_read_and_numa_nodes_are_merged() -> None:
    split = entry(FIRST, "main")
    split["DeviceIDs"] = {"0": ["gpu-0"], "1": ["gpu-1"], "2": None}
    parsed = parse_checkpoint(recorded(split, entry(SECOND, "init", "gpu-2", resource="other.dev/gpu")))
    assert parsed == Checkpoint(
        (
            CheckpointEntry(FIRST, "main", GPU, frozenset({"gpu-0", "gpu-1"})),
            CheckpointEntry(SECOND, "init", "other.dev/gpu", frozenset({"gpu-2"})),
        )
    )


def test_unknown_checkpoint_fields_are_ignored() -> None:
    later = entry(FIRST, "main", "gpu-0") | {"ClaimUID": "x", "ShareID": None}
    text = json.dumps({"Data": {"PodDeviceEntries": [later], "Zones": {}}, "Checksum": 1, "Version": "v2"}).encode()
    assert parse_checkpoint(text) == known((FIRST, "main", "gpu-0"))


def test_checkpoint_is_readable_although_another_plugin_has_a_device_with_an_empty_id() -> None:
    other = entry(SECOND, "main", "", resource="other.dev/thing")
    parsed = parse_checkpoint(recorded(other, entry(FIRST, "main", "gpu-0")))
    assert parsed.error == ""
    assert parsed.entries[1:] == known((FIRST, "main", "gpu-0")).entries


@pytest.mark.parametrize("entries", [None, []])
def test_checkpoint_of_a_kubelet_without_allocations_is_empty(entries: list[str] | None) -> None:
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
        recorded(entry(FIRST, "main", "\ud800")),
        recorded(entry(FIRST, "main", "gpu-0") | {"DeviceIDs": {"0": [7]}}),
        recorded(entry(FIRST, "main", "gpu-0") | {"DeviceIDs": {"0": "gpu-0"}}),
        b'{"Data": {"PodDeviceEntries": [null]}}',
        b"[" * 100_000,
        b'{"Data": {"PodDeviceEntries": ' + b"[" * 100_000,
        b'{"Data": ' + b"9" * 5_000 + b"}",
        recorded({**entry(FIRST, "main"), "DeviceIDs": {"\x1b[2J\n": "gpu-0"}}),
    ],
)
def test_checkpoint_of_unknown_shape_is_rejected_whole_with_a_reason(text: bytes) -> None:
    parsed = parse_checkpoint(text)
    assert parsed.entries == ()
    assert "unknown format" in parsed.error
    assert parsed.error.isprintable()


def test_message_about_an_unknown_checkpoint_locates_the_value() -> None:
    parsed = parse_checkpoint(recorded(entry(FIRST, "main", "gpu-0"), entry(SECOND, "", "gpu-1")))
    assert "(Data.PodDeviceEntries.1.ContainerName: must be a string that is not empty)" in parsed.error


def test_missing_checkpoint_means_no_allocations(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) == Checkpoint()


def test_checkpoint_of_hundreds_of_kilobytes_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).parent.mkdir()
    (tmp_path / CHECKPOINT).write_bytes(recorded(*(entry(f"{FIRST}-{n}", "main", "gpu-0") for n in range(3_000))))
    assert len(read_checkpoint(tmp_path).entries) == 3_000


def test_checkpoint_is_parsed_again_only_when_its_content_changed(tmp_path: Path) -> None:
    file, path = CheckpointFile(tmp_path), tmp_path / CHECKPOINT
    path.parent.mkdir()
    path.write_bytes(recorded(entry(FIRST, "main", "gpu-0")))
    times = path.stat()
    first = file.read()
    assert file.read() is first

    # Same inode, size and times: only the content may count.
    path.write_bytes(recorded(entry(SECOND, "main", "gpu-0")))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert [each.pod_uid for each in file.read().entries] == [SECOND]

    path.unlink()
    assert file.read() == Checkpoint()


def test_checkpoint_that_cannot_be_opened_is_an_error_not_an_empty_checkpoint(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).mkdir(parents=True)
    assert "cannot be read" in read_checkpoint(tmp_path).error


# --- the log directories ---


def test_log_directories_map_pod_names_to_uids_and_back(tmp_path: Path) -> None:
    for name in (f"team-a_train_{FIRST}", f"team-a_train_{SECOND}", "lost+found", "a_b", "a_b_c_d", "__"):
        (tmp_path / name).mkdir()
    found = read_pod_logs(tmp_path)
    assert found.uids == {("team-a", "train"): {FIRST, SECOND}}
    assert found.names == {FIRST: ("team-a", "train"), SECOND: ("team-a", "train")}


def test_uid_with_two_pod_names_resolves_to_no_pod(tmp_path: Path) -> None:
    for name in (f"team-a_train_{FIRST}", f"team-b_train_{FIRST}", f"team-b_train_{SECOND}"):
        (tmp_path / name).mkdir()
    found = read_pod_logs(tmp_path)
    assert found.names == {SECOND: ("team-b", "train")}
    assert found.uids == {("team-b", "train"): {SECOND}}
    assert found.names_of(FIRST) == {("team-a", "train"), ("team-b", "train")}
    assert found.names_of(SECOND) == {("team-b", "train")}
    assert found.names_of("") == frozenset()


def test_missing_log_directories_are_reported_as_an_error(tmp_path: Path) -> None:
    assert "does not exist, so pods have no UID" in read_pod_logs(tmp_path / "pods").error


def test_too_many_log_directories_leave_pods_without_a_uid_and_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "_MAX_PODS", 2)
    for number in range(3):
        assert read_pod_logs(tmp_path).error == ""
        (tmp_path / f"team-a_train-{number}_uid-{number}").mkdir()
    found = read_pod_logs(tmp_path)
    assert found.names == {}
    assert "has more than 2 entries, so pods have no UID: remove" in found.error


# --- together: the UID ---


def test_single_log_directory_identifies_the_pod() -> None:
    assert uid_of(directories=(FIRST,), checkpoint=Checkpoint()) == FIRST


def test_checkpoint_selects_one_of_two_log_directories_of_a_recreated_pod() -> None:
    assert uid_of(directories=(FIRST, SECOND), checkpoint=known((SECOND, "main", "gpu-0"))) == SECOND


def test_recreated_pod_that_the_checkpoint_cannot_resolve_has_no_uid() -> None:
    assert uid_of(directories=(FIRST, SECOND), checkpoint=Checkpoint()) is None
    both = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-0"))
    assert uid_of(directories=(FIRST, SECOND), checkpoint=both) is None


def test_predecessors_log_directory_does_not_give_its_uid_to_a_recreated_pod() -> None:
    assert uid_of(directories=(FIRST,), checkpoint=known((SECOND, "main", "gpu-0"))) is None


def test_checkpoint_alone_gives_no_uid() -> None:
    assert uid_of(directories=(), checkpoint=known((FIRST, "main", "gpu-0"))) is None


def test_checkpoint_entry_of_another_container_or_device_does_not_identify_a_pod() -> None:
    others = known((SECOND, "init", "gpu-0"), (SECOND, "main", "gpu-1"))
    assert uid_of(directories=(FIRST,), checkpoint=others) == FIRST


def test_two_listed_pods_of_one_name_get_their_own_uids() -> None:
    old, new = listed(devices=("gpu-0",)), listed(devices=("gpu-1",))
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    found = assignments_of([old, new], checkpoint, logs(("train", FIRST), ("train", SECOND)), OURS)
    assert [(each.pod.uid, each.devices) for each in found] == [
        (FIRST, frozenset({"gpu-0"})),
        (SECOND, frozenset({"gpu-1"})),
    ]


# --- together: devices of this node ---


def test_assignments_keep_only_devices_of_this_node() -> None:
    [found] = assignments_of([listed(devices=("gpu-0", "nic-7"))], Checkpoint(), PodLogs(), OURS)
    assert found == Assignment(Pod("team-a", "train"), "main", frozenset({"gpu-0"}))


def test_listed_pod_with_an_unknown_device_is_not_absent() -> None:
    found = assignments_of([listed(devices=("gpu-0",))], Checkpoint(), logs(("train", FIRST)), DeviceIdResolver(()))
    reading = KubeletReading(Trust.TRUSTED, found)
    assert reading.is_listed(Pod("team-a", "train", FIRST))
    assert reading.listed_assignments("gpu-0") == ()


# --- together: what only the checkpoint knows ---


def test_init_containers_device_is_a_checkpoint_only_assignment_beside_the_pods_own() -> None:
    checkpoint = known((FIRST, "init", "gpu-1"), (FIRST, "main", "gpu-0"))
    found = logs(("train", FIRST))
    assignments = assignments_of([listed()], checkpoint, found, OURS)
    hints = checkpoint_only_assignments(assignments, checkpoint, found, OURS, active_only=True)
    assert hints == (Assignment(Pod("team-a", "train", FIRST), "init", frozenset({"gpu-1"})),)


def test_stale_checkpoint_entry_of_an_ended_pod_is_ignored_once_the_list_is_trusted() -> None:
    checkpoint, found = known((FIRST, "main", "gpu-0")), logs(("train", FIRST))
    assert checkpoint_only_assignments((), checkpoint, found, OURS, active_only=True) == ()
    [hint] = checkpoint_only_assignments((), checkpoint, found, OURS, active_only=False)
    assert hint.pod == Pod("team-a", "train", FIRST)


def test_entry_without_log_directory_or_known_devices_is_no_checkpoint_only_assignment() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "nic-7"))
    assert checkpoint_only_assignments((), checkpoint, logs(("other", SECOND)), OURS, active_only=False) == ()


def test_missing_pods_are_those_with_a_checkpoint_entry_and_logs_but_not_listed() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    found = logs(("train", FIRST), ("infer", SECOND))
    assignments = assignments_of([listed()], checkpoint, found, OURS)
    assert missing_pods(assignments, checkpoint, found, OURS) == {Pod("team-a", "infer", SECOND)}
    assert missing_pods(assignments, checkpoint, logs(("train", FIRST)), OURS) == frozenset()
    assert missing_pods(assignments, checkpoint, found, DeviceIdResolver({"gpu-0"})) == frozenset()


def test_unlisted_pod_with_a_disputed_uid_counts_as_missing() -> None:
    checkpoint = known((FIRST, "main", "gpu-0"))
    found = index_pod_logs([f"team-a_train_{FIRST}", f"team-b_train_{FIRST}"])
    claimants = {Pod("team-a", "train", FIRST), Pod("team-b", "train", FIRST)}
    assert missing_pods((), checkpoint, found, OURS) == claimants
    assert missing_pods(assignments_of([listed()], checkpoint, found, OURS), checkpoint, found, OURS) == frozenset()


# --- together: other plugins' ids of devices ---


def test_replica_id_resolves_to_its_device_in_list_and_checkpoint() -> None:
    found = logs(("train", FIRST))
    checkpoint = known((FIRST, "main", "gpu-0::3"), (FIRST, "init", "gpu-1::0"))
    assignments = assignments_of([listed(devices=("gpu-0::3",))], checkpoint, found, OURS)
    assert [(each.pod.uid, each.devices) for each in assignments] == [(FIRST, frozenset({"gpu-0"}))]
    [hint] = checkpoint_only_assignments(assignments, checkpoint, found, OURS, active_only=True)
    assert hint.devices == {"gpu-1"}


@pytest.mark.parametrize("listed_as", ["gpu-0::", "gpu-0::x", "gpu-9::1", "::1", "gpu-0:1", "GPU-0", "", "0"])
def test_id_that_only_resembles_a_device_id_is_not_resolved(listed_as: str) -> None:
    assert OURS.device(GPU, listed_as) is None


def test_vendor_device_id_is_resolved_by_its_resource_mapping() -> None:
    names = {("vendor.dev/gpu", "0"): MappedDevice("gpu-0"), ("vendor.dev/gpu", "7"): MappedDevice("gpu-7")}
    ours = DeviceIdResolver({"gpu-0"}, lambda resource, listed: names.get((resource, listed)))
    assert ours.device("vendor.dev/gpu", "0") == "gpu-0"
    assert ours.device("nics.dev/port", "0") is None
    assert ours.device("vendor.dev/gpu", "7") is None, "it is no device of ours"


def test_assignment_names_the_resource_that_provided_the_device() -> None:
    both = ListedPod("team-a", "train", {"main": frozenset({(GPU, "gpu-0"), ("vendor.dev/gpu", "gpu-1")})})
    found = assignments_of([both], Checkpoint(), PodLogs(), OURS)
    reading = KubeletReading(Trust.TRUSTED, found)
    assert [(each.resource, each.devices) for each in found] == [
        (GPU, frozenset({"gpu-0"})),
        ("vendor.dev/gpu", frozenset({"gpu-1"})),
    ]
    assert reading.assigned_by_other_plugins("gpu-0", {GPU}) == ()
    assert reading.assigned_by_other_plugins("gpu-1", {GPU}) == (found[1],)
    assert reading.container_count("gpu-1") == 1


@pytest.mark.parametrize(
    "claim",
    [
        ClaimedDevice("gpu.vendor.com", "gpu-4c1f-9d"),
        ClaimedDevice("gpu.vendor.com", "gpu-0", ("k8s.gpu.vendor.com/claim=8a7e-GPU-4c1f-9d",)),
        ClaimedDevice("gpu.vendor.com", "anything", ("vendor.com/gpu=nvme0", "vendor.com/gpu=GPU-4c1f-9d")),
        ClaimedDevice("named.vendor.com", "gpu-17"),
    ],
)
def test_dra_claim_for_a_known_device_is_an_assignment(claim: ClaimedDevice) -> None:
    ours = DeviceIdResolver({"GPU-4c1f-9d"}, _named)
    pod = ListedPod("team-b", "claims", {"main": frozenset()}, {"main": frozenset({claim})})
    [found] = assignments_of([pod], Checkpoint(), logs(("train", FIRST)), ours)
    assert (found.pod.name, found.container, found.devices) == ("claims", "main", frozenset({"GPU-4c1f-9d"}))
    assert found.resource == claim.driver


def _named(resource: str, listed: str) -> MappedDevice | None:
    return MappedDevice("GPU-4c1f-9d") if (resource, listed) == ("named.vendor.com", "gpu-17") else None


@pytest.mark.parametrize("name", ["gpu-4c1f-9", "4c1f-9d", "xgpu-4c1f-9d", "gpu-4c1f-9d-mig-1", ""])
def test_dra_claim_for_an_unknown_device_is_ignored(name: str) -> None:
    assert (
        DeviceIdResolver({"GPU-4c1f-9d"}).claimed_devices("gpu.vendor.com", name, (f"vendor.com/gpu={name}",))
        == frozenset()
    )


def test_device_both_claimed_and_allocated_has_no_certain_assignment() -> None:
    claim = frozenset({ClaimedDevice("gpu.vendor.com", "gpu-0")})
    claiming = ListedPod("team-b", "claims", {"main": frozenset()}, {"main": claim})
    reading = KubeletReading(Trust.TRUSTED, assignments_of([listed(), claiming], Checkpoint(), PodLogs(), OURS))
    assert reading.assignment_of("gpu-0") is None
    assert [each.resource for each in reading.assigned_by_other_plugins("gpu-0", {GPU})] == ["gpu.vendor.com"]


# --- together: pods that have ended and are still listed, and a checkpoint of another kubelet ---


def nothing(name: str = "train") -> ListedPod:
    return ListedPod("team-a", name, {"main": frozenset()})


def test_pod_listed_without_devices_may_not_start_a_container_on_a_device() -> None:
    found = logs(("train", FIRST))
    pod = Pod("team-a", "train", FIRST)
    spent = pods_without_devices([nothing()], Checkpoint(), found)
    reading = KubeletReading(
        Trust.TRUSTED, assignments_of([nothing()], Checkpoint(), found, OURS), without_devices=spent
    )
    assert spent == {pod}
    assert not reading.may_start_container(pod)
    assert reading.is_listed(pod), "it is not absent, so nothing is proved against its processes"
    assert reading.may_start_container(Pod("team-a", "train", SECOND)) is False
    assert not reading.may_start_container(Pod("team-a", "other", SECOND))


@pytest.mark.parametrize(
    ("pod", "checkpoint", "directories"),
    [
        (nothing(), known((FIRST, "init", "gpu-0")), (FIRST,)),
        (nothing(), Checkpoint(error="no"), (FIRST,)),
        (nothing(), Checkpoint(), ()),
        (nothing(), Checkpoint(), (FIRST, SECOND)),
        (listed(devices=("nic-7",)), Checkpoint(), (FIRST,)),
        (ListedPod("team-a", "train", {}, {"main": frozenset({ClaimedDevice("d", "n")})}), Checkpoint(), (FIRST,)),
    ],
    ids=["init container", "no checkpoint", "no UID", "two UIDs", "another device", "a claim"],
)
def test_pod_that_may_have_a_device_may_start_a_container(
    pod: ListedPod, checkpoint: Checkpoint, directories: tuple[str, ...]
) -> None:
    found = logs(*(("train", uid) for uid in directories))
    reading = KubeletReading(
        Trust.TRUSTED,
        assignments_of([pod], checkpoint, found, OURS),
        without_devices=pods_without_devices([pod], checkpoint, found),
    )
    assert reading.may_start_container(Pod("team-a", "train", FIRST))


def test_checkpoint_that_lacks_listed_pods_belongs_to_another_kubelet() -> None:
    other = listed("infer", ("gpu-1", "nic-7"))
    assert unconfirmed_pods(known((FIRST, "main", "gpu-0")), [listed(), other], OURS) == ("team-a/infer",)
    both = known((FIRST, "main", "gpu-0"), (SECOND, "main", "gpu-1"))
    assert unconfirmed_pods(both, [listed(), other], OURS) == (), "devices that are not ours do not matter"
