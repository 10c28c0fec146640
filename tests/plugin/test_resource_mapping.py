"""When the service is notified of the meaning of ids, and what happens when that fails."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from plugin.logs import create_logger
from plugin.resource_mapping import ResourceMapping
from plugin.service_client import ScrubService
from scrubber.domain.errors import InvalidRequest, ScrubberError, Unavailable

GPU, NIC = "vendor.example/gpu", "vendor.example/nic"


async def notify() -> None:
    return


class Service:
    """A service that handles announcements as the test sets."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, dict[str, str]]] = []
        self.answer: Callable[[], Awaitable[None]] = notify

    async def announce(self, resource: str, offers: Mapping[str, str], timeout: float) -> None:
        self.announced.append((resource, dict(offers)))
        await self.answer()


def answering(error: ScrubberError) -> Callable[[], Awaitable[None]]:
    async def answer() -> None:
        raise error

    return answer


def announcements(service: Service, lines: io.StringIO | None = None, timeout: float = 2.0) -> ResourceMapping:
    log = create_logger("json", "info", lines or io.StringIO())
    return ResourceMapping(cast(ScrubService, service), log=log, timeout=timeout)


def events(lines: io.StringIO) -> list[Any]:
    return [json.loads(line)["event"] for line in lines.getvalue().splitlines()]


async def test_unchanged_resource_mapping_is_announced_once_and_a_changed_one_again() -> None:
    service = Service()
    announcing = announcements(service)
    for meanings in ({"0": "a"}, {"0": "a"}, {"0": "a", "1": "b"}):
        await announcing.publish(GPU, meanings, "one")
    await announcing.publish(NIC, {"0": "c"}, "one")
    assert service.announced == [(GPU, {"0": "a"}), (GPU, {"0": "a", "1": "b"}), (NIC, {"0": "c"})]


async def test_resource_mapping_is_announced_to_every_service_run_and_not_while_the_service_is_down() -> None:
    service = Service()
    announcing = announcements(service)
    for epoch in ("one", "", "one", "two", "", "three"):
        await announcing.publish(GPU, {"0": "a"}, epoch)
    assert len(service.announced) == 3


@pytest.mark.parametrize("error", [Unavailable("away"), InvalidRequest("too many"), ScrubberError("fault")])
async def test_failed_announcement_is_repeated_with_the_next_list_and_logged_once(error: ScrubberError) -> None:
    service, lines = Service(), io.StringIO()
    announcing = announcements(service, lines)
    service.answer = answering(error)
    for _ in range(3):
        await announcing.publish(GPU, {"0": "a"}, "one")
    service.answer = notify
    for _ in range(2):
        await announcing.publish(GPU, {"0": "a"}, "one")
    assert len(service.announced) == 4
    assert events(lines) == [
        "resource-mapping.refused" if isinstance(error, InvalidRequest) else "resource-mapping.failed"
    ]


async def test_unanswered_announcement_delays_a_list_no_longer_than_its_timeout() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    service = Service()
    service.answer = never
    announcing = announcements(service, timeout=0.01)
    async with asyncio.timeout(10):
        await announcing.publish(GPU, {"0": "a"}, "one")
        assert not await announcing.republish(GPU)


async def test_resource_that_was_never_listed_is_not_announced_again() -> None:
    service = Service()
    assert not await announcements(service).republish(GPU)
    assert service.announced == []
