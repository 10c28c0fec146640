"""Which ResourceClaims a pod refers to, and which pods a claim is reserved for.

Promise: the scheduler, the claim controller and the kubelet resolve names with the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scrubber.emulator.cluster.resources import Json

POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
EXTENDED_CLAIM_ANNOTATION = "resource.kubernetes.io/extended-resource-claim"
FINALIZER = "resource.kubernetes.io/delete-protection"


def claim_names(pod: Mapping[str, Any]) -> Iterator[tuple[str, str | None, bool]]:
    """Yield each claim of a pod: its name in the pod, the object's name, and whether the pod has to own it.

    The object's name is None until the claim of a template exists. The claim of extended resources comes last, with an
    empty name in the pod.
    """
    statuses = {each["name"]: each for each in (pod.get("status") or {}).get("resourceClaimStatuses") or []}
    for each in (pod.get("spec") or {}).get("resourceClaims") or []:
        if each.get("resourceClaimName"):
            yield each["name"], each["resourceClaimName"], False
        else:
            yield each["name"], statuses.get(each["name"], {}).get("resourceClaimName"), True
    extended = (pod.get("status") or {}).get("extendedResourceClaimStatus")
    if extended:
        yield "", extended["resourceClaimName"], True


def is_owned_by(claim: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Whether the claim was made for the pod."""
    owners = claim["metadata"].get("ownerReferences") or []
    return any(each.get("controller") and each.get("uid") == pod["metadata"]["uid"] for each in owners)


def is_reserved_for(claim: Mapping[str, Any], pod_uid: str) -> bool:
    reserved = (claim.get("status") or {}).get("reservedFor") or []
    return any(each.get("uid") == pod_uid for each in reserved)


def owner_reference(pod: Mapping[str, Any]) -> Json:
    """Return what makes a claim the pod's own."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
        "controller": True,
    }


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether the pod's phase is terminal."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def results(claim: Mapping[str, Any]) -> list[Json]:
    """Return the allocated devices of a claim."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    found: list[Json] = (allocation.get("devices") or {}).get("results") or []
    return found
