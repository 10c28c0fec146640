"""Decides the liveness of the pod of an earlier grant: alive, over, or gone with proved leftovers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.assignment import PodAbsence, Process, exclude_baseline

__all__ = [
    "PodLiveness",
    "PodState",
    "RemainingCgroups",
    "claim_pod_liveness",
    "has_ended",
    "job_liveness",
    "own_pod_liveness",
    "pod_liveness",
    "unreadable_pod_liveness",
]


class PodState(StrEnum):
    OVER = "over"
    """No process of the pod that may use the device remains, and none may be about to start."""
    ALIVE = "living"
    """A process of the pod exists or may be about to start; nothing is proved against it."""
    LEFTOVER = "leftover"
    """The pod is gone, and its remaining processes may be killed."""


@dataclass(frozen=True, slots=True)
class PodLiveness:
    """The liveness of a pod.

    Attributes:
        processes: the processes that keep the pod from being over.
        proof: why they are leftovers.
        unproven_processes: processes that also keep it from being over, without a proof against them yet.
        unreadable: the processes of a pod that is gone cannot be distinguished from each other, so all of them are
            killed.
        ended: the kernel proves it over, so the kubelet's list is not needed.
        in_other_containers: the starting pod has processes in containers other than the one that had the device last.
            They do not keep its earlier use from being over, and their mappings were not inspected.
    """

    state: PodState
    processes: tuple[Process, ...] = ()
    proof: str = ""
    unproven_processes: tuple[Process, ...] = ()
    unreadable: bool = False
    in_other_containers: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class RemainingCgroups:
    """The cgroups that are left of a pod.

    Attributes:
        pod: whether the pod's own cgroup exists. The kubelet removes it once it is done with the pod.
        containers: names of the cgroups of its containers, the sandbox included. A runtime removes each after the
            container's end.
    """

    pod: bool
    containers: frozenset[str] = frozenset()


# See docs/decisions/0008-when-a-pod-is-over.md.
def has_ended(
    remaining: RemainingCgroups, *, started: str, seen: Collection[str], sandbox: Collection[Process]
) -> bool:
    """Return whether a pod without processes is over although the kubelet may still list it.

    A grant permits one start. Once its container has run and no process of the pod is left, every further start of the
    pod needs another grant. Without a sandbox the pod may only be between two runs of a container, which is no release.

    Args:
        started: the container cgroup that was created after the grant; empty if that was not observed. The start may
            still be about to happen then.
        seen: names of container cgroups in which a process was seen.
        sandbox: processes that existed before the pod's first grant.
    """
    has_run = bool(started) and (started in seen or started not in remaining.containers)
    return has_run and (not remaining.pod or bool(sandbox))


# See docs/decisions/0044-claims.md.
def claim_pod_liveness(
    processes: Iterable[Process],
    absence: PodAbsence,
    remaining: RemainingCgroups | None,
    *,
    released_for: float | None,
    listed: bool,
    withdrawn_for: float | None = None,
    never_started: bool = False,
    named_by_kubelet: bool,
    seen: Collection[str],
    first_processes: Mapping[str, Process],
    now: float,
    leftover_grace_period: float,
) -> PodLiveness:
    """Return the liveness of a pod of a claim.

    While the claim is prepared, its pods count as alive, whatever they do: the kubelet may start a container of them at
    any moment. Afterwards no process is ignored, the sandbox included: without it no container can start.

    Args:
        processes: all processes of the pod.
        absence: in how many consecutive trusted readings the pod was absent.
        remaining: its cgroups; None where containers are not identified by cgroups.
        released_for: seconds since the claim was released; None while it is prepared.
        listed: whether a reading of the kubelet names it: then the kubelet released the claim after its containers ended.
        withdrawn_for: seconds for which the released claim has certainly had no CDI specification; None where that is not known.
        never_started: whether no container of it was ever started, so that its processes are its sandbox. It waits for the CDI
            specification; one that found it has started after the grace period at the latest.
        named_by_kubelet: whether the kubelet has ever listed the claim for this pod. Otherwise only the driver's word says
            that it is one of the claim's pods, and no process is killed for that.
        seen: names of container cgroups in which a process was seen.
        first_processes: the first process of each of its containers.
        now: monotonic seconds, the clock of ``absence``.
    """
    if released_for is None:
        return PodLiveness(PodState.ALIVE)
    if never_started and withdrawn_for is not None and withdrawn_for >= leftover_grace_period:
        return PodLiveness(PodState.OVER, ended=True)
    left = tuple(sorted(processes))
    if not left:
        about_to_start = remaining is not None and any(each not in seen for each in remaining.containers)
        removed = remaining is not None and not remaining.pod
        quiet = (listed or absence.proved) and not about_to_start
        over = removed or quiet or released_for >= leftover_grace_period
        return PodLiveness(PodState.OVER, ended=True) if over else PodLiveness(PodState.ALIVE)
    if not named_by_kubelet:
        return PodLiveness(PodState.ALIVE, left)
    if absence.is_proved_for(leftover_grace_period, now):
        return PodLiveness(PodState.LEFTOVER, left, f"its pod has been gone for over {leftover_grace_period:g} s")
    living = {process.identity for process in left}
    dead_firsts = all(
        each.container in first_processes and first_processes[each.container].identity not in living for each in left
    )
    if dead_firsts and released_for >= leftover_grace_period:
        proof = f"its claim was released over {leftover_grace_period:g} s ago, and the first process of its container is dead"
        return PodLiveness(PodState.LEFTOVER, left, proof)
    return PodLiveness(PodState.ALIVE, left)


# See docs/decisions/0048-jobs.md.
def job_liveness(processes: Iterable[Process], *, may_start_more: bool) -> PodLiveness:
    """Return the liveness of a job. Its processes are never leftovers: only they themselves, or an operator, end them.

    Args:
        processes: all processes of the job.
        may_start_more: whether its manager may start a process for it although it has none.
    """
    left = tuple(sorted(processes))
    if left or may_start_more:
        return PodLiveness(PodState.ALIVE, left)
    return PodLiveness(PodState.OVER, ended=True)


# See docs/decisions/0009-restarts-within-a-pod.md.
def own_pod_liveness(
    processes: Iterable[Process], *, sandbox: Iterable[Process], cgroups: Collection[str]
) -> PodLiveness:
    """Return the liveness of the starting pod's own earlier use of the device.

    The kubelet starts a container only when no earlier run of it is alive, so a pod's other containers are no evidence
    about the device: one that holds it is found as a holder. Only a container that had the device may still be exiting.

    Args:
        processes: all processes of the pod.
        sandbox: the processes of its sandbox.
        cgroups: names of the containers that had the device; empty where that is not known.
    """
    everything = tuple(sorted(processes))
    had = tuple(process for process in everything if process.container in cgroups)
    if had:
        return PodLiveness(PodState.ALIVE, had)
    return PodLiveness(PodState.OVER, in_other_containers=bool(exclude_baseline(everything, sandbox)))


# See docs/decisions/0010-unnamed-and-unreadable-pods.md.
def unreadable_pod_liveness(absence: PodAbsence, *, now: float, leftover_grace_period: float) -> PodLiveness:
    """Return the liveness of a pod with unreadable processes: alive, until its leftover grace period has passed.

    A pod that makes itself unreadable must not keep its device indefinitely that way.
    """
    if not absence.is_proved_for(leftover_grace_period, now):
        return PodLiveness(PodState.ALIVE)
    proof = f"its pod has been gone for over {leftover_grace_period:g} s, and its processes cannot be identified"
    return PodLiveness(PodState.LEFTOVER, proof=proof, unreadable=True)


# See docs/decisions/0008-when-a-pod-is-over.md.
def pod_liveness(
    processes: Iterable[Process],
    absence: PodAbsence,
    *,
    listed: bool,
    trusted: bool,
    sandbox: bool,
    baseline: Iterable[Process] = (),
    first_processes: Mapping[str, Process],
    now: float,
    grant_age: float,
    leftover_grace_period: float,
    unknown_pod_idle_period: float,
    ended: bool = False,
) -> PodLiveness:
    """Return the liveness of the pod of an earlier grant.

    Being replaced by a newer grant proves nothing: a pod that was force-deleted may rightfully run for its grace
    period.

    Args:
        processes: the pod's processes; without those that existed before its first grant, as long as the pod is in
            every trusted reading.
        absence: in how many consecutive trusted readings the pod was absent.
        listed: whether the newest reading lists it (not used for the starting pod: pass False).
        trusted: whether the newest reading proves absence.
        sandbox: whether its sandbox exists, or is not known. While the grant is younger than ``leftover_grace_period``,
            the runtime may still be about to start the container in it, also when the pod was force-deleted a moment
            ago.
        baseline: processes that existed before the pod's first grant: it is not over while they are alive, and the
            state of other containers proves nothing against them.
        first_processes: the first process of each of its containers.
        now: monotonic seconds, the clock of ``absence``.
        grant_age: seconds since the grant; without a trusted reading the container of a recent grant may be about to
            start.
        ended: result of :func:`has_ended` for a pod that has no process, sandbox included.
    """
    if ended:
        return PodLiveness(PodState.OVER, ended=True)
    left = tuple(processes)
    starting = (sandbox and grant_age < leftover_grace_period) or (not trusted and grant_age < unknown_pod_idle_period)
    if not left:
        return PodLiveness(PodState.ALIVE if listed or starting else PodState.OVER)
    if not absence.proved:
        return PodLiveness(PodState.ALIVE, left)
    if absence.is_proved_for(leftover_grace_period, now):
        return PodLiveness(PodState.LEFTOVER, left, f"its pod has been gone for over {leftover_grace_period:g} s")
    living = {process.identity for process in left}
    later = exclude_baseline(left, baseline)
    containers = {process.container for process in later}
    dead_firsts = all(name in first_processes and first_processes[name].identity not in living for name in containers)
    if later and dead_firsts and not starting:
        others = tuple(process for process in left if process not in later)
        proof = "its pod is gone and the first process of its container is dead"
        return PodLiveness(PodState.LEFTOVER, later, proof, others)
    return PodLiveness(PodState.ALIVE, left)
