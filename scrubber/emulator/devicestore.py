"""The devices of a node as the kubelet counts them: per resource, the healthy and the unhealthy.

Promise: the counts are the real kubelet's, including its flaws. ``Healthy`` is compared exactly; a device that a plugin
omits lowers capacity; an unhealthy device lowers allocatable whether or not a pod uses it, and since that pod is
counted as well, the scheduler counts such a device twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from plugin.api import deviceplugin_pb2 as api

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


@dataclass(slots=True)
class ResourceDevices:
    """One resource's devices."""

    healthy: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    numa_nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def update(self, devices: Collection[api.Device]) -> None:
        """Replace the devices by a full list; devices that are not in it no longer exist."""
        self.healthy = {device.ID for device in devices if device.health == HEALTHY}
        self.unhealthy = {device.ID for device in devices if device.health != HEALTHY}
        self.numa_nodes = {device.ID: tuple(node.ID for node in device.topology.nodes) for device in devices}

    def mark_unhealthy(self) -> None:
        """Mark every device unhealthy, after the end of the stream: no plugin vouches for any device."""
        self.unhealthy |= self.healthy
        self.healthy = set()

    @property
    def capacity(self) -> int:
        return len(self.healthy) + len(self.unhealthy)

    @property
    def allocatable(self) -> int:
        return len(self.healthy)

    def health(self, device: str) -> str:
        """Return the health in the status of a pod on ``device``: an omitted device reads Healthy."""
        return UNHEALTHY if device in self.unhealthy else HEALTHY
