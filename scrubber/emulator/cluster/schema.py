"""The types of the fields of DRA's objects.

Promise: a field of a wrong type is refused with 400, as by the API server's decoder, and a field that does not exist is
dropped without an error, so that a misspelt one is noticed only by a client that compares what comes back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scrubber.emulator.cluster.resources import (
    CLAIM_TEMPLATES,
    CLAIMS,
    DEVICE_CLASSES,
    LEASES,
    NODES,
    PODS,
    SLICES,
    Json,
    ResourceType,
)
from scrubber.emulator.cluster.status import StatusError


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object whose keys are free, with values of one shape."""

    shape: Any


ANY = object()
"""A value of any type."""
OBJECT: Mapping[str, Any] = {}
"""An object with any fields; an empty shape checks nothing below."""
QUANTITY = (str, int)

_TOLERATION = {"key": str, "operator": str, "value": str, "effect": str, "tolerationSeconds": int}
_TAINT = {"key": str, "value": str, "effect": str, "timeAdded": str}
_OPAQUE = {"driver": str, "parameters": OBJECT}
_SELECTOR = {"cel": {"expression": str}}
_COUNTERS = MapOf({"value": QUANTITY})
_SUBREQUEST = {
    "name": str,
    "deviceClassName": str,
    "selectors": [_SELECTOR],
    "allocationMode": str,
    "count": int,
    "adminAccess": bool,
    "tolerations": [_TOLERATION],
    "capacity": {"requests": MapOf(QUANTITY)},
}
_CLAIM_SPEC = {
    "devices": {
        "requests": [{"name": str, "exactly": _SUBREQUEST, "firstAvailable": [_SUBREQUEST]}],
        "constraints": [{"requests": [str], "matchAttribute": str, "distinctAttribute": str}],
        "config": [{"requests": [str], "opaque": _OPAQUE}],
    }
}
_RESULT = {
    "request": str,
    "driver": str,
    "pool": str,
    "device": str,
    "adminAccess": bool,
    "tolerations": [_TOLERATION],
    "bindingConditions": [str],
    "bindingFailureConditions": [str],
    "shareID": str,
    "consumedCapacity": MapOf(QUANTITY),
}
_CONDITION = {
    "type": str,
    "status": str,
    "reason": str,
    "message": str,
    "lastTransitionTime": str,
    "observedGeneration": int,
}
_CLAIM_STATUS = {
    "allocation": {
        "devices": {"results": [_RESULT], "config": [{"source": str, "requests": [str], "opaque": _OPAQUE}]},
        "nodeSelector": OBJECT,
        "allocationTimestamp": str,
    },
    "reservedFor": [{"apiGroup": str, "resource": str, "name": str, "uid": str}],
    "devices": [
        {
            "driver": str,
            "pool": str,
            "device": str,
            "shareID": str,
            "conditions": [_CONDITION],
            "data": ANY,
            "networkData": {"interfaceName": str, "ips": [str], "hardwareAddress": str},
        }
    ],
}
_DEVICE = {
    "name": str,
    "attributes": MapOf(
        {
            "bool": bool,
            "int": int,
            "string": str,
            "version": str,
            "bools": [bool],
            "ints": [int],
            "strings": [str],
            "versions": [str],
        }
    ),
    "capacity": MapOf({"value": QUANTITY, "requestPolicy": OBJECT}),
    "consumesCounters": [{"counterSet": str, "counters": _COUNTERS}],
    "nodeName": str,
    "nodeSelector": OBJECT,
    "allNodes": bool,
    "taints": [_TAINT],
    "bindsToNode": bool,
    "bindingConditions": [str],
    "bindingFailureConditions": [str],
    "allowMultipleAllocations": bool,
}
_SLICE_SPEC = {
    "driver": str,
    "pool": {"name": str, "generation": int, "resourceSliceCount": int},
    "nodeName": str,
    "nodeSelector": OBJECT,
    "allNodes": bool,
    "perDeviceNodeSelection": bool,
    "devices": [_DEVICE],
    "sharedCounters": [{"name": str, "counters": _COUNTERS}],
}
_CLASS_SPEC = {"selectors": [_SELECTOR], "config": [{"opaque": _OPAQUE}], "extendedResourceName": str}
_METADATA = {
    **dict.fromkeys(("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink"), str),
    **dict.fromkeys(("creationTimestamp", "deletionTimestamp"), str),
    "generation": int,
    "deletionGracePeriodSeconds": (int, float),
    "labels": MapOf(str),
    "annotations": MapOf(str),
    "finalizers": [str],
    "ownerReferences": [OBJECT],
    "managedFields": ANY,
}
MICRO_TIME = re.compile(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}\.\d{6}(Z|[+-]\d\d:\d\d)")
"""The only form in which the API server decodes a time with microseconds."""
_LEASE_SPEC = {
    "holderIdentity": str,
    "leaseDurationSeconds": int,
    "acquireTime": MICRO_TIME,
    "renewTime": MICRO_TIME,
    "leaseTransitions": int,
    "strategy": str,
    "preferredHolder": str,
}
_SHAPES: Mapping[ResourceType, Mapping[str, Any]] = {
    CLAIMS: {"spec": _CLAIM_SPEC, "status": _CLAIM_STATUS},
    CLAIM_TEMPLATES: {"spec": {"metadata": OBJECT, "spec": _CLAIM_SPEC}},
    SLICES: {"spec": _SLICE_SPEC},
    DEVICE_CLASSES: {"spec": _CLASS_SPEC},
    LEASES: {"spec": _LEASE_SPEC},
    NODES: {"spec": OBJECT, "status": OBJECT},
    PODS: {"spec": OBJECT, "status": OBJECT},
}


