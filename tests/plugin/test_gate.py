"""The gate: ask the service, then answer. In virtual time: what it waits for is over by the clock alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from plugin.announcements import Announcements
from plugin.devices import AdvertisedDevices
from plugin.gate import ABSENT, OTHERWISE, Gate, GateTimes
from plugin.logs import logger
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import (
    Away,
    Held,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    Quarantined,
    ScrubberError,
)
from scrubber.domain.policy import LONGEST_HAND_OVER
from scrubber.ports.runtime import Span
from tests.world.spans import Recorder, Told
from tests.world.timeline import in_virtual_time

GPU = "vendor.example/gpu"
MEANINGS = {"a": "gpu-a", "b": "gpu-b", "c": "gpu-c"}
QUICK = GateTimes(absent=0.1, retry=0.01, reserve=0.1)
UNTOLD: Span = Told("", {})
"""A span that nobody looks at."""
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
class Asked:
    devices: list[str]
    wait: float
    unseen: list[str]
    timeout: float
    resource: str


@dataclass
class Service:
    """Answers hand-overs and reservations as told; the last of the answers is repeated."""

    answers: list[Answer] = field(default_factory=lambda: [granted])
    reservation: Answer = granted
    announcement: Answer = granted
    asked: list[Asked] = field(default_factory=list)
    reserved: list[tuple[str, list[str]]] = field(default_factory=list)
    announced: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    meanings: dict[str, str] = field(default_factory=dict)

    async def snapshot(self, timeout: float) -> pb.Snapshot:
        raise AssertionError("the gate looks at the advertised")

    def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]:
        raise AssertionError("the gate looks at the advertised")

    async def announce(self, resource: str, offers: Mapping[str, str], timeout: float) -> pb.AnnounceResponse:
        self.announced.append((resource, dict(offers)))
        await self.announcement()
        self.meanings = dict(offers)
        return pb.AnnounceResponse()

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
        self.asked.append(Asked(list(device_ids), wait_seconds, list(reserved_unseen), timeout, resource))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await answer()
        devices = sorted({self.meanings.get(id_, id_) for id_ in device_ids})
        return pb.HandOverResponse(devices=[pb.GrantedDevice(id=device, path="fast") for device in devices])


async def gate(
    service: Service, times: GateTimes = QUICK, epoch: str = "one", **more: Any
) -> tuple[Gate, AdvertisedDevices]:
    advertised = AdvertisedDevices()
    await advertised.show((), epoch)
    log = logger("json", "error")
    announcements = Announcements(service, log=log)
    await announcements.announce(GPU, MEANINGS, epoch)
    clock = asyncio.get_running_loop().time
    return Gate(service, advertised, announcements, times=times, log=log, clock=clock, **more), advertised


@in_virtual_time
async def test_the_service_is_asked_to_wait_less_than_the_kubelet_does() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.hand_over(["a", "b"], GPU, 30.0, UNTOLD)
    (asked,) = service.asked
    assert asked.devices == ["a", "b"]
    assert asked.wait < asked.timeout <= 25.0
    assert asked.wait == pytest.approx(24.5, abs=0.4)


def test_gate_waits_as_long_as_a_policy_may_allow() -> None:
    assert GateTimes().hand_over == LONGEST_HAND_OVER


@pytest.mark.parametrize(("deadline", "most"), [(3.0, 2.5), (9.2e18, 25.0)])
@in_virtual_time
async def test_a_shorter_deadline_is_kept_and_none_is_no_longer_than_ours(deadline: float, most: float) -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], GPU, deadline, UNTOLD)
    assert 0.8 * most < service.asked[0].wait < service.asked[0].timeout <= most


@in_virtual_time
async def test_an_absent_service_refuses_the_start_with_a_sentence_for_the_pod() -> None:
    service = Service(answers=[refused(Away("nobody answers on /run/scrubber/plugin/plugin.sock"))])
    keeper, _ = await gate(service)
    with pytest.raises(Away, match="nobody answers") as caught:
        await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert caught.value.public == ABSENT
    assert len(service.asked) > 1


@in_virtual_time
async def test_a_service_that_is_back_in_time_is_asked_again_and_the_start_goes_on() -> None:
    away = refused(Away("restarting"))
    service = Service(answers=[away, away, granted])
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert len(service.asked) == 3


@in_virtual_time
async def test_a_service_that_dies_during_a_scrub_is_waited_for_anew() -> None:
    async def scrubbed_for_longer_than_an_absence_may_last() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * QUICK.absent):
                await forever()
        raise Away("killed")

    service = Service(answers=[scrubbed_for_longer_than_an_absence_may_last, refused(Away("not back yet")), granted])
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert len(service.asked) == 3
    assert service.asked[2].timeout < service.asked[0].timeout


@in_virtual_time
async def test_a_service_that_comes_and_goes_cannot_keep_a_start_beyond_its_deadline() -> None:
    service = Service(answers=[refused(Away("away"))])
    keeper, _ = await gate(service, GateTimes(absent=60.0, retry=0.01))
    with pytest.raises(Away) as caught:
        await keeper.hand_over(["a"], GPU, 0.12, UNTOLD)
    assert caught.value.public == ABSENT


@pytest.mark.parametrize(
    "error",
    [
        NotReady("scrub 7 is under way", public="Device a is being scrubbed (scrub 7)."),
        Quarantined("double-bit errors", public="Device a is quarantined."),
        Held("pid 7 of pod x/y holds it", public="Device a is still held."),
        LedgerFailure("disk full", public="The scrub service cannot record hand-overs."),
    ],
)
@in_virtual_time
async def test_what_the_service_refuses_is_refused_at_once_and_unchanged(error: ScrubberError) -> None:
    service = Service(answers=[refused(error)])
    keeper, _ = await gate(service)
    with pytest.raises(type(error)) as caught:
        await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert caught.value is error
    assert len(service.asked) == 1


@in_virtual_time
async def test_a_start_that_the_kubelet_gives_up_is_no_longer_waited_for() -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def scrubbing() -> None:
        waiting.set()
        try:
            await forever()
        finally:
            ended.set()

    keeper, _ = await gate(Service(answers=[scrubbing]))
    start = asyncio.create_task(keeper.hand_over(["a"], GPU, 30.0, UNTOLD))
    async with asyncio.timeout(5):
        await waiting.wait()
        start.cancel()
        await ended.wait()


@in_virtual_time
async def test_an_allocation_that_the_service_was_told_of_is_not_unseen() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.reserve(["a"], GPU, UNTOLD)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert service.asked[0].unseen == []


@pytest.mark.parametrize("problem", [refused(Away("away")), refused(LedgerFailure("disk full")), forever])
@in_virtual_time
async def test_an_allocation_that_the_service_could_not_be_told_of_is_named_at_the_next_start_only(
    problem: Answer,
) -> None:
    service = Service(reservation=problem)
    keeper, _ = await gate(service)
    await keeper.reserve(["a", "b"], GPU, UNTOLD)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    await keeper.hand_over(["b", "c"], GPU, 30.0, UNTOLD)
    assert [asked.unseen for asked in service.asked] == [["a"], [], ["b"]]


@in_virtual_time
async def test_an_unseen_allocation_stays_unseen_until_a_start_was_granted() -> None:
    service = Service(answers=[refused(NotReady("busy")), granted], reservation=refused(Away("away")))
    keeper, _ = await gate(service)
    await keeper.reserve(["a"], GPU, UNTOLD)
    with pytest.raises(NotReady):
        await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert [asked.unseen for asked in service.asked] == [["a"], ["a"]]


@in_virtual_time
async def test_what_one_run_of_the_service_was_told_the_next_one_has_not_seen() -> None:
    service = Service()
    keeper, advertised = await gate(service, epoch="one")
    await keeper.reserve(["a"], GPU, UNTOLD)
    await advertised.show((), "two")
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert service.asked[0].unseen == ["a"]


@in_virtual_time
async def test_an_allocation_during_a_start_belongs_to_the_next_start() -> None:
    service = Service(reservation=refused(Away("away")))
    keeper, _ = await gate(service)

    async def allocated_meanwhile() -> None:
        await keeper.reserve(["a"], GPU, UNTOLD)

    service.answers = [allocated_meanwhile, granted]
    await keeper.reserve(["a"], GPU, UNTOLD)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert [asked.unseen for asked in service.asked] == [["a"], ["a"]]


@pytest.mark.parametrize("error", [InvalidRequest("no device is called a"), Quarantined("out of service")])
@in_virtual_time
async def test_only_what_no_retry_would_mend_refuses_an_allocation(error: ScrubberError) -> None:
    keeper, _ = await gate(Service(reservation=refused(error)))
    with pytest.raises(type(error)):
        await keeper.reserve(["a"], GPU, UNTOLD)


# -- what is told of it as a trace ----------------------------------------------------------------------------------------


async def allocated(keeper: Gate, recorder: Recorder, *ids: str) -> None:
    with recorder.span("Allocate") as span:
        await keeper.reserve(ids, GPU, span)


async def started(keeper: Gate, recorder: Recorder, *ids: str) -> None:
    with recorder.span("PreStartContainer") as span:
        await keeper.hand_over(ids, GPU, 30.0, span)


def here(recorder: Recorder) -> Callable[[], str]:
    """A span is called by its number in the order of roots."""
    return lambda: f"span-{len(recorder.roots)}"


def follows(recorder: Recorder) -> list[object]:
    """Which allocation each start is said to follow."""
    return [each.attributes.get("follows") for each in recorder.find("PreStartContainer")]


@in_virtual_time
async def test_a_start_follows_the_allocation_of_its_devices_and_a_restart_follows_none() -> None:
    recorder = Recorder()
    keeper, _ = await gate(Service(answers=[refused(NotReady("busy")), granted]), here=here(recorder))
    await allocated(keeper, recorder, "a", "b")
    with pytest.raises(NotReady):
        await started(keeper, recorder, "a")
    await started(keeper, recorder, "a", "b")
    await started(keeper, recorder, "a", "b")
    assert follows(recorder) == ["span-1", "span-1", None]


@in_virtual_time
async def test_a_start_of_devices_that_were_not_allocated_together_follows_nothing() -> None:
    recorder = Recorder()
    keeper, _ = await gate(Service(), here=here(recorder))
    await allocated(keeper, recorder, "a")
    await allocated(keeper, recorder, "b")
    await started(keeper, recorder, "a", "b")
    await allocated(keeper, recorder, "a")
    await started(keeper, recorder, "a", "c")
    assert follows(recorder) == [None, None]


@in_virtual_time
async def test_an_allocation_that_the_service_could_not_be_told_of_says_so() -> None:
    recorder = Recorder()
    keeper, _ = await gate(Service(reservation=refused(Away("away"))), here=here(recorder))
    await allocated(keeper, recorder, "a")
    assert recorder.roots[0].attributes["told"] is False
    assert recorder.roots[0].ended == ""


# -- ids that only an announcement explains ------------------------------------------------------------------------------


@in_virtual_time
async def test_the_service_is_asked_by_the_kubelets_ids_and_the_resource_they_are_of() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.reserve(["a"], GPU, UNTOLD)
    await keeper.hand_over(["a", "b"], GPU, 30.0, UNTOLD)
    assert service.reserved == [(GPU, ["a"])]
    assert [(asked.resource, asked.devices) for asked in service.asked] == [(GPU, ["a", "b"])]


@in_virtual_time
async def test_an_allocation_of_one_resource_is_none_of_anothers_id_of_the_same_name() -> None:
    service = Service(reservation=refused(Away("away")))
    keeper, _ = await gate(service)
    await keeper.reserve(["0"], GPU, UNTOLD)
    await keeper.hand_over(["0"], "vendor.example/nic", 30.0, UNTOLD)
    await keeper.hand_over(["0"], GPU, 30.0, UNTOLD)
    assert [asked.unseen for asked in service.asked] == [[], ["0"]]


def unknown_until_told(service: Service) -> Answer:
    """What a service answers that was started anew and has heard nothing of the ids yet."""
    before = len(service.announced)

    async def answer() -> None:
        if len(service.announced) == before:
            raise InvalidRequest("There is no device a here.")

    return answer


@in_virtual_time
async def test_a_service_that_was_started_anew_is_told_again_before_an_allocation_fails_for_it() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.reservation = unknown_until_told(service)
    await keeper.reserve(["a"], GPU, UNTOLD)
    assert service.announced == [(GPU, MEANINGS)] * 2
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert service.asked[0].unseen == [], "it was told of the allocation in the end"


@in_virtual_time
async def test_a_service_that_was_started_anew_is_told_again_before_a_start_is_refused_for_it() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.answers = [unknown_until_told(service)]
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert (len(service.announced), len(service.asked)) == (2, 2)


@in_virtual_time
async def test_what_the_service_does_not_know_when_it_was_told_again_is_refused() -> None:
    service = Service(answers=[refused(InvalidRequest("There is no device a here."))])
    keeper, _ = await gate(service)
    with pytest.raises(InvalidRequest, match="no device a"):
        await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert (len(service.announced), len(service.asked)) == (2, 2)


@in_virtual_time
async def test_a_start_is_let_through_for_the_devices_that_the_container_has_and_no_others() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.meanings = {**MEANINGS, "a": "gpu-b"}
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert service.announced == [(GPU, MEANINGS)] * 2
    assert len(service.asked) == 2


@in_virtual_time
async def test_a_service_that_takes_an_id_for_another_device_whatever_it_is_told_lets_nobody_start() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.meanings = {**MEANINGS, "a": "gpu-b"}
    service.announcement = refused(Away("away"))
    with pytest.raises(NotReady, match="takes the ids of these devices for others") as refusal:
        await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert refusal.value.public == OTHERWISE


@in_virtual_time
async def test_what_the_service_could_not_be_told_of_a_list_it_is_told_before_it_is_asked() -> None:
    service = Service(announcement=refused(Away("away")))
    keeper, _ = await gate(service)
    service.announcement = granted
    await keeper.hand_over(["a"], GPU, 30.0, UNTOLD)
    assert (len(service.announced), len(service.asked)) == (2, 1)


@in_virtual_time
async def test_a_share_that_is_on_no_list_any_more_is_its_device() -> None:
    service = Service()
    keeper, _ = await gate(service)
    service.meanings["gpu-b::7"] = "gpu-b"
    await keeper.hand_over(["gpu-b::7"], GPU, 30.0, UNTOLD)
    assert len(service.asked) == 1
