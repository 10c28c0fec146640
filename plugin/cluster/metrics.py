"""An API server client that counts successful and failed writes."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from plugin.cluster.errors import ApiConflict, ApiNotFound, ClusterError
from plugin.cluster.port import ClosableClusterApi, ClusterNode, EventContent
from plugin.cluster.view import NodeCondition
from plugin.observers import ClusterObserver

__all__ = ["MeteredClusterApi"]

_T = TypeVar("_T")


class MeteredClusterApi:
    """``cluster``, with its writes reported to ``observer``.

    An event that exists already or no longer exists, and a pod that is gone or was replaced, are normal responses about
    the object: they lead to another write or to none, and count as neither success nor failure. A cancelled request
    counts as neither, too.
    """

    def __init__(self, cluster: ClosableClusterApi, observer: ClusterObserver) -> None:
        self._cluster = cluster
        self._observer = observer

    async def get_node(self) -> ClusterNode:
        return await self._cluster.get_node()

    async def patch_condition(self, condition: NodeCondition, *, since: datetime, now: datetime) -> ClusterNode:
        return await self._count_write("condition", self._cluster.patch_condition(condition, since=since, now=now))

    async def patch_labels(self, labels: Mapping[str, str]) -> None:
        await self._count_write("label", self._cluster.patch_labels(labels))

    async def replace_taints(self, taints: Sequence[Mapping[str, Any]], resource_version: str) -> None:
        await self._count_write("taint", self._cluster.replace_taints(taints, resource_version), ApiConflict)

    async def create_event(self, event: EventContent, now: datetime) -> None:
        await self._count_write("event", self._cluster.create_event(event, now), ApiConflict)

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int:
        return await self._count_write("event", self._cluster.repeat_event(event, now, count), ApiNotFound)

    async def evict_pod(self, namespace: str, pod: str, uid: str) -> None:
        await self._count_write("eviction", self._cluster.evict_pod(namespace, pod, uid), ApiConflict, ApiNotFound)

    async def close(self) -> None:
        await self._cluster.close()

    async def _count_write(self, what: str, write: Awaitable[_T], *neither: type[ClusterError]) -> _T:
        try:
            answer = await write
        except ClusterError as error:
            if not isinstance(error, neither):
                self._observer.on_cluster_write(what, False)
            raise
        self._observer.on_cluster_write(what, True)
        return answer
