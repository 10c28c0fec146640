"""The gate: query the service, then answer the kubelet. In virtual time, so that waits depend only on the clock."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from plugin.gate import SERVICE_AWAY, WRONG_DEVICES, Gate, GateTimes
from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import create_logger
from plugin.observers import NullObserver
from plugin.resource_mapping import ResourceMapping
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import (
    DeviceBusy,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    Quarantined,
    ScrubberError,
    Unavailable,
)
from scrubber.domain.policy import MAX_HAND_OVER_SECONDS
from scrubber.ports.runtime import Span
from tests.simulation.spans import RecordedSpan, Recorder
from tests.simulation.timeline import in_virtual_time

GPU = "vendor.example/gpu"
MEANINGS = {"a": "gpu-a", "b": "gpu-b", "c": "gpu-c"}
QUICK = GateTimes(service_away=0.1, retry=0.01, reserve=0.1)
UNTRACED: Span = RecordedSpan("", {})
"""A span that no test reads."""
Answer = Callable[[], Awaitable[None]]


async def granted() -> None:
    return


def refused(error: ScrubberError) -> Answer:
    async def refuse() -> None:
        raise error

    return refuse


async def forever() -> None:
    await asyncio.Event().wait()


@dataclass
class HandOverRequest:
    devices: list[str]
    wait: float
    unseen: list[str]
    timeout: float
    resource: str


@dataclass
class Service:
    """Answers hand-overs and reservations as the test sets; the last answer is repeated."""

    answers: list[Answer] = field(default_factory=lambda: [granted])
    reservation: Answer = granted
    announcement: Answer = granted
    requests: list[HandOverRequest] = field(default_factory=list)
    reserved: list[tuple[str, list[str]]] = field(default_factory=list)
    announced: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    meanings: dict[str, str] = field(default_factory=dict)

    async def snapshot(self, timeout: float) -> pb.Snapshot:
        raise AssertionError("the gate looks at the advertised")

    def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]:
        raise AssertionError("the gate looks at the advertised")

    async def announce(
        self, resource: str, mapping: Mapping[str, str], timeout: float
    ) -> pb.SetResourceMappingResponse:
        self.announced.append((resource, dict(mapping)))
        await self.announcement()
        self.meanings = dict(mapping)
        return pb.SetResourceMappingResponse()

    async def reserve(self, device_ids: Sequence[str], timeout: float, *, resource: str = "") -> pb.ReserveResponse:
        self.reserved.append((resource, list(device_ids)))
        await self.reservation()
        return pb.ReserveResponse()

    async def hand_over(
        self,
        device_ids: Sequence[str],
        *,
        wait_seconds: float,
        reserved_unseen: Sequence[str] = (),
        resource: str = "",
        timeout: float,
    ) -> pb.HandOverResponse:
        self.requests.append(HandOverRequest(list(device_ids), wait_seconds, list(reserved_unseen), timeout, resource))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await answer()
        devices = sorted({self.meanings.get(id_, id_) for id_ in device_ids})
        return pb.HandOverResponse(devices=[pb.GrantedDevice(id=device, path="fast") for device in devices])


async def gate(
    service: Service, times: GateTimes = QUICK, epoch: str = "one", **more: Any
) -> tuple[Gate, AdvertisedDevices]:
    advertised = AdvertisedDevices()
    await advertised.update((), epoch)
    log = more.pop("log", create_logger("json", "error"))
    announcements = ResourceMapping(service, log=log)
    await announcements.publish(GPU, MEANINGS, epoch)
    clock = asyncio.get_running_loop().time
    return Gate(service, advertised, announcements, times=times, log=log, clock=clock, **more), advertised


@in_virtual_time
async def test_service_wait_is_shorter_than_the_kubelets_timeout() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.hand_over(["a", "b"], GPU, 30.0, UNTRACED)
    (request,) = service.requests
    assert request.devices == ["a", "b"]
    assert request.wait < request.timeout <= 25.0
    assert request.wait == pytest.approx(24.5, abs=0.4)


def test_gate_waits_as_long_as_a_policy_may_allow() -> None:
    assert GateTimes().hand_over == MAX_HAND_OVER_SECONDS


@pytest.mark.parametrize(("deadline", "most"), [(3.0, 2.5), (9.2e18, 25.0)])
@in_virtual_time
async def test_shorter_deadline_of_the_kubelet_is_kept_and_a_missing_one_is_replaced(
    deadline: float, most: float
) -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], GPU, deadline, UNTRACED)
    assert 0.8 * most < service.requests[0].wait < service.requests[0].timeout <= most


@in_virtual_time
async def test_start_without_a_service_is_refused_with_a_public_message() -> None:
    service = Service(answers=[refused(Unavailable("no answer on /run/scrubber/plugin/plugin.sock"))])
    keeper, _ = await gate(service)
    with pytest.raises(Unavailable, match="no answer on") as caught:
        await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert caught.value.public_message == SERVICE_AWAY
    assert len(service.requests) > 1


@in_virtual_time
async def test_start_continues_when_the_service_returns_in_time() -> None:
    away = refused(Unavailable("restarting"))
    service = Service(answers=[away, away, granted])
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert len(service.requests) == 3


@in_virtual_time
async def test_service_that_dies_during_a_scrub_is_waited_for_again() -> None:
    async def scrubbed_for_longer_than_an_absence_may_last() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * QUICK.service_away):
                await forever()
        raise Unavailable("killed")

    service = Service(
        answers=[scrubbed_for_longer_than_an_absence_may_last, refused(Unavailable("not back yet")), granted]
    )
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert len(service.requests) == 3
    assert service.requests[2].timeout < service.requests[0].timeout


@in_virtual_time
async def test_unstable_service_does_not_keep_a_start_beyond_its_deadline() -> None:
    service = Service(answers=[refused(Unavailable("away"))])
    keeper, _ = await gate(service, GateTimes(service_away=60.0, retry=0.01))
    with pytest.raises(Unavailable) as caught:
        await keeper.hand_over(["a"], GPU, 0.12, UNTRACED)
    assert caught.value.public_message == SERVICE_AWAY


@pytest.mark.parametrize(
    "error",
    [
        NotReady("scrub 7 is under way", public_message="Device a is being scrubbed (scrub 7)."),
        Quarantined("double-bit errors", public_message="Device a is quarantined."),
        DeviceBusy("pid 7 of pod x/y holds it", public_message="Device a is still held."),
        LedgerFailure("disk full", public_message="The scrub service cannot record hand-overs."),
    ],
)
@in_virtual_time
async def test_refusal_of_the_service_is_returned_at_once_and_unchanged(error: ScrubberError) -> None:
    service = Service(answers=[refused(error)])
    keeper, _ = await gate(service)
    with pytest.raises(type(error)) as caught:
        await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert caught.value is error
    assert len(service.requests) == 1


@in_virtual_time
async def test_start_cancelled_by_the_kubelet_stops_waiting() -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def scrubbing() -> None:
        waiting.set()
        try:
            await forever()
        finally:
            ended.set()

    keeper, _ = await gate(Service(answers=[scrubbing]))
    start = asyncio.create_task(keeper.hand_over(["a"], GPU, 30.0, UNTRACED))
    async with asyncio.timeout(5):
        await waiting.wait()
        start.cancel()
        await ended.wait()


@in_virtual_time
async def test_reserved_allocation_is_not_reported_again_with_the_start() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.reserve(["a"], GPU, UNTRACED)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert service.requests[0].unseen == []


@pytest.mark.parametrize("problem", [refused(Unavailable("away")), refused(LedgerFailure("disk full")), forever])
@in_virtual_time
async def test_allocation_that_could_not_be_reserved_is_reported_with_the_next_start_only(
    problem: Answer,
) -> None:
    service = Service(reservation=problem)
    keeper, _ = await gate(service)
    await keeper.reserve(["a", "b"], GPU, UNTRACED)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    await keeper.hand_over(["b", "c"], GPU, 30.0, UNTRACED)
    assert [request.unseen for request in service.requests] == [["a"], [], ["b"]]


@in_virtual_time
async def test_unreserved_allocation_is_reported_until_a_start_was_granted() -> None:
    service = Service(answers=[refused(NotReady("busy")), granted], reservation=refused(Unavailable("away")))
    keeper, _ = await gate(service)
    await keeper.reserve(["a"], GPU, UNTRACED)
    with pytest.raises(NotReady):
        await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert [request.unseen for request in service.requests] == [["a"], ["a"]]


@in_virtual_time
async def test_allocation_reserved_at_one_service_run_is_reported_to_the_next_run() -> None:
    service = Service()
    keeper, advertised = await gate(service, epoch="one")
    await keeper.reserve(["a"], GPU, UNTRACED)
    await advertised.update((), "two")
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert service.requests[0].unseen == ["a"]


@in_virtual_time
async def test_allocation_during_a_start_is_reported_with_the_next_start() -> None:
    service = Service(reservation=refused(Unavailable("away")))
    keeper, _ = await gate(service)

    async def allocated_meanwhile() -> None:
        await keeper.reserve(["a"], GPU, UNTRACED)

    service.answers = [allocated_meanwhile, granted]
    await keeper.reserve(["a"], GPU, UNTRACED)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert [request.unseen for request in service.requests] == [["a"], ["a"]]


@pytest.mark.parametrize("error", [InvalidRequest("no device is called a"), Quarantined("out of service")])
@in_virtual_time
async def test_only_permanent_errors_refuse_an_allocation(error: ScrubberError) -> None:
    keeper, _ = await gate(Service(reservation=refused(error)))
    with pytest.raises(type(error)):
        await keeper.reserve(["a"], GPU, UNTRACED)


# -- traces ------------------------------------------------------------------------------------------------------------


async def allocated(keeper: Gate, recorder: Recorder, *ids: str) -> None:
    with recorder.span("Allocate") as span:
        await keeper.reserve(ids, GPU, span)


async def started(keeper: Gate, recorder: Recorder, *ids: str) -> None:
    with recorder.span("PreStartContainer") as span:
        await keeper.hand_over(ids, GPU, 30.0, span)


def trace_context(recorder: Recorder) -> Callable[[], str]:
    """Return a source of names for spans: their number in the order of roots."""
    return lambda: f"span-{len(recorder.roots)}"


def follows(recorder: Recorder) -> list[object]:
    """Return the allocation that each start follows."""
    return [each.attributes.get("follows") for each in recorder.find("PreStartContainer")]


@in_virtual_time
async def test_span_of_a_start_follows_the_allocation_of_its_devices_and_that_of_a_restart_follows_none() -> None:
    recorder = Recorder()
    keeper, _ = await gate(Service(answers=[refused(NotReady("busy")), granted]), trace_context=trace_context(recorder))
    await allocated(keeper, recorder, "a", "b")
    with pytest.raises(NotReady):
        await started(keeper, recorder, "a")
    await started(keeper, recorder, "a", "b")
    await started(keeper, recorder, "a", "b")
    assert follows(recorder) == ["span-1", "span-1", None]


@in_virtual_time
async def test_span_of_a_start_of_devices_not_allocated_together_follows_none() -> None:
    recorder = Recorder()
    keeper, _ = await gate(Service(), trace_context=trace_context(recorder))
    await allocated(keeper, recorder, "a")
    await allocated(keeper, recorder, "b")
    await started(keeper, recorder, "a", "b")
    await allocated(keeper, recorder, "a")
    await started(keeper, recorder, "a", "c")
    assert follows(recorder) == [None, None]


@in_virtual_time
async def test_span_of_an_allocation_that_could_not_be_reserved_is_marked() -> None:
    recorder = Recorder()
    keeper, _ = await gate(Service(reservation=refused(Unavailable("away"))), trace_context=trace_context(recorder))
    await allocated(keeper, recorder, "a")
    assert recorder.roots[0].attributes["reported"] is False
    assert recorder.roots[0].ended == ""


# -- ids that only an announcement resolves ----------------------------------------------------------------------------


@in_virtual_time
async def test_service_is_called_with_the_kubelets_ids_and_their_resource() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.reserve(["a"], GPU, UNTRACED)
    await keeper.hand_over(["a", "b"], GPU, 30.0, UNTRACED)
    assert service.reserved == [(GPU, ["a"])]
    assert [(request.resource, request.devices) for request in service.requests] == [(GPU, ["a", "b"])]


@in_virtual_time
async def test_unreserved_allocation_of_one_resource_does_not_affect_the_same_id_of_another_resource() -> None:
    service = Service(reservation=refused(Unavailable("away")))
    keeper, _ = await gate(service)
    await keeper.reserve(["0"], GPU, UNTRACED)
    await keeper.hand_over(["0"], "vendor.example/nic", 30.0, UNTRACED)
    await keeper.hand_over(["0"], GPU, 30.0, UNTRACED)
    assert [request.unseen for request in service.requests] == [[], ["0"]]


def unknown_until_announced(service: Service) -> Answer:
    """Return the answer of a restarted service that has not received the ids yet."""
    before = len(service.announced)

    async def answer() -> None:
        if len(service.announced) == before:
            raise InvalidRequest("There is no device a here.")

    return answer


@in_virtual_time
async def test_restarted_service_gets_the_resource_mapping_again_before_an_allocation_fails() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.reservation = unknown_until_announced(service)
    await keeper.reserve(["a"], GPU, UNTRACED)
    assert service.announced == [(GPU, MEANINGS)] * 2
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert service.requests[0].unseen == [], "the allocation was reported in the end"


@in_virtual_time
async def test_restarted_service_gets_the_resource_mapping_again_before_a_start_is_refused() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.answers = [unknown_until_announced(service)]
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert (len(service.announced), len(service.requests)) == (2, 2)


@in_virtual_time
async def test_id_still_unknown_after_a_repeated_announcement_is_refused() -> None:
    service = Service(answers=[refused(InvalidRequest("There is no device a here."))])
    keeper, _ = await gate(service)
    with pytest.raises(InvalidRequest, match="no device a"):
        await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert (len(service.announced), len(service.requests)) == (2, 2)


@in_virtual_time
async def test_start_with_a_mismatched_device_is_repeated_after_a_new_announcement() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.meanings = {**MEANINGS, "a": "gpu-b"}
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert service.announced == [(GPU, MEANINGS)] * 2
    assert len(service.requests) == 2


@in_virtual_time
async def test_start_is_refused_if_the_service_keeps_resolving_an_id_to_another_device() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.meanings = {**MEANINGS, "a": "gpu-b"}
    service.announcement = refused(Unavailable("away"))
    with pytest.raises(NotReady, match="maps the ids of this start to other devices") as refusal:
        await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert refusal.value.public_message == WRONG_DEVICES


@in_virtual_time
async def test_failed_announcement_is_repeated_before_a_start_is_requested() -> None:
    service = Service(announcement=refused(Unavailable("away")))
    keeper, _ = await gate(service)
    service.announcement = granted
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert (len(service.announced), len(service.requests)) == (2, 1)


@in_virtual_time
async def test_share_that_is_no_longer_listed_resolves_to_its_device() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.meanings["gpu-b::7"] = "gpu-b"
    await keeper.hand_over(["gpu-b::7"], GPU, 30.0, UNTRACED)
    assert len(service.requests) == 1


class Refusals(NullObserver):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def on_start_refused(self, code: str) -> None:
        self.codes.append(code)


@in_virtual_time
async def test_refused_start_is_counted_and_granted_start_is_logged() -> None:
    service, refusals, lines = Service(answers=[refused(NotReady("busy")), granted]), Refusals(), io.StringIO()
    keeper, _ = await gate(service, observer=refusals, log=create_logger("json", "info", lines))
    with pytest.raises(NotReady):
        await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert refusals.codes == [NotReady("busy").code]
    await keeper.hand_over(["a"], GPU, 30.0, UNTRACED)
    assert len(refusals.codes) == 1
    (line,) = [json.loads(each) for each in lines.getvalue().splitlines() if "handover.granted" in each]
    assert (line["resource"], line["devices"], line["paths"]) == (GPU, ["a"], ["fast"])


@in_virtual_time
async def test_allocation_that_the_service_does_not_answer_is_logged_with_a_reason() -> None:
    lines = io.StringIO()
    keeper, _ = await gate(Service(reservation=forever), log=create_logger("json", "info", lines))
    await keeper.reserve(["a"], GPU, UNTRACED)
    (line,) = [json.loads(each) for each in lines.getvalue().splitlines() if "allocation.unreported" in each]
    assert line["message"] == "The scrub service did not respond in time."
