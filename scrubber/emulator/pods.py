"""Pods as the API server stores them: the spec, and the status that a user reads with ``kubectl get pod -o yaml``.

Promise: an :class:`EmulatedPod` outlives the kubelet's process; only the kubelet and its pod workers write to it, and
:attr:`EmulatedPod.status` is a snapshot that never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from scrubber.emulator.changes import ChangeNotifier


class RestartPolicy(StrEnum):
    """When an ended container is started again."""

    NEVER = "Never"
    ON_FAILURE = "OnFailure"
    ALWAYS = "Always"

    def restarts_after(self, exit_code: int) -> bool:
        """Whether a container that ended with ``exit_code`` is to run again."""
        return self is RestartPolicy.ALWAYS or (self is RestartPolicy.ON_FAILURE and exit_code != 0)


class PodPhase(StrEnum):
    """Where a pod is in its life."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def terminal(self) -> bool:
        return self in (PodPhase.SUCCEEDED, PodPhase.FAILED)


class ContainerState(StrEnum):
    """What a container is doing now."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


class PodEnded(RuntimeError):
    """A pod has ended in another phase than the one waited for, and will never reach it."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A container: ``argv`` runs in the container's own directory; ``resources`` are limits by resource name.

    An init container with ``restart=ALWAYS`` is a sidecar, as in Kubernetes. ``claims`` are claims of the pod, each with
    all its requests (``gpu``) or with one of them (``gpu/main``).
    """

    name: str
    argv: Sequence[str]
    resources: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restart: RestartPolicy = RestartPolicy.NEVER
    claims: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError(f"container {self.name!r} has no command")
        for resource, count in self.resources.items():
            if count < 0:
                raise ValueError(
                    f"container {self.name!r} requests {count} of {resource}: the count must not be negative"
                )


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A ResourceClaim of a pod: its name in the pod, and the claim or the template that it comes from."""

    name: str
    claim: str = ""
    template: str = ""

    def __post_init__(self) -> None:
        if bool(self.claim) == bool(self.template):
            raise ValueError(f"claim {self.name!r} of a pod names either a claim or a template")


@dataclass(frozen=True, slots=True)
class PodSpec:
    """What a user requests.

    With ``leave_children`` the runtime does not kill the other processes of an ended container.
    """

    name: str
    namespace: str = "default"
    containers: Sequence[ContainerSpec] = ()
    init_containers: Sequence[ContainerSpec] = ()
    leave_children: bool = False
    claims: Sequence[PodClaim] = ()
    """Needs an API server."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.containers:
            raise ValueError(f"pod {self.namespace}/{self.name} has no containers")
        seen = [container.name for container in self.all_containers]
        if len(set(seen)) != len(seen):
            raise ValueError(f"pod {self.namespace}/{self.name} names a container twice: {', '.join(seen)}")
        known = {each.name for each in self.claims}
        for container in self.all_containers:
            unknown = {each.partition("/")[0] for each in container.claims} - known
            if unknown:
                raise ValueError(f"container {container.name!r} uses claims that the pod does not have: {unknown}")

    @property
    def all_containers(self) -> tuple[ContainerSpec, ...]:
        """All containers in the order of allocation and start: init containers first."""
        return (*self.init_containers, *self.containers)

    def is_ordinary_init(self, container: ContainerSpec) -> bool:
        """Whether ``container`` is an init container that runs to its end before the next, and not a sidecar."""
        return container in self.init_containers and container.restart is not RestartPolicy.ALWAYS

    def request(self, resource: str) -> int:
        """Return what the scheduler counts for ``resource``.

        That is the largest of these sums: each init container plus the sidecars before it, and all containers plus all
        sidecars.
        """
        sidecars, most = 0, 0
        for each in self.init_containers:
            most = max(most, sidecars + each.resources.get(resource, 0))
            sidecars += 0 if self.is_ordinary_init(each) else each.resources.get(resource, 0)
        return max(most, sidecars + sum(each.resources.get(resource, 0) for each in self.containers))


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """The status of one container in the pod's status."""

    name: str
    state: ContainerState
    reason: str
    message: str
    pid: int | None
    """PID of the container's first process, while it runs."""
    exit_code: int | None
    """Exit code of the last run, if there was one."""
    restarts: int
    devices: Mapping[str, tuple[str, ...]]
    """Resource → ids, sorted; assigned at admission."""
    device_health: Mapping[str, str]
    """Id → ``Healthy`` or ``Unhealthy`` (``ResourceHealthStatus``); an id that its plugin omits reads Healthy."""

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(sorted(each for ids in self.devices.values() for each in ids))


@dataclass(frozen=True, slots=True)
class PodStatus:
    """A snapshot of a pod."""

    phase: PodPhase
    reason: str
    message: str
    containers: Mapping[str, ContainerStatus]
    deleting: bool
    gone: bool
    """Whether the API server no longer has the pod."""


