"""Where the check runs, and how its pods request devices: a resource of a device plugin, or claims of a device class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.clustercheck.api import ApiServer, CannotStart, NotFound

__all__ = ["Path", "Placement", "find_placement"]

RESOURCE_API = "/apis/resource.k8s.io/v1"
_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")
_HOST_NAME = "kubernetes.io/hostname"


class Path(StrEnum):
    """How a container gets its devices."""

    DEVICE_PLUGIN = "device-plugin"
    CLAIM = "resource-claim"
    EXTENDED = "extended-resource-by-claim"

    @property
    def has_claims(self) -> bool:
        return self is not Path.DEVICE_PLUGIN


@dataclass(frozen=True, slots=True)
class Placement:
    """The node of the check.

    Attributes:
        devices: number of its devices, including those that other pods use.
        resource: extended resource that pods request; empty for a device class.
        device_class: class that pods request; empty for an extended resource.
        node: the node's object.
        driver_version: as its ResourceSlices state it; empty without.
    """

    path: Path
    devices: int
    resource: str
    device_class: str
    node: Mapping[str, Any]
    driver_version: str = ""

    @property
    def node_name(self) -> str:
        return str(self.node["metadata"]["name"])

    @property
    def node_selector(self) -> dict[str, str]:
        labels = self.node["metadata"].get("labels") or {}
        return {_HOST_NAME: labels.get(_HOST_NAME, self.node_name)}


def find_placement(api: ApiServer, *, resource: str, device_class: str, node: str) -> Placement:
    """Return the node with the fewest devices, at least one, or the node with the name ``node``.

    Raises:
        CannotStart: there is none, and why.
        ApiError: the API server refused a request.
    """
    nodes = [each for each in api.items("/api/v1/nodes") if node in ("", each["metadata"]["name"])]
    if not nodes:
        raise CannotStart(f"The cluster has no node {node}." if node else "The cluster has no nodes.")
    usable = [each for each in nodes if _is_usable(each)]
    if device_class:
        found = api.find(f"{RESOURCE_API}/deviceclasses/{device_class}")
        if found is None:
            raise CannotStart(f"The cluster has no device class {device_class}, or no resource.k8s.io/v1.")
        return _fewest(_by_slices(api, usable, found, "", device_class), f"devices of the class {device_class}", nodes)
    plugins = [
        Placement(Path.DEVICE_PLUGIN, count, resource, "", each)
        for each in usable
        if (count := _allocatable(each, resource))
    ]
    if plugins:
        return _fewest(plugins, resource, nodes)
    try:
        known = api.items(f"{RESOURCE_API}/deviceclasses")
    except NotFound:  # a cluster without DRA
        known = []
    classes = [each for each in known if (each.get("spec") or {}).get("extendedResourceName") == resource]
    placements = [each for found in classes for each in _by_slices(api, usable, found, resource, "")]
    return _fewest(placements, resource, nodes)


def _is_usable(node: Mapping[str, Any]) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = all(each["status"] == "True" for each in conditions if each["type"] == "Ready")
    return ready and not (node.get("spec") or {}).get("unschedulable")


def _allocatable(node: Mapping[str, Any], resource: str) -> int:
    text = str(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0"))
    return int(text) if text.isdecimal() else 0


def _by_slices(
    api: ApiServer, nodes: Sequence[Mapping[str, Any]], found: Mapping[str, Any], resource: str, device_class: str
) -> list[Placement]:
    """Return the nodes that have slices with devices of the class's driver.

    Devices that the class excludes by other attributes are counted as well: the count is an upper limit.
    """
    selectors = (found.get("spec") or {}).get("selectors") or []
    expressions = " ".join((each.get("cel") or {}).get("expression", "") for each in selectors)
    drivers = set(_DRIVER.findall(expressions))
    counts: Counter[str] = Counter()
    versions: dict[str, str] = {}
    for each in api.items(f"{RESOURCE_API}/resourceslices"):
        spec = each["spec"]
        if drivers and spec["driver"] not in drivers:
            continue
        name = spec.get("nodeName", "")
        for device in spec.get("devices") or []:
            counts[name] += 1
            version = (device.get("attributes") or {}).get("driverVersion") or {}
            versions[name] = str(version.get("version") or version.get("string") or versions.get(name, ""))
    path = Path.EXTENDED if resource else Path.CLAIM
    return [
        Placement(path, counts[name], resource, device_class, each, versions.get(name, ""))
        for each in nodes
        if counts[name := each["metadata"]["name"]]
    ]


def _fewest(placements: Sequence[Placement], what: str, nodes: Sequence[Mapping[str, Any]]) -> Placement:
    if placements:
        return min(placements, key=lambda each: (each.devices, each.node_name))
    names = ", ".join(sorted(each["metadata"]["name"] for each in nodes)[:8])
    raise CannotStart(
        f"No ready, schedulable node offers {what} (checked: {names}). Is the device plugin or DRA driver running there, "
        "and are its devices healthy? See kubectl describe node."
    )
