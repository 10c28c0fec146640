"""Writers that keep the condition, the labels, the events and the evictions in step with the view, one each.

Invariant: a writer holds the desired state and what was written, and writes when the two differ. So it does not matter
how much happened while the API server was away.

``now`` is in monotonic seconds; ``wall`` returns seconds since the epoch, for timestamps in the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from plugin.cluster.errors import ApiBusy, ApiConflict, ApiForbidden, ApiInvalidRequest, ApiNotFound
from plugin.cluster.event_diff import EventDiff
from plugin.cluster.port import ClusterApi, ClusterNode, TaintApi
from plugin.cluster.taint import NodeTaint
from plugin.cluster.view import (
    PLUGIN_STOPPED_CONDITION,
    QUARANTINED_LABEL,
    SERVICE_AWAY_CONDITION,
    ClusterView,
    NodeCondition,
    OwnerNotice,
)
from plugin.logs import Logger

__all__ = [
    "ClusterWriter",
    "ConditionWriter",
    "EventsWriter",
    "EvictionWriter",
    "LabelsWriter",
    "TaintWriter",
    "WriterTimes",
]


class ClusterWriter(Protocol):
    """One part to keep in step. ``name`` is for the log: what is not reported while the writer fails."""

    name: str

    def update(self, view: ClusterView) -> None:
        """Store the newest view."""
        ...

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until the next write (0 or less: now); None: not before the next view."""
        ...

    async def write(self, now: float) -> None:
        """Do the next write that is due; raises the errors of :mod:`plugin.cluster.errors`."""
        ...


@dataclass(frozen=True, slots=True)
class WriterTimes:
    """Times of the writers, in seconds.

    Attributes:
        spacing: between two writes of the condition or of the taint, and between two of the labels when the count of
            quarantined differs.
        labels: between two writes of the labels when only clean and dirty differ, which change with every pod.
        heartbeat: after which the condition is written again although nothing has changed.
        confirm: the same for the first write of this plugin: a last write of an earlier instance, which gave up waiting
            for its request, may have arrived after it.
        eviction: between two evictions.
        retry: after which a pod is tried again that was not, or seems not to have been, evicted.
        long_retry: the same for a pod that was evicted or must not be; also the longest ``Retry-After`` that is
            honored.
    """

    spacing: float = 10.0
    labels: float = 60.0
    heartbeat: float = 300.0
    confirm: float = 10.0
    eviction: float = 10.0
    retry: float = 60.0
    long_retry: float = 600.0


class ConditionWriter:
    """The node's condition. Its transition time changes only with its status, also across restarts of the plugin.

    Args:
        on_node: receives the node as it was after each of our writes.
        jitter: in [0, 1), so that the heartbeats of a fleet do not coincide.
    """

    name = "condition"

    def __init__(
        self,
        cluster: ClusterApi,
        *,
        times: WriterTimes,
        wall: Callable[[], float],
        jitter: Callable[[], float],
        on_node: Callable[[ClusterNode], None],
    ) -> None:
        self._cluster = cluster
        self._times = times
        self._wall = wall
        self._jitter = jitter
        self._on_node = on_node
        self._desired: NodeCondition | None = None
        self._written: NodeCondition | None = None
        self._sent: NodeCondition | None = None
        """The last condition that was sent, whether or not it was written."""
        self._observed: ClusterNode | None = None
        """The node in the API server's last response; None when that is unknown."""
        self._next_write_at = 0.0
        self._heartbeat_at = 0.0
        self._first = True

    def update(self, view: ClusterView) -> None:
        self._desired = view.condition

    def seconds_until_due(self, now: float) -> float | None:
        if self._desired is None:
            return None
        return (self._heartbeat_at if self._desired == self._written else self._next_write_at) - now

    async def write(self, now: float) -> None:
        if self._desired is not None:
            await self._write_condition(self._desired)
            self._next_write_at = now + self._times.spacing
            heartbeat = self._times.heartbeat * (0.9 + 0.2 * self._jitter())
            self._heartbeat_at = now + (self._times.confirm if self._first else heartbeat)
            self._first = False

    async def write_stopped(self) -> None:
        """Report that the plugin no longer watches; otherwise the last condition would stay.

        Does nothing when no condition was sent.
        """
        if self._sent is not None and self._sent != SERVICE_AWAY_CONDITION:
            await self._write_condition(PLUGIN_STOPPED_CONDITION)

    async def _write_condition(self, desired: NodeCondition) -> None:
        node, self._observed = self._observed, None  # unknown until the response arrives
        if node is None:
            node = await self._cluster.get_node()
        now = datetime.fromtimestamp(self._wall(), UTC)
        since = node.transition_time if node.status is desired.status and node.transition_time is not None else now
        self._sent = desired
        self._observed = await self._cluster.patch_condition(desired, since=since, now=now)
        self._written = desired
        self._on_node(self._observed)


