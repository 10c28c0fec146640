"""The interface to the API server: the requests that the writers need, independent of the client library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from plugin.cluster.gpu_reset import GpuResetApi
from plugin.cluster.view import ConditionStatus, NodeCondition

__all__ = [
    "ClosableClusterApi",
    "ClusterApi",
    "ClusterNode",
    "EventContent",
    "EventTarget",
    "LeaseState",
    "PauseApi",
    "TaintApi",
]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """The parts of the node object that the plugin uses.

    Attributes:
        status: status of our condition; None when the node has none.
        transition_time: last transition time of that condition.
        labels: all labels of the node.
        taints: all taints of the node, as the API writes them.
        resource_version: the version of the object, for a change of what other clients change too.
    """

    status: ConditionStatus | None
    transition_time: datetime | None
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, Any], ...] = ()
    resource_version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class EventTarget:
    """The object that an event is about. A node has no namespace, and its events are kept in ``default``."""

    kind: str
    name: str
    uid: str
    namespace: str = ""
    api_version: str = "v1"

    @property
    def event_namespace(self) -> str:
        """The namespace that contains the event."""
        return self.namespace or "default"


@dataclass(frozen=True, slots=True)
class EventContent:
    """An event's contents. ``is_warning``: type ``Warning``, else ``Normal``."""

    name: str
    target: EventTarget
    reason: str
    message: str
    is_warning: bool


class TaintApi(Protocol):
    """The requests about a node's taints; both raise the errors of :mod:`plugin.cluster.errors`."""

    async def get_node(self) -> ClusterNode: ...

    async def replace_taints(self, taints: Sequence[Mapping[str, Any]], resource_version: str) -> None:
        """Replace all taints; :class:`plugin.cluster.errors.ApiConflict` if the node has another version by now."""
        ...


class ClusterApi(TaintApi, Protocol):
    """The requests of the writers.

    All raise the errors of :mod:`plugin.cluster.errors`; times are timezone-aware, in UTC.
    """

    async def patch_condition(self, condition: NodeCondition, *, since: datetime, now: datetime) -> ClusterNode: ...

    async def patch_labels(self, labels: Mapping[str, str]) -> None: ...

    async def create_event(self, event: EventContent, now: datetime) -> None: ...

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int:
        """Update the event with ``count`` (None: leave it unchanged); return the count that it now has."""
        ...

    async def evict_pod(self, namespace: str, pod: str, uid: str) -> None: ...


class ClosableClusterApi(ClusterApi, Protocol):
    """A cluster client that holds connections."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A Lease of ``coordination.k8s.io``.

    Attributes:
        holder: identity of its holder; empty if it is free.
        seconds: for how long after its last renewal it is valid.
        renewed_at: the holder's time of that; None: never.
        transitions: how often the holder has changed.
        resource_version: the version of the object.
    """

    holder: str
    seconds: int
    renewed_at: datetime | None
    transitions: int = 0
    resource_version: str = field(default="", compare=False)


class PauseApi(GpuResetApi, Protocol):
    """The requests by which agents are paused; all raise the errors of :mod:`plugin.cluster.errors`."""

    async def get_node(self) -> ClusterNode: ...

    async def change_labels(self, labels: Mapping[str, str | None], resource_version: str) -> ClusterNode:
        """Set labels, or remove those with None, and return the node as it is then.

        Raises:
            ApiConflict: the node has another version by now; nothing was changed.
        """
        ...

    async def get_lease(self, namespace: str, name: str) -> LeaseState: ...

    async def create_lease(self, namespace: str, name: str, lease: LeaseState) -> LeaseState:
        """Create the Lease; :class:`plugin.cluster.errors.ApiConflict` if it exists already."""
        ...

    async def update_lease(self, namespace: str, name: str, lease: LeaseState) -> LeaseState:
        """Replace its contents; :class:`plugin.cluster.errors.ApiConflict` if it has another version by now."""
        ...

    async def close(self) -> None: ...
