"""The node's ResourceSlices: what the scheduler learns of its devices. Pure.

All devices of the node are one pool. The scheduler takes the first device that fits, in the order of the slices' names
and of the devices in them, so the cleanest devices come first.

Invariants: a pool never has two devices of one name, and no slice exceeds the API's limits. The time of a taint that
stays is copied, because the API server would set it again at every write, and tolerations count from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from plugin.cluster.taint import TaintEffect
from plugin.dra.device_names import device_names

__all__ = [
    "DeviceTaint",
    "PublishedType",
    "Readiness",
    "SliceDevice",
    "SliceFeatures",
    "SliceOwner",
    "SlicePlan",
    "TaintTimes",
    "clean_condition",
    "dropped_features",
    "not_clean_condition",
    "plan_slices",
    "slice_contents",
    "taint_times",
]

Json = dict[str, Any]

MAX_DEVICES = 64
"""Per slice. The API allows 128, but 64 where a device has a taint or consumes counters: so a taint moves no device."""
MAX_COUNTER_SETS = 8
MAX_TAINTS = 16
MAX_STRING_CHARS = 64
MAX_NAME_CHARS = 253

PCIE_ROOT, PCI_BUS_ID = "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/pciBusID"

_TAINT_KEY = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PCI_ADDRESS = re.compile("[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]")


class Readiness(IntEnum):
    """How soon a device can be handed over; the scheduler should prefer the lower ones."""

    CLEAN = 0
    SCRUBBING = 1
    DIRTY = 2
    WITHHELD = 3


class PublishedType(StrEnum):
    """Values of the attribute ``type``, by which device classes select."""

    GPU = "gpu"
    INSTANCE = "instance"


@dataclass(frozen=True, slots=True)
class DeviceTaint:
    """A taint of a device; ``reason`` becomes the part of its key after the driver's name."""

    reason: str
    effect: TaintEffect = TaintEffect.NO_SCHEDULE


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """A device as it is to be published. Empty values and zeros are unknown, and are left out.

    Attributes:
        pcie_root: PCIe root complex, as in sysfs (``pci0000:3a``).
        peers: ids of devices joined by a fast link.
        parent, profile: of an instance: the id of its GPU, and its kind.
        being_cleaned: it is not clean, and on its way: the scheduler can place a pod on it, and bind the pod later.
    """

    id: str
    index: str
    readiness: Readiness
    model: str = ""
    memory_bytes: int = 0
    driver_version: str = ""
    pci_address: str = ""
    pcie_root: str = ""
    numa_node: int | None = None
    peers: frozenset[str] = frozenset()
    parent: str = ""
    profile: str = ""
    taints: tuple[DeviceTaint, ...] = ()
    being_cleaned: bool = False


@dataclass(frozen=True, slots=True)
class SliceFeatures:
    """Optional fields that the API server keeps; it drops those whose feature gate is off.

    Attributes:
        binding_conditions: also False where they are not requested.
    """

    taints: bool = True
    counters: bool = True
    binding_conditions: bool = False


@dataclass(frozen=True, slots=True)
class SliceOwner:
    """The node that the slices belong to; without a UID, they have no owner reference."""

    driver: str
    node: str
    node_uid: str = ""


TaintTimes = Mapping[tuple[str, str, str], str]
"""Device name, key and effect of a taint → ``timeAdded``."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The requests that make the published slices right, in this order."""

    create: tuple[Json, ...] = ()
    replace: tuple[Json, ...] = ()
    delete: tuple[Mapping[str, Any], ...] = ()
    generation: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.create or self.replace or self.delete)


