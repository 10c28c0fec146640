"""What the cluster is to know of a node, from what the service says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.view import AWAY, CONDITION, PREFIX, DeviceFacts, Notice, Standing, Status, View, seen
from scrubber.api import scrubber_pb2 as pb
from tests.plugin_collaborators import device, snapshot

NEVER = View()


def noticed(namespace: str = "team-a", name: str = "train-0", **facts: Any) -> pb.PodNotice:
    facts = {"uid": "u-1", "reason": "GpuNotHandedOver", "sentence": "sim-0 waits."} | facts
    return pb.PodNotice(namespace=namespace, name=name, **facts)


def with_notices(*notices: pb.PodNotice) -> pb.Snapshot:
    shown = snapshot(device(0))
    shown.notices.extend(notices)
    return shown


def out(number: int, state: str = "quarantined", **facts: Any) -> pb.SnapshotDevice:
    facts = {"advertised": False, "refusal": f"Device sim-{number} is {state}.", **facts}
    return device(number, Path("/sim"), state=state, **facts)


def counts(view: View) -> dict[str, int]:
    return {name.removeprefix(PREFIX): int(count) for name, count in view.labels.items()}


def test_before_anybody_was_heard_nothing_is_known() -> None:
    assert NEVER.condition == AWAY
    assert NEVER.labels == {}


def test_a_service_that_has_not_looked_at_every_device_says_nothing() -> None:
    before = seen(snapshot(device(0, certified=True, state="clean")), NEVER)
    assert seen(snapshot(device(0), out(1), ready=False), before) is before
    assert seen(snapshot(device(0), ready=False), NEVER).condition == AWAY


def test_all_in_service() -> None:
    view = seen(snapshot(device(0, state="clean", certified=True), device(1, state="in-use")), NEVER)
    assert (view.condition.status, view.condition.reason) == (Status.TRUE, "AllInService")
    assert view.condition.message == "2 of 2 GPUs are in service."
    assert counts(view) == {"clean": 1, "dirty": 1, "quarantined": 0}


def test_what_is_out_of_service_is_named_with_its_state() -> None:
    view = seen(snapshot(device(0, state="clean", certified=True), out(1), out(2, "condemned")), NEVER)
    assert (view.condition.status, view.condition.reason) == (Status.FALSE, "SomeOutOfService")
    assert view.condition.message == (
        "1 of 3 GPUs are in service. Out of service: sim-1 (quarantined), sim-2 (condemned)."
    )
    assert counts(view) == {"clean": 1, "dirty": 0, "quarantined": 2}
    assert [each.standing for each in view.devices] == [Standing.IN_SERVICE, Standing.OUT, Standing.CONDEMNED]


def test_none_in_service() -> None:
    assert seen(snapshot(out(0)), NEVER).condition.reason == "NoneInService"


def test_a_node_without_a_gpu_is_not_one_whose_gpus_are_well() -> None:
    assert seen(snapshot(), NEVER).condition.status is Status.UNKNOWN


def test_a_long_list_is_counted() -> None:
    message = seen(snapshot(*(out(number) for number in range(300))), NEVER).condition.message
    assert message.endswith("sim-7 (quarantined) and 292 more.")
    assert len(message) < 1000


@pytest.mark.parametrize("state", ["quarantined", "recovering", "probation", "condemned", "break-glass"])
def test_what_is_offered_against_its_state_is_said_and_is_never_clean(state: str) -> None:
    view = seen(snapshot(device(0, state=state, certified=True), device(1, state="dirty")), NEVER)
    assert view.devices[0].standing is Standing.UNPROVED
    assert state in view.devices[0].sentence
    assert (view.condition.status, view.condition.reason) == (Status.TRUE, "SomeUnproved")
    assert f"sim-0 ({state})" in view.condition.message
    assert counts(view) == {"clean": 0, "dirty": 2, "quarantined": 0}


def test_the_services_own_sentence_is_the_one_that_is_told() -> None:
    view = seen(snapshot(out(0), device(1, state="quarantined", refusal="The glass is broken.")), NEVER)
    assert [each.sentence for each in view.devices] == ["Device sim-0 is quarantined.", "The glass is broken."]


def test_what_the_plugin_itself_withholds_is_out_of_service_too() -> None:
    strange = device(0, state="clean", certified=True)
    strange.access[0].kind = "teleport"
    view = seen(snapshot(strange), NEVER)
    assert view.devices[0] == DeviceFacts("sim-0", Standing.OUT, False, "withheld", view.devices[0].sentence)
    assert "teleport" in view.devices[0].sentence


def test_gpus_that_the_policy_lets_nobody_name_by_a_variable_are_withheld() -> None:
    node = device(0, state="clean")
    node.access[0].kind, node.access[0].container_path = "node", "/dev/nvidia0"
    shown = snapshot(node)
    shown.envvar_refused = True
    assert seen(shown, NEVER, by_envvar=True).condition.status is Status.FALSE
    assert seen(shown, NEVER).condition.status is Status.TRUE


def test_when_nobody_is_heard_any_more_nothing_is_clean_and_no_pod_is_judged() -> None:
    shown = snapshot(device(0, state="clean", certified=True), out(1))
    shown.notices.append(noticed(evict=True))
    view = seen(shown, NEVER).away()
    assert view.condition == AWAY
    assert counts(view) == {"clean": 0, "dirty": 1, "quarantined": 1}
    assert view.notices == ()


def test_a_notice_is_passed_on_as_the_service_wrote_it() -> None:
    view = seen(with_notices(noticed(evict=True)), NEVER)
    assert view.notices == (Notice("team-a", "train-0", "u-1", "GpuNotHandedOver", "sim-0 waits.", True),)


def test_each_set_of_devices_that_a_pod_waits_for_has_a_notice_of_its_own() -> None:
    one, both = noticed(devices=["sim-0"]), noticed(sentence="Both wait.", devices=["sim-2", "sim-1"], evict=True)
    assert [(each.devices, each.sentence, each.evict) for each in seen(with_notices(one, both), NEVER).notices] == [
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
        noticed(sentence=""),
    ],
)
def test_a_notice_that_names_nobody_properly_is_left_out(notice: pb.PodNotice) -> None:
    assert seen(with_notices(notice), NEVER).notices == ()


def test_nobody_is_evicted_whose_uid_is_not_known() -> None:
    (notice,) = seen(with_notices(noticed(uid="", evict=True)), NEVER).notices
    assert not notice.evict


def test_two_notices_of_one_pod_for_one_reason_and_the_same_devices_are_one() -> None:
    view = seen(
        with_notices(noticed(), noticed(sentence="sim-1 waits.", evict=True), noticed(reason="GpuOutOfService")), NEVER
    )
    assert [(each.reason, each.sentence, each.evict) for each in view.notices] == [
        ("GpuNotHandedOver", "sim-0 waits. sim-1 waits.", True),
        ("GpuOutOfService", "sim-0 waits.", False),
    ]


def test_the_conditions_type_is_a_name_that_a_condition_can_have() -> None:
    assert CONDITION.isidentifier()
    assert CONDITION[0].isupper()
