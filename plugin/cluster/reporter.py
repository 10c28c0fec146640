"""The background task that reports the node to the cluster, isolated from the rest of the plugin.

Invariants: no other part waits for it, and no failure of it affects another part; a failure is logged and the task
restarts. Snapshots of the service are stored at once and reported when the API server accepts them; only the newest
state is kept. If several instances of the plugin run on a node, one writes at a time. The others wait, and write as
soon as it has stopped.
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
from plugin.cluster.taint import NodeTaint
from plugin.cluster.view import ClusterView, view_after
from plugin.cluster.writers import (
    ClusterWriter,
    ConditionWriter,
    EventsWriter,
    EvictionWriter,
    LabelsWriter,
    TaintWriter,
    WriterTimes,
)
from plugin.instance_lock import WriterLock
from plugin.logs import Logger, WaitLogger
from plugin.observers import ClusterObserver, NullObserver
from scrubber.api import scrubber_pb2 as pb

__all__ = ["BackoffTimes", "ClosableClusterApi", "ClusterReporter", "ClusterReporterTimes", "WriterBackoff"]


@dataclass(frozen=True, slots=True)
class BackoffTimes:
    """Pauses after failures, in seconds.

    Attributes:
        first, max: first pause, and the limit up to which it doubles after each failure.
        denied: pause after the role did not allow a request.
    """

    first: float = 1.0
    max: float = 300.0
    denied: float = 600.0


@dataclass(frozen=True, slots=True)
class ClusterReporterTimes:
    """Times of the reporter, in seconds.

    Attributes:
        deadline: limit of one request.
        first_snapshot: wait for the first snapshot of the service before it is reported as unavailable.
        shutdown: limit of the last write when the plugin stops.
        lock_poll: interval of checks whether another instance of the plugin has stopped.
        log_interval: time between two log lines about the same failure.
        restart: pause before the task is restarted after an unexpected error.
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
    """Backoff of one writer after consecutive failures, with jitter so that a fleet's nodes do not retry at once."""

    def __init__(self, times: BackoffTimes, jitter: Callable[[], float]) -> None:
        self._times = times
        self._jitter = jitter
        self._failures = 0
        self._until = 0.0

    def remaining(self, now: float) -> float:
        """Return the seconds until the next attempt; 0 or less: now."""
        return self._until - now

    def on_failure(self, error: ClusterError, now: float) -> None:
        wait = min(self._times.max, self._times.first * 2 ** min(self._failures, 20))
        requested = min(self._times.max, error.retry_after)
        self._failures += 1
        if isinstance(error, ApiForbidden):
            wait = requested = self._times.denied
        self._until = now + max(requested, wait * (0.5 + 0.5 * self._jitter()))

    def reset(self) -> None:
        self._failures, self._until = 0, 0.0


# See docs/decisions/0040-only-the-plugin-writes-to-the-cluster.md.
class ClusterReporter:
    """Reports one node to the cluster.

    Args:
        connect: creates the cluster's client; called in a thread, because that loads its library.
        lock: decides which instance of the plugin writes.
        taint: put on the node while none of its GPUs is in service; None: no taint is written or removed.
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch; ``jitter``: random, in [0, 1).

    Attributes:
        uses_envvar: as in :func:`plugin.service_client.advertised_devices`.
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
        taint: NodeTaint | None = None,
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
        self._taint = taint
        self.uses_envvar = uses_envvar
        self._snapshot: pb.Snapshot | None = None
        self._snapshot_arrived = asyncio.Event()
        self._view: ClusterView | None = None
        self._wakeups: set[asyncio.Event] = set()
        self._writers: tuple[ClusterWriter, ...] = ()
        self._condition: ConditionWriter | None = None
        self._cluster: ClosableClusterApi | None = None
        self._task: asyncio.Task[NoReturn] | None = None

    def on_snapshot(self, snapshot: pb.Snapshot | None) -> None:
        """Store a snapshot of the service; None: no service was ready during the whole grace period.

        This only replaces the previous snapshot, so that an error in its processing cannot affect the caller. A
        snapshot that is not ready contains no information, and must not replace the information that the service is
        away.
        """
        if snapshot is None or snapshot.ready:
            self._snapshot = snapshot
            self._snapshot_arrived.set()

    def start(self) -> None:
        """Start the background task."""
        self._lock.try_acquire()  # before all slow steps: an instance that stops checks for a successor
        self._task = asyncio.create_task(self._run_forever(), name="cluster reporter")

    async def stop(self) -> None:
        """Stop, and set the condition to "plugin stopped" if that succeeds within ``times.shutdown``.

        If there is a successor, the condition stays unchanged: the successor writes after the last write of this
        instance.
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
            self._log.info("cluster.shutdown-update-failed", message=str(error))
        finally:
            await cluster.close()

    async def _run_forever(self) -> NoReturn:
        while True:
            work = asyncio.create_task(self._run_writers(), name="cluster writers")
            try:
                # A task instead of a call, so that every exception, including one from a bug of ours, ends there.
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
        taints = [] if self._taint is None else [TaintWriter(cluster, self._taint, times=times.writers)]

        def node_seen(node: ClusterNode) -> None:
            labels.on_node(node)
            for each in taints:
                each.on_node(node)
            self._wake_writers()

        self._condition = ConditionWriter(
            cluster, times=times.writers, wall=wall, jitter=self._jitter, on_node=node_seen
        )
        events = EventsWriter(cluster, EventDiff(self._node, times.events), wall=wall, log=self._log)
        evictions = EvictionWriter(cluster, times=times.writers, log=self._log)
        self._writers = (self._condition, labels, *taints, events, evictions)
        for duty in self._writers:
            if self._view is not None:
                duty.update(self._view)
        async with asyncio.TaskGroup() as tasks:
            for duty in self._writers:
                tasks.create_task(self._run_writer(duty), name=duty.name)
            await self._follow_snapshots()

    async def _follow_snapshots(self) -> NoReturn:
        """Build a view from each new snapshot, and an empty one when the first snapshot is late."""
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
                else view_after(snapshot, before, uses_envvar=self.uses_envvar)
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
                    reminder.log_waiting("cluster.write-failed", kind=writer.name, message=str(error))
                else:
                    pause.reset()
                    reminder.log_ended("cluster.write-succeeded", kind=writer.name)
        finally:
            self._wakeups.discard(wakeup)

    async def _wait_for_lock(self) -> None:
        """Wait until no other instance of the plugin writes."""
        async with self._lock_wait:  # one writer polls on behalf of all
            logged = False
            while not self._lock.try_acquire():
                if not logged:
                    self._log.info("cluster.standby", node=self._node)
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
    """Return when ``wakeup`` is set, or after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await wakeup.wait()
    except TimeoutError:
        return
