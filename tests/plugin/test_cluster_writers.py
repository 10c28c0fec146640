"""Cluster writers: each keeps one object in sync, writes when it differs, and respects its rate limit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from plugin.cluster.errors import (
    ApiBusy,
    ApiConflict,
    ApiForbidden,
    ApiInvalidRequest,
    ApiNotFound,
    ApiUnavailable,
    ClusterError,
)
from plugin.cluster.event_diff import EventDiff, EventDiffTimes
from plugin.cluster.port import ClusterNode, EventContent
from plugin.cluster.reporter import BackoffTimes, WriterBackoff
from plugin.cluster.view import (
    PLUGIN_STOPPED_CONDITION,
    SERVICE_AWAY_CONDITION,
    ClusterDevice,
    ClusterView,
    ConditionStatus,
    DeviceServiceStatus,
    NodeCondition,
    OwnerNotice,
)
from plugin.cluster.writers import ConditionWriter, EventsWriter, EvictionWriter, LabelsWriter, WriterTimes
from plugin.logs import create_logger
from tests.plugin_collaborators import DEADLINE, Bell

EPOCH = 1_900_000_000.0
TIMES = WriterTimes()
GOOD = ClusterView(True, (ClusterDevice("sim-0", DeviceServiceStatus.IN_SERVICE, True, "clean"),))
BAD = ClusterView(
    True,
    (ClusterDevice("sim-0", DeviceServiceStatus.OUT_OF_SERVICE, False, "quarantined", "Device sim-0 is quarantined."),),
)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(EPOCH + seconds, UTC)


class Written:
    """A cluster that accepts everything, unless configured to raise an error, or to make evictions wait."""

    def __init__(self) -> None:
        self.current = ClusterNode(None, None, {})
        self.writes: list[tuple[object, ...]] = []
        self.raises: list[ClusterError | None] = []
        self.bell = Bell()
        self.queued = 0
        self.turn = asyncio.Event()
        self.turn.set()

    def _record(self, *words: object) -> None:
        self.writes.append(words)
        self.bell.ring()
        if self.raises and (error := self.raises.pop(0)) is not None:
            raise error

    async def get_node(self) -> ClusterNode:
        self._record("node")
        return self.current

    async def patch_condition(self, condition: NodeCondition, *, since: datetime, now: datetime) -> ClusterNode:
        self._record("condition", condition.status, condition.reason, since, now)
        self.current = ClusterNode(condition.status, since, self.current.labels)
        return self.current

    async def patch_labels(self, labels: Mapping[str, str]) -> None:
        self._record("labels", *labels.values())

    async def replace_taints(self, taints: Sequence[Mapping[str, Any]], resource_version: str) -> None:
        self._record("taints", *taints)

    async def create_event(self, event: EventContent, now: datetime) -> None:
        self._record("create", event.reason)

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int:
        self._record("repeat", event.reason, count)
        return 7 if count is None else count

    async def evict_pod(self, namespace: str, pod: str, uid: str) -> None:
        self.queued += 1
        self.bell.ring()
        await self.turn.wait()
        self._record("evict", uid)


class Wall:
    """A wall clock that a test sets."""

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


def condition_duty(cluster: Written, wall: Wall, seen: list[ClusterNode] | None = None) -> ConditionWriter:
    into = seen if seen is not None else []
    return ConditionWriter(cluster, times=TIMES, wall=wall, jitter=lambda: 0.5, on_node=into.append)


# --- the condition ---------------------------------------------------------------------------------------------------


async def test_condition_is_not_written_before_the_first_snapshot(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    assert duty.seconds_until_due(0) is None
    await duty.write(0)
    await duty.write_stopped()
    assert cluster.writes == []


async def test_first_condition_write_reads_the_node_first(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    assert duty.seconds_until_due(0) == 0
    await duty.write(0)
    assert cluster.writes == [("node",), ("condition", ConditionStatus.TRUE, "AllInService", at(0), at(0))]


async def test_plugin_restart_keeps_the_transition_time_of_the_condition(cluster: Written, wall: Wall) -> None:
    cluster.current = ClusterNode(ConditionStatus.TRUE, at(-5000), {})
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    await duty.write(0)
    assert cluster.writes[-1] == ("condition", ConditionStatus.TRUE, "AllInService", at(-5000), at(0))


async def test_transition_time_changes_with_the_condition_status_only(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(BAD)
    await duty.write(0)
    worse = ClusterView(True, (*BAD.devices, *GOOD.devices))  # another reason and message, the same status
    for seconds, view in ((20.0, worse), (40.0, GOOD)):
        wall.seconds = seconds
        duty.update(view)
        await duty.write(seconds)
    assert [words[1:4] for words in cluster.writes if words[0] == "condition"] == [
        (ConditionStatus.FALSE, "NoneInService", at(0)),
        (ConditionStatus.FALSE, "SomeOutOfService", at(0)),
        (ConditionStatus.TRUE, "AllInService", at(40)),
    ]


async def test_condition_changes_are_written_at_most_every_ten_seconds_and_only_the_last_one(
    cluster: Written, wall: Wall
) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    await duty.write(0)
    duty.update(BAD)
    assert duty.seconds_until_due(1) == 9
    duty.update(GOOD)
    assert duty.seconds_until_due(1) == TIMES.confirm - 1  # as it is written already


async def test_unchanged_condition_is_written_at_the_heartbeat_interval(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    await duty.write(0)
    await duty.write(TIMES.confirm)
    wall.seconds = beat = TIMES.confirm + TIMES.heartbeat
    assert duty.seconds_until_due(beat) == 0
    await duty.write(beat)
    assert cluster.writes[-1] == ("condition", ConditionStatus.TRUE, "AllInService", at(0), at(beat))
    assert cluster.writes.count(("node",)) == 1


async def test_late_stopped_condition_of_an_earlier_instance_is_replaced_after_ten_seconds(
    cluster: Written, wall: Wall
) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    await duty.write(0)
    cluster.current = ClusterNode(PLUGIN_STOPPED_CONDITION.status, at(1), {})  # an abandoned request that arrived
    assert duty.seconds_until_due(0) == TIMES.confirm == 10
    wall.seconds = TIMES.confirm
    await duty.write(TIMES.confirm)
    assert cluster.writes[-1] == ("condition", ConditionStatus.TRUE, "AllInService", at(0), at(TIMES.confirm))


async def test_each_condition_write_passes_the_updated_node_on(cluster: Written, wall: Wall) -> None:
    cluster.current = ClusterNode(None, None, {"zone": "b"})
    shown: list[ClusterNode] = []
    duty = condition_duty(cluster, wall, shown)
    duty.update(GOOD)
    await duty.write(0)
    assert shown == [ClusterNode(ConditionStatus.TRUE, at(0), {"zone": "b"})]


async def test_node_is_read_again_after_a_failed_condition_write(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    await duty.write(0)
    cluster.raises = [ApiUnavailable("gone")]
    duty.update(BAD)
    with pytest.raises(ApiUnavailable):
        await duty.write(10)
    assert duty.seconds_until_due(10) == 0
    cluster.current = ClusterNode(
        ConditionStatus.FALSE, at(3), {}
    )  # the request had arrived, only its response was lost
    await duty.write(11)
    assert [words[:1] for words in cluster.writes[-2:]] == [("node",), ("condition",)]
    assert cluster.writes[-1][3] == at(3)


async def test_last_condition_write_states_that_the_plugin_stopped(cluster: Written, wall: Wall) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    await duty.write(0)
    wall.seconds = 5
    await duty.write_stopped()
    assert cluster.writes[-1] == ("condition", PLUGIN_STOPPED_CONDITION.status, "PluginStopped", at(5), at(5))


async def test_condition_write_that_may_have_arrived_is_followed_by_the_stopped_condition(
    cluster: Written, wall: Wall
) -> None:
    cluster.raises = [None, ApiUnavailable("its answer was lost")]
    duty = condition_duty(cluster, wall)
    duty.update(GOOD)
    with pytest.raises(ApiUnavailable):
        await duty.write(0)
    await duty.write_stopped()
    assert cluster.writes[-1][:3] == ("condition", PLUGIN_STOPPED_CONDITION.status, "PluginStopped")


async def test_stopped_condition_is_not_written_if_no_device_status_was_ever_written(
    cluster: Written, wall: Wall
) -> None:
    duty = condition_duty(cluster, wall)
    duty.update(ClusterView())
    await duty.write(0)
    assert cluster.writes[-1][2] == SERVICE_AWAY_CONDITION.reason
    count = len(cluster.writes)
    await duty.write_stopped()
    assert len(cluster.writes) == count


# --- labels ----------------------------------------------------------------------------------------------------------


def cleaned(clean: bool) -> ClusterView:
    """Return the view of a device that a tenant's pod has just used, or that was just scrubbed."""
    return ClusterView(
        True, (ClusterDevice("sim-0", DeviceServiceStatus.IN_SERVICE, clean, "clean" if clean else "in-use"),)
    )