class LabelsWriter:
    """The node's labels: how many devices are clean, dirty and quarantined.

    A write of a label is a write of the whole node, which is sent to every watcher of nodes. So the rate of these
    writes must not depend on how often a tenant's pods start and end.
    """

    name = "labels"

    def __init__(self, cluster: ClusterApi, *, times: WriterTimes) -> None:
        self._cluster = cluster
        self._times = times
        self._desired: Mapping[str, str] = {}
        self._observed: Mapping[str, str] = {}
        self._written_at: float | None = None

    def update(self, view: ClusterView) -> None:
        self._desired = view.labels

    def on_node(self, node: ClusterNode) -> None:
        """Store the node's labels: another client may have changed ours, or this is a new node of the same name."""
        self._observed = {name: value for name, value in node.labels.items() if name in self._desired}

    def seconds_until_due(self, now: float) -> float | None:
        if self._desired == self._observed:
            return None
        if self._written_at is None:
            return 0.0
        urgent = self._desired.get(QUARANTINED_LABEL) != self._observed.get(QUARANTINED_LABEL)
        return self._written_at + (self._times.spacing if urgent else self._times.labels) - now

    async def write(self, now: float) -> None:
        desired = self._desired
        await self._cluster.patch_labels(desired)
        self._observed, self._written_at = desired, now


class TaintWriter:
    """The node's taint: present while no GPU is in service; nothing is changed while that is unknown.

    A yielded node has none: with it, the pods that the work with the driver waits for might not be placed.

    Its presence is read from each response about the node, so a taint that another client removed is restored.
    """

    name = "taint"

    def __init__(self, cluster: TaintApi, taint: NodeTaint, *, times: WriterTimes) -> None:
        self._cluster = cluster
        self._taint = taint
        self._times = times
        self._desired: bool | None = None
        self._present: bool | None = None
        """Whether the node has the taint; None when that is unknown."""
        self._next_write_at = 0.0

    def update(self, view: ClusterView) -> None:
        self._desired = view.none_in_service

    def on_node(self, node: ClusterNode) -> None:
        """Store whether the node has the taint."""
        self._present = any(map(self._taint.matches, node.taints))

    def seconds_until_due(self, now: float) -> float | None:
        if self._desired is None or self._desired == self._present:
            return None
        return self._next_write_at - now

    async def write(self, now: float) -> None:
        desired, self._present = self._desired, None  # unknown until the response arrives
        node = await self._cluster.get_node()
        self.on_node(node)
        if desired is None or desired == self._present:
            return
        self._present = None
        others = [each for each in node.taints if not self._taint.matches(each)]
        await self._cluster.replace_taints(
            [*others, self._taint.to_api()] if desired else others, node.resource_version
        )
        self._present, self._next_write_at = desired, now + self._times.spacing


