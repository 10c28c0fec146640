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

from plugin.cluster.errors import ApiForbidden, ClusterError
from plugin.cluster.event_diff import EventDiff, EventDiffTimes
from plugin.cluster.metrics import MeteredClusterApi
from plugin.cluster.port import ClosableClusterApi, ClusterNode
from plugin.cluster.view import ClusterView, view_after
from plugin.cluster.writers import (
    ClusterWriter,
    ConditionWriter,
    EventsWriter,
    EvictionWriter,
    LabelsWriter,
    WriterTimes,
)
from plugin.instance_lock import WriterLock
from plugin.logs import Logger, WaitLogger
from plugin.observers import ClusterObserver, NullObserver
from scrubber.api import scrubber_pb2 as pb

__all__ = ["BackoffTimes", "ClosableClusterApi", "ClusterReporter", "ClusterReporterTimes", "WriterBackoff"]


@dataclass(frozen=True, slots=True)
class BackoffTimes:
    """Seconds.

    Attributes:
        first, max: the pause after a failure is doubled from one to the other.
        denied: after the role did not allow it.
    """

    first: float = 1.0
    max: float = 300.0
    denied: float = 600.0


@dataclass(frozen=True, slots=True)
class ClusterReporterTimes:
    """Seconds.

    Attributes:
        deadline: of one request.
        first_snapshot: that the first word of the service is waited for before it is called away.
        shutdown: that the last words may take when the plugin ends.
        lock_poll: between looks whether another instance of the plugin has gone.
        log_interval: between two lines of the log about the same failure.
        restart: before the task is begun anew after an error that nobody foresaw.
    """

    deadline: float = 10.0
    first_snapshot: float = 10.0
    shutdown: float = 2.0
    lock_poll: float = 0.05
    log_interval: float = 600.0
    restart: float = 30.0
    backoff: BackoffTimes = field(default_factory=BackoffTimes)
    writers: WriterTimes = field(default_factory=WriterTimes)
    events: EventDiffTimes = field(default_factory=EventDiffTimes)


class WriterBackoff:
    """How long one duty is left alone after failures in a row; spread out, so that a fleet does not come back at once."""

    def __init__(self, times: BackoffTimes, jitter: Callable[[], float]) -> None:
        self._times = times
        self._jitter = jitter
        self._failures = 0
        self._until = 0.0

    def remaining(self, now: float) -> float:
        """Seconds until the next attempt; 0 or less: now."""
        return self._until - now

    def on_failure(self, error: ClusterError, now: float) -> None:
        wait = min(self._times.max, self._times.first * 2 ** min(self._failures, 20))
        asked = min(self._times.max, error.retry_after)
        self._failures += 1
        if isinstance(error, ApiForbidden):
            wait = asked = self._times.denied
        self._until = now + max(asked, wait * (0.5 + 0.5 * self._jitter()))

    def reset(self) -> None:
        self._failures, self._until = 0, 0.0


