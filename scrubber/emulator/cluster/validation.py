"""What the API server accepts in ResourceSlices and in ResourceClaims with their status.

Promise: the limits are those of ``resource.k8s.io/v1`` in Kubernetes 1.36, and an object that breaks several is refused
with one message that names every field.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scrubber.emulator.cluster.resources import (
    CLAIM_TEMPLATES,
    CLAIMS,
    DEVICE_CLASSES,
    EVENTS,
    NODES,
    PODS,
    SLICES,
    Json,
    ResourceType,
)
from scrubber.emulator.cluster.status import FieldError

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
CONDITION_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")

MAX_NAME = 253
MAX_DEVICES = 128
MAX_DEVICES_WITH_TAINTS = 64
"""With taints, consumed counters or list attributes in the slice."""
MAX_ATTRIBUTES = 32
"""Attributes and capacities of a device together."""
MAX_TAINTS = 16
MAX_BINDING_CONDITIONS = 4
MAX_CONSUMED_COUNTER_SETS = 2
MAX_COUNTER_SETS = 8
MAX_COUNTERS = 32
MAX_RESERVED_FOR = 256
MAX_SUBREQUESTS = 8
MAX_REQUESTS = 32
MAX_STATUS_CONDITIONS = 8
MAX_STATUS_DATA = 10 * 1024
MAX_IPS = 16
MAX_INTERFACE_NAME = 256
MAX_HARDWARE_ADDRESS = 128
TAINT_EFFECTS = ("NoSchedule", "NoExecute", "None")
LIST_ATTRIBUTES = ("bools", "ints", "strings", "versions")
ADMIN_NAMESPACE_LABEL = "resource.kubernetes.io/admin-access"

Problems = Iterator[FieldError]


def problem(field: str, reason: str, value: object, message: str) -> FieldError:
    """Return a field's error with the message of an API server."""
    words = {
        "Required": "Required value",
        "Forbidden": "Forbidden",
        "Invalid": f"Invalid value: {json.dumps(value)}",
        "TooLong": "Too long",
        "TooMany": f"Too many: {json.dumps(value)}",
        "Duplicate": f"Duplicate value: {json.dumps(value)}",
        "NotSupported": f"Unsupported value: {json.dumps(value)}",
    }[reason]
    return FieldError(field, f"FieldValue{reason}", f"{words}: {message}" if message else words)


def validate_object(
    kind: ResourceType, item: Json, before: Json | None, *, namespace_labels: Mapping[str, str]
) -> list[FieldError]:
    """Return what is wrong with a new or changed object; ``before`` is None for a new one."""
    found = list(_name(kind, item))
    if kind is SLICES:
        found += _slice(item.get("spec") or {}, before)
    elif kind is CLAIMS:
        found += _claim_spec(item.get("spec") or {}, "spec", namespace_labels)
        if before is not None and before.get("spec") != item.get("spec"):
            found.append(problem("spec", "Invalid", "…", "field is immutable"))
    elif kind is EVENTS:
        found += _event(item)
    elif kind is CLAIM_TEMPLATES:
        inner = (item.get("spec") or {}).get("spec") or {}
        found += _claim_spec(inner, "spec.spec", namespace_labels)
    return found


def _name(kind: ResourceType, item: Json) -> Problems:
    name = item["metadata"]["name"]
    if len(name) > MAX_NAME or not SUBDOMAIN.fullmatch(name):
        yield problem(
            "metadata.name",
            "Invalid",
            name,
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'",
        )
    if kind in (NODES, PODS, DEVICE_CLASSES):
        return
    for index, each in enumerate(item["metadata"].get("ownerReferences") or []):
        for key in ("apiVersion", "kind", "name", "uid"):
            if not each.get(key):
                yield problem(f"metadata.ownerReferences[{index}].{key}", "Required", "", "must not be empty")


def _event(item: Json) -> Problems:
    about = (item.get("involvedObject") or {}).get("namespace") or "default"
    if about != item["metadata"]["namespace"]:
        yield problem("involvedObject.namespace", "Invalid", about, "does not match event.namespace")


# Slices


