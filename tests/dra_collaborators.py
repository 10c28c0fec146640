"""Minimal fakes of the DRA driver's peers. Each rings a bell at every event, so that no test waits for a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from plugin.api import dra_v1_pb2_grpc, dra_v1beta1_pb2_grpc
from plugin.api import pluginregistration_pb2 as registration
from plugin.api import pluginregistration_pb2_grpc as registration_rpc
from plugin.cluster.errors import ApiConflict, ApiNotFound
from plugin.cluster.port import EventContent
from plugin.dra.claim_service import (
    CertificateExtract,
    ClaimDeviceRequest,
    ClaimGrant,
    ClaimToRestore,
    DeviceOutOfService,
    RecordedClaim,
    ReleaseProgress,
)
from plugin.dra.claims import ClaimIdentity, ClaimPod
from tests.plugin_collaborators import DEADLINE, Bell

STUBS: dict[str, Any] = {
    "v1.DRAPlugin": dra_v1_pb2_grpc.DRAPluginStub,
    "v1beta1.DRAPlugin": dra_v1beta1_pb2_grpc.DRAPluginStub,
}


@dataclass
class Visit:
    """What a visited driver answered, and the connection to the socket that it named."""

    info: registration.PluginInfo
    channel: grpc.aio.Channel

    def driver(self, version: str = "v1.DRAPlugin") -> Any:
        return STUBS[version](self.channel)


async def visit(socket: Path, *, error: str = "") -> Visit:
    """Do what the kubelet's plugin watcher does with a socket that it found; ``error``: refuse the driver."""
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub = registration_rpc.RegistrationStub(channel)
        info: registration.PluginInfo = await stub.GetInfo(registration.InfoRequest(), timeout=DEADLINE)
        status = registration.RegistrationStatus(plugin_registered=not error, error=error)
        await stub.NotifyRegistrationStatus(status, timeout=DEADLINE)
    return Visit(info, grpc.aio.insecure_channel(f"unix:{info.endpoint}"))


class Directory:
    """The kubelet's two directories for DRA drivers."""

    def __init__(self, root: Path) -> None:
        self.plugins = root / "plugins"
        self.registry = root / "registry"
        self.plugins.mkdir()
        self.registry.mkdir()

    def names(self) -> list[str]:
        """Return the files that the kubelet looks at, in both directories."""
        found = [*self.registry.iterdir(), *self.plugins.glob("*/*")]
        return sorted(path.name for path in found if not path.name.startswith("."))


async def _nothing(claim_uid: str) -> None:
    return


