"""When the kubelet calls drivers for the claims of its pods, and what it remembers of their answers.

Promise: a claim is prepared before the first sandbox that uses it and not again while this process of the kubelet
remembers it; it is released after the last pod's containers have ended, or by a loop that does not look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from plugin.api import dra_v1_pb2 as api
from scrubber.emulator.cluster.podclaims import claim_names, is_owned_by, is_reserved_for, results
from scrubber.emulator.cluster.resources import Json
from scrubber.emulator.cluster.status import StatusError
from scrubber.emulator.dra.checkpoint import ClaimDevice, ClaimInfo, ClaimInfos
from scrubber.emulator.dra.plugins import ClaimRef, DraDriverAbsent
from scrubber.emulator.events import RpcFailed
from scrubber.emulator.pods import EmulatedPod


class PrepareFailed(Exception):
    """The claims of a pod are not prepared: its sandbox is not started, and the call is tried again."""


class UnprepareFailed(Exception):
    """The claims of a pod are not released: the pod stays Terminating, and the call is tried again."""


class DriverCalls(Protocol):
    """Calls one instance of a driver; :class:`scrubber.emulator.dra.plugins.DraClient`.

    Both raise :class:`RpcFailed` if the driver refused all, disconnected or took too long; the pod is for the record.
    """

    @property
    def driver(self) -> str: ...

    async def prepare(
        self, claims: Sequence[ClaimRef], *, pod: str, uid: str
    ) -> Mapping[str, api.NodePrepareResourceResponse]: ...

    async def unprepare(
        self, claims: Sequence[ClaimRef], *, pod: str, uid: str
    ) -> Mapping[str, api.NodeUnprepareResourceResponse]: ...


class PodClaims:
    """The claims of one node's pods, for one run of the kubelet's process."""

    def __init__(
        self,
        claims: ClaimInfos,
        *,
        read_claim: Callable[[str, str], Json],
        get_driver: Callable[[str], DriverCalls],
        save: Callable[[ClaimInfos], None],
        active_pod_uids: Callable[[], Collection[str] | None],
        on_change: Callable[[], None],
        on_orphan: Callable[[str, str], None],
    ) -> None:
        """Initialise with the claims of the checkpoint.

        Args:
            read_claim: returns the claim of a namespace and a name; raises :class:`StatusError`.
            get_driver: returns the instance of a driver that is called; raises :class:`DraDriverAbsent`.
            save: writes the checkpoint.
            active_pod_uids: returns the UIDs of the pods that the kubelet runs, or ``None`` until it knows all pods.
            on_change: called when the status of a pod may have changed.
            on_orphan: called with the UID of a pod that is gone, and why its claims cannot be released.
        """
        self.claims = claims
        self._read_claim = read_claim
        self._get_driver = get_driver
        self._save = save
        self._active = active_pod_uids
        self._changed = on_change
        self._on_orphan = on_orphan

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
        found = [(claim, self._drivers(claim)) for claim in self._usable_claims(pod)]
        batches: dict[DriverCalls, list[ClaimInfo]] = {}
        for claim, clients in found:
            info = self._remember(claim, pod)
            if not info.prepared:
                for client in clients:
                    batches.setdefault(client, []).append(info)
        for client, infos in batches.items():
            await self._prepare_batch(client, infos, pod)
        for info in [each for infos in batches.values() for each in infos]:
            info.prepared = True
        self._save(self.claims)

    def _usable_claims(self, pod: EmulatedPod) -> Iterator[Json]:
        if pod.item is None:
            return
        for _, name, must_own in claim_names(pod.item):
            if name is None:
                continue
            claim = self._read_claim(pod.spec.namespace, name)
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

    def _drivers(self, claim: Json) -> Sequence[DriverCalls]:
        drivers = dict.fromkeys(each["driver"] for each in results(claim))
        return [self._get_driver(driver) for driver in drivers]

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
        self._save(self.claims)
        return info

    async def _prepare_batch(self, client: DriverCalls, infos: Sequence[ClaimInfo], pod: EmulatedPod) -> None:
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
                self._on_orphan(uid, str(error))

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
                await self._unprepare_batch(self._get_driver(driver), released, pod, uid)
        except (DraDriverAbsent, RpcFailed) as error:
            raise UnprepareFailed(f"unprepare dynamic resources: {error}") from error
        finally:
            self._changed()
        for info in last:
            self.claims.remove(info)
        self._save(self.claims)

    async def _unprepare_batch(self, client: DriverCalls, infos: Sequence[ClaimInfo], pod: str, uid: str) -> None:
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


def _reference(info: ClaimInfo) -> ClaimRef:
    return ClaimRef(info.namespace, info.uid, info.name)