async def test_labels_are_written_at_most_once_a_minute_for_pods_that_come_and_go(cluster: Written) -> None:
    duty = LabelsWriter(cluster, times=TIMES)
    for second in range(3600):
        duty.update(cleaned(second % 2 == 0))
        due = duty.seconds_until_due(second)
        if due is not None and due <= 0:
            await duty.write(second)
    assert 2 <= len(cluster.writes) <= 61


async def test_quarantine_label_does_not_wait_for_the_next_minute(cluster: Written) -> None:
    duty = LabelsWriter(cluster, times=TIMES)
    duty.update(cleaned(True))
    await duty.write(0)
    duty.update(cleaned(False))
    assert duty.seconds_until_due(4) == TIMES.labels - 4
    duty.update(BAD)
    assert duty.seconds_until_due(4) == TIMES.spacing - 4
    await duty.write(10)
    duty.update(GOOD)
    assert duty.seconds_until_due(10) == TIMES.spacing


async def test_quarantine_labels_are_written_on_change_only_and_at_most_every_ten_seconds(
    cluster: Written,
) -> None:
    duty = LabelsWriter(cluster, times=TIMES)
    assert duty.seconds_until_due(0) is None
    duty.update(GOOD)
    assert duty.seconds_until_due(0) == 0
    await duty.write(0)
    assert duty.seconds_until_due(1_000_000) is None
    duty.update(BAD)
    assert duty.seconds_until_due(4) == 6
    duty.update(GOOD)
    assert duty.seconds_until_due(4) is None
    assert cluster.writes == [("labels", "1", "0", "0")]


