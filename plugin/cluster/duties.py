"""What is kept in step with the view, each for itself: the condition, the labels, the events, the evictions.

Promise: a duty holds what is so and what was written, and writes when the two differ. So it makes no difference how much
happened while the API server was away.

``now`` is monotonic seconds; ``wall`` gives aware times in UTC for what others read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from plugin.cluster.bulletin import Bulletin
from plugin.cluster.errors import Busy, Denied, Exists, Missing, Rejected
from plugin.cluster.port import Cluster, NodeSeen
from plugin.cluster.view import AWAY, QUARANTINED, STOPPED, Condition, Notice, View
from plugin.logs import Log

__all__ = ["ConditionDuty", "Duty", "EventsDuty", "EvictionDuty", "LabelsDuty", "NodeTimes"]


class Duty(Protocol):
    """One thing to keep in step. ``name`` is for the log: what is not told while it fails."""

    name: str

    def heard(self, view: View) -> None:
        """Take in the newest view."""
        ...

    def due_in(self, now: float) -> float | None:
        """Seconds until there is something to do, 0 or less when there is now; None: not before the next view."""
        ...

    async def act(self, now: float) -> None:
        """Do the next thing that is due; raises the errors of :mod:`plugin.cluster.errors`."""
        ...


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Seconds.

    Attributes:
        spacing: between two writes of the condition, and between two of the labels when the count of quarantined differs.
        labels: between two of the labels when only clean and dirty differ, which every pod changes.
        heartbeat: after which the condition is written though nothing has changed.
        confirm: the same for the first write of this plugin: a last one of an earlier instance, which gave its request up,
            may have arrived after it.
        eviction: between two evictions.
        again: after which a pod that was not, or seems not to have been, evicted is tried again.
        settled: the same for one that was, or must not be; and the longest that the API server may ask for.
    """

    spacing: float = 10.0
    labels: float = 60.0
    heartbeat: float = 300.0
    confirm: float = 10.0
    eviction: float = 10.0
    again: float = 60.0
    settled: float = 600.0


class ConditionDuty:
    """The node's condition. Its transition time changes with its status only, also across restarts of the plugin.

    Args:
        node_seen: is shown the node as it was after each of our writes.
        spread: in [0, 1), so that a fleet's heartbeats do not come together.
    """

    name = "condition"

    def __init__(
        self,
        cluster: Cluster,
        *,
        times: NodeTimes,
        wall: Callable[[], float],
        spread: Callable[[], float],
        node_seen: Callable[[NodeSeen], None],
    ) -> None:
        self._cluster = cluster
        self._times = times
        self._wall = wall
        self._spread = spread
        self._node_seen = node_seen
        self._wanted: Condition | None = None
        self._written: Condition | None = None
        self._sent: Condition | None = None
        """The last one that was sent, whether or not it was written."""
        self._there: NodeSeen | None = None
        """The node as the API server has it; None when that is not known."""
        self._free_at = 0.0
        self._beat_at = 0.0
        self._first = True

    def heard(self, view: View) -> None:
        self._wanted = view.condition

    def due_in(self, now: float) -> float | None:
        if self._wanted is None:
            return None
        return (self._beat_at if self._wanted == self._written else self._free_at) - now

    async def act(self, now: float) -> None:
        if self._wanted is not None:
            await self._write(self._wanted)
            self._free_at = now + self._times.spacing
            heartbeat = self._times.heartbeat * (0.9 + 0.2 * self._spread())
            self._beat_at = now + (self._times.confirm if self._first else heartbeat)
            self._first = False

    async def farewell(self) -> None:
        """Nobody watches any more; without a word, the last one would stand. Nothing when none was ever said."""
        if self._sent is not None and self._sent != AWAY:
            await self._write(STOPPED)

    async def _write(self, wanted: Condition) -> None:
        there, self._there = self._there, None  # until an answer says otherwise
        if there is None:
            there = await self._cluster.node()
        now = datetime.fromtimestamp(self._wall(), UTC)
        since = there.since if there.status is wanted.status and there.since is not None else now
        self._sent = wanted
        self._there = await self._cluster.show_condition(wanted, since=since, now=now)
        self._written = wanted
        self._node_seen(self._there)


class LabelsDuty:
    """The node's labels: how many devices are clean, dirty and quarantined.

    A write of a label is one of the whole node, which all who watch nodes are sent: how often a tenant's pods come and go
    must not decide how often that is.
    """

    name = "labels"

    def __init__(self, cluster: Cluster, *, times: NodeTimes) -> None:
        self._cluster = cluster
        self._times = times
        self._wanted: Mapping[str, str] = {}
        self._there: Mapping[str, str] = {}
        self._written_at: float | None = None

    def heard(self, view: View) -> None:
        self._wanted = view.labels

    def node_seen(self, node: NodeSeen) -> None:
        """The node has these labels: somebody may have changed ours, or the node is a new one of the same name."""
        self._there = {name: value for name, value in node.labels.items() if name in self._wanted}

    def due_in(self, now: float) -> float | None:
        if self._wanted == self._there:
            return None
        if self._written_at is None:
            return 0.0
        urgent = self._wanted.get(QUARANTINED) != self._there.get(QUARANTINED)
        return self._written_at + (self._times.spacing if urgent else self._times.labels) - now

    async def act(self, now: float) -> None:
        wanted = self._wanted
        await self._cluster.show_labels(wanted)
        self._there, self._written_at = wanted, now