def _slice(spec: Json, before: Json | None) -> Problems:
    old = (before or {}).get("spec") or {}
    driver, pool, devices = spec.get("driver", ""), spec.get("pool") or {}, spec.get("devices") or []
    yield from _driver("spec.driver", driver)
    name = pool.get("name", "")
    if not name:
        yield problem("spec.pool.name", "Required", "", "")
    elif len(name) > MAX_NAME or not all(SUBDOMAIN.fullmatch(part) for part in name.split("/")):
        yield problem("spec.pool.name", "Invalid", name, "must be one or more DNS subdomains separated by slashes")
    if pool.get("resourceSliceCount", 0) <= 0:
        count = pool.get("resourceSliceCount", 0)
        yield problem("spec.pool.resourceSliceCount", "Invalid", count, "must be greater than zero")
    if pool.get("generation", 0) < 0:
        yield problem("spec.pool.generation", "Invalid", pool["generation"], "must be greater than or equal to zero")
    if before is not None:
        for path, new, was in (
            ("spec.driver", driver, old.get("driver")),
            ("spec.pool.name", name, (old.get("pool") or {}).get("name")),
            ("spec.nodeName", spec.get("nodeName"), old.get("nodeName")),
        ):
            if new != was:
                yield problem(path, "Invalid", new, "field is immutable")
    places = [key for key in ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection") if spec.get(key)]
    if len(places) != 1:
        message = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"
        yield problem("spec", "Invalid" if places else "Required", places, message)
    yield from _shared_counters(spec.get("sharedCounters") or [], bool(devices))
    special = any(each.get("taints") or each.get("consumesCounters") or _has_list_attribute(each) for each in devices)
    limit = MAX_DEVICES_WITH_TAINTS if special else MAX_DEVICES
    if len(devices) > limit:
        yield problem("spec.devices", "TooMany", len(devices), f"must have at most {limit} items")
    yield from _unique("spec.devices", [each.get("name") for each in devices], "name")
    for index, each in enumerate(devices):
        yield from _device(f"spec.devices[{index}]", each)


def _driver(field: str, driver: str) -> Problems:
    if not driver:
        yield problem(field, "Required", "", "")
    elif len(driver) > 63:
        yield problem(field, "TooLong", "", "may not be more than 63 bytes")
    elif not SUBDOMAIN.fullmatch(driver):
        yield problem(field, "Invalid", driver, "must be a DNS subdomain")


def _unique(field: str, values: Sequence[Any], key: str) -> Problems:
    seen: set[str] = set()
    for index, value in enumerate(values):
        text = json.dumps(value)
        if value is not None and text in seen:
            yield problem(f"{field}[{index}].{key}".rstrip("."), "Duplicate", value, "")
        seen.add(text)


def _has_list_attribute(device: Json) -> bool:
    return any(key in each for each in (device.get("attributes") or {}).values() for key in LIST_ATTRIBUTES)


def _shared_counters(sets: Sequence[Json], beside_devices: bool) -> Problems:
    if sets and beside_devices:
        yield problem("spec", "Invalid", "…", "only one of `sharedCounters` or `devices` is allowed")
    if len(sets) > MAX_COUNTER_SETS:
        yield problem("spec.sharedCounters", "TooMany", len(sets), f"must have at most {MAX_COUNTER_SETS} items")
    yield from _unique("spec.sharedCounters", [each.get("name") for each in sets], "name")
    for index, each in enumerate(sets):
        field = f"spec.sharedCounters[{index}]"
        yield from _label(f"{field}.name", each.get("name", ""))
        yield from _counters(f"{field}.counters", each.get("counters") or {})


def _counters(field: str, counters: Mapping[str, Json]) -> Problems:
    if not counters:
        yield problem(field, "Required", "", "")
    if len(counters) > MAX_COUNTERS:
        yield problem(field, "TooMany", len(counters), f"must have at most {MAX_COUNTERS} items")
    for name, counter in counters.items():
        yield from _label(f"{field}[{name}]", name)
        yield from _quantity(f"{field}[{name}].value", counter.get("value"))


def _label(field: str, value: str) -> Problems:
    if not value:
        yield problem(field, "Required", "", "")
    elif not LABEL.fullmatch(value):
        yield problem(
            field,
            "Invalid",
            value,
            "a lowercase RFC 1123 label must consist of lower case alphanumeric "
            "characters or '-', and must start and end with an alphanumeric character",
        )


def _quantity(field: str, value: object) -> Problems:
    if value is None:
        yield problem(field, "Required", "", "")
    elif not QUANTITY.fullmatch(str(value)):
        yield problem(field, "Invalid", value, "must be a quantity")


def _device(field: str, device: Json) -> Problems:
    yield from _label(f"{field}.name", device.get("name", ""))
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    if len(attributes) + len(capacity) > MAX_ATTRIBUTES:
        message = f"the total number of attributes and capacities must not exceed {MAX_ATTRIBUTES}"
        yield problem(field, "Invalid", len(attributes) + len(capacity), message)
    for name, attribute in attributes.items():
        yield from _qualified(f"{field}.attributes", name)
        yield from _attribute(f"{field}.attributes[{name}]", attribute)
    for name, each in capacity.items():
        yield from _qualified(f"{field}.capacity", name)
        yield from _quantity(f"{field}.capacity[{name}].value", each.get("value"))
    yield from _consumed(f"{field}.consumesCounters", device.get("consumesCounters") or [])
    yield from _taints(f"{field}.taints", device.get("taints") or [])
    yield from _binding(field, device)


def _qualified(field: str, name: str) -> Problems:
    domain, slash, identifier = name.rpartition("/")
    if slash and (len(domain) > 63 or not SUBDOMAIN.fullmatch(domain)):
        yield problem(field, "Invalid", name, "the domain must be a DNS subdomain of at most 63 characters")
    if len(identifier) > 32 or not IDENTIFIER.fullmatch(identifier):
        yield problem(field, "Invalid", name, "a valid C identifier of at most 32 characters is required")


_ATTRIBUTE_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str) and len(value) <= 64,
    "version": lambda value: isinstance(value, str) and len(value) <= 64 and bool(SEMVER.fullmatch(value)),
    **{name: lambda value: isinstance(value, list) and bool(value) for name in LIST_ATTRIBUTES},
}


