"""Computes which Kubernetes events are due: the difference between what was reported and the current state.

Invariants: only the present is reported. A device that disappeared and came back while no event could be written
produces none. Each fact has one event object, also across restarts of the plugin; it is repeated instead of created
again. An object is written at most once a minute, and the number of writes a minute is limited in total. Memory is
bounded by the newest view and by a fixed number of removed devices.

Everything here is pure. ``now`` is in seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from plugin.cluster.port import EventContent, EventTarget
from plugin.cluster.view import ClusterDevice, ClusterView, DeviceServiceStatus, OwnerNotice

__all__ = ["GONE_REASON", "MAX_MESSAGE_BYTES", "REASONS", "EventDiff", "EventDiffTimes", "PendingEvent"]

MAX_MESSAGE_BYTES = 1024
"""Limit of an event's message, in bytes."""


@dataclass(frozen=True, slots=True)
class EventDiffTimes:
    """Limits of the events; seconds, except for ``max_events`` and ``max_gone_devices``.

    Attributes:
        spacing: minimum time between two writes of one object.
        window, max_events: at most ``max_events`` events are written within ``window``.
        repeat_after: time after which the same event is repeated for a pod's owner; the API server keeps events for an
            hour.
        refused_retry: pause for an event that the API server refused permanently.
        max_gone_devices: number of devices reported as removed that are remembered, so that their return is reported
            too.
    """

    spacing: float = 60.0
    window: float = 60.0
    max_events: int = 30
    repeat_after: float = 1800.0
    refused_retry: float = 600.0
    max_gone_devices: int = 64


@dataclass(slots=True)
class _Object:
    """One event object: when it may be written again, and its count (0 while it is not known to exist)."""

    free_at: float = -1.0
    count: int = 0


@dataclass(slots=True)
class _Subject:
    """What was reported about one device, or about one pod for one reason.

    Attributes:
        reported: last reported reason (device) or message (pod); empty: nothing was reported.
        reported_at: when that was; None: not since the plugin started.
    """

    reported: str = ""
    reported_at: float | None = None
    objects: dict[str, _Object] = field(default_factory=dict)


