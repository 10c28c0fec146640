"""Garbage, wrong sockets and defects: each is answered with an error message, and the server keeps running."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog
from structlog.testing import LogCapture

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.api.server import serve
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.status import UNEXPECTED_ERROR_MESSAGE
from scrubber.domain.errors import InvalidRequest, NotReady, ScrubberError
from tests.api.service import FakeNode

DEADLINE = 30.0
METHODS = {
    Purpose.PLUGIN: (
        "GetSnapshot",
        "WatchSnapshots",
        "Reserve",
        "HandOver",
        "SetResourceMapping",
        "SetYield",
        "ReportAgentPause",
        "PrepareClaim",
        "UnprepareClaim",
        "SetClaimPods",
        "ListClaims",
    ),
    Purpose.READ: (
        "ListDevices",
        "WatchDevices",
        "GetHistory",
        "GetServiceInfo",
        "GetResetPlan",
        "GetCertificate",
        "ReadAudit",
    ),
    Purpose.ADMIN: (
        "Scrub",
        "Quarantine",
        "Unquarantine",
        "BreakGlass",
        "Reset",
        "AcceptBaseline",
        "YieldNode",
        "ResumeNode",
        "StartJob",
        "EndJob",
    ),
}
GARBAGE = b"\xff\xff\xff\xff garbage"


@pytest.fixture
def log() -> LogCapture:
    return LogCapture()


@pytest.fixture
async def node(short_tmp: Path, log: LogCapture) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    logger = structlog.wrap_logger(
        None, processors=[log], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG)
    )
    async with serve(node, Sockets(short_tmp / "s"), grace=0, log=logger):
        yield node


async def refusal(sockets: Path, purpose: Purpose, method: str, request: bytes = b"") -> grpc.aio.AioRpcError:
    """Return the error with which the socket for ``purpose`` answers raw bytes."""
    async with grpc.aio.insecure_channel(grpc_target(Sockets(sockets).path(purpose))) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        try:
            answer = await anext(aiter(call(request, timeout=DEADLINE)))
        except grpc.aio.AioRpcError as error:
            return error
    raise AssertionError(f"{method} answered {answer!r}")


def metadata(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return dict(error.trailing_metadata() or ())


@pytest.mark.parametrize(
    ("called", "method", "served"),
    [
        (called, method, served)
        for called in Purpose
        for served, methods in METHODS.items()
        for method in methods
        if called is not served
    ],
)
async def test_caller_on_the_wrong_socket_is_directed_to_the_right_one(
    called: Purpose, method: str, served: Purpose, node: FakeNode, short_tmp: Path
) -> None:
    error = await refusal(short_tmp / "s", called, f"/{served.service}/{method}")
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == (
        f"{served.capitalize()}.{method} is not served on the {called} socket; "
        f"use {served}/{served}.sock in the same directory."
    )
    assert metadata(error) == {"scrubber-error": "PermissionDenied", "scrubber-code": "wrong-socket"}
    assert node.requests == []


def test_wrong_socket_tests_cover_every_method() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    assert {each.name: {method.name for method in each.methods} for each in services} == {
        purpose.capitalize(): set(methods) for purpose, methods in METHODS.items()
    }


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("method", ["/scrubber.v1.Plugin/ClearNow", "/unknown.v1.Service/Call", "/nonsense"])
async def test_unknown_method_is_refused_by_name(
    purpose: Purpose, method: str, node: FakeNode, short_tmp: Path
) -> None:
    error = await refusal(short_tmp / "s", purpose, method)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method.rpartition("/")[2] in (error.details() or "")
    assert "socket" in (error.details() or "")


@pytest.mark.parametrize(
    ("purpose", "method"), [(purpose, method) for purpose, methods in METHODS.items() for method in methods]
)
async def test_garbage_request_is_refused_and_the_server_keeps_running(
    purpose: Purpose, method: str, node: FakeNode, short_tmp: Path
) -> None:
    error = await refusal(short_tmp / "s", purpose, f"/{purpose.service}/{method}", GARBAGE)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded as a message of this method" in (error.details() or "")
    assert node.requests == []
    async with ReadClient(short_tmp / "s") as read:
        assert len((await read.devices()).devices) == 2


async def test_non_utf8_text_is_refused(node: FakeNode, short_tmp: Path) -> None:
    request = pb.ReserveRequest(device_ids=["GPU"]).SerializeToString().replace(b"GPU", b"\xff\xfe\xfd")
    error = await refusal(short_tmp / "s", Purpose.PLUGIN, "/scrubber.v1.Plugin/Reserve", request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("noise", [b"", b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536)])
async def test_connection_that_does_not_speak_grpc_is_closed_without_affecting_others(
    purpose: Purpose, noise: bytes, node: FakeNode, short_tmp: Path
) -> None:
    async with asyncio.timeout(DEADLINE):
        reader, writer = await asyncio.open_unix_connection(Sockets(short_tmp / "s").path(purpose))
        writer.write(noise)
        if noise:
            await _read_until_closed(reader)
        writer.close()
    async with PluginClient(short_tmp / "s") as plugin, AdminClient(short_tmp / "s") as admin:
        assert (await plugin.snapshot(DEADLINE)).version == 1
        assert (await admin.quarantine("0", "still answers")).device.id == "GPU-a0"


async def test_oversized_message_is_refused(node: FakeNode, short_tmp: Path) -> None:
    async with PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(InvalidRequest, match="larger than max"):
            await plugin.reserve(["x" * (5 << 20)], DEADLINE)
        assert (await plugin.snapshot(DEADLINE)).version == 1


async def test_unexpected_exception_is_logged_with_its_traceback_and_hidden_from_callers(
    node: FakeNode, short_tmp: Path, log: LogCapture
) -> None:
    node.failure = KeyError("/var/lib/secret")
    async with ReadClient(short_tmp / "s") as read, AdminClient(short_tmp / "s") as admin:
        with pytest.raises(ScrubberError) as unary:
            await read.history()
        with pytest.raises(ScrubberError) as stream:
            await anext(admin.scrub("0", "slow"))
    for refused in (unary, stream):
        assert (type(refused.value), str(refused.value)) == (ScrubberError, UNEXPECTED_ERROR_MESSAGE)
    failed = [each for each in log.entries if each["event"] == "api.failed"]
    assert [each["method"] for each in failed] == ["/scrubber.v1.Read/GetHistory", "/scrubber.v1.Admin/Scrub"]
    assert all(each["exc_info"] is node.failure and each["log_level"] == "error" for each in failed)


async def test_refusal_details_hidden_from_the_plugin_are_logged(
    node: FakeNode, short_tmp: Path, log: LogCapture
) -> None:
    node.failure = NotReady("GPU-a0 waits for team-b/old.", public_message="GPU-a0 is not ready.", code="pod-not-over")
    async with PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(NotReady):
            await plugin.hand_over(["GPU-a0"], wait_seconds=1, timeout=DEADLINE)
    (refused,) = [each for each in log.entries if each["event"] == "api.refused"]
    assert refused["message"] == "GPU-a0 waits for team-b/old."
    assert (refused["error"], refused["code"]) == ("NotReady", "pod-not-over")


async def _read_until_closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:  # disconnected before the garbage was read, or before all of it was written
        return