@dataclass
class FakeClaimService:
    """A scrub service that grants everything, unless the test makes it raise or wait.

    Attributes:
        prepared: claim UID → the ids of its devices.
        on_prepare, on_release, on_list: called first, with the claim's UID.
        progress: what a release returns; by default it is done.
        waits: the ``wait_seconds`` of every call.
        refs: the claims that were ever to be prepared; releasing: UIDs of prepared claims that are listed as releasing.
        extended_resources, restores: of every call to prepare.
        withdrawn: of every call to prepare and to unprepare.
        unprepared: the claims that are listed so.
    """

    bell: Bell = field(default_factory=Bell)
    prepared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    requests: list[tuple[str, tuple[ClaimDeviceRequest, ...], tuple[ClaimPod, ...], str]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    pods: list[tuple[str, tuple[ClaimPod, ...]]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    on_prepare: Callable[[str], Awaitable[None]] = _nothing
    on_release: Callable[[str], Awaitable[None]] = _nothing
    on_list: Callable[[str], Awaitable[None]] = _nothing
    lists: int = 0
    progress: Mapping[str, ReleaseProgress] = field(default_factory=dict)
    refs: dict[str, ClaimIdentity] = field(default_factory=dict)
    releasing: set[str] = field(default_factory=set)
    extended_resources: list[tuple[str, ...]] = field(default_factory=list)
    restores: list[bool] = field(default_factory=list)
    withdrawn: list[bool] = field(default_factory=list)
    unprepared: list[ClaimToRestore] = field(default_factory=list)

    async def prepare_claim(
        self,
        claim: ClaimIdentity,
        devices: Sequence[ClaimDeviceRequest],
        pods: Sequence[ClaimPod],
        *,
        driver: str,
        wait_seconds: float,
        extended_resources: Sequence[str] = (),
        restores: bool = False,
        withdrawn: bool = False,
    ) -> Sequence[ClaimGrant]:
        self.waits.append(wait_seconds)
        self.extended_resources.append(tuple(extended_resources))
        self.restores.append(restores)
        self.withdrawn.append(withdrawn)
        self.refs[claim.uid] = claim
        self.requests.append((claim.uid, tuple(devices), tuple(pods), driver))
        self.bell.ring()
        await self.on_prepare(claim.uid)
        self.releasing.discard(claim.uid)
        self.prepared[claim.uid] = tuple(each.device_id for each in devices)
        return [
            ClaimGrant(each.device_id, CertificateExtract(f"certificate-of-{each.device_id}", "sha256:0", 7.0))
            for each in devices
            if not each.admin_access
        ]

    async def unprepare_claim(self, claim_uid: str, *, wait_seconds: float, withdrawn: bool = False) -> ReleaseProgress:
        self.waits.append(wait_seconds)
        self.withdrawn.append(withdrawn)
        self.released.append(claim_uid)
        self.bell.ring()
        await self.on_release(claim_uid)
        progress = self.progress.get(claim_uid, ReleaseProgress(done=True))
        if progress.done:
            self.prepared.pop(claim_uid, None)
        else:
            self.releasing.add(claim_uid)
        return progress

    async def set_claim_pods(self, claim_uid: str, pods: Sequence[ClaimPod]) -> None:
        self.pods.append((claim_uid, tuple(pods)))
        self.bell.ring()

    async def list_claims(self) -> Sequence[RecordedClaim]:
        self.lists += 1
        self.bell.ring()
        await self.on_list("")
        return [
            RecordedClaim(
                self.refs.get(uid, ClaimIdentity("", "", uid)), "gpu.scrubber.dev", devices, uid in self.releasing
            )
            for uid, devices in self.prepared.items()
        ]

    async def list_unprepared_claims(self) -> Sequence[ClaimToRestore]:
        self.lists += 1
        self.bell.ring()
        await self.on_list("")
        return list(self.unprepared)


def allocated_claim(
    ref: ClaimIdentity,
    *devices: str,
    driver: str = "gpu.scrubber.dev",
    pool: str = "node-1",
    pods: Sequence[str] = ("pod-a",),
    **facts: Any,
) -> dict[str, Any]:
    """Return a claim as the API server has it; ``devices`` as ``request:name``, ``facts``: fields of every result."""
    results = [
        {"request": request, "driver": driver, "pool": pool, "device": name, **facts}
        for request, _, name in (each.partition(":") for each in devices)
    ]
    return {
        "metadata": {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "resourceVersion": "1"},
        "status": {
            "allocation": {"devices": {"results": results, "config": []}},
            "reservedFor": [{"resource": "pods", "name": each, "uid": f"uid-of-{each}"} for each in pods],
        },
    }


@dataclass
class FakeClaimApi:
    """Claims and events of an API server; ``fault`` is called first and may raise."""

    claims: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[tuple[str, str], EventContent] = field(default_factory=dict)
    patches: list[tuple[str, str, Any]] = field(default_factory=list)
    bell: Bell = field(default_factory=Bell)
    reads: int = 0
    fault: Callable[[str], Awaitable[None]] = _nothing

    def add(self, claim: dict[str, Any]) -> None:
        self.claims[claim["metadata"]["namespace"], claim["metadata"]["name"]] = claim

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any]:
        self.reads += 1
        self.bell.ring()
        await self.fault("get")
        if (namespace, name) not in self.claims:
            raise ApiNotFound(f'resourceclaims "{name}" not found')
        return self.claims[namespace, name]

    async def get_device_class(self, name: str) -> Mapping[str, Any]:
        await self.fault("get-class")
        if name not in self.classes:
            raise ApiNotFound(f'deviceclasses "{name}" not found')
        return self.classes[name]

    async def patch_claim_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Mapping[str, Any]:
        await self.fault("patch")
        if (namespace, name) not in self.claims:
            raise ApiNotFound(f'resourceclaims "{name}" not found')
        claim = self.claims[namespace, name]
        version = patch.get("metadata", {}).get("resourceVersion")
        if version not in (None, claim["metadata"]["resourceVersion"]):
            raise ApiConflict("the object has been modified")
        claim["status"] = claim["status"] | patch["status"]
        claim["metadata"]["resourceVersion"] = str(int(claim["metadata"]["resourceVersion"]) + 1)
        self.patches.append((namespace, name, patch))
        self.bell.ring()
        return claim

    async def create_event(self, event: EventContent, now: datetime) -> None:
        await self.fault("event")
        key = event.target.event_namespace, event.name
        if key in self.events:
            raise ApiConflict("exists")
        self.events[key] = event
        self.bell.ring()

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int:
        self.bell.ring()
        return 2


@dataclass
class FakeWithdrawal:
    """Withdraws devices as soon as the test allows it."""

    withdrawn: list[tuple[str, ...]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    works: bool = True

    async def withdraw(self, devices: Sequence[DeviceOutOfService], timeout: float) -> bool:
        self.timeouts.append(timeout)
        self.withdrawn.append(tuple(each.device_id for each in devices))
        return self.works


async def forever(claim_uid: str) -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
