"""A claim as the driver reads it from the API server: what was allocated, and for which pods. Pure.

Everything here is the API server's word. It decides which devices are requested from the scrub service, and never
whether they may be handed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "awaited_devices",
    "claim_pods",
    "read_claim",
]


_EXTENDED_RESOURCES = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of the claims that the scheduler creates for pods with extended resources in their limits."""


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
    """The part of an allocated claim that concerns this driver.

    Attributes:
        extended_classes: its device classes, where the scheduler created it for a pod that requests extended resources.
    """

    ref: ClaimIdentity
    devices: tuple[AllocatedDevice, ...]
    pods: tuple[ClaimPod, ...]
    extended_classes: tuple[str, ...] = ()

    def names_by_request(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the devices of each request, without repetition."""
        found: dict[str, dict[str, None]] = {}
        for each in self.devices:
            for request in each.requests:
                found.setdefault(request, {})[each.name] = None
        return {request: tuple(names) for request, names in found.items()}


class InvalidParameters(InvalidRequest):
    """The claim, or its device class, has opaque parameters that this driver does not accept."""


class _Identity(BaseModel):
    namespace: str
    name: str
    uid: str


class _Metadata(_Identity):
    annotations: dict[str, str] | None = None


class _Result(BaseModel):
    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = Field(None, alias="adminAccess")
    share_id: str | None = Field(None, alias="shareID")
    binding_conditions: list[str] | None = Field(None, alias="bindingConditions")


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


class _DeviceRequest(BaseModel):
    device_class_name: str = Field("", alias="deviceClassName")


class _Request(BaseModel):
    exactly: _DeviceRequest | None = None
    first_available: list[_DeviceRequest] | None = Field(None, alias="firstAvailable")


class _RequestedDevices(BaseModel):
    requests: list[_Request] | None = None


class _Spec(BaseModel):
    devices: _RequestedDevices = Field(default_factory=_RequestedDevices)


class _Claim(BaseModel):
    metadata: _Metadata
    spec: _Spec = Field(default_factory=_Spec)
    status: _Status = Field(default_factory=_Status)


class _Condition(BaseModel):
    type: str
    status: str


class _DeviceStatus(BaseModel):
    driver: str
    pool: str
    device: str
    share_id: str | None = Field(None, alias="shareID")
    conditions: list[_Condition] | None = None


class _AwaitedStatus(BaseModel):
    allocation: _Allocation | None = None
    devices: list[_DeviceStatus] | None = None


class _AwaitedClaim(BaseModel):
    metadata: _Identity
    status: _AwaitedStatus = Field(default_factory=_AwaitedStatus)


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
    found_as = f"{claim.metadata.namespace}/{claim.metadata.name}"
    if found_as != str(ref):  # a name with "/../" finds a claim, which would then be known by a name that no pod uses
        raise InvalidRequest(f"Claim {ref} has another name at the API server: {found_as}.")
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
    extended = (claim.metadata.annotations or {}).get(_EXTENDED_RESOURCES) == "true"
    classes = _device_classes(claim.spec) if extended else ()
    return AllocatedClaim(ref, devices, _reserved_pods(ref, claim.status.reserved_for or []), classes)


def _parse(ref: ClaimIdentity, found: Mapping[str, Any]) -> _Claim:
    try:
        return _Claim.model_validate(found)
    except ValidationError as error:
        place = ".".join(str(each) for each in error.errors()[0]["loc"])
        raise InvalidRequest(f"Claim {ref} cannot be read: {place} is not as the API defines it.") from error


def _device_classes(spec: _Spec) -> tuple[str, ...]:
    found = [
        one.device_class_name
        for each in spec.devices.requests or []
        for one in (*([each.exactly] if each.exactly else []), *(each.first_available or []))
    ]
    return tuple(dict.fromkeys(name for name in found if name))


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


def awaited_devices(
    found: Mapping[str, Any], driver: str, pool: str, *, ready: str, failed: str
) -> tuple[ClaimIdentity, tuple[AllocatedDevice, ...]]:
    """Return the claim, and its devices for whose binding conditions the scheduler waits.

    Args:
        ready, failed: types of the two conditions, neither of which a device that is waited for has yet.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        claim = _AwaitedClaim.model_validate(found)
    except ValidationError as error:
        place = ".".join(str(each) for each in error.errors()[0]["loc"])
        raise InvalidRequest(f"A claim cannot be read: {place} is not as the API defines it.") from error
    ref = ClaimIdentity(claim.metadata.namespace, claim.metadata.name, claim.metadata.uid)
    if claim.status.allocation is None:
        return ref, ()
    decided = {
        (each.driver, each.pool, each.device, each.share_id or "")
        for each in claim.status.devices or []
        if any(one.type in (ready, failed) and one.status == "True" for one in each.conditions or [])
    }
    return ref, tuple(
        AllocatedDevice((each.request,), each.pool, each.device, bool(each.admin_access), each.share_id or "")
        for each in claim.status.allocation.devices.results or []
        if (each.driver, each.pool) == (driver, pool)
        and ready in (each.binding_conditions or ())
        and (each.driver, each.pool, each.device, each.share_id or "") not in decided
    )


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
