"""Each duty keeps one thing in step, writes when it differs, and not more often than it may."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from plugin.cluster.bulletin import Bulletin, BulletinTimes
from plugin.cluster.duties import ConditionDuty, EventsDuty, EvictionDuty, LabelsDuty, NodeTimes
from plugin.cluster.errors import Busy, ClusterError, Denied, Exists, Later, Missing, Rejected
from plugin.cluster.port import EventText, NodeSeen
from plugin.cluster.telling import Pause, PauseTimes
from plugin.cluster.view import AWAY, STOPPED, Condition, DeviceFacts, Notice, Standing, Status, View
from plugin.logs import logger
from tests.plugin_collaborators import PATIENCE, Bell

EPOCH = 1_900_000_000.0
TIMES = NodeTimes()
GOOD = View(True, (DeviceFacts("sim-0", Standing.IN_SERVICE, True, "clean"),))
BAD = View(True, (DeviceFacts("sim-0", Standing.OUT, False, "quarantined", "Device sim-0 is quarantined."),))


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(EPOCH + seconds, UTC)


class Written:
    """A cluster that takes everything, unless it is told what to raise next, or to keep evictions waiting for their turn."""

    def __init__(self) -> None:
        self.there = NodeSeen(None, None, {})
        self.said: list[tuple[object, ...]] = []
        self.raises: list[ClusterError | None] = []
        self.bell = Bell()
        self.queued = 0
        self.turn = asyncio.Event()
        self.turn.set()

    def _say(self, *words: object) -> None:
        self.said.append(words)
        self.bell.ring()
        if self.raises and (error := self.raises.pop(0)) is not None:
            raise error

    async def node(self) -> NodeSeen:
        self._say("node")
        return self.there

    async def show_condition(self, condition: Condition, *, since: datetime, now: datetime) -> NodeSeen:
        self._say("condition", condition.status, condition.reason, since, now)
        self.there = NodeSeen(condition.status, since, self.there.labels)
        return self.there

    async def show_labels(self, labels: Mapping[str, str]) -> None:
        self._say("labels", *labels.values())

    async def create_event(self, event: EventText, now: datetime) -> None:
        self._say("create", event.reason)

    async def repeat_event(self, event: EventText, now: datetime, count: int | None) -> int:
        self._say("repeat", event.reason, count)
        return 7 if count is None else count

    async def evict(self, namespace: str, pod: str, uid: str) -> None:
        self.queued += 1
        self.bell.ring()
        await self.turn.wait()
        self._say("evict", uid)


class Wall:
    """The time of day, which a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return EPOCH + self.seconds


@pytest.fixture
def cluster() -> Written:
    return Written()


@pytest.fixture
def wall() -> Wall:
    return Wall()


def condition_duty(cluster: Written, wall: Wall, seen: list[NodeSeen] | None = None) -> ConditionDuty:
    into = seen if seen is not None else []
    return ConditionDuty(cluster, times=TIMES, wall=wall, spread=lambda: 0.5, node_seen=into.append)


# --- the condition ---------------------------------------------------------------------------------------------------


