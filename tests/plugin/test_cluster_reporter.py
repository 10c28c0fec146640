"""The reporter: the cluster receives the current state, even if the API server fails, and nothing waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.client import ApiServerClient
from plugin.cluster.condition import CONDITION_TYPE
from plugin.cluster.event_diff import EventDiffTimes
from plugin.cluster.port import ClusterNode
from plugin.cluster.reporter import BackoffTimes, ClosableClusterApi, ClusterReporter, ClusterReporterTimes
from plugin.cluster.view import LABEL_PREFIX, NodeCondition
from plugin.cluster.writers import WriterTimes
from plugin.instance_lock import WriterLock
from scrubber.api import scrubber_pb2 as pb
from scrubber.emulator.cluster import Account, Answer, ApiRequest, HttpResponse, Selection, Silence
from scrubber.emulator.cluster.resources import BUDGETS, EVENTS
from tests.cluster.plugin_server import PluginApiServer, failure, kubeconfig
from tests.plugin_collaborators import DEADLINE, Bell, device, snapshot

QUICK = ClusterReporterTimes(
    deadline=20,
    first_snapshot=60,
    shutdown=5,
    restart=0.01,
    backoff=BackoffTimes(first=0.01, max=0.05, denied=60),
    writers=WriterTimes(spacing=0, labels=0, heartbeat=60, eviction=0),
    events=EventDiffTimes(spacing=0),
)
"""The real times, shortened; intervals of 60 s never elapse here."""


class Diary:
    """A log that the test reads."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def debug(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))
        self.bell.ring()

    info = warning = error = debug

    def logged(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        return [found for name, found in self.lines if name == event and facts.items() <= found.items()]


GOOD = device(0, state="clean", certified=True)
BAD = device(0, state="quarantined", advertised=False, refusal="Device sim-0 is quarantined (xid-79).")


def noticed(evict: bool = False, pod: str = "train-0") -> pb.PodNotice:
    return pb.PodNotice(
        namespace="team-a",
        name=pod,
        uid=f"uid-of-{pod}",
        reason="GpuHandOverRefused",
        message=f"{pod} waits.",
        evict=evict,
    )


def with_notices(*notices: pb.PodNotice) -> pb.Snapshot:
    shown = snapshot(GOOD)
    shown.notices.extend(notices)
    return shown


@pytest.fixture
async def server() -> AsyncIterator[PluginApiServer]:
    async with PluginApiServer() as running:
        running.add_node("node-1", zone="a")
        yield running


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def reporting(server: PluginApiServer, diary: Diary, tmp_path: Path) -> Callable[..., Any]:
    login = kubeconfig(tmp_path, server.url)

    @asynccontextmanager
    async def start_reporter(
        times: ClusterReporterTimes = QUICK,
        connect: Callable[[], ClosableClusterApi] | None = None,
        wall: float = 1_900_000_000.0,
        locks: Path = tmp_path,
    ) -> AsyncIterator[ClusterReporter]:
        loop = asyncio.get_running_loop()
        one = ClusterReporter(
            connect or (lambda: ApiServerClient(login, "node-1", deadline=times.deadline)),
            "node-1",
            times=times,
            lock=WriterLock(locks),
            log=diary,
            clock=loop.time,
            wall_clock=lambda: wall,
            jitter=lambda: 0.5,
        )
        one.start()
        try:
            yield one
        finally:
            await one.stop()

    return start_reporter


def status(server: PluginApiServer) -> tuple[str, str]:
    """Return status and reason of our condition; empty when the node has none."""
    found = server.condition("node-1", CONDITION_TYPE)
    return ("", "") if found is None else (found["status"], found["reason"])


def counts(server: PluginApiServer) -> dict[str, str]:
    labels = server.labels("node-1")
    return {name.removeprefix(LABEL_PREFIX): value for name, value in labels.items() if name.startswith(LABEL_PREFIX)}


def reasons(server: PluginApiServer) -> list[tuple[str, str, int]]:
    """Return object name, reason and count of all events."""
    return [(each["involvedObject"]["name"], each["reason"], each["count"]) for each in server.events]


# --- current state ---------------------------------------------------------------------------------------------------


async def test_healthy_node_gets_condition_and_labels_and_no_event(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD, device(1, state="in-use")))
        await server.until(lambda: status(server) == ("True", "AllInService") and bool(counts(server)))
        assert counts(server) == {"clean": "1", "dirty": "1", "quarantined": "0"}
    assert server.events == []


