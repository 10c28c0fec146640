"""Assignments of devices to pods: the kubelet's lists, how far a reading can be trusted, and the processes of a pod."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Assignment",
    "Claim",
    "JobManager",
    "KubeletReading",
    "ListedClaim",
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
    """A pod. ``uid`` is None where no source gave it: such a pod is never "the same pod" as any other."""

    namespace: str
    name: str
    uid: str | None = None

    @property
    def tenant(self) -> str:
        """The namespace: the boundary within which pods may see each other's data.

        Pod labels are set by tenants and never widen trust.
        """
        return self.namespace


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of devices to one container of a pod.

    Attributes:
        resource: the kubelet's resource for it: a device plugin's resource, or the name of the DRA driver whose claim
            it is. Empty where no source gave it. It identifies the assigning plugin, not the owner, so two assignments
            that differ only in it are equal.
        shares: the kubelet's own IDs of what the container has, where these are shares of a device and not a whole one.
    """

    pod: Pod
    container: str
    devices: frozenset[str]
    resource: str = field(default="", compare=False)
    shares: frozenset[str] = field(default=frozenset(), compare=False)


class JobManager(StrEnum):
    """What starts a job, and how its end shows."""

    SLURM = "slurm"
    """Its epilog reports the end, or the prolog of the next job on the device; the job's cgroup proves it."""
    RUN = "run"
    """``scrubber run``: the job lasts as long as a process is in its cgroup."""


# See docs/decisions/0044-claims.md.
@dataclass(frozen=True, slots=True)
class Claim:
    """A resource claim, as the DRA driver of this node reported it: the grantee of grants on behalf of its pods.

    Attributes:
        driver: the name of the DRA driver.
        pods: the pods that may use its devices, by the driver's word and by the kubelet's list; each has a UID.
        listed_pods: those for which the kubelet itself listed the claim. Only their processes may be killed.
        released_at: wall-clock seconds of the first request to unprepare it; None while it is prepared.
        manager: set if it represents a job (:class:`scrubber.domain.jobs.Job`) and not for a resource claim: ``namespace`` is
            then the job's user, ``name`` its ID, and the only one of ``pods`` represents its processes.
    """

    uid: str
    namespace: str
    name: str
    driver: str
    pods: tuple[Pod, ...] = ()
    listed_pods: tuple[Pod, ...] = ()
    released_at: float | None = None
    manager: JobManager | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def title(self) -> str:
        """How a message names it: ``the claim team-a/training``, or ``job 4711 of alice``."""
        return f"the claim {self}" if self.manager is None else f"job {self.name} of {self.namespace}"

    @property
    def tenant(self) -> str:
        """The namespace, as of its pods: a claim belongs to one namespace."""
        return self.namespace

    @property
    def is_prepared(self) -> bool:
        """Whether its pods may start at any moment: no request to unprepare it has come."""
        return self.released_at is None


@dataclass(frozen=True, slots=True)
class ListedClaim:
    """A claim that the kubelet lists for a container of ``pod``; the list has no UID of the claim."""

    pod: Pod
    driver: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Share:
    """One container's shares of a device that several containers may have, by the kubelet's own IDs.

    Attributes:
        ids: the IDs of ``resource`` that mean ``device``; a container may have several.
    """

    pod: Pod
    container: str
    resource: str
    device: str
    ids: frozenset[str]


