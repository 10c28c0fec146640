"""Keeps the node's ResourceSlices at the API server as they should be.

One task writes, one request at a time, and another one follows the changes of others: the kubelet deletes the slices of
all drivers when it starts, and they are published again at once. Only the newest state counts, so nothing is queued
while the API server is away. While nothing changes there are no requests besides the watch.

Invariants: a response that lacks fields which were sent means that their feature gate is off; a device that should have
a taint is then not published at all. Of several instances on a node, one writes at a time. No failure here affects the
claims, because the service decides about them; taints only spare pods a wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from plugin.cluster.errors import (
    ApiConflict,
    ApiForbidden,
    ApiInvalidRequest,
    ApiNotFound,
    ApiUnavailable,
    ClusterError,
)
from plugin.cluster.reporter import BackoffTimes, WriterBackoff
from plugin.dra.claim_service import DeviceOutOfService
from plugin.dra.port import SliceApi, SliceWatchApi
from plugin.dra.slices import (
    DeviceTaint,
    Readiness,
    SliceDevice,
    SliceFeatures,
    SliceOwner,
    SlicePlan,
    dropped_features,
    plan_slices,
    slice_contents,
    taint_times,
)
from plugin.instance_lock import WriterLock
from plugin.logs import Logger, WaitLogger
from plugin.observers import ClusterObserver, NullObserver

__all__ = ["SliceController", "SliceTimes"]

_T = TypeVar("_T")

_MAX_ROUNDS = 4
"""Of writing the same state within one attempt: each feature gate that turns out to be off takes another one."""

PERMISSIONS = (
    "The driver's role must allow it to list, watch, create, update and delete resourceslices, and to get nodes."
)


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """Times of the slices, in seconds.

    Attributes:
        reorder: between two writes when only the order of the devices differs, which changes with every pod.
        withheld: how long a device that a release reported as out of service keeps its taint while the service's
            snapshots do not show it.
        contested_after: number of repairs within ``contested_window`` after which another client is suspected to undo
            them; from then on they are ``contested_pause`` apart.
        lock_poll: interval of checks whether another instance of the driver has stopped.
        log_interval: between two log lines about the same failure.
    """

    reorder: float = 10.0
    withheld: float = 10.0
    contested_after: int = 5
    contested_window: float = 60.0
    contested_pause: float = 30.0
    lock_poll: float = 0.5
    log_interval: float = 600.0
    backoff: BackoffTimes = field(default_factory=lambda: BackoffTimes(first=0.5, max=30.0, denied=60.0))


class SliceController:
    """Publishes the devices of one driver on one node.

    Args:
        watch: another connection, because a watch occupies one.
        lock: decides which instance of the driver writes; None: there is only this one.
        clock: monotonic seconds; ``jitter``: random, in [0, 1); ``token``: random letters and digits for names.
        binding_conditions: whether devices that are being cleaned have binding conditions.
    """

    def __init__(
        self,
        driver: str,
        node: str,
        *,
        api: SliceApi,
        watch: SliceWatchApi,
        times: SliceTimes,
        log: Logger,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        token: Callable[[], str],
        lock: WriterLock | None = None,
        observer: ClusterObserver | None = None,
        binding_conditions: bool = False,
    ) -> None:
        self._driver = driver
        self._node = node
        self._api = api
        self._watch = watch
        self._times = times
        self._log = log
        self._clock = clock
        self._token = token
        self._lock = lock
        self._observer = observer or NullObserver()
        self._backoff = WriterBackoff(times.backoff, jitter)
        self._watch_backoff = WriterBackoff(times.backoff, jitter)
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._features = SliceFeatures(binding_conditions=binding_conditions)
        self._devices: tuple[SliceDevice, ...] | None = None
        self._withheld: dict[str, tuple[DeviceTaint, float]] = {}
        self._slices: dict[str, Mapping[str, Any]] | None = None
        """The slices at the API server by their names; None: they must be listed."""
        self._list_version = ""
        self._node_uid = ""
        self._taint_times: dict[tuple[str, str, str], str] = {}
        self._generation = 0
        self._wanted = 0
        self._published = -1
        self._published_devices: frozenset[str] | None = None
        """What was published last, regardless of its order; None: another client has changed that."""
        self._missed_changes = False
        self._changed_by_others = False
        self._order: tuple[str, ...] = ()
        """The names of the devices as they were published last."""
        self._ordered_at: float | None = None
        self._reorder_pending = False
        self._repairs: deque[float] = deque(maxlen=times.contested_after)
        self._repair_not_before = 0.0
        self._changed = asyncio.Condition()

    async def update(self, devices: Sequence[SliceDevice]) -> None:
        """Store the devices as they should be published."""
        now = self._clock()
        reasons = {(device.id, taint.reason) for device in devices for taint in device.taints}
        withheld = {
            id_: (taint, until)
            for id_, (taint, until) in self._withheld.items()
            if (id_, taint.reason) not in reasons and until > now
        }
        changed = self._devices != tuple(devices) or self._withheld != withheld
        self._devices, self._withheld = tuple(devices), withheld
        if changed:
            await self._want()

    async def withdraw(self, devices: Sequence[DeviceOutOfService], timeout: float) -> bool:
        """Publish devices as out of service; return whether that is done after ``timeout`` seconds."""
        until = self._clock() + self._times.withheld
        self._withheld |= {each.device_id: (DeviceTaint(each.code), until) for each in devices}
        await self._want()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(self._is_published)
        return self._is_published()

    async def run(self) -> NoReturn:
        """Run until cancelled. The slices stay: the kubelet deletes those of a driver that does not come back."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="changes of slices")
            try:
                while True:
                    await self._write_when_due()
            finally:
                if self._lock is not None:
                    self._lock.release()

    async def _want(self) -> None:
        async with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    # -- writing

    async def _write_when_due(self) -> None:
        async with self._changed:
            await self._changed.wait_for(self._has_work)
        now = self._clock()
        wait = max(self._backoff.remaining(now), self._seconds_until_due(now))
        if wait > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait), self._changed:
                    before = self._wanted
                    # A device that is to be withdrawn must not wait behind a change of the order.
                    await self._changed.wait_for(lambda: self._wanted != before)
            return
        if self._lock is not None and not self._lock.try_acquire():
            await asyncio.sleep(self._times.lock_poll)
            return
        wanted = self._wanted
        try:
            await self._publish()
        except ApiConflict:
            self._slices = None
            self._backoff.on_failure(ApiUnavailable("conflict"), self._clock())
        except ApiNotFound as error:  # a slice was deleted meanwhile, or the cluster does not have this kind of object
            self._slices = None
            self._on_failure(error)
        except ClusterError as error:
            self._on_failure(error)
        else:
            self._backoff.reset()
            self._reminder.log_ended("slices.written-again")
            async with self._changed:
                self._published = max(self._published, wanted)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        stale = self._slices is None or self._published < self._wanted or self._reorder_pending
        return self._devices is not None and stale

    def _seconds_until_due(self, now: float) -> float:
        """Return the seconds until the next write; a pure change of the order waits, as does a contested repair."""
        due = self._repair_not_before
        if self._ordered_at is not None and self._is_published():
            due = max(due, self._ordered_at + self._times.reorder)
        return due - now

    def _is_published(self) -> bool:
        """Return whether the scheduler sees every device as it should be, in whatever order."""
        return self._slices is not None and self._names_and_contents() == self._published_devices

    def _names_and_contents(self) -> frozenset[str]:
        """Return what is to be published regardless of its order."""
        return frozenset(
            repr(sorted(each.items(), key=lambda item: item[0]))
            for content in self._contents()
            for each in (*content.get("devices", ()), *content.get("sharedCounters", ()))
        )

    def _contents(self, order: Sequence[str] = ()) -> tuple[dict[str, Any], ...]:
        now = self._clock()
        taints = {id_: taint for id_, (taint, until) in self._withheld.items() if until > now}
        return slice_contents(
            (
                replace(each, taints=(*each.taints, taints[each.id]), readiness=Readiness.WITHHELD)
                if each.id in taints
                else each
                for each in self._devices or ()
            ),
            self._driver,
            self._features,
            order=order,
        )

    async def _publish(self) -> None:
        """Make the published slices right; raises :class:`ClusterError` when a request fails."""
        if self._slices is None:
            await self._list()
        # In between, devices keep their places, so that a taint is a change of one slice.
        reorder = self._ordered_at is None or self._clock() >= self._ordered_at + self._times.reorder
        order = () if reorder else self._order
        rounds, wanted = 0, self._wanted
        while True:
            if wanted != self._wanted:
                rounds, wanted = 0, self._wanted
            rounds += 1
            if rounds > _MAX_ROUNDS:
                raise ApiUnavailable(
                    "The API server does not keep the ResourceSlices as they were sent. Another client or an admission "
                    "webhook may change them."
                )
            known, features = self._slices, self._features
            if known is None:
                raise ApiConflict("The slices changed.")
            contents = self._contents(order)
            order = _names(contents)
            plan = plan_slices(
                contents,
                known.values(),
                SliceOwner(self._driver, self._node, self._node_uid),
                times=self._taint_times,
                last_generation=self._generation,
                token=self._token,
            )
            repairs, self._changed_by_others = self._changed_by_others, False
            if not plan:
                self._published_devices = self._names_and_contents()
                self._order = _names(contents)
                self._reorder_pending = self._order != _names(self._contents())
                if reorder:
                    self._ordered_at = self._clock()
                self._forget_ended_taints(contents)
                return
            if repairs:
                self._count_repair()
            await self._apply(plan)
            self._forget_ended_taints(contents)
            if features == self._features:
                self._log.info(
                    "slices.published",
                    devices=sum(len(each.get("devices", ())) for each in contents),
                    slices=len(contents),
                    generation=plan.generation,
                )

    async def _list(self) -> None:
        try:
            self._node_uid = await self._api.get_node_uid()
        except (ApiForbidden, ApiNotFound) as error:
            self._log.warning(
                "slices.without-owner",
                message=f"{error} The slices of this node have no owner, and remain when the node is removed.",
            )
            self._node_uid = ""
        while True:
            self._missed_changes = False
            self._list_version, found = await self._api.list_slices(self._driver)
            if not self._missed_changes:
                break
        self._slices = {each["metadata"]["name"]: each for each in found}
        self._remember(found)
        async with self._changed:
            self._changed.notify_all()

    async def _apply(self, plan: SlicePlan) -> None:
        self._generation = max(self._generation, plan.generation)
        for each in plan.create:
            self._on_written(each, await self._counted(self._api.create_slice(each)))
        for each in plan.replace:
            self._on_written(each, await self._counted(self._api.replace_slice(each)))
        for obsolete in plan.delete:
            with suppress(ApiNotFound):
                await self._counted(self._api.delete_slice(obsolete))
            if self._slices is not None:
                self._slices.pop(obsolete["metadata"]["name"], None)

    async def _counted(self, request: Awaitable[_T]) -> _T:
        ok = False
        try:
            answer = await request
            ok = True
        finally:
            self._observer.on_cluster_write("resource-slice", ok)
        return answer

    def _on_written(self, sent: Mapping[str, Any], received: Mapping[str, Any]) -> None:
        if self._slices is None:
            raise ApiConflict("The slices changed.")
        self._slices[received["metadata"]["name"]] = received
        self._remember([received])
        kept = dropped_features(sent, received)
        for name, message in _FEATURE_OFF.items():
            if getattr(self._features, name) and not getattr(kept, name):
                self._features = replace(self._features, **{name: False})
                self._log.warning("slices.feature-off", feature=name, message=message)

    def _forget_ended_taints(self, published: Sequence[Mapping[str, Any]]) -> None:
        """Forget the times of taints that are not published any more: tolerations of one that returns count from then on."""
        present = {
            (device["name"], taint["key"], taint["effect"])
            for each in published
            for device in each.get("devices", ())
            for taint in device.get("taints", ())
        }
        self._taint_times = {key: at for key, at in self._taint_times.items() if key in present}

    def _remember(self, slices: Sequence[Mapping[str, Any]]) -> None:
        self._taint_times |= taint_times(slices)
        for each in slices:
            self._generation = max(self._generation, int(each["spec"].get("pool", {}).get("generation") or 0))

    def _on_failure(self, error: ClusterError) -> None:
        # A part of the plan may have been written; what is known of it is right, since every response is stored.
        message = str(error)
        if isinstance(error, ApiForbidden | ApiInvalidRequest) or " 401" in message:
            message = f"{message} {PERMISSIONS}"
        self._reminder.log_waiting("slices.write-failed", message=message)
        denied = isinstance(error, ApiInvalidRequest)
        self._backoff.on_failure(ApiForbidden(message) if denied else error, self._clock())

    # -- following the changes of others

    async def _follow(self) -> NoReturn:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._slices is not None)
            try:
                async with aclosing(self._watch.watch_slices(self._driver, self._list_version)) as changes:
                    async for kind, slice_ in changes:
                        self._watch_backoff.reset()
                        await self._on_change(kind, slice_)
                continue
            except ApiNotFound:
                self._slices = None  # changes were missed: list them
                await self._want()
            except ClusterError as error:
                self._watch_backoff.on_failure(error, self._clock())
                self._log.info("slices.watch-interrupted", message=str(error))
            await asyncio.sleep(max(0.0, self._watch_backoff.remaining(self._clock())))

    async def _on_change(self, kind: str, slice_: Mapping[str, Any]) -> None:
        """Store a change; publish again if another client made it."""
        metadata = slice_["metadata"]
        name, version = metadata["name"], metadata.get("resourceVersion", "")
        self._list_version = version or self._list_version
        known = self._slices
        if known is None:
            self._missed_changes = True  # the list that is being read may be older
            return
        if kind == "DELETED":
            if known.pop(name, None) is None:
                return  # deleted by this instance
        else:
            before = known.get(name)
            if before is not None and _version(before) >= _version(slice_):
                return  # written by this instance
            known[name] = slice_
            self._remember([slice_])
        self._changed_by_others = True
        self._published_devices = None
        await self._want()

    def _count_repair(self) -> None:
        now = self._clock()
        full = len(self._repairs) == self._repairs.maxlen
        if full and now - self._repairs[0] < self._times.contested_window and now >= self._repair_not_before:
            self._repair_not_before = now + self._times.contested_pause
            self._log.error(
                "slices.contested",
                message=f"Another client changes or deletes the ResourceSlices of {self._driver} on this node again and "
                "again. Make sure that only one driver has this name.",
            )
        self._repairs.append(now)


_FEATURE_OFF = {
    "taints": "The API server does not keep taints of devices (feature gate DRADeviceTaints). A device that is out of "
    "service is not published instead, and pods that use it are not evicted.",
    "counters": "The API server does not keep shared counters (feature gate DRAPartitionableDevices). Instances are "
    "published without them.",
    "binding_conditions": "The API server does not keep binding conditions (feature gate DRADeviceBindingConditions). Pods "
    "are bound to devices that are not clean yet, and wait on the node; --binding-conditions has no effect.",
}


def _names(contents: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(device["name"] for each in contents for device in each.get("devices", ()))


def _version(slice_: Mapping[str, Any]) -> int:
    text = str(slice_["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