def _attribute(field: str, attribute: Json) -> Problems:
    given = [(key, value) for key, value in attribute.items() if value is not None]
    if len(given) != 1:
        yield problem(field, "Invalid" if given else "Required", attribute, "exactly one value must be specified")
    for key, value in given:
        if not _ATTRIBUTE_TYPES.get(key, lambda _: False)(value):
            yield problem(f"{field}.{key}", "Invalid", value, "not a valid value of at most 64 characters")


def _consumed(field: str, sets: Sequence[Json]) -> Problems:
    if len(sets) > MAX_CONSUMED_COUNTER_SETS:
        yield problem(field, "TooMany", len(sets), f"must have at most {MAX_CONSUMED_COUNTER_SETS} items")
    yield from _unique(field, [each.get("counterSet") for each in sets], "counterSet")
    for index, each in enumerate(sets):
        yield from _label(f"{field}[{index}].counterSet", each.get("counterSet", ""))
        yield from _counters(f"{field}[{index}].counters", each.get("counters") or {})


def _taints(field: str, taints: Sequence[Json]) -> Problems:
    if len(taints) > MAX_TAINTS:
        yield problem(field, "TooMany", len(taints), f"must have at most {MAX_TAINTS} items")
    for index, taint in enumerate(taints):
        prefix, slash, name = taint.get("key", "").rpartition("/")
        if not name or not LABEL_VALUE.fullmatch(name) or (slash and not SUBDOMAIN.fullmatch(prefix)):
            yield problem(f"{field}[{index}].key", "Invalid", taint.get("key", ""), "must be a qualified name")
        if not LABEL_VALUE.fullmatch(taint.get("value") or ""):
            yield problem(f"{field}[{index}].value", "Invalid", taint["value"], "must be a valid label value")
        if not taint.get("effect"):
            yield problem(f"{field}[{index}].effect", "Required", "", "")
        elif taint["effect"] not in TAINT_EFFECTS:
            supported = ", ".join(json.dumps(each) for each in sorted(TAINT_EFFECTS))
            yield problem(f"{field}[{index}].effect", "NotSupported", taint["effect"], f"supported values: {supported}")


def _binding(field: str, device: Json) -> Problems:
    ready, failed = device.get("bindingConditions") or [], device.get("bindingFailureConditions") or []
    for name, each in (("bindingConditions", ready), ("bindingFailureConditions", failed)):
        if len(each) > MAX_BINDING_CONDITIONS:
            message = f"must have at most {MAX_BINDING_CONDITIONS} items"
            yield problem(f"{field}.{name}", "TooMany", len(each), message)
        yield from _unique(f"{field}.{name}", each, "")
    if bool(ready) != bool(failed):
        missing = "bindingFailureConditions" if ready else "bindingConditions"
        message = "bindingConditions and bindingFailureConditions are required together"
        yield problem(f"{field}.{missing}", "Invalid", [], message)
    for each in set(ready) & set(failed):
        yield problem(f"{field}.bindingFailureConditions", "Invalid", each, "must not be a binding condition as well")


# Claims


def _claim_spec(spec: Json, field: str, namespace_labels: Mapping[str, str]) -> Problems:
    requests = (spec.get("devices") or {}).get("requests") or []
    where = f"{field}.devices.requests"
    if len(requests) > MAX_REQUESTS:
        yield problem(where, "TooMany", len(requests), f"must have at most {MAX_REQUESTS} items")
    yield from _unique(where, [each.get("name") for each in requests], "name")
    for index, each in enumerate(requests):
        yield from _label(f"{where}[{index}].name", each.get("name", ""))
        exactly, alternatives = each.get("exactly"), each.get("firstAvailable") or []
        if bool(exactly) == bool(alternatives):
            message = "exactly one of `exactly` or `firstAvailable` is required"
            yield problem(f"{where}[{index}]", "Invalid" if exactly else "Required", each.get("name"), message)
        if len(alternatives) > MAX_SUBREQUESTS:
            message = f"must have at most {MAX_SUBREQUESTS} items"
            yield problem(f"{where}[{index}].firstAvailable", "TooMany", len(alternatives), message)
        for request in [exactly, *alternatives] if exactly else alternatives:
            if not request.get("deviceClassName"):
                yield problem(f"{where}[{index}].deviceClassName", "Required", "", "")
        if (exactly or {}).get("adminAccess") and namespace_labels.get(ADMIN_NAMESPACE_LABEL) != "true":
            message = f"admin access to devices requires the `{ADMIN_NAMESPACE_LABEL}: true` label on the namespace"
            yield problem(f"{where}[{index}].adminAccess", "Forbidden", "", message)


