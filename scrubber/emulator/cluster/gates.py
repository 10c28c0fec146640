"""Feature gates of Kubernetes 1.36 that decide which fields of DRA's objects exist.

Promise: a field of a gate that is off is dropped without an error, as by the API server: only who compares what comes
back with what was sent notices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from scrubber.emulator.cluster.resources import CLAIMS, DEVICE_CLASSES, SLICES, Json, ResourceType

DEFAULT_GATES: Mapping[str, bool] = {
    "DRAConsumableCapacity": True,
    "DRADeviceBindingConditions": True,
    "DRADeviceTaints": True,
    "DRAExtendedResource": True,
    "DRAListTypeAttributes": False,
    "DRAPartitionableDevices": True,
    "DRAResourceClaimDeviceStatus": True,
    "DRAResourceClaimGranularStatusAuthorization": True,
    "ResourceHealthStatus": True,
}
"""Gates at 1.36; those that are locked on are not listed."""

_FIELDS: Mapping[ResourceType, Mapping[str, tuple[str, ...]]] = {
    SLICES: {
        "DRAConsumableCapacity": (
            "spec.devices.*.allowMultipleAllocations",
            "spec.devices.*.capacity.*.requestPolicy",
        ),
        "DRADeviceBindingConditions": (
            "spec.devices.*.bindingConditions",
            "spec.devices.*.bindingFailureConditions",
            "spec.devices.*.bindsToNode",
        ),
        "DRADeviceTaints": ("spec.devices.*.taints",),
        "DRAListTypeAttributes": tuple(
            f"spec.devices.*.attributes.*.{each}" for each in ("bools", "ints", "strings", "versions")
        ),
        "DRAPartitionableDevices": (
            "spec.devices.*.consumesCounters",
            "spec.perDeviceNodeSelection",
            "spec.sharedCounters",
        ),
    },
    DEVICE_CLASSES: {"DRAExtendedResource": ("spec.extendedResourceName",)},
    CLAIMS: {"DRAResourceClaimDeviceStatus": ("status.devices",)},
}


def drop_disabled_fields(kind: ResourceType, item: Json, gates: Mapping[str, bool]) -> Json:
    """Return ``item`` without the fields of gates that are off."""
    paths = [path for gate, each in _FIELDS.get(kind, {}).items() if not gates[gate] for path in each]
    if not paths:
        return item
    item = copy.deepcopy(item)
    for path in paths:
        *parents, last = path.split(".")
        for parent in _parents(item, parents):
            parent.pop(last, None)
    return item


def _parents(item: Any, path: list[str]) -> Iterator[Json]:
    if not path:
        if isinstance(item, dict):
            yield item
    elif path[0] == "*":
        for each in item.values() if isinstance(item, dict) else item if isinstance(item, list) else ():
            yield from _parents(each, path[1:])
    elif isinstance(item, dict):
        yield from _parents(item.get(path[0]), path[1:])