class EventsDuty:
    """The events that the bulletin has, one at a time."""

    name = "events"

    def __init__(self, cluster: Cluster, bulletin: Bulletin, *, wall: Callable[[], float], log: Log) -> None:
        self._cluster = cluster
        self._bulletin = bulletin
        self._wall = wall
        self._log = log

    def heard(self, view: View) -> None:
        self._bulletin.heard(view)

    def due_in(self, now: float) -> float | None:
        return self._bulletin.due_in(now)

    async def act(self, now: float) -> None:
        due = self._bulletin.next(now)
        if due is None:
            return
        at = datetime.fromtimestamp(self._wall(), UTC)
        try:
            if due.count:
                try:
                    count = await self._cluster.repeat_event(due.text, at, due.count + 1)
                except Missing:
                    self._bulletin.vanished(due)
                    return
            else:
                try:
                    await self._cluster.create_event(due.text, at)
                    count = 1
                except Exists:
                    # An earlier run of the plugin told it, and may have told it more than once: its count stays.
                    count = await self._cluster.repeat_event(due.text, at, None)
        except (Denied, Rejected, Missing, Exists) as error:
            # A namespace that is being deleted takes no events: that is no reason to tell nobody else.
            self._log.warning(
                "cluster.event-refused", about=due.text.regarding.name, kind=due.text.reason, sentence=str(error)
            )
            self._bulletin.refused(due, now)
        else:
            self._bulletin.told(due, now, count)


class EvictionDuty:
    """The pods that the policy wants gone, one at a time, each by its UID; disruption budgets are respected.

    A request is taken back as soon as nobody wants it any more: its turn, or the API server, may be long in coming, and
    the pod may have been given its device meanwhile. A refusal, of the role's too, is the one pod's: a namespace that is
    being deleted must not keep the others'.
    """

    name = "evictions"

    def __init__(self, cluster: Cluster, *, times: NodeTimes, log: Log) -> None:
        self._cluster = cluster
        self._times = times
        self._log = log
        self._wanted: dict[str, Notice] = {}
        self._free_at: dict[str, float] = {}
        self._next_at = 0.0
        self._asking: tuple[str, asyncio.Task[None]] | None = None
        """The request that is under way: the pod's UID, and its task."""

    def heard(self, view: View) -> None:
        self._wanted = {each.uid: each for each in view.notices if each.evict}
        if self._asking is not None and self._asking[0] not in self._wanted:
            self._asking[1].cancel()
        if view.heard:
            self._free_at = {uid: at for uid, at in self._free_at.items() if uid in self._wanted}

    def due_in(self, now: float) -> float | None:
        if not self._wanted:
            return None
        return max(min(self._free_at.get(uid, 0.0) for uid in self._wanted), self._next_at) - now

    async def act(self, now: float) -> None:
        uid, notice = min(self._wanted.items(), key=lambda each: self._free_at.get(each[0], 0.0))
        who = {"tenant": notice.namespace, "pod": notice.pod}
        self._next_at = now + self._times.eviction
        self._free_at[uid] = now + self._times.again
        try:
            asked = await self._ask(notice)
        except Denied as error:
            self._free_at[uid] = now + self._times.settled
            self._log.warning("eviction.refused", **who, sentence=str(error))
        except (Exists, Rejected) as error:
            self._log.warning("eviction.refused", **who, sentence=str(error))
        except Missing:
            self._free_at[uid] = now + self._times.settled
        except Busy as error:
            self._free_at[uid] = now + max(self._times.again, min(error.retry_after, self._times.settled))
            self._log.info("eviction.delayed", **who, sentence=str(error))
        else:
            if asked:
                self._free_at[uid] = now + self._times.settled
                self._log.warning("pod.evicted", **who, sentence=notice.sentence)
            else:
                self._log.warning(
                    "eviction.withdrawn", **who, sentence="It was taken back, and may have arrived all the same."
                )

    async def _ask(self, notice: Notice) -> bool:
        """Whether it was answered, with a success; not when it was taken back, which says nothing of whether it arrived."""
        asking = asyncio.create_task(self._cluster.evict(notice.namespace, notice.pod, notice.uid))
        self._asking = notice.uid, asking
        try:
            await asyncio.wait({asking})
        finally:
            self._asking = None
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if asking.cancelled():
            return False
        asking.result()
        return True
