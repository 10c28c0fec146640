"""A model of the API server's ResourceSlices: what it sets, what it drops, and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plugin.cluster.errors import ApiConflict, ApiInvalidRequest, ApiNotFound
from plugin.dra.slices import SlicePlan
from tests.plugin_collaborators import Bell

Json = dict[str, Any]

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_ID = "[A-Za-z_][A-Za-z0-9_]{0,31}"


def slice_errors(slice_: Mapping[str, Any]) -> list[str]:
    """Return every reason for which Kubernetes 1.36 would refuse a slice of one node."""
    spec, name = slice_["spec"], slice_["metadata"]["name"]
    devices, counters = spec.get("devices") or [], spec.get("sharedCounters") or []
    found = [] if re.fullmatch(rf"{_LABEL}([.]{_LABEL})*", name) and len(name) <= 253 else [f"name {name}"]
    found += ["counters beside devices"] if devices and counters else []
    heavy = any("taints" in each or "consumesCounters" in each for each in devices)
    found += [f"{len(devices)} devices"] if len(devices) > (64 if heavy else 128) else []
    found += [f"{len(counters)} sets of counters"] if len(counters) > 8 else []
    names = [each["name"] for each in devices]
    found += ["a device is there twice"] if len(set(names)) != len(names) else []
    found += [f"device name {each}" for each in names if not re.fullmatch(_LABEL, each)]
    for device in devices:
        attributes, capacity = device.get("attributes", {}), device.get("capacity", {})
        found += ["too many attributes"] if len(attributes) + len(capacity) > 32 else []
        for key, value in attributes.items():
            domain, _, id_ = key.rpartition("/")
            found += [f"attribute {key}"] if not re.fullmatch(_ID, id_) or len(domain) > 63 else []
            found += [f"value of {key}"] if len(str(next(iter(value.values())))) > 64 or len(value) != 1 else []
            version = value.get("version", "0.0.0")
            found += [f"version {version}"] if not re.fullmatch(r"(0|[1-9]\d*)([.](0|[1-9]\d*)){2}", version) else []
        ready, failed = device.get("bindingConditions", []), device.get("bindingFailureConditions", [])
        wrong = bool(ready) is not bool(failed) or max(len(ready), len(failed)) > 4 or set(ready) & set(failed)
        found += [f"binding conditions {ready} and {failed}"] if wrong else []
        found += ["too many taints"] if len(device.get("taints", [])) > 16 else []
        for taint in device.get("taints", []):
            key = taint["key"].rpartition("/")[2]
            found += [f"taint {key}"] if not re.fullmatch("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", key) else []
    return found


@dataclass
class SliceStore:
    """ResourceSlices with their versions; ``dropped``: fields of devices whose feature gate is off."""

    slices: dict[str, Json] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    history: list[tuple[int, str, Json]] = field(default_factory=list)
    bell: Bell = field(default_factory=Bell)
    versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    uids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    clock: itertools.count[int] = field(default_factory=lambda: itertools.count(10))

    def write(self, slice_: Mapping[str, Any]) -> Json:
        """Keep a slice as the API server does, with times of new taints."""
        if errors := slice_errors(slice_):
            raise ApiInvalidRequest(f"The API server returned 422: {errors}")
        kept = copy.deepcopy(dict(slice_))
        version = next(self.versions)
        kept["metadata"] |= {"resourceVersion": str(version), "uid": self.uid(kept["metadata"]["name"])}
        added = f"2031-05-06T07:08:{next(self.clock)}Z"
        for device in kept["spec"].get("devices", []):
            for name in self.dropped:
                device.pop(name, None)
            for taint in device.get("taints", []):
                taint.setdefault("timeAdded", added)
        if "sharedCounters" in self.dropped:
            kept["spec"].pop("sharedCounters", None)
        name = kept["metadata"]["name"]
        self.history.append((version, "MODIFIED" if name in self.slices else "ADDED", kept))
        self.slices[name] = kept
        self.bell.ring()
        return copy.deepcopy(kept)

    def uid(self, name: str) -> str:
        """Return the UID of a slice, which one that is created again under its name does not have."""
        found = self.slices.get(name)
        return f"uid-{next(self.uids)}" if found is None else found["metadata"]["uid"]

    def check(self, sent: Mapping[str, Any]) -> None:
        """Refuse a change of a slice that is not as ``sent`` states, or of none."""
        known, found = sent["metadata"], self.slices.get(sent["metadata"]["name"])
        if found is None:
            raise ApiNotFound("not found")
        if any(known.get(key) != found["metadata"][key] for key in ("uid", "resourceVersion")):
            raise ApiConflict("modified")

    def delete(self, name: str) -> None:
        """Delete a slice, as any client may."""
        version = next(self.versions)
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(version)
        self.history.append((version, "DELETED", gone))
        self.bell.ring()

    def apply(self, plan: SlicePlan) -> None:
        for each in (*plan.create, *plan.replace):
            self.write(each)
        for gone in plan.delete:
            self.delete(gone["metadata"]["name"])

    def devices(self) -> list[Json]:
        """Return all devices in the order in which the scheduler sees them."""
        return [device for _, each in sorted(self.slices.items()) for device in each["spec"].get("devices", [])]

    def names(self) -> list[str]:
        return [device["name"] for device in self.devices()]

    def taints(self) -> dict[str, list[str]]:
        """Return the keys of the taints of each device that has any."""
        found = {each["name"]: [taint["key"] for taint in each.get("taints", [])] for each in self.devices()}
        return {name: keys for name, keys in found.items() if keys}


async def _nothing(what: str) -> None:
    return


@dataclass
class FakeSliceApi:
    """The requests about slices; ``fault`` is called first, with the verb, and may raise."""

    store: SliceStore = field(default_factory=SliceStore)
    node_uid: str = "uid-of-node-1"
    requests: list[str] = field(default_factory=list)
    fault: Callable[[str], Awaitable[None]] = _nothing
    watching: int = 0
    expired: bool = False

    async def _requested(self, verb: str) -> None:
        self.requests.append(verb)
        self.store.bell.ring()
        await self.fault(verb)

    async def get_node_uid(self) -> str:
        await self._requested("get node")
        return self.node_uid

    async def list_slices(self, driver: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
        await self._requested("list")
        found = [copy.deepcopy(each) for each in self.store.slices.values()]
        return str(self.store.history[-1][0] if self.store.history else 0), found

    async def create_slice(self, slice_: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._requested("create")
        return self.store.write(slice_)

    async def replace_slice(self, slice_: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._requested("update")
        self.store.check(slice_)
        return self.store.write(slice_)

    async def delete_slice(self, slice_: Mapping[str, Any]) -> None:
        await self._requested("delete")
        self.store.check(slice_)
        self.store.delete(slice_["metadata"]["name"])

    async def watch_slices(self, driver: str, version: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        await self._requested("watch")
        if self.expired:
            self.expired = False
            raise ApiNotFound("The API server returned 410: too old resource version")
        sent = int(version)
        self.watching += 1
        self.store.bell.ring()
        try:
            while True:
                for number, kind, slice_ in list(self.store.history):
                    if number > sent:
                        sent = number
                        yield kind, copy.deepcopy(slice_)
                await self.store.bell.rung()
        finally:
            self.watching -= 1

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.store.bell.until(holds)


async def settled() -> None:
    """Let every task that is ready run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)