class Trust(StrEnum):
    """How far a reading of the kubelet's assignments can be trusted."""

    TRUSTED = "trusted"
    EMPTY_AFTER_RESTART = "empty-after-restart"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class KubeletReading:
    """What the kubelet's sources reported at one moment.

    Attributes:
        trust: only a trusted reading proves that a pod is absent.
        assignments: from PodResources; entries are merged per container and resource. Never includes ordinary init
            containers.
        checkpoint_only: from the checkpoint alone (init containers): reliable enough to wait for a pod, but not to
            trust it.
        started_at: monotonic seconds at the start of the reading: later changes may be missing from it.
        finished_at: monotonic seconds at the end of the reading: what it lacks was gone by then, and not necessarily
            earlier.
        untrusted_reason: message why the reading is not trusted; empty when it is.
        init_containers_known: whether the checkpoint could be read and confirms the list. Otherwise no ordinary init
            container is visible, so ``checkpoint_only`` may lack one, and :meth:`container_count` may count too few.
        without_devices: listed pods that have no device of any kind in the list or in the checkpoint. Kubelets before
            1.34 continue to list a pod that has ended, for as long as its object exists.
        caveats: messages about sources that were missing from the reading, whether it is trusted or not.
        not_yet_listed: pods that are not listed although the kubelet's checkpoint and log directories still have them,
            and that this kubelet has not listed since its start. It may not have processed them yet: their absence
            proves nothing.
        kubelet_instance: changes with every start of the kubelet, as far as its socket reveals it; empty when there was
            no answer.
        shares: the shares of those in ``assignments`` and ``checkpoint_only`` that have shares of devices and not whole
            devices.
        claims: the claims of DRA drivers that PodResources lists, of any device.
        has_kubelet: False on a node that has no kubelet according to the settings, so that nothing is listed.
        with_unmapped_ids: pods with a resource of a plugin or DRA driver whose IDs are not mapped. It may be any of our
            devices, until the plugin announces what its IDs mean.
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
    claims: tuple[ListedClaim, ...] = ()
    has_kubelet: bool = True
    # Every device is looked up in every reading, so a search would take time by the square of their number.
    _listed: Mapping[str, tuple[Assignment, ...]] = field(init=False, repr=False, compare=False)
    _hinted: Mapping[str, tuple[Assignment, ...]] = field(init=False, repr=False, compare=False)
    _pods: frozenset[Pod] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_listed", _by_device(self.assignments))
        object.__setattr__(self, "_hinted", _by_device(self.checkpoint_only))
        object.__setattr__(self, "_pods", frozenset(each.pod for each in (*self.assignments, *self.checkpoint_only)))

    def listed_assignments(self, device: str, share: frozenset[str] = frozenset()) -> tuple[Assignment, ...]:
        """All assignments that PodResources lists for ``device``; only those of ``share``, if given.

        Args:
            share: IDs of shares of the device; an assignment with any of them matches.
        """
        return self._with(self._listed, device, share)

    def all_assignments(self, device: str) -> tuple[Assignment, ...]:
        """All assignments of ``device`` that any source names, trusted or not."""
        return (*self._listed.get(device, ()), *self._hinted.get(device, ()))

    def assignment_of(
        self, device: str, share: frozenset[str] = frozenset(), *, resource: str = ""
    ) -> Assignment | None:
        """The one assignment of ``device``; None when several pods, no pod, or an unreadable list leave it uncertain.

        A checkpoint that names another pod counts as a second pod: one of its init containers may be what starts.

        If several containers of one pod have it, the result is the first by name; :meth:`container_count` returns their
        number.

        Args:
            share: consider only containers that have one of these shares.
            resource: preferred resource, if the pod has the device under several.
        """
        found = self.listed_assignments(device, share)
        pods = {each.pod for each in (*found, *self._with(self._hinted, device, share))}
        if self.trust is Trust.UNREADABLE or not found or len(pods) != 1:
            return None
        return min(found, key=lambda each: (each.resource != resource, each.container, each.resource))

    def uncertainty_of(self, device: str, share: frozenset[str] = frozenset()) -> str:
        """Why :meth:`assignment_of` gives no pod with a UID, for the operator; empty when it does."""
        found = (*self.listed_assignments(device, share), *self._with(self._hinted, device, share))
        pods = sorted({each.pod for each in found}, key=lambda pod: (pod.namespace, pod.name, pod.uid or ""))
        if self.trust is Trust.UNREADABLE:
            return f"the kubelet's list could not be read: {self.untrusted_reason}"
        if not pods:
            return "the kubelet names no pod for the device"
        if len(pods) > 1:
            named = ", ".join(f"{pod.namespace}/{pod.name} ({pod.uid or 'no UID'})" for pod in pods)
            return f"the kubelet's list and checkpoint name several pods for the device: {named}"
        if pods[0].uid is None:
            name = f"{pods[0].namespace}_{pods[0].name}_UID"
            return (
                f"no directory of pod logs, or more than one, is named {name} with the UID in the kubelet's checkpoint"
            )
        return "" if self.listed_assignments(device, share) else "only the kubelet's checkpoint names its pod"

    def checkpoint_assignment(self, device: str, share: frozenset[str] = frozenset()) -> Assignment | None:
        """The checkpoint's assignment of ``device`` when PodResources has none; None unless it is one pod."""
        found = self._with(self._hinted, device, share)
        if self.listed_assignments(device, share):
            return None
        return found[0] if len({each.pod for each in found}) == 1 else None

    def container_count(self, device: str, share: frozenset[str] = frozenset()) -> int:
        """How many containers of a pod have ``device``, according to PodResources and the checkpoint.

        Only the checkpoint contains the ordinary init containers that had the device before.
        """
        everybody = (*self.listed_assignments(device, share), *self._with(self._hinted, device, share))
        return len({(each.pod, each.container) for each in everybody})

    def init_containers_of(self, pod: Pod, device: str) -> frozenset[str]:
        """Names of the containers of ``pod`` that have ``device`` only in the checkpoint: its init containers."""
        listed = {each.container for each in self.assignments if each.pod == pod}
        hinted = {each.container for each in self.checkpoint_only if each.pod == pod and device in each.devices}
        return frozenset(hinted - listed)

    def shares_of(self, pod: Pod, device: str) -> frozenset[str]:
        """The IDs of all shares of ``device`` that containers of ``pod`` have."""
        return frozenset(
            id_ for share in self.shares if (share.pod, share.device) == (pod, device) for id_ in share.ids
        )

    def pods_of_claim(self, claim: Claim) -> frozenset[Pod]:
        """The pods for which the kubelet lists ``claim``; it lists only one claim of a name at a time.

        The kubelet names no UID. Where its directories do not tell which of several pods of a name is listed, it is the only
        one of this name that the claim is reserved for.
        """
        listed = {
            each.pod
            for each in self.claims
            if (each.driver, each.namespace, each.name) == (claim.driver, claim.namespace, claim.name)
        }
        return frozenset(each if each.uid is not None else _only_reserved(each, claim) or each for each in listed)

    def _with(
        self, among: Mapping[str, tuple[Assignment, ...]], device: str, share: frozenset[str]
    ) -> tuple[Assignment, ...]:
        found = among.get(device, ())
        if not share:
            return found
        owners = {_owner_key(each) for each in self.shares if each.device == device and each.ids & share}
        return tuple(each for each in found if _owner_key(each) in owners)

    def assigned_by_other_plugins(self, device: str, own_resources: Collection[str]) -> tuple[Assignment, ...]:
        """Assignments of ``device`` made under another plugin's resource or by a DRA driver.

        Args:
            own_resources: the resources under which our plugin advertises devices.
        """
        return tuple(
            each for each in self.listed_assignments(device) if each.resource and each.resource not in own_resources
        )

    def second_owner(self, device: str, own_resources: Collection[str], starting_pod: Pod | None) -> Assignment | None:
        """The assignment of ``device`` by another plugin or driver to a pod other than ``starting_pod``.

        The device then has two owners.

        Args:
            own_resources: as in :meth:`assigned_by_other_plugins`; while none is known, no assignment counts as another
                plugin's.
        """
        foreign = self.assigned_by_other_plugins(device, own_resources) if own_resources else ()
        return next((each for each in foreign if each.pod != starting_pod), None)

    def is_listed(self, pod: Pod) -> bool:
        """Whether ``pod`` is anywhere in this reading; a pod of the same name and unknown UID counts as the same."""
        return pod in self._pods or any(_may_be_same_pod(each, pod) for each in self._pods)

    def proves_absent(self, pod: Pod) -> bool:
        """Whether ``pod`` is missing from this reading and its absence is conclusive."""
        doubted = any(_may_be_same_pod(each, pod) for each in self.not_yet_listed)
        return self.trust is Trust.TRUSTED and not doubted and not self.is_listed(pod)

    def may_start_container(self, pod: Pod) -> bool:
        """Whether a container of ``pod`` may still start on a device: the pod is listed and has devices.

        A listed pod without devices proves nothing about its processes: only a pod that is not listed is absent.
        """
        if pod in self._pods and pod not in self.without_devices:
            return True
        return any(_may_be_same_pod(each, pod) for each in self._pods - self.without_devices)


