"""HTTP/1.1 on one connection of the API server: requests in, answers and streams out.

Promise: a client that disconnects ends the stream that it was sent, and a malformed request is answered with 400.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11

MAX_READ = 65536


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One answer: a document, by default JSON, or lines of JSON as they come."""

    code: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    lines: AsyncIterator[bytes] | None = None
    content_type: str = "application/json"


class Hang(Exception):
    """The request gets no answer."""


class Drop(Exception):
    """The connection is closed without an answer."""


class Raw(Exception):
    """The connection is closed after ``data``, which need not be HTTP."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class HttpConnection:
    """Serves one connection until either side closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler) -> None:
        self._reader = reader
        self._writer = writer
        self._handle = handle
        self._http = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        """Answer requests one after another."""
        try:
            while await self._serve_one():
                self._http.start_next_cycle()
        except h11.RemoteProtocolError as error:
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                with suppress(ConnectionError):
                    await self._respond(
                        HttpResponse(400, json.dumps({"kind": "Status", "message": str(error)}).encode())
                    )
        except (ConnectionError, Drop):
            return
        except Raw as raw:
            with suppress(ConnectionError):
                self._writer.write(raw.data)
                await self._writer.drain()
        except Hang:
            with suppress(ConnectionError):
                while await self._reader.read(MAX_READ):
                    pass

    def abort(self) -> None:
        """Close the connection without waiting for anything."""
        self._writer.transport.abort()

    async def _serve_one(self) -> bool:
        request = await self._next_request()
        if request is None:
            return False
        await self._respond(await self._handle(request))
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _next_request(self) -> HttpRequest | None:
        head: h11.Request | None = None
        body = b""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(MAX_READ))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return _request(head, body)
            else:
                return None

    async def _respond(self, response: HttpResponse) -> None:
        headers = [*response.headers]
        if response.content_type:
            headers.append(("Content-Type", response.content_type))
        if response.lines is None:
            headers.append(("Content-Length", str(len(response.body))))
        self._send(h11.Response(status_code=response.code, headers=headers))
        if response.lines is None:
            self._send(h11.Data(data=response.body))
        else:
            await self._stream(response.lines)
        self._send(h11.EndOfMessage())
        await self._writer.drain()

    async def _stream(self, lines: AsyncIterator[bytes]) -> None:
        """Send lines until they end, or the client disconnects."""
        disconnected = asyncio.ensure_future(self._reader.read(1))
        sending = asyncio.ensure_future(self._send_lines(lines))
        try:
            await asyncio.wait((disconnected, sending), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ConnectionResetError("the client ended the watch")
            sending.result()
        finally:
            for each in (disconnected, sending):
                each.cancel()
            await asyncio.gather(disconnected, sending, return_exceptions=True)

    async def _send_lines(self, lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            self._send(h11.Data(data=line))
            await self._writer.drain()

    def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)


def _request(head: h11.Request, body: bytes) -> HttpRequest:
    target = urlsplit(head.target.decode())
    query: dict[str, Any] = {key: values[-1] for key, values in parse_qs(target.query, keep_blank_values=True).items()}
    headers = {name.decode().lower(): value.decode() for name, value in head.headers}
    return HttpRequest(head.method.decode(), target.path, query, headers, body)
