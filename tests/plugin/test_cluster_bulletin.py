"""Which events are due: what is so and was not told, within bounds, by the same object each time."""

from __future__ import annotations

import pytest

from plugin.cluster.bulletin import LONGEST, Bulletin, BulletinTimes, Due
from plugin.cluster.view import DeviceFacts, Notice, Standing, View

TIMES = BulletinTimes()


def fact(number: int, standing: Standing = Standing.IN_SERVICE) -> DeviceFacts:
    sentence = "" if standing is Standing.IN_SERVICE else f"Device sim-{number} is {standing.value}."
    return DeviceFacts(f"sim-{number}", standing, False, "", sentence)


def view(*facts: DeviceFacts, notices: tuple[Notice, ...] = ()) -> View:
    return View(True, facts, notices)


def notice(
    pod: str = "train-0", sentence: str = "sim-0 waits.", reason: str = "GpuNotHandedOver", device: str = "sim-0"
) -> Notice:
    return Notice("team-a", pod, f"uid-of-{pod}", reason, sentence, devices=(device,))


def bulletin(times: BulletinTimes = TIMES) -> Bulletin:
    return Bulletin("node-1", times)


def tell(of: Bulletin, now: float) -> list[tuple[str, str]]:
    """Everything that may be told at ``now``: reason and sentence."""
    told = []
    while due := of.next(now):
        assert of.due_in(now) is not None
        told.append((due.text.reason, due.text.sentence))
        of.told(due, now, due.count + 1)
    return told


def first(of: Bulletin, now: float = 0.0) -> Due:
    due = of.next(now)
    assert due is not None
    return due


OUT, BACK = fact(0, Standing.OUT), fact(0)


# --- devices ---------------------------------------------------------------------------------------------------------


def test_that_all_is_well_is_no_news() -> None:
    of = bulletin()
    of.heard(view(fact(0), fact(1)))
    assert of.due_in(0) is None
    assert of.next(0) is None


@pytest.mark.parametrize(
    ("standing", "reason"),
    [
        (Standing.OUT, "GpuOutOfService"),
        (Standing.CONDEMNED, "GpuCondemned"),
        (Standing.UNPROVED, "GpuOfferedUnproved"),
    ],
)
def test_each_standing_is_told_once_as_a_warning_on_the_node(standing: Standing, reason: str) -> None:
    of = bulletin()
    of.heard(view(fact(0)))
    of.heard(view(fact(0, standing)))
    due = first(of)
    assert (due.text.reason, due.text.warning, due.text.regarding.kind) == (reason, True, "Node")
    assert due.text.sentence == f"Device sim-0 is {standing.value}."
    assert tell(of, 0) == [(reason, due.text.sentence)]
    of.heard(view(fact(0, standing)))
    assert tell(of, 10_000) == []


def test_what_is_out_of_service_when_the_plugin_starts_is_told() -> None:
    of = bulletin()
    of.heard(view(OUT))
    assert tell(of, 0) == [("GpuOutOfService", "Device sim-0 is out.")]


def test_a_device_that_comes_back_is_no_warning() -> None:
    of = bulletin()
    of.heard(view(OUT))
    tell(of, 0)
    of.heard(view(BACK))
    due = first(of, 1)
    assert (due.text.reason, due.text.warning) == ("GpuBackInService", False)
    assert due.text.sentence == "Device sim-0 is back in service."


def test_what_went_and_came_back_untold_is_not_told() -> None:
    of = bulletin()
    for each in (BACK, OUT, BACK):
        of.heard(view(each))
    assert tell(of, 0) == []


def test_only_the_last_of_many_changes_is_told() -> None:
    of = bulletin()
    for each in (BACK, OUT, BACK, OUT, fact(0, Standing.CONDEMNED)):
        of.heard(view(each))
    assert tell(of, 0) == [("GpuCondemned", "Device sim-0 is condemned.")]


def test_a_device_that_is_no_longer_there_is_told_once() -> None:
    of = bulletin()
    of.heard(view(fact(0), fact(1)))
    of.heard(view(fact(1)))
    assert tell(of, 0) == [("GpuGone", "Device sim-0 is no longer on this node.")]
    assert tell(of, 1000) == []


