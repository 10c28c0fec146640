"""Which processes are a pod's, by cgroup or (simulated node without writable cgroups) by an environment marker.

Both ways keep the contract of :class:`scrubber.ports.node.Containers`: an answer is complete or an error, and
nobody is signalled who is not proved a leftover at the moment of the signal.
"""

from scrubber.adapters.cgroups.containers import CgroupContainers
from scrubber.adapters.cgroups.environment_marker import MarkerContainers
from scrubber.adapters.cgroups.hierarchy import discover_root

__all__ = ["CgroupContainers", "MarkerContainers", "discover_root"]
