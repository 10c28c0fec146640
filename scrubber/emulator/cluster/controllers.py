"""The controllers of claims: claims from templates, reservations and allocations that end, eviction by taints.

Promise: a claim is deallocated as soon as no pod is left that it is reserved for, also when that pod was deleted by
force and its processes still run; that is the real controller's behaviour (kubernetes/kubernetes#141471).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from scrubber.emulator.cluster.allocator import DeviceId, tolerates
from scrubber.emulator.cluster.api import EmulatedApi, reconcile_on_change
from scrubber.emulator.cluster.podclaims import (
    EXTENDED_CLAIM_ANNOTATION,
    FINALIZER,
    POD_CLAIM_ANNOTATION,
    is_over,
    is_owned_by,
    owner_reference,
    results,
)
from scrubber.emulator.cluster.resources import CLAIM_TEMPLATES, CLAIMS, PODS, SLICES, Json
from scrubber.emulator.cluster.scheduler import Scheduler
from scrubber.emulator.cluster.validation import result_key
from scrubber.emulator.timings import ClusterTimings


class ClaimController:
    """The resource claim controller of kube-controller-manager."""

    def __init__(self, api: EmulatedApi) -> None:
        self._api = api

    def reconcile(self) -> None:
        """Make the claims of templates, and end what no pod uses any more."""
        for pod in self._api.list(PODS):
            if "deletionTimestamp" not in pod["metadata"] and not is_over(pod):
                self._make_claims(pod)
        for claim in self._api.list(CLAIMS):
            self._release(claim)

    def _make_claims(self, pod: Json) -> None:
        metadata = pod["metadata"]
        made = {each["name"] for each in pod["status"].get("resourceClaimStatuses") or []}
        for each in pod["spec"].get("resourceClaims") or []:
            template = self._template(each, metadata["namespace"])
            if each["name"] in made or template is None:
                continue
            body = {
                "metadata": {
                    **(template["spec"].get("metadata") or {}),
                    "generateName": f"{metadata['name']}-{each['name']}-",
                    "namespace": metadata["namespace"],
                    "annotations": {POD_CLAIM_ANNOTATION: each["name"]},
                    "ownerReferences": [owner_reference(pod)],
                },
                "spec": template["spec"]["spec"],
            }
            claim = self._api.create(CLAIMS, body)
            current = self._api.get(PODS, metadata["name"], metadata["namespace"])
            status = {"name": each["name"], "resourceClaimName": claim["metadata"]["name"]}
            current["status"].setdefault("resourceClaimStatuses", []).append(status)
            self._api.update(PODS, current, subresource="status")

    def _template(self, pod_claim: Json, namespace: str) -> Json | None:
        name = pod_claim.get("resourceClaimTemplateName")
        return self._api.find(CLAIM_TEMPLATES, name, namespace) if name else None

    def _release(self, claim: Json) -> None:
        """Drop pods that are gone or over, then the allocation and its finalizer, then a claim that was a pod's own."""
        metadata, status = claim["metadata"], claim.get("status") or {}
        reserved = status.get("reservedFor") or []
        live = [each for each in reserved if self._lives(each["name"], each["uid"], metadata["namespace"])]
        if live != reserved:
            claim["status"] = {**status, "reservedFor": live}
            if not live:
                claim["status"] = {**claim["status"], "allocation": None}
            claim = self._api.update(CLAIMS, claim, subresource="status")
        if FINALIZER in (metadata.get("finalizers") or []) and not (claim.get("status") or {}).get("allocation"):
            finalizers = [each for each in metadata["finalizers"] if each != FINALIZER]
            claim["metadata"]["finalizers"] = finalizers
            claim = self._api.update(CLAIMS, claim)
        elif "deletionTimestamp" in metadata and not live and status.get("allocation"):
            claim["status"] = {**claim["status"], "allocation": None}
            self._api.update(CLAIMS, claim, subresource="status")
        annotations = metadata.get("annotations") or {}
        generated = POD_CLAIM_ANNOTATION in annotations or EXTENDED_CLAIM_ANNOTATION in annotations
        if generated and not live and self._is_done(claim) and "deletionTimestamp" not in metadata:
            self._api.delete(CLAIMS, metadata["name"], metadata["namespace"])

    def _lives(self, name: str, uid: str, namespace: str) -> bool:
        pod = self._api.store.get(PODS, name, namespace)
        return pod is not None and pod["metadata"]["uid"] == uid and not is_over(pod)

    def _is_done(self, claim: Json) -> bool:
        """Whether the pod that owns the claim is gone or over."""
        pods = self._api.store.items(PODS)
        owner = next((each for each in pods if is_owned_by(claim, each)), None)
        return owner is None or is_over(owner)


