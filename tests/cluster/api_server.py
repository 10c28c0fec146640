"""A stand-in for the API server on loopback: real HTTP, the resources that the plugin uses, and all failures.

It enforces the rules that decide whether a real one would accept our requests: the supported patch types, the namespace
of a node's events, preconditions on UIDs, and the verbs on resources that the role allows.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from plugin.cluster.credentials import Kubeconfig
from tests.plugin_collaborators import Bell

STRATEGIC, MERGE, JSON = "application/strategic-merge-patch+json", "application/merge-patch+json", "application/json"

Json = dict[str, Any]

_VERBS = {"GET": "get", "PATCH": "patch", "POST": "create", "PUT": "update", "DELETE": "delete"}
RESETS_GPUS = frozenset({f"{verb} gpuresets" for verb in ("list", "get", "create", "delete")})
"""What the role allows beside :attr:`ApiServerStandIn.allowed`, where NVSentinel resets GPUs for the plugin."""
PAUSES_AGENTS = frozenset({"get leases", "create leases", "patch leases"})
"""What the role allows beside :attr:`ApiServerStandIn.allowed`, where the plugin pauses agents by labels."""


@dataclass(frozen=True)
class Request:
    """One request, as received."""

    method: str
    path: str
    kind: str
    token: str
    body: Json
    query: dict[str, list[str]] = field(default_factory=dict)
    encodings: str = ""

    @property
    def what(self) -> str:
        """The operation as a role names it, such as ``patch nodes/status``."""
        words = self.path.strip("/").split("/")
        if words == ["version"]:
            return "get version"
        prefix = 2 if words[0] == "api" else 3
        words = words[words.index("namespaces") + 2 :] if "namespaces" in words else words[prefix:]
        resource = "/".join([words[0], *words[2:]])
        if "watch" in self.query:
            return f"watch {resource}"
        if self.method == "GET" and len(words) == 1:
            return f"list {resource}"
        return f"{_VERBS[self.method]} {resource}"


@dataclass(frozen=True)
class Response:
    """One response. ``raw`` replaces everything on the wire; None with ``hang`` for no response at all."""

    code: int = 200
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None
    hang: bool = False


def failure(code: int, reason: str, message: str = "", *, after: int | None = None) -> Response:
    """Return a ``Status``, as in the API server's refusals."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": message or reason,
        "code": code,
    }
    return Response(code, body, () if after is None else (("Retry-After", str(after)),))


HANG = Response(hang=True)
DROP = Response(raw=b"")

Fault = Callable[[Request], Response | None]