def slice_contents(
    devices: Iterable[SliceDevice],
    driver: str,
    features: SliceFeatures | None = None,
    *,
    order: Sequence[str] = (),
) -> tuple[Json, ...]:
    """Return what each slice of the pool contains, ``devices`` or ``sharedCounters``; at least one slice.

    Args:
        order: names of devices in the order in which they are published, to be kept: then a change of one device is a
            change of one slice. Other devices follow, the cleanest first.

    A GPU with instances is not published: its instances are, and share its memory as counters. Where taints are not
    kept, a device with taints is not published.
    """
    features = features or SliceFeatures()
    known = {device.id: device for device in devices}
    names = device_names(known)
    parents = {device.parent for device in known.values() if device.parent}
    positions = {name: position for position, name in enumerate(order)}
    shown = sorted(
        (device for device in known.values() if device.id not in parents and (features.taints or not device.taints)),
        key=lambda device: (positions.get(names[device.id], len(positions)), _preference(device)),
    )
    sets = _counter_sets(known, parents, names) if features.counters else {}
    groups = _peer_groups(shown, names)
    published = [
        _device(device, driver, names, groups, sets)
        | (_binding_fields(driver) if features.binding_conditions and device.being_cleaned else {})
        for device in shown
    ]
    chunks = [published[each : each + MAX_DEVICES] for each in range(0, len(published), MAX_DEVICES)] or [[]]
    counters = list(sets.values())
    return (
        *({"devices": chunk} for chunk in chunks),
        *(
            {"sharedCounters": counters[each : each + MAX_COUNTER_SETS]}
            for each in range(0, len(counters), MAX_COUNTER_SETS)
        ),
    )


def _preference(device: SliceDevice) -> tuple[int, list[tuple[int, str]], str]:
    index = [(int(part) if part.isdecimal() else -1, part) for part in device.index.split(":")]
    return device.readiness, index, device.id


def _counter_sets(
    known: Mapping[str, SliceDevice], parents: Iterable[str], names: Mapping[str, str]
) -> dict[str, Json]:
    """Return the counters of each GPU with instances by its id; none where the size of an instance is unknown."""
    found = {}
    for parent in sorted(parents):
        sizes = [device.memory_bytes for device in known.values() if device.parent == parent]
        if all(size > 0 for size in sizes):
            whole = max(sum(sizes), known[parent].memory_bytes if parent in known else 0)
            name = names.get(parent) or device_names([parent])[parent]
            found[parent] = {"name": name, "counters": {"memory": {"value": quantity(whole)}}}
    return found


def _peer_groups(devices: Sequence[SliceDevice], names: Mapping[str, str]) -> dict[str, str]:
    """Return the group of each device that is joined to another: devices with the same value are all connected."""
    joined: dict[str, set[str]] = {device.id: set() for device in devices}
    for device in devices:
        for peer in device.peers & joined.keys():
            joined[device.id].add(peer)
            joined[peer].add(device.id)
    groups: dict[str, str] = {}
    for id_ in sorted(joined):
        if id_ in groups or not joined[id_]:
            continue
        waiting = [id_]
        while waiting:
            each = waiting.pop()
            if each not in groups:
                groups[each] = names[id_]
                waiting += joined[each]
    return groups


def _device(
    device: SliceDevice,
    driver: str,
    names: Mapping[str, str],
    groups: Mapping[str, str],
    sets: Mapping[str, Json],
) -> Json:
    strings = {
        "uuid": device.id,
        "type": (PublishedType.INSTANCE if device.parent else PublishedType.GPU).value,
        "productName": device.model,
        "peerGroup": groups.get(device.id, ""),
        "parentUUID": device.parent,
        "profile": device.profile,
        PCIE_ROOT: device.pcie_root,
        PCI_BUS_ID: address if _PCI_ADDRESS.fullmatch(address := device.pci_address.lower()) else "",
    }
    attributes: Json = {
        name: {"string": text} for name, value in strings.items() if (text := value[:MAX_STRING_CHARS].strip())
    }
    if version := semantic_version(device.driver_version):
        attributes["driverVersion"] = {"version": version}
    if device.numa_node is not None:
        attributes["numaNode"] = {"int": device.numa_node}
    built: Json = {"name": names[device.id], "attributes": attributes}
    if device.memory_bytes > 0:
        built["capacity"] = {"memory": {"value": quantity(device.memory_bytes)}}
    if device.parent in sets:
        counters = {"memory": {"value": quantity(device.memory_bytes)}}
        built["consumesCounters"] = [{"counterSet": sets[device.parent]["name"], "counters": counters}]
    if taints := _taints(device, driver):
        built["taints"] = taints
    return built


