"""An emulated kubelet, shipped for the demo, the tests and anyone who wants to try a device plugin without a cluster.

Promise: it mirrors Kubernetes 1.36 as a plugin sees it; the modules document where it differs.
"""

from scrubber.emulator.cgroups import writable_cgroup_parent
from scrubber.emulator.events import KubeletEvent
from scrubber.emulator.kubelet import Kubelet
from scrubber.emulator.pods import (
    ContainerSpec,
    ContainerState,
    ContainerStatus,
    EmulatedPod,
    PodClaim,
    PodEnded,
    PodPhase,
    PodSpec,
    PodStatus,
    RestartPolicy,
)
from scrubber.emulator.timings import KubeletTimings

__all__ = [
    "ContainerSpec",
    "ContainerState",
    "ContainerStatus",
    "EmulatedPod",
    "Kubelet",
    "KubeletEvent",
    "KubeletTimings",
    "PodClaim",
    "PodEnded",
    "PodPhase",
    "PodSpec",
    "PodStatus",
    "RestartPolicy",
    "writable_cgroup_parent",
]