def decoded(kind: ResourceType, item: Mapping[str, Any]) -> Json:
    """Return a copy of ``item`` with the fields that its kind has; of other kinds than DRA's, with all.

    Raises:
        StatusError: 400, a field is of a wrong type.
    """
    shape = {"apiVersion": str, "kind": str, "metadata": _METADATA, **_SHAPES.get(kind, {})}
    whole = kind in _SHAPES
    try:
        found: Json = _decoded(shape if whole else {"metadata": _METADATA, **_open(item)}, item, "")
    except TypeError as error:
        message = f"{kind.kind} in version {kind.version!r} cannot be handled as a {kind.kind}: {error}"
        raise StatusError(400, "BadRequest", message) from None
    return found


def _open(item: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys((key for key in item if key != "metadata"), ANY)


def _decoded(shape: Any, value: Any, path: str) -> Any:
    if shape is ANY:
        return copy.deepcopy(value)
    if isinstance(shape, list):
        _check(isinstance(value, list), value, path, "list")
        return [_decoded(shape[0], each, path) for each in value]
    if isinstance(shape, MapOf):
        _check(isinstance(value, Mapping), value, path, "map")
        return {key: _decoded(shape.shape, each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(shape, Mapping):
        _check(isinstance(value, Mapping), value, path, "object")
        if not shape:
            return copy.deepcopy(dict(value))
        known = [(key, each) for key, each in value.items() if key in shape and each is not None]
        return {key: _decoded(shape[key], each, f"{path}.{key}".lstrip(".")) for key, each in known}
    if isinstance(shape, re.Pattern):
        _check(isinstance(value, str), value, path, "string")
        if not shape.fullmatch(value):
            raise TypeError(f'parsing time "{value}" of field {path}: cannot parse as ".000000"')
        return value
    types = shape if isinstance(shape, tuple) else (shape,)
    # A bool is an int for Python, and not for the API.
    _check(isinstance(value, types) and (bool in types or not isinstance(value, bool)), value, path, types[0].__name__)
    return value


def _check(holds: bool, value: Any, path: str, expected: str) -> None:
    if not holds:
        raise TypeError(f"json: cannot unmarshal {type(value).__name__} into field {path} of type {expected}")