_Key = tuple[str, ...]
"""``(device,)``, or ``(namespace, pod, uid, reason, *devices)``."""


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event to write.

    Attributes:
        count: current count of the object; 0: not known to exist, so it must be created.
    """

    event: EventContent
    count: int
    key: _Key


REASONS: Mapping[DeviceServiceStatus, str] = {
    DeviceServiceStatus.IN_SERVICE: "GpuBackInService",
    DeviceServiceStatus.OUT_OF_SERVICE: "GpuOutOfService",
    DeviceServiceStatus.CONDEMNED: "GpuCondemned",
    DeviceServiceStatus.UNVERIFIED: "GpuAdvertisedUnverified",
}
GONE_REASON = "GpuRemoved"
_IN_SERVICE_REASON = REASONS[DeviceServiceStatus.IN_SERVICE]


class EventDiff:
    """The due events of one node."""

    def __init__(self, node: str, times: EventDiffTimes) -> None:
        self._node = EventTarget("Node", node, uid=node)  # the kubelet's own node events have no other UID either
        self._times = times
        self._view = ClusterView()
        self._subjects: dict[_Key, _Subject] = {}
        self._written: deque[float] = deque(maxlen=times.max_events)

    def update(self, view: ClusterView) -> None:
        """Store the newest view. Without a ready service nothing is reported here: the node condition covers that."""
        self._view = view
        if not view.service_ready:
            return
        for device in view.devices:
            subject = self._subjects.setdefault((device.id,), _Subject())
            if not subject.reported and device.status is DeviceServiceStatus.IN_SERVICE:
                subject.reported = _IN_SERVICE_REASON  # a device in service needs no event
        devices, pods = {(each.id,) for each in view.devices}, {_pod(each) for each in view.notices}
        for key, subject in list(self._subjects.items()):
            vanished_unreported = len(key) == 1 and key not in devices and not subject.reported
            if vanished_unreported or (len(key) > 1 and key not in pods):
                del self._subjects[key]
        for key in pods:
            self._subjects.setdefault(key, _Subject())
        gone = [
            key
            for key, each in self._subjects.items()
            if len(key) == 1 and key not in devices and each.reported == GONE_REASON
        ]
        gone.sort(key=lambda key: self._subjects[key].reported_at or 0.0)
        for key in gone[: -self._times.max_gone_devices]:
            del self._subjects[key]

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until an event may be written (0 or less: now); None when there is none to write."""
        waits = [each.free_at - now for each, _ in self._candidates(now)]
        reminders = [
            subject.reported_at + self._times.repeat_after - now
            for key, subject in self._subjects.items()
            if len(key) > 1 and subject.reported_at is not None and now < subject.reported_at + self._times.repeat_after
        ]
        if not self._view.service_ready or not (waits or reminders):
            return None
        return max(min([*waits, *reminders]), self._rate_limit_wait(now))

    def next_event(self, now: float) -> PendingEvent | None:
        """Return the event to write now: of those allowed, the one whose object may be written for the longest time."""
        if self._rate_limit_wait(now) > 0:
            return None
        free = [(each.free_at, due) for each, due in self._candidates(now) if each.free_at <= now]
        return min(free, key=lambda each: each[0])[1] if free else None

    def on_written(self, due: PendingEvent, now: float, count: int) -> None:
        """Record that ``due`` was written and that its object now has ``count``."""
        self._written.append(now)
        subject = self._subjects.get(due.key)
        if subject is None:
            return  # the pod was deleted during the write
        subject.objects[due.event.name] = _Object(now + self._times.spacing, count)
        subject.reported, subject.reported_at = due.event.reason if len(due.key) == 1 else due.event.message, now

    def on_refused(self, due: PendingEvent, now: float) -> None:
        """Postpone ``due``, which the API server refuses permanently; the other events continue."""
        self._written.append(now)
        self._object(due).free_at = now + self._times.refused_retry

    def on_missing(self, due: PendingEvent) -> None:
        """Record that the object no longer exists (events are kept for an hour), so that it is created again."""
        self._object(due).count = 0

    # -- differences that are not reported yet -------------------------------------------------------------------------

    def _candidates(self, now: float) -> Iterator[tuple[_Object, PendingEvent]]:
        if not self._view.service_ready:
            return
        devices = {each.id: each for each in self._view.devices}
        notices = {_pod(each): each for each in self._view.notices}
        for key, subject in self._subjects.items():
            if key in notices:
                due = self._pod_event(key, subject, notices[key], now)
            else:
                due = self._device_event(key, subject, devices.get(key[0]))
            if due is not None:
                yield subject.objects.get(due.event.name, _Object()), due

    def _device_event(self, key: _Key, subject: _Subject, device: ClusterDevice | None) -> PendingEvent | None:
        reason = GONE_REASON if device is None else REASONS[device.status]
        if reason == subject.reported or (device is not None and device.yielded):
            return None
        if device is None:
            message = f"Device {key[0]} is no longer on this node."
        else:
            message = device.message or f"Device {device.id} is back in service."
        return self._pending(self._text(self._node, reason, message, reason != _IN_SERVICE_REASON, key), key, subject)

    def _pod_event(self, key: _Key, subject: _Subject, notice: OwnerNotice, now: float) -> PendingEvent | None:
        regarding = EventTarget("Pod", notice.pod, notice.uid, notice.namespace)
        text = self._text(regarding, notice.reason, notice.message, True, key)
        stale = (
            subject.reported_at is None
            or subject.reported != text.message
            or now >= subject.reported_at + self._times.repeat_after
        )
        return self._pending(text, key, subject) if stale else None

    def _pending(self, text: EventContent, key: _Key, subject: _Subject) -> PendingEvent:
        known = subject.objects.get(text.name)
        return PendingEvent(text, 0 if known is None else known.count, key)

    def _text(self, regarding: EventTarget, reason: str, message: str, warning: bool, key: _Key) -> EventContent:
        digest = hashlib.sha256("\0".join((self._node.name, *key, reason)).encode()).hexdigest()[:16]
        name = f"{regarding.name[:200].rstrip('-.')}.{digest}"
        return EventContent(name, regarding, reason, _truncate(message), warning)

    def _object(self, due: PendingEvent) -> _Object:
        subject = self._subjects.get(due.key, _Subject())
        return subject.objects.setdefault(due.event.name, _Object())

    def _rate_limit_wait(self, now: float) -> float:
        """Return the seconds until the overall rate limit allows another write."""
        if len(self._written) < self._times.max_events:
            return 0.0
        return max(0.0, self._written[0] + self._times.window - now)


def _pod(notice: OwnerNotice) -> _Key:
    return (notice.namespace, notice.pod, notice.uid, notice.reason, *notice.devices)


def _truncate(message: str) -> str:
    """Return ``message``, truncated to the limit without splitting a character."""
    raw = message.encode()
    return message if len(raw) <= MAX_MESSAGE_BYTES else raw[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
