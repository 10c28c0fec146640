"""What the cluster is to know of the node, from one snapshot of the service: pure, and the same for the same snapshot.

Promise: a service that is away, or has not looked at every device yet, never counts as one that found all in order. No
sentence is made up about a pod here: what reaches an event is what the service wrote for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from plugin.devices import ServiceVerdict
from plugin.service import advertised_devices
from scrubber.api import scrubber_pb2 as pb

__all__ = [
    "AWAY",
    "CONDITION",
    "PREFIX",
    "QUARANTINED",
    "STOPPED",
    "Condition",
    "DeviceFacts",
    "Notice",
    "Standing",
    "Status",
    "View",
    "seen",
]

CONDITION = "GpusInService"
"""Type of the node's condition. It says nothing about clean and dirty, which change with every pod: each change is a
write of the whole node to the cluster's store, and so is one of a label. The labels count those, and follow slowly."""

PREFIX = "scrubber.dev/gpus."
QUARANTINED = f"{PREFIX}quarantined"
"""The label that only a device's health changes, and no pod that comes or goes."""

_OUT = frozenset({"quarantined", "recovering", "probation", "condemned", "break-glass"})
"""States in which a device is not handed out, but for an order of a person's or of the policy."""

_NAMED = 8
"""Devices that a condition names; the rest are counted."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Of a namespace or a pod. Both become parts of a URL, so nothing else is let through."""


class Status(StrEnum):
    """Of a condition, in the words of the API."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition :data:`CONDITION`, without its times."""

    status: Status
    reason: str
    message: str


class Standing(StrEnum):
    """Where a device stands, as far as an event is worth it."""

    IN_SERVICE = "in-service"
    OUT = "out"
    CONDEMNED = "condemned"
    UNPROVED = "unproved"
    """Offered although its state says otherwise: broken glass, a policy that observes, or news held back till release."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device. ``sentence`` says why it is not simply in service; empty when it is."""

    id: str
    standing: Standing
    certified: bool
    state: str
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """What a pod's owner should be told of some of its devices. ``evict``: the policy wants the pod gone."""

    namespace: str
    pod: str
    uid: str
    reason: str
    sentence: str
    evict: bool = False
    devices: tuple[str, ...] = ()


AWAY = Condition(
    Status.UNKNOWN,
    "ScrubServiceAway",
    "The scrub service of this node does not answer, or has not looked at every device yet: no GPU is handed out.",
)
STOPPED = Condition(
    Status.UNKNOWN,
    "PluginStopped",
    "The device plugin of this node was stopped; nobody watches its GPUs for the cluster.",
)


@dataclass(frozen=True, slots=True)
class View:
    """All that the cluster is told.

    Attributes:
        heard: a service that has looked at every device spoke; else nobody vouches for anything.
        devices: as of the last time that it did.
        notices: of pods; none while nobody is heard.
    """

    heard: bool = False
    devices: tuple[DeviceFacts, ...] = ()
    notices: tuple[Notice, ...] = ()

    def away(self) -> View:
        """The same node once nobody is heard any more: nothing is clean, and no pod is judged."""
        return View(devices=self.devices)

    @property
    def condition(self) -> Condition:
        if not self.heard:
            return AWAY
        if not self.devices:
            return Condition(Status.UNKNOWN, "NoGpus", "The scrub service sees no GPU on this node.")
        out = [each for each in self.devices if each.standing in (Standing.OUT, Standing.CONDEMNED)]
        loose = [each for each in self.devices if each.standing is Standing.UNPROVED]
        words = [f"{len(self.devices) - len(out)} of {len(self.devices)} GPUs are in service."]
        if out:
            words.append(f"Out of service: {_listed(out)}.")
        if loose:
            words.append(f"Offered although not proved: {_listed(loose)}.")
        message = " ".join(words)
        if not out:
            return Condition(Status.TRUE, "SomeUnproved" if loose else "AllInService", message)
        reason = "NoneInService" if len(out) == len(self.devices) else "SomeOutOfService"
        return Condition(Status.FALSE, reason, message)

    @property
    def labels(self) -> Mapping[str, str]:
        """How many devices are clean, dirty and quarantined; the three make up all of them.

        Empty before any service was heard. Clean is what has an unused certificate and is not handed out by way of an
        exception; a device in use is dirty. While nobody is heard, nothing is clean.
        """
        if not self.heard and not self.devices:
            return {}
        quarantined = sum(each.standing in (Standing.OUT, Standing.CONDEMNED) for each in self.devices)
        clean = sum(self.heard and each.certified and each.standing is Standing.IN_SERVICE for each in self.devices)
        counts = {"clean": clean, "dirty": len(self.devices) - clean - quarantined, "quarantined": quarantined}
        return {f"{PREFIX}{word}": str(count) for word, count in counts.items()}


def seen(snapshot: pb.Snapshot, before: View, *, by_envvar: bool = False) -> View:
    """The view after ``snapshot``; one of a service that is not ready changes nothing.

    Args:
        by_envvar: as in :func:`plugin.service.advertised_devices`.
    """
    if not snapshot.ready:
        return before
    # The plugin withholds some devices that the service would hand out; the kubelet is told so, and so is the cluster.
    refusals = {
        each.id: each.refusal
        for each in advertised_devices(snapshot, by_envvar=by_envvar)
        if each.verdict is not ServiceVerdict.OFFERED
    }
    devices = tuple(_facts(each, refusals.get(each.id)) for each in snapshot.devices)
    return View(heard=True, devices=devices, notices=tuple(_notices(snapshot.notices)))


def _facts(device: pb.SnapshotDevice, refusal: str | None) -> DeviceFacts:
    if refusal is not None:
        standing = Standing.CONDEMNED if device.state == "condemned" else Standing.OUT
        state = device.state if device.state in _OUT else "withheld"
        return DeviceFacts(device.id, standing, False, state, refusal)
    if device.state in _OUT:
        sentence = device.refusal or f"Device {device.id} is {device.state}, and offered all the same."
        return DeviceFacts(device.id, Standing.UNPROVED, False, device.state, sentence)
    return DeviceFacts(device.id, Standing.IN_SERVICE, device.certified, device.state)


def _notices(notices: Iterable[pb.PodNotice]) -> Iterable[Notice]:
    """One for each pod, reason and set of devices; what else there is to say of the same is added to it."""
    merged: dict[tuple[str, str, str, str, tuple[str, ...]], Notice] = {}
    for each in notices:
        if not (_NAME.fullmatch(each.namespace) and _NAME.fullmatch(each.name) and each.reason and each.sentence):
            continue
        devices = tuple(sorted(set(each.devices)))
        key = (each.namespace, each.name, each.uid, each.reason, devices)
        before = merged.get(key)
        sentence = each.sentence if before is None else f"{before.sentence} {each.sentence}"
        # Without a UID it could be a later pod of the same name that goes.
        evict = (each.evict and bool(each.uid)) or (before is not None and before.evict)
        merged[key] = Notice(each.namespace, each.name, each.uid, each.reason, sentence, evict, devices)
    return merged.values()


def _listed(devices: list[DeviceFacts]) -> str:
    named = ", ".join(f"{each.id} ({each.state})" for each in devices[:_NAMED])
    more = len(devices) - _NAMED
    return f"{named} and {more} more" if more > 0 else named