class TaintEviction:
    """The device taint eviction controller: deletes pods whose devices have a taint that they do not tolerate."""

    def __init__(self, api: EmulatedApi) -> None:
        self._api = api

    def reconcile(self) -> float | None:
        """Delete what is due; return after how many seconds the next pod is."""
        taints = dict(self._taints())
        due: list[float] = []
        for claim in self._api.list(CLAIMS):
            waits = [self._seconds_left(each, taints) for each in results(claim)]
            soonest = min((each for each in waits if each is not None), default=None)
            if soonest is None:
                continue
            for reserved in (claim.get("status") or {}).get("reservedFor") or []:
                if soonest > 0:
                    due.append(soonest)
                else:
                    self._evict(reserved["name"], reserved["uid"], claim["metadata"]["namespace"])
        return min(due, default=None)

    def _taints(self) -> Iterator[tuple[DeviceId, Sequence[Json]]]:
        for item in self._api.store.items(SLICES):
            spec = item["spec"]
            for device in spec.get("devices") or []:
                evicting = [each for each in device.get("taints") or [] if each["effect"] == "NoExecute"]
                yield (spec["driver"], spec["pool"]["name"], device["name"]), evicting

    def _seconds_left(self, result: Json, taints: Mapping[DeviceId, Sequence[Json]]) -> float | None:
        """Return until when the device's taints are tolerated, in seconds from now; None: for ever."""
        left: list[float] = []
        for taint in taints.get(result_key(result)[:3], ()):
            toleration: Mapping[str, Any] | None = tolerates(result.get("tolerations") or [], taint)
            if toleration is None:
                left.append(0.0)
            elif toleration.get("tolerationSeconds") is not None:
                age = self._api.now() - datetime.fromisoformat(taint["timeAdded"])
                left.append(toleration["tolerationSeconds"] - age.total_seconds())
        return min(left, default=None)

    def _evict(self, name: str, uid: str, namespace: str) -> None:
        pod = self._api.find(PODS, name, namespace)
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"] or is_over(pod):
            return
        reason = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByDeviceTaintManager",
            "message": "Device Taint manager: deleting due to NoExecute taint",
        }
        pod["status"].setdefault("conditions", []).append(reason)
        self._api.update(PODS, pod, subresource="status")
        self._api.delete(PODS, name, namespace)


class ControlPlane:
    """Scheduler and controllers, which run inside the ``async with`` block."""

    def __init__(self, api: EmulatedApi, timings: ClusterTimings | None = None) -> None:
        self._api = api
        self._scheduler = Scheduler(api, timings or ClusterTimings())
        self._claims = ClaimController(api)
        self._eviction = TaintEviction(api)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        parts: tuple[Callable[[], float | None], ...] = (
            self._claims.reconcile,
            self._scheduler.schedule,
            self._eviction.reconcile,
        )
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(reconcile_on_change(self._api, each)) for each in parts]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all parts.

        Raises:
            BaseExceptionGroup: errors of the emulated control plane itself.
        """
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        crashes = [each for each in ended if each is not None and not isinstance(each, asyncio.CancelledError)]
        if crashes:
            raise BaseExceptionGroup("the control plane emulator failed", crashes)
