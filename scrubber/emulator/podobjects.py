"""Pods as objects of the API server: from and to the specs of the emulator, and the status that the kubelet writes.

Promise: a pod that was written with :func:`pod_object` is read back unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scrubber.emulator.pods import (
    ContainerRecord,
    ContainerSpec,
    ContainerState,
    EmulatedPod,
    PodClaim,
    PodSpec,
    RestartPolicy,
)

Json = dict[str, Any]

LEAVE_CHILDREN = "emulator.scrubber.dev/leave-children"
"""Annotation for what a pod's spec cannot say: see :class:`PodSpec`."""
DEFAULT_COMMAND = ("sleep", "infinity")
"""What a container without a command runs: the emulator has no images."""


def pod_object(spec: PodSpec, node: str = "") -> Json:
    """Return a pod for the API server, bound to ``node`` if that is not empty."""
    annotations = {**spec.annotations, **({LEAVE_CHILDREN: "true"} if spec.leave_children else {})}
    claims = [
        {
            "name": each.name,
            **({"resourceClaimName": each.claim} if each.claim else {"resourceClaimTemplateName": each.template}),
        }
        for each in spec.claims
    ]
    body: Json = {
        "initContainers": [_container_object(each) for each in spec.init_containers],
        "containers": [_container_object(each) for each in spec.containers],
        "resourceClaims": claims,
        "restartPolicy": "Never",
        **({"nodeName": node} if node else {}),
    }
    metadata = {
        "name": spec.name,
        "namespace": spec.namespace,
        "labels": dict(spec.labels),
        "annotations": annotations,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def _container_object(spec: ContainerSpec) -> Json:
    claims = [dict(zip(("name", "request"), each.split("/", 1), strict=False)) for each in spec.claims]
    limits = {resource: str(count) for resource, count in spec.resources.items()}
    return {
        "name": spec.name,
        "image": "emulated",
        "command": list(spec.argv),
        "env": [{"name": key, "value": value} for key, value in spec.env.items()],
        "restartPolicy": spec.restart.value,
        "resources": {"limits": limits, "claims": claims},
    }


def pod_spec(item: Mapping[str, Any]) -> PodSpec:
    """Return the spec of a pod object.

    Raises:
        ValueError: the emulator cannot run it.
    """
    metadata, spec = item["metadata"], item["spec"]
    policy = spec.get("restartPolicy") or "Always"
    annotations = dict(metadata.get("annotations") or {})
    leave_children = annotations.pop(LEAVE_CHILDREN, "") == "true"
    return PodSpec(
        name=metadata["name"],
        namespace=metadata["namespace"],
        containers=[_container_spec(each, policy) for each in spec["containers"]],
        init_containers=[
            _container_spec(each, "OnFailure" if policy == "Always" else policy)
            for each in spec.get("initContainers") or []
        ],
        leave_children=leave_children,
        claims=[
            PodClaim(each["name"], each.get("resourceClaimName", ""), each.get("resourceClaimTemplateName", ""))
            for each in spec.get("resourceClaims") or []
        ],
        labels=dict(metadata.get("labels") or {}),
        annotations=annotations,
    )


def _container_spec(item: Mapping[str, Any], policy: str) -> ContainerSpec:
    resources = item.get("resources") or {}
    return ContainerSpec(
        name=item["name"],
        argv=[*(item.get("command") or []), *(item.get("args") or [])] or list(DEFAULT_COMMAND),
        resources={name: int(count) for name, count in (resources.get("limits") or {}).items() if "/" in name},
        env={each["name"]: each.get("value", "") for each in item.get("env") or []},
        restart=RestartPolicy(item.get("restartPolicy") or policy),
        claims=tuple(
            f"{each['name']}/{each['request']}" if each.get("request") else each["name"]
            for each in resources.get("claims") or []
        ),
    )


def status_object(pod: EmulatedPod, claim_health: Mapping[str, list[Json]]) -> Json:
    """Return the part of the pod's status that the kubelet writes.

    ``claim_health``: container → its entries of ``allocatedResourcesStatus`` for claims.
    """
    status: Json = {"phase": pod.phase.value, "containerStatuses": [], "initContainerStatuses": []}
    if pod.reason:
        status |= {"reason": pod.reason, "message": pod.message}
    for each in pod.spec.all_containers:
        record = pod.records[each.name]
        entry: Json = {
            "name": each.name,
            "ready": record.state is ContainerState.RUNNING,
            "restartCount": record.restarts,
            "state": _state(record),
        }
        health = [
            {
                "name": resource,
                "resources": [
                    {"resourceID": device, "health": record.device_health.get(device, "Healthy")} for device in devices
                ],
            }
            for resource, devices in record.devices.items()
        ]
        if each not in pod.spec.init_containers:
            health += claim_health.get(each.name, [])
        if health:
            entry["allocatedResourcesStatus"] = health
        status["initContainerStatuses" if each in pod.spec.init_containers else "containerStatuses"].append(entry)
    return status


def _state(record: ContainerRecord) -> Json:
    if record.state is ContainerState.RUNNING:
        return {"running": {}}
    if record.state is ContainerState.TERMINATED:
        return {"terminated": {"exitCode": record.exit_code, "reason": record.reason}}
    return {"waiting": {"reason": record.reason, "message": record.message}}
