"""The probes over real sockets: what they answer, and that no client can keep them from answering another one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.probes import MAX_REQUEST_BYTES, ProbeServer, bind_probe_port
from scrubber.observability.tcp_listener import MAX_CONNECTIONS

HOST, SOON = "127.0.0.1", 30.0


@asynccontextmanager
async def served(reason: Callable[[], str] = str, *, timeout: float = SOON) -> AsyncIterator[int]:
    """Serve probes; yield the port. In the end the event loop has seen no unhandled error."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    listener = bind_probe_port(HOST, 0)
    server = ProbeServer(listener, unready_reason=reason, timeout=timeout)
    await server.start()
    try:
        yield int(listener.address.rpartition(":")[2])
    finally:
        server.close()
    assert errors == []


async def exchange(port: int, request: bytes) -> tuple[str, dict[str, str], str]:
    """Send ``request``; return status line, headers and body of the response, which ends the connection."""
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(request)
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["Content-Length"] == str(len(body.encode()))
    assert headers["Connection"] == "close"
    return status, headers, body


def get(path: str) -> bytes:
    """Return the request that the kubelet sends."""
    lines = [f"GET {path} HTTP/1.1", "Host: 10.0.0.7:9466", "User-Agent: kube-probe/1.36", "Accept: */*"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


async def test_livez_answers_ok_while_the_daemon_is_not_ready() -> None:
    async with served(lambda: "no driver yet") as port:
        status, headers, body = await exchange(port, get("/livez"))
        assert (status, body) == ("HTTP/1.1 200 OK", "ok")
        assert headers["Cache-Control"] == "no-store"


async def test_readyz_names_the_reason_until_the_daemon_is_ready() -> None:
    reason = "no driver yet"
    async with served(lambda: reason) as port:
        assert await exchange(port, get("/readyz")) == (
            "HTTP/1.1 503 Service Unavailable",
            {
                "Content-Type": "text/plain; charset=utf-8",
                "Content-Length": "25",
                "Cache-Control": "no-store",
                "Connection": "close",
            },
            "not ready: no driver yet\n",
        )
        reason = ""
        status, _, body = await exchange(port, get("/readyz?verbose"))
        assert (status, body) == ("HTTP/1.1 200 OK", "ok")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"GET /livez/ HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"GET //livez HTTP/1.0\r\n\r\n", "404 Not Found"),
        (b"POST /livez HTTP/1.1\r\nContent-Length: 9\r\n\r\nquitquitq", "405 Method Not Allowed"),
        (b"get /livez HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"GET /livez HTTP/2.0\r\n\r\n", "400 Bad Request"),
        (b"GET livez HTTP/1.1\r\n\r\n", "400 Bad Request"),
        (b"GET  /livez HTTP/1.1\r\n\r\n", "400 Bad Request"),
        (b"GET /livez\r\n\r\n", "400 Bad Request"),
        (b"\r\n\r\n", "400 Bad Request"),
        (b"\x16\x03\x01\x02\x00\xff\xfe\r\n\r\n", "400 Bad Request"),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST_BYTES + b"\r\n\r\n", "431 Request Header Fields Too Large"),
        (b"x" * (MAX_REQUEST_BYTES + 16), "431 Request Header Fields Too Large"),
    ],
)
async def test_invalid_request_is_refused_and_the_next_probe_is_answered(request_: bytes, status: str) -> None:
    async with served() as port:
        assert (await exchange(port, request_))[0] == f"HTTP/1.1 {status}"
        assert (await exchange(port, get("/livez")))[2] == "ok"


async def test_client_that_disconnects_early_disturbs_no_probe() -> None:
    async with served() as port:
        for data in (b"", b"GET /livez", get("/livez")):
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(data)
            writer.transport.abort()
        assert (await exchange(port, get("/livez")))[2] == "ok"


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\n"])
async def test_slow_client_is_disconnected_at_the_deadline(sent: bytes) -> None:
    async with served(timeout=1.0) as port, asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_probe_is_answered_however_many_silent_connections_are_open() -> None:
    async with served() as port, asyncio.timeout(SOON):
        silent = [await asyncio.open_connection(HOST, port) for _ in range(3 * MAX_CONNECTIONS)]
        assert (await exchange(port, get("/livez")))[2] == "ok"
        # The oldest were closed for newer ones, and the newest is still open.
        for reader, _ in silent[: 2 * MAX_CONNECTIONS]:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        reader, writer = silent[-1]
        writer.write(get("/livez"))
        assert (await reader.read()).endswith(b"ok")
        for _, each in silent:
            each.transport.abort()


async def test_client_that_connects_before_the_port_is_served_is_answered() -> None:
    listener = bind_probe_port(HOST, 0)
    waiting = asyncio.create_task(exchange(int(listener.address.rpartition(":")[2]), get("/livez")))
    server = ProbeServer(listener, unready_reason=str)
    await server.start()
    assert (await waiting)[2] == "ok"
    server.close()


def test_probe_port_in_use_is_reported_with_the_remedy() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidConfiguration) as refused:
            bind_probe_port(HOST, port)
    assert str(refused.value) == (
        f"Probes cannot be served on {HOST}:{port}: Address already in use. Choose another --probe-address, or off. "
        "Two instances in one network namespace need two addresses."
    )


@pytest.mark.parametrize(("host", "named"), [("203.0.113.7", "203.0.113.7:9466"), ("::bad::", "[::bad::]:9466")])
def test_probe_address_of_another_machine_is_refused(host: str, named: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        bind_probe_port(host, 9466)
    assert f"Probes cannot be served on {named}: " in str(refused.value)
