"""The gate: ask the service, then answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from plugin.board import Board
from plugin.gate import ABSENT, Gate, GateTimes
from plugin.logs import logger
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import Away, Held, InvalidRequest, LedgerFailure, NotReady, Quarantined, ScrubberError

QUICK = GateTimes(absent=0.1, retry=0.01, reserve=0.1)
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


@dataclass
class Service:
    """Answers hand-overs and reservations as told; the last of the answers is repeated."""

    answers: list[Answer] = field(default_factory=lambda: [granted])
    reservation: Answer = granted
    asked: list[Asked] = field(default_factory=list)

    async def snapshot(self, timeout: float) -> pb.Snapshot:
        raise AssertionError("the gate looks at the board")

    def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]:
        raise AssertionError("the gate looks at the board")

    async def reserve(self, device_ids: Sequence[str], timeout: float) -> pb.ReserveResponse:
        await self.reservation()
        return pb.ReserveResponse()

    async def hand_over(
        self, device_ids: Sequence[str], *, wait_seconds: float, reserved_unseen: Sequence[str] = (), timeout: float
    ) -> pb.HandOverResponse:
        self.asked.append(Asked(list(device_ids), wait_seconds, list(reserved_unseen), timeout))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await answer()
        return pb.HandOverResponse()


async def gate(service: Service, times: GateTimes = QUICK, epoch: str = "one") -> tuple[Gate, Board]:
    board = Board()
    await board.show((), epoch)
    return Gate(service, board, times=times, log=logger("json", "error"), clock=time.monotonic), board


async def test_the_service_is_asked_to_wait_less_than_the_kubelet_does() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.hand_over(["a", "b"], deadline=30.0)
    (asked,) = service.asked
    assert asked.devices == ["a", "b"]
    assert asked.wait < asked.timeout <= 25.0
    assert asked.wait == pytest.approx(24.5, abs=0.4)


@pytest.mark.parametrize(("deadline", "most"), [(3.0, 2.5), (9.2e18, 25.0)])
async def test_a_shorter_deadline_is_kept_and_none_is_no_longer_than_ours(deadline: float, most: float) -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], deadline)
    assert 0.8 * most < service.asked[0].wait < service.asked[0].timeout <= most


async def test_an_absent_service_refuses_the_start_with_a_sentence_for_the_pod() -> None:
    service = Service(answers=[refused(Away("nobody answers on /run/scrubber/plugin/plugin.sock"))])
    keeper, _ = await gate(service)
    with pytest.raises(Away, match="nobody answers") as caught:
        await keeper.hand_over(["a"], deadline=30.0)
    assert caught.value.public == ABSENT
    assert len(service.asked) > 1


async def test_a_service_that_is_back_in_time_is_asked_again_and_the_start_goes_on() -> None:
    away = refused(Away("restarting"))
    service = Service(answers=[away, away, granted])
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], deadline=30.0)
    assert len(service.asked) == 3


async def test_a_service_that_dies_during_a_scrub_is_waited_for_anew() -> None:
    async def scrubbed_for_longer_than_an_absence_may_last() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * QUICK.absent):
                await forever()
        raise Away("killed")

    service = Service(answers=[scrubbed_for_longer_than_an_absence_may_last, refused(Away("not back yet")), granted])
    keeper, _ = await gate(service)
    await keeper.hand_over(["a"], deadline=30.0)
    assert len(service.asked) == 3
    assert service.asked[2].timeout < service.asked[0].timeout


async def test_a_service_that_comes_and_goes_cannot_keep_a_start_beyond_its_deadline() -> None:
    service = Service(answers=[refused(Away("away"))])
    keeper, _ = await gate(service, GateTimes(absent=60.0, retry=0.01))
    with pytest.raises(Away) as caught:
        await keeper.hand_over(["a"], deadline=0.12)
    assert caught.value.public == ABSENT


@pytest.mark.parametrize(
    "error",
    [
        NotReady("scrub 7 is under way", public="Device a is being scrubbed (scrub 7)."),
        Quarantined("double-bit errors", public="Device a is quarantined."),
        Held("pid 7 of pod x/y holds it", public="Device a is still held."),
        InvalidRequest("no device is called a"),
        LedgerFailure("disk full", public="The scrub service cannot record hand-overs."),
    ],
)
async def test_what_the_service_refuses_is_refused_at_once_and_unchanged(error: ScrubberError) -> None:
    service = Service(answers=[refused(error)])
    keeper, _ = await gate(service)
    with pytest.raises(type(error)) as caught:
        await keeper.hand_over(["a"], deadline=30.0)
    assert caught.value is error
    assert len(service.asked) == 1


async def test_a_start_that_the_kubelet_gives_up_is_no_longer_waited_for() -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def scrubbing() -> None:
        waiting.set()
        try:
            await forever()
        finally:
            ended.set()

    keeper, _ = await gate(Service(answers=[scrubbing]))
    start = asyncio.create_task(keeper.hand_over(["a"], deadline=30.0))
    async with asyncio.timeout(5):
        await waiting.wait()
        start.cancel()
        await ended.wait()


async def test_an_allocation_that_the_service_was_told_of_is_not_unseen() -> None:
    service = Service()
    keeper, _ = await gate(service)
    await keeper.reserve(["a"])
    await keeper.hand_over(["a"], deadline=30.0)
    assert service.asked[0].unseen == []


@pytest.mark.parametrize("problem", [refused(Away("away")), refused(LedgerFailure("disk full")), forever])
async def test_an_allocation_that_the_service_could_not_be_told_of_is_named_at_the_next_start_only(
    problem: Answer,
) -> None:
    service = Service(reservation=problem)
    keeper, _ = await gate(service)
    await keeper.reserve(["a", "b"])
    await keeper.hand_over(["a"], deadline=30.0)
    await keeper.hand_over(["a"], deadline=30.0)
    await keeper.hand_over(["b", "c"], deadline=30.0)
    assert [asked.unseen for asked in service.asked] == [["a"], [], ["b"]]


async def test_an_unseen_allocation_stays_unseen_until_a_start_was_granted() -> None:
    service = Service(answers=[refused(NotReady("busy")), granted], reservation=refused(Away("away")))
    keeper, _ = await gate(service)
    await keeper.reserve(["a"])
    with pytest.raises(NotReady):
        await keeper.hand_over(["a"], deadline=30.0)
    await keeper.hand_over(["a"], deadline=30.0)
    assert [asked.unseen for asked in service.asked] == [["a"], ["a"]]


async def test_what_one_run_of_the_service_was_told_the_next_one_has_not_seen() -> None:
    service = Service()
    keeper, board = await gate(service, epoch="one")
    await keeper.reserve(["a"])
    await board.show((), "two")
    await keeper.hand_over(["a"], deadline=30.0)
    assert service.asked[0].unseen == ["a"]


async def test_an_allocation_during_a_start_belongs_to_the_next_start() -> None:
    service = Service(reservation=refused(Away("away")))
    keeper, _ = await gate(service)

    async def allocated_meanwhile() -> None:
        await keeper.reserve(["a"])

    service.answers = [allocated_meanwhile, granted]
    await keeper.reserve(["a"])
    await keeper.hand_over(["a"], deadline=30.0)
    await keeper.hand_over(["a"], deadline=30.0)
    assert [asked.unseen for asked in service.asked] == [["a"], ["a"]]


@pytest.mark.parametrize("error", [InvalidRequest("no device is called a"), Quarantined("out of service")])
async def test_only_what_no_retry_would_mend_refuses_an_allocation(error: ScrubberError) -> None:
    keeper, _ = await gate(Service(reservation=refused(error)))
    with pytest.raises(type(error)):
        await keeper.reserve(["a"])
