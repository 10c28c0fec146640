"""Combination of the sources: which pod with which UID has which device, and what only the checkpoint knows. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scrubber.adapters.kubelet.checkpoint import Checkpoint, CheckpointEntry
from scrubber.adapters.kubelet.device_ids import AliasResolver, DeviceIdResolver
from scrubber.adapters.kubelet.pod_logs import PodLogs
from scrubber.domain.assignment import Assignment, ListedClaim, Pod, Share
from scrubber.domain.resource_mapping import MappedDevice

__all__ = [
    "ClaimedDevice",
    "Crosscheck",
    "Crosschecker",
    "ListedPod",
    "assignments_of",
    "checkpoint_only_assignments",
    "listed_claims",
    "missing_pods",
    "pods_with_unmapped_ids",
    "pods_without_devices",
    "shares_of",
    "unconfirmed_pods",
]

ResourceDevice = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device that a DRA driver allocated to a container by a claim.

    Attributes:
        name: its name in the driver.
        cdi_names: the CDI names that inject it.
        claim_namespace, claim_name: the claim; its UID is not listed.
    """

    driver: str
    name: str
    cdi_names: tuple[str, ...] = ()
    claim_namespace: str = ""
    claim_name: str = ""


@dataclass(frozen=True, slots=True)
class ListedPod:
    """A pod as PodResources lists it.

    Attributes:
        containers: by container, (resource, device ID) of every device plugin on the node.
        claims: by container, the devices allocated by DRA drivers.
    """

    namespace: str
    name: str
    containers: Mapping[str, frozenset[ResourceDevice]]
    claims: Mapping[str, frozenset[ClaimedDevice]] = field(default_factory=dict)

    @property
    def has_no_devices(self) -> bool:
        """Whether no container of the pod has a device of any kind."""
        return not any(self.containers.values()) and not any(self.claims.values())


@dataclass(frozen=True, slots=True)
class Crosscheck:
    """What follows from the sources alone; each attribute is the result of the function of that name.

    Attributes:
        missing, unlisted: :func:`missing_pods` with our devices, and with devices of any kind.
        checkpoint_only, checkpoint_only_active: :func:`checkpoint_only_assignments` for an untrusted list and a trusted one.
        without_devices: :func:`pods_without_devices`.
        with_unmapped_ids: :func:`pods_with_unmapped_ids`.
    """

    unconfirmed: tuple[str, ...]
    assignments: tuple[Assignment, ...]
    missing: frozenset[Pod]
    unlisted: frozenset[Pod]
    checkpoint_only: tuple[Assignment, ...]
    checkpoint_only_active: tuple[Assignment, ...]
    without_devices: frozenset[Pod]
    shares: tuple[Share, ...]
    claims: tuple[ListedClaim, ...]
    with_unmapped_ids: frozenset[Pod]


class Crosschecker:
    """Combines the sources, and returns the last result again while nothing that it depends on has changed.

    It depends on the values of the sources and on the meaning of every ID that was looked up: plugins announce those.
    """

    def __init__(self, resolve_alias: AliasResolver | None = None) -> None:
        self._resolve_alias = resolve_alias
        self._last: tuple[object, _Meanings, Crosscheck] | None = None

    def __call__(
        self, listed: tuple[ListedPod, ...], checkpoint: Checkpoint, logs: PodLogs, own_devices: Collection[str]
    ) -> Crosscheck:
        sources = (listed, checkpoint, logs, frozenset(own_devices))
        if self._last is not None and self._last[0] == sources and self._last[1].hold():
            return self._last[2]
        meanings = _Meanings(self._resolve_alias or _no_alias)
        ours = DeviceIdResolver(own_devices, meanings)
        assignments = assignments_of(listed, checkpoint, logs, ours)
        result = Crosscheck(
            unconfirmed=() if checkpoint.error else unconfirmed_pods(checkpoint, listed, ours),
            assignments=assignments,
            missing=missing_pods(assignments, checkpoint, logs, ours),
            unlisted=missing_pods(assignments, checkpoint, logs, None),
            checkpoint_only=checkpoint_only_assignments(assignments, checkpoint, logs, ours, active_only=False),
            checkpoint_only_active=checkpoint_only_assignments(assignments, checkpoint, logs, ours, active_only=True),
            without_devices=pods_without_devices(listed, checkpoint, logs),
            shares=shares_of(listed, checkpoint, logs, ours),
            claims=listed_claims(listed, checkpoint, logs),
            with_unmapped_ids=pods_with_unmapped_ids(listed, checkpoint, logs, ours),
        )
        self._last = (sources, meanings, result)
        return result


