"""A small API server on loopback: HTTP, watches, access by token, faults on request, and a log of requests.

Promise: a client of Kubernetes that uses nodes, pods, events, leases or the resources of DRA works with it unchanged,
and meets every way in which a real one refuses, delays or loses a request.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import yaml

from scrubber.emulator.cluster.access import ACCESS_REVIEWS, ADMIN, Account, review_access
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.cluster.faults import (
    Answer,
    ApiFault,
    ApiRequest,
    Interceptor,
    RequestLog,
    Silence,
    unauthorized,
)
from scrubber.emulator.cluster.http import Drop, Hang, HttpConnection, HttpRequest, HttpResponse, Raw
from scrubber.emulator.cluster.patches import APPLY_PATCH
from scrubber.emulator.cluster.resources import PODS, Json, ResourceType, Selection
from scrubber.emulator.cluster.status import StatusError
from scrubber.emulator.timings import ClusterTimings

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about."""

    verb: str
    kind: ResourceType
    namespace: str
    name: str
    subresource: str

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


class ApiServer:
    """Serves a :class:`EmulatedApi` on a port of loopback that stays the same over :meth:`stop` and :meth:`start`."""

    def __init__(self, api: EmulatedApi | None = None, *, timings: ClusterTimings | None = None) -> None:
        self.api = api or EmulatedApi()
        self.log = RequestLog()
        self.faults: list[ApiFault] = []
        self.intercept: Interceptor = lambda request: None
        """Called with every request before the faults."""
        self._timings = timings or ClusterTimings()
        self._tokens: dict[str, Account] = {}
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], HttpConnection] = {}
        self._bookmarks = 0
        self._crashes: list[BaseException] = []
        self._port: socket.socket | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop, and free the port.

        Raises:
            BaseExceptionGroup: errors of the emulated server itself; the clients lost their connections.
        """
        await self.stop()
        if self._port is not None:
            self._port.close()
        if self._crashes:
            raise BaseExceptionGroup("the API server emulator failed", self._crashes)

    async def start(self) -> None:
        """Listen. Requests of parts of the cluster in this process are answered as well."""
        if self._port is None:
            # The port stays reserved while the server is stopped: a bound socket that does not listen refuses.
            self._port = socket.socket()
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("127.0.0.1", 0))
        host, port = self._port.getsockname()
        self._server = await asyncio.start_server(self._connected, host, port)
        self.api.available = True

    async def stop(self) -> None:
        """Refuse connections, and abort those that exist; the objects stay."""
        self.api.available = False
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in self._connections.values():
            connection.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await server.wait_closed()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Be unreachable inside the ``with`` block."""
        await self.stop()
        try:
            yield
        finally:
            await self.start()

    @property
    def url(self) -> str:
        if self._port is None:
            raise RuntimeError("the API server was never started")
        return f"http://127.0.0.1:{self._port.getsockname()[1]}"

    # Accounts, faults, watches

    def add_account(self, account: Account = ADMIN, token: str = "") -> str:
        """Return a token for ``account``: a new one, or ``token``, which no other account has from now on."""
        token = token or secrets.token_hex(16)
        self._tokens[token] = account
        return token

    def revoke(self, token: str) -> None:
        """Make a token invalid: its requests get 401."""
        del self._tokens[token]

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        """Write a configuration for clients with ``token``; return ``path``."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "emulated", "cluster": {"server": self.url}}],
            "users": [{"name": "client", "user": {"token": token}}],
            "contexts": [{"name": "emulated", "context": {"cluster": "emulated", "user": "client"}}],
            "current-context": "emulated",
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def inject(self, fault: ApiFault) -> ApiFault:
        """Let a fault meet the requests that it names, before any other; return it for ``faults.remove``."""
        self.faults.insert(0, fault)
        return fault

    def send_bookmarks(self) -> None:
        """Send a bookmark on every watch that allows them."""
        self._bookmarks += 1
        self.api.store.changes.notify()

    # Requests

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served by a task")
        connection = HttpConnection(reader, writer, self.handle)
        self._connections[task] = connection
        try:
            await connection.serve()
        except Exception as error:
            self._crashes.append(error)
            raise
        finally:
            del self._connections[task]
            writer.close()

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request, of a connection or of a client in this process."""
        account = self._tokens.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        target: Target | None = None
        problem: StatusError | None = None
        try:
            target = self._target(request)
        except StatusError as error:
            problem = error
        entry = _log_entry(request, target, account)
        fault = self._meet_fault(entry, target)
        if fault is None or fault is Silence.LOSE:
            response = self._respond(request, target, account, problem)
        else:
            response = _fault_response(fault)
        self._record(replace(entry, code=response.code, sent_bytes=len(response.body)))
        if isinstance(fault, Silence):
            raise Drop if fault is Silence.DROP else Hang
        if isinstance(fault, bytes):
            raise Raw(fault)
        return response

    def _respond(
        self, request: HttpRequest, target: Target | None, account: Account | None, problem: StatusError | None
    ) -> HttpResponse:
        """Carry out a request; return the response, which may be the refusal ``problem``."""
        try:
            if problem is not None:
                raise problem
            if account is None:
                raise unauthorized()
            if request.path == ACCESS_REVIEWS and request.method == "POST":
                return _json(review_access(account, _decoded(request)), 201)
            if target is None:
                return self._discover(request.path)
            account.require(target.verb, target.kind, target.subresource, target.name, target.namespace)
            return self._answer(target, request, account)
        except StatusError as error:
            return _refusal(error)

    def _record(self, entry: ApiRequest) -> None:
        self.log.requests.append(entry)
        self.api.store.changes.notify()

    def _meet_fault(self, entry: ApiRequest, target: Target | None) -> Answer | None:
        """Return what happens to a request instead of the operation; None: nothing."""
        answer = self.intercept(entry)
        if answer is not None:
            return answer
        for fault in self.faults:
            place = (target.verb, target.resource, target.name) if target else ("", "", "")
            if fault.meets(*place, entry.account):
                return fault.answer
        return None

    def _target(self, request: HttpRequest) -> Target | None:
        """Return what the path names; None for a path outside the resources."""
        if request.path == ACCESS_REVIEWS:
            return None
        words = request.path.strip("/").split("/")
        group = words[1] if words[0] == "apis" and len(words) > 1 else ""
        words = words[3 if words[0] == "apis" else 2 :] if words[0] in ("api", "apis") else []
        namespace = ""
        if len(words) > 2 and words[0] == "namespaces" and words[2] not in ("status", "finalize"):
            namespace, words = words[1], words[2:]
        if not words:
            return None
        kind = next((each for each in self.api.types if (each.group, each.plural) == (group, words[0])), None)
        if kind is None or request.method not in _VERBS:
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        name, subresource = (*words[1:3], "", "")[:2]
        verb = _VERBS[request.method]
        if not name and verb == "get":
            verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
        if not name and verb == "delete":
            verb = "deletecollection"
        return Target(verb, kind, namespace, name, subresource)

    def _discover(self, path: str) -> HttpResponse:
        if path in ("/healthz", "/livez", "/readyz"):
            return HttpResponse(200, b'"ok"')
        if path == "/version":
            return _json({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
        for version in {each.api_version for each in self.api.types}:
            if path.strip("/") == (f"apis/{version}" if "/" in version else f"api/{version}"):
                resources = [
                    {
                        "name": each.plural,
                        "kind": each.kind,
                        "namespaced": each.namespaced,
                        "verbs": list(_VERBS.values()),
                    }
                    for each in self.api.types
                    if each.api_version == version
                ]
                return _json({"kind": "APIResourceList", "groupVersion": version, "resources": resources})
        raise StatusError(404, "NotFound", "the server could not find the requested resource")

    def _answer(self, target: Target, request: HttpRequest, account: Account) -> HttpResponse:
        api, kind, name, namespace = self.api, target.kind, target.name, target.namespace
        if target.subresource == "eviction" and kind is PODS and target.verb == "create":
            return _json(api.evict(name, namespace, _decoded(request), account=account), 201)
        if target.subresource == "log" and kind is PODS and target.verb == "get":
            text = api.read_log(name, namespace, request.query.get("container", ""))
            return HttpResponse(200, text.encode(), content_type="text/plain")
        if target.subresource not in ("", *(("status",) if kind.has_status else ())):
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        selection = Selection(namespace, request.query.get("fieldSelector", ""), request.query.get("labelSelector", ""))
        match target.verb:
            case "get":
                return _json(api.get(kind, name, namespace))
            case "list":
                return self._list(kind, selection, request.query)
            case "watch":
                return self._watch(kind, selection, request.query)
            case "create":
                return _json(api.create(kind, self._placed(kind, request, target), account=account), 201)
            case "update":
                item = self._placed(kind, request, target)
                return _json(api.update(kind, item, subresource=target.subresource, account=account))
            case "patch":
                return self._patch(target, request, account)
            case "delete":
                return _json(api.delete(kind, name, namespace, options=_decoded(request), account=account))
        api.delete_collection(kind, selection, account=account)
        return _json({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 200})

    def _placed(self, kind: ResourceType, request: HttpRequest, target: Target) -> Json:
        """Return the object of the body, which has to be in the namespace and under the name of the URL."""
        item = _decoded(request)
        if not isinstance(item, dict) or not isinstance(item.get("metadata") or {}, dict):
            raise StatusError(400, "BadRequest", f"the object provided is not a {kind.kind}")
        metadata = {**(item.get("metadata") or {})}
        for key, expected in (("namespace", target.namespace), ("name", target.name)):
            if metadata.get(key) and expected and metadata[key] != expected:
                message = f"the {key} of the provided object does not match the {key} sent on the request"
                raise StatusError(400, "BadRequest", message)
            if expected:
                metadata[key] = expected
        if not kind.namespaced:
            metadata.pop("namespace", None)
        return {**item, "metadata": metadata}

    def _patch(self, target: Target, request: HttpRequest, account: Account) -> HttpResponse:
        patch_type = request.headers.get("content-type", "").partition(";")[0].strip()
        existed = self.api.store.get(target.kind, target.name, target.namespace) is not None
        patched = self.api.patch(
            target.kind,
            target.name,
            _decoded(request, yaml_allowed=patch_type == APPLY_PATCH),
            target.namespace,
            patch_type=patch_type,
            subresource=target.subresource,
            account=account,
            field_manager=request.query.get("fieldManager", ""),
            force=request.query.get("force") == "true",
        )
        return _json(patched, 200 if existed else 201)

    def _list(self, kind: ResourceType, selection: Selection, query: Mapping[str, str]) -> HttpResponse:
        items = self.api.list(kind, selection)
        version = str(self.api.store.version)
        metadata: Json = {"resourceVersion": version}
        limit = int(query.get("limit") or 0)
        if "continue" in query:
            try:
                version, _, last = base64.b64decode(query["continue"], validate=True).decode().partition(" ")
                self.api.store.changes_since(int(version))
            except ValueError:
                raise StatusError(400, "BadRequest", "continue key is not valid") from None
            items = [each for each in items if _order(each) > last]
            metadata["resourceVersion"] = version
        if limit and len(items) > limit:
            metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
            metadata["continue"] = base64.b64encode(f"{version} {_order(items[-1])}".encode()).decode()
        return _json({"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items})

    # Watches

    def _watch(self, kind: ResourceType, selection: Selection, query: Mapping[str, str]) -> HttpResponse:
        selection.compile(kind)
        asked = query.get("resourceVersion", "")
        if not (asked or "0").isdecimal():
            raise StatusError(400, "BadRequest", f"invalid resource version {asked!r}")
        version = int(asked) if asked not in ("", "0") else None
        if query.get("sendInitialEvents") == "true":
            version = None
        return HttpResponse(200, lines=self._events(kind, selection, query, version))

    async def _events(
        self, kind: ResourceType, selection: Selection, query: Mapping[str, str], version: int | None
    ) -> AsyncIterator[bytes]:
        """Yield the events of a watch, one line each, until its time is over."""
        store = self.api.store
        loop = asyncio.get_running_loop()
        end = loop.time() + float(query.get("timeoutSeconds") or self._timings.watch_timeout)
        bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        bookmark_at, sent = loop.time() + self._timings.bookmark_period, self._bookmarks
        selected = selection.compile(kind)
        if version is None:
            version = store.version
            for item in self.api.list(kind, selection):
                yield _line("ADDED", item)
            if query.get("sendInitialEvents") == "true":
                yield _line("BOOKMARK", _bookmark(kind, version, {INITIAL_EVENTS_END: "true"}))
        while loop.time() < end:
            try:
                events, version = self.api.events_since(kind, selected, version)
            except StatusError as error:
                yield _line("ERROR", error.body)
                return
            for event, item in events:
                yield _line(event, item)
            if bookmarks and (loop.time() >= bookmark_at or sent != self._bookmarks):
                bookmark_at, sent = loop.time() + self._timings.bookmark_period, self._bookmarks
                yield _line("BOOKMARK", _bookmark(kind, version))
            due = min(end, bookmark_at) - loop.time()
            await store.changes.wait_until(_Moved(self, version, sent), max(0.0, due))


@dataclass(frozen=True, slots=True)
class _Moved:
    """Whether there is something to send on a watch."""

    server: ApiServer
    version: int
    bookmarks: int

    def __call__(self) -> bool:
        return self.server.api.store.version > self.version or self.server._bookmarks != self.bookmarks


def _log_entry(request: HttpRequest, target: Target | None, account: Account | None) -> ApiRequest:
    """Return the log's entry of a request that has no answer yet."""
    return ApiRequest(
        at=asyncio.get_running_loop().time(),
        account=account.name if account else "",
        verb=target.verb if target else request.method.lower(),
        resource=target.resource if target else request.path,
        namespace=target.namespace if target else "",
        name=target.name if target else "",
        code=0,
        received_bytes=len(request.body),
        sent_bytes=0,
        http=request,
    )


def _fault_response(fault: Answer) -> HttpResponse:
    """Return the response of a fault; code 0 without one."""
    match fault:
        case StatusError():
            return _refusal(fault)
        case HttpResponse():
            return fault
        case bytes() | Silence():
            return HttpResponse(0)


def _refusal(error: StatusError) -> HttpResponse:
    retry = (("Retry-After", str(error.retry_after)),) if error.retry_after is not None else ()
    return HttpResponse(error.code, json.dumps(error.body).encode(), retry)


def _order(item: Json) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def _bookmark(kind: ResourceType, version: int, annotations: Mapping[str, str] | None = None) -> Json:
    metadata = {"resourceVersion": str(version), **({"annotations": dict(annotations)} if annotations else {})}
    return {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}


def _line(event: str, item: Any) -> bytes:
    return json.dumps({"type": event, "object": item}, separators=(",", ":")).encode() + b"\n"


def _json(body: Any, code: int = 200) -> HttpResponse:
    return HttpResponse(code, json.dumps(body, separators=(",", ":")).encode())


def _decoded(request: HttpRequest, *, yaml_allowed: bool = False) -> Any:
    """Return the body of a request; an empty object without one."""
    if not request.body:
        return {}
    try:
        return yaml.safe_load(request.body) if yaml_allowed else json.loads(request.body)
    except (ValueError, yaml.YAMLError) as error:
        raise StatusError(400, "BadRequest", f"the object provided is unrecognized: {error}") from error