class ClusterReporter:
    """Tells the cluster of one node.

    Args:
        connect: makes the cluster's client; is called in a thread, because that loads its library.
        lock: which instance of the plugin writes.
        uses_envvar: as in :func:`plugin.service_client.advertised_devices`.
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch; ``jitter``: random, in [0, 1).
    """

    def __init__(
        self,
        connect: Callable[[], ClosableClusterApi],
        node: str,
        *,
        times: ClusterReporterTimes,
        lock: WriterLock,
        log: Logger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float],
        uses_envvar: bool = False,
        observer: ClusterObserver | None = None,
    ) -> None:
        self._connect = connect
        self._observer = observer or NullObserver()
        self._node = node
        self._times = times
        self._lock = lock
        self._lock_wait = asyncio.Lock()
        self._log = log
        self._clock = clock
        self._wall_clock = wall_clock
        self._jitter = jitter
        self._uses_envvar = uses_envvar
        self._snapshot: pb.Snapshot | None = None
        self._snapshot_arrived = asyncio.Event()
        self._view: ClusterView | None = None
        self._wakeups: set[asyncio.Event] = set()
        self._writers: tuple[ClusterWriter, ...] = ()
        self._condition: ConditionWriter | None = None
        self._cluster: ClosableClusterApi | None = None
        self._task: asyncio.Task[NoReturn] | None = None

    def on_snapshot(self, snapshot: pb.Snapshot | None) -> None:
        """Take in a snapshot of the service; None: none that is ready was there for the whole grace period.

        Only puts it down, in the place of the one before: whoever calls must not suffer from what is made of it. One that
        is not ready says nothing, and must not take the place of the word that nobody is there.
        """
        if snapshot is None or snapshot.ready:
            self._snapshot = snapshot
            self._snapshot_arrived.set()

    def start(self) -> None:
        """Begin; a task of its own, whose end concerns nobody."""
        self._lock.try_acquire()  # before all that takes a while: an instance that ends looks for its successor
        self._task = asyncio.create_task(self._run_forever(), name="the cluster")

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
            parting = asyncio.create_task(self._shut_down(self._cluster, self._condition))
            await asyncio.wait({parting}, timeout=self._times.shutdown)
            parting.cancel()
            await asyncio.gather(parting, return_exceptions=True)
        finally:
            self._lock.release()

    async def _shut_down(self, cluster: ClosableClusterApi, condition: ConditionWriter | None) -> None:
        try:
            if condition is not None and not self._lock.has_successor():
                await condition.write_stopped()
        except ClusterError as error:
            self._log.info("cluster.farewell-failed", sentence=str(error))
        finally:
            await cluster.close()

    async def _run_forever(self) -> NoReturn:
        while True:
            work = asyncio.create_task(self._run_writers(), name="telling the cluster")
            try:
                # A task, and not a call: whatever ends it, a mistake of ours included, ends there.
                await asyncio.wait({work})
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            self._log.error("cluster.failed", exc_info=work.exception())
            await asyncio.sleep(self._times.restart)

    async def _run_writers(self) -> NoReturn:
        if self._cluster is None:
            self._cluster = MeteredClusterApi(await asyncio.to_thread(self._connect), self._observer)
        cluster, times, wall = self._cluster, self._times, self._wall_clock
        labels = LabelsWriter(cluster, times=times.writers)

        def node_seen(node: ClusterNode) -> None:
            labels.on_node(node)
            self._wake_writers()

        self._condition = ConditionWriter(
            cluster, times=times.writers, wall=wall, jitter=self._jitter, on_node=node_seen
        )
        events = EventsWriter(cluster, EventDiff(self._node, times.events), wall=wall, log=self._log)
        self._writers = (self._condition, labels, events, EvictionWriter(cluster, times=times.writers, log=self._log))
        for duty in self._writers:
            if self._view is not None:
                duty.update(self._view)
        async with asyncio.TaskGroup() as tasks:
            for duty in self._writers:
                tasks.create_task(self._run_writer(duty), name=duty.name)
            await self._follow_snapshots()

    async def _follow_snapshots(self) -> NoReturn:
        """Make a view of the newest snapshot, and of none when there is none for too long after the start."""
        if self._view is None:
            await _wait_for(self._snapshot_arrived, self._times.first_snapshot)
            if not self._snapshot_arrived.is_set():
                self._update_view(ClusterView())
        while True:
            await self._snapshot_arrived.wait()
            self._snapshot_arrived.clear()
            before, snapshot = self._view or ClusterView(), self._snapshot
            self._update_view(
                before.without_service()
                if snapshot is None
                else view_after(snapshot, before, uses_envvar=self._uses_envvar)
            )

    async def _run_writer(self, writer: ClusterWriter) -> NoReturn:
        pause = WriterBackoff(self._times.backoff, self._jitter)
        reminder = WaitLogger(self._log, every=self._times.log_interval, clock=self._clock)
        wakeup = asyncio.Event()
        self._wakeups.add(wakeup)
        try:
            while True:
                wakeup.clear()
                now = self._clock()
                due = writer.seconds_until_due(now)
                if due is not None:
                    due = max(due, pause.remaining(now))
                if due is None or due > 0:
                    await _wait_for(wakeup, due)
                    continue
                if not self._lock.try_acquire():
                    await self._wait_for_lock()
                    continue
                try:
                    await writer.write(now)
                except ClusterError as error:
                    pause.on_failure(error, self._clock())
                    reminder.log_waiting("cluster.away", what=writer.name, sentence=str(error))
                else:
                    pause.reset()
                    reminder.log_ended("cluster.there", what=writer.name)
        finally:
            self._wakeups.discard(wakeup)

    async def _wait_for_lock(self) -> None:
        """Wait until no other instance of the plugin writes."""
        async with self._lock_wait:  # one of the duties looks, for all of them
            logged = False
            while not self._lock.try_acquire():
                if not logged:
                    self._log.info("cluster.standing-by", node=self._node)
                logged = True
                await asyncio.sleep(self._times.lock_poll)

    def _update_view(self, view: ClusterView) -> None:
        self._view = view
        for duty in self._writers:
            duty.update(view)
        self._wake_writers()

    def _wake_writers(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()


async def _wait_for(wakeup: asyncio.Event, seconds: float | None) -> None:
    """Return when ``wakeup`` rings, or after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await wakeup.wait()
    except TimeoutError:
        return