def clean_condition(driver: str) -> str:
    """Return the type of the condition in a claim's status that lets the scheduler bind the pod."""
    return f"{driver}/clean"


def not_clean_condition(driver: str) -> str:
    """Return the type of the condition in a claim's status that makes the scheduler choose another device."""
    return f"{driver}/not-clean"


def _binding_fields(driver: str) -> Json:
    return {
        "bindingConditions": [clean_condition(driver)],
        "bindingFailureConditions": [not_clean_condition(driver)],
    }


def _taints(device: SliceDevice, driver: str) -> list[Json]:
    """Return one taint for each reason; the strongest effect of a reason counts."""
    by_reason: dict[str, TaintEffect] = {}
    for taint in device.taints:
        reason = taint.reason if _TAINT_KEY.fullmatch(taint.reason) else "out-of-service"
        if by_reason.get(reason) is not TaintEffect.NO_EXECUTE:
            by_reason[reason] = taint.effect
    return [
        {"key": f"{driver}/{reason}", "effect": effect.value}
        for reason, effect in sorted(by_reason.items())[:MAX_TAINTS]
    ]


def semantic_version(version: str) -> str:
    """Return a driver's version as a semantic version, ``580.95.5`` for ``580.95.05``; empty if it is none."""
    parts = version.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        return ""
    numbers = [str(int(part)) for part in parts]
    return ".".join([*numbers, *["0"] * (3 - len(numbers))])


_SUFFIXES = ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki")


def quantity(value: int) -> str:
    """Return a number as a Kubernetes quantity, in the form in which the API server returns it."""
    for exponent, suffix in zip(range(6, 0, -1), _SUFFIXES, strict=True):
        if value and value % 1024**exponent == 0:
            return f"{value // 1024**exponent}{suffix}"
    for exponent, suffix in zip(range(6, 0, -1), "EPTGMk", strict=True):
        if value and value % 1000**exponent == 0:
            return f"{value // 1000**exponent}{suffix}"
    return str(value)


# -- comparison with what is published


def taint_times(slices: Iterable[Mapping[str, Any]]) -> TaintTimes:
    """Return when each published taint was added."""
    return {
        (device["name"], taint.get("key", ""), taint.get("effect", "")): taint["timeAdded"]
        for each in slices
        for device in each.get("spec", {}).get("devices") or []
        for taint in device.get("taints") or []
        if taint.get("timeAdded")
    }


def plan_slices(
    contents: Sequence[Json],
    published: Iterable[Mapping[str, Any]],
    owner: SliceOwner,
    *,
    times: TaintTimes,
    last_generation: int,
    token: Callable[[], str],
) -> SlicePlan:
    """Return the requests that replace ``published`` by slices with ``contents``.

    The generation of the pool stays where only one slice changes; otherwise all slices get the next one, and the
    scheduler ignores those that are still of the last.

    Args:
        published: all slices of the driver on the node, as the API server returned them.
        times: of the taints, of published ones and of earlier ones.
        last_generation: the highest generation that was ever published, as far as is known.
        token: returns some random letters and digits, for names.
    """
    existing = list(published)
    mine: dict[int, Mapping[str, Any]] = {}
    for each in sorted(existing, key=lambda each: -_generation(each)):
        position = _position(each)
        if position < len(contents) and each["spec"].get("pool", {}).get("name") == owner.node:
            mine.setdefault(position, each)
    delete = tuple(each for each in existing if each not in mine.values())
    dated = [_with_times(content, times) for content in contents]
    changed = [
        position
        for position, content in enumerate(dated)
        if position not in mine or not _has_content(mine[position], content, owner, len(contents))
    ]
    generations = {_generation(each) for each in mine.values()}
    highest = max([last_generation, *map(_generation, existing)])
    if len(mine) == len(contents) and generations == {highest} and len(changed) <= 1:
        generation, written = highest, changed
    else:
        generation, written = highest + 1, list(range(len(contents)))
    built = {
        position: _slice(position, dated[position], mine.get(position), owner, generation, len(contents), token)
        for position in written
    }
    return SlicePlan(
        create=tuple(each for position, each in built.items() if position not in mine),
        replace=tuple(each for position, each in built.items() if position in mine),
        delete=delete,
        generation=generation,
    )


