"""A scheduler for pods with devices: it allocates their claims, waits for binding conditions, and binds the pods.

Promise: what it writes to claims and pods, in which order, and what it does not check are the real scheduler's: above
all, a device is free for it as soon as no claim has it in its allocation, whatever still runs on the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from scrubber.emulator.cluster.access import allocated_node
from scrubber.emulator.cluster.allocator import Allocator, DeviceId, Unallocatable
from scrubber.emulator.cluster.api import EmulatedApi, reconcile_on_change
from scrubber.emulator.cluster.podclaims import (
    EXTENDED_CLAIM_ANNOTATION,
    FINALIZER,
    claim_names,
    is_over,
    is_owned_by,
    is_reserved_for,
    owner_reference,
    results,
)
from scrubber.emulator.cluster.resources import CLAIMS, DEVICE_CLASSES, NODES, PODS, SLICES, Json
from scrubber.emulator.cluster.validation import MAX_RESERVED_FOR, result_key
from scrubber.emulator.timings import ClusterTimings

COMPONENT = "default-scheduler"
IMPLICIT_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""Prefix of the extended resource that every device class has without naming one."""


class Unschedulable(Exception):
    """The pod cannot be bound now; the message says why."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What has to be written to bind a pod."""

    node: str
    allocations: Mapping[str, Json]
    """By name of the claim."""
    extended: Json | None
    """The spec of the claim for extended resources, if the pod needs one."""
    mappings: Sequence[Json] = ()
    extended_allocation: Json | None = None


@dataclass(slots=True)
class _Binding:
    """A pod whose claims are allocated, and which waits for their binding conditions."""

    node: str
    next_poll: float


