"""Pauses agents that have GPUs open permanently, by labels of this node, as the scrub service requests for a reset.

Where NVSentinel can, it has NVSentinel reset the GPUs instead, if the service requests that.

Invariants: the service has recorded each change before it is made. Everything here can be repeated: an instance that
starts after a crash of any party gets the pause with its changes by the next snapshot, and goes on. No other part of the
plugin waits for this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from plugin.cluster.errors import ApiConflict, ApiForbidden, ApiInvalidRequest, ApiNotFound, ClusterError
from plugin.cluster.gpu_reset import GPU_RESET_WAY, ResetResult, remove_reset, request_reset
from plugin.cluster.metrics import MeteredPauseApi
from plugin.cluster.pause_labels import (
    DEPLOY_PREFIX,
    PAUSE_LABEL,
    LeaseName,
    PauseLabel,
    PlannedChange,
    labels_left,
    next_pausing_patch,
    next_restoring_patch,
    plan_changes,
    refusal_to_plan,
)
from plugin.cluster.pause_lease import PauseLease
from plugin.cluster.port import ClusterNode, PauseApi
from plugin.cluster.text import one_line
from plugin.instance_lock import InstanceLock
from plugin.logs import Logger, WaitLogger
from plugin.observers import AgentPauseObserver, NullObserver
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import ScrubberError, Unavailable

__all__ = ["LABELS_WAY", "AgentPauseTimes", "AgentPauser", "PauseService"]

LABELS_WAY = "labels"


class PauseService(Protocol):
    async def report_agent_pause(self, report: pb.AgentPauseReport, timeout: float) -> None:
        """See :meth:`scrubber.api.client.PluginClient.report_agent_pause`."""
        ...


@dataclass(frozen=True, slots=True)
class AgentPauseTimes:
    """Times in seconds.

    Attributes:
        call: limit of one call of the service.
        lease: after which a holder of the Lease that does not renew it has lost it.
        renew: between renewals of the Lease, and between attempts to acquire it.
        reset_poll: between looks at a reset by NVSentinel.
        reset_discovery: between checks whether NVSentinel can reset GPUs.
        abandon: after which a pause ends without its service: the reset cannot be in progress any more.
        first_retry, max_retry: first pause after a failure, and the limit up to which it doubles.
        lock_poll: between checks whether another instance of the plugin has stopped.
        log_interval: between two log lines about the same wait.
        restart: pause before the task is restarted after an unexpected error.
    """

    call: float = 5.0
    lease: int = 60
    renew: float = 15.0
    reset_poll: float = 2.0
    reset_discovery: float = 60.0
    abandon: float = 900.0
    first_retry: float = 1.0
    max_retry: float = 15.0
    lock_poll: float = 0.2
    log_interval: float = 60.0
    restart: float = 30.0


@dataclass(frozen=True, slots=True)
class _Goal:
    """What the service wants; a new one replaces the work on the earlier one. ``pause``: empty: no pause.

    Attributes:
        driver_closed: the service has closed the driver, for a reset by NVSentinel.
    """

    epoch: str
    pause: str = ""
    way: str = ""
    ending: bool = False
    driver_closed: bool = False


class _LostLock(Exception):
    """Another instance of the plugin acts now."""


class AgentPauser:
    """Carries out the pauses of one node.

    Args:
        connect: creates the client of the API server; called in a thread, because that loads its library. Raises
            :class:`ClusterError` where there are no credentials.
        labels: what pauses the agents, in order; empty: nothing is offered, and only what an earlier instance changed
            is restored.
        gpu_reset: whether resets by NVSentinel are offered, where it has them.
        lease: allows one node at a time; None: nothing limits that.
        lock: decides which instance of the plugin on this node acts.
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch; ``jitter``: random, in [0, 1).
    """

    def __init__(
        self,
        service: PauseService,
        connect: Callable[[], PauseApi],
        node: str,
        *,
        labels: Sequence[PauseLabel],
        lease: LeaseName | None,
        times: AgentPauseTimes,
        lock: InstanceLock,
        log: Logger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float],
        gpu_reset: bool = False,
        observer: AgentPauseObserver | None = None,
    ) -> None:
        self._service = service
        self._connect = connect
        self._node = node
        self._labels = tuple(labels)
        self._gpu_reset = gpu_reset
        self._nvsentinel_resets = False
        """Whether the cluster has the objects by which NVSentinel resets GPUs, when that was last checked."""
        self._requested = ""
        """The pause for which this instance knows that its request for a reset existed."""
        self._times = times
        self._lock = lock
        self._log = log
        self._jitter = jitter
        self._observer = observer or NullObserver()
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._lease = (
            None if lease is None else PauseLease(lease, node, seconds=times.lease, clock=clock, wall_clock=wall_clock)
        )
        self._api: PauseApi | None = None
        self._goal: _Goal | None = None
        self._recorded: pb.AgentPause = pb.AgentPause()
        self._plan: tuple[str, tuple[PlannedChange, ...]] = ("", ())
        """The pause that this instance carries out, and its changes, which the service has recorded."""
        self._made: set[str] = set()
        """Keys of the labels that this instance has changed for that pause."""
        self._counted = ("", "")
        """The pause and its outcome that were counted last."""
        self._may_hold_lease = bool(self._labels)
        """Whether this node may hold the Lease; at the start because of an earlier instance."""
        self._looked_for_leftovers = False
        self._changed = asyncio.Event()
        self._abandonment: asyncio.TimerHandle | None = None

    def on_snapshot(self, snapshot: pb.Snapshot | None) -> None:
        """Store what the service wants; None: it is away, which ends a pause only if it stays away."""
        if self._abandonment is not None:
            self._abandonment.cancel()
            self._abandonment = None
        if snapshot is None:
            self._abandonment = asyncio.get_running_loop().call_later(self._times.abandon, self._abandon)
            return
        pause = snapshot.agent_pause
        self._recorded = pause
        closed = pause.way == GPU_RESET_WAY and pause.driver_closed
        goal = _Goal(snapshot.epoch, pause.id, pause.way, pause.ending, closed)
        if goal != self._goal:
            self._goal = goal
            self._changed.set()

    def _abandon(self) -> None:
        if self._goal is not None and self._goal.pause and not self._goal.ending:
            self._log.warning("agents.pause-abandoned", pause=self._goal.pause)
            self._goal = replace(self._goal, ending=True)
            self._changed.set()

    async def run(self) -> NoReturn:
        """Follow the service until cancelled. What is paused then stays paused: the service decides when it ends."""
        try:
            while True:
                work = asyncio.create_task(self._follow(), name="agent pauses")
                try:
                    # A task instead of a call, so that every exception, including one from a bug of ours, ends there.
                    await asyncio.wait({work})
                finally:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                self._log.error("agents.failed", exc_info=work.exception())
                await asyncio.sleep(self._times.restart)
                self._changed.set()
        finally:
            if self._abandonment is not None:
                self._abandonment.cancel()
            if self._api is not None:
                await self._api.close()
            self._lock.release()

    async def _follow(self) -> NoReturn:
        """Work on the newest goal; a new one cancels the work on the one before."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            goal = self._goal
            assert goal is not None
            work = asyncio.create_task(self._pursue(goal), name="agent pause")
            changed = asyncio.create_task(self._changed.wait(), name="new goal")
            try:
                await asyncio.wait({work, changed}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for each in (work, changed):
                    each.cancel()
                await asyncio.gather(work, changed, return_exceptions=True)

    async def _pursue(self, goal: _Goal) -> None:
        """Repeat the work on ``goal`` until it succeeds; each attempt begins with what is true then."""
        failures = 0
        while True:
            try:
                await self._wait_for_lock()
                await self._work_on(goal)
            except _LostLock:
                continue
            except (ClusterError, ScrubberError) as error:
                if not (goal.pause or self._labels or self._gpu_reset):
                    return  # a service without this call
                pause = min(self._times.max_retry, self._times.first_retry * 2 ** min(failures, 20))
                failures += 1
                if isinstance(error, ClusterError):
                    pause = max(pause, min(error.retry_after, self._times.max_retry))
                self._reminder.log_waiting("agents.pause-waiting", pause=goal.pause or None, message=str(error))
                if goal.pause and isinstance(error, ClusterError):
                    await self._report_progress(goal, str(error))
                self._let_others_act()
                await asyncio.sleep(pause * (0.5 + 0.5 * self._jitter()))
            else:
                self._reminder.log_ended("agents.pause-proceeds", pause=goal.pause or None)
                self._let_others_act()
                return

    def _let_others_act(self) -> None:
        """Release the lock, where another plugin of the node, for another resource, may have labels or better rights."""
        if not self._labels:
            self._lock.release()

    async def _wait_for_lock(self) -> None:
        logged = False
        while not self._lock.try_acquire():
            if not logged:
                self._log.info("agents.standby")
            logged = True
            await asyncio.sleep(self._times.lock_poll)

    async def _work_on(self, goal: _Goal) -> None:
        if not goal.pause:
            await self._restore_forgotten_pause()
            await self._report(goal, "")
            await self._look_for_leftovers()
            if self._may_hold_lease:
                await self._release_lease()
            await self._follow_nvsentinel(goal)
        elif goal.ending and goal.way == GPU_RESET_WAY:
            await self._end_gpu_reset(goal)
        elif goal.ending:
            await self._end(goal)
        elif goal.way == GPU_RESET_WAY and self._gpu_reset:
            try:
                await self._reset_gpus(goal)
            except (ApiForbidden, ApiInvalidRequest, ApiNotFound) as error:
                await self._fail(goal, f"NVSentinel cannot reset the GPU, or no longer does. {error}")
        elif goal.way == LABELS_WAY:
            try:
                await self._pause(goal)
            except (ApiForbidden, ApiInvalidRequest) as error:
                await self._fail(goal, str(error))
        else:
            await self._fail(goal, f"The plugin does not offer the way {goal.way!r} (any more).")

    # -- a pause
    # -----------------------------------------------------------------------------------------------------------

    async def _pause(self, goal: _Goal) -> None:
        """Pause the agents, then renew the Lease for as long as the pause lasts."""
        api = await self._connected()
        await self._take_lease(goal, api)
        changes = self._changes_of(goal)
        if not changes:
            node = await api.get_node()
            changes = plan_changes(node.labels, self._labels)
            if refusal := refusal_to_plan(changes, self._labels):
                await self._fail(goal, refusal)
                return
            await self._report(goal, "planned", changes=changes)
            self._plan, self._made = (goal.pause, changes), set()
            self._log.info("agents.pause-planned", pause=goal.pause, labels=_described(changes))
            await self._take_lease(goal, api)  # the report may have taken longer than the Lease lasts
        if self._plan != (goal.pause, changes):
            self._plan, self._made = (goal.pause, changes), set()
        node = await self._change_labels(api, goal, changes)
        left = labels_left(node.labels, changes, during=True)
        for key in left:
            self._log.warning("agents.label-left", pause=goal.pause, label=key, value=node.labels.get(key))
        if self._count(goal, "paused"):
            self._log.info("agents.paused", pause=goal.pause, labels=_described(changes))
        await self._report(goal, "paused", _left_message(left))
        self._reminder.log_ended("agents.pause-proceeds", pause=goal.pause)
        await self._keep_lease(api)

    async def _change_labels(self, api: PauseApi, goal: _Goal, changes: Sequence[PlannedChange]) -> ClusterNode:
        node = await api.get_node()
        while patch := next_pausing_patch(node.labels, goal.pause, changes, self._made):
            node = await self._patched(api, patch, node)
            self._made |= {key for key, value in patch.items() if node.labels.get(key) == value}
        return node

    async def _take_lease(self, goal: _Goal, api: PauseApi) -> None:
        """Wait for the Lease; acquire it again or renew it if this node has it already."""
        if self._lease is None:
            return
        self._may_hold_lease = True
        while holder := await self._lease.acquire(api):
            message = f"Waiting for the Lease {self._lease}: {one_line(holder)} has it, and pauses its own agents."
            self._reminder.log_waiting("agents.pause-waiting", pause=goal.pause, message=message)
            await self._report_progress(goal, message)
            await asyncio.sleep(self._times.renew * (0.5 + 0.5 * self._jitter()))

    async def _keep_lease(self, api: PauseApi) -> None:
        lost = False
        while self._lease is not None:
            await asyncio.sleep(self._times.renew)
            try:
                holder = await self._lease.acquire(api)
            except ClusterError as error:
                self._log.info("agents.lease-not-renewed", message=str(error))
                continue
            if holder and not lost:
                # The reset is under way, and ends sooner than it could begin again.
                self._log.warning("agents.lease-lost", holder=one_line(holder))
            lost = bool(holder)

    async def _fail(self, goal: _Goal, message: str) -> None:
        self._log.warning("agents.pause-failed", pause=goal.pause, message=message)
        self._count(goal, "failed")
        await self._report(goal, "failed", message)

    # -- a reset by NVSentinel
    # -----------------------------------------------------------------------------------------------------------

    async def _follow_nvsentinel(self, goal: _Goal) -> None:
        """Offer resets by NVSentinel for as long as it has them; remove requests that no pause exists for."""
        while self._gpu_reset:
            api = await self._connected()
            try:
                found, known = True, await api.list_gpu_resets()
            except (ApiNotFound, ApiForbidden) as error:
                found, known = False, ()
                if isinstance(error, ApiForbidden):
                    self._reminder.log_waiting("agents.pause-waiting", pause=None, message=str(error))
            for each in known:
                if each.node == self._node:
                    self._require_lock()
                    await remove_reset(api, each.name)
                    self._log.warning("gpu-reset.left-over", name=each.name)
            if found != self._nvsentinel_resets:
                self._nvsentinel_resets = found
                self._log.info("gpu-reset.offered" if found else "gpu-reset.withdrawn")
                await self._report(goal, "")
            await asyncio.sleep(self._times.reset_discovery)

    async def _reset_gpus(self, goal: _Goal) -> None:
        """Have NVSentinel reset the GPUs of the pause, once the service has closed the driver."""
        if not goal.driver_closed:
            return  # the next goal
        api = await self._connected()
        self._require_lock()
        uuids = tuple(self._recorded.device_ids)
        if self._requested == goal.pause:  # one that has vanished since is not requested again
            reset = await api.get_gpu_reset(goal.pause)
        else:
            reset = await request_reset(api, goal.pause, uuids)
            self._requested = goal.pause
            self._log.info("gpu-reset.requested", pause=goal.pause, gpus=list(uuids))
        status = ""
        while reset.result is ResetResult.PENDING:
            if reset.status_text != status:
                status = reset.status_text
                await self._report_progress(goal, f"NVSentinel resets the GPU ({status}).")
            await asyncio.sleep(self._times.reset_poll)
            reset = await api.get_gpu_reset(goal.pause)
        if reset.result is ResetResult.FAILED:
            await self._fail(goal, f"NVSentinel did not reset the GPU: {reset.status_text}")
            return
        self._log.info("gpu-reset.succeeded", pause=goal.pause, message=reset.status_text)
        self._count(goal, "reset")
        await self._report(goal, "reset", f"NVSentinel: {reset.status_text}")

    async def _end_gpu_reset(self, goal: _Goal) -> None:
        """Remove the request; only when it is gone, NVSentinel does nothing more for it."""
        message = ""
        try:
            api = await self._connected()
            self._require_lock()
            while not await remove_reset(api, goal.pause):
                waits = f"NVSentinel has not released the object GPUReset {goal.pause} yet."
                self._reminder.log_waiting("agents.pause-waiting", pause=goal.pause, message=waits)
                await self._report_progress(goal, waits)
                await asyncio.sleep(self._times.reset_poll)
        except ApiForbidden as error:  # repeating it changes nothing, and the node must not wait for it
            message = f"The object GPUReset {goal.pause} could not be deleted; delete it if it exists. {error}"
            self._log.warning("gpu-reset.not-removed", pause=goal.pause, message=message)
        self._count(goal, "restored")
        await self._report(goal, "restored", message)

    def _count(self, goal: _Goal, outcome: str) -> bool:
        """Count an outcome before its report, which the service's reaction may cancel; False if it was counted."""
        if self._counted == (goal.pause, outcome):
            return False
        self._counted = (goal.pause, outcome)
        self._observer.on_agent_pause(outcome)
        return True

    def _require_lock(self) -> None:
        if not self._lock.try_acquire():
            raise _LostLock

    # -- its end
    # -----------------------------------------------------------------------------------------------------------

    async def _end(self, goal: _Goal) -> None:
        changes = self._changes_of(goal)
        left = await self._restore(goal.pause, changes) if changes else []
        if changes or self._may_hold_lease:
            await self._release_lease()
        self._plan, self._made = ("", ()), set()  # before the report, which the service's reaction may cancel
        self._count(goal, "restored")
        await self._report(goal, "restored", _left_message(left))

    async def _restore(self, pause: str, changes: Sequence[PlannedChange]) -> list[str]:
        """Restore the labels; return the keys of those that another client has changed."""
        api = await self._connected()
        node, done = await api.get_node(), set[str]()
        while patch := next_restoring_patch(node.labels, changes, done):
            node = await self._patched(api, patch, node)
            done |= {key for key, value in patch.items() if node.labels.get(key) == value}
        left = labels_left(node.labels, changes, during=False)
        for key in left:
            self._log.warning("agents.label-left", pause=pause, label=key, value=node.labels.get(key))
        self._log.info("agents.restored", pause=pause, labels=_restored(changes, left))
        return left

    async def _release_lease(self) -> None:
        if self._lease is None:
            return
        try:
            await self._lease.release(await self._connected())
            self._may_hold_lease = False
        except ClusterError as error:  # it expires
            self._log.info("agents.lease-not-renewed", message=str(error))

    async def _restore_forgotten_pause(self) -> None:
        """Restore what the service no longer knows of, because its ledger was lost."""
        pause, changes = self._plan
        if not changes:
            return
        await self._restore(pause, changes)
        self._plan, self._made = ("", ()), set()
        self._may_hold_lease = True

    async def _look_for_leftovers(self) -> None:
        """Look, once, for a pause that neither the service nor this instance knows of."""
        if self._looked_for_leftovers or not self._labels:
            return
        api = await self._connected()
        node = await api.get_node()
        self._looked_for_leftovers = True
        if PAUSE_LABEL not in node.labels:
            return
        suspects = [each.key for each in self._labels if node.labels.get(each.key) == each.during]
        if any(key.startswith(DEPLOY_PREFIX) for key in suspects):
            # What they were before is not known.
            self._log.error("agents.pause-orphaned", pause=node.labels[PAUSE_LABEL], labels=suspects)
            return
        await self._patched(api, {PAUSE_LABEL: None}, node)

    # -- requests and calls
    # -----------------------------------------------------------------------------------------------------------

    async def _connected(self) -> PauseApi:
        if self._api is None:
            self._api = MeteredPauseApi(await asyncio.to_thread(self._connect), self._observer)
        return self._api

    async def _patched(self, api: PauseApi, patch: dict[str, str | None], node: ClusterNode) -> ClusterNode:
        """Change labels of exactly this version of the node; return the node as it is then, changed or not."""
        self._require_lock()
        try:
            return await api.change_labels(patch, node.resource_version)
        except ApiConflict:
            return await api.get_node()

    def _changes_of(self, goal: _Goal) -> tuple[PlannedChange, ...]:
        pause, changes = self._plan
        if pause == goal.pause and changes:
            return changes
        if self._recorded.id != goal.pause:
            return ()
        return tuple(
            PlannedChange(each.key, each.before if each.HasField("before") else None, each.during)
            for each in self._recorded.changes
        )

    async def _report(
        self, goal: _Goal, state: str, message: str = "", *, changes: Sequence[PlannedChange] = ()
    ) -> None:
        """Report until the service has it.

        Raises:
            ScrubberError: the service refuses the report.
        """
        report = self._message(goal, state, message, changes)
        while True:
            try:
                return await self._service.report_agent_pause(report, self._times.call)
            except Unavailable as error:
                if goal.pause:
                    self._reminder.log_waiting("agents.pause-waiting", pause=goal.pause, message=str(error))
                await asyncio.sleep(self._times.first_retry * (0.5 + 0.5 * self._jitter()))

    async def _report_progress(self, goal: _Goal, message: str) -> None:
        """Report why the pause is not further; what the service does not receive is not repeated."""
        with suppress(ScrubberError):
            await self._service.report_agent_pause(self._message(goal, "", message), self._times.call)

    def _message(
        self, goal: _Goal, state: str, message: str, changes: Sequence[PlannedChange] = ()
    ) -> pb.AgentPauseReport:
        return pb.AgentPauseReport(
            offers=self._offers(),
            pause_id=goal.pause,
            changes=[pb.LabelChange(key=each.key, before=each.before, during=each.during) for each in changes],
            state=state,
            message=message,
        )

    def _offers(self) -> list[pb.PauseOffer]:
        offers = self._label_offers()
        if self._gpu_reset and self._nvsentinel_resets:
            actions = [
                "have the scrub service yield the node: it closes the driver, and withholds every device",
                "create a GPUReset object: NVSentinel ends the operator's agents, resets the GPU, and starts them again",
                "delete the object, and resume the node",
            ]
            offers.append(pb.PauseOffer(way=GPU_RESET_WAY, actions=actions))
        return offers

    def _label_offers(self) -> list[pb.PauseOffer]:
        if not self._labels:
            return []
        actions = [] if self._lease is None else [f"take the Lease {self._lease}, so that one node at a time does this"]
        for each in self._labels:
            only = ', if it is "true"' if each.key.startswith(DEPLOY_PREFIX) else ""
            actions.append(f'set the node label {each.key} to "{each.during}"{only}')
        return [pb.PauseOffer(way=LABELS_WAY, actions=actions)]


def _described(changes: Sequence[PlannedChange]) -> list[str]:
    return [str(each) for each in changes]


def _restored(changes: Sequence[PlannedChange], left: Sequence[str]) -> list[str]:
    return [f"{each.key}: {each.before_text}" for each in reversed(changes) if each.key not in left]


def _left_message(left: Sequence[str]) -> str:
    return f"Another client has changed the node label {', '.join(left)} meanwhile; it was left." if left else ""
