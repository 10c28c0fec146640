"""API server clients that count successful and failed writes."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from plugin.cluster.errors import ApiConflict, ApiNotFound, ClusterError
from plugin.cluster.gpu_reset import GpuReset
from plugin.cluster.port import ClosableClusterApi, ClusterNode, EventContent, LeaseState, PauseApi
from plugin.cluster.view import NodeCondition
from plugin.observers import ClusterObserver

__all__ = ["MeteredClusterApi", "MeteredPauseApi"]

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
        return await _count_write(
            self._observer, "condition", self._cluster.patch_condition(condition, since=since, now=now)
        )

    async def patch_labels(self, labels: Mapping[str, str]) -> None:
        await _count_write(self._observer, "label", self._cluster.patch_labels(labels))

    async def replace_taints(self, taints: Sequence[Mapping[str, Any]], resource_version: str) -> None:
        await _count_write(self._observer, "taint", self._cluster.replace_taints(taints, resource_version), ApiConflict)

    async def create_event(self, event: EventContent, now: datetime) -> None:
        await _count_write(self._observer, "event", self._cluster.create_event(event, now), ApiConflict)

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int:
        return await _count_write(self._observer, "event", self._cluster.repeat_event(event, now, count), ApiNotFound)

    async def evict_pod(self, namespace: str, pod: str, uid: str) -> None:
        await _count_write(
            self._observer, "eviction", self._cluster.evict_pod(namespace, pod, uid), ApiConflict, ApiNotFound
        )

    async def close(self) -> None:
        await self._cluster.close()


class MeteredPauseApi:
    """``cluster``, with its writes reported to ``observer``; an object that has changed counts as neither."""

    def __init__(self, cluster: PauseApi, observer: ClusterObserver) -> None:
        self._cluster = cluster
        self._observer = observer

    async def get_node(self) -> ClusterNode:
        return await self._cluster.get_node()

    async def change_labels(self, labels: Mapping[str, str | None], resource_version: str) -> ClusterNode:
        return await _count_write(
            self._observer, "label", self._cluster.change_labels(labels, resource_version), ApiConflict
        )

    async def get_lease(self, namespace: str, name: str) -> LeaseState:
        return await self._cluster.get_lease(namespace, name)

    async def create_lease(self, namespace: str, name: str, lease: LeaseState) -> LeaseState:
        return await _count_write(
            self._observer, "lease", self._cluster.create_lease(namespace, name, lease), ApiConflict
        )

    async def update_lease(self, namespace: str, name: str, lease: LeaseState) -> LeaseState:
        return await _count_write(
            self._observer, "lease", self._cluster.update_lease(namespace, name, lease), ApiConflict
        )

    async def list_gpu_resets(self) -> Sequence[GpuReset]:
        return await self._cluster.list_gpu_resets()

    async def get_gpu_reset(self, name: str) -> GpuReset:
        return await self._cluster.get_gpu_reset(name)

    async def create_gpu_reset(self, name: str, uuids: Sequence[str]) -> GpuReset:
        return await _count_write(
            self._observer, "gpu-reset", self._cluster.create_gpu_reset(name, uuids), ApiConflict, ApiNotFound
        )

    async def delete_gpu_reset(self, name: str) -> None:
        await _count_write(self._observer, "gpu-reset", self._cluster.delete_gpu_reset(name), ApiNotFound)

    async def close(self) -> None:
        await self._cluster.close()


async def _count_write(observer: ClusterObserver, what: str, write: Awaitable[_T], *neither: type[ClusterError]) -> _T:
    try:
        answer = await write
    except ClusterError as error:
        if not isinstance(error, neither):
            observer.on_cluster_write(what, False)
        raise
    observer.on_cluster_write(what, True)
    return answer
