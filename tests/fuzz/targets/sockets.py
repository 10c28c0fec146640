"""Every socket and port that the service listens on: requests, raw bytes, HTTP/2 frames, and scrapes over HTTP."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import grpc
import structlog
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.server import GrpcServer
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.observability.metrics_server import MetricsServer, registry_app, serve_metrics
from tests.api.service import FakeNode
from tests.fuzz.connections import CONNECTION_SEEDS, CONNECTION_WORDS, DEADLINE, call, frames, send
from tests.fuzz.loop import complete, on_close
from tests.fuzz.target import SOCKET_GOAL, target


def _methods() -> Iterator[tuple[Purpose, str, str]]:
    for service in pb.DESCRIPTOR.services_by_name.values():
        purpose = next(each for each in Purpose if each.service == service.full_name)
        for method in service.methods:
            yield purpose, f"/{service.full_name}/{method.name}", method.output_type.name


_METHODS: Final = tuple(_methods())
_ALLOWED: Final = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
"""Not among them: UNKNOWN and INTERNAL, which mean an error that no line of the product expects."""


@dataclass(frozen=True)
class _Served:
    """The service's three sockets with a node of values behind them, and a channel to each."""

    node: FakeNode
    server: GrpcServer
    sockets: Sockets
    channels: dict[Purpose, grpc.aio.Channel]


async def _serve(directory: Path) -> _Served:
    log = structlog.wrap_logger(
        structlog.PrintLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
    )
    node = FakeNode()
    node.busy.set()
    sockets = Sockets(directory)
    server = GrpcServer(node, sockets, log=log)
    await server.start()
    channels = {each: grpc.aio.insecure_channel(grpc_target(sockets.path(each))) for each in Purpose}
    return _Served(node, server, sockets, channels)


@cache
def _service() -> _Served:
    directory = Path(tempfile.mkdtemp(prefix="f-"))
    served = complete(_serve(directory / "s"))

    def stop() -> None:
        complete(_stop(served))
        shutil.rmtree(directory)
        _service.cache_clear()

    on_close(stop)
    return served


async def _stop(served: _Served) -> None:
    for channel in served.channels.values():
        await channel.close()
    await served.server.stop(0)


async def _call(served: _Served, purpose: Purpose, method: str, request: bytes) -> tuple[grpc.StatusCode, list[bytes]]:
    answers = 1 if method.rpartition("/")[2].startswith("Watch") else 3
    return await call(served.channels[purpose], method, request, answers=answers)


def _seeds() -> Iterator[bytes]:
    for number, (_, method, _) in enumerate(_METHODS):
        yield bytes((number,))
        name = pb.DESCRIPTOR.services_by_name[method.split("/")[1].rpartition(".")[2]]
        request = pb.__dict__[name.methods_by_name[method.rpartition("/")[2]].input_type.name]()
        for field in request.DESCRIPTOR.fields:
            if field.type == field.TYPE_STRING and field.is_repeated:
                getattr(request, field.name).append("GPU-a0")
            elif field.type == field.TYPE_STRING:
                setattr(request, field.name, "GPU-a0" if "device" in field.name else "reason")
            elif (
                field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_UINT64, field.CPPTYPE_INT64)
                and not field.is_repeated
            ):
                setattr(request, field.name, 1)
        yield bytes((number,)) + request.SerializeToString()


@target(
    "api-requests",
    parser="requests on the service's sockets `plugin`, `read` and `admin`",
    covers=("scrubber.api.messages", "scrubber.api.servicers", "scrubber.api.interceptor"),
    oracle="every call ends with answers of the method's type or with a status for the caller's mistake, never as an internal "
    "error",
    seeds=tuple(_seeds()),
    words=(b"GPU-a0", b"GPU-a1", b"reason", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\0\0\0\0\0\0\xf8\x7f", b"slow"),
    longest=512,
    seconds=30,
    goal=SOCKET_GOAL,
    share=60,
)
def api_requests(data: bytes) -> bool:
    served = _service()
    purpose, method, answer_type = _METHODS[data[0] % len(_METHODS)] if data else _METHODS[0]
    status, answers = complete(_call(served, purpose, method, data[1:]))
    served.node.requests.clear()
    assert status in _ALLOWED, (method, status)
    for each in answers:
        pb.__dict__[answer_type].FromString(each)
    return status is grpc.StatusCode.OK


@target(
    "api-connections",
    parser="raw bytes and HTTP/2 frames on the service's sockets",
    covers=("scrubber.api.peer_auth", "scrubber.api.server"),
    oracle="the server ends the connection once the client has ended it, and answers the next caller",
    seeds=CONNECTION_SEEDS,
    words=CONNECTION_WORDS,
    longest=512,
    seconds=30,
    goal=SOCKET_GOAL,
    share=40,
)
def api_connections(data: bytes) -> bool:
    served = _service()
    purposes = tuple(Purpose)
    purpose = purposes[sum(data) % len(purposes)]
    answer = complete(send(served.sockets.path(purpose), frames(data)))
    status, answers = complete(_call(served, Purpose.READ, "/scrubber.v1.Read/ListDevices", b""))
    assert status is grpc.StatusCode.OK, status
    assert len(pb.ListDevicesResponse.FromString(answers[0]).devices) == 2
    return bool(answer)


@cache
def _metrics() -> MetricsServer:
    registry = CollectorRegistry()
    Gauge("scrubber_fuzzing", "A metric.", ["device"], registry=registry).labels("GPU-a0").set(1)
    server = serve_metrics(registry_app(registry), "127.0.0.1", 0, report=lambda _: None)
    on_close(_metrics.cache_clear)
    on_close(server.close)
    return server


def _scrape(data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", _metrics().port), timeout=DEADLINE) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        except (ConnectionResetError, BrokenPipeError):
            return b""
    return b"".join(parts)


@target(
    "metrics-requests",
    parser="HTTP requests to the metrics port",
    covers=("scrubber.observability.metrics_server",),
    oracle="there is no answer, or it is a page that Prometheus can read or an HTTP error, and the next scrape gets the "
    "whole page",
    seeds=(
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics?name[]=scrubber_fuzzing HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
    ),
    words=(
        b"name[]=",
        b"%00",
        b"%ff",
        b"Accept: ",
        b"; q=1",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: ",
        b"HTTP/1.1",
    ),
    longest=1024,
    seconds=30,
    goal=SOCKET_GOAL,
    share=40,
)
def metrics_requests(data: bytes) -> bool:
    answer = _scrape(data)
    whole = _scrape(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, page = whole.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], head
    assert [each.name for each in text_string_to_metric_families(page.decode())] == ["scrubber_fuzzing"]
    status = answer.split(b" ", 2)[1:2]
    if answer.startswith(b"HTTP/"):
        assert status[0].isdigit(), answer[:80]
        assert status[0] != b"500", answer[:200]
        assert (status[0] == b"503") == (b"\r\nRetry-After: 1\r\n" in answer), answer[:200]
    return status == [b"200"]
