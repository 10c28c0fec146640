"""Who has a device: what the kubelet decided, how far a reading of it can be trusted, and which processes are a pod's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Assignment",
    "KubeletReading",
    "Pod",
    "PodAbsence",
    "Process",
    "Share",
    "Trust",
    "exclude_baseline",
    "presumed_sandbox",
    "started_container",
    "starting_container",
]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. ``uid`` is None where no witness gave it: such a pod is never "the same pod" as anything."""

    namespace: str
    name: str
    uid: str | None = None

    @property
    def tenant(self) -> str:
        """Who may see the other's data: the namespace. Pod labels are written by tenants and never widen trust."""
        return self.namespace


@dataclass(frozen=True, slots=True)
class Assignment:
    """One container's share: pod, container, devices.

    Attributes:
        resource: under which the kubelet accounts it: a device plugin's resource, or the name of the DRA driver whose
            claim it is. Empty where nobody said it. It says who gave the devices away and not who has them, so two
            assignments that differ in nothing else are the same.
        shares: the kubelet's own ids of what it has, where these are shares of a device and not the whole of it.
    """

    pod: Pod
    container: str
    devices: frozenset[str]
    resource: str = field(default="", compare=False)
    shares: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class Share:
    """What one container has of a device that several may have, by the kubelet's own ids.

    Attributes:
        ids: those of ``resource`` that mean ``device``; a container may have several.
    """

    pod: Pod
    container: str
    resource: str
    device: str
    ids: frozenset[str]