class ApiServerStandIn:
    """Nodes, events, pods, leases, and resets of GPUs.

    Attributes:
        leases: by namespace and name.
        gpu_resets: NVSentinel's ``GPUReset`` objects by name; None: the cluster does not have that kind.
        finalized: whether a ``GPUReset`` that is deleted goes at once; otherwise it gets a deletion time.
        allowed: what the role allows, in the form of :attr:`Request.what`.
        fault: called first; None: no fault.
        guarded: UIDs of pods that a disruption budget protects.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.requests: list[Request] = []
        self.nodes: dict[str, Json] = {}
        self.events: dict[tuple[str, str], Json] = {}
        self.pods: dict[tuple[str, str], str] = {}
        self.leases: dict[tuple[str, str], Json] = {}
        self.gpu_resets: dict[str, Json] | None = None
        self.finalized: Callable[[str], bool] = lambda name: True
        self.evicted: list[str] = []
        self.guarded: set[str] = set()
        self.token = "good"
        self.allowed = {
            "get nodes",
            "patch nodes",
            "patch nodes/status",
            "create events",
            "patch events",
        }
        self.fault: Fault = lambda request: None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._claim: socket.socket | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()
        if self._claim is not None:
            self._claim.close()

    async def start(self) -> None:
        """Start on the previous port, if there was one.

        The port stays reserved in between: a socket that is bound and does not listen refuses connections.
        """
        if self._claim is None:
            self._claim = socket.socket()
            self._claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._claim.bind(("127.0.0.1", 0))
            self.port = self._claim.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Stop and abort all connections."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_node(self, name: str, **labels: str) -> Json:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the kubelet is posting"}
        self.nodes[name] = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "uid": f"uid-of-{name}", "labels": dict(labels), "resourceVersion": "1"},
            "spec": {},
            "status": {"conditions": [ready]},
        }
        return self.nodes[name]

    def condition(self, node: str, kind: str) -> Json | None:
        """Return a condition of a node, by its type."""
        found = [each for each in self.nodes[node]["status"]["conditions"] if each["type"] == kind]
        return found[0] if found else None

    def requests_for(self, what: str) -> list[Request]:
        return [each for each in self.requests if each.what == what]

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.bell.until(holds)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while request := await self._read(reader):
                self.requests.append(request)
                response = self.fault(request) or self._answer(request)
                self.bell.ring()
                if response.hang:
                    await reader.read()  # until the other end has had enough
                    return
                if response.raw is not None:
                    writer.write(response.raw)
                    return
                if request.what == "watch nodes" and response.code == 200:
                    await self._watch_node(request, writer)
                    return
                body = response.body if isinstance(response.body, bytes) else json.dumps(response.body).encode()
                headers = {"Content-Type": JSON, "Content-Length": str(len(body)), **dict(response.headers)}
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value)
                writer.write(f"HTTP/1.1 {response.code} Word\r\n{lines}\r\n".encode() + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        split = urlsplit(target)
        return Request(
            method,
            split.path,
            headers.get("content-type", ""),
            headers.get("authorization", ""),
            json.loads(body) if body else {},
            parse_qs(split.query),
            headers.get("accept-encoding", ""),
        )

    # -- the API -------------------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Response:
        if request.token != f"Bearer {self.token}":
            return failure(401, "Unauthorized")
        if request.what not in self.allowed:
            return failure(403, "Forbidden", f"the role does not allow: {request.what}")
        words = request.path.strip("/").split("/")
        match [request.method, *words]:
            case ["GET", "api", "v1", "nodes"] if "watch" in request.query:
                return Response(200)
            case ["GET", "api", "v1", "nodes", name]:
                return self._node(name, request)
            case ["PATCH", "api", "v1", "nodes", name, *_]:
                return self._node(name, request)
            case ["POST", "api", "v1", "namespaces", namespace, "events"]:
                return self._new_event(namespace, request.body)
            case ["PATCH", "api", "v1", "namespaces", namespace, "events", name]:
                return self._patched_event(namespace, name, request)
            case ["POST", "api", "v1", "namespaces", namespace, "pods", name, "eviction"]:
                return self._eviction(namespace, name, request.body)
            case [
                "GET" | "PATCH" | "POST",
                "apis",
                "coordination.k8s.io",
                "v1",
                "namespaces",
                namespace,
                "leases",
                *rest,
            ]:
                return self._lease(namespace, rest, request)
            case [_, "apis", "janitor.dgxc.nvidia.com", "v1alpha1", "gpuresets", *rest] if self.gpu_resets is not None:
                return self._gpu_reset(self.gpu_resets, rest, request)
        return failure(404, "NotFound", request.path)

    def _gpu_reset(self, known: dict[str, Json], rest: list[str], request: Request) -> Response:
        if request.method == "GET" and not rest:
            key, _, value = request.query["labelSelector"][0].partition("=")
            items = [each for each in known.values() if each["metadata"].get("labels", {}).get(key) == value]
            return Response(200, {"kind": "GPUResetList", "apiVersion": "v1", "metadata": {}, "items": items})
        name = rest[0] if rest else request.body["metadata"]["name"]
        if request.method == "POST":
            if name in known:
                return failure(409, "AlreadyExists", f'gpuresets "{name}" already exists')
            known[name] = {"metadata": {}, **request.body}
            return Response(201, known[name])
        if name not in known:
            return failure(404, "NotFound", f'gpuresets.janitor.dgxc.nvidia.com "{name}" not found')
        found = known[name]
        if request.method == "DELETE":
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if self.finalized(name):
                del known[name]
        return Response(200, found)

    async def _watch_node(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """Write the node that the request selects, now and after each change, as a watch does."""
        (selector,) = request.query["fieldSelector"]
        key, _, name = selector.partition("=")
        assert key == "metadata.name"
        writer.write(f"HTTP/1.1 200 Word\r\nContent-Type: {JSON}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        kind, sent = "ADDED", ""
        while True:
            line = json.dumps({"type": kind, "object": self.nodes[name]}) + "\n"
            if line != sent:
                writer.write(f"{len(line):x}\r\n{line}\r\n".encode())
                await writer.drain()
                sent = line
            kind = "MODIFIED"
            await self.bell.rung()

    def relabel(self, name: str, **labels: str) -> None:
        """Replace labels of a node; keys with ``__`` for ``/`` and ``_`` for ``.``."""
        self.set_labels(name, {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()})

    def set_labels(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Replace labels of a node as another client; None removes one."""
        metadata = self.nodes[name]["metadata"]
        changed = metadata["labels"] | labels
        metadata["labels"] = {key: value for key, value in changed.items() if value is not None}
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        self.bell.ring()

    def labels(self, name: str) -> dict[str, str]:
        return dict(self.nodes[name]["metadata"]["labels"])

    def _node(self, name: str, request: Request) -> Response:
        node = self.nodes.get(name)
        if node is None:
            return failure(404, "NotFound", f'nodes "{name}" not found')
        if request.method == "PATCH":
            if request.kind != STRATEGIC:
                return failure(415, "UnsupportedMediaType")
            version = request.body.get("metadata", {}).get("resourceVersion")
            if version not in (None, node["metadata"]["resourceVersion"]):
                return failure(409, "Conflict", "the object has been modified")
            node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)
            if request.path.endswith("/status"):
                kept = {each["type"]: each for each in node["status"]["conditions"]}
                for each in request.body["status"]["conditions"]:
                    kept[each["type"]] = kept.get(each["type"], {}) | each
                node["status"]["conditions"] = list(kept.values())
            else:
                labels = node["metadata"]["labels"] | request.body["metadata"].get("labels", {})
                node["metadata"]["labels"] = {key: value for key, value in labels.items() if value is not None}
                node["spec"] |= request.body.get("spec", {})  # taints have no merge key: the list is replaced
        return Response(200, node)

    def _lease(self, namespace: str, rest: list[str], request: Request) -> Response:
        spec = request.body.get("spec", {})
        if "renewTime" in spec and not re.fullmatch(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}\.\d{6}Z", spec["renewTime"]):
            return failure(400, "BadRequest", f'parsing time "{spec["renewTime"]}": cannot parse as ".000000"')
        key = namespace, rest[0] if rest else request.body["metadata"]["name"]
        found = self.leases.get(key)
        if request.method == "POST":
            if found is not None:
                return failure(409, "AlreadyExists", f'leases.coordination.k8s.io "{key[1]}" already exists')
            metadata = request.body["metadata"] | {"resourceVersion": "1"}
            self.leases[key] = request.body | {"metadata": metadata}
            return Response(201, self.leases[key])
        if found is None:
            return failure(404, "NotFound", f'leases.coordination.k8s.io "{key[1]}" not found')
        if request.method == "PATCH":
            version = found["metadata"]["resourceVersion"]
            if request.body["metadata"].get("resourceVersion") not in (None, version):
                return failure(409, "Conflict", "the object has been modified")
            metadata = found["metadata"] | {"resourceVersion": str(int(version) + 1)}
            changed = {name: value for name, value in (found["spec"] | spec).items() if value is not None}
            self.leases[key] = found | {"metadata": metadata, "spec": changed}
        return Response(200, self.leases[key])

    def _new_event(self, namespace: str, event: Json) -> Response:
        about, name = event["involvedObject"], event["metadata"]["name"]
        if about.get("namespace", "default") != namespace or event["metadata"].get("namespace", namespace) != namespace:
            return failure(422, "Invalid", "involvedObject.namespace: does not match event.namespace")
        if (namespace, name) in self.events:
            return failure(409, "AlreadyExists", f'events "{name}" already exists')
        self.events[namespace, name] = event
        return Response(201, event)

    def _patched_event(self, namespace: str, name: str, request: Request) -> Response:
        event = self.events.get((namespace, name))
        if event is None:
            return failure(404, "NotFound", f'events "{name}" not found')
        if request.kind not in (MERGE, STRATEGIC):
            return failure(415, "UnsupportedMediaType")
        event |= request.body
        return Response(200, event)

    def _eviction(self, namespace: str, name: str, eviction: Json) -> Response:
        if (eviction["apiVersion"], eviction["kind"], eviction["metadata"]["name"]) != ("policy/v1", "Eviction", name):
            return failure(400, "BadRequest", "name in URL does not match name in Eviction object")
        uid = self.pods.get((namespace, name))
        if uid is None:
            return failure(404, "NotFound", f'pods "{name}" not found')
        if eviction["deleteOptions"]["preconditions"]["uid"] != uid:
            return failure(409, "Conflict", "the UID in the precondition does not match the UID in record")
        if uid in self.guarded:
            return failure(429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.")
        del self.pods[namespace, name]
        self.evicted.append(uid)
        return Response(201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})


def kubeconfig(directory: Path, server: str, *, token: str = "good", **user: Any) -> Kubeconfig:
    """Write a kubeconfig into ``directory``, with the token in a separate file, which a test may replace."""
    secret = directory / "token"
    secret.write_text(token)
    path = directory / "kubeconfig"
    written = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user or {"tokenFile": str(secret)}}],
    }
    path.write_text(yaml.safe_dump(written))
    return Kubeconfig(path)
