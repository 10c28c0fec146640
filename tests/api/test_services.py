"""The three services through their real sockets and clients: requests and answers arrive completely."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc as pb2_grpc
from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.api.server import MAX_CALLS, serve
from scrubber.api.sockets import Sockets
from scrubber.domain import errors, evidence
from scrubber.domain.assignment import Pod
from scrubber.domain.errors import DeviceBusy, InvalidRequest, NotReady, Quarantined, ScrubberError, Unavailable
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from scrubber.engine.views import HandOverCall, PodNotice
from scrubber.ports.record import HistoryQuery
from tests.api.service import CERTIFICATE, FakeNode

DEADLINE = 30.0


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s"), grace=0):
        yield node


@pytest.fixture
async def plugin(node: FakeNode, short_tmp: Path) -> AsyncIterator[PluginClient]:
    async with PluginClient(short_tmp / "s") as client:
        yield client


@pytest.fixture
async def read(node: FakeNode, short_tmp: Path) -> AsyncIterator[ReadClient]:
    async with ReadClient(short_tmp / "s") as client:
        yield client


@pytest.fixture
async def admin(node: FakeNode, short_tmp: Path) -> AsyncIterator[AdminClient]:
    async with AdminClient(short_tmp / "s") as client:
        yield client


# -- the plugin's socket -----------------------------------------------------------------------------------------------


async def test_snapshot_is_the_current_state(node: FakeNode, plugin: PluginClient) -> None:
    current = await plugin.snapshot(DEADLINE)
    assert (current.version, current.ready, current.epoch) == (1, True, "epoch-1")
    assert [each.id for each in current.devices] == ["GPU-a0", "GPU-a1"]


async def test_watcher_receives_the_current_state_and_then_every_relevant_change(
    node: FakeNode, plugin: PluginClient, read: ReadClient
) -> None:
    async with (
        asyncio.timeout(DEADLINE),
        aclosing(plugin.watch_snapshots()) as snapshots,
        aclosing(read.watch_devices()) as lists,
    ):
        assert (await anext(snapshots)).version == (await anext(lists)).version == 1
        unseen = await node.show(d0=replace(node.record(0), rests_on="cert-0"))
        assert (await anext(lists)).version == unseen, "operators see every change"
        version = await node.show(d0=replace(node.record(0), hygiene=Hygiene.CLEAN, certificate=CERTIFICATE))
        received = await anext(snapshots)
    assert received.version == version, "the change before does not concern the plugin"
    assert [each.certified for each in received.devices] == [True, False]


async def test_quarantined_device_is_not_advertised(node: FakeNode, plugin: PluginClient) -> None:
    cause = Cause("xid-95", "PID 7 of team-a saw it.", RecoveryMethod.RESET, 900.0)
    async with asyncio.timeout(DEADLINE), aclosing(plugin.watch_snapshots()) as snapshots:
        await anext(snapshots)
        await node.show(d1=replace(node.record(1), health=Health.QUARANTINED, cause=cause))
        _, sick = (await anext(snapshots)).devices
    assert (sick.advertised, sick.state) == (False, "quarantined")
    assert "xid-95" in sick.refusal
    assert "team-a" not in str(sick)


async def test_pod_notice_reaches_the_plugin_at_once(node: FakeNode, plugin: PluginClient) -> None:
    notice = PodNotice(
        Pod("team-a", "train", "uid-1"), ("GPU-a0",), "GpuHandOverRefused", "GPU-a0 is being scrubbed.", 900.0, True
    )
    async with asyncio.timeout(DEADLINE), aclosing(plugin.watch_snapshots()) as snapshots:
        assert list((await anext(snapshots)).notices) == []
        await node.show(notices=(notice,))
        assert [each.name for each in (await anext(snapshots)).notices] == ["train"]
        await node.show(notices=())
        assert list((await anext(snapshots)).notices) == []


async def test_any_number_of_watchers_receive_the_same_snapshots(node: FakeNode, plugin: PluginClient) -> None:
    async def until_not_ready() -> int:
        async with aclosing(plugin.watch_snapshots()) as snapshots:
            async for each in snapshots:
                watching.release()
                if not each.ready:
                    return each.version
        raise AssertionError("the stream ended")

    watching = asyncio.Semaphore(0)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        watchers = [group.create_task(until_not_ready()) for _ in range(20)]
        for _ in watchers:
            await watching.acquire()
        version = await node.show(ready=False)
    assert {each.result() for each in watchers} == {version}


async def test_device_list_is_not_ready_before_every_device_was_checked(
    node: FakeNode, read: ReadClient, admin: AdminClient
) -> None:
    """An empty list would mean that the node has no devices, and an unknown name that there is no such device."""
    await node.show(ready=False)
    with pytest.raises(NotReady, match="has not inspected every device yet"):
        await read.devices()
    with pytest.raises(NotReady, match="has not inspected every device yet"):
        await anext(read.watch_devices())
    with pytest.raises(NotReady, match="has not inspected every device yet"):
        await admin.quarantine("GPU-a0", "it looks odd")
    assert node.requests == []
    await read.history()  # the audit is available before the devices are
    await node.show(ready=True)
    assert len((await read.devices()).devices) == 2


async def test_calls_of_one_connection_beyond_the_limit_wait_and_delay_no_other_connection(
    short_tmp: Path, read: ReadClient
) -> None:
    streams = [read.watch_devices() for _ in range(MAX_CALLS + 1)]
    opened = {asyncio.ensure_future(anext(each)): each for each in streams}
    waiting = set(opened)
    async with asyncio.timeout(DEADLINE):
        while len(waiting) > 1:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        own_connection = [("grpc.use_local_subchannel_pool", 1)]  # otherwise channels of a process share one
        async with grpc.aio.insecure_channel(f"unix:{short_tmp}/s/read/read.sock", options=own_connection) as other:
            assert (await pb2_grpc.ReadStub(other).ListDevices(pb.ListDevicesRequest())).devices
        (last,) = waiting
        assert not last.done()
        for task, stream in opened.items():
            if task is not last:
                await stream.aclose()
        assert (await last).devices
        await opened[last].aclose()


async def test_slow_watcher_skips_versions_and_ends_at_the_newest(node: FakeNode, read: ReadClient) -> None:
    async with asyncio.timeout(DEADLINE), aclosing(read.watch_devices()) as lists:
        await anext(lists)
        newest = [await node.show() for _ in range(5000)][-1]
        seen = [each.version async for each in _until(lists, newest)]
    assert seen == sorted(set(seen))
    assert seen[-1] == newest
    assert len(seen) < 5000


async def test_reservation_reaches_the_engine(node: FakeNode, plugin: PluginClient) -> None:
    answer = await plugin.reserve(["GPU-a1"], DEADLINE)
    assert list(answer.scrubs_started) == ["scrub-GPU-a1"]
    assert node.requests == [("reserve", "GPU-a1")]


async def test_resource_name_and_resource_mapping_reach_the_engine(node: FakeNode, plugin: PluginClient) -> None:
    await plugin.announce("vendor.dev/gpu", {"0": "GPU-a0", "1": "GPU-a1"}, DEADLINE)
    await plugin.reserve(["GPU-a1"], DEADLINE, resource="vendor.dev/gpu")
    await plugin.hand_over(["GPU-a0"], wait_seconds=2, resource="vendor.dev/gpu", timeout=DEADLINE)
    assert node.requests == [
        ("announce", "vendor.dev/gpu", {"0": "GPU-a0", "1": "GPU-a1"}),
        ("reserve", "vendor.dev/gpu", "GPU-a1"),
        HandOverCall(("GPU-a0",), 2.0, frozenset(), "vendor.dev/gpu"),
    ]


async def test_announcements_belong_to_the_plugin_that_follows_the_snapshots_until_it_ends(
    node: FakeNode, plugin: PluginClient, short_tmp: Path
) -> None:
    async with asyncio.timeout(DEADLINE):
        await plugin.announce("vendor.dev/gpu", {}, DEADLINE)
        async with PluginClient(short_tmp / "s") as other, aclosing(other.watch_snapshots()) as snapshots:
            await anext(snapshots)
            await other.announce("vendor.dev/gpu", {}, DEADLINE)
            await other.announce("vendor.dev/shared", {}, DEADLINE)
            without, ours, again = node.announcers
            assert without is not None
            assert ours is not None
            assert ours is again
            assert (without.is_following, ours.is_following) == (False, True)
        while ours.is_following:
            await plugin.snapshot(DEADLINE)
        assert not ours.is_gone


async def test_identity_of_a_plugin_that_is_too_long_is_refused(node: FakeNode, plugin: PluginClient) -> None:
    plugin._identity = "x" * 1000
    with pytest.raises(InvalidRequest, match="identity"):
        await plugin.announce("vendor.dev/gpu", {}, DEADLINE)
    assert node.requests == []


async def test_hand_over_reaches_the_engine_and_returns_its_grants(node: FakeNode, plugin: PluginClient) -> None:
    answer = await plugin.hand_over(
        ["GPU-a0", "GPU-a1"], wait_seconds=2.5, reserved_unseen=["GPU-a1"], timeout=DEADLINE
    )
    assert node.requests == [HandOverCall(("GPU-a0", "GPU-a1"), 2.5, frozenset({"GPU-a1"}))]
    assert [(each.id, each.grant, each.path, each.certificate_id, each.hand_over_kind) for each in answer.devices] == [
        ("GPU-a0", 1, "slow", "cert-1", "other-tenant"),
        ("GPU-a1", 2, "slow", "cert-1", "other-tenant"),
    ]
    assert 0 <= answer.duration_seconds < DEADLINE


async def test_cancelled_caller_cancels_the_wait_in_the_engine(node: FakeNode, plugin: PluginClient) -> None:
    node.busy.clear()
    call = asyncio.create_task(plugin.hand_over(["GPU-a0"], wait_seconds=25, timeout=30))
    async with asyncio.timeout(DEADLINE):
        await node.waiting.wait()
        call.cancel()
        await node.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_service_that_does_not_answer_in_time_counts_as_unavailable(node: FakeNode, plugin: PluginClient) -> None:
    node.busy.clear()
    async with asyncio.timeout(DEADLINE):
        seconds = 0.1
        while not node.waiting.is_set():  # on a stalled machine, the timeout expired before the engine got the request
            with pytest.raises(Unavailable, match="did not answer in time") as refused:
                await plugin.hand_over(["GPU-a0"], wait_seconds=25, timeout=seconds)
            assert refused.value.public_message == "The scrub service on this node does not answer."
            seconds *= 2
        await node.cancelled.wait()


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__])
async def test_refusal_to_a_tenant_keeps_its_class_and_names_no_other_tenant(
    kind: type[ScrubberError], node: FakeNode, plugin: PluginClient
) -> None:
    node.failure = kind("team-a/trainer holds GPU-a0.", public_message="GPU-a0 is held.", code="a-code")
    with pytest.raises(kind) as refused:
        await plugin.hand_over(["GPU-a0"], wait_seconds=1, timeout=DEADLINE)
    assert type(refused.value) is kind
    assert (str(refused.value), refused.value.public_message, refused.value.code) == (
        "GPU-a0 is held.",
        "GPU-a0 is held.",
        "a-code",
    )


async def test_refusal_without_a_public_message_refers_to_the_service_log(node: FakeNode, plugin: PluginClient) -> None:
    node.failure = Quarantined("team-a/trainer broke GPU-a0.")
    with pytest.raises(Quarantined) as refused:
        await plugin.reserve(["GPU-a0"], DEADLINE)
    assert refused.value.public_message == "The scrub service refused the request; see its log on the node."


async def test_impossible_wait_time_never_reaches_the_engine(node: FakeNode, plugin: PluginClient) -> None:
    with pytest.raises(InvalidRequest):
        await plugin.hand_over(["GPU-a0"], wait_seconds=-1, timeout=DEADLINE)
    assert node.requests == []


# -- the read socket ---------------------------------------------------------------------------------------------------


async def test_devices_are_listed(node: FakeNode, read: ReadClient) -> None:
    await node.show(d0=replace(node.record(0), hygiene=Hygiene.CLEAN, certificate=CERTIFICATE))
    listed = await read.devices()
    assert [(each.id, each.state) for each in listed.devices] == [("GPU-a0", "clean"), ("GPU-a1", "dirty")]
    assert listed.devices[0].certificate.id == "cert-1"


async def test_service_info_reports_version_and_ledger_health(node: FakeNode, read: ReadClient) -> None:
    node.ledger = "The disk is full."
    info = await read.service_info()
    assert (info.node_name, info.boot_id, info.driver_version, info.backend) == ("node-1", "boot-1", "sim-1", "sim")
    assert (info.policy, info.policy_digest, info.enforcement) == ("default", "d1", "enforce")
    assert (info.ledger_status, info.epoch) == ("The disk is full.", "epoch-1")


async def test_open_breaker_is_reported_in_the_service_info(node: FakeNode, read: ReadClient) -> None:
    assert (await read.service_info()).breaker == pb.Breaker()
    node.breaker = BreakerState(
        resets_stopped_reason="8 resets in an hour.",
        resets_stopped_until=1234.5,
        soft_signals_stopped_reason="2 of 8 are out.",
    )
    breaker = (await read.service_info()).breaker
    assert (breaker.resets_stopped_reason, breaker.resets_stopped_until, breaker.soft_quarantines_stopped_reason) == (
        "8 resets in an hour.",
        1234.5,
        "2 of 8 are out.",
    )


async def test_history_is_the_audit_log_newest_first(node: FakeNode, read: ReadClient) -> None:
    node.remember("handover.granted", "GPU-a0", seconds=0.5)
    node.remember("scrub.finished", "GPU-a1")
    response = await read.history()
    assert [(each.sequence, each.event, each.device_id) for each in response.entries] == [
        (2, "scrub.finished", "GPU-a1"),
        (1, "handover.granted", "GPU-a0"),
    ]
    assert response.entries[1].fields_json == '{"seconds": 0.5}'


@pytest.mark.parametrize("name", ["GPU-a1", "1"])
async def test_history_of_a_device_is_found_by_any_of_its_names(name: str, node: FakeNode, read: ReadClient) -> None:
    await read.history(name, since=900.0, limit=5)
    assert node.requests == [HistoryQuery("GPU-a1", 900.0, 6)], "one more, to know whether there is"


async def test_history_of_a_removed_device_is_found_by_its_id(node: FakeNode, read: ReadClient) -> None:
    node.remember("health.quarantined", "GPU-gone")
    assert len((await read.history("GPU-gone")).entries) == 1


async def test_history_of_an_unknown_device_is_an_error(node: FakeNode, read: ReadClient) -> None:
    with pytest.raises(InvalidRequest, match="No device matches 'GPU-x'"):
        await read.history("GPU-x")


@pytest.mark.parametrize("since", [float("nan"), float("inf")])
async def test_history_since_a_non_finite_time_is_refused(since: float, node: FakeNode, read: ReadClient) -> None:
    with pytest.raises(InvalidRequest, match="seconds since the epoch"):
        await read.history(since=since)


def sequences(response: pb.GetHistoryResponse) -> list[int]:
    return [each.sequence for each in response.entries]


def happen(node: FakeNode, many: int, device: str = "GPU-a0", **fields: str) -> None:
    for _ in range(many):
        node.remember("scrub.finished", device, **fields)


@pytest.mark.parametrize(
    ("limit", "before", "expected", "next_before"),
    [
        (2, 0, [5, 4], 4),
        (2, 4, [3, 2], 2),
        (2, 2, [1], 0),
        (2, 3, [2, 1], 0),
        (5, 0, [5, 4, 3, 2, 1], 0),
        (4, 0, [5, 4, 3, 2], 2),
        (9, 1, [], 0),
    ],
)
async def test_history_page_names_the_start_of_the_next_page(
    limit: int, before: int, expected: list[int], next_before: int, node: FakeNode, read: ReadClient
) -> None:
    happen(node, 5)
    page = await read.history(limit=limit, before=before)
    assert (sequences(page), page.next_before_sequence) == (expected, next_before)


async def test_client_fetches_as_many_bounded_pages_as_requested(node: FakeNode, read: ReadClient) -> None:
    happen(node, 2300)
    assert sequences(await read.history(limit=2200)) == [*range(2300, 100, -1)]
    assert [(each.limit, each.before) for each in node.requests if isinstance(each, HistoryQuery)] == [
        (1001, None),
        (1001, 1301),
        (201, 301),
    ]
    everything = await read.history(limit=None)
    assert (len(everything.entries), everything.next_before_sequence) == (2300, 0)
    assert (await read.history(limit=1001)).next_before_sequence == 1300


async def test_history_request_for_more_than_one_page_is_refused(read: ReadClient) -> None:
    with pytest.raises(InvalidRequest, match="at most 1000 history entries"):
        await read._call(read._stub.GetHistory(pb.GetHistoryRequest(limit=1001)))


async def test_history_page_too_large_for_a_message_ends_earlier(node: FakeNode, read: ReadClient) -> None:
    happen(node, 5, why="x" * (1 << 20))
    page: pb.GetHistoryResponse = await read._call(read._stub.GetHistory(pb.GetHistoryRequest()))
    assert (sequences(page), page.next_before_sequence) == ([5, 4, 3], 3)
    assert sequences(await read.history()) == [5, 4, 3, 2, 1]


async def test_audit_row_too_large_for_a_message_is_named_with_the_option_that_omits_the_row(
    node: FakeNode, read: ReadClient
) -> None:
    happen(node, 1)
    happen(node, 1, why="x" * (5 << 20))
    with pytest.raises(InvalidRequest, match="Row 2 is too large for a response; skip it with --before 2"):
        await read.history()
    assert sequences(await read.history(before=2)) == [1]


async def test_history_query_deduplicates_events(node: FakeNode, read: ReadClient) -> None:
    node.remember("health.quarantined", "GPU-a0")
    node.remember("scrub.finished", "GPU-a0")
    node.remember("scrub.started", "GPU-a0")
    history = await read.history(events=["health.", "scrub.finished", "health."])
    assert sequences(history) == [2, 1]
    assert [each.events for each in node.requests if isinstance(each, HistoryQuery)] == [("health.", "scrub.finished")]


async def test_unknown_event_is_refused_even_beside_a_known_one(node: FakeNode, read: ReadClient) -> None:
    with pytest.raises(InvalidRequest, match=r'no event "scrub.done". Similar events: scrub.finished, scrub.started'):
        await read.history(events=["health.quarantined", "scrub.done"])
    assert node.requests == []


async def test_history_of_a_removed_device_may_be_empty_after_filtering(node: FakeNode, read: ReadClient) -> None:
    happen(node, 3, device="GPU-gone")
    assert sequences(await read.history("GPU-gone", events=["break-glass.started"])) == []


async def test_history_of_a_removed_device_is_followed_to_its_last_page(node: FakeNode, read: ReadClient) -> None:
    happen(node, 3, device="GPU-gone")
    assert sequences(await read.history("GPU-gone", limit=2)) == [3, 2]
    assert sequences(await read.history("GPU-gone", before=1)) == [], "it was there, and has nothing older"
    with pytest.raises(InvalidRequest, match="No device matches 'GPU-x'"):
        await read.history("GPU-x", before=1)


async def test_history_by_device_index_is_not_ready_while_the_service_starts(node: FakeNode, read: ReadClient) -> None:
    happen(node, 3)
    await node.show(ready=False)
    with pytest.raises(NotReady):
        await read.history("0", before=2)


# -- the admin socket --------------------------------------------------------------------------------------------------


async def test_scrub_is_followed_to_its_end(node: FakeNode, admin: AdminClient) -> None:
    updates = [each async for each in admin.scrub("1", "slow")]
    progress, result = updates[0].progress, updates[1].result
    assert [each.WhichOneof("update") for each in updates] == ["progress", "result"]
    assert (progress.step, progress.phase, progress.done_bytes, progress.total_bytes) == ("memory", "clear", 4, 8)
    assert progress.joined
    assert (result.scrub.outcome, result.certificate.id, result.device.id) == ("passed", "cert-1", "GPU-a1")


async def test_scrub_request_reaches_the_engine_with_its_actor(node: FakeNode, admin: AdminClient) -> None:
    _ = [each async for each in admin.scrub("GPU-a0", "fast")]
    assert node.requests == [("scrub", "GPU-a0", evidence.PathKind.FAST, _own_actor())]


async def test_refused_scrub_gives_the_operator_the_reason(node: FakeNode, admin: AdminClient) -> None:
    node.failure = DeviceBusy("GPU-a0 is in use by team-a/trainer.")
    with pytest.raises(DeviceBusy, match="in use by team-a/trainer"):
        await anext(admin.scrub("0", "slow"))


async def test_quarantine_and_its_release_carry_reason_and_actor(node: FakeNode, admin: AdminClient) -> None:
    answer = await admin.quarantine("0", " looks odd ")
    assert answer.device.id == "GPU-a0"
    await admin.unquarantine("GPU-a1", "looked at it")
    assert node.requests == [
        ("quarantine", "GPU-a0", "looks odd", _own_actor()),
        ("unquarantine", "GPU-a1", "looked at it", _own_actor()),
    ]


async def test_break_glass_override_has_duration_reason_and_actor(node: FakeNode, admin: AdminClient) -> None:
    broken = (await admin.break_glass("0", 1800.0, " a deadline ")).device
    assert (broken.id, broken.break_glass.expires_at, broken.break_glass.reason) == ("GPU-a0", 2800.0, "a deadline")
    assert broken.break_glass.actor == _own_actor()
    ended = (await admin.break_glass("GPU-a0", 0, "it held")).device
    assert not ended.HasField("break_glass")
    assert node.requests == [
        ("break-glass", "GPU-a0", 1800.0, "a deadline", _own_actor()),
        ("break-glass", "GPU-a0", 0.0, "it held", _own_actor()),
    ]


@pytest.mark.parametrize(
    ("device", "seconds", "reason", "why"),
    [
        ("0", math.nan, "why", "not nan"),
        ("0", math.inf, "why", "not inf"),
        ("0", -math.inf, "why", "not -inf"),
        ("0", -1.0, "why", "between 0"),
        ("0", 7 * 86400 + 1.0, "why", "604800 seconds"),
        ("0", 1e300, "why", "604800 seconds"),
        ("0", 60.0, "", "A reason is required"),
        ("0", 60.0, " \n", "A reason is required"),
        ("0", 0.0, "", "A reason is required"),
        ("0", 60.0, "x" * 501, "501 characters"),
        ("9", 60.0, "why", "this node has: 0"),
        ("", 60.0, "why", "No device"),
        ("GPU-", 60.0, "why", "use a longer one"),
    ],
)
async def test_incomplete_break_glass_request_never_reaches_the_engine(
    device: str, seconds: float, reason: str, why: str, node: FakeNode, admin: AdminClient
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await admin.break_glass(device, seconds, reason)
    assert node.requests == []


@pytest.mark.parametrize("seconds", [7 * 86400.0, 0.001])
async def test_break_glass_duration_limit_is_decided_by_the_engine(
    seconds: float, node: FakeNode, admin: AdminClient
) -> None:
    node.failure = InvalidRequest("The policy allows 4 hours.")
    with pytest.raises(InvalidRequest, match="4 hours"):
        await admin.break_glass("0", seconds, "why")
    assert len(node.requests) == 1


@pytest.mark.parametrize(("name", "why"), [("9", "this node has: 0"), ("", "No device"), ("GPU-", "use a longer one")])
async def test_ambiguous_or_unknown_device_name_is_refused(
    name: str, why: str, node: FakeNode, admin: AdminClient
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await admin.quarantine(name, "a reason")
    assert node.requests == []


async def test_unknown_scrub_path_is_refused(node: FakeNode, admin: AdminClient) -> None:
    with pytest.raises(InvalidRequest, match="the paths are: fast, slow"):
        await anext(admin.scrub("0", "thorough"))
    assert node.requests == []


# -- the clients -------------------------------------------------------------------------------------------------------


async def test_not_ready_error_states_the_operation_in_progress(node: FakeNode, plugin: PluginClient) -> None:
    node.failure = NotReady("GPU-a0 waits for team-b/old.", public_message="GPU-a0 is being scrubbed (scrub-1).")
    with pytest.raises(NotReady) as refused:
        await plugin.hand_over(["GPU-a0"], wait_seconds=1, timeout=DEADLINE)
    assert refused.value.public_message == "GPU-a0 is being scrubbed (scrub-1)."


async def test_closed_client_reconnects(node: FakeNode, plugin: PluginClient) -> None:
    await plugin.snapshot(DEADLINE)
    await plugin.close()
    assert (await plugin.snapshot(DEADLINE)).version == 1


def test_client_does_not_import_the_engine_or_a_server() -> None:
    """The command line imports it, which has to be quick, and so does the plugin, which must not import the engine."""
    program = "import sys, scrubber.api.client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "scrubber.api.client" in loaded
    heavy = ("scrubber.engine", "scrubber.ports", "scrubber.api.server", "structlog", "pydantic")
    assert [each for each in loaded if each.startswith(heavy)] == []


async def _until(lists: AsyncIterator[pb.ListDevicesResponse], version: int) -> AsyncIterator[pb.ListDevicesResponse]:
    async for each in lists:
        yield each
        if each.version == version:
            return


def _own_actor() -> str:
    return f"uid:{os.geteuid()}"