class Scheduler:
    """Binds pending pods in the order of their creation."""

    def __init__(self, api: EmulatedApi, timings: ClusterTimings) -> None:
        self._api = api
        self._timings = timings
        self._bindings: dict[str, _Binding] = {}
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        """Schedule until cancelled."""
        await reconcile_on_change(self._api, self.schedule)

    def schedule(self) -> float | None:
        """Try each pending pod once; return after how many seconds the next one is due."""
        now = asyncio.get_running_loop().time()
        pending = [each for each in self._api.list(PODS) if not each["spec"].get("nodeName") and not is_over(each)]
        uids = {each["metadata"]["uid"] for each in pending}
        for known in (self._bindings, self._not_before):
            for uid in known.keys() - uids:
                del known[uid]
        for pod in sorted(pending, key=lambda each: int(each["metadata"]["resourceVersion"])):
            uid = pod["metadata"]["uid"]
            if "deletionTimestamp" in pod["metadata"] or self._not_before.get(uid, now) > now:
                continue
            try:
                if uid in self._bindings:
                    self._continue_binding(pod, self._bindings[uid], now)
                else:
                    self._begin(pod, now)
            except (Unschedulable, Unallocatable) as error:
                self._report(pod, str(error))
        due = [*(each.next_poll for each in self._bindings.values()), *self._not_before.values()]
        later = [each - now for each in due if each > now]
        return min(later, default=None)

    def _report(self, pod: Json, problem: str) -> None:
        """Write why the pod is not bound, once."""
        current = self._api.get(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"])
        conditions = [each for each in current["status"].get("conditions") or [] if each["type"] != "PodScheduled"]
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": problem}
        if condition in (current["status"].get("conditions") or []):
            return
        current["status"]["conditions"] = [*conditions, condition]
        self._api.update(PODS, current, subresource="status")
        self._api.record_event(current, "FailedScheduling", problem, component=COMPONENT)

    # Planning

    def _begin(self, pod: Json, now: float) -> None:
        claims = list(self._claims(pod))
        problem: Exception = Unschedulable("no nodes available to schedule pods")
        for node in self._api.list(NODES):
            try:
                plan = self._plan(pod, node, claims)
            except (Unschedulable, Unallocatable) as error:
                problem = error
                continue
            self._write(pod, plan)
            self._bindings[pod["metadata"]["uid"]] = _Binding(plan.node, now)
            self._continue_binding(pod, self._bindings[pod["metadata"]["uid"]], now)
            return
        raise problem

    def _claims(self, pod: Json) -> Iterator[Json]:
        metadata = pod["metadata"]
        for pod_claim, name, must_own in claim_names(pod):
            if name is None:
                raise Unschedulable(f"waiting for resource claim {pod_claim} of the pod to be created")
            claim = self._api.find(CLAIMS, name, metadata["namespace"])
            if claim is None:
                raise Unschedulable(f'resourceclaim "{name}" not found')
            if must_own and not is_owned_by(claim, pod):
                raise Unschedulable(f'resourceclaim "{name}" was not created for the pod')
            if "deletionTimestamp" in claim["metadata"]:
                raise Unschedulable(f'resourceclaim "{name}" is being deleted')
            reserved = (claim.get("status") or {}).get("reservedFor") or []
            if len(reserved) >= MAX_RESERVED_FOR and not is_reserved_for(claim, metadata["uid"]):
                raise Unschedulable(f'resourceclaim "{name}" is in use by {MAX_RESERVED_FOR} pods')
            yield claim

    def _plan(self, pod: Json, node: Json, claims: Sequence[Json]) -> _Plan:
        name = node["metadata"]["name"]
        labels = node["metadata"].get("labels") or {}
        if (node.get("spec") or {}).get("unschedulable"):
            raise Unschedulable("0 nodes are available: node is unschedulable")
        if not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items():
            raise Unschedulable("0 nodes are available: node doesn't match Pod's node affinity/selector")
        for claim in claims:
            bound = allocated_node((claim.get("status") or {}).get("allocation") or {})
            if bound not in (None, name):
                raise Unschedulable("0 nodes are available: resourceclaim not available on the node")
        classes = {each["metadata"]["name"]: each for each in self._api.list(DEVICE_CLASSES)}
        allocator = Allocator(name, self._api.list(SLICES), classes, self._allocated_devices())
        allocations = {
            each["metadata"]["name"]: allocator.allocate(each["spec"], self._api.timestamp())
            for each in claims
            if not (each.get("status") or {}).get("allocation")
        }
        extended, mappings = self._extended(pod, node, classes)
        if extended is None or (pod.get("status") or {}).get("extendedResourceClaimStatus"):
            return _Plan(name, allocations, None)
        return _Plan(name, allocations, extended, mappings, allocator.allocate(extended, self._api.timestamp()))

    def _allocated_devices(self) -> Iterator[DeviceId]:
        for claim in self._api.store.items(CLAIMS):
            for each in results(claim):
                if not each.get("adminAccess"):
                    yield result_key(each)[:3]

    def _extended(self, pod: Json, node: Json, classes: Mapping[str, Json]) -> tuple[Json | None, list[Json]]:
        """Return the spec of the claim for the pod's extended resources, or None where it needs no devices of DRA.

        The node decides: a resource of which it has allocatable devices comes from a device plugin.
        """
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        wanted: dict[str, int] = {}
        requests: list[Json] = []
        mappings: list[Json] = []
        spec = pod["spec"]
        for index, container in enumerate([*(spec.get("initContainers") or []), *spec["containers"]]):
            number = 0
            for resource, count in ((container.get("resources") or {}).get("limits") or {}).items():
                if "/" not in resource or not int(count):
                    continue
                if int(allocatable.get(resource) or 0):
                    wanted[resource] = wanted.get(resource, 0) + int(count)
                    continue
                device_class = class_of_resource(resource, classes)
                if device_class is None or not self._api.gates["DRAExtendedResource"]:
                    raise Unschedulable(f"0 nodes are available: Insufficient {resource}")
                request = f"container-{index}-request-{number}"
                exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": int(count)}
                requests.append({"name": request, "exactly": exactly})
                mappings.append({"containerName": container["name"], "resourceName": resource, "requestName": request})
                number += 1
        for resource, count in wanted.items():
            free = int(allocatable[resource]) - self._requested(node["metadata"]["name"], resource)
            if count > free:
                raise Unschedulable(f"0 nodes are available: Insufficient {resource}")
        return ({"devices": {"requests": requests}} if requests else None), mappings

    def _requested(self, node: str, resource: str) -> int:
        return sum(
            int(((each.get("resources") or {}).get("limits") or {}).get(resource) or 0)
            for pod in self._api.store.items(PODS)
            if pod["spec"].get("nodeName") == node and not is_over(pod)
            for each in pod["spec"]["containers"]
        )

    # Writing

    def _write(self, pod: Json, plan: _Plan) -> None:
        """Write the allocations, and reserve every claim for the pod."""
        metadata = pod["metadata"]
        if plan.extended is not None:
            body = {
                "metadata": {
                    "generateName": f"{metadata['name']}-extended-resources-",
                    "namespace": metadata["namespace"],
                    "annotations": {EXTENDED_CLAIM_ANNOTATION: "true"},
                    "ownerReferences": [owner_reference(pod)],
                },
                "spec": plan.extended,
            }
            name = self._api.create(CLAIMS, body)["metadata"]["name"]
            current = self._api.get(PODS, metadata["name"], metadata["namespace"])
            current["status"]["extendedResourceClaimStatus"] = {
                "resourceClaimName": name,
                "requestMappings": list(plan.mappings),
            }
            pod["status"] = self._api.update(PODS, current, subresource="status")["status"]
            plan = _Plan(plan.node, {**plan.allocations, name: plan.extended_allocation or {}}, None)
        for _, name_or_none, _ in claim_names(pod):
            claim = self._api.get(CLAIMS, str(name_or_none), metadata["namespace"])
            self._allocate(claim, plan.allocations.get(claim["metadata"]["name"]), pod)

    def _allocate(self, claim: Json, allocation: Json | None, pod: Json) -> None:
        finalizers = claim["metadata"].get("finalizers") or []
        if FINALIZER not in finalizers:
            claim["metadata"]["finalizers"] = [*finalizers, FINALIZER]
            claim = self._api.update(CLAIMS, claim)
        status = claim.setdefault("status", {})
        if allocation is not None:
            status["allocation"] = allocation
        if not is_reserved_for(claim, pod["metadata"]["uid"]):
            place = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
            status["reservedFor"] = [*(status.get("reservedFor") or []), place]
        self._api.update(CLAIMS, claim, subresource="status")

    # Binding

    def _continue_binding(self, pod: Json, binding: _Binding, now: float) -> None:
        """Bind the pod when the binding conditions of all its devices hold; give up when one failed, or too late."""
        if binding.next_poll > now:
            return
        claims = list(self._claims(pod))
        waiting = [condition for claim in claims for condition in binding_conditions(claim, "bindingConditions")]
        failed = [condition for claim in claims for condition in binding_conditions(claim, "bindingFailureConditions")]
        if any(status == "True" for _, status in failed):
            self._release(pod, claims, now)
            raise Unschedulable(
                f"claim binding failed: {', '.join(name for name, status in failed if status == 'True')}"
            )
        missing = [name for name, status in waiting if status != "True"]
        if missing and self._waited(claims) >= self._timings.binding_timeout:
            self._release(pod, claims, now)
            raise Unschedulable("device binding timeout")
        if missing:
            binding.next_poll = now + self._timings.binding_poll
            return
        del self._bindings[pod["metadata"]["uid"]]
        current = self._api.get(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"])
        current["spec"]["nodeName"] = binding.node
        current = self._api.update(PODS, current)
        others = [each for each in current["status"].get("conditions") or [] if each["type"] != "PodScheduled"]
        current["status"]["conditions"] = [*others, {"type": "PodScheduled", "status": "True"}]
        self._api.update(PODS, current, subresource="status")

    def _waited(self, claims: Sequence[Json]) -> float:
        """Return the seconds since the oldest allocation."""
        times = [(each.get("status") or {}).get("allocation", {}).get("allocationTimestamp") for each in claims]
        begun = min((datetime.fromisoformat(each) for each in times if each), default=self._api.now())
        return (self._api.now() - begun).total_seconds()

    def _release(self, pod: Json, claims: Sequence[Json], now: float) -> None:
        """Free the devices. Nothing keeps the next attempt from choosing the same ones."""
        uid = pod["metadata"]["uid"]
        del self._bindings[uid]
        self._not_before[uid] = now + self._timings.scheduling_back_off
        for claim in claims:
            status = claim["status"]
            status["reservedFor"] = [each for each in status.get("reservedFor") or [] if each["uid"] != uid]
            if not status["reservedFor"]:
                status["allocation"] = None
            self._api.update(CLAIMS, claim, subresource="status")


def class_of_resource(resource: str, classes: Mapping[str, Json]) -> str | None:
    """Return the device class behind an extended resource; of several that name it the newest."""
    if resource.startswith(IMPLICIT_RESOURCE) and resource.removeprefix(IMPLICIT_RESOURCE) in classes:
        return resource.removeprefix(IMPLICIT_RESOURCE)
    named = [each for each in classes.values() if (each.get("spec") or {}).get("extendedResourceName") == resource]
    return str(max(named, key=_age)["metadata"]["name"]) if named else None


def _age(item: Json) -> tuple[str, int]:
    return item["metadata"]["creationTimestamp"], int(item["metadata"]["resourceVersion"])


def binding_conditions(claim: Mapping[str, Any], field: str) -> Iterator[tuple[str, str]]:
    """Yield the binding conditions of a claim's devices with their status, which is empty while it is not set."""
    statuses = {result_key(each): each for each in (claim.get("status") or {}).get("devices") or []}
    for each in results(claim):
        conditions = {
            condition["type"]: condition["status"]
            for condition in statuses.get(result_key(each), {}).get("conditions") or []
        }
        for name in each.get(field) or []:
            yield name, conditions.get(name, "")
