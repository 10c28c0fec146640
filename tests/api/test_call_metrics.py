"""Every call on the sockets is reported to the metrics with its status, and streams while they are open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.api.server import GrpcServer
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.domain.errors import NotReady, Quarantined, ScrubberError
from tests.api.service import FakeNode

DEADLINE = 30.0


class Counted:
    """An observer that records what it receives."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, str]] = []
        self.seconds: list[float] = []
        self.open: Counter[str] = Counter()
        self._moved = asyncio.Event()

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        self.answers.append((method, code))
        self.seconds.append(seconds)
        self._moved.set()

    def on_open_streams_changed(self, method: str, change: int) -> None:
        self.open[method] += change
        self._moved.set()

    async def comes_to(self, *answers: tuple[str, str]) -> None:
        """Wait for these answers: a handler is counted last, when its caller may already have the answer."""
        await self._until(lambda: self.answers == list(answers))

    async def follows(self, method: str, times: int) -> None:
        await self._until(lambda: self.open[method] == times)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not holds():
                self._moved.clear()
                await self._moved.wait()


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
async def node(short_tmp: Path, counted: Counted) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    server = GrpcServer(node, Sockets(short_tmp / "s"), observer=counted)
    await server.start()
    yield node
    await server.stop(0)


async def test_answered_call_is_counted_with_its_method_and_duration(
    node: FakeNode, counted: Counted, short_tmp: Path
) -> None:
    async with ReadClient(short_tmp / "s") as read:
        await read.devices()
    await counted.comes_to(("/scrubber.v1.Read/ListDevices", "OK"))
    assert counted.seconds[0] >= 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (NotReady("Not yet.", public_message="Not yet."), "UNAVAILABLE"),
        (Quarantined("Out.", public_message="Out."), "FAILED_PRECONDITION"),
        (ZeroDivisionError("a defect"), "INTERNAL"),
    ],
)
async def test_refused_call_is_counted_with_its_status(
    node: FakeNode, counted: Counted, short_tmp: Path, failure: Exception, code: str
) -> None:
    node.failure = failure
    async with AdminClient(short_tmp / "s") as admin:
        with pytest.raises(ScrubberError):
            await admin.quarantine("GPU-a0", "noise")
    await counted.comes_to(("/scrubber.v1.Admin/Quarantine", code))


async def test_scrub_stream_is_counted_as_a_completed_call(node: FakeNode, counted: Counted, short_tmp: Path) -> None:
    async with AdminClient(short_tmp / "s") as admin, aclosing(admin.scrub("GPU-a0", "slow")) as updates:
        async for _ in updates:
            pass
    await counted.comes_to(("/scrubber.v1.Admin/Scrub", "OK"))
    assert counted.open == Counter()


async def test_watch_stream_is_counted_as_open_until_its_caller_ends_the_stream(
    node: FakeNode, counted: Counted, short_tmp: Path
) -> None:
    watch = "/scrubber.v1.Plugin/WatchSnapshots"
    async with PluginClient(short_tmp / "s") as plugin:
        async with aclosing(plugin.watch_snapshots()) as snapshots:
            async for _ in snapshots:
                break
            await counted.follows(watch, 1)
        await counted.follows(watch, 0)
    assert counted.answers == []


async def test_method_name_invented_by_a_caller_is_not_counted(
    node: FakeNode, counted: Counted, short_tmp: Path
) -> None:
    path = Sockets(short_tmp / "s").path(Purpose.READ)
    async with grpc.aio.insecure_channel(grpc_target(path)) as channel:
        for number in range(3):
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/made.Up/Name{number}")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=DEADLINE)
    assert counted.answers == []
    assert counted.open == Counter()
