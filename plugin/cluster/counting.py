"""The API server, with what it takes and what it does not take being counted on the way."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from datetime import datetime
from typing import TypeVar

from plugin.cluster.errors import ClusterError, Exists, Missing
from plugin.cluster.port import ClosableCluster, EventText, NodeSeen
from plugin.cluster.view import Condition
from plugin.observing import ClusterObserver

__all__ = ["Counted"]

_T = TypeVar("_T")


class Counted:
    """``cluster``, whose writes ``observer`` is told of.

    That an event is there already or not any more, or that a pod is gone or another one by now, is an answer about the
    object and leads to another write or to none: it counts as neither. A request that was taken back counts as neither,
    too.
    """

    def __init__(self, cluster: ClosableCluster, observer: ClusterObserver) -> None:
        self._cluster = cluster
        self._observer = observer

    async def node(self) -> NodeSeen:
        return await self._cluster.node()

    async def show_condition(self, condition: Condition, *, since: datetime, now: datetime) -> NodeSeen:
        return await self._told("condition", self._cluster.show_condition(condition, since=since, now=now))

    async def show_labels(self, labels: Mapping[str, str]) -> None:
        await self._told("label", self._cluster.show_labels(labels))

    async def create_event(self, event: EventText, now: datetime) -> None:
        await self._told("event", self._cluster.create_event(event, now), Exists)

    async def repeat_event(self, event: EventText, now: datetime, count: int | None) -> int:
        return await self._told("event", self._cluster.repeat_event(event, now, count), Missing)

    async def evict(self, namespace: str, pod: str, uid: str) -> None:
        await self._told("eviction", self._cluster.evict(namespace, pod, uid), Exists, Missing)

    async def close(self) -> None:
        await self._cluster.close()

    async def _told(self, what: str, write: Awaitable[_T], *neither: type[ClusterError]) -> _T:
        try:
            answer = await write
        except ClusterError as error:
            if not isinstance(error, neither):
                self._observer.wrote(what, False)
            raise
        self._observer.wrote(what, True)
        return answer
