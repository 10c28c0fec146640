"""The emulated API server as tests of the plugin use it: nodes, one account whose role a test chooses, and short cuts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from plugin.cluster.credentials import Kubeconfig
from scrubber.emulator.cluster import Account, ApiServer, HttpResponse, StatusError
from scrubber.emulator.cluster.patches import MERGE_PATCH
from scrubber.emulator.cluster.resources import EVENTS, LEASES, NAMESPACES, NODES, PODS, Json, ResourceType
from tests.cluster.emulated import SOON

REPORTS = frozenset({"get nodes", "patch nodes", "patch nodes/status", "create events", "patch events"})
"""What the role allows where the plugin reports to the cluster."""
RESETS_GPUS = frozenset({f"{verb} gpuresets" for verb in ("list", "get", "create", "delete")})
"""What the role allows beside :data:`REPORTS`, where NVSentinel resets GPUs for the plugin."""
PAUSES_AGENTS = frozenset({"get leases", "create leases", "patch leases"})
"""What the role allows beside :data:`REPORTS`, where the plugin pauses agents by labels."""
NAMESPACE_NAMES = ("scrubber-system", "team-a")


class PluginApiServer(ApiServer):
    """An API server with one account, whose role allows :data:`REPORTS` at first.

    Attributes:
        role: what it allows, in the form of :attr:`scrubber.emulator.cluster.ApiRequest.operation`.
        token: of the account; a replaced one is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._token = self.add_account(_account(REPORTS), "good")
        self._role = REPORTS
        for name in NAMESPACE_NAMES:
            self.api.create(NAMESPACES, {"metadata": {"name": name}})

    @property
    def role(self) -> frozenset[str]:
        return self._role

    @role.setter
    def role(self, operations: Collection[str]) -> None:
        self._role = frozenset(operations)
        self.add_account(_account(operations), self._token)

    @property
    def token(self) -> str:
        return self._token

    @token.setter
    def token(self, token: str) -> None:
        self.revoke(self._token)
        self._token = self.add_account(_account(self._role), token)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds``, which can change with the objects and with every request."""
        assert await self.api.store.changes.wait_until(holds, SOON)

    def stored(self, kind: ResourceType, name: str, namespace: str = "") -> Json:
        """Return an object as it is, also while the server is stopped."""
        found = self.api.store.get(kind, name, namespace)
        assert found is not None, f"there is no {kind.plural} {name}"
        return found

    def replace(self, kind: ResourceType, item: Mapping[str, Any]) -> None:
        """Store ``item`` in place of any object of its name, as another client."""
        metadata = item["metadata"]
        if self.api.store.get(kind, metadata["name"], metadata.get("namespace", "")) is None:
            self.api.create(kind, item)
        else:
            self.api.update(kind, item)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def add_node(self, name: str, **labels: str) -> None:
        """Add a node, or replace it."""
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the kubelet is posting"}
        if self.api.store.get(NODES, name) is not None:
            self.api.delete(NODES, name)
        self.api.create(NODES, {"metadata": {"name": name, "labels": labels}, "status": {"conditions": [ready]}})

    def node(self, name: str) -> Json:
        return self.stored(NODES, name)

    def condition(self, node: str, kind: str) -> Json | None:
        """Return a condition of a node, by its type."""
        found = [each for each in self.node(node)["status"]["conditions"] if each["type"] == kind]
        return found[0] if found else None

    def labels(self, node: str) -> dict[str, str]:
        return dict(self.node(node)["metadata"].get("labels") or {})

    def set_labels(self, node: str, labels: Mapping[str, str | None]) -> None:
        """Replace labels of a node as another client; None removes one."""
        self.api.patch(NODES, node, {"metadata": {"labels": dict(labels)}}, patch_type=MERGE_PATCH)

    # -- pods, events, leases --------------------------------------------------------------------------------------

    def add_pod(self, namespace: str, name: str, uid: str) -> None:
        """Add a pod that runs, with a UID that a test knows beforehand."""
        metadata = {"name": name, "namespace": namespace, "uid": uid}
        item = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": "Running"}}
        self.api.store.put(PODS, item)

    @property
    def evicted(self) -> list[str]:
        """The UIDs of the pods that were removed, in order."""
        changes = self.api.store.changes_since(0)
        removed = (each.before for each in changes if each.kind is PODS and each.after is None)
        return [each["metadata"]["uid"] for each in removed if each is not None]

    @property
    def events(self) -> list[Json]:
        """The events, oldest first."""
        changes = self.api.store.changes_since(0)
        made = (
            each.after["metadata"] for each in changes if each.kind is EVENTS and each.before is None and each.after
        )
        keys = dict.fromkeys((each["name"], each["namespace"]) for each in made)
        found = (self.api.store.get(EVENTS, *key) for key in keys)
        return [each for each in found if each is not None]

    @property
    def leases(self) -> list[Json]:
        return list(self.api.store.items(LEASES))


def _account(operations: Collection[str]) -> Account:
    rules = [
        {"apiGroups": ["*"], "verbs": [verb], "resources": [resource]}
        for each in sorted(operations)
        for verb, resource in [each.split(" ")]
    ]
    return Account("plugin", rules)


def failure(code: int, reason: str, message: str = "", *, after: int | None = None) -> StatusError:
    """Return a refusal of the API server, with ``after`` seconds to wait."""
    return StatusError(code, reason, message or reason, retry_after=after)


def answer(body: Any, code: int = 200) -> HttpResponse:
    """Return an answer with a JSON document."""
    return HttpResponse(code, json.dumps(body).encode())


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