@pytest.mark.parametrize(
    ("back", "reason"), [(fact(0), "GpuBackInService"), (fact(0, Standing.OUT), "GpuOutOfService")], ids=["well", "out"]
)
def test_a_device_that_is_back_is_not_left_as_gone(back: DeviceFacts, reason: str) -> None:
    of = bulletin()
    for each in (view(fact(0)), view()):
        of.heard(each)
        tell(of, 0)
    of.heard(view(back))
    assert [told for told, _ in tell(of, 100)] == [reason]
    of.heard(view())
    assert first(of, 200).text.reason == "GpuGone"
    assert first(of, 200).count == 1  # the same object as the first time


def test_one_that_is_back_while_its_going_is_told_is_told_too() -> None:
    of = bulletin()
    of.heard(view(fact(0)))
    of.heard(view())
    going = first(of)
    of.heard(view(fact(0)))
    of.told(going, 0, 1)
    assert [reason for reason, _ in tell(of, 0)] == ["GpuBackInService"]


def test_one_that_is_back_and_gone_again_untold_stays_gone() -> None:
    of = bulletin()
    for each in (view(fact(0)), view()):
        of.heard(each)
        tell(of, 0)
    of.heard(view(fact(0)))
    of.heard(view())
    assert tell(of, 1000) == []


def test_only_so_many_that_went_are_remembered_and_those_are_the_last() -> None:
    of = bulletin(BulletinTimes(gone=2, most=100))
    for number in range(5):
        of.heard(view(fact(number)))
        tell(of, number)
    of.heard(view())
    tell(of, 10)
    of.heard(view())
    assert len(of._subjects) == 2
    of.heard(view(*(fact(number) for number in range(5))))
    assert {sentence for _, sentence in tell(of, 100)} == {
        f"Device sim-{number} is back in service." for number in (3, 4)
    }


def test_one_that_was_never_told_of_goes_without_a_word() -> None:
    of = bulletin()
    of.heard(view(OUT))
    of.heard(view())
    assert tell(of, 0) == []
    assert of._subjects == {}


def test_while_nobody_is_heard_nothing_is_told() -> None:
    of = bulletin()
    of.heard(view(fact(0)))
    of.heard(view(OUT, notices=(notice(),)))
    of.heard(view(OUT, notices=(notice(),)).away())
    assert of.due_in(0) is None
    assert of.next(0) is None
    of.heard(view(OUT))
    assert tell(of, 0) == [("GpuOutOfService", "Device sim-0 is out.")]


# --- one thing, one object -------------------------------------------------------------------------------------------


def test_a_relapse_repeats_the_object_of_the_first_time() -> None:
    of = bulletin()
    of.heard(view(OUT))
    earlier = first(of)
    assert earlier.count == 0
    tell(of, 0)
    of.heard(view(BACK))
    tell(of, 0)
    of.heard(view(OUT))
    later = first(of, TIMES.spacing)
    assert later.text.name == earlier.text.name
    assert later.count == 1


def test_a_restarted_plugin_means_the_same_object() -> None:
    names = set()
    for _ in range(2):
        of = bulletin()
        of.heard(view(OUT))
        names.add(first(of).text.name)
    assert len(names) == 1


def test_different_things_are_different_objects() -> None:
    dues = []
    for node, heard in [
        ("node-1", view(OUT)),
        ("node-2", view(OUT)),
        ("node-1", view(fact(1, Standing.OUT))),
        ("node-1", view(fact(0, Standing.CONDEMNED))),
        ("node-1", view(notices=(notice(),))),
        ("node-1", view(notices=(notice("train-1"),))),
        ("node-1", view(notices=(notice(reason="GpuOutOfService"),))),
        ("node-1", view(notices=(notice(device="sim-1"),))),
    ]:
        of = Bulletin(node, TIMES)
        of.heard(heard)
        dues.append(first(of).text.name)
    assert len(set(dues)) == len(dues)
    assert all(len(name) <= 253 for name in dues)


def test_a_long_name_still_makes_a_name() -> None:
    of = bulletin()
    of.heard(view(notices=(notice("a" * 199 + "." + "b" * 53),)))
    name = first(of).text.name
    assert len(name) <= 253
    assert ".." not in name


def test_an_object_that_expired_is_made_again() -> None:
    of = bulletin()
    of.heard(view(OUT))
    tell(of, 0)
    of.heard(view(BACK))
    tell(of, 0)
    of.heard(view(OUT))
    due = first(of, 100)
    of.vanished(due)
    assert first(of, 100).count == 0


