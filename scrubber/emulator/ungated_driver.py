"""An ordinary DRA driver without scrubbing: the "before" of the demo with claims.

Promise: its containers get the same CDI specifications as from the real driver, so that the gate is the only difference
in the scenario. Every device is always published without a taint, no service is queried, and Unprepare is immediate.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from plugin.dra.cdi import ClaimCdiSpecs
from plugin.dra.claim_driver import ClaimAnswer, InjectedDevice
from plugin.dra.claims import ClaimIdentity, read_claim
from plugin.dra.device_names import device_names
from plugin.dra.paths import DriverSocketPaths
from plugin.dra.registration import DriverRegistration, DriverRegistrationTimes
from plugin.dra.server import HealthStream, add_driver_services
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.logs import create_logger
from scrubber.emulator.claim_cluster import DRIVER, NODE_NAME
from scrubber.emulator.cluster import EmulatedApi
from scrubber.emulator.cluster.resources import CLAIMS, SLICES
from scrubber.emulator.kubelet import Kubelet

__all__ = ["UngatedDriver"]


class _OpenGate:
    """Prepares every claim at once."""

    def __init__(self, cluster: EmulatedApi, devices: Mapping[str, AdvertisedDevice], specs: ClaimCdiSpecs) -> None:
        self._cluster = cluster
        self._devices = devices
        self._specs = specs

    async def prepare(self, claims: Sequence[ClaimIdentity], remaining: float | None) -> Mapping[str, ClaimAnswer]:
        return {each.uid: self._prepare(each) for each in claims}

    async def unprepare(self, claims: Sequence[ClaimIdentity], remaining: float | None) -> Mapping[str, ClaimAnswer]:
        for each in claims:
            self._specs.remove(each.uid)
        return {each.uid: ClaimAnswer() for each in claims}

    def _prepare(self, ref: ClaimIdentity) -> ClaimAnswer:
        claim = read_claim(ref, self._cluster.get(CLAIMS, ref.name, ref.namespace), DRIVER, NODE_NAME)
        devices = {each.name: self._devices[each.name] for each in claim.devices}
        staged = self._specs.stage(ref.uid, devices, claim.names_by_request())
        staged.publish()
        return ClaimAnswer(
            tuple(
                InjectedDevice((request,), each.pool, each.name, staged.cdi_ids[request, each.name])
                for each in claim.devices
                for request in each.requests
            )
        )


class UngatedDriver:
    """Runs in the caller's event loop. Use as ``async with``; it publishes and starts to register when entered."""

    def __init__(self, kubelet: Kubelet, cluster: EmulatedApi, devices: Iterable[AdvertisedDevice]) -> None:
        log = create_logger("json", "error")
        self._cluster = cluster
        self._devices = {each.id: each for each in devices}
        self._names = device_names(self._devices)
        by_name = {name: self._devices[id_] for id_, name in self._names.items()}
        gate = _OpenGate(cluster, by_name, ClaimCdiSpecs(kubelet.cdi_directory, DRIVER, log=log))
        advertised = AdvertisedDevices()
        self._registration = DriverRegistration(
            DriverSocketPaths(DRIVER, kubelet.plugins, kubelet.plugins_registry),
            add_services=lambda server: add_driver_services(server, gate, HealthStream(NODE_NAME, advertised)),
            times=DriverRegistrationTimes(),
            token=lambda: secrets.token_hex(4),
            log=log,
            clock=time.monotonic,
        )
        self._slice = ""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        published = [
            {"name": self._names[id_], "attributes": {"uuid": {"string": id_}}} for id_ in sorted(self._devices)
        ]
        pool = {"name": NODE_NAME, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "pool": pool, "nodeName": NODE_NAME, "devices": published}
        made = self._cluster.create(SLICES, {"metadata": {"generateName": "ungated-"}, "spec": spec})
        self._slice = made["metadata"]["name"]
        self._task = asyncio.create_task(self._registration.run(), name="ungated driver")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()
        if self._cluster.find(SLICES, self._slice) is not None:
            self._cluster.delete(SLICES, self._slice)