class EventsWriter:
    """The events of the event diff, one at a time."""

    name = "events"

    def __init__(self, cluster: ClusterApi, event_diff: EventDiff, *, wall: Callable[[], float], log: Logger) -> None:
        self._cluster = cluster
        self._event_diff = event_diff
        self._wall = wall
        self._log = log

    def update(self, view: ClusterView) -> None:
        self._event_diff.update(view)

    def seconds_until_due(self, now: float) -> float | None:
        return self._event_diff.seconds_until_due(now)

    async def write(self, now: float) -> None:
        due = self._event_diff.next_event(now)
        if due is None:
            return
        at = datetime.fromtimestamp(self._wall(), UTC)
        try:
            if due.count:
                try:
                    count = await self._cluster.repeat_event(due.event, at, due.count + 1)
                except ApiNotFound:
                    self._event_diff.on_missing(due)
                    return
            else:
                try:
                    await self._cluster.create_event(due.event, at)
                    count = 1
                except ApiConflict:
                    # An earlier run of the plugin created the event, and may have repeated it: keep its count.
                    count = await self._cluster.repeat_event(due.event, at, None)
        except (ApiForbidden, ApiInvalidRequest, ApiNotFound, ApiConflict) as error:
            # A namespace that is being deleted refuses events; that must not stop the events of others.
            self._log.warning(
                "cluster.event-refused", about=due.event.target.name, kind=due.event.reason, message=str(error)
            )
            self._event_diff.on_refused(due, now)
        else:
            self._event_diff.on_written(due, now, count)


class EvictionWriter:
    """Evicts the pods that the policy requests, one at a time, each by its UID; disruption budgets are respected.

    A request is cancelled as soon as it is no longer wanted: its turn or the API server may take long, and the pod may
    have been granted its device meanwhile. A refusal, including one by the role, concerns only that pod: a namespace
    that is being deleted must not delay the evictions in others.
    """

    name = "evictions"

    def __init__(self, cluster: ClusterApi, *, times: WriterTimes, log: Logger) -> None:
        self._cluster = cluster
        self._times = times
        self._log = log
        self._pods_to_evict: dict[str, OwnerNotice] = {}
        self._free_at: dict[str, float] = {}
        self._next_at = 0.0
        self._request: tuple[str, asyncio.Task[None]] | None = None
        """The request in progress: the pod's UID and the task."""

    def update(self, view: ClusterView) -> None:
        self._pods_to_evict = {each.uid: each for each in view.notices if each.evict}
        if self._request is not None and self._request[0] not in self._pods_to_evict:
            self._request[1].cancel()
        if view.service_ready:
            self._free_at = {uid: at for uid, at in self._free_at.items() if uid in self._pods_to_evict}

    def seconds_until_due(self, now: float) -> float | None:
        if not self._pods_to_evict:
            return None
        return max(min(self._free_at.get(uid, 0.0) for uid in self._pods_to_evict), self._next_at) - now

    async def write(self, now: float) -> None:
        uid, notice = min(self._pods_to_evict.items(), key=lambda each: self._free_at.get(each[0], 0.0))
        who = {"tenant": notice.namespace, "pod": notice.pod}
        self._next_at = now + self._times.eviction
        self._free_at[uid] = now + self._times.retry
        try:
            outcome = await self._evict(notice)
        except ApiForbidden as error:
            self._free_at[uid] = now + self._times.long_retry
            self._log.warning("eviction.refused", **who, message=str(error))
        except (ApiConflict, ApiInvalidRequest) as error:
            self._log.warning("eviction.refused", **who, message=str(error))
        except ApiNotFound:
            self._free_at[uid] = now + self._times.long_retry
        except ApiBusy as error:
            self._free_at[uid] = now + max(self._times.retry, min(error.retry_after, self._times.long_retry))
            self._log.info("eviction.delayed", **who, message=str(error))
        else:
            if outcome:
                self._free_at[uid] = now + self._times.long_retry
                self._log.warning("pod.evicted", **who, message=notice.message)
            else:
                self._log.warning(
                    "eviction.withdrawn",
                    **who,
                    message="The request was cancelled, but the API server may already have received it.",
                )

    async def _evict(self, notice: OwnerNotice) -> bool:
        """Return True when the API server confirmed the eviction, and False when the request was cancelled.

        A cancelled request may have arrived.
        """
        eviction = asyncio.create_task(self._cluster.evict_pod(notice.namespace, notice.pod, notice.uid))
        self._request = notice.uid, eviction
        try:
            await asyncio.wait({eviction})
        finally:
            self._request = None
            eviction.cancel()
            await asyncio.gather(eviction, return_exceptions=True)
        if eviction.cancelled():
            return False
        eviction.result()
        return True