def result_key(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return what identifies an allocated device: driver, pool, device and share."""
    return entry.get("driver", ""), entry.get("pool", ""), entry.get("device", ""), entry.get("shareID") or ""


def validate_claim_status(item: Json, before: Json) -> list[FieldError]:
    """Return what is wrong with the changed status of a claim."""
    return list(_claim_status(item.get("status") or {}, before.get("status") or {}))


def _claim_status(status: Json, old: Json) -> Problems:
    allocation, reserved = status.get("allocation"), status.get("reservedFor") or []
    if allocation and old.get("allocation") and allocation != old["allocation"]:
        yield problem("status.allocation", "Invalid", "…", "field is immutable")
    if len(reserved) > MAX_RESERVED_FOR:
        message = f"must have at most {MAX_RESERVED_FOR} items"
        yield problem("status.reservedFor", "TooMany", len(reserved), message)
    if reserved and not allocation:
        yield problem("status.reservedFor", "Forbidden", "", "may not be specified when `allocated` is not set")
    yield from _unique("status.reservedFor", [each.get("uid") for each in reserved], "uid")
    devices = status.get("devices") or []
    allocated = {result_key(each) for each in ((allocation or {}).get("devices") or {}).get("results") or []}
    yield from _unique("status.devices", [result_key(each) for each in devices], "")
    for index, each in enumerate(devices):
        field = f"status.devices[{index}]"
        if result_key(each) not in allocated:
            yield problem(field, "Invalid", list(result_key(each)), "must be an allocated device in the claim")
        yield from _conditions(f"{field}.conditions", each.get("conditions") or [])
        yield from _data(f"{field}.data", each.get("data"))
        yield from _network(f"{field}.networkData", each.get("networkData") or {})


def _conditions(field: str, conditions: Sequence[Json]) -> Problems:
    if len(conditions) > MAX_STATUS_CONDITIONS:
        message = f"must have at most {MAX_STATUS_CONDITIONS} items"
        yield problem(field, "TooMany", len(conditions), message)
    types = Counter(each.get("type") for each in conditions)
    for index, each in enumerate(conditions):
        if types[each.get("type")] > 1:
            yield problem(f"{field}[{index}].type", "Duplicate", each.get("type"), "")
        for key in ("type", "lastTransitionTime"):
            if not each.get(key):
                yield problem(f"{field}[{index}].{key}", "Required", "", "")
        if each.get("status") not in ("True", "False", "Unknown"):
            supported = 'supported values: "False", "True", "Unknown"'
            yield problem(f"{field}[{index}].status", "NotSupported", each.get("status"), supported)
        if not each.get("reason"):
            yield problem(f"{field}[{index}].reason", "Required", "", "")
        elif not CONDITION_REASON.fullmatch(each["reason"]):
            yield problem(f"{field}[{index}].reason", "Invalid", each["reason"], "must be in CamelCase")


def _data(field: str, data: Any) -> Problems:
    if data is None:
        return
    if len(json.dumps(data, separators=(",", ":")).encode()) > MAX_STATUS_DATA:
        yield problem(field, "TooLong", "", f"may not be more than {MAX_STATUS_DATA} bytes")
    if not isinstance(data, dict):
        yield problem(field, "Invalid", data, "must be a JSON object")


def _network(field: str, network: Json) -> Problems:
    if len(network.get("interfaceName", "").encode()) > MAX_INTERFACE_NAME:
        yield problem(f"{field}.interfaceName", "TooLong", "", f"may not be more than {MAX_INTERFACE_NAME} bytes")
    if len(network.get("hardwareAddress", "").encode()) > MAX_HARDWARE_ADDRESS:
        yield problem(f"{field}.hardwareAddress", "TooLong", "", f"may not be more than {MAX_HARDWARE_ADDRESS} bytes")
    ips = network.get("ips") or []
    if len(ips) > MAX_IPS:
        yield problem(f"{field}.ips", "TooMany", len(ips), f"must have at most {MAX_IPS} items")
    for index, each in enumerate(ips):
        try:
            ipaddress.ip_interface(each if "/" in each else "")
        except ValueError:
            yield problem(f"{field}.ips[{index}]", "Invalid", each, "must be a valid address in CIDR form")
