"""A claim as the driver reads it from the API server: what was allocated, and for which pods. Pure.

Everything here is the API server's word. It decides which devices are requested from the scrub service, and never
whether they may be handed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from scrubber.domain.errors import InvalidRequest

__all__ = [
    "AllocatedClaim",
    "AllocatedDevice",
    "ClaimIdentity",
    "ClaimPod",
    "InvalidParameters",
    "claim_pods",
    "read_claim",
]


@dataclass(frozen=True, slots=True)
class ClaimIdentity:
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ClaimPod:
    """A pod that the claim is reserved for."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """A device of this driver that was allocated for a claim.

    Attributes:
        requests: names of the claim's requests, without the part after the slash of a subrequest.
        name: name of the device in the pool.
        admin_access: the claim only looks at the device, which others may use.
        share_id: id of this share of the device; empty where it is not shared.
    """

    requests: tuple[str, ...]
    pool: str
    name: str
    admin_access: bool = False
    share_id: str = ""


@dataclass(frozen=True, slots=True)
class AllocatedClaim:
    """The part of an allocated claim that concerns this driver."""

    ref: ClaimIdentity
    devices: tuple[AllocatedDevice, ...]
    pods: tuple[ClaimPod, ...]


class InvalidParameters(InvalidRequest):
    """The claim, or its device class, has opaque parameters that this driver does not accept."""


class _Metadata(BaseModel):
    uid: str


class _Result(BaseModel):
    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = Field(None, alias="adminAccess")
    share_id: str | None = Field(None, alias="shareID")


class _Opaque(BaseModel):
    driver: str
    parameters: Any = None


class _Config(BaseModel):
    source: str = ""
    opaque: _Opaque | None = None


class _Devices(BaseModel):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(BaseModel):
    devices: _Devices = Field(default_factory=_Devices)


class _Consumer(BaseModel):
    resource: str
    name: str
    uid: str
    api_group: str = Field("", alias="apiGroup")


class _Status(BaseModel):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = Field(None, alias="reservedFor")


class _Claim(BaseModel):
    metadata: _Metadata
    status: _Status = Field(default_factory=_Status)


def read_claim(ref: ClaimIdentity, found: Mapping[str, Any], driver: str, pool: str) -> AllocatedClaim:
    """Return what ``found``, the object at the API server, allocates from ``pool`` of ``driver``.

    Args:
        ref: the claim that the kubelet named; another one of the same name is refused.

    Raises:
        InvalidParameters: there are opaque parameters for ``driver``.
        InvalidRequest: another claim, one that is not allocated, one without devices of ``driver``, a device of another
            pool, or one that is allocated twice.
    """
    claim = _parse(ref, found)
    if claim.metadata.uid != ref.uid:
        raise InvalidRequest(
            f"Claim {ref} is another one by now: it has the UID {claim.metadata.uid}, and the kubelet asks for {ref.uid}."
        )
    if claim.status.allocation is None:
        raise InvalidRequest(f"Claim {ref} is not allocated.")
    allocated = claim.status.allocation.devices
    for each in allocated.config or []:
        if each.opaque is not None and each.opaque.driver == driver and each.opaque.parameters:
            origin = "device class" if each.source == "FromClass" else "claim"
            raise InvalidParameters(
                f"Claim {ref} cannot be prepared: its {origin} has opaque parameters for {driver}, which takes none. "
                f"Remove the entry of config from the {origin}."
            )
    devices = _devices(ref, [each for each in allocated.results or [] if each.driver == driver], pool)
    if not devices:
        raise InvalidRequest(f"Claim {ref} has no device of {driver}.")
    return AllocatedClaim(ref, devices, _reserved_pods(ref, claim.status.reserved_for or []))


def _parse(ref: ClaimIdentity, found: Mapping[str, Any]) -> _Claim:
    try:
        return _Claim.model_validate(found)
    except ValidationError as error:
        place = ".".join(str(each) for each in error.errors()[0]["loc"])
        raise InvalidRequest(f"Claim {ref} cannot be read: {place} is not as the API defines it.") from error


def _reserved_pods(ref: ClaimIdentity, consumers: list[_Consumer]) -> tuple[ClaimPod, ...]:
    return tuple(
        ClaimPod(ref.namespace, each.name, each.uid)
        for each in consumers
        if each.resource == "pods" and not each.api_group
    )


def claim_pods(ref: ClaimIdentity, found: Mapping[str, Any]) -> tuple[ClaimPod, ...] | None:
    """Return the pods that ``found``, the object at the API server, is reserved for; None if it is another claim.

    Raises:
        InvalidRequest: it cannot be read.
    """
    claim = _parse(ref, found)
    return _reserved_pods(ref, claim.status.reserved_for or []) if claim.metadata.uid == ref.uid else None


def _devices(ref: ClaimIdentity, results: list[_Result], pool: str) -> tuple[AllocatedDevice, ...]:
    found: dict[tuple[str, str], AllocatedDevice] = {}
    for each in results:
        if each.pool != pool:
            raise InvalidRequest(
                f"Claim {ref} has device {each.device} of the pool {each.pool}; the devices of this node are in {pool}."
            )
        request = each.request.partition("/")[0]
        key = each.device, each.share_id or ""
        before = found.get(key)
        if before is None:
            found[key] = AllocatedDevice(
                (request,), each.pool, each.device, bool(each.admin_access), each.share_id or ""
            )
        elif before.admin_access and each.admin_access:
            requests = tuple(dict.fromkeys((*before.requests, request)))
            found[key] = AllocatedDevice(requests, each.pool, each.device, True, before.share_id)
        else:
            raise InvalidRequest(f"Claim {ref} has device {each.device} twice.")
    return tuple(found.values())
