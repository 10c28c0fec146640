"""An emulated kubelet, shipped for the demo, the tests and whoever wants to try a device plugin without a cluster.

Promise: it mirrors Kubernetes 1.36 as a plugin sees it; where it differs the module concerned says so.
"""

from plugin.emulator.cgroups import writable_cgroup_parent
from plugin.emulator.events import KubeletEvent
from plugin.emulator.kubelet import Kubelet
from plugin.emulator.pods import (
    ContainerSpec,
    ContainerState,
    ContainerStatus,
    Phase,
    Pod,
    PodOver,
    PodSpec,
    PodStatus,
    RestartPolicy,
)
from plugin.emulator.timings import KubeletTimings

__all__ = [
    "ContainerSpec",
    "ContainerState",
    "ContainerStatus",
    "Kubelet",
    "KubeletEvent",
    "KubeletTimings",
    "Phase",
    "Pod",
    "PodOver",
    "PodSpec",
    "PodStatus",
    "RestartPolicy",
    "writable_cgroup_parent",
]
