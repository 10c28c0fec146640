"""Service and plugin may differ by one minor version; a plugin further apart is refused with what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from scrubber import __version__
from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.client import PluginClient, ReadClient
from scrubber.api.peer_versions import is_supported, stated_version
from scrubber.api.server import serve
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from tests.api.service import FakeNode

DEADLINE = 20.0
MAJOR, MINOR = (int(part) for part in __version__.split(".")[:2])
NEXT, TOO_NEW = f"{MAJOR}.{MINOR + 1}.3", f"{MAJOR}.{MINOR + 2}.0"


@asynccontextmanager
async def plugin(sockets: Path, user_agent: str) -> AsyncIterator[scrubber_pb2_grpc.PluginStub]:
    """Connect a plugin with another user agent."""
    target = grpc_target(Sockets(sockets).path(Purpose.PLUGIN))
    options = (("grpc.primary_user_agent", user_agent),)
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield scrubber_pb2_grpc.PluginStub(channel)


async def snapshot(stub: scrubber_pb2_grpc.PluginStub) -> pb.Snapshot:
    answer: pb.Snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE)
    return answer


@pytest.mark.parametrize(
    ("own", "peer", "supported"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.0", "0.1.9", True),
        ("0.1.0", "0.2.0", True),
        ("0.2.5", "0.1.0", True),
        ("0.1.0", "0.2.0.dev3+g1234", True),
        ("0.9.0", "0.10.1", True),
        ("0.1.0", "0.3.0", False),
        ("0.3.0", "0.1.0", False),
        ("1.1.0", "0.1.0", False),
        ("0.1.0", "0.10.0", False),
        ("0.1.0", "next", False),
        ("0.1.0", "0", False),
        ("0.1.0", "", False),
    ],
)
def test_versions_may_differ_by_one_minor_version(own: str, peer: str, supported: bool) -> None:
    assert is_supported(peer, own) is supported


@pytest.mark.parametrize(
    ("user_agent", "version"),
    [
        ("gpu-scrubber/0.2.0 grpc-python-asyncio/1.85.1 grpc-c/53.0.0 (linux; chttp2)", "0.2.0"),
        ("proxy/1 gpu-scrubber/0.2.0.dev1", "0.2.0.dev1"),
        ("grpc-python-asyncio/1.85.1 grpc-c/53.0.0 (linux; chttp2)", ""),
        ("my-gpu-scrubber/0.2.0", ""),
        ("gpu-scrubber/", ""),
        (f"gpu-scrubber/{'9' * 1000}", ""),
    ],
)
def test_version_of_a_client_is_read_from_its_user_agent(user_agent: str, version: str) -> None:
    assert stated_version([("other", b"x"), ("user-agent", user_agent)]) == version


async def test_plugin_of_a_neighbouring_version_is_served_and_logged_once(short_tmp: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            serve(FakeNode(), Sockets(short_tmp / "s"), grace=0),
            plugin(short_tmp / "s", f"gpu-scrubber/{NEXT}") as stub,
        ):
            for _ in range(3):
                assert (await snapshot(stub)).service_version == __version__
    assert [each for each in logs if each["event"].startswith("plugin.version")] == [
        {"event": "plugin.version-differs", "log_level": "info", "plugin_version": NEXT, "version": __version__}
    ]


async def test_plugin_two_minor_versions_apart_is_refused_and_logged_once(short_tmp: Path) -> None:
    words = f"The plugin has version {TOO_NEW} and the scrub service version {__version__}."
    with structlog.testing.capture_logs() as logs:
        async with (
            serve(FakeNode(), Sockets(short_tmp / "s"), grace=0),
            plugin(short_tmp / "s", f"gpu-scrubber/{TOO_NEW}") as stub,
        ):
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="one minor version at a time") as refused:
                    await snapshot(stub)
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert (refused.value.details() or "").startswith(words)
            with pytest.raises(grpc.aio.AioRpcError, match="upgrade one of them"):
                await anext(aiter(stub.WatchSnapshots(pb.GetSnapshotRequest(), timeout=DEADLINE)))
    (line,) = [each for each in logs if each["event"] in ("plugin.version-refused", "api.refused")]
    assert (line["event"], line["log_level"], line["plugin_version"]) == ("plugin.version-refused", "error", TOO_NEW)


async def test_client_that_states_no_version_is_served(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0), plugin(short_tmp / "s", "curl/8") as stub:
        assert (await snapshot(stub)).ready


async def test_service_reports_the_versions_of_connected_plugins(short_tmp: Path) -> None:
    sockets = short_tmp / "s"
    async with (
        serve(FakeNode(), Sockets(sockets), grace=0),
        ReadClient(sockets) as read,
        plugin(sockets, f"gpu-scrubber/{NEXT}") as stub,
    ):
        assert list((await read.service_info()).plugin_versions) == []
        async with PluginClient(sockets) as own:
            following = own.watch_snapshots()
            await anext(following)
            await anext(aiter(stub.WatchSnapshots(pb.GetSnapshotRequest(), timeout=DEADLINE)))
            assert list((await read.service_info()).plugin_versions) == [__version__, NEXT]
            await following.aclose()
        async with asyncio.timeout(DEADLINE):
            while __version__ in (await read.service_info()).plugin_versions:
                pass


async def test_unknown_method_of_an_unsupported_plugin_is_refused_for_its_version(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0):
        target = grpc_target(Sockets(short_tmp / "s").path(Purpose.PLUGIN))
        options = (("grpc.primary_user_agent", f"gpu-scrubber/{TOO_NEW}"),)
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            teleport: Any = channel.unary_unary("/scrubber.v1.Plugin/Teleport")
            with pytest.raises(grpc.aio.AioRpcError, match="one minor version at a time"):
                await teleport(b"", timeout=DEADLINE)
