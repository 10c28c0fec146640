"""What comes over the network or is read to reach it: trace contexts of callers, credentials, and DCGM's command."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from httpx2 import LocalProtocolError, Request
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from plugin.cluster.client import ApiServerClient
from plugin.cluster.credentials import Kubeconfig
from plugin.cluster.errors import ApiUnavailable
from scrubber.adapters.nvidia.dcgm import DcgmControl, _Failed
from scrubber.adapters.nvidia.smi import OutputTail
from scrubber.domain.errors import Refused, Unavailable
from scrubber.observability.tracing import OpenTelemetryTracer
from tests.fuzz.api_server import NODE, TIMEOUT, ApiAnswers, Reply, finish, verify_message
from tests.fuzz.loop import complete, directory, on_close
from tests.fuzz.structure import EDIT_SEEDS, EDITS, json_input, text_input
from tests.fuzz.target import SLOW_GOAL, target

# -- traces

_TRACE, _SPAN = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"
_CALLER: Final = b"00-" + _TRACE + b"-" + _SPAN + b"-01"


class _Kept(SpanProcessor):
    """The last span that ended."""

    span: ReadableSpan | None = None

    def on_end(self, span: ReadableSpan) -> None:
        self.span = span


@cache
def _tracer() -> tuple[OpenTelemetryTracer, _Kept]:
    kept = _Kept()
    made = OpenTelemetryTracer(kept, {})
    on_close(_tracer.cache_clear)
    on_close(made.close)
    return made, kept


def _reference(header: str) -> tuple[str, str, int] | None:
    """Return trace, span and flags of a header as W3C Trace Context, level 2, defines them; None for an invalid one."""
    parts = header.split("-", 4)
    widths = [len(each) for each in parts[:4]]
    if widths != [2, 32, 16, 2] or not set("".join(parts[:4])) <= set("0123456789abcdef"):
        return None
    version, trace, span, flags = parts[:4]
    if version == "ff" or (version == "00" and len(parts) > 4) or not int(trace, 16) or not int(span, 16):
        return None
    if len(parts) > 4 and (len(parts[4]) > 200 or "\n" in parts[4]):
        return None  # longer than this service reads
    return trace, span, int(flags, 16) & 3


@target(
    "traceparent",
    parser="the header `traceparent` of a call, and the trace context that a hand-over follows",
    covers=("scrubber.observability.tracing",),
    oracle="a header is ignored, or names the trace, the span and the flags that the definition of W3C Trace Context gives; "
    "OpenTelemetry's own reader finds the same, what is passed on is read back, and a span links to the same one",
    seeds=(
        _CALLER,
        *(
            EDITS + bytes((0, place, operation, value))
            for place in range(7)
            for operation in (0, 1, 3)
            for value in (1, 6, 13)
        ),
        *(EDITS + bytes((which,)) for which in range(4)),
        b"cc" + _CALLER[2:] + b"-more",
        b"ff" + _CALLER[2:],
        _CALLER.upper(),
        _CALLER + b"-",
        _CALLER[:-2] + b"ff",
    ),
    words=(b"00-", b"-01", b"-00", b"ff", b"cc-", b"0" * 32, b"0" * 16, _TRACE, _SPAN, b"-", "\u0660".encode(), b" "),
    longest=512,
)
def traceparent(data: bytes) -> bool:
    texts = (_CALLER, b"cc" + _CALLER[2:] + b"-more", _CALLER[:-2] + b"00", b"00-" + b"0" * 32 + b"-" + _SPAN + b"-01")
    header = text_input(data, *texts).decode("utf-8", "surrogateescape")
    tracer, kept = _tracer()
    expected = _reference(header)
    found = complete(_joined(tracer, ("user-agent", "x"), ("traceparent", header)))
    assert complete(_joined(tracer, ("traceparent", header), ("traceparent", header))) == ""
    assert complete(_joined(tracer, ("traceparent", header.encode("utf-8", "surrogateescape")))) == ""
    assert found == ("" if expected is None else f"00-{expected[0]}-{expected[1]}-{expected[2]:02x}"), header
    link = complete(_link(tracer, kept, header))
    if expected is None:
        assert link is None
        return False
    assert link == (int(expected[0], 16), int(expected[1], 16))
    assert complete(_joined(tracer, ("traceparent", found))) == found
    theirs = get_current_span(
        TraceContextTextMapPropagator().extract({"traceparent": header}, Context())
    ).get_span_context()
    assert (theirs.trace_id, theirs.span_id) == link
    return True


async def _joined(tracer: OpenTelemetryTracer, *metadata: tuple[str, str | bytes]) -> str:
    async def join() -> str:
        tracer.join_trace(metadata)
        return tracer.traceparent()

    return await asyncio.create_task(join())  # a task of its own, as each call has


async def _link(tracer: OpenTelemetryTracer, kept: _Kept, header: str) -> tuple[int, int] | None:
    with tracer.span("hand-over", follows=header):
        pass
    assert kept.span is not None
    links = [(each.context.trace_id, each.context.span_id) for each in kept.span.links]
    return links[0] if links else None


# -- credentials

_SECRET: Final = "S3cr3t-T0k3n"
_SERVER: Final = "http://api.invalid:6443"
_KUBECONFIG: dict[str, Any] = {
    "current-context": "here",
    "contexts": [
        {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "n"}},
        {"name": "there", "context": {"cluster": "d", "user": "v"}},
    ],
    "clusters": [
        {"name": "c", "cluster": {"server": _SERVER, "insecure-skip-tls-verify": True}},
        {"name": "d", "cluster": {"server": "http://other.invalid", "insecure-skip-tls-verify": True}},
    ],
    "users": [{"name": "u", "user": {"token": _SECRET}}, {"name": "v", "user": {"token": "other"}}],
}


class _Authenticated(ApiAnswers):
    """Keeps where requests go, and as whom."""

    seen: tuple[str, str, int | None, str] | None = None

    def reply(self, request: Request, content: Any) -> Reply:
        authorization = request.headers.get("Authorization", "")
        if not all(each == "\t" or each.isprintable() for each in authorization):
            raise LocalProtocolError(f"Illegal header value {authorization!r}")  # as a connection refuses it
        self.seen = (request.url.scheme, request.url.host, request.url.port, authorization)
        return Reply(b'{"metadata": {"name": "node-1"}}')


@target(
    "kubeconfig",
    parser="a kubeconfig",
    covers=("plugin.cluster.client", "plugin.cluster.credentials"),
    oracle="a file is refused as unavailable, on one printable line without the token, or requests go only to the server of the "
    "current context, as its user, by PyYAML's reading; no program is started for a token",
    seeds=(
        *EDIT_SEEDS,
        yaml.safe_dump(_KUBECONFIG).encode(),
        *(
            yaml.safe_dump({**_KUBECONFIG, "users": [{"name": "u", "user": {"token": _SECRET, **program}}]}).encode()
            for program in ({"exec": {"apiVersion": "v1", "command": "touch"}}, {"auth-provider": {"name": "x"}})
        ),
        *(EDITS + bytes((place, operation, 3)) for place in range(24) for operation in (0, 2, 6, 7)),
        yaml.safe_dump(_KUBECONFIG).replace(_SECRET, f"{_SECRET}: x").encode(),
        yaml.safe_dump(_KUBECONFIG).replace(_SECRET, f'"{_SECRET}').encode(),
    ),
    words=(
        b"current-context: there",
        b"exec:",
        b"auth-provider:",
        b"username: a",
        b"password: b",
        _SECRET.encode(),
        b"\n",
        b": ",
        b"'",
    ),
    goal=SLOW_GOAL,
    share=100,
    seconds=10,
)
def kubeconfig(data: bytes) -> bool:
    content = json_input(data, _KUBECONFIG)
    path = _file("kubeconfig")
    path.write_bytes(content)
    answers = _Authenticated()
    client = _Reconnecting(Kubeconfig(path), answers)
    try:
        finish(client.get_node())
    except ApiUnavailable as error:
        verify_message(error)
        assert _SECRET not in str(error) or _is_public(content)
        return False
    finally:
        finish(client.end())
    assert answers.seen is not None
    scheme, host, port, authorization = answers.seen
    config = yaml.safe_load(content)
    (context, *_) = [
        each["context"] for each in reversed(config["contexts"]) if each["name"] == config["current-context"]
    ]
    (cluster, *_) = [each["cluster"] for each in reversed(config["clusters"]) if each["name"] == context["cluster"]]
    (user, *_) = [each["user"] for each in reversed(config["users"]) if each["name"] == context["user"]]
    assert user.get("exec") is None
    assert user.get("auth-provider") is None
    if re.fullmatch("https?://[a-z.]+(:[0-9]{1,5})?/?", cluster.get("server", "")):
        written = f"{scheme}://{host}" + (f":{port}" if port is not None else "")
        default = {"http": ":80", "https": ":443"}[scheme]
        assert written == cluster["server"].rstrip("/").removesuffix(default)
    if user.get("tokenFile") is None and user.get("token") is not None:
        assert authorization == f"Bearer {user['token']}"
    return True


def _is_public(content: bytes) -> bool:
    """Whether the token is written in another place of the file too, such as a name, which a message may contain."""

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: public(each) for key, each in value.items() if key != "token"}
        return [public(each) for each in value] if isinstance(value, list) else value

    try:
        return _SECRET in repr(public(yaml.safe_load(content)))
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


class _Reconnecting(ApiServerClient):
    """Connects as the plugin does, but reaches ``answers`` only."""

    def __init__(self, credentials: Kubeconfig, answers: ApiAnswers) -> None:
        super().__init__(credentials, NODE, deadline=TIMEOUT)
        self._answers = answers

    async def _connect(self) -> Any:
        if self._client is None:
            library = await super()._connect()
            library._client._client._transport = self._answers
            library._client._client._mounts = {}
        return self._client

    async def end(self) -> None:
        await self.close()


@cache
def _directory() -> Path:
    made = directory()
    on_close(_directory.cache_clear)
    return made


def _file(name: str) -> Path:
    return _directory() / name


# -- DCGM

_DCGM: Final = (
    b"dcgmi  version: 4.5.2\n",
    b"Version : 3.3.9\nBuild ID : 17\nBuild Date : 2026-01-02\n",
    b"Error: unable to establish a connection to the host engine.\nConnection timed out\n",
    b"PARSE ERROR: Argument: --detach-driver\n             Couldn't find match for argument\n",
    b"Successfully detached from the driver.\n",
)


class _Dcgm(DcgmControl):
    """Gives each command the next output and status."""

    def __init__(self, outputs: list[tuple[bytes, int]]) -> None:
        super().__init__(Path("/usr/bin/dcgmi"))
        self._outputs = outputs
        self.options: list[str] = []

    async def _run(self, *command: str) -> str:
        output, status = self._outputs.pop(0)
        self.options.append(command[-1])
        tail = OutputTail()
        for start in range(0, len(output), 1000):
            tail.data_received(output[start : start + 1000])
        if status:
            raise _Failed(command, status, tail.text)
        return tail.text


def _version(text: str) -> tuple[int, int] | None:
    """Return the first version of three numbers that begins a word."""
    for start, first in enumerate(text):
        if first.isdecimal() and not (start and (text[start - 1].isalnum() or text[start - 1] == "_")):
            parts = re.split("[^.\\d]", text[start:], maxsplit=1)[0].split(".")
            if len(parts) > 2 and all(parts[:3]):
                return int(parts[0]), int(parts[1])
    return None


@target(
    "dcgm-output",
    parser="what DCGM's command prints about its version, and about releasing the driver",
    covers=("scrubber.adapters.nvidia.dcgm", "scrubber.adapters.nvidia.smi"),
    oracle="the driver is asked for unless the first version of three numbers is older than 4.5; an unknown option is refused as "
    "such, every other failure may be repeated, and each message quotes at most one line",
    seeds=(
        *(bytes((status,)) + EDITS + bytes((which,)) for status in range(4) for which in range(5)),
        *(
            bytes((0,)) + EDITS + bytes((which, place, 0, value))
            for which in (0, 1)
            for place in range(4, 12)
            for value in range(12)
        ),
    ),
    words=(b"4.5.0", b"4.4.9", b"10.0.0", b"unknown option", b"version: ", b"\xd9\xa3.\xd9\xa3.\xd9\xa3"),
    longest=8192,
)
def dcgm_output(data: bytes) -> bool:
    mode, output = (data[0] if data else 0) % 4, text_input(data[1:], *_DCGM)
    version_fails, detach_fails = mode == 3, mode == 2
    first = _DCGM[0] if mode == 2 else output
    control = _Dcgm([(first, int(version_fails)), (output, int(detach_fails))])
    shown = output[-4096:].decode("utf-8", "replace")
    version = _version(first[-4096:].decode("utf-8", "replace"))
    try:
        complete(control.pause())
    except Refused as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 1000
        unknown = any(each in shown.lower() for each in ("match for argument", "unknown"))
        assert version_fails or (detach_fails and unknown) or (version is not None and version < (4, 5))
        assert ("--detach-driver" in control.options) == detach_fails
        return False
    except Unavailable as error:
        assert len(str(error).splitlines()) == 1
        assert detach_fails
        assert "couldn't find match for argument" not in shown.lower()
        return False
    assert control.options == ["--version", "--detach-driver"]
    assert mode < 2
    assert version is None or version >= (4, 5)
    return True
