"""Which Kubernetes events are due: unreported facts, within rate limits, with the same object for each repetition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plugin.cluster.event_diff import MAX_MESSAGE_BYTES, EventDiff, EventDiffTimes, PendingEvent
from plugin.cluster.view import ClusterDevice, ClusterView, DeviceServiceStatus, OwnerNotice

TIMES = EventDiffTimes()


def fact(number: int, status: DeviceServiceStatus = DeviceServiceStatus.IN_SERVICE) -> ClusterDevice:
    message = "" if status is DeviceServiceStatus.IN_SERVICE else f"Device sim-{number} is {status.value}."
    return ClusterDevice(f"sim-{number}", status, False, "", message)


def view(*facts: ClusterDevice, notices: tuple[OwnerNotice, ...] = ()) -> ClusterView:
    return ClusterView(True, facts, notices)


def notice(
    pod: str = "train-0", message: str = "sim-0 waits.", reason: str = "GpuHandOverRefused", device: str = "sim-0"
) -> OwnerNotice:
    return OwnerNotice("team-a", pod, f"uid-of-{pod}", reason, message, devices=(device,))


def event_diff(times: EventDiffTimes = TIMES) -> EventDiff:
    return EventDiff("node-1", times)


def take_all(of: EventDiff, now: float) -> list[tuple[str, str]]:
    """Return everything that may be written at ``now``, as (reason, message)."""
    written = []
    while due := of.next_event(now):
        assert of.seconds_until_due(now) is not None
        written.append((due.event.reason, due.event.message))
        of.on_written(due, now, due.count + 1)
    return written


def first(of: EventDiff, now: float = 0.0) -> PendingEvent:
    due = of.next_event(now)
    assert due is not None
    return due


OUT, BACK = fact(0, DeviceServiceStatus.OUT_OF_SERVICE), fact(0)


# --- devices ---------------------------------------------------------------------------------------------------------


def test_node_without_problems_has_no_event_due() -> None:
    of = event_diff()
    of.update(view(fact(0), fact(1)))
    assert of.seconds_until_due(0) is None
    assert of.next_event(0) is None


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (DeviceServiceStatus.OUT_OF_SERVICE, "GpuOutOfService"),
        (DeviceServiceStatus.CONDEMNED, "GpuCondemned"),
        (DeviceServiceStatus.UNVERIFIED, "GpuAdvertisedUnverified"),
    ],
)
def test_each_out_of_service_status_is_written_once_as_a_warning_on_the_node(
    status: DeviceServiceStatus, reason: str
) -> None:
    of = event_diff()
    of.update(view(fact(0)))
    of.update(view(fact(0, status)))
    due = first(of)
    assert (due.event.reason, due.event.is_warning, due.event.target.kind) == (reason, True, "Node")
    assert due.event.message == f"Device sim-0 is {status.value}."
    assert take_all(of, 0) == [(reason, due.event.message)]
    of.update(view(fact(0, status)))
    assert take_all(of, 10_000) == []


def test_device_out_of_service_at_the_start_of_the_plugin_gets_an_event() -> None:
    of = event_diff()
    of.update(view(OUT))
    assert take_all(of, 0) == [("GpuOutOfService", "Device sim-0 is out.")]


def test_event_of_a_device_back_in_service_is_no_warning() -> None:
    of = event_diff()
    of.update(view(OUT))
    take_all(of, 0)
    of.update(view(BACK))
    due = first(of, 1)
    assert (due.event.reason, due.event.is_warning) == ("GpuBackInService", False)
    assert due.event.message == "Device sim-0 is back in service."


def test_device_withheld_by_a_yield_gets_no_event_and_keeps_what_was_reported() -> None:
    of = event_diff()
    held = replace(OUT, yielded=True)
    for before, after in ((BACK, []), (OUT, ["GpuBackInService"])):
        of.update(view(before))
        take_all(of, 0)
        of.update(view(held))
        assert of.seconds_until_due(1000) is None
        assert take_all(of, 1000) == []
        of.update(view(BACK))
        assert [reason for reason, _ in take_all(of, 2000)] == after


def test_outage_that_ended_before_any_event_was_written_gets_no_event() -> None:
    of = event_diff()
    for each in (BACK, OUT, BACK):
        of.update(view(each))
    assert take_all(of, 0) == []


def test_only_the_last_of_many_changes_gets_an_event() -> None:
    of = event_diff()
    for each in (BACK, OUT, BACK, OUT, fact(0, DeviceServiceStatus.CONDEMNED)):
        of.update(view(each))
    assert take_all(of, 0) == [("GpuCondemned", "Device sim-0 is condemned.")]


def test_device_that_is_gone_gets_one_event() -> None:
    of = event_diff()
    of.update(view(fact(0), fact(1)))
    of.update(view(fact(1)))
    assert take_all(of, 0) == [("GpuRemoved", "Device sim-0 is no longer on this node.")]
    assert take_all(of, 1000) == []


@pytest.mark.parametrize(
    ("back", "reason"),
    [(fact(0), "GpuBackInService"), (fact(0, DeviceServiceStatus.OUT_OF_SERVICE), "GpuOutOfService")],
    ids=["well", "out"],
)
def test_device_that_returns_gets_an_event_and_a_second_disappearance_reuses_the_first_object(
    back: ClusterDevice, reason: str
) -> None:
    of = event_diff()
    for each in (view(fact(0)), view()):
        of.update(each)
        take_all(of, 0)
    of.update(view(back))
    assert [written for written, _ in take_all(of, 100)] == [reason]
    of.update(view())
    assert first(of, 200).event.reason == "GpuRemoved"
    assert first(of, 200).count == 1  # the same object as the first time


def test_device_that_returns_while_its_gone_event_is_written_gets_an_event() -> None:
    of = event_diff()
    of.update(view(fact(0)))
    of.update(view())
    going = first(of)
    of.update(view(fact(0)))
    of.on_written(going, 0, 1)
    assert [reason for reason, _ in take_all(of, 0)] == ["GpuBackInService"]


def test_return_and_disappearance_before_any_event_was_written_get_no_event() -> None:
    of = event_diff()
    for each in (view(fact(0)), view()):
        of.update(each)
        take_all(of, 0)
    of.update(view(fact(0)))
    of.update(view())
    assert take_all(of, 1000) == []


def test_only_a_bounded_number_of_the_latest_gone_devices_is_remembered() -> None:
    of = event_diff(EventDiffTimes(max_gone_devices=2, max_events=100))
    for number in range(5):
        of.update(view(fact(number)))
        take_all(of, number)
    of.update(view())
    take_all(of, 10)
    of.update(view())
    assert len(of._subjects) == 2
    of.update(view(*(fact(number) for number in range(5))))
    assert {message for _, message in take_all(of, 100)} == {
        f"Device sim-{number} is back in service." for number in (3, 4)
    }


def test_device_that_never_had_an_event_disappears_without_an_event() -> None:
    of = event_diff()
    of.update(view(OUT))
    of.update(view())
    assert take_all(of, 0) == []
    assert of._subjects == {}


def test_no_event_is_due_while_the_service_is_down() -> None:
    of = event_diff()
    of.update(view(fact(0)))
    of.update(view(OUT, notices=(notice(),)))
    of.update(view(OUT, notices=(notice(),)).without_service())
    assert of.seconds_until_due(0) is None
    assert of.next_event(0) is None
    of.update(view(OUT))
    assert take_all(of, 0) == [("GpuOutOfService", "Device sim-0 is out.")]


# --- one fact, one object --------------------------------------------------------------------------------------------


def test_repeated_outage_of_a_device_repeats_the_first_event_object() -> None:
    of = event_diff()
    of.update(view(OUT))
    earlier = first(of)
    assert earlier.count == 0
    take_all(of, 0)
    of.update(view(BACK))
    take_all(of, 0)
    of.update(view(OUT))
    later = first(of, TIMES.spacing)
    assert later.event.name == earlier.event.name
    assert later.count == 1


def test_restarted_plugin_uses_the_same_event_object() -> None:
    names = set()
    for _ in range(2):
        of = event_diff()
        of.update(view(OUT))
        names.add(first(of).event.name)
    assert len(names) == 1


def test_different_events_have_different_object_names() -> None:
    dues = []
    for node, received in [
        ("node-1", view(OUT)),
        ("node-2", view(OUT)),
        ("node-1", view(fact(1, DeviceServiceStatus.OUT_OF_SERVICE))),
        ("node-1", view(fact(0, DeviceServiceStatus.CONDEMNED))),
        ("node-1", view(notices=(notice(),))),
        ("node-1", view(notices=(notice("train-1"),))),
        ("node-1", view(notices=(notice(reason="GpuOutOfService"),))),
        ("node-1", view(notices=(notice(device="sim-1"),))),
    ]:
        of = EventDiff(node, TIMES)
        of.update(received)
        dues.append(first(of).event.name)
    assert len(set(dues)) == len(dues)
    assert all(len(name) <= 253 for name in dues)


def test_long_object_name_still_makes_a_valid_event_name() -> None:
    of = event_diff()
    of.update(view(notices=(notice("a" * 199 + "." + "b" * 53),)))
    name = first(of).event.name
    assert len(name) <= 253
    assert ".." not in name


def test_expired_event_object_is_created_again() -> None:
    of = event_diff()
    of.update(view(OUT))
    take_all(of, 0)
    of.update(view(BACK))
    take_all(of, 0)
    of.update(view(OUT))
    due = first(of, 100)
    of.on_missing(due)
    assert first(of, 100).count == 0


# --- pods ------------------------------------------------------------------------------------------------------------


def test_event_for_a_pod_is_written_in_its_namespace_with_the_services_message() -> None:
    of = event_diff()
    of.update(view(notices=(notice(),)))
    text = first(of).event
    assert (text.target.namespace, text.target.event_namespace, text.target.uid) == (
        "team-a",
        "team-a",
        "uid-of-train-0",
    )
    assert (text.reason, text.message, text.is_warning) == ("GpuHandOverRefused", "sim-0 waits.", True)


def test_pod_that_waits_for_several_devices_gets_an_event_for_each_device() -> None:
    of = event_diff()
    waits = [notice(message=f"{each} waits.", device=each) for each in ("sim-0", "sim-1")]
    of.update(view(notices=tuple(waits)))
    assert {message for _, message in take_all(of, 0)} == {"sim-0 waits.", "sim-1 waits."}
    of.update(view(notices=(waits[1],)))  # the other device was handed over, which does not affect this one
    assert take_all(of, TIMES.spacing) == []


def test_persistent_event_is_repeated_before_it_expires() -> None:
    of = event_diff()
    of.update(view(notices=(notice(),)))
    take_all(of, 0)
    assert of.seconds_until_due(1) == TIMES.repeat_after - 1
    assert take_all(of, TIMES.repeat_after - 1) == []
    assert first(of, TIMES.repeat_after).count == 1


def test_changed_message_is_written_but_no_event_object_more_than_once_a_minute() -> None:
    of = event_diff()
    of.update(view(notices=(notice(message="one"),)))
    take_all(of, 0)
    of.update(view(notices=(notice(message="two"),)))
    of.update(view(notices=(notice(message="three"),)))
    assert of.seconds_until_due(1) == TIMES.spacing - 1
    assert take_all(of, TIMES.spacing - 1) == []
    assert take_all(of, TIMES.spacing) == [("GpuHandOverRefused", "three")]


def test_pod_without_a_notice_is_forgotten() -> None:
    of = event_diff()
    of.update(view(notices=(notice(),)))
    take_all(of, 0)
    of.update(view())
    assert of._subjects == {}
    assert of.seconds_until_due(10_000) is None


def test_pod_whose_notice_disappears_while_its_event_is_written_is_forgotten() -> None:
    of = event_diff()
    of.update(view(notices=(notice(),)))
    due = first(of)
    of.update(view())
    of.on_written(due, 0, 1)
    of.on_refused(due, 0)
    assert of._subjects == {}


def test_long_message_is_truncated_to_the_maximum_of_an_event() -> None:
    of = event_diff()
    of.update(view(notices=(notice(message="ä" * 2000),)))
    message = first(of).event.message
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert message.endswith("ä…")


# --- limits ----------------------------------------------------------------------------------------------------------


def test_number_of_events_per_minute_is_bounded_and_every_event_gets_its_turn() -> None:
    of = event_diff()
    pods = tuple(notice(f"p-{number}") for number in range(75))
    of.update(view(notices=pods))
    written, now, bursts = 0, 0.0, []
    while written < 75:
        bursts.append(len(take_all(of, now)))
        written += bursts[-1]
        wait = of.seconds_until_due(now)
        assert wait is not None
        now += wait
    assert bursts == [30, 30, 15]
    assert now >= 2 * TIMES.window


def test_refused_event_is_postponed_and_other_events_are_written() -> None:
    of = event_diff()
    of.update(view(notices=(notice("p-0"), notice("p-1"))))
    refused = first(of)
    of.on_refused(refused, 0)
    assert len(take_all(of, 0)) == 1
    assert take_all(of, TIMES.refused_retry - 1) == []
    assert first(of, TIMES.refused_retry).event == refused.event


def test_refused_repetition_of_an_event_is_postponed() -> None:
    of = event_diff()
    of.update(view(notices=(notice(),)))
    take_all(of, 0)
    of.on_refused(first(of, TIMES.repeat_after), TIMES.repeat_after)
    assert of.seconds_until_due(TIMES.repeat_after + 1) == TIMES.refused_retry - 1


def test_event_not_written_for_the_longest_time_comes_first() -> None:
    of = event_diff(EventDiffTimes(spacing=10, max_events=1, window=10))
    of.update(view(notices=(notice("p-0", "one"), notice("p-1", "one"))))
    order = []
    for round_, now in enumerate([0.0, 10.0, 20.0, 30.0]):
        of.update(view(notices=(notice("p-0", f"{round_}"), notice("p-1", f"{round_}"))))
        due = first(of, now)
        order.append(due.event.target.name)
        of.on_written(due, now, 1)
    assert sorted(order[:2]) == sorted(order[2:]) == ["p-0", "p-1"]
