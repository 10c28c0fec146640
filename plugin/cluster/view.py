"""Builds what the cluster should know about the node from one snapshot of the service: pure and deterministic.

Invariant: a service that is away, or has not checked every device yet, never counts as one that found everything in
order. Messages about a pod are not composed here: an event contains what the service wrote for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from plugin.kubelet.devices import ServiceVerdict
from plugin.service_client import advertised_devices
from scrubber.api import scrubber_pb2 as pb

__all__ = [
    "LABEL_PREFIX",
    "PLUGIN_STOPPED_CONDITION",
    "QUARANTINED_LABEL",
    "SERVICE_AWAY_CONDITION",
    "ClusterDevice",
    "ClusterView",
    "ConditionStatus",
    "DeviceServiceStatus",
    "NodeCondition",
    "OwnerNotice",
    "view_after",
]

LABEL_PREFIX = "scrubber.dev/gpus."
QUARANTINED_LABEL = f"{LABEL_PREFIX}quarantined"
"""The label that depends only on the health of devices, not on pods that start or end."""

_OUT_OF_SERVICE_STATES = frozenset({"quarantined", "recovering", "probation", "condemned", "break-glass"})
"""States in which a device is handed over only by order of an operator or of the policy."""

_MAX_NAMED_DEVICES = 8
"""Number of devices that a condition names; the rest are counted."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A valid name of a namespace or a pod. Both become parts of a URL, so nothing else is accepted."""


_YIELDED = "The node is yielded: others work with its GPU driver, and no GPU is handed over until that has ended."


class ConditionStatus(StrEnum):
    """Status values of a condition, as the API spells them."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """The node's condition, without its times. Status ``True``: every GPU is in service.

    It does not depend on clean and dirty, which change with every pod: each change is a write of the whole node to etcd,
    and so is each change of a label. The labels count clean and dirty devices, and are updated slowly.
    """

    status: ConditionStatus
    reason: str
    message: str


class DeviceServiceStatus(StrEnum):
    """Service status of a device, in the granularity of events."""

    IN_SERVICE = "in-service"
    OUT_OF_SERVICE = "out"
    CONDEMNED = "condemned"
    UNVERIFIED = "unproved"
    """Advertised although its state is out of service.

    The reason is an active break-glass override, a policy in observe mode, or a quarantine deferred until the device is
    released.
    """


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """One device.

    Attributes:
        message: why it is not simply in service; empty when it is.
        yielded: the node is yielded, and the device would be advertised otherwise: no event is due because of that.
    """

    id: str
    status: DeviceServiceStatus
    certified: bool
    state: str
    message: str = ""
    yielded: bool = False


@dataclass(frozen=True, slots=True)
class OwnerNotice:
    """A message for a pod's owner about some of its devices. ``evict``: the policy requests the eviction of the pod."""

    namespace: str
    pod: str
    uid: str
    reason: str
    message: str
    evict: bool = False
    devices: tuple[str, ...] = ()


