"""What the service is told of ids, when, and what happens when it cannot be told."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from plugin.announcements import Announcements
from plugin.logs import logger
from plugin.service import ScrubService
from scrubber.domain.errors import Away, InvalidRequest, ScrubberError

GPU, NIC = "vendor.example/gpu", "vendor.example/nic"


async def heard() -> None:
    return


class Service:
    """Takes announcements as told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, str]]] = []
        self.answer: Callable[[], Awaitable[None]] = heard

    async def announce(self, resource: str, offers: Mapping[str, str], timeout: float) -> None:
        self.told.append((resource, dict(offers)))
        await self.answer()


def answering(error: ScrubberError) -> Callable[[], Awaitable[None]]:
    async def answer() -> None:
        raise error

    return answer


def announcements(service: Service, lines: io.StringIO | None = None, timeout: float = 2.0) -> Announcements:
    log = logger("json", "info", lines or io.StringIO())
    return Announcements(cast(ScrubService, service), log=log, timeout=timeout)


def events(lines: io.StringIO) -> list[Any]:
    return [json.loads(line)["event"] for line in lines.getvalue().splitlines()]


async def test_the_same_list_is_told_once_and_another_one_anew() -> None:
    service = Service()
    told = announcements(service)
    for meanings in ({"0": "a"}, {"0": "a"}, {"0": "a", "1": "b"}):
        await told.announce(GPU, meanings, "one")
    await told.announce(NIC, {"0": "c"}, "one")
    assert service.told == [(GPU, {"0": "a"}), (GPU, {"0": "a", "1": "b"}), (NIC, {"0": "c"})]


async def test_every_run_of_the_service_is_told_and_one_that_is_away_is_not() -> None:
    service = Service()
    told = announcements(service)
    for epoch in ("one", "", "one", "two", "", "three"):
        await told.announce(GPU, {"0": "a"}, epoch)
    assert len(service.told) == 3


@pytest.mark.parametrize("error", [Away("away"), InvalidRequest("too many"), ScrubberError("fault")])
async def test_what_could_not_be_told_is_told_with_the_next_list_and_complained_of_once(error: ScrubberError) -> None:
    service, lines = Service(), io.StringIO()
    told = announcements(service, lines)
    service.answer = answering(error)
    for _ in range(3):
        await told.announce(GPU, {"0": "a"}, "one")
    service.answer = heard
    for _ in range(2):
        await told.announce(GPU, {"0": "a"}, "one")
    assert len(service.told) == 4
    assert events(lines) == ["announcement.refused" if isinstance(error, InvalidRequest) else "announcement.failed"]


async def test_a_service_that_does_not_answer_keeps_no_list_waiting_for_longer_than_the_time_it_has() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    service = Service()
    service.answer = never
    told = announcements(service, timeout=0.01)
    async with asyncio.timeout(10):
        await told.announce(GPU, {"0": "a"}, "one")
        assert not await told.again(GPU)


async def test_what_was_never_listed_is_not_told_again() -> None:
    service = Service()
    assert not await announcements(service).again(GPU)
    assert service.told == []
