"""How long the kubelet's operations take, in one place: the real figures by default, scaled for tests and the demo.

Promise: no other module of the emulator contains a duration of the kubelet or of the control plane. All are in seconds. Figures were measured
on Kubernetes 1.36 with containerd 2.1, or come from the kubelet's source.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class KubeletTimings:
    """Durations in seconds; a pair is a range from which one is drawn each time. Whole numbers are counts."""

    # Registration
    dial_back: float = 10.0
    """How long ``Register`` dials the plugin's socket before it fails."""
    watcher_period: float = 1.0
    """Interval at which the plugin watcher compares ``plugins_registry/`` with what is registered."""
    watcher_get_info: float = 1.0
    watcher_notify: float = 5.0
    watcher_retry: tuple[float, float] = (0.5, 122.0)
    """Delay before a refused registration is retried: the first figure, doubling up to the second."""
    resource_removal: float = 300.0
    """How long a resource whose stream has ended keeps its capacity before it is forgotten."""

    # Admission and start
    pre_start_deadline: float = 30.0
    pre_start_first_retry: float = 0.4
    """Delay after the first refusal of a start, and after every one that exceeded the deadline."""
    pre_start_retry: tuple[float, float] = (12.0, 15.0)
    sandbox_setup: float = 0.3
    image_pull: float = 0.1
    """Before a container's first start; the image is already on the node."""
    sync_loop_health: float = 300.0
    """An admission that blocks the main loop for longer fails the kubelet's own health check."""

    # Containers and pods
    relist_delay: tuple[float, float] = (0.0, 1.0)
    """The pod lifecycle event generator lists the runtime's containers once per second."""
    crash_back_off: tuple[float, float] = (10.0, 300.0)
    """Delay before the second restart, doubling up to the second figure; the first restart is immediate."""
    crash_back_off_reset: float = 600.0
    """After a run of this length the back-off starts over."""
    termination_grace: float = 30.0
    deleted_pod_list_delay: float = 0.1
    """From the exit of a deleted pod's last container to its absence from ``List``."""
    completed_pod_list_delay: tuple[float, float] = (1.5, 2.0)
    log_directory_removal: float = 60.0
    """Interval at which the logs of pods that are gone are removed."""

    # Dynamic resource allocation
    dra_call: float = 45.0
    """Deadline of ``NodePrepareResources`` and ``NodeUnprepareResources``."""
    pod_resync: tuple[float, float] = (60.0, 90.0)
    """Delay before a failed preparation is tried again, unless the pod's labels or annotations change before."""
    unprepare_retry: tuple[float, float] = (10.0, 15.0)
    """Delay before a pod that could not be terminated is tried again."""
    dra_reconcile: float = 60.0
    """Interval of the loop that unprepares the claims of pods that are gone, one after another."""
    slice_wipe_delay: float = 30.0
    """How long a driver may be without a connection before its ResourceSlices of this node are deleted."""
    slice_wipe_retry: tuple[float, float] = (1.0, 300.0)
    """Delay before a failed deletion of slices is retried: the first figure, doubling up to the second."""
    dra_reconnect: tuple[float, float] = (1.0, 120.0)
    """Back-off of the connection to a driver."""
    health_stream_retry: float = 5.0
    """Delay before ``NodeWatchResources`` is called again after its end, for ever."""
    health_timeout: float = 30.0
    """A device's health is unknown this long after the last message, unless the message specifies a time."""

    # Status and requests
    first_node_status: float = 0.2
    """From the kubelet's start to its first node status.

    Not measured; only the order was observed: a plugin that registers on ``kubelet.sock`` as soon as it exists comes
    before it, the plugin watcher's first scan after it.
    """
    node_status_period: float = 10.0
    """``nodeStatusUpdateFrequency``: the maximum age of the scheduler's capacity and allocatable."""
    empty_list_after_restart: float = 1.0
    """Until the API server's pods arrive: ``List`` is empty, and no pod is admitted."""
    pod_resources_per_second: int = 100
    pod_resources_burst: int = 10

    def scaled(self, factor: float) -> KubeletTimings:
        """Return the timings of a faster kubelet: every duration times ``factor``, counts unchanged.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        return _scaled(self, factor)


@dataclass(frozen=True, slots=True)
class ClusterTimings:
    """Durations of the control plane, in seconds."""

    watch_timeout: float = 1800.0
    """After this a watch ends by itself; the real server draws a time between half an hour and an hour."""
    bookmark_period: float = 60.0
    """Interval of the bookmarks of a watch that allows them."""
    binding_poll: float = 5.0
    """Interval at which the scheduler looks at the binding conditions of a claim."""
    binding_timeout: float = 600.0
    """``bindingTimeout``: from the allocation to the end of the wait for its binding conditions."""
    scheduling_back_off: float = 1.0
    """Before a pod whose binding failed is scheduled again."""

    def scaled(self, factor: float) -> ClusterTimings:
        """Return the timings of a faster control plane: every duration times ``factor``.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        return _scaled(self, factor)


_Timings = TypeVar("_Timings", KubeletTimings, ClusterTimings)


def _scaled(timings: _Timings, factor: float) -> _Timings:
    if factor <= 0:
        raise ValueError(f"timings must be scaled by a positive factor, not {factor}")
    faster: dict[str, Any] = {}
    for field in dataclasses.fields(timings):
        value = getattr(timings, field.name)
        if isinstance(value, float):
            faster[field.name] = value * factor
        elif isinstance(value, tuple):
            faster[field.name] = (value[0] * factor, value[1] * factor)
    return dataclasses.replace(timings, **faster)