SERVICE_AWAY_CONDITION = NodeCondition(
    ConditionStatus.UNKNOWN,
    "ScrubServiceUnavailable",
    "The scrub service on this node does not respond, or has not checked every device yet. No container can start on a GPU.",
)
PLUGIN_STOPPED_CONDITION = NodeCondition(
    ConditionStatus.UNKNOWN,
    "PluginStopped",
    "The device plugin on this node was stopped. The state of its GPUs is not reported.",
)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything that is reported to the cluster.

    Attributes:
        service_ready: the last report came from a service that has checked every device; if False, no state is vouched
            for.
        devices: as of the last report of such a service.
        notices: notices for pods; none while the service is away.
        yielded: the node is yielded: every device is withheld, and those that the service does not list need not be gone.
    """

    service_ready: bool = False
    devices: tuple[ClusterDevice, ...] = ()
    notices: tuple[OwnerNotice, ...] = ()
    yielded: bool = False

    def without_service(self) -> ClusterView:
        """Return the view of the same node without a service: no device is clean, and there are no notices for pods."""
        return ClusterView(devices=self.devices)

    @property
    def condition(self) -> NodeCondition:
        if not self.service_ready:
            return SERVICE_AWAY_CONDITION
        if not self.devices and self.yielded:
            return NodeCondition(ConditionStatus.UNKNOWN, "NoGpus", _YIELDED)
        if not self.devices:
            return NodeCondition(ConditionStatus.UNKNOWN, "NoGpus", "The scrub service found no GPU on this node.")
        out = [
            each
            for each in self.devices
            if each.status in (DeviceServiceStatus.OUT_OF_SERVICE, DeviceServiceStatus.CONDEMNED)
        ]
        loose = [each for each in self.devices if each.status is DeviceServiceStatus.UNVERIFIED]
        words = [f"{len(self.devices) - len(out)} of {len(self.devices)} GPUs are in service."]
        if out:
            words.append(f"Out of service: {_listed(out)}.")
        if loose:
            words.append(f"Advertised despite their state: {_listed(loose)}.")
        if self.yielded:
            words.append(_YIELDED)
        message = " ".join(words)
        if not out:
            return NodeCondition(ConditionStatus.TRUE, "SomeUnverified" if loose else "AllInService", message)
        reason = "NoneInService" if len(out) == len(self.devices) else "SomeOutOfService"
        return NodeCondition(ConditionStatus.FALSE, reason, message)

    @property
    def none_in_service(self) -> bool | None:
        """Whether no GPU is in service; None while that is unknown, and where there is no GPU.

        Not on a yielded node: pods of the component that works with the driver must be able to start there.
        """
        if self.service_ready and self.yielded:
            return False
        if not self.service_ready or not self.devices:
            return None
        return all(
            each.status in (DeviceServiceStatus.OUT_OF_SERVICE, DeviceServiceStatus.CONDEMNED) for each in self.devices
        )

    @property
    def labels(self) -> Mapping[str, str]:
        """How many devices are clean, dirty and quarantined; the three add up to all devices.

        Empty before the first ready service. A clean device has an unused certificate and is not handed over by
        exception; a device in use is dirty. While the service is away, no device is clean.
        """
        if not self.service_ready and not self.devices:
            return {}
        quarantined = sum(
            each.status in (DeviceServiceStatus.OUT_OF_SERVICE, DeviceServiceStatus.CONDEMNED) for each in self.devices
        )
        clean = sum(
            self.service_ready and each.certified and each.status is DeviceServiceStatus.IN_SERVICE
            for each in self.devices
        )
        counts = {"clean": clean, "dirty": len(self.devices) - clean - quarantined, "quarantined": quarantined}
        return {f"{LABEL_PREFIX}{word}": str(count) for word, count in counts.items()}


def view_after(snapshot: pb.Snapshot, before: ClusterView, *, uses_envvar: bool = False) -> ClusterView:
    """Return the view after ``snapshot``; a snapshot of a service that is not ready changes nothing.

    Args:
        uses_envvar: as in :func:`plugin.service_client.advertised_devices`.
    """
    if not snapshot.ready:
        return before
    # The plugin withholds some devices that the service would hand over: the kubelet and the cluster both learn that.
    refusals = {
        each.id: each.refusal
        for each in advertised_devices(snapshot, uses_envvar=uses_envvar)
        if each.verdict is not ServiceVerdict.ADVERTISED
    }
    yielded = bool(snapshot.yielded)
    devices = [_cluster_device(each, refusals.get(each.id), yielded=yielded) for each in snapshot.devices]
    if yielded:  # a service that was started on a yielded node lists no device
        listed = {each.id for each in devices}
        devices += [_as_yielded(each) for each in before.devices if each.id not in listed]
    return ClusterView(
        service_ready=True, devices=tuple(devices), notices=tuple(_notices(snapshot.notices)), yielded=yielded
    )


def _as_yielded(device: ClusterDevice) -> ClusterDevice:
    if device.status in (DeviceServiceStatus.OUT_OF_SERVICE, DeviceServiceStatus.CONDEMNED):
        return device
    state = device.state if device.state in _OUT_OF_SERVICE_STATES else "withheld"
    return ClusterDevice(device.id, DeviceServiceStatus.OUT_OF_SERVICE, False, state, _YIELDED, yielded=True)


def _cluster_device(device: pb.SnapshotDevice, refusal: str | None, *, yielded: bool) -> ClusterDevice:
    state = device.state if device.state in _OUT_OF_SERVICE_STATES else "withheld"
    # Withheld only because of the yield is also a device that was advertised despite its state.
    if refusal is not None and yielded and (device.withheld or state == "withheld"):
        return ClusterDevice(device.id, DeviceServiceStatus.OUT_OF_SERVICE, False, state, refusal, yielded=True)
    if refusal is not None:
        status = DeviceServiceStatus.CONDEMNED if device.state == "condemned" else DeviceServiceStatus.OUT_OF_SERVICE
        return ClusterDevice(device.id, status, False, state, refusal)
    if device.state in _OUT_OF_SERVICE_STATES:
        message = device.refusal or f"Device {device.id} is {device.state} but still advertised."
        return ClusterDevice(device.id, DeviceServiceStatus.UNVERIFIED, False, device.state, message)
    return ClusterDevice(device.id, DeviceServiceStatus.IN_SERVICE, device.certified, device.state)


def _notices(notices: Iterable[pb.PodNotice]) -> Iterable[OwnerNotice]:
    """Return one notice for each pod, reason and set of devices; further messages with the same key are appended."""
    merged: dict[tuple[str, str, str, str, tuple[str, ...]], OwnerNotice] = {}
    for each in notices:
        if not (_NAME.fullmatch(each.namespace) and _NAME.fullmatch(each.name) and each.reason and each.message):
            continue
        devices = tuple(sorted(set(each.devices)))
        key = (each.namespace, each.name, each.uid, each.reason, devices)
        before = merged.get(key)
        message = each.message if before is None else f"{before.message} {each.message}"
        # Without a UID, the eviction could hit a later pod of the same name.
        evict = (each.evict and bool(each.uid)) or (before is not None and before.evict)
        merged[key] = OwnerNotice(each.namespace, each.name, each.uid, each.reason, message, evict, devices)
    return merged.values()


def _listed(devices: list[ClusterDevice]) -> str:
    named = ", ".join(f"{each.id} ({each.state})" for each in devices[:_MAX_NAMED_DEVICES])
    more = len(devices) - _MAX_NAMED_DEVICES
    return f"{named} and {more} more" if more > 0 else named
