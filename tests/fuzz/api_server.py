"""An API server in memory: gives the plugin's client the answers that a target chooses, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from httpx2 import AsyncBaseTransport, AsyncByteStream, ConnectError, Request, Response
from lightkube import AsyncClient

from plugin.cluster import client as client_module
from plugin.cluster.client import ApiServerClient
from plugin.cluster.condition import ConditionFormat
from plugin.cluster.credentials import Kubeconfig
from plugin.cluster.text import MAX_TEXT_CHARS
from tests.cluster.plugin_server import kubeconfig
from tests.fuzz.loop import complete, directory, on_close

__all__ = [
    "NODE",
    "TIMEOUT",
    "ApiAnswers",
    "Reply",
    "at",
    "client_of",
    "finish",
    "parsed",
    "split_lines",
    "verify_message",
]

_T = TypeVar("_T")

NODE: Final = "node-1"
TIMEOUT: Final = 20.0
"""Seconds in which every input is done, unless something hangs."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; ``hangs``: its body does not end."""

    body: bytes
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    hangs: bool = False


@dataclass
class ApiAnswers(AsyncBaseTransport):
    """Answers requests with ``replies`` in turn; none are left: the connection fails.

    Attributes:
        requests: every request, with its body as JSON.
        drained: set when the last reply was read to its end.
    """

    replies: list[Reply] = field(default_factory=list)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self, replies: Iterable[Reply]) -> None:
        self.replies = list(replies)
        self.requests = []
        self.drained = asyncio.Event()

    def reply(self, request: Request, content: Any) -> Reply:
        """Return the answer to ``request``; a target may decide by its content."""
        if not self.replies:
            raise ConnectError("no answer is left")
        return self.replies.pop(0)

    async def handle_async_request(self, request: Request) -> Response:
        body = await request.aread()
        content = json.loads(body) if body else None
        self.requests.append((request.method, request.url.path, content))
        reply = self.reply(request, content)
        return Response(reply.status, headers=list(reply.headers), stream=_Body(reply, self))

    async def aclose(self) -> None:
        """The transport stays for the next input."""


class _Body(AsyncByteStream):
    def __init__(self, reply: Reply, answers: ApiAnswers) -> None:
        self._reply = reply
        self._answers = answers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # In two parts, as a network may split it anywhere.
        middle = len(self._reply.body) // 2
        yield self._reply.body[:middle]
        yield self._reply.body[middle:]
        if not self._answers.replies:
            self._answers.drained.set()
        if self._reply.hangs:
            await asyncio.Event().wait()


class _Client(ApiServerClient):
    async def close(self) -> None:
        """The library's client stays for the next input."""


@cache
def _library() -> AsyncClient:
    credentials = Kubeconfig(kubeconfig(directory(), "http://api.invalid").path)
    made = client_module._connected(credentials, TIMEOUT)

    def stop() -> None:
        complete(made.close())
        _library.cache_clear()

    on_close(stop)
    return made


def client_of(answers: ApiAnswers, condition: ConditionFormat | None = None) -> ApiServerClient:
    """Return the plugin's client of ``answers``."""
    library = _library()
    library._client._client._transport = answers
    library._client._client._mounts = {}
    client = _Client(Kubeconfig(Path("unused")), NODE, deadline=TIMEOUT, condition=condition)
    client._client = library
    return client


def parsed(body: bytes) -> Any:
    """Return the JSON of ``body`` as Python's reader finds it; None where it finds none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def finish(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` and return its result; fails when it hangs."""

    async def bounded() -> _T:
        async with asyncio.timeout(TIMEOUT):
            return await work

    return complete(bounded())


def split_lines(body: bytes) -> Sequence[bytes]:
    """Return the lines of a watch, each of which ends at a line feed or at the end."""
    lines = body.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def verify_message(error: Exception) -> None:
    """Verify that the message of ``error`` is one printable line that is not much longer than the API server's words."""
    assert str(error).isprintable(), str(error)
    assert 0 < len(str(error)) < MAX_TEXT_CHARS + 200, len(str(error))


def at(value: Any, *path: str) -> Any:
    """Return the value at ``path`` of nested objects; None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
