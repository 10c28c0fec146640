"""Which events are due: the difference between what was told and what is so, and nothing else.

Promises: the present is told, not the past; a device that went and came back while nobody could be told is not told of.
One thing is told by one event object, also across restarts of the plugin, which is repeated rather than made again. No
object is written more than once a minute, and no more than a number of them a minute in all. What is kept is bounded by
the newest view, and by a number of devices that went.

Everything here is pure. ``now`` is seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from plugin.cluster.port import EventText, Regarding
from plugin.cluster.view import DeviceFacts, Notice, Standing, View

__all__ = ["GONE", "LONGEST", "REASONS", "Bulletin", "BulletinTimes", "Due"]

LONGEST = 1024
"""Bytes that the message of an event may have."""


@dataclass(frozen=True, slots=True)
class BulletinTimes:
    """Seconds, but for ``most``.

    Attributes:
        spacing: between two writes of one object.
        window, most: no more than ``most`` events are written within ``window``.
        remind: after which a pod's owner is told the same again; the API server keeps events for an hour.
        shelved: how long an event is left alone that the API server refused for good.
        gone: devices that were told to have gone and are remembered, so that their coming back is told too.
    """

    spacing: float = 60.0
    window: float = 60.0
    most: int = 30
    remind: float = 1800.0
    shelved: float = 600.0
    gone: int = 64


@dataclass(slots=True)
class _Object:
    """One event object: when it may be written again, and its count; 0 while it is not known to be there."""

    free_at: float = -1.0
    count: int = 0


@dataclass(slots=True)
class _Subject:
    """What the cluster was told of one device, or of one pod for one reason.

    Attributes:
        said: of a device the reason, of a pod the sentence, as told last; empty: nothing was said of it.
        at: when that was; None: never since the plugin started.
    """

    said: str = ""
    at: float | None = None
    objects: dict[str, _Object] = field(default_factory=dict)


_Key = tuple[str, ...]
"""``(device,)``, or ``(namespace, pod, uid, reason, *devices)``."""


@dataclass(frozen=True, slots=True)
class Due:
    """An event to write.

    Attributes:
        count: of the object, as it is there; 0: not known to be there, so that it is to be made.
    """

    text: EventText
    count: int
    key: _Key


REASONS: Mapping[Standing, str] = {
    Standing.IN_SERVICE: "GpuBackInService",
    Standing.OUT: "GpuOutOfService",
    Standing.CONDEMNED: "GpuCondemned",
    Standing.UNPROVED: "GpuOfferedUnproved",
}
GONE = "GpuGone"
_WELL = REASONS[Standing.IN_SERVICE]


class Bulletin:
    """The events of one node."""

    def __init__(self, node: str, times: BulletinTimes) -> None:
        self._node = Regarding("Node", node, uid=node)  # as the kubelet's events of a node, which have no other UID
        self._times = times
        self._view = View()
        self._subjects: dict[_Key, _Subject] = {}
        self._written: deque[float] = deque(maxlen=times.most)

    def heard(self, view: View) -> None:
        """Take in the newest view. That nobody is heard is the condition's to say: then there is nothing to tell here."""
        self._view = view
        if not view.heard:
            return
        for device in view.devices:
            subject = self._subjects.setdefault((device.id,), _Subject())
            if not subject.said and device.standing is Standing.IN_SERVICE:
                subject.said = _WELL  # that all is well is no news
        devices, pods = {(each.id,) for each in view.devices}, {_pod(each) for each in view.notices}
        for key, subject in list(self._subjects.items()):
            vanished_untold = len(key) == 1 and key not in devices and not subject.said
            if vanished_untold or (len(key) > 1 and key not in pods):
                del self._subjects[key]
        for key in pods:
            self._subjects.setdefault(key, _Subject())
        gone = [
            key for key, each in self._subjects.items() if len(key) == 1 and key not in devices and each.said == GONE
        ]
        gone.sort(key=lambda key: self._subjects[key].at or 0.0)
        for key in gone[: -self._times.gone]:
            del self._subjects[key]

    def due_in(self, now: float) -> float | None:
        """Seconds until an event may be written, 0 or less when one may be now; None when there is none to write."""
        waits = [each.free_at - now for each, _ in self._candidates(now)]
        reminders = [
            subject.at + self._times.remind - now
            for key, subject in self._subjects.items()
            if len(key) > 1 and subject.at is not None and now < subject.at + self._times.remind
        ]
        if not self._view.heard or not (waits or reminders):
            return None
        return max(min([*waits, *reminders]), self._crowded(now))

    def next(self, now: float) -> Due | None:
        """The event to write now: of those that may be, the one whose object was left alone longest."""
        if self._crowded(now) > 0:
            return None
        free = [(each.free_at, due) for each, due in self._candidates(now) if each.free_at <= now]
        return min(free, key=lambda each: each[0])[1] if free else None

    def told(self, due: Due, now: float, count: int) -> None:
        """``due`` was written, and its object now has ``count``."""
        self._written.append(now)
        subject = self._subjects.get(due.key)
        if subject is None:
            return  # the pod went while its owner was being told
        subject.objects[due.text.name] = _Object(now + self._times.spacing, count)
        subject.said, subject.at = due.text.reason if len(due.key) == 1 else due.text.sentence, now

    def refused(self, due: Due, now: float) -> None:
        """The API server will not have ``due``, whenever it is asked: it is left for a while, and the others go on."""
        self._written.append(now)
        self._object(due).free_at = now + self._times.shelved

    def vanished(self, due: Due) -> None:
        """The object is there no more: events are kept for an hour. It is to be made again."""
        self._object(due).count = 0

    # -- what is so, and was not told ----------------------------------------------------------------------------------

    def _candidates(self, now: float) -> Iterator[tuple[_Object, Due]]:
        if not self._view.heard:
            return
        devices = {each.id: each for each in self._view.devices}
        notices = {_pod(each): each for each in self._view.notices}
        for key, subject in self._subjects.items():
            if key in notices:
                due = self._of_pod(key, subject, notices[key], now)
            else:
                due = self._of_device(key, subject, devices.get(key[0]))
            if due is not None:
                yield subject.objects.get(due.text.name, _Object()), due

    def _of_device(self, key: _Key, subject: _Subject, device: DeviceFacts | None) -> Due | None:
        reason = GONE if device is None else REASONS[device.standing]
        if reason == subject.said:
            return None
        if device is None:
            sentence = f"Device {key[0]} is no longer on this node."
        else:
            sentence = device.sentence or f"Device {device.id} is back in service."
        return self._due(self._text(self._node, reason, sentence, reason != _WELL, key), key, subject)

    def _of_pod(self, key: _Key, subject: _Subject, notice: Notice, now: float) -> Due | None:
        regarding = Regarding("Pod", notice.pod, notice.uid, notice.namespace)
        text = self._text(regarding, notice.reason, notice.sentence, True, key)
        stale = subject.at is None or subject.said != text.sentence or now >= subject.at + self._times.remind
        return self._due(text, key, subject) if stale else None

    def _due(self, text: EventText, key: _Key, subject: _Subject) -> Due:
        known = subject.objects.get(text.name)
        return Due(text, 0 if known is None else known.count, key)

    def _text(self, regarding: Regarding, reason: str, sentence: str, warning: bool, key: _Key) -> EventText:
        digest = hashlib.sha256("\0".join((self._node.name, *key, reason)).encode()).hexdigest()[:16]
        name = f"{regarding.name[:200].rstrip('-.')}.{digest}"
        return EventText(name, regarding, reason, _cut(sentence), warning)

    def _object(self, due: Due) -> _Object:
        subject = self._subjects.get(due.key, _Subject())
        return subject.objects.setdefault(due.text.name, _Object())

    def _crowded(self, now: float) -> float:
        """Seconds until the bound on all events lets one more be written."""
        if len(self._written) < self._times.most:
            return 0.0
        return max(0.0, self._written[0] + self._times.window - now)


def _pod(notice: Notice) -> _Key:
    return (notice.namespace, notice.pod, notice.uid, notice.reason, *notice.devices)


def _cut(sentence: str) -> str:
    """As much as fits, and whole characters."""
    raw = sentence.encode()
    return sentence if len(raw) <= LONGEST else raw[: LONGEST - 3].decode(errors="ignore") + "…"