class Trust(StrEnum):
    """How far a reading of the kubelet's assignments can be believed."""

    TRUSTED = "trusted"
    EMPTY_AFTER_RESTART = "empty-after-restart"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class KubeletReading:
    """What the kubelet's witnesses said at one moment.

    Attributes:
        trust: only a trusted reading proves that a pod is absent.
        assignments: from PodResources; entries merged per container and resource. Ordinary init containers are never
            among them.
        checkpoint_only: from the checkpoint alone (init containers): good enough to wait for a pod, never to trust it.
        started_at: monotonic seconds when the reading was begun: what happened later may not be in it.
        finished_at: monotonic seconds when it was there: what it lacks was gone by then, and not necessarily before.
        untrusted_reason: a sentence on why the reading is not trusted; empty when it is.
        init_containers_known: whether the checkpoint could be read and bears the list out. Without it no ordinary init
            container is seen, so ``checkpoint_only`` may lack one, and :meth:`container_count` may count too few.
        without_devices: pods that are listed and that neither the list nor the checkpoint gives a device of any kind. Kubelets
            before 1.34 go on listing a pod that has ended, for as long as its object exists.
        caveats: what the reading had to do without, in sentences, trusted or not.
        not_yet_listed: pods that are not listed although the kubelet's checkpoint and log directories still have them, and that
            this kubelet has not listed since its start. It may not have come to them yet: their absence says nothing.
        kubelet_instance: changes with every start of the kubelet, as far as its socket tells; empty when nobody answered.
        shares: of those in ``assignments`` and ``checkpoint_only`` that have shares of devices and not the whole of them, which.
        with_unmapped_ids: pods that have something of a plugin's or DRA driver's that nobody has explained. It may be any device
            of ours, until its plugin says what its ids mean.
    """

    trust: Trust
    assignments: tuple[Assignment, ...] = ()
    checkpoint_only: tuple[Assignment, ...] = ()
    started_at: float = 0.0
    untrusted_reason: str = ""
    init_containers_known: bool = True
    without_devices: frozenset[Pod] = frozenset()
    caveats: tuple[str, ...] = ()
    not_yet_listed: frozenset[Pod] = frozenset()
    kubelet_instance: str = ""
    shares: tuple[Share, ...] = ()
    finished_at: float = 0.0
    with_unmapped_ids: frozenset[Pod] = frozenset()

    def listed_assignments(self, device: str, share: frozenset[str] = frozenset()) -> tuple[Assignment, ...]:
        """All assignments that PodResources lists for ``device``; only those of a ``share``, if one is given.

        Args:
            share: ids of shares of the device; one of them is enough.
        """
        return self._with(self.assignments, device, share)

    def all_assignments(self, device: str) -> tuple[Assignment, ...]:
        """All assignments of ``device`` that any witness names, believed or not."""
        return tuple(each for each in (*self.assignments, *self.checkpoint_only) if device in each.devices)

    def assignment_of(
        self, device: str, share: frozenset[str] = frozenset(), *, resource: str = ""
    ) -> Assignment | None:
        """The one assignment of ``device``; None when several pods, no pod, or an unusable reading say nothing certain.

        A checkpoint that names another pod is a second pod: an init container of it may be what starts.

        Several containers of one pod are the pod's: the container is then the first by name, and
        :meth:`container_count` tells how many there are.

        Args:
            share: look only at who has one of these shares of it.
            resource: if the pod has it under several, this one.
        """
        found = self.listed_assignments(device, share)
        pods = {each.pod for each in (*found, *self._with(self.checkpoint_only, device, share))}
        if self.trust is Trust.UNREADABLE or not found or len(pods) != 1:
            return None
        return min(found, key=lambda each: (each.resource != resource, each.container, each.resource))

    def checkpoint_assignment(self, device: str, share: frozenset[str] = frozenset()) -> Assignment | None:
        """Whom the checkpoint names for ``device`` when PodResources names nobody; None unless it is one pod."""
        found = self._with(self.checkpoint_only, device, share)
        if self.listed_assignments(device, share):
            return None
        return found[0] if len({each.pod for each in found}) == 1 else None

    def container_count(self, device: str, share: frozenset[str] = frozenset()) -> int:
        """How many containers of a pod have ``device``: by PodResources, and by the checkpoint, which alone knows the
        ordinary init containers that had it before.
        """
        everybody = (*self.listed_assignments(device, share), *self._with(self.checkpoint_only, device, share))
        return len({(each.pod, each.container) for each in everybody})

    def init_containers_of(self, pod: Pod, device: str) -> frozenset[str]:
        """Names of the containers of ``pod`` that have ``device`` by the checkpoint alone: its ordinary init containers."""
        listed = {each.container for each in self.assignments if each.pod == pod}
        hinted = {each.container for each in self.checkpoint_only if each.pod == pod and device in each.devices}
        return frozenset(hinted - listed)

    def shares_of(self, pod: Pod, device: str) -> frozenset[str]:
        """The ids of all shares of ``device`` that containers of ``pod`` have."""
        return frozenset(
            id_ for share in self.shares if (share.pod, share.device) == (pod, device) for id_ in share.ids
        )

    def _with(self, among: Iterable[Assignment], device: str, share: frozenset[str]) -> tuple[Assignment, ...]:
        found = tuple(each for each in among if device in each.devices)
        if not share:
            return found
        having = {_owner_key(each) for each in self.shares if each.device == device and each.ids & share}
        return tuple(each for each in found if _owner_key(each) in having)

    def assigned_by_other_plugins(self, device: str, own_resources: Collection[str]) -> tuple[Assignment, ...]:
        """Assignments of ``device`` that another plugin's resource or a DRA driver made.

        Args:
            own_resources: the resources under which our own plugin hands devices out.
        """
        return tuple(
            each for each in self.listed_assignments(device) if each.resource and each.resource not in own_resources
        )

    def second_owner(self, device: str, own_resources: Collection[str], starting_pod: Pod | None) -> Assignment | None:
        """A pod other than ``starting_pod`` that another plugin or driver has given ``device`` to, which then has two owners.

        Args:
            own_resources: as of :meth:`assigned_by_other_plugins`; while none is known, nothing is foreign.
        """
        foreign = self.assigned_by_other_plugins(device, own_resources) if own_resources else ()
        return next((each for each in foreign if each.pod != starting_pod), None)

    def is_listed(self, pod: Pod) -> bool:
        """Whether ``pod`` is anywhere in this reading; a pod of the same name and unknown uid counts as the same."""
        return any(_may_be_same_pod(each.pod, pod) for each in (*self.assignments, *self.checkpoint_only))

    def proves_absent(self, pod: Pod) -> bool:
        """Whether ``pod`` is missing from this reading, and that means something."""
        doubted = any(_may_be_same_pod(each, pod) for each in self.not_yet_listed)
        return self.trust is Trust.TRUSTED and not doubted and not self.is_listed(pod)

    def may_start_container(self, pod: Pod) -> bool:
        """Whether a container of ``pod`` may yet start on a device: the pod is listed, and not as one that is spent.

        That it is spent proves nothing against its processes: only a pod that is not listed is absent.
        """
        named = {each.pod for each in (*self.assignments, *self.checkpoint_only)}
        return any(_may_be_same_pod(each, pod) for each in named - self.without_devices)