async def test_device_that_leaves_service_and_returns_changes_condition_labels_and_events(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True")
        reporter.on_snapshot(snapshot(BAD))
        await server.until(lambda: status(server)[0] == "False" and len(server.events) == 1)
        await server.until(lambda: counts(server) == {"clean": "0", "dirty": "0", "quarantined": "1"})
        (written,) = server.events
        assert written["message"] == BAD.refusal
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True" and len(server.events) == 2)
        assert reasons(server) == [("node-1", "GpuOutOfService", 1), ("node-1", "GpuBackInService", 1)]


async def test_service_outage_makes_the_condition_unknown_and_no_device_clean(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: counts(server).get("clean") == "1")
        reporter.on_snapshot(None)
        await server.until(lambda: status(server) == ("Unknown", "ScrubServiceUnavailable"))
        await server.until(lambda: counts(server) == {"clean": "0", "dirty": "1", "quarantined": "0"})


async def test_service_that_never_connected_is_reported_as_away_after_a_while(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting(replace(QUICK, first_snapshot=0.01)):
        await server.until(lambda: status(server) == ("Unknown", "ScrubServiceUnavailable"))
    assert counts(server) == {}


async def test_unready_service_does_not_replace_the_service_away_condition(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True")
        reporter.on_snapshot(None)
        reporter.on_snapshot(snapshot(GOOD, ready=False, epoch="second"))
        await server.until(lambda: status(server) == ("Unknown", "ScrubServiceUnavailable"))


async def test_service_that_is_only_starting_is_not_reported_as_away_at_once(
    server: PluginApiServer, reporting: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = ApiServerClient(kubeconfig(tmp_path / "other", server.url), "node-1", deadline=20)
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD, ready=False))
        for _ in range(30):  # long enough, by the server's own clock, to have written it
            await other.get_node()
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True")
        assert [each.body["status"]["conditions"][0]["status"] for each in server.log.of("patch nodes/status")] == [
            "True"
        ]
    await other.close()


async def test_stopped_plugin_sets_the_condition_to_unknown(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True")
    assert status(server) == ("Unknown", "PluginStopped")


async def test_restarted_plugin_creates_no_second_event_for_the_same_problem(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    for permission in ("create events", "patch events"):
        async with reporting() as reporter:
            reporter.on_snapshot(snapshot(BAD))
            await server.until(lambda permission=permission: bool(server.log.of(permission)))  # type: ignore[misc]
    assert reasons(server) == [("node-1", "GpuOutOfService", 1)]


async def test_event_for_a_pod_is_written_in_its_namespace_only(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(with_notices(noticed()))
        await server.until(lambda: len(server.events) == 1 and status(server)[0] == "True")
    (written,) = server.events
    assert (written["metadata"]["namespace"], written["message"], written["reason"]) == (
        "team-a",
        "train-0 waits.",
        "GpuHandOverRefused",
    )
    elsewhere = [each.body for each in server.log.requests if each.namespace != "team-a"]
    assert "train-0" not in str(elsewhere)


# --- two instances, as in a rolling update ---------------------------------------------------------------------------


def condition_reasons(server: PluginApiServer) -> list[str]:
    """Return the reason in each write of our condition, in order."""
    return [each.body["status"]["conditions"][0]["reason"] for each in server.log.of("patch nodes/status")]


async def test_instance_with_a_successor_leaves_the_condition_unchanged(
    server: PluginApiServer, reporting: Callable[..., Any], diary: Diary
) -> None:
    async with AsyncExitStack() as after:
        async with reporting() as old:
            old.on_snapshot(snapshot(GOOD))
            await server.until(lambda: status(server)[0] == "True")
            since = server.condition("node-1", CONDITION_TYPE)
            new = await after.enter_async_context(reporting(wall=1_900_000_060.0))
            new.on_snapshot(snapshot(GOOD))
            await diary.bell.until(lambda: bool(diary.logged("cluster.standby")))
        await server.until(lambda: len(condition_reasons(server)) == 2)
        assert condition_reasons(server) == ["AllInService"] * 2
        found = server.condition("node-1", CONDITION_TYPE)
        assert since is not None
        assert found is not None
        assert found["lastHeartbeatTime"] > since["lastHeartbeatTime"]
        assert found["lastTransitionTime"] == since["lastTransitionTime"]
    assert status(server) == ("Unknown", "PluginStopped")  # the last instance has no successor


async def test_successor_counts_before_it_has_reached_service_or_api_server(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    slow = threading.Event()

    def connect() -> ClosableClusterApi:
        slow.wait()
        raise AssertionError("it is not needed any more")

    async with AsyncExitStack() as after:
        async with reporting() as old:
            old.on_snapshot(snapshot(GOOD))
            await server.until(lambda: status(server)[0] == "True")
            await after.enter_async_context(reporting(connect=connect))
            after.callback(slow.set)
        assert condition_reasons(server) == ["AllInService"]


async def test_standby_instance_writes_nothing_and_evicts_no_pod(
    server: PluginApiServer, reporting: Callable[..., Any], diary: Diary, tmp_path: Path
) -> None:
    server.role |= {"create pods/eviction"}
    server.add_pod("team-a", "train-0", "uid-of-train-0")
    (tmp_path / "other").mkdir()
    other = ApiServerClient(kubeconfig(tmp_path / "other", server.url), "node-1", deadline=20)
    async with reporting() as old:
        old.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True" and bool(counts(server)))
        request_count = len(server.log.requests)
        async with reporting() as new:
            both = snapshot(BAD)
            both.notices.append(noticed(evict=True))
            new.on_snapshot(both)
            await diary.bell.until(lambda: bool(diary.logged("cluster.standby")))
            for _ in range(30):  # long enough, by the server's own clock, to have written it
                await other.get_node()
        assert {each.operation for each in server.log.requests[request_count:]} == {"get nodes"}
        assert len(diary.logged("cluster.standby")) == 1
    await other.close()
    # The standby instance ended before: none is left.
    assert status(server) == ("Unknown", "PluginStopped")


async def test_every_instance_writes_and_reports_its_stop_where_no_lock_can_be_created(
    server: PluginApiServer, reporting: Callable[..., Any], tmp_path: Path
) -> None:
    async with reporting(locks=tmp_path / "missing") as old, reporting(locks=tmp_path / "missing") as new:
        for each in (old, new):
            each.on_snapshot(snapshot(GOOD))
        await server.until(lambda: condition_reasons(server) == ["AllInService"] * 2)
    assert condition_reasons(server)[2:] == ["PluginStopped"] * 2


def test_instance_that_takes_over_the_lock_detects_its_own_successor(tmp_path: Path) -> None:
    first, second, third = (WriterLock(tmp_path) for _ in range(3))
    assert [each.try_acquire() for each in (first, second, third)] == [True, False, False]
    assert first.has_successor()
    first.release()
    assert second.try_acquire()
    assert not third.try_acquire()
    assert second.has_successor()
    third.release()
    assert not second.has_successor()
    second.release()


def test_instance_whose_lock_file_was_removed_detects_the_instance_that_locked_the_new_file(
    tmp_path: Path,
) -> None:
    """Some kubelets clear ``device-plugins/`` when they start."""
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    assert first.try_acquire()
    for each in tmp_path.iterdir():
        each.unlink()
    assert second.try_acquire()
    assert first.has_successor()
    assert not first.try_acquire()
    for lock in (first, second):
        lock.release()


# --- evictions -------------------------------------------------------------------------------------------------------


async def test_pod_that_the_policy_evicts_is_evicted_once(
    server: PluginApiServer, reporting: Callable[..., Any], diary: Diary
) -> None:
    server.role |= {"create pods/eviction"}
    server.add_pod("team-a", "train-0", "uid-of-train-0")
    server.add_pod("team-a", "other", "uid-of-other")
    async with reporting() as reporter:
        reporter.on_snapshot(with_notices(noticed(evict=True), noticed(pod="other")))
        await diary.bell.until(lambda: bool(diary.logged("pod.evicted")))
        reporter.on_snapshot(with_notices(noticed(evict=True), noticed(pod="other")))
        reporter.on_snapshot(snapshot(BAD))
        await server.until(lambda: status(server)[0] == "False")
    assert server.evicted == ["uid-of-train-0"]
    assert len(server.log.of("create pods/eviction")) == 1
    assert len(diary.logged("pod.evicted", tenant="team-a", pod="train-0")) == 1


async def test_eviction_waits_for_a_disruption_budget(server: PluginApiServer, reporting: Callable[..., Any]) -> None:
    server.role |= {"create pods/eviction"}
    server.add_pod("team-a", "train-0", "uid-of-train-0")
    server.api.create(BUDGETS, {"metadata": {"name": "all", "namespace": "team-a"}, "spec": {"selector": {}}})
    async with reporting(replace(QUICK, writers=replace(QUICK.writers, retry=0.01))) as reporter:
        reporter.on_snapshot(with_notices(noticed(evict=True)))
        await server.until(lambda: len(server.log.of("create pods/eviction")) >= 3)
        assert server.evicted == []
        server.api.delete(BUDGETS, "all", "team-a")
        await server.until(lambda: bool(server.evicted))


async def test_pod_that_starts_while_its_eviction_is_queued_is_not_evicted(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    server.role |= {"create pods/eviction"}
    server.add_pod("team-a", "train-0", "uid-of-train-0")
    slow = [True]
    server.intercept = lambda request: Silence.HANG if slow[0] else None
    async with reporting() as reporter:
        reporter.on_snapshot(with_notices(noticed(evict=True)))
        await server.until(lambda: bool(server.log.requests))  # all others wait for their turn behind it
        reporter.on_snapshot(snapshot(BAD))  # which no longer contains the pod
        slow[0] = False
        await server.stop()  # which ends the unanswered request
        await server.start()
        await server.until(lambda: status(server)[0] == "False" and bool(counts(server)))
        await server.until(lambda: any(reason == "GpuOutOfService" for _, reason, _ in reasons(server)))
    assert server.log.of("create pods/eviction") == []


async def test_pod_whose_eviction_is_refused_does_not_block_the_eviction_of_another(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    server.role |= {"create pods/eviction"}
    for number in range(2):
        server.add_pod("team-a", f"train-{number}", f"uid-of-train-{number}")
    refusal = failure(403, "Forbidden", "the namespace is being terminated")
    server.intercept = lambda request: refusal if request.name == "train-0" else None
    async with reporting() as reporter:
        reporter.on_snapshot(with_notices(noticed(evict=True), noticed(evict=True, pod="train-1")))
        await server.until(lambda: server.evicted == ["uid-of-train-1"])


async def test_missing_eviction_permission_is_logged_once_and_other_writes_continue(
    server: PluginApiServer, reporting: Callable[..., Any], diary: Diary
) -> None:
    server.add_pod("team-a", "train-0", "uid-of-train-0")
    async with reporting() as reporter:
        reporter.on_snapshot(with_notices(noticed(evict=True)))
        await diary.bell.until(lambda: bool(diary.logged("eviction.refused", pod="train-0")))
        await server.until(lambda: len(server.events) == 1)
        for state, shown in (("False", BAD), ("True", GOOD)):
            both = snapshot(shown)
            both.notices.append(noticed(evict=True))
            reporter.on_snapshot(both)
            await server.until(lambda state=state: status(server)[0] == state)  # type: ignore[misc]
    assert server.evicted == []
    assert len(server.log.of("create pods/eviction")) == 1
    assert len(diary.logged("eviction.refused")) == 1


# --- a failing API server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        failure(401, "Unauthorized"),
        failure(429, "TooManyRequests", after=0),
        failure(500, "InternalError"),
        failure(409, "Conflict"),
        HttpResponse(200, b"{]"),
        HttpResponse(503, b"<html>", content_type="text/html"),
        Silence.DROP,
    ],
    ids=str,
)
async def test_failed_writes_are_retried_until_condition_labels_and_events_are_written(
    server: PluginApiServer, reporting: Callable[..., Any], response: Answer
) -> None:
    faults = {"get nodes": 2, "patch nodes/status": 2, "patch nodes": 2, "create events": 2}

    def fault(request: ApiRequest) -> Answer | None:
        faults[request.operation] = faults.get(request.operation, 0) - 1
        return response if faults[request.operation] >= 0 else None

    server.intercept = fault
    async with reporting(replace(QUICK, events=replace(QUICK.events, refused_retry=0.01))) as reporter:
        reporter.on_snapshot(snapshot(BAD))
        await server.until(lambda: status(server)[0] == "False" and counts(server).get("quarantined") == "1")
        await server.until(lambda: bool(server.events))


async def test_one_missing_permission_does_not_block_other_writes(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    for missing in ("patch nodes/status", "patch nodes", "create events"):
        server.role = {"get nodes", "patch nodes", "patch nodes/status", "create events"} - {missing}
        server.add_node("node-1")
        server.api.delete_collection(EVENTS, Selection())
        request = len(server.log.requests)
        async with reporting() as reporter:
            reporter.on_snapshot(snapshot(BAD))
            await server.until(
                lambda missing=missing, request=request: (  # type: ignore[misc]
                    any(each.operation == missing for each in server.log.requests[request:])
                    and (missing == "patch nodes/status" or status(server)[0] == "False")
                    and (missing == "patch nodes" or counts(server).get("quarantined") == "1")
                    and (missing == "create events" or len(server.events) == 1)
                )
            )


async def test_current_state_and_not_the_missed_changes_is_written_after_an_outage(
    server: PluginApiServer, reporting: Callable[..., Any], diary: Diary
) -> None:
    async with reporting() as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True" and bool(counts(server)))
        await server.stop()
        for number in range(1000):
            reporter.on_snapshot(snapshot(BAD if number % 2 else GOOD, device(1)))
            await asyncio.sleep(0)
        await diary.bell.until(lambda: bool(diary.logged("cluster.write-failed", kind="condition")))
        reporter.on_snapshot(snapshot(GOOD, device(1, advertised=False, state="condemned", refusal="It is condemned.")))
        server.intercept = lambda request: failure(503, "ServiceUnavailable")
        await server.start()
        before = len(server.log.requests)
        await server.until(lambda: len(server.log.requests) >= before + 4)  # every change was attempted, none written
        server.intercept = lambda request: None
        before = len(server.log.requests)
        await server.until(lambda: status(server)[0] == "False" and len(server.events) == 1)
        await server.until(lambda: counts(server) == {"clean": "1", "dirty": "0", "quarantined": "1"})
        assert reasons(server) == [("node-1", "GpuCondemned", 1)]
        assert len(server.log.requests) - before <= 8
        await diary.bell.until(lambda: bool(diary.logged("cluster.write-succeeded", kind="condition")))


async def test_removed_labels_are_restored(server: PluginApiServer, reporting: Callable[..., Any]) -> None:
    async with reporting(replace(QUICK, writers=replace(QUICK.writers, heartbeat=0.01))) as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: bool(counts(server)))
        server.set_labels("node-1", dict.fromkeys(server.labels("node-1")))
        await server.until(lambda: counts(server) == {"clean": "1", "dirty": "0", "quarantined": "0"})


async def test_failing_api_server_is_not_called_again_for_a_while(
    server: PluginApiServer, reporting: Callable[..., Any], tmp_path: Path
) -> None:
    server.intercept = lambda request: failure(500, "InternalError") if request.account == "plugin" else None
    async with reporting(replace(QUICK, shutdown=0.05, backoff=BackoffTimes(first=60, max=60))) as reporter:
        reporter.on_snapshot(snapshot(BAD))
        await server.until(lambda: len(server.log.requests) == 3)  # the condition, the labels, the event
        server.add_account(Account("other"), "mine")
        (tmp_path / "other").mkdir()
        other = ApiServerClient(kubeconfig(tmp_path / "other", server.url, token="mine"), "node-1", deadline=20)
        for number in range(30):  # long enough, by the server's own clock, for a hundred more
            reporter.on_snapshot(snapshot(BAD if number % 2 else GOOD))
            await other.get_node()
        await other.close()
    assert [each.operation for each in server.log.requests if each.account == "plugin"] == [
        *("get nodes", "patch nodes", "create events")
    ]


async def test_occasional_failures_do_not_lengthen_the_backoff(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    odd = [True]

    def fault(request: ApiRequest) -> Answer | None:
        if request.operation != "patch nodes/status":
            return None
        odd[0] = not odd[0]
        return failure(503, "ServiceUnavailable") if odd[0] else None

    server.intercept = fault
    async with reporting(replace(QUICK, backoff=BackoffTimes(first=0.01, max=DEADLINE * 100))) as reporter:
        for number in range(14):  # doubled each time, the last pause would exceed the test's timeout
            reporter.on_snapshot(snapshot(BAD if number % 2 else GOOD))
            await server.until(lambda number=number: status(server)[0] == str(number % 2 == 0))  # type: ignore[misc]


async def test_unresponsive_api_server_blocks_no_snapshot_and_queues_no_requests(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    server.intercept = lambda request: Silence.HANG
    async with asyncio.timeout(DEADLINE), reporting(replace(QUICK, shutdown=0.05)) as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: bool(server.log.requests))
        for _ in range(10_000):
            reporter.on_snapshot(snapshot(BAD))
    assert len(server.log.requests) == 1  # one request at a time, and none is queued to be sent later


async def test_final_condition_write_is_cut_short_if_the_api_server_does_not_answer(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    async with asyncio.timeout(DEADLINE), reporting(replace(QUICK, shutdown=0.05)) as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True" and bool(counts(server)))
        server.intercept = lambda request: Silence.HANG
    assert status(server)[0] == "True"


async def test_burst_of_changes_does_not_cause_a_burst_of_writes(
    server: PluginApiServer, reporting: Callable[..., Any]
) -> None:
    times = replace(QUICK, writers=WriterTimes(), events=EventDiffTimes())
    async with reporting(times) as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await server.until(lambda: status(server)[0] == "True" and bool(counts(server)))
        for number in range(200):
            reporter.on_snapshot(snapshot(BAD if number % 2 else GOOD))
            await asyncio.sleep(0)
        reporter.on_snapshot(snapshot(BAD, with_index(1)))
        await server.until(lambda: len(server.events) >= 1)
    writes = [each.operation for each in server.log.requests if each.operation not in ("get nodes", "create events")]
    assert writes.count("patch nodes") == 1
    assert writes.count("patch nodes/status") == 2  # the first write and the last
    assert len(server.events) <= 2


def with_index(number: int) -> pb.SnapshotDevice:
    return device(number, state="dirty")


# --- internal errors -------------------------------------------------------------------------------------------------


class Stumbling:
    """A cluster client that fails once with an unexpected error."""

    def __init__(self, behind: ApiServerClient) -> None:
        self._behind = behind
        self._stumbled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    async def patch_condition(self, condition: NodeCondition, *, since: datetime, now: datetime) -> ClusterNode:
        if not self._stumbled:
            self._stumbled = True
            raise ZeroDivisionError("an unexpected error")
        return await self._behind.patch_condition(condition, since=since, now=now)


async def test_unexpected_error_is_logged_and_the_reporter_restarts(
    server: PluginApiServer, reporting: Callable[..., Any], diary: Diary, tmp_path: Path
) -> None:
    behind = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=20)
    async with reporting(connect=lambda: Stumbling(behind)) as reporter:
        reporter.on_snapshot(snapshot(BAD))
        await server.until(lambda: status(server)[0] == "False" and len(server.events) == 1)
    (line,) = diary.logged("cluster.failed")
    assert "an unexpected error" in repr(line["exc_info"])
    assert reasons(server) == [("node-1", "GpuOutOfService", 1)]


async def test_client_that_cannot_be_imported_is_logged(reporting: Callable[..., Any], diary: Diary) -> None:
    def missing() -> ClosableClusterApi:
        raise ImportError("No module named 'lightkube'")

    async with reporting(connect=missing) as reporter:
        reporter.on_snapshot(snapshot(GOOD))
        await diary.bell.until(lambda: len(diary.logged("cluster.failed")) >= 2)
