"""Putting the witnesses together: which pod of which UID has which device, and what only the checkpoint knows. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.pod_logs import PodLogs
from scrubber.domain.assignment import Assignment, Pod

__all__ = ["ListedPod", "assignments_of", "hints_of", "missing_from"]

ResourceDevice = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ListedPod:
    """A pod as PodResources lists it: by container, (resource, device id) of every device plugin on the node."""

    namespace: str
    name: str
    containers: Mapping[str, frozenset[ResourceDevice]]


def assignments_of(
    listed: Iterable[ListedPod], checkpoint: Checkpoint, logs: PodLogs, ours: Collection[str]
) -> tuple[Assignment, ...]:
    """One assignment for each container that has a device of ``ours``.

    A pod that has none is in the answer too, as one assignment without devices and container: it is the kubelet's,
    and must not look absent when a device of its drops off the bus.
    """
    named = _uids_by_device(checkpoint)
    everything: list[Assignment] = []
    for each in listed:
        pod = Pod(each.namespace, each.name, _uid_of(each, named, logs))
        held = {
            container: frozenset(device for _, device in devices if device in ours)
            for container, devices in each.containers.items()
        }
        with_devices = [Assignment(pod, container, devices) for container, devices in held.items() if devices]
        everything += with_devices or [Assignment(pod, "", frozenset())]
    return tuple(everything)


def hints_of(
    assignments: Iterable[Assignment],
    checkpoint: Checkpoint,
    logs: PodLogs,
    ours: Collection[str],
    *,
    active_only: bool,
) -> tuple[Assignment, ...]:
    """What the checkpoint alone assigns: init containers, and everything while the list cannot be believed.

    Args:
        active_only: the list is trusted, so an entry of a pod that it lacks is old and left out. An init container's
            pod is listed while it runs, only its container is not.

    An entry whose pod has no log directory is left out: a UID alone names no tenant to wait for.
    """
    listed = {(each.pod, each.container) for each in assignments}
    pods = {pod for pod, _ in listed}
    hints: list[Assignment] = []
    for entry in checkpoint.entries:
        devices = entry.devices.intersection(ours)
        name = logs.names.get(entry.pod_uid)
        if not devices or name is None:
            continue
        pod = Pod(*name, entry.pod_uid)
        nameless = Pod(*name)
        if (pod, entry.container) in listed or (nameless, entry.container) in listed:
            continue
        if active_only and pod not in pods and nameless not in pods:
            continue
        hints.append(Assignment(pod, entry.container, devices))
    return tuple(hints)


def missing_from(
    assignments: Iterable[Assignment], checkpoint: Checkpoint, logs: PodLogs, ours: Collection[str]
) -> tuple[str, ...]:
    """Pods (``namespace/name``) that the checkpoint gives devices of ``ours``, that left logs, and that are not listed."""
    pods = {each.pod for each in assignments}
    missing: set[str] = set()
    for entry in checkpoint.entries:
        name = logs.names.get(entry.pod_uid)
        if name is None or entry.devices.isdisjoint(ours):
            continue
        if Pod(*name, entry.pod_uid) not in pods and Pod(*name) not in pods:
            missing.add("/".join(name))
    return tuple(sorted(missing))


def _uids_by_device(checkpoint: Checkpoint) -> Mapping[tuple[str, str, str], frozenset[str]]:
    found: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for entry in checkpoint.entries:
        for device in entry.devices:
            found[_key(entry, device)].add(entry.pod_uid)
    return {key: frozenset(uids) for key, uids in found.items()}


def _key(entry: CheckpointEntry, device: str) -> tuple[str, str, str]:
    return (entry.container, entry.resource, device)


def _uid_of(pod: ListedPod, named: Mapping[tuple[str, str, str], frozenset[str]], logs: PodLogs) -> str | None:
    """The one UID that the log directories know and the checkpoint, where it says anything, does not contradict."""
    candidates = logs.uids.get((pod.namespace, pod.name), frozenset())
    devices = [(name, resource, device) for name, held in pod.containers.items() for resource, device in held]
    witnesses = frozenset[str]().union(*(named.get(key, frozenset()) for key in devices))
    agreed = candidates & witnesses if witnesses else candidates
    return next(iter(agreed)) if len(agreed) == 1 else None