def _owner_key(each: Assignment | Share) -> tuple[Pod, str, str]:
    return (each.pod, each.container, each.resource)


def _may_be_same_pod(one: Pod, other: Pod) -> bool:
    same_name = (one.namespace, one.name) == (other.namespace, other.name)
    return same_name and (one.uid is None or other.uid is None or one.uid == other.uid)


_MIN_READING_INTERVAL = 0.2
"""Seconds between two readings that count as two: a pod that flickers must not be absent twice in one flicker."""


@dataclass(frozen=True, slots=True)
class PodAbsence:
    """In how many readings in a row a pod was proved absent. Those that prove nothing neither count nor reset, and those
    that follow each other at once are one.
    """

    times: int = 0
    since: float | None = None
    last: float = 0.0

    def with_reading(self, reading: KubeletReading, pod: Pod) -> PodAbsence:
        """The absence once ``reading`` is taken into account."""
        if reading.is_listed(pod):
            return PodAbsence()
        if not reading.proves_absent(pod) or (self.times and reading.started_at - self.last < _MIN_READING_INTERVAL):
            return self
        since = max(reading.started_at, reading.finished_at) if self.since is None else self.since
        return PodAbsence(self.times + 1, since, reading.started_at)

    @property
    def proved(self) -> bool:
        """Absent twice: the pod is no longer the kubelet's."""
        return self.times >= 2


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process, told apart from a later one of the same PID by its start time.

    Attributes:
        started: start time in clock ticks since boot (``/proc/PID/stat`` field 22).
        container: the container cgroup it lives in (or the marker's container name), for grouping only.
    """

    pid: int
    started: int
    container: str = ""

    @property
    def identity(self) -> tuple[int, int]:
        """PID and start time: what makes it this process and no other."""
        return (self.pid, self.started)


def starting_container(listed: str, init: Collection[str], starts: Mapping[str, int]) -> str:
    """Return the container of a pod that most likely starts next on a device that several of its containers have.

    Init containers run before the others, and PodResources never lists them. Which of them restarts cannot be told before
    it has; :func:`started_container` tells afterwards.

    Args:
        listed: the container that PodResources names.
        init: the init containers that have the device, by the checkpoint.
        starts: how often each container of the pod was started.
    """
    waiting = sorted(each for each in init if not starts.get(each))
    return waiting[0] if waiting and not starts.get(listed) else listed


def started_container(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Return the one container that was started between two counts of a pod's starts; None when that is not certain."""
    found = [container for container, starts in after.items() if starts > before.get(container, 0)]
    return found[0] if len(found) == 1 else None


def exclude_baseline(processes: Iterable[Process], baseline: Iterable[Process]) -> tuple[Process, ...]:
    """The processes of a pod that did not stand there before its first grant (the sandbox did)."""
    known = {process.identity for process in baseline}
    return tuple(sorted(process for process in processes if process.identity not in known))


def presumed_sandbox(processes: Iterable[Process], *, held: bool) -> tuple[Process, ...]:
    """For a pod that was there before us: its oldest process, if that is alone in its container.

    The sandbox is made before any container, so nothing of a tenant's is older. Some runtimes keep none: a process that
    is not older than every other one, or that is all there is while somebody holds the device, is not taken for one.
    """
    everything = sorted(processes, key=lambda process: (process.started, process.pid))
    if not everything:
        return ()
    oldest, others = everything[0], everything[1:]
    if any(each.container == oldest.container or each.started == oldest.started for each in others):
        return ()
    return () if held and not others else (oldest,)