@dataclass(slots=True)
class ContainerRecord:
    """The mutable data behind :class:`ContainerStatus`; written by the pod's worker."""

    spec: ContainerSpec
    state: ContainerState = ContainerState.WAITING
    reason: str = "ContainerCreating"
    message: str = ""
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    run_seconds: float = 0.0
    ended_at: float = 0.0
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    device_health: dict[str, str] = field(default_factory=dict)

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(sorted(each for ids in self.devices.values() for each in ids))

    @property
    def has_terminated_before(self) -> bool:
        return self.exit_code is not None

    def set_waiting(self, reason: str, message: str) -> None:
        self.state, self.reason, self.message, self.pid = ContainerState.WAITING, reason, message, None

    def set_running(self, pid: int) -> None:
        if self.has_terminated_before:
            self.restarts += 1
        self.state, self.reason, self.message, self.pid = ContainerState.RUNNING, "", "", pid

    def set_terminated(self, exit_code: int, run_seconds: float, at: float) -> None:
        self.state, self.pid = ContainerState.TERMINATED, None
        self.reason, self.message = ("Completed" if exit_code == 0 else "Error"), ""
        self.exit_code, self.run_seconds, self.ended_at = exit_code, run_seconds, at

    def snapshot(self) -> ContainerStatus:
        return ContainerStatus(
            name=self.spec.name,
            state=self.state,
            reason=self.reason,
            message=self.message,
            pid=self.pid,
            exit_code=self.exit_code,
            restarts=self.restarts,
            devices=dict(self.devices),
            device_health=dict(self.device_health),
        )


@dataclass(slots=True)
class Deletion:
    """A deletion that the API server has recorded; ``deadline`` is set when the containers receive SIGTERM."""

    grace: float
    deadline: float | None = None


class EmulatedPod:
    """A pod on this node. Read :attr:`status`, :attr:`uid` and the paths; wait with :meth:`wait`."""

    def __init__(self, spec: PodSpec, uid: str, log_directory: Path, root: Path, changes: ChangeNotifier) -> None:
        self.spec = spec
        self.uid = uid
        self.log_directory = log_directory
        """``<namespace>_<name>_<uid>``; removed some time after the pod is gone."""
        self._root = root
        self._changes = changes
        self.phase = PodPhase.PENDING
        self.reason = ""
        self.message = ""
        self.records = {container.name: ContainerRecord(container) for container in spec.all_containers}
        self.admitted: bool | None = None
        """``None`` until the kubelet's main loop has decided."""
        self.active = False
        """Whether the kubelet counts the pod's devices as taken, and ``List`` contains it."""
        self.deletion: Deletion | None = None
        self.gone = False
        self.finished = False
        """Whether the kubelet has ended the pod, so that the API server may forget it."""
        self.item: Mapping[str, Any] | None = None
        """The pod as the API server last sent it; None without an API server."""

    def __repr__(self) -> str:
        return f"<Pod {self.full_name} {self.uid} {self.phase.value}>"

    @property
    def full_name(self) -> str:
        return f"{self.spec.namespace}/{self.spec.name}"

    def container_root(self, container: str) -> Path:
        """Return the directory that is the container's file system; it stays when the pod is gone."""
        return self._root / container

    def read_log(self, container: str, run: int | None = None) -> str:
        """Return what a container wrote to standard output and error, in its last run or in run number ``run``."""
        number = self.records[container].restarts if run is None else run
        path = self.log_directory / container / f"{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def claimed_resources(self, container: str) -> frozenset[str]:
        """Return the extended resources that a container gets from a claim, and not from a device plugin."""
        status = ((self.item or {}).get("status") or {}).get("extendedResourceClaimStatus") or {}
        mappings = status.get("requestMappings") or []
        return frozenset(each["resourceName"] for each in mappings if each["containerName"] == container)

    @property
    def resync_key(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Labels and annotations: the kubelet handles the pod again at once when they change."""
        metadata: Mapping[str, Any] = self.item["metadata"] if self.item else {}
        return metadata.get("labels") or {}, metadata.get("annotations") or {}

    @property
    def status(self) -> PodStatus:
        containers = {name: record.snapshot() for name, record in self.records.items()}
        return PodStatus(self.phase, self.reason, self.message, containers, self.deletion is not None, self.gone)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Every device assigned to any container of the pod, sorted."""
        return tuple(sorted({each for record in self.records.values() for each in record.device_ids}))

    async def wait(
        self, condition: PodPhase | Callable[[PodStatus], bool], timeout: float, goal: str = "the expected condition"
    ) -> PodStatus:
        """Wait at most ``timeout`` seconds for a phase, or until ``condition(status)`` holds; return that status.

        Args:
            goal: what a condition means, for the message.

        Raises:
            TimeoutError: it did not happen in time; the message contains the status.
            PodEnded: the pod has ended in another phase than the one waited for.
        """
        phase = condition if isinstance(condition, PodPhase) else None

        def holds(status: PodStatus) -> bool:
            return status.phase is condition if isinstance(condition, PodPhase) else condition(status)

        def settled() -> bool:
            return holds(self.status) or (phase is not None and (self.phase.terminal or self.gone))

        in_time = await self._changes.wait_until(settled, timeout)
        status = self.status
        if holds(status):
            return status
        if in_time:
            raise PodEnded(f"pod {self.full_name} will never be {phase}: {self.describe()}")
        missed = f"phase {phase}" if phase else goal
        raise TimeoutError(f"pod {self.full_name} did not reach {missed} within {timeout:g} s: {self.describe()}")

    def describe(self) -> str:
        """Return one line for an error message: the phase and the state of each container."""
        parts = [f"{self.phase.value} {self.reason} {self.message}".strip()]
        for name, record in self.records.items():
            parts.append(f"{name}: {record.state.value} {record.reason} {record.message}".strip())
        return "; ".join(parts)
