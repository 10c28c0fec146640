"""The task that keeps the cluster told, apart from everything else that the plugin does.

Promises: nobody waits for it, and no failure of it reaches anybody; it is said, and begun anew. What the service says is
taken in at once and told when the API server is ready to hear it: the newest state, for nothing else is kept. Of several
instances of the plugin on a node one writes at a time: the others wait, and write as soon as it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from plugin.cluster.bulletin import Bulletin, BulletinTimes
from plugin.cluster.counting import Counted
from plugin.cluster.duties import ConditionDuty, Duty, EventsDuty, EvictionDuty, LabelsDuty, NodeTimes
from plugin.cluster.errors import ClusterError, Denied
from plugin.cluster.port import ClosableCluster, NodeSeen
from plugin.cluster.view import View, seen
from plugin.instance_lock import WriterLock
from plugin.logs import Log, Reminder
from plugin.observing import ClusterObserver, Nobody
from scrubber.api import scrubber_pb2 as pb

__all__ = ["ClosableCluster", "ClusterTimes", "Pause", "PauseTimes", "Telling"]


@dataclass(frozen=True, slots=True)
class PauseTimes:
    """Seconds.

    Attributes:
        first, longest: the pause after a failure is doubled from one to the other.
        denied: after the role did not allow it.
    """

    first: float = 1.0
    longest: float = 300.0
    denied: float = 600.0


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """Seconds.

    Attributes:
        deadline: of one request.
        settle: that the first word of the service is waited for before it is called away.
        farewell: that the last words may take when the plugin ends.
        turn: between looks whether another instance of the plugin has gone.
        remind: between two lines of the log about the same failure.
        restart: before the task is begun anew after an error that nobody foresaw.
    """

    deadline: float = 10.0
    settle: float = 10.0
    farewell: float = 2.0
    turn: float = 0.05
    remind: float = 600.0
    restart: float = 30.0
    pause: PauseTimes = field(default_factory=PauseTimes)
    node: NodeTimes = field(default_factory=NodeTimes)
    bulletin: BulletinTimes = field(default_factory=BulletinTimes)


class Pause:
    """How long one duty is left alone after failures in a row; spread out, so that a fleet does not come back at once."""

    def __init__(self, times: PauseTimes, spread: Callable[[], float]) -> None:
        self._times = times
        self._spread = spread
        self._failures = 0
        self._until = 0.0

    def left(self, now: float) -> float:
        """Seconds until the next attempt; 0 or less: now."""
        return self._until - now

    def failed(self, error: ClusterError, now: float) -> None:
        wait = min(self._times.longest, self._times.first * 2 ** min(self._failures, 20))
        asked = min(self._times.longest, error.retry_after)
        self._failures += 1
        if isinstance(error, Denied):
            wait = asked = self._times.denied
        self._until = now + max(asked, wait * (0.5 + 0.5 * self._spread()))

    def over(self) -> None:
        self._failures, self._until = 0, 0.0


class Telling:
    """Tells the cluster of one node.

    Args:
        connect: makes the cluster's client; is called in a thread, because that loads its library.
        lock: which instance of the plugin writes.
        by_envvar: as in :func:`plugin.service.advertised_devices`.
        clock: monotonic seconds; ``wall``: seconds since the epoch; ``spread``: random, in [0, 1).
    """

    def __init__(
        self,
        connect: Callable[[], ClosableCluster],
        node: str,
        *,
        times: ClusterTimes,
        lock: WriterLock,
        log: Log,
        clock: Callable[[], float],
        wall: Callable[[], float],
        spread: Callable[[], float],
        by_envvar: bool = False,
        observer: ClusterObserver | None = None,
    ) -> None:
        self._connect = connect
        self._observer = observer or Nobody()
        self._node = node
        self._times = times
        self._lock = lock
        self._turn = asyncio.Lock()
        self._log = log
        self._clock = clock
        self._wall = wall
        self._spread = spread
        self._by_envvar = by_envvar
        self._snapshot: pb.Snapshot | None = None
        self._news = asyncio.Event()
        self._view: View | None = None
        self._bells: set[asyncio.Event] = set()
        self._duties: tuple[Duty, ...] = ()
        self._condition: ConditionDuty | None = None
        self._cluster: ClosableCluster | None = None
        self._task: asyncio.Task[NoReturn] | None = None

    def heard(self, snapshot: pb.Snapshot | None) -> None:
        """Take in a snapshot of the service; None: none that is ready was there for the whole grace period.

        Only puts it down, in the place of the one before: whoever calls must not suffer from what is made of it. One that
        is not ready says nothing, and must not take the place of the word that nobody is there.
        """
        if snapshot is None or snapshot.ready:
            self._snapshot = snapshot
            self._news.set()

    def start(self) -> None:
        """Begin; a task of its own, whose end concerns nobody."""
        self._lock.take()  # before all that takes a while: an instance that ends looks for its successor
        self._task = asyncio.create_task(self._persist(), name="the cluster")

    async def stop(self) -> None:
        """End, and have the condition say that nobody watches any more, if that can be said in a moment.

        With a successor the condition stays as it is: the successor writes once this instance has written its last.
        """
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
            if self._cluster is None:
                return
            parting = asyncio.create_task(self._part(self._cluster, self._condition))
            await asyncio.wait({parting}, timeout=self._times.farewell)
            parting.cancel()
            await asyncio.gather(parting, return_exceptions=True)
        finally:
            self._lock.release()

    async def _part(self, cluster: ClosableCluster, condition: ConditionDuty | None) -> None:
        try:
            if condition is not None and not self._lock.has_successor():
                await condition.farewell()
        except ClusterError as error:
            self._log.info("cluster.farewell-failed", sentence=str(error))
        finally:
            await cluster.close()

    async def _persist(self) -> NoReturn:
        while True:
            work = asyncio.create_task(self._work(), name="telling the cluster")
            try:
                # A task, and not a call: whatever ends it, a mistake of ours included, ends there.
                await asyncio.wait({work})
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            self._log.error("cluster.failed", exc_info=work.exception())
            await asyncio.sleep(self._times.restart)

    async def _work(self) -> NoReturn:
        if self._cluster is None:
            self._cluster = Counted(await asyncio.to_thread(self._connect), self._observer)
        cluster, times, wall = self._cluster, self._times, self._wall
        labels = LabelsDuty(cluster, times=times.node)

        def node_seen(node: NodeSeen) -> None:
            labels.node_seen(node)
            self._ring()

        self._condition = ConditionDuty(cluster, times=times.node, wall=wall, spread=self._spread, node_seen=node_seen)
        events = EventsDuty(cluster, Bulletin(self._node, times.bulletin), wall=wall, log=self._log)
        self._duties = (self._condition, labels, events, EvictionDuty(cluster, times=times.node, log=self._log))
        for duty in self._duties:
            if self._view is not None:
                duty.heard(self._view)
        async with asyncio.TaskGroup() as tasks:
            for duty in self._duties:
                tasks.create_task(self._keep(duty), name=duty.name)
            await self._listen()

    async def _listen(self) -> NoReturn:
        """Make a view of the newest snapshot, and of none when there is none for too long after the start."""
        if self._view is None:
            await _rung(self._news, self._times.settle)
            if not self._news.is_set():
                self._show(View())
        while True:
            await self._news.wait()
            self._news.clear()
            before, snapshot = self._view or View(), self._snapshot
            self._show(before.away() if snapshot is None else seen(snapshot, before, by_envvar=self._by_envvar))

    async def _keep(self, duty: Duty) -> NoReturn:
        pause = Pause(self._times.pause, self._spread)
        reminder = Reminder(self._log, every=self._times.remind, clock=self._clock)
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            while True:
                bell.clear()
                now = self._clock()
                due = duty.due_in(now)
                if due is not None:
                    due = max(due, pause.left(now))
                if due is None or due > 0:
                    await _rung(bell, due)
                    continue
                if not self._lock.take():
                    await self._stand_by()
                    continue
                try:
                    await duty.act(now)
                except ClusterError as error:
                    pause.failed(error, self._clock())
                    reminder.waiting("cluster.away", what=duty.name, sentence=str(error))
                else:
                    pause.over()
                    reminder.over("cluster.there", what=duty.name)
        finally:
            self._bells.discard(bell)

    async def _stand_by(self) -> None:
        """Wait until no other instance of the plugin writes."""
        async with self._turn:  # one of the duties looks, for all of them
            logged = False
            while not self._lock.take():
                if not logged:
                    self._log.info("cluster.standing-by", node=self._node)
                logged = True
                await asyncio.sleep(self._times.turn)

    def _show(self, view: View) -> None:
        self._view = view
        for duty in self._duties:
            duty.heard(view)
        self._ring()

    def _ring(self) -> None:
        for bell in self._bells:
            bell.set()


async def _rung(bell: asyncio.Event, seconds: float | None) -> None:
    """Return when ``bell`` rings, or after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await bell.wait()
    except TimeoutError:
        return
