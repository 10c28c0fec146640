"""HTTP probes of a daemon for the kubelet: ``/livez`` and ``/readyz``, answered by the daemon's own event loop.

Invariants: a response proves that the event loop runs, because no other thread can send it; without one, the kubelet's
timeout expires. The responses contain nothing about devices or tenants. A client can delay no other client and no call
of the kubelet: a request has at most :data:`MAX_REQUEST_BYTES`, a connection has a deadline, and where too many are
open, the oldest one is closed for the newest one, so that no number of silent connections makes a probe fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.tcp_listener import MAX_CONNECTIONS, TcpListener, listen_on

__all__ = ["CONNECTION_TIMEOUT", "MAX_REQUEST_BYTES", "ProbeServer", "bind_probe_port"]

MAX_REQUEST_BYTES = 4096
"""Limit of a request, from its first line to the empty line; the kubelet's has about 100 bytes."""
CONNECTION_TIMEOUT = 5.0
"""Seconds from the start of a connection to its end."""

_END = b"\r\n\r\n"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def bind_probe_port(host: str, port: int) -> TcpListener:
    """Bind the port of the probes.

    Raises:
        InvalidConfiguration: the address cannot be bound.
    """
    try:
        return listen_on(host, port)
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise InvalidConfiguration(
            f"Probes cannot be served on {where}: {error.strerror or error}. Choose another --probe-address, or off. "
            "Two instances in one network namespace need two addresses."
        ) from error


class ProbeServer:
    """Serves the probes on a bound port until :meth:`close`.

    Args:
        unready_reason: called in the event loop for ``/readyz``: why the daemon is not ready, or empty when it is.
        timeout: seconds for each connection.
    """

    def __init__(
        self, listener: TcpListener, *, unready_reason: Callable[[], str], timeout: float = CONNECTION_TIMEOUT
    ) -> None:
        self._listener = listener
        self._unready_reason = unready_reason
        self._timeout = timeout
        self._connections: dict[asyncio.StreamWriter, None] = {}  # in the order of their start
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Serve in the running event loop."""
        self._server = await asyncio.start_server(
            self._serve, sock=self._listener.socket, limit=MAX_REQUEST_BYTES, backlog=MAX_CONNECTIONS
        )

    def close(self) -> None:
        """Release the port and end all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            async with asyncio.timeout(self._timeout):
                writer.write(await self._response(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._connections.pop(writer, None)

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            return _encode(431, f"A request may have at most {MAX_REQUEST_BYTES} bytes.\n")
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or words[2] not in (b"HTTP/1.0", b"HTTP/1.1") or not words[1].startswith(b"/"):
            return _encode(400, "This is not a request of HTTP/1.1.\n")
        method, target, _ = words
        path = target.partition(b"?")[0]
        if path not in (b"/livez", b"/readyz"):
            return _encode(404, "The probes are /livez and /readyz.\n")
        if method != b"GET":
            return _encode(405, "Use GET.\n", "Allow: GET\r\n")
        reason = self._unready_reason() if path == b"/readyz" else ""
        return _encode(503, f"not ready: {reason}\n") if reason else _encode(200, "ok")


def _encode(status: int, body: str, headers: str = "") -> bytes:
    data = body.encode()
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(data)}\r\nCache-Control: no-store\r\nConnection: close\r\n{headers}\r\n"
    ).encode() + data
