"""A client of the emulated API server that sees codes, reasons and headers, and objects for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from scrubber.emulator.cluster import Account, ApiServer
from scrubber.emulator.cluster.access import ALL_RULES

SOON = 120.0
"""Seconds within which an expected event happens, on a busy machine too."""
RESOURCE_V1 = "/apis/resource.k8s.io/v1"
SLICES = f"{RESOURCE_V1}/resourceslices"
CLAIMS = f"{RESOURCE_V1}/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"
DRIVER = "gpu.scrubber.dev"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

Json = dict[str, Any]


class Client:
    """One account's client."""

    def __init__(self, server: ApiServer, token: str) -> None:
        self.token = token
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=SOON, trust_env=False)

    async def request(
        self, method: str, path: str, body: Any = None, *, kind: str = "", **query: str
    ) -> httpx2.Response:
        headers = {"Content-Type": kind or "application/json"}
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        return await self.http.request(method, path, content=content, headers=headers, params=query)

    async def send(self, method: str, path: str, body: Any = None, *, kind: str = "", **query: str) -> Json:
        """Send a request that succeeds, and return the object."""
        response = await self.request(method, path, body, kind=kind, **query)
        assert response.status_code < 300, response.text
        return dict(response.json())

    async def refused(self, method: str, path: str, body: Any = None, *, kind: str = "", **query: str) -> Refusal:
        """Send a request that is refused, and return the refusal."""
        response = await self.request(method, path, body, kind=kind, **query)
        assert response.status_code >= 400, response.text
        return Refusal(response)

    @asynccontextmanager
    async def watch(self, path: str, **query: str) -> AsyncIterator[Watch]:
        async with self.http.stream("GET", path, params={"watch": "true", **query}) as response:
            assert response.status_code == 200, await response.aread()
            yield Watch(response)


class Refusal:
    """A ``Status`` with its HTTP code."""

    def __init__(self, response: httpx2.Response) -> None:
        status = response.json()
        self.code = response.status_code
        self.reason = status["reason"]
        self.message = status["message"]
        self.fields = {each["field"] for each in status.get("details", {}).get("causes", [])}
        self.causes = [each["reason"] for each in status.get("details", {}).get("causes", [])]
        self.retry_after = response.headers.get("Retry-After")
        assert status["code"] == self.code


class Watch:
    """The events of a watch, one after another."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, Json]:
        async with asyncio.timeout(SOON):
            event = json.loads(await anext(self._lines))
        return event["type"], event["object"]

    async def names(self, count: int) -> list[tuple[str, str]]:
        """Return the next events: type and name of the object."""
        return [(kind, item["metadata"]["name"]) for kind, item in [await self.next() for _ in range(count)]]

    async def ends(self) -> bool:
        """Whether the server ends the watch without another event."""
        async with asyncio.timeout(SOON):
            return [line async for line in self._lines] == []


@asynccontextmanager
async def client_of(server: ApiServer, account: Account | None = None) -> AsyncIterator[Client]:
    """Provide a client, by default of an administrator."""
    client = Client(server, server.add_account(account or Account("admin")))
    try:
        yield client
    finally:
        await client.http.aclose()


def allowed(*operations: str, names: Mapping[str, list[str]] | None = None) -> list[Json]:
    """Return rules that allow operations such as ``get resourceclaims/status``, in the group of DRA and the core."""
    names = names or {}
    return [
        {
            "apiGroups": ["", "resource.k8s.io"],
            "verbs": [verb],
            "resources": [resource],
            "resourceNames": names.get(each, []),
        }
        for each in operations
        for verb, resource in [each.split(" ")]
    ]


EVERYTHING = ALL_RULES


def node(name: str = "node-a", **labels: str) -> Json:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def pod(name: str, *, node: str = "", **spec: Any) -> Json:
    place = {"nodeName": node} if node else {}
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main"}], **place, **spec}}


def device(name: str, **more: Any) -> Json:
    return {"name": name, **more}


def slice_of(*devices: Json, name: str = "slice-0", node: str = "node-a", driver: str = DRIVER, **spec: Any) -> Json:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {"driver": driver, "pool": pool, "nodeName": node, "devices": list(devices), **spec},
    }


def claim(name: str = "claim", *, count: int = 1, device_class: str = "gpu", **request: Any) -> Json:
    exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count, **request}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "main", "exactly": exactly}]}},
    }


def allocation(*devices: str, node: str = "node-a", driver: str = DRIVER, pool: str = "node-a") -> Json:
    results = [{"request": "main", "driver": driver, "pool": pool, "device": each} for each in devices]
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]}}


def device_status(name: str = "gpu-0", *, driver: str = DRIVER, pool: str = "node-a", **more: Any) -> Json:
    return {"driver": driver, "pool": pool, "device": name, **more}
