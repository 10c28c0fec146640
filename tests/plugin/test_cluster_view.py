"""The view of a node for the cluster, derived from the service's snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.condition import CONDITION_TYPE
from plugin.cluster.event_diff import EventDiff, EventDiffTimes
from plugin.cluster.view import (
    LABEL_PREFIX,
    SERVICE_AWAY_CONDITION,
    ClusterDevice,
    ClusterView,
    ConditionStatus,
    DeviceServiceStatus,
    OwnerNotice,
    view_after,
)
from scrubber.api import scrubber_pb2 as pb
from tests.plugin_collaborators import device, snapshot

NEVER = ClusterView()


def noticed(namespace: str = "team-a", name: str = "train-0", **facts: Any) -> pb.PodNotice:
    facts = {"uid": "u-1", "reason": "GpuHandOverRefused", "message": "sim-0 waits."} | facts
    return pb.PodNotice(namespace=namespace, name=name, **facts)


def with_notices(*notices: pb.PodNotice) -> pb.Snapshot:
    shown = snapshot(device(0))
    shown.notices.extend(notices)
    return shown


def out(number: int, state: str = "quarantined", **facts: Any) -> pb.SnapshotDevice:
    facts = {"advertised": False, "refusal": f"Device sim-{number} is {state}.", **facts}
    return device(number, Path("/sim"), state=state, **facts)


def counts(view: ClusterView) -> dict[str, int]:
    return {name.removeprefix(LABEL_PREFIX): int(count) for name, count in view.labels.items()}


def test_view_before_the_first_snapshot_has_the_service_away_condition_and_no_labels() -> None:
    assert NEVER.condition == SERVICE_AWAY_CONDITION
    assert NEVER.labels == {}


def test_snapshot_of_an_unready_service_does_not_change_the_view() -> None:
    before = view_after(snapshot(device(0, certified=True, state="clean")), NEVER)
    assert view_after(snapshot(device(0), out(1), ready=False), before) is before
    assert view_after(snapshot(device(0), ready=False), NEVER).condition == SERVICE_AWAY_CONDITION


def test_node_with_all_devices_in_service_has_condition_true() -> None:
    view = view_after(snapshot(device(0, state="clean", certified=True), device(1, state="in-use")), NEVER)
    assert (view.condition.status, view.condition.reason) == (ConditionStatus.TRUE, "AllInService")
    assert view.condition.message == "2 of 2 GPUs are in service."
    assert counts(view) == {"clean": 1, "dirty": 1, "quarantined": 0}


def test_condition_names_devices_out_of_service_with_their_state() -> None:
    view = view_after(snapshot(device(0, state="clean", certified=True), out(1), out(2, "condemned")), NEVER)
    assert (view.condition.status, view.condition.reason) == (ConditionStatus.FALSE, "SomeOutOfService")
    assert view.condition.message == (
        "1 of 3 GPUs are in service. Out of service: sim-1 (quarantined), sim-2 (condemned)."
    )
    assert counts(view) == {"clean": 1, "dirty": 0, "quarantined": 2}
    assert [each.status for each in view.devices] == [
        DeviceServiceStatus.IN_SERVICE,
        DeviceServiceStatus.OUT_OF_SERVICE,
        DeviceServiceStatus.CONDEMNED,
    ]


def test_node_with_no_device_in_service_has_that_reason_in_its_condition() -> None:
    assert view_after(snapshot(out(0)), NEVER).condition.reason == "NoneInService"


def test_node_without_a_gpu_has_condition_unknown() -> None:
    assert view_after(snapshot(), NEVER).condition.status is ConditionStatus.UNKNOWN


def test_long_list_of_devices_in_the_condition_message_is_truncated_with_a_count() -> None:
    message = view_after(snapshot(*(out(number) for number in range(300))), NEVER).condition.message
    assert message.endswith("sim-7 (quarantined) and 292 more.")
    assert len(message) < 1000


@pytest.mark.parametrize("state", ["quarantined", "recovering", "probation", "condemned", "break-glass"])
def test_device_advertised_despite_its_state_is_reported_as_unverified_and_never_clean(state: str) -> None:
    view = view_after(snapshot(device(0, state=state, certified=True), device(1, state="dirty")), NEVER)
    assert view.devices[0].status is DeviceServiceStatus.UNVERIFIED
    assert state in view.devices[0].message
    assert (view.condition.status, view.condition.reason) == (ConditionStatus.TRUE, "SomeUnverified")
    assert f"sim-0 ({state})" in view.condition.message
    assert counts(view) == {"clean": 0, "dirty": 2, "quarantined": 0}


def test_refusal_of_the_service_becomes_the_device_message() -> None:
    view = view_after(snapshot(out(0), device(1, state="quarantined", refusal="The glass is broken.")), NEVER)
    assert [each.message for each in view.devices] == ["Device sim-0 is quarantined.", "The glass is broken."]


def test_device_withheld_by_the_plugin_is_out_of_service() -> None:
    strange = device(0, state="clean", certified=True)
    strange.access[0].kind = "teleport"
    view = view_after(snapshot(strange), NEVER)
    assert view.devices[0] == ClusterDevice(
        "sim-0", DeviceServiceStatus.OUT_OF_SERVICE, False, "withheld", view.devices[0].message
    )
    assert "teleport" in view.devices[0].message


def test_gpus_that_the_policy_forbids_to_pass_by_envvar_are_out_of_service() -> None:
    node = device(0, state="clean")
    node.access[0].kind, node.access[0].container_path = "node", "/dev/nvidia0"
    shown = snapshot(node)
    shown.envvar_refused = True
    assert view_after(shown, NEVER, uses_envvar=True).condition.status is ConditionStatus.FALSE
    assert view_after(shown, NEVER).condition.status is ConditionStatus.TRUE


def yielded(*devices: pb.SnapshotDevice) -> pb.Snapshot:
    shown = snapshot(*devices)
    shown.yielded = "Requested by the plugin: a label."
    return shown


def test_devices_of_a_yielded_node_are_out_of_service_without_a_reason_for_an_event() -> None:
    held = device(0, state="clean", certified=True, advertised=False, withheld=True, refusal="Being serviced.")
    view = view_after(yielded(held, out(1)), NEVER)
    assert [(each.status, each.state, each.yielded) for each in view.devices] == [
        (DeviceServiceStatus.OUT_OF_SERVICE, "withheld", True),
        (DeviceServiceStatus.OUT_OF_SERVICE, "quarantined", False),
    ]
    assert (view.condition.status, view.condition.reason) == (ConditionStatus.FALSE, "NoneInService")
    assert "The node is yielded" in view.condition.message
    assert counts(view) == {"clean": 0, "dirty": 0, "quarantined": 2}


@pytest.mark.parametrize("state", ["quarantined", "condemned", "break-glass"])
def test_yield_that_withholds_a_device_which_was_advertised_despite_its_state_is_no_reason_for_an_event(
    state: str,
) -> None:
    """For example a quarantine that takes effect when the pod has ended."""
    events = EventDiff("node-1", EventDiffTimes())
    before = view_after(snapshot(out(0, state, advertised=True, refusal="")), NEVER)
    events.update(before)
    due = events.next_event(0.0)
    assert due is not None
    assert due.event.reason == "GpuAdvertisedUnverified"
    events.on_written(due, 0.0, 1)
    view = view_after(yielded(out(0, state, withheld=True, refusal="Being serviced.")), before)
    assert [(each.status, each.state, each.yielded) for each in view.devices] == [
        (DeviceServiceStatus.OUT_OF_SERVICE, state, True)
    ]
    for after in (view, before):
        events.update(after)
        assert events.next_event(10_000.0) is None


def test_devices_that_a_service_started_on_a_yielded_node_does_not_list_are_not_gone() -> None:
    before = view_after(snapshot(device(0, state="clean"), out(1), device(2, state="probation")), NEVER)
    view = view_after(yielded(), before)
    assert [(each.id, each.state, each.yielded) for each in view.devices] == [
        ("sim-0", "withheld", True),
        ("sim-1", "quarantined", False),
        ("sim-2", "probation", True),
    ]
    assert view.none_in_service is False
    assert view.condition.reason == "NoneInService"
    assert view_after(snapshot(), view).devices == ()


def test_yielded_node_without_a_known_gpu_has_condition_unknown() -> None:
    condition = view_after(yielded(), NEVER).condition
    assert (condition.status, "The node is yielded" in condition.message) == (ConditionStatus.UNKNOWN, True)


def test_view_without_service_counts_no_device_as_clean_and_has_no_notices() -> None:
    shown = snapshot(device(0, state="clean", certified=True), out(1))
    shown.notices.append(noticed(evict=True))
    view = view_after(shown, NEVER).without_service()
    assert view.condition == SERVICE_AWAY_CONDITION
    assert counts(view) == {"clean": 0, "dirty": 1, "quarantined": 1}
    assert view.notices == ()


def test_a_notice_is_passed_on_as_the_service_wrote_it() -> None:
    view = view_after(with_notices(noticed(evict=True)), NEVER)
    assert view.notices == (OwnerNotice("team-a", "train-0", "u-1", "GpuHandOverRefused", "sim-0 waits.", True),)


def test_each_set_of_devices_that_a_pod_waits_for_has_a_notice_of_its_own() -> None:
    one, both = noticed(devices=["sim-0"]), noticed(message="Both wait.", devices=["sim-2", "sim-1"], evict=True)
    assert [
        (each.devices, each.message, each.evict) for each in view_after(with_notices(one, both), NEVER).notices
    ] == [
        (("sim-0",), "sim-0 waits.", False),
        (("sim-1", "sim-2"), "Both wait.", True),
    ]


@pytest.mark.parametrize(
    "notice",
    [
        noticed(name="../../nodes/x"),
        noticed(namespace="a/b"),
        noticed(namespace=""),
        noticed(name="Train"),
        noticed(name="a" * 254),
        noticed(reason=""),
        noticed(message=""),
    ],
)
def test_notice_without_a_valid_pod_is_left_out(notice: pb.PodNotice) -> None:
    assert view_after(with_notices(notice), NEVER).notices == ()


def test_notice_without_a_pod_uid_requests_no_eviction() -> None:
    (notice,) = view_after(with_notices(noticed(uid="", evict=True)), NEVER).notices
    assert not notice.evict


def test_notices_of_one_pod_with_the_same_reason_and_devices_are_merged() -> None:
    view = view_after(
        with_notices(noticed(), noticed(message="sim-1 waits.", evict=True), noticed(reason="GpuOutOfService")), NEVER
    )
    assert [(each.reason, each.message, each.evict) for each in view.notices] == [
        ("GpuHandOverRefused", "sim-0 waits. sim-1 waits.", True),
        ("GpuOutOfService", "sim-0 waits.", False),
    ]


def test_condition_type_is_a_valid_condition_type_name() -> None:
    assert CONDITION_TYPE.isidentifier()
    assert CONDITION_TYPE[0].isupper()