async def test_labels_already_on_the_node_are_not_written(cluster: Written) -> None:
    duty = LabelsWriter(cluster, times=TIMES)
    duty.update(GOOD)
    duty.on_node(ClusterNode(None, None, {"zone": "a", **GOOD.labels}))
    assert duty.seconds_until_due(0) is None


async def test_labels_that_were_removed_are_written_again(cluster: Written) -> None:
    duty = LabelsWriter(cluster, times=TIMES)
    duty.update(GOOD)
    await duty.write(0)
    duty.on_node(ClusterNode(None, None, {"zone": "a"}))
    assert duty.seconds_until_due(TIMES.spacing) == 0


# --- events ----------------------------------------------------------------------------------------------------------


def events_duty(cluster: Written, wall: Wall) -> EventsWriter:
    diff = EventDiff("node-1", EventDiffTimes())
    return EventsWriter(cluster, diff, wall=wall, log=create_logger(level="error"))


async def test_event_is_created_once_and_then_repeated(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    for now, view in ((0, BAD), (1, GOOD), (100, BAD)):
        duty.update(view)
        assert duty.seconds_until_due(now) is not None
        await duty.write(now)
    assert cluster.writes == [
        ("create", "GpuOutOfService"),
        ("create", "GpuBackInService"),
        ("repeat", "GpuOutOfService", 2),
    ]


async def test_event_of_an_earlier_run_is_repeated_and_its_count_continued(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    cluster.raises = [ApiConflict("there")]
    for now, view in ((0, BAD), (1, GOOD), (100, BAD)):
        duty.update(view)
        await duty.write(now)
    assert cluster.writes == [
        ("create", "GpuOutOfService"),
        ("repeat", "GpuOutOfService", None),
        ("create", "GpuBackInService"),
        ("repeat", "GpuOutOfService", 8),
    ]


async def test_expired_event_is_created_again(cluster: Written, wall: Wall) -> None:
    duty = events_duty(cluster, wall)
    for now, view in ((0, BAD), (1, GOOD)):
        duty.update(view)
        await duty.write(now)
    duty.update(BAD)
    cluster.raises = [ApiNotFound("gone")]
    await duty.write(100)
    assert duty.seconds_until_due(100) == 0 or (duty.seconds_until_due(100) or 0) < 0
    await duty.write(100)
    assert cluster.writes[-2:] == [("repeat", "GpuOutOfService", 2), ("create", "GpuOutOfService")]


@pytest.mark.parametrize("kind", [ApiForbidden, ApiInvalidRequest, ApiNotFound])
async def test_one_refused_event_does_not_block_other_events(
    cluster: Written, wall: Wall, kind: type[ClusterError]
) -> None:
    duty = events_duty(cluster, wall)
    cluster.raises = [kind("no")]
    duty.update(ClusterView(True, (), (OwnerNotice("a", "p", "u", "R", "s."), OwnerNotice("b", "q", "v", "R", "t."))))
    await duty.write(0)
    await duty.write(0)
    assert len(cluster.writes) == 2
    assert duty.seconds_until_due(0) == EventDiffTimes().refused_retry


async def test_unavailable_api_server_is_reported_to_the_caller_of_the_event_writer(
    cluster: Written, wall: Wall
) -> None:
    duty = events_duty(cluster, wall)
    cluster.raises = [ApiUnavailable("away")]
    duty.update(BAD)
    with pytest.raises(ApiUnavailable):
        await duty.write(0)
    await duty.write(1)
    assert cluster.writes == [("create", "GpuOutOfService")] * 2


# --- evictions -------------------------------------------------------------------------------------------------------


def evicting(*uids: str, is_connected: bool = True) -> ClusterView:
    notices = tuple(OwnerNotice("team-a", f"p-{uid}", uid, "GpuHandOverRefused", "It waits.", True) for uid in uids)
    return ClusterView(is_connected, (), notices)


@pytest.fixture
def eviction(cluster: Written) -> EvictionWriter:
    return EvictionWriter(cluster, times=TIMES, log=create_logger(level="error"))


async def test_only_a_pod_that_the_policy_evicts_is_evicted(cluster: Written, eviction: EvictionWriter) -> None:
    eviction.update(ClusterView(True, (), (OwnerNotice("team-a", "p", "u", "GpuHandOverRefused", "It waits."),)))
    assert eviction.seconds_until_due(0) is None


async def test_evictions_are_spaced_and_none_is_sent_twice(cluster: Written, eviction: EvictionWriter) -> None:
    eviction.update(evicting("a", "b"))
    await eviction.write(0)
    assert eviction.seconds_until_due(0) == TIMES.eviction
    await eviction.write(10)
    assert cluster.writes == [("evict", "a"), ("evict", "b")]
    assert eviction.seconds_until_due(10) == TIMES.long_retry - 10


async def test_eviction_blocked_by_a_disruption_budget_is_retried_after_the_next_pods_eviction(
    cluster: Written, eviction: EvictionWriter
) -> None:
    cluster.raises = [ApiBusy("budget", retry_after=90)]
    eviction.update(evicting("a", "b"))
    for now in (0, 10):
        await eviction.write(now)
    assert cluster.writes == [("evict", "a"), ("evict", "b")]
    assert eviction.seconds_until_due(10) == 80
    await eviction.write(90)
    assert cluster.writes[-1] == ("evict", "a")


@pytest.mark.parametrize("kind", [ApiConflict, ApiInvalidRequest, ApiNotFound])
async def test_eviction_of_a_replaced_or_deleted_pod_is_no_failure(
    cluster: Written, eviction: EvictionWriter, kind: type[ClusterError]
) -> None:
    cluster.raises = [kind("no")]
    eviction.update(evicting("a"))
    await eviction.write(0)
    assert (eviction.seconds_until_due(0) or 0) >= TIMES.retry


async def test_pod_that_must_not_be_evicted_does_not_block_other_evictions(
    cluster: Written, eviction: EvictionWriter
) -> None:
    """Its namespace is being deleted, or an admission policy protects it."""
    cluster.raises = [ApiForbidden("terminating")]
    eviction.update(evicting("a", "b"))
    await eviction.write(0)
    assert eviction.seconds_until_due(0) == TIMES.eviction
    await eviction.write(10)
    assert cluster.writes == [("evict", "a"), ("evict", "b")]
    assert eviction.seconds_until_due(10) == TIMES.long_retry - 10


async def test_retry_delay_that_the_api_server_requests_for_an_eviction_is_bounded(
    cluster: Written, eviction: EvictionWriter
) -> None:
    cluster.raises = [ApiBusy("slower", retry_after=99_999)]
    eviction.update(evicting("a"))
    await eviction.write(0)
    assert eviction.seconds_until_due(0) == TIMES.long_retry


async def test_a_pod_that_waits_for_several_devices_is_evicted_once(cluster: Written, eviction: EvictionWriter) -> None:
    waits = [
        OwnerNotice("team-a", "p-a", "a", "GpuHandOverRefused", "It waits.", True, (each,))
        for each in ("sim-0", "sim-1")
    ]
    eviction.update(
        ClusterView(
            True, (), (*waits, OwnerNotice("team-a", "p-a", "a", "GpuHandOverRefused", "It waits.", False, ("x",)))
        )
    )
    await eviction.write(0)
    assert cluster.writes == [("evict", "a")]
    assert eviction.seconds_until_due(0) == TIMES.long_retry


@pytest.mark.parametrize(
    "after", [evicting("b"), ClusterView()], ids=["it was given its device", "no service is connected any more"]
)
async def test_queued_eviction_is_withdrawn_when_it_is_no_longer_requested(
    cluster: Written, eviction: EvictionWriter, after: ClusterView
) -> None:
    cluster.turn.clear()
    eviction.update(evicting("a", "b"))
    acting = asyncio.create_task(eviction.write(0))
    await cluster.bell.until(lambda: cluster.queued == 1)
    eviction.update(after)
    cluster.turn.set()  # its turn comes at the same moment
    async with asyncio.timeout(DEADLINE):
        await acting
    assert cluster.writes == []


async def test_queued_eviction_that_is_still_requested_is_sent(cluster: Written, eviction: EvictionWriter) -> None:
    cluster.turn.clear()
    eviction.update(evicting("a"))
    acting = asyncio.create_task(eviction.write(0))
    await cluster.bell.until(lambda: cluster.queued == 1)
    eviction.update(evicting("a", "b"))
    cluster.turn.set()
    async with asyncio.timeout(DEADLINE):
        await acting
    assert cluster.writes == [("evict", "a")]


async def test_queued_eviction_ends_with_the_task_that_requested_it(cluster: Written, eviction: EvictionWriter) -> None:
    cluster.turn.clear()
    eviction.update(evicting("a"))
    acting = asyncio.create_task(eviction.write(0))
    await cluster.bell.until(lambda: cluster.queued == 1)
    acting.cancel()
    await asyncio.wait({acting})
    assert acting.cancelled()
    assert [each for each in asyncio.all_tasks() if each is not asyncio.current_task()] == []
    assert cluster.writes == []


async def test_no_pod_is_evicted_on_notices_of_a_service_that_is_down(
    cluster: Written, eviction: EvictionWriter
) -> None:
    eviction.update(evicting("a"))
    await eviction.write(0)
    eviction.update(ClusterView())
    assert eviction.seconds_until_due(10_000) is None
    eviction.update(evicting("a"))  # reported again: still the same pod
    assert eviction.seconds_until_due(10) == TIMES.long_retry - 10


# --- pauses ----------------------------------------------------------------------------------------------------------


def test_writer_backoff_doubles_up_to_its_maximum_and_ends_with_a_success() -> None:
    pause = WriterBackoff(BackoffTimes(first=1, max=8), jitter=lambda: 1.0)
    waits = []
    for _ in range(6):
        pause.on_failure(ApiUnavailable("no"), 100)
        waits.append(pause.remaining(100))
    assert waits == [1, 2, 4, 8, 8, 8]
    pause.reset()
    assert pause.remaining(100) <= 0
    pause.on_failure(ApiUnavailable("no"), 100)
    assert pause.remaining(100) == 1


def test_writer_backoff_is_jittered() -> None:
    waits = set()
    for spread in (0.0, 0.3, 0.9):
        pause = WriterBackoff(BackoffTimes(first=8), jitter=lambda spread=spread: spread)  # type: ignore[misc]
        pause.on_failure(ApiUnavailable("no"), 0)
        waits.add(pause.remaining(0))
    assert len(waits) == 3
    assert min(waits) == 4


def test_retry_delay_requested_by_the_api_server_is_followed_up_to_a_maximum() -> None:
    pause = WriterBackoff(BackoffTimes(first=1, max=300), jitter=lambda: 0.0)
    pause.on_failure(ApiBusy("slower", retry_after=20), 0)
    assert pause.remaining(0) == 20
    pause.on_failure(ApiBusy("slower", retry_after=90_000), 0)
    assert pause.remaining(0) == 300


def test_forbidden_request_is_retried_after_ten_minutes() -> None:
    pause = WriterBackoff(BackoffTimes(), jitter=lambda: 0.0)
    pause.on_failure(ApiForbidden("no"), 0)
    assert pause.remaining(0) == 600
