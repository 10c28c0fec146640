"""The kubelet's DRA manager: the claims of its pods, and what containers, PodResources and statuses get of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from scrubber.emulator.cdi import CdiRegistry
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.cluster.podclaims import claim_names
from scrubber.emulator.cluster.resources import CLAIMS, Json
from scrubber.emulator.devicemanager import ContainerRunOptions
from scrubber.emulator.dra.checkpoint import (
    ClaimInfo,
    ClaimInfos,
    DraCheckpointUnreadable,
    read_checkpoint,
    write_checkpoint,
)
from scrubber.emulator.dra.health import HealthCache
from scrubber.emulator.dra.plugins import DraPlugins
from scrubber.emulator.dra.pod_claims import PodClaims
from scrubber.emulator.events import KubeletEvent, Recorder
from scrubber.emulator.pods import ContainerSpec, EmulatedPod
from scrubber.emulator.timings import KubeletTimings
from scrubber.wire import podresources_pb2 as lister


class DraManager(PodClaims):
    """The claims of one node's pods, and the drivers that have registered, for one run of the kubelet's process."""

    def __init__(
        self,
        directory: Path,
        cluster: EmulatedApi,
        node_name: str,
        cdi: CdiRegistry,
        timings: KubeletTimings,
        recorder: Recorder,
        *,
        active_pod_uids: Callable[[], Collection[str] | None],
        on_change: Callable[[], None],
    ) -> None:
        """Initialise the manager; :meth:`start` loads the checkpoint in ``directory``.

        Args:
            active_pod_uids: returns the UIDs of the pods that the kubelet runs, or ``None`` until it knows all pods.
            on_change: called when the status of a pod may have changed.
        """
        self._directory = directory
        self._cluster = cluster
        self._cdi = cdi
        self._timings = timings
        self._recorder = recorder
        self._health = HealthCache(timings.health_timeout, asyncio.get_running_loop().time)
        self.plugins = DraPlugins(
            cluster,
            node_name,
            timings,
            recorder,
            on_health=self._apply_health,
            on_health_end=self._health.clear,
        )
        super().__init__(
            ClaimInfos(),
            read_claim=lambda namespace, name: cluster.get(CLAIMS, name, namespace),
            get_driver=self.plugins.get,
            save=lambda claims: write_checkpoint(directory, claims),
            active_pod_uids=active_pod_uids,
            on_change=on_change,
            on_orphan=self._record_orphan,
        )

    def start(self) -> None:
        """Load the checkpoint, and delete the node's ResourceSlices.

        Raises:
            RuntimeError: the checkpoint cannot be used; the kubelet does not start.
        """
        try:
            self.claims = read_checkpoint(self._directory)
        except DraCheckpointUnreadable as error:
            raise RuntimeError(f"the kubelet does not start: failed to create the DRA manager: {error}") from error
        self.plugins.start()

    # What containers, PodResources and the pod's status get

    def run_options(
        self, pod: EmulatedPod, container: ContainerSpec, options: ContainerRunOptions
    ) -> ContainerRunOptions:
        """Return ``options`` with what the CDI specifications of the container's claims add.

        Raises:
            CdiUnresolvable: the runtime finds a device in none of its specifications.
        """
        ids = [
            cdi_id
            for info, request in self._container_claims(pod, container)
            for _, device in info.devices(request)
            for cdi_id in device.cdi_ids
        ]
        if not ids:
            return options
        edits = self._cdi.edits(ids)
        return dataclasses.replace(
            options,
            envs={**options.envs, **edits.env},
            mounts=[*options.mounts, *edits.mounts],
            devices=[*options.devices, *edits.devices],
            cdi_devices=[*options.cdi_devices, *ids],
        )

    def dynamic_resources(self, pod: EmulatedPod, container: ContainerSpec) -> Iterator[lister.DynamicResource]:
        """Yield the container's claims for PodResources, each with all its devices, whatever the container requests."""
        seen: list[ClaimInfo] = []
        for info, _ in self._container_claims(pod, container):
            if any(each is info for each in seen):
                continue
            seen.append(info)
            resources: list[lister.ClaimResource] = []
            for driver, devices in info.drivers.items():
                ids: list[str] = []
                for device in devices:
                    ids += device.cdi_ids
                    resources.append(
                        lister.ClaimResource(
                            cdi_devices=[lister.CDIDevice(name=each) for each in ids],
                            driver_name=driver,
                            pool_name=device.pool,
                            device_name=device.name,
                            share_id=device.share_id,
                        )
                    )
            yield lister.DynamicResource(
                claim_name=info.name, claim_namespace=info.namespace, claim_resources=resources
            )

    def claim_health(self, pod: EmulatedPod) -> Mapping[str, list[Json]]:
        """Return the entries of ``allocatedResourcesStatus`` by container; none for claims of extended resources."""
        if not self._cluster.gates["ResourceHealthStatus"]:
            return {}
        names = self._claim_objects(pod)
        found: dict[str, list[Json]] = {}
        for container in pod.spec.containers:
            entries: list[Json] = []
            for reference in container.claims:
                name, _, request = reference.partition("/")
                info = self.claims.get(pod.spec.namespace, names.get(name) or "")
                health = self._health_entries(info, request) if info else []
                if health:
                    entries.append({"name": f"claim:{reference}", "resources": health})
            found[container.name] = entries
        return found

    def _health_entries(self, info: ClaimInfo, request: str) -> list[Json]:
        entries: dict[str, Json] = {}
        for driver, device in info.devices(request):
            resource = device.cdi_ids[0] if device.cdi_ids else f"{driver}/{device.pool}/{device.name}"
            health, message = self._health.get(driver, device.pool, device.name)
            entry = {"resourceID": resource, "health": health, **({"message": message} if message else {})}
            entries.setdefault(resource, entry)
        return list(entries.values())

    def _container_claims(self, pod: EmulatedPod, container: ContainerSpec) -> Iterator[tuple[ClaimInfo, str]]:
        """Yield the claims that a container uses, each with the request, which is empty for all of them."""
        names = self._claim_objects(pod)
        for reference in container.claims:
            name, _, request = reference.partition("/")
            info = self.claims.get(pod.spec.namespace, names.get(name) or "")
            if info is not None:
                yield info, request
        extended = ((pod.item or {}).get("status") or {}).get("extendedResourceClaimStatus") or {}
        for mapping in extended.get("requestMappings") or []:
            info = self.claims.get(pod.spec.namespace, extended["resourceClaimName"])
            if mapping["containerName"] == container.name and info is not None:
                yield info, mapping["requestName"]

    def _claim_objects(self, pod: EmulatedPod) -> dict[str, str | None]:
        """Return the name of the object by the name in the pod."""
        return {name: claim for name, claim, _ in claim_names(pod.item)} if pod.item is not None else {}

    def _apply_health(self, driver: str, devices: Any) -> None:
        changed = self._health.update(driver, devices)
        affected = any(
            (each.pool, each.name) in changed for info in self.claims for each in info.drivers.get(driver, ())
        )
        self._recorder.record(
            KubeletEvent(
                asyncio.get_running_loop().time(),
                "NodeWatchResources",
                resource=driver,
                detail=f"{len(devices)} devices",
            )
        )
        if affected:
            self._changed()

    def report(self, pod: EmulatedPod, reason: str, message: str) -> None:
        """Record what happened to a pod, here and as an event of the API server."""
        now = asyncio.get_running_loop().time()
        self._recorder.record(KubeletEvent(now, reason, "Error", pod=pod.full_name, pod_uid=pod.uid, detail=message))
        if pod.item is not None:
            self._cluster.record_event(dict(pod.item), reason, message, component="kubelet")

    def _record_orphan(self, uid: str, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        self._recorder.record(KubeletEvent(now, "OrphanNotUnprepared", "Error", pod_uid=uid, detail=reason))