class _Meanings:
    """What IDs meant when they were looked up."""

    def __init__(self, resolve_alias: AliasResolver) -> None:
        self._resolve_alias = resolve_alias
        self._found: dict[tuple[str, str], MappedDevice | None] = {}

    def __call__(self, resource: str, kubelet_id: str) -> MappedDevice | None:
        meant = self._found[resource, kubelet_id] = self._resolve_alias(resource, kubelet_id)
        return meant

    def hold(self) -> bool:
        """Return whether every ID still means the same."""
        return all(self._resolve_alias(*key) == meant for key, meant in self._found.items())


def _no_alias(resource: str, kubelet_id: str) -> None:
    return None


def assignments_of(
    listed: Iterable[ListedPod], checkpoint: Checkpoint, logs: PodLogs, resolver: DeviceIdResolver
) -> tuple[Assignment, ...]:
    """Return one assignment for each container and resource that provided it with one of our devices.

    A pod without our devices is included as one assignment without devices and container: the kubelet lists it, and it
    must not look absent when one of its devices drops off the bus.
    """
    named = _uids_by_device(checkpoint)
    everything: list[Assignment] = []
    for each in listed:
        pod = Pod(each.namespace, each.name, _uid_of(each, named, logs))
        held: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for container, devices in each.containers.items():
            for resource, device in devices:
                held[container, resource].update(resolver.devices(resource, (device,)))
        for container, claims in each.claims.items():
            for claim in claims:
                held[container, claim.driver].update(
                    resolver.claimed_devices(claim.driver, claim.name, claim.cdi_names)
                )
        with_devices = [
            Assignment(pod, container, frozenset(devices), resource)
            for (container, resource), devices in sorted(held.items())
            if devices
        ]
        everything += with_devices or [Assignment(pod, "", frozenset())]
    return tuple(everything)


def checkpoint_only_assignments(
    assignments: Iterable[Assignment],
    checkpoint: Checkpoint,
    logs: PodLogs,
    resolver: DeviceIdResolver,
    *,
    active_only: bool,
) -> tuple[Assignment, ...]:
    """Return what only the checkpoint assigns: init containers, and everything while the list is untrusted.

    Args:
        active_only: whether the list is trusted, so that an entry of a pod missing from it is stale and omitted. The
            pod of an init container is listed while that container runs; only the container is not.

    An entry whose pod has no log directory is omitted: a UID alone identifies no tenant to wait for.
    """
    listed = {(each.pod, each.container) for each in assignments}
    pods = {pod for pod, _ in listed}
    hints: list[Assignment] = []
    for entry in checkpoint.entries:
        devices = resolver.devices(entry.resource, entry.devices)
        name = logs.names.get(entry.pod_uid)
        if not devices or name is None:
            continue
        pod = Pod(*name, entry.pod_uid)
        nameless = Pod(*name)
        if (pod, entry.container) in listed or (nameless, entry.container) in listed:
            continue
        if active_only and pod not in pods and nameless not in pods:
            continue
        hints.append(Assignment(pod, entry.container, devices, entry.resource))
    return tuple(hints)


def shares_of(
    listed: Iterable[ListedPod], checkpoint: Checkpoint, logs: PodLogs, resolver: DeviceIdResolver
) -> tuple[Share, ...]:
    """Return the containers' shares of devices that several containers may use.

    The list is one source; the checkpoint is the other, and the only one that contains ordinary init containers.
    """
    named = _uids_by_device(checkpoint)
    found: dict[tuple[Pod, str, str], set[str]] = defaultdict(set)
    for each in listed:
        pod = Pod(each.namespace, each.name, _uid_of(each, named, logs))
        for container, devices in each.containers.items():
            for resource, device in devices:
                found[pod, container, resource].add(device)
    for entry in checkpoint.entries:
        name = logs.names.get(entry.pod_uid)
        if name is not None:
            found[Pod(*name, entry.pod_uid), entry.container, entry.resource].update(entry.devices)
    return tuple(
        Share(pod, container, resource, device, ids)
        for (pod, container, resource), listed_ids in found.items()
        for device, ids in sorted(resolver.shares(resource, listed_ids).items())
    )


def listed_claims(listed: Iterable[ListedPod], checkpoint: Checkpoint, logs: PodLogs) -> tuple[ListedClaim, ...]:
    """Return the claims of the listed pods, each once for a pod, whatever their devices are called."""
    named = _uids_by_device(checkpoint)
    found = {
        ListedClaim(
            Pod(each.namespace, each.name, _uid_of(each, named, logs)),
            claim.driver,
            claim.claim_namespace,
            claim.claim_name,
        ): None
        for each in listed
        for _, claims in sorted(each.claims.items())
        for claim in sorted(claims, key=lambda one: (one.driver, one.claim_namespace, one.claim_name))
        if claim.claim_name
    }
    return tuple(found)