async def test_nothing_is_said_before_anything_is_known(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    assert duty.due_in(0) is None
    await duty.act(0)
    await duty.farewell()
    assert cluster.said == []


async def test_the_first_word_looks_at_what_is_there(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    assert duty.due_in(0) == 0
    await duty.act(0)
    assert cluster.said == [("node",), ("condition", Status.TRUE, "AllInService", at(0), at(0))]


async def test_a_restart_of_the_plugin_is_no_transition(cluster: Written, wall: Wall) -> None:
    cluster.there = NodeSeen(Status.TRUE, at(-5000), {})
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    await duty.act(0)
    assert cluster.said[-1] == ("condition", Status.TRUE, "AllInService", at(-5000), at(0))


async def test_the_transition_time_is_that_of_the_status_and_of_nothing_else(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(BAD)
    await duty.act(0)
    worse = View(True, (*BAD.devices, *GOOD.devices))  # another reason and message, the same status
    for seconds, view in ((20.0, worse), (40.0, GOOD)):
        wall.seconds = seconds
        duty.heard(view)
        await duty.act(seconds)
    assert [words[1:4] for words in cluster.said if words[0] == "condition"] == [
        (Status.FALSE, "NoneInService", at(0)),
        (Status.FALSE, "SomeOutOfService", at(0)),
        (Status.TRUE, "AllInService", at(40)),
    ]


async def test_changes_are_written_at_most_every_ten_seconds_and_only_the_last(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    await duty.act(0)
    duty.heard(BAD)
    assert duty.due_in(1) == 9
    duty.heard(GOOD)
    assert duty.due_in(1) == TIMES.confirm - 1  # as it is written already


async def test_an_unchanged_condition_beats_slowly(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    await duty.act(0)
    await duty.act(TIMES.confirm)
    wall.seconds = beat = TIMES.confirm + TIMES.heartbeat
    assert duty.due_in(beat) == 0
    await duty.act(beat)
    assert cluster.said[-1] == ("condition", Status.TRUE, "AllInService", at(0), at(beat))
    assert cluster.said.count(("node",)) == 1


async def test_a_last_word_of_an_earlier_instance_that_arrives_late_is_replaced_after_ten_seconds(
    cluster: Written, wall: Wall
) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    await duty.act(0)
    cluster.there = NodeSeen(STOPPED.status, at(1), {})  # a request that was given up, and arrived
    assert duty.due_in(0) == TIMES.confirm == 10
    wall.seconds = TIMES.confirm
    await duty.act(TIMES.confirm)
    assert cluster.said[-1] == ("condition", Status.TRUE, "AllInService", at(0), at(TIMES.confirm))


async def test_each_write_shows_the_node_as_it_is_by_then(cluster: Written, wall: Wall) -> None:
    cluster.there = NodeSeen(None, None, {"zone": "b"})
    shown: list[NodeSeen] = []
    duty = condition_duty(cluster, wall, shown)
    duty.heard(GOOD)
    await duty.act(0)
    assert shown == [NodeSeen(Status.TRUE, at(0), {"zone": "b"})]


async def test_after_a_failure_what_is_there_is_looked_at_again(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    await duty.act(0)
    cluster.raises = [Later("gone")]
    duty.heard(BAD)
    with pytest.raises(Later):
        await duty.act(10)
    assert duty.due_in(10) == 0
    cluster.there = NodeSeen(Status.FALSE, at(3), {})  # it had arrived, only its answer had not
    await duty.act(11)
    assert [words[:1] for words in cluster.said[-2:]] == [("node",), ("condition",)]
    assert cluster.said[-1][3] == at(3)


async def test_the_last_word_is_that_nobody_watches(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    await duty.act(0)
    wall.seconds = 5
    await duty.farewell()
    assert cluster.said[-1] == ("condition", STOPPED.status, "PluginStopped", at(5), at(5))


async def test_a_word_that_may_have_arrived_is_taken_back_too(cluster: Written, wall: Wall) -> None:
    cluster.raises = [None, Later("its answer was lost")]
    duty = condition_duty(cluster, wall)
    duty.heard(GOOD)
    with pytest.raises(Later):
        await duty.act(0)
    await duty.farewell()
    assert cluster.said[-1][:3] == ("condition", STOPPED.status, "PluginStopped")


async def test_nothing_is_taken_back_that_was_never_said(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.heard(View())
    await duty.act(0)
    assert cluster.said[-1][2] == AWAY.reason
    said = len(cluster.said)
    await duty.farewell()
    assert len(cluster.said) == said


# --- labels ----------------------------------------------------------------------------------------------------------


def cleaned(clean: bool) -> View:
    """A device that a tenant's pod just had, or that was just scrubbed."""
    return View(True, (DeviceFacts("sim-0", Standing.IN_SERVICE, clean, "clean" if clean else "in-use"),))


async def test_pods_that_come_and_go_make_no_more_than_a_write_of_the_node_a_minute(cluster: Written) -> None:
    duty = LabelsDuty(cluster, times=TIMES)
    for second in range(3600):
        duty.heard(cleaned(second % 2 == 0))
        due = duty.due_in(second)
        if due is not None and due <= 0:
            await duty.act(second)
    assert 2 <= len(cluster.said) <= 61


async def test_a_quarantine_does_not_wait_for_that_minute(cluster: Written) -> None:
    duty = LabelsDuty(cluster, times=TIMES)
    duty.heard(cleaned(True))
    await duty.act(0)
    duty.heard(cleaned(False))
    assert duty.due_in(4) == TIMES.labels - 4
    duty.heard(BAD)
    assert duty.due_in(4) == TIMES.spacing - 4
    await duty.act(10)
    duty.heard(GOOD)
    assert duty.due_in(10) == TIMES.spacing


async def test_quarantines_are_written_on_change_only_and_not_more_often_than_every_ten_seconds(
    cluster: Written,
) -> None:
    duty = LabelsDuty(cluster, times=TIMES)
    assert duty.due_in(0) is None
    duty.heard(GOOD)
    assert duty.due_in(0) == 0
    await duty.act(0)
    assert duty.due_in(1_000_000) is None
    duty.heard(BAD)
    assert duty.due_in(4) == 6
    duty.heard(GOOD)
    assert duty.due_in(4) is None
    assert cluster.said == [("labels", "1", "0", "0")]


async def test_labels_that_are_there_already_are_not_written(cluster: Written) -> None:
    duty = LabelsDuty(cluster, times=TIMES)
    duty.heard(GOOD)
    duty.node_seen(NodeSeen(None, None, {"zone": "a", **GOOD.labels}))
    assert duty.due_in(0) is None


async def test_labels_that_somebody_took_away_are_put_back(cluster: Written) -> None:
    duty = LabelsDuty(cluster, times=TIMES)
    duty.heard(GOOD)
    await duty.act(0)
    duty.node_seen(NodeSeen(None, None, {"zone": "a"}))
    assert duty.due_in(TIMES.spacing) == 0


# --- events ----------------------------------------------------------------------------------------------------------


def events_duty(cluster: Written, wall: Wall) -> EventsDuty:
    bulletin = Bulletin("node-1", BulletinTimes())
    return EventsDuty(cluster, bulletin, wall=wall, log=logger(level="error"))


async def test_an_event_is_made_once_and_then_repeated(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    for now, view in ((0, BAD), (1, GOOD), (100, BAD)):
        duty.heard(view)
        assert duty.due_in(now) is not None
        await duty.act(now)
    assert cluster.said == [
        ("create", "GpuOutOfService"),
        ("create", "GpuBackInService"),
        ("repeat", "GpuOutOfService", 2),
    ]


async def test_what_an_earlier_run_told_is_not_told_twice_but_counted_on(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    cluster.raises = [Exists("there")]
    for now, view in ((0, BAD), (1, GOOD), (100, BAD)):
        duty.heard(view)
        await duty.act(now)
    assert cluster.said == [
        ("create", "GpuOutOfService"),
        ("repeat", "GpuOutOfService", None),
        ("create", "GpuBackInService"),
        ("repeat", "GpuOutOfService", 8),
    ]


async def test_one_that_expired_is_made_again(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    for now, view in ((0, BAD), (1, GOOD)):
        duty.heard(view)
        await duty.act(now)
    duty.heard(BAD)
    cluster.raises = [Missing("gone")]
    await duty.act(100)
    assert duty.due_in(100) == 0 or (duty.due_in(100) or 0) < 0
    await duty.act(100)
    assert cluster.said[-2:] == [("repeat", "GpuOutOfService", 2), ("create", "GpuOutOfService")]


@pytest.mark.parametrize("kind", [Denied, Rejected, Missing])
async def test_one_event_that_is_refused_keeps_nobody_else_from_being_told(
    cluster: Written, wall: Wall, kind: type[ClusterError]
) -> None:
    duty = events_duty(cluster, wall)
    cluster.raises = [kind("no")]
    duty.heard(View(True, (), (Notice("a", "p", "u", "R", "s."), Notice("b", "q", "v", "R", "t."))))
    await duty.act(0)
    await duty.act(0)
    assert len(cluster.said) == 2
    assert duty.due_in(0) == BulletinTimes().shelved


async def test_an_api_server_that_is_away_is_the_callers_to_wait_for(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    cluster.raises = [Later("away")]
    duty.heard(BAD)
    with pytest.raises(Later):
        await duty.act(0)
    await duty.act(1)
    assert cluster.said == [("create", "GpuOutOfService")] * 2


# --- evictions -------------------------------------------------------------------------------------------------------


def evicting(*uids: str, heard: bool = True) -> View:
    notices = tuple(Notice("team-a", f"p-{uid}", uid, "GpuNotHandedOver", "It waits.", True) for uid in uids)
    return View(heard, (), notices)


@pytest.fixture
def eviction(cluster: Written) -> EvictionDuty:
    return EvictionDuty(cluster, times=TIMES, log=logger(level="error"))


async def test_only_a_pod_that_the_policy_wants_gone_is_evicted(cluster: Written, eviction: EvictionDuty) -> None:
    eviction.heard(View(True, (), (Notice("team-a", "p", "u", "GpuNotHandedOver", "It waits."),)))
    assert eviction.due_in(0) is None


async def test_evictions_are_spaced_and_none_is_sent_twice(cluster: Written, eviction: EvictionDuty) -> None:
    eviction.heard(evicting("a", "b"))
    await eviction.act(0)
    assert eviction.due_in(0) == TIMES.eviction
    await eviction.act(10)
    assert cluster.said == [("evict", "a"), ("evict", "b")]
    assert eviction.due_in(10) == TIMES.settled - 10


async def test_a_pod_that_a_budget_keeps_is_tried_again_later_and_the_next_one_before_it(
    cluster: Written, eviction: EvictionDuty
) -> None:
    cluster.raises = [Busy("budget", retry_after=90)]
    eviction.heard(evicting("a", "b"))
    for now in (0, 10):
        await eviction.act(now)
    assert cluster.said == [("evict", "a"), ("evict", "b")]
    assert eviction.due_in(10) == 80
    await eviction.act(90)
    assert cluster.said[-1] == ("evict", "a")


@pytest.mark.parametrize("kind", [Exists, Rejected, Missing])
async def test_a_pod_that_is_another_or_gone_is_no_failure(
    cluster: Written, eviction: EvictionDuty, kind: type[ClusterError]
) -> None:
    cluster.raises = [kind("no")]
    eviction.heard(evicting("a"))
    await eviction.act(0)
    assert (eviction.due_in(0) or 0) >= TIMES.again


async def test_one_pod_that_must_not_be_evicted_keeps_no_other_from_it(
    cluster: Written, eviction: EvictionDuty
) -> None:
    """Its namespace is being deleted, or an admission policy keeps it."""
    cluster.raises = [Denied("terminating")]
    eviction.heard(evicting("a", "b"))
    await eviction.act(0)
    assert eviction.due_in(0) == TIMES.eviction
    await eviction.act(10)
    assert cluster.said == [("evict", "a"), ("evict", "b")]
    assert eviction.due_in(10) == TIMES.settled - 10


async def test_the_patience_that_is_asked_for_one_pod_has_a_bound(cluster: Written, eviction: EvictionDuty) -> None:
    cluster.raises = [Busy("slower", retry_after=99_999)]
    eviction.heard(evicting("a"))
    await eviction.act(0)
    assert eviction.due_in(0) == TIMES.settled


async def test_a_pod_that_waits_for_several_devices_is_evicted_once(cluster: Written, eviction: EvictionDuty) -> None:
    waits = [
        Notice("team-a", "p-a", "a", "GpuNotHandedOver", "It waits.", True, (each,)) for each in ("sim-0", "sim-1")
    ]
    eviction.heard(
        View(True, (), (*waits, Notice("team-a", "p-a", "a", "GpuNotHandedOver", "It waits.", False, ("x",))))
    )
    await eviction.act(0)
    assert cluster.said == [("evict", "a")]
    assert eviction.due_in(0) == TIMES.settled


@pytest.mark.parametrize("after", [evicting("b"), View()], ids=["it was given its device", "nobody is heard any more"])
async def test_an_eviction_that_still_waits_for_its_turn_is_taken_back_when_it_is_not_wanted_any_more(
    cluster: Written, eviction: EvictionDuty, after: View
) -> None:
    cluster.turn.clear()
    eviction.heard(evicting("a", "b"))
    acting = asyncio.create_task(eviction.act(0))
    await cluster.bell.until(lambda: cluster.queued == 1)
    eviction.heard(after)
    cluster.turn.set()  # its turn comes in the very same moment
    async with asyncio.timeout(PATIENCE):
        await acting
    assert cluster.said == []


async def test_an_eviction_that_is_wanted_still_keeps_its_turn(cluster: Written, eviction: EvictionDuty) -> None:
    cluster.turn.clear()
    eviction.heard(evicting("a"))
    acting = asyncio.create_task(eviction.act(0))
    await cluster.bell.until(lambda: cluster.queued == 1)
    eviction.heard(evicting("a", "b"))
    cluster.turn.set()
    async with asyncio.timeout(PATIENCE):
        await acting
    assert cluster.said == [("evict", "a")]


async def test_an_eviction_does_not_outlive_the_task_that_asked_for_it(
    cluster: Written, eviction: EvictionDuty
) -> None:
    cluster.turn.clear()
    eviction.heard(evicting("a"))
    acting = asyncio.create_task(eviction.act(0))
    await cluster.bell.until(lambda: cluster.queued == 1)
    acting.cancel()
    await asyncio.wait({acting})
    assert acting.cancelled()
    assert [each for each in asyncio.all_tasks() if each is not asyncio.current_task()] == []
    assert cluster.said == []


async def test_nobody_is_evicted_for_what_was_said_by_a_service_that_is_away(
    cluster: Written, eviction: EvictionDuty
) -> None:
    eviction.heard(evicting("a"))
    await eviction.act(0)
    eviction.heard(View())
    assert eviction.due_in(10_000) is None
    eviction.heard(evicting("a"))  # heard again: it is the same pod still
    assert eviction.due_in(10) == TIMES.settled - 10


# --- pauses ----------------------------------------------------------------------------------------------------------


def test_the_pause_doubles_up_to_its_longest_and_ends_with_a_success() -> None:
    pause = Pause(PauseTimes(first=1, longest=8), spread=lambda: 1.0)
    waits = []
    for _ in range(6):
        pause.failed(Later("no"), 100)
        waits.append(pause.left(100))
    assert waits == [1, 2, 4, 8, 8, 8]
    pause.over()
    assert pause.left(100) <= 0
    pause.failed(Later("no"), 100)
    assert pause.left(100) == 1


def test_a_fleet_does_not_come_back_at_once() -> None:
    waits = set()
    for spread in (0.0, 0.3, 0.9):
        pause = Pause(PauseTimes(first=8), spread=lambda spread=spread: spread)  # type: ignore[misc]
        pause.failed(Later("no"), 0)
        waits.add(pause.left(0))
    assert len(waits) == 3
    assert min(waits) == 4


def test_what_the_api_server_asks_for_is_heeded_within_reason() -> None:
    pause = Pause(PauseTimes(first=1, longest=300), spread=lambda: 0.0)
    pause.failed(Busy("slower", retry_after=20), 0)
    assert pause.left(0) == 20
    pause.failed(Busy("slower", retry_after=90_000), 0)
    assert pause.left(0) == 300


def test_a_role_that_does_not_allow_it_is_left_alone_for_ten_minutes() -> None:
    pause = Pause(PauseTimes(), spread=lambda: 0.0)
    pause.failed(Denied("no"), 0)
    assert pause.left(0) == 600