def _by_device(assignments: Iterable[Assignment]) -> Mapping[str, tuple[Assignment, ...]]:
    found: dict[str, list[Assignment]] = {}
    for each in assignments:
        for device in each.devices:
            found.setdefault(device, []).append(each)
    return {device: tuple(those) for device, those in found.items()}


def _only_reserved(pod: Pod, claim: Claim) -> Pod | None:
    named = [each for each in claim.pods if (each.namespace, each.name) == (pod.namespace, pod.name)]
    return named[0] if len(named) == 1 else None


def _owner_key(each: Assignment | Share) -> tuple[Pod, str, str]:
    return (each.pod, each.container, each.resource)


def _may_be_same_pod(one: Pod, other: Pod) -> bool:
    same_name = (one.namespace, one.name) == (other.namespace, other.name)
    return same_name and (one.uid is None or other.uid is None or one.uid == other.uid)


_MIN_READING_INTERVAL = 0.2
"""Minimum seconds between two readings that count as two: a momentarily missing pod must not count as absent twice."""


# See docs/decisions/0007-when-the-kubelets-list-is-trusted.md.
@dataclass(frozen=True, slots=True)
class PodAbsence:
    """In how many consecutive readings a pod was proved absent.

    Inconclusive readings neither count nor reset, and readings in immediate succession count as one.
    """

    times: int = 0
    since: float | None = None
    last: float = 0.0

    def with_reading(self, reading: KubeletReading, pod: Pod) -> PodAbsence:
        """The absence after ``reading``."""
        if reading.is_listed(pod):
            return PodAbsence()
        if not reading.proves_absent(pod) or (self.times and reading.started_at - self.last < _MIN_READING_INTERVAL):
            return self
        since = max(reading.started_at, reading.finished_at) if self.since is None else self.since
        return PodAbsence(self.times + 1, since, reading.started_at)

    @property
    def proved(self) -> bool:
        """Absent twice: the kubelet no longer lists the pod."""
        return self.times >= 2

    def is_proved_for(self, seconds: float, now: float) -> bool:
        """Whether the pod has been absent for ``seconds``, and that is proved; ``now``: monotonic seconds."""
        return self.proved and self.since is not None and now - self.since >= seconds


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process, distinguished from a later one with the same PID by its start time.

    Attributes:
        started: start time in clock ticks since boot (``/proc/PID/stat`` field 22).
        container: the process's container cgroup (or the marker's container name), for grouping only.
    """

    pid: int
    started: int
    container: str = ""

    @property
    def identity(self) -> tuple[int, int]:
        """PID and start time, which together identify the process."""
        return (self.pid, self.started)


def starting_container(listed: str, init: Collection[str], starts: Mapping[str, int]) -> str:
    """Return the container of a pod that most likely starts next on a device that several of its containers have.

    Init containers run before the others, and PodResources never lists them. Which of them restarts is unknown before
    it has; :func:`started_container` determines it afterwards.

    Args:
        listed: the container that PodResources names.
        init: the init containers that have the device, according to the checkpoint.
        starts: how often each container of the pod was started.
    """
    waiting = sorted(each for each in init if not starts.get(each))
    return waiting[0] if waiting and not starts.get(listed) else listed


def started_container(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Return the one container that was started between two counts of a pod's starts; None when that is not certain."""
    found = [container for container, starts in after.items() if starts > before.get(container, 0)]
    return found[0] if len(found) == 1 else None


def exclude_baseline(processes: Iterable[Process], baseline: Iterable[Process]) -> tuple[Process, ...]:
    """The processes of a pod that did not exist before its first grant, as the baseline (its sandbox) did."""
    known = {process.identity for process in baseline}
    return tuple(sorted(process for process in processes if process.identity not in known))


def presumed_sandbox(processes: Iterable[Process], *, held: bool) -> tuple[Process, ...]:
    """The presumed sandbox of a pod that is older than this service: its oldest process, if alone in its container.

    The sandbox is created before any container, so no process of a tenant is older. Some runtimes keep no sandbox
    process: a process that is not older than every other one, or the only process while the device is held, is not
    taken for the sandbox.
    """
    everything = sorted(processes, key=lambda process: (process.started, process.pid))
    if not everything:
        return ()
    oldest, others = everything[0], everything[1:]
    if any(each.container == oldest.container or each.started == oldest.started for each in others):
        return ()
    return () if held and not others else (oldest,)