# --- pods ------------------------------------------------------------------------------------------------------------


def test_a_pods_owner_is_told_in_the_services_words_where_the_pod_is() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(),)))
    text = first(of).text
    assert (text.regarding.namespace, text.regarding.home, text.regarding.uid) == ("team-a", "team-a", "uid-of-train-0")
    assert (text.reason, text.sentence, text.warning) == ("GpuNotHandedOver", "sim-0 waits.", True)


def test_a_pod_that_waits_for_several_devices_has_an_event_for_each() -> None:
    of = bulletin()
    waits = [notice(sentence=f"{each} waits.", device=each) for each in ("sim-0", "sim-1")]
    of.heard(view(notices=tuple(waits)))
    assert {sentence for _, sentence in tell(of, 0)} == {"sim-0 waits.", "sim-1 waits."}
    of.heard(view(notices=(waits[1],)))  # the other was handed over: that is none of this one's business
    assert tell(of, TIMES.spacing) == []


def test_the_same_is_told_again_before_the_event_is_forgotten() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(),)))
    tell(of, 0)
    assert of.due_in(1) == TIMES.remind - 1
    assert tell(of, TIMES.remind - 1) == []
    assert first(of, TIMES.remind).count == 1


def test_another_sentence_is_told_but_no_object_is_written_twice_a_minute() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(sentence="one"),)))
    tell(of, 0)
    of.heard(view(notices=(notice(sentence="two"),)))
    of.heard(view(notices=(notice(sentence="three"),)))
    assert of.due_in(1) == TIMES.spacing - 1
    assert tell(of, TIMES.spacing - 1) == []
    assert tell(of, TIMES.spacing) == [("GpuNotHandedOver", "three")]


def test_a_pod_that_is_noticed_no_more_is_forgotten() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(),)))
    tell(of, 0)
    of.heard(view())
    assert of._subjects == {}
    assert of.due_in(10_000) is None


def test_a_pod_that_goes_while_its_owner_is_told_is_forgotten_all_the_same() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(),)))
    due = first(of)
    of.heard(view())
    of.told(due, 0, 1)
    of.refused(due, 0)
    assert of._subjects == {}


def test_a_sentence_is_cut_to_what_an_event_takes() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(sentence="ä" * 2000),)))
    sentence = first(of).text.sentence
    assert len(sentence.encode()) <= LONGEST
    assert sentence.endswith("ä…")


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_no_more_than_so_many_a_minute_and_each_gets_its_turn() -> None:
    of = bulletin()
    pods = tuple(notice(f"p-{number}") for number in range(75))
    of.heard(view(notices=pods))
    told, now, bursts = 0, 0.0, []
    while told < 75:
        bursts.append(len(tell(of, now)))
        told += bursts[-1]
        wait = of.due_in(now)
        assert wait is not None
        now += wait
    assert bursts == [30, 30, 15]
    assert now >= 2 * TIMES.window


def test_what_is_refused_is_left_alone_and_the_others_go_on() -> None:
    of = bulletin()
    of.heard(view(notices=(notice("p-0"), notice("p-1"))))
    refused = first(of)
    of.refused(refused, 0)
    assert len(tell(of, 0)) == 1
    assert tell(of, TIMES.shelved - 1) == []
    assert first(of, TIMES.shelved).text == refused.text


def test_a_reminder_that_is_refused_does_not_spin() -> None:
    of = bulletin()
    of.heard(view(notices=(notice(),)))
    tell(of, 0)
    of.refused(first(of, TIMES.remind), TIMES.remind)
    assert of.due_in(TIMES.remind + 1) == TIMES.shelved - 1


def test_whoever_was_left_alone_longest_comes_first() -> None:
    of = bulletin(BulletinTimes(spacing=10, most=1, window=10))
    of.heard(view(notices=(notice("p-0", "one"), notice("p-1", "one"))))
    order = []
    for round_, now in enumerate([0.0, 10.0, 20.0, 30.0]):
        of.heard(view(notices=(notice("p-0", f"{round_}"), notice("p-1", f"{round_}"))))
        due = first(of, now)
        order.append(due.text.regarding.name)
        of.told(due, now, 1)
    assert sorted(order[:2]) == sorted(order[2:]) == ["p-0", "p-1"]
