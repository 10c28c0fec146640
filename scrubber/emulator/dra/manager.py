"""The kubelet's DRA manager: when drivers are called for the claims of a pod, and what containers get of the answers.

Promise: a claim is prepared before the first sandbox that uses it and not again while this process of the kubelet
remembers it; it is released after the last pod's containers have ended, or by a loop that does not look at them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scrubber.emulator.cdi import CdiRegistry
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.cluster.podclaims import claim_names, is_owned_by, is_reserved_for, results
from scrubber.emulator.cluster.resources import CLAIMS, Json
from scrubber.emulator.cluster.status import StatusError
from scrubber.emulator.devicemanager import ContainerRunOptions
from scrubber.emulator.dra.checkpoint import (
    ClaimDevice,
    ClaimInfo,
    ClaimInfos,
    DraCheckpointUnreadable,
    read_checkpoint,
    write_checkpoint,
)
from scrubber.emulator.dra.health import HealthCache
from scrubber.emulator.dra.plugins import ClaimRef, DraClient, DraDriverAbsent, DraPlugins
from scrubber.emulator.events import KubeletEvent, Recorder, RpcFailed
from scrubber.emulator.pods import ContainerSpec, EmulatedPod
from scrubber.emulator.timings import KubeletTimings
from scrubber.wire import podresources_pb2 as lister


class PrepareFailed(Exception):
    """The claims of a pod are not prepared: its sandbox is not started, and the call is tried again."""


class UnprepareFailed(Exception):
    """The claims of a pod are not released: the pod stays Terminating, and the call is tried again."""


class DraManager:
    """Claims of the pods of one node, for one run of the kubelet's process."""

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
        self._active = active_pod_uids
        self._changed = on_change
        self._health = HealthCache(timings.health_timeout, asyncio.get_running_loop().time)
        self.claims = ClaimInfos()
        self.plugins = DraPlugins(
            cluster,
            node_name,
            timings,
            recorder,
            on_health=self._apply_health,
            on_health_end=self._health.clear,
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

    # Preparation

    async def prepare(self, pod: EmulatedPod) -> None:
        """Have the drivers prepare the pod's claims: one call for each driver, with all claims that need it.

        Raises:
            PrepareFailed: a claim cannot be used, or a driver refused, was absent or answered incompletely.
        """
        try:
            await self._prepare(pod)
        except (StatusError, DraDriverAbsent, RpcFailed, PrepareFailed) as error:
            raise PrepareFailed(f"prepare dynamic resources: {error}") from error
        finally:
            self._changed()

    async def _prepare(self, pod: EmulatedPod) -> None:
        # Nothing is remembered before all claims and drivers were found: a pod that fails here can be deleted without
        # a driver.
        found = [(claim, self._clients(claim)) for claim in self._usable_claims(pod)]
        batches: dict[DraClient, list[ClaimInfo]] = {}
        for claim, clients in found:
            info = self._remember(claim, pod)
            if not info.prepared:
                for client in clients:
                    batches.setdefault(client, []).append(info)
        for client, infos in batches.items():
            await self._prepare_batch(client, infos, pod)
        for info in [each for infos in batches.values() for each in infos]:
            info.prepared = True
        self._checkpoint()

    def _usable_claims(self, pod: EmulatedPod) -> Iterator[Json]:
        if pod.item is None:
            return
        for _, name, must_own in claim_names(pod.item):
            if name is None:
                continue
            claim = self._cluster.get(CLAIMS, name, pod.spec.namespace)
            if must_own and not is_owned_by(claim, pod.item):
                raise PrepareFailed(f"ResourceClaim {name} was not created for pod {pod.full_name}")
            if not is_reserved_for(claim, pod.uid):
                raise PrepareFailed(
                    f"pod {pod.spec.name} ({pod.uid}) is not allowed to use ResourceClaim {name} "
                    f"({claim['metadata']['uid']})"
                )
            if not (claim.get("status") or {}).get("allocation"):
                raise PrepareFailed(f"ResourceClaim {name}: not allocated")
            yield claim

    def _clients(self, claim: Json) -> Sequence[DraClient]:
        drivers = dict.fromkeys(each["driver"] for each in results(claim))
        return [self.plugins.get(driver) for driver in drivers]

    def _remember(self, claim: Json, pod: EmulatedPod) -> ClaimInfo:
        metadata = claim["metadata"]
        info = self.claims.get(metadata["namespace"], metadata["name"])
        if info is None:
            drivers: dict[str, list[ClaimDevice]] = {each["driver"]: [] for each in results(claim)}
            info = ClaimInfo(metadata["uid"], metadata["name"], metadata["namespace"], drivers=drivers)
            self.claims.add(info)
        elif info.uid != metadata["uid"]:
            raise PrepareFailed(
                f"old ResourceClaim with same name {info.name} and different UID {info.uid} still exists "
                "(previous pod force-deleted?!)"
            )
        info.pods.add(pod.uid)
        self._checkpoint()
        return info

    async def _prepare_batch(self, client: DraClient, infos: Sequence[ClaimInfo], pod: EmulatedPod) -> None:
        requested = {each.uid: each for each in infos}
        answers = await client.prepare([_reference(each) for each in infos], pod=pod.full_name, uid=pod.uid)
        for uid, answer in answers.items():
            info = requested.get(uid)
            if info is None:
                raise PrepareFailed(f"NodePrepareResources returned result for unknown claim UID {uid}")
            if answer.error:
                raise PrepareFailed(f"NodePrepareResources failed for ResourceClaim {info.name}: {answer.error}")
            if self.claims.get(info.namespace, info.name) is not info:
                raise PrepareFailed(f"internal error: unable to get claim info for ResourceClaim {info.name}")
            info.drivers.setdefault(client.driver, []).extend(
                ClaimDevice(
                    pool=each.pool_name,
                    name=each.device_name,
                    requests=tuple(each.request_names),
                    cdi_ids=tuple(each.cdi_device_ids),
                    share_id=each.share_id if each.HasField("share_id") else None,
                )
                for each in answer.devices
            )
        if len(answers) != len(requested):
            raise PrepareFailed(f"NodePrepareResources skipped {len(requested) - len(answers)} ResourceClaims")

    # Release

    async def unprepare(self, pod: EmulatedPod) -> None:
        """Have the drivers release the claims that no other pod uses.

        Raises:
            UnprepareFailed: a driver refused, was absent or answered incompletely.
        """
        infos = self.claims.of_pod(pod.uid)
        if not infos and pod.item is not None:
            named = [self.claims.get(pod.spec.namespace, name or "") for _, name, _ in claim_names(pod.item)]
            infos = [each for each in named if each is not None]
        await self._release(pod.uid, pod.full_name, infos)

    async def reconcile(self) -> None:
        """Release the claims of pods that the kubelet does not run any more, one pod after another."""
        active = self._active()
        if active is None:
            return
        gone: dict[str, list[ClaimInfo]] = {}
        for info in self.claims:
            for uid in sorted(info.pods - set(active)):
                gone.setdefault(uid, []).append(info)
        for uid, infos in gone.items():
            try:
                await self._release(uid, "", infos)
            except UnprepareFailed as error:
                now = asyncio.get_running_loop().time()
                self._recorder.record(KubeletEvent(now, "OrphanNotUnprepared", "Error", pod_uid=uid, detail=str(error)))

    async def _release(self, uid: str, pod: str, infos: Sequence[ClaimInfo]) -> None:
        batches: dict[str, list[ClaimInfo]] = {}
        last: list[ClaimInfo] = []
        for info in infos:
            if self.claims.get(info.namespace, info.name) is not info:
                continue
            if len(info.pods) > 1:
                info.pods.discard(uid)
                continue
            last.append(info)
            for driver in info.drivers:
                batches.setdefault(driver, []).append(info)
        try:
            for driver, released in batches.items():
                await self._unprepare_batch(self.plugins.get(driver), released, pod, uid)
        except (DraDriverAbsent, RpcFailed) as error:
            raise UnprepareFailed(f"unprepare dynamic resources: {error}") from error
        finally:
            self._changed()
        for info in last:
            self.claims.remove(info)
        self._checkpoint()

    async def _unprepare_batch(self, client: DraClient, infos: Sequence[ClaimInfo], pod: str, uid: str) -> None:
        requested = {each.uid: each for each in infos}
        answers = await client.unprepare([_reference(each) for each in infos], pod=pod, uid=uid)
        for claim, answer in answers.items():
            if claim not in requested:
                raise UnprepareFailed(f"NodeUnprepareResources returned result for unknown claim UID {claim}")
            if answer.error:
                name = requested[claim].name
                raise UnprepareFailed(f"NodeUnprepareResources failed for ResourceClaim {name}: {answer.error}")
        if len(answers) != len(requested):
            raise UnprepareFailed(f"NodeUnprepareResources skipped {len(requested) - len(answers)} ResourceClaims")

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

    def _checkpoint(self) -> None:
        write_checkpoint(self._directory, self.claims)


def _reference(info: ClaimInfo) -> ClaimRef:
    return ClaimRef(info.namespace, info.uid, info.name)
