"""What is asked of the API server, and in which words: the seam between what is told and how it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from plugin.cluster.view import Condition, Status

__all__ = ["ClosableCluster", "Cluster", "EventText", "NodeSeen", "Regarding"]


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What of the node concerns us.

    Attributes:
        status: of our condition; None when the node has none.
        since: when it became so.
        labels: all of the node's.
    """

    status: Status | None
    since: datetime | None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Regarding:
    """What an event is about. A node has no namespace, and its events are kept in ``default``."""

    kind: str
    name: str
    uid: str
    namespace: str = ""

    @property
    def home(self) -> str:
        """The namespace that the event lives in."""
        return self.namespace or "default"


@dataclass(frozen=True, slots=True)
class EventText:
    """An event's contents. ``warning``: type ``Warning``, else ``Normal``."""

    name: str
    regarding: Regarding
    reason: str
    sentence: str
    warning: bool


class Cluster(Protocol):
    """What the duties ask. All raise the errors of :mod:`plugin.cluster.errors`; times are aware, in UTC."""

    async def node(self) -> NodeSeen: ...

    async def show_condition(self, condition: Condition, *, since: datetime, now: datetime) -> NodeSeen: ...

    async def show_labels(self, labels: Mapping[str, str]) -> None: ...

    async def create_event(self, event: EventText, now: datetime) -> None: ...

    async def repeat_event(self, event: EventText, now: datetime, count: int | None) -> int:
        """Say it again, with ``count`` (None: leave it); answers the count that the event now has."""
        ...

    async def evict(self, namespace: str, pod: str, uid: str) -> None: ...


class ClosableCluster(Cluster, Protocol):
    """A cluster that holds connections."""

    async def close(self) -> None: ...