def _position(found: Mapping[str, Any]) -> int:
    """Return the position in the pool that the name of a slice states; one that no pool has where it states none."""
    prefix = str(found["metadata"]["name"]).partition("-")[0]
    return int(prefix) if prefix.isdecimal() and len(prefix) == 2 else 1 << 30


def _generation(found: Mapping[str, Any]) -> int:
    return int(found.get("spec", {}).get("pool", {}).get("generation") or 0)


def _with_times(content: Json, times: TaintTimes) -> Json:
    if "devices" not in content:
        return content
    return {"devices": [_device_with_times(device, times) for device in content["devices"]]}


def _device_with_times(device: Json, times: TaintTimes) -> Json:
    if "taints" not in device:
        return device
    taints = []
    for taint in device["taints"]:
        added = times.get((device["name"], taint["key"], taint["effect"]))
        taints.append(taint | ({"timeAdded": added} if added else {}))
    return device | {"taints": taints}


def _has_content(found: Mapping[str, Any], content: Json, owner: SliceOwner, count: int) -> bool:
    spec = found["spec"]
    same = all(_plain(spec.get(key) or []) == _plain(content.get(key) or []) for key in ("devices", "sharedCounters"))
    owners = found["metadata"].get("ownerReferences") or []
    owned = not owner.node_uid or any(each.get("uid") == owner.node_uid for each in owners)
    return same and owned and spec.get("pool", {}).get("resourceSliceCount") == count


def _plain(value: Any, key: str = "") -> Any:
    """Return JSON without the times of new taints and without empty values, so that what was sent equals what is kept."""
    if isinstance(value, Mapping):
        return {
            name: _plain(each, name)
            for name, each in value.items()
            if name != "timeAdded" and each not in ({}, [], None)
        }
    if isinstance(value, list):
        return [_plain(each, key) for each in value]
    return value


def _slice(
    position: int,
    content: Json,
    found: Mapping[str, Any] | None,
    owner: SliceOwner,
    generation: int,
    count: int,
    token: Callable[[], str],
) -> Json:
    pool = {"name": owner.node, "generation": generation, "resourceSliceCount": count}
    metadata: Json = {"name": _name(position, owner, token())}
    if found is not None:
        kept = ("name", "uid", "resourceVersion")
        metadata = {key: found["metadata"][key] for key in kept if key in found["metadata"]}
    if owner.node_uid:
        reference = {"apiVersion": "v1", "kind": "Node", "name": owner.node, "uid": owner.node_uid, "controller": True}
        metadata["ownerReferences"] = [reference]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {"driver": owner.driver, "nodeName": owner.node, "pool": pool, **content},
    }


def _name(position: int, owner: SliceOwner, token: str) -> str:
    """Return a name that was never used before. The scheduler sorts by it, so the position has two digits."""
    head = f"{position:02d}-{owner.driver}-{owner.node}"[: MAX_NAME_CHARS - len(token) - 1]
    return f"{head.rstrip('-.')}-{token}"


def dropped_features(sent: Mapping[str, Any], received: Mapping[str, Any]) -> SliceFeatures:
    """Return the features of which the API server kept every field of a slice that was written."""
    mine, theirs = sent["spec"], received.get("spec", {})
    kept = {device.get("name"): device for device in theirs.get("devices") or []}
    devices = mine.get("devices") or []
    return SliceFeatures(
        taints=not any(
            len(kept.get(each["name"], {}).get("taints") or []) < len(each.get("taints", [])) for each in devices
        ),
        counters=len(theirs.get("sharedCounters") or []) >= len(mine.get("sharedCounters", []))
        and not any(
            "consumesCounters" in each and not kept.get(each["name"], {}).get("consumesCounters") for each in devices
        ),
        binding_conditions=not any(
            "bindingConditions" in each and not kept.get(each["name"], {}).get("bindingConditions") for each in devices
        ),
    )
