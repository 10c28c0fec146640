"""Where an earlier grant's pod stands: living, over, or gone with leftovers that are proved to be such."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.assignment import PodAbsence, Process, exclude_baseline

__all__ = ["PodLiveness", "PodState", "own_pod_liveness", "pod_liveness", "unreadable_pod_liveness"]


class PodState(StrEnum):
    OVER = "over"
    ALIVE = "living"
    """Somebody of the pod is there, or may be about to come; nothing is proved against it."""
    LEFTOVER = "leftover"
    """The pod is gone and what is left of it may be ended."""


@dataclass(frozen=True, slots=True)
class PodLiveness:
    """``processes`` are those that keep the pod from being over; ``proof`` says why they are leftovers.

    ``unproven_processes`` keep it from being over as well, and nothing is proved against them yet.

    ``unreadable``: the processes of a pod that is gone cannot be told one from another, so it is ended whole.

    ``in_other_containers``: the pod that is starting has processes in other containers than the one that had the device last. They
    do not keep its earlier use from being over, and what they have mapped was not looked at.
    """

    state: PodState
    processes: tuple[Process, ...] = ()
    proof: str = ""
    unproven_processes: tuple[Process, ...] = ()
    unreadable: bool = False
    in_other_containers: bool = False


def own_pod_liveness(
    processes: Iterable[Process], *, sandbox: Iterable[Process], cgroups: Collection[str]
) -> PodLiveness:
    """Where the earlier use of a device by the very pod that is starting on it stands.

    The kubelet starts a container only when no earlier run of it lives, so a pod's other containers say nothing about the
    device: one that holds it is found as a holder. Only a container that had it may still be ending.

    Args:
        processes: all of the pod.
        sandbox: those among them that are its sandbox.
        cgroups: names of the containers that had the device; empty where that is not known.
    """
    everything = tuple(sorted(processes))
    had = tuple(process for process in everything if process.container in cgroups)
    if had:
        return PodLiveness(PodState.ALIVE, had)
    return PodLiveness(PodState.OVER, in_other_containers=bool(exclude_baseline(everything, sandbox)))


def unreadable_pod_liveness(absence: PodAbsence, *, now: float, leftover_grace_period: float) -> PodLiveness:
    """Where a pod stands whose processes cannot be told: living, until it has been gone for the dying grace.

    A pod that makes itself unreadable must not keep its device for ever by that.
    """
    if not absence.proved or absence.since is None or now - absence.since < leftover_grace_period:
        return PodLiveness(PodState.ALIVE)
    proof = (
        f"its pod has been gone for over {leftover_grace_period:g} s, and its processes cannot be told one from another"
    )
    return PodLiveness(PodState.LEFTOVER, proof=proof, unreadable=True)


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
) -> PodLiveness:
    """Where the pod of an earlier grant stands.

    Args:
        processes: those of the pod; without those that stood there before its first grant, as long as no trusted reading
            lacks the pod.
        absence: in how many trusted readings in a row the pod was absent.
        listed: whether the newest reading lists it (never asked of the pod that is starting now: pass False).
        trusted: whether the newest reading proves absence.
        sandbox: whether its sandbox stands, or is not known. While the grant is younger than ``leftover_grace_period``, the runtime
            may still be about to start the container in it, also when the pod was deleted by force a moment ago.
        baseline: those that stood there before the pod's first grant: it is not over while they live, and nothing is
            proved against them by what became of other containers.
        first_processes: the first process of each of its containers.
        now: monotonic seconds, the clock of ``absence``.
        grant_age: seconds since the grant; without a trusted reading a young grant's container may be about to start.

    Being superseded proves nothing: a pod that was deleted by force lives on rightfully for its grace.
    """
    left = tuple(processes)
    starting = (sandbox and grant_age < leftover_grace_period) or (not trusted and grant_age < unknown_pod_idle_period)
    if not left:
        return PodLiveness(PodState.ALIVE if listed or starting else PodState.OVER)
    if not absence.proved or absence.since is None:
        return PodLiveness(PodState.ALIVE, left)
    if now - absence.since >= leftover_grace_period:
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
