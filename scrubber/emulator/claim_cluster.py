"""The control plane of a playground whose pods request devices by claims: API server, scheduler, and a device class.

Promise: the driver is a client of the API server over HTTP with a token of its own; pods are bound by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from plugin.dra.paths import DEFAULT_DRIVER_NAME
from scrubber.emulator.cluster import Account, ApiServer, ControlPlane, EmulatedApi
from scrubber.emulator.cluster.allocator import BLOCKING_EFFECTS
from scrubber.emulator.cluster.podclaims import claim_names, results
from scrubber.emulator.cluster.resources import (
    CLAIM_TEMPLATES,
    CLAIMS,
    DEVICE_CLASSES,
    NAMESPACES,
    SLICES,
    Json,
    ResourceType,
)
from scrubber.emulator.pods import EmulatedPod, PodClaim
from scrubber.emulator.timings import ClusterTimings

__all__ = ["DRIVER", "DRIVER_ACCOUNT", "NODE_NAME", "ClaimCluster"]

DRIVER = DEFAULT_DRIVER_NAME
DRIVER_ACCOUNT = "system:serviceaccount:scrubber-system:scrubber-dra"
NODE_NAME = "node-a"
DEVICE_CLASS = "gpu"


class ClaimCluster:
    """A control plane with one node, and pods that get devices of one DRA driver."""

    def __init__(self) -> None:
        self.api = EmulatedApi()
        self.server = ApiServer(self.api)
        self._control_plane = ControlPlane(self.api, ClusterTimings().scaled(0.1))
        self._running = AsyncExitStack()
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        self.api.create(DEVICE_CLASSES, {"metadata": {"name": DEVICE_CLASS}, "spec": {"selectors": [selector]}})

    async def start(self, kubeconfig: Path) -> None:
        """Start all parts, and write the driver's credentials to ``kubeconfig``."""
        await self._running.enter_async_context(self.server)
        await self._running.enter_async_context(self._control_plane)
        account = Account(DRIVER_ACCOUNT, node=NODE_NAME)
        self.server.write_kubeconfig(kubeconfig, self.server.add_account(account))

    async def close(self) -> None:
        """End all parts.

        Raises:
            BaseExceptionGroup: errors of the emulated control plane itself.
        """
        await self._running.aclose()

    def read_command(self, kind: ResourceType) -> str:
        """Return a shell command that prints the objects of a resource, as an administrator of the cluster.

        Not of kubectl, which sends no token over HTTP.
        """
        group = f"apis/{kind.api_version}" if kind.group else f"api/{kind.api_version}"
        token = self.server.add_account()
        return f"curl -s -H 'Authorization: Bearer {token}' {self.server.url}/{group}/{kind.plural}"

    def pod_claim(self, namespace: str, gpus: int) -> PodClaim:
        """Return a pod's claim of ``gpus`` devices; its template is created in ``namespace`` if there is none."""
        name = f"gpus-{gpus}"
        if self.api.find(NAMESPACES, namespace) is None:
            self.api.create(NAMESPACES, {"metadata": {"name": namespace}})
        if self.api.find(CLAIM_TEMPLATES, name, namespace) is None:
            exactly = {"deviceClassName": DEVICE_CLASS, "allocationMode": "ExactCount", "count": gpus}
            spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
            self.api.create(
                CLAIM_TEMPLATES, {"metadata": {"name": name, "namespace": namespace}, "spec": {"spec": spec}}
            )
        return PodClaim("gpu", template=name)

    # What the objects say

    def devices(self) -> Mapping[str, Json]:
        """Return the published devices by their names in the node's pool."""
        return {
            each["name"]: each
            for item in self.api.store.items(SLICES)
            if item["spec"]["driver"] == DRIVER
            for each in item["spec"].get("devices") or []
        }

    def schedulable(self) -> int:
        """Return how many devices the scheduler may allocate, taken or not."""
        return sum(
            all(each["effect"] not in BLOCKING_EFFECTS for each in device.get("taints") or [])
            for device in self.devices().values()
        )

    def claims(self, pod: EmulatedPod) -> Sequence[Json]:
        """Return the claims of a pod as they are now."""
        names = [name for _, name, _ in claim_names(pod.item or {}) if name is not None]
        found = (self.api.store.get(CLAIMS, name, pod.spec.namespace) for name in names)
        return [each for each in found if each is not None]

    def device_ids(self, pod: EmulatedPod) -> tuple[str, ...]:
        """Return the ids of the devices that are allocated to the claims of a pod."""
        published = self.devices()
        return tuple(
            str(published[each["device"]]["attributes"]["uuid"]["string"])
            for claim in self.claims(pod)
            for each in results(claim)
        )

    def taints(self, device_id: str) -> Sequence[str]:
        """Return the keys of a device's taints."""
        return [
            str(taint["key"])
            for each in self.devices().values()
            if each["attributes"]["uuid"]["string"] == device_id
            for taint in each.get("taints") or []
        ]

    async def wait_for_schedulable(self, count: int, timeout: float) -> None:
        """Wait until the scheduler may allocate exactly ``count`` devices.

        Raises:
            TimeoutError: that was not so within ``timeout`` seconds; the message contains both numbers.
        """
        if not await self.api.store.changes.wait_until(lambda: self.schedulable() == count, timeout):
            raise TimeoutError(
                f"the ResourceSlices have {self.schedulable()} instead of {count} devices without a taint after "
                f"{timeout:g} s"
            )

    async def wait_for_taint(self, device_id: str, timeout: float, *, key: str = "") -> None:
        """Wait until a device has a taint, with this key if that is not empty.

        Raises:
            TimeoutError: it had none within ``timeout`` seconds; the message contains those that it has.
        """

        def has_taint() -> bool:
            found = self.taints(device_id)
            return key in found if key else bool(found)

        if not await self.api.store.changes.wait_until(has_taint, timeout):
            has = ", ".join(self.taints(device_id)) or "no taint"
            raise TimeoutError(f"device {device_id} has {has} instead of {key or 'a taint'} after {timeout:g} s")

    async def certificates(self, pod: EmulatedPod, timeout: float) -> Sequence[Json]:
        """Return the certificates in the status of a pod's claims, once each of its devices has one.

        Raises:
            TimeoutError: the driver did not report them within ``timeout`` seconds.
        """

        def found() -> list[Json]:
            return [
                each["data"]["certificate"]
                for claim in self.claims(pod)
                for each in claim["status"].get("devices") or []
                if "certificate" in (each.get("data") or {})
            ]

        expected = len(self.device_ids(pod))
        if not await self.api.store.changes.wait_until(lambda: len(found()) == expected, timeout):
            raise TimeoutError(f"the claims of {pod.full_name} have no certificate in their status after {timeout:g} s")
        return found()
