"""Identification of a pod's processes by cgroup or (simulated node without writable cgroups) by environment marker.

Both implementations follow the contract of :class:`scrubber.ports.node.Containers`: a result is complete or an error,
and no process is signalled unless it is proved to be a leftover at the moment of the signal.
"""

from scrubber.adapters.cgroups.containers import CgroupContainers
from scrubber.adapters.cgroups.environment_marker import MarkerContainers
from scrubber.adapters.cgroups.hierarchy import discover_root

__all__ = ["CgroupContainers", "MarkerContainers", "discover_root"]