def missing_pods(
    assignments: Iterable[Assignment], checkpoint: Checkpoint, logs: PodLogs, resolver: DeviceIdResolver | None
) -> frozenset[Pod]:
    """Return pods that the checkpoint assigns our devices, that left logs, and that are not listed.

    Args:
        resolver: None for devices of any kind: the meaning of an ID may not have been announced yet.
    """
    pods = {each.pod for each in assignments}
    missing: set[Pod] = set()
    for entry in checkpoint.entries:
        names = logs.names_of(entry.pod_uid)
        if not names or (resolver is not None and not resolver.devices(entry.resource, entry.devices)):
            continue
        if not any(Pod(*name, entry.pod_uid) in pods or Pod(*name) in pods for name in names):
            missing.update(Pod(*name, entry.pod_uid) for name in names)
    return frozenset(missing)


def unconfirmed_pods(
    checkpoint: Checkpoint, listed: Iterable[ListedPod], resolver: DeviceIdResolver
) -> tuple[str, ...]:
    """Return pods (``namespace/name``) that have our devices in the list but not in the checkpoint.

    The kubelet writes its checkpoint before a pod is admitted and replaces it as a whole, and the checkpoint is read
    after the list. So the file belongs to another kubelet, or the pod ended in between.
    """
    named = _uids_by_device(checkpoint)
    return tuple(
        sorted(
            f"{each.namespace}/{each.name}"
            for each in listed
            if any(
                (container, resource, device) not in named
                for container, devices in each.containers.items()
                for resource, device in devices
                if resolver.device(resource, device) is not None
            )
        )
    )


def pods_without_devices(listed: Iterable[ListedPod], checkpoint: Checkpoint, logs: PodLogs) -> frozenset[Pod]:
    """Return pods with no device of any kind in the list or in a readable checkpoint.

    Devices of an ordinary init container are only in the checkpoint, so without a UID or a checkpoint no pod is
    included.
    """
    if checkpoint.error:
        return frozenset()
    have_something = {entry.pod_uid for entry in checkpoint.entries}
    pods = (Pod(each.namespace, each.name, _uid_of(each, {}, logs)) for each in listed if each.has_no_devices)
    return frozenset(pod for pod in pods if pod.uid is not None and pod.uid not in have_something)


def pods_with_unmapped_ids(
    listed: Iterable[ListedPod], checkpoint: Checkpoint, logs: PodLogs, resolver: DeviceIdResolver
) -> frozenset[Pod]:
    """Return pods with an ID, in the list or the checkpoint, that does not map to one of our devices."""
    named = _uids_by_device(checkpoint)
    found = {
        Pod(each.namespace, each.name, _uid_of(each, named, logs))
        for each in listed
        if any(resolver.device(*device) is None for held in each.containers.values() for device in held)
        or any(
            not resolver.claimed_devices(claim.driver, claim.name, claim.cdi_names)
            for claims in each.claims.values()
            for claim in claims
        )
    }
    for entry in checkpoint.entries:
        if any(resolver.device(entry.resource, device) is None for device in entry.devices):
            found |= {Pod(*name, entry.pod_uid) for name in logs.names_of(entry.pod_uid)}
    return frozenset(found)


def _uids_by_device(checkpoint: Checkpoint) -> Mapping[tuple[str, str, str], frozenset[str]]:
    found: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for entry in checkpoint.entries:
        for device in entry.devices:
            found[_key(entry, device)].add(entry.pod_uid)
    return {key: frozenset(uids) for key, uids in found.items()}


def _key(entry: CheckpointEntry, device: str) -> tuple[str, str, str]:
    return (entry.container, entry.resource, device)


def _uid_of(pod: ListedPod, named: Mapping[tuple[str, str, str], frozenset[str]], logs: PodLogs) -> str | None:
    """Return the one UID that the log directories contain and the checkpoint, if it has any, does not contradict."""
    candidates = logs.uids.get((pod.namespace, pod.name), frozenset())
    devices = [(name, resource, device) for name, held in pod.containers.items() for resource, device in held]
    witnesses = frozenset[str]().union(*(named.get(key, frozenset()) for key in devices))
    agreed = candidates & witnesses if witnesses else candidates
    return next(iter(agreed)) if len(agreed) == 1 else None
