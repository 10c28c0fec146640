"""Decides which pods may run on a shared device at the same time.

Guarantees: two tenants are never on one device, and no pod starts where another tenant's data may remain. A pod may
join a shared device only while every grant since the device was last proved clean went, by a certificate or by joining,
to pods of the one tenant that requests it: then only that tenant's own data can be on it. Nothing is cleared for a pod
that joins; the device is scrubbed when the last pod has left it.

Because other pods of the tenant leave their data there, the memory of a device that was joined no longer belongs to the
last grant alone: no exception of the policy (a restart of the same container on checks) applies to it before it is
scrubbed. While other pods are on it, a restart is handled as another join; once none is, a restart waits for the scrub
like any other start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.assignment import Pod
from scrubber.domain.pods import PodState
from scrubber.domain.policy import SharingMode

__all__ = ["GrantedPod", "SharingAction", "SharingDecision", "decide_sharing"]


class SharingAction(StrEnum):
    ALONE = "alone"
    """No other pod is on the device: the ordinary path, with its certificate."""
    JOIN = "join"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class GrantedPod:
    """The pod of a grant that no scrub has closed yet.

    Attributes:
        pod: None where no source names it.
        is_share: whether the pod has a share of the device; False where that is not known.
        proved_clean: whether the device was proved clean before the grant, or before those of the pods that it joined.
    """

    pod: Pod | None
    state: PodState
    is_share: bool = False
    proved_clean: bool = True


@dataclass(frozen=True, slots=True)
class SharingDecision:
    """``reason`` is for the operator; ``pods`` is the number of pods on the device."""

    action: SharingAction
    reason: str = ""
    pods: int = 0


# See docs/decisions/0006-shared-devices.md.
def decide_sharing(
    starting_pod: Pod | None, granted_pods: Iterable[GrantedPod], sharing: SharingMode, *, device_is_sound: bool = True
) -> SharingDecision:
    """Decide whether ``starting_pod`` may start on a share of a device now.

    Args:
        starting_pod: the pod according to the kubelet, if certain; None, or a pod without a UID, may not share.
        granted_pods: the pods of all grants since the device was last proved clean, including those that are over.
            Grants of the starting pod itself are included only where it has several shares of the device.
        device_is_sound: the device is healthy, and used only by pods that it was granted to, as far as known.
    """
    everybody = tuple(granted_pods)
    living = [each for each in everybody if each.state is PodState.ALIVE]
    pods = len({each.pod for each in living})
    if not living:
        return SharingDecision(SharingAction.ALONE)

    def wait(reason: str) -> SharingDecision:
        return SharingDecision(SharingAction.WAIT, reason, pods)

    if starting_pod is None or starting_pod.uid is None:
        return wait("no source identifies the starting pod with certainty")
    unknown = [each for each in everybody if each.pod is None or each.pod.uid is None]
    if unknown:
        return wait("it was granted to a pod that could not be identified")
    others = sorted(
        {_name(each.pod) for each in everybody if each.pod is not None and each.pod.tenant != starting_pod.tenant}
    )
    if others:
        return wait(f"another tenant was granted it since it was last clean ({', '.join(others)})")
    if not all(each.proved_clean for each in everybody):
        return wait("it was granted before it was proved clean")
    if any(each.state is PodState.LEFTOVER for each in everybody):
        return wait("a pod that is gone left processes behind")
    whole = sorted({_name(each.pod) for each in living if each.pod is not None and not each.is_share})
    if whole:
        return wait(f"{', '.join(whole)} has the whole device, or had a share that the kubelet no longer lists")
    if sharing is SharingMode.NEVER and any(each.pod != starting_pod for each in living):
        return wait("the policy allows only one pod on a device (sharing: never)")
    if not device_is_sound:
        return wait("it is not healthy, or was used without a grant since it was last clean")
    return SharingDecision(
        SharingAction.JOIN, f"shared with {pods} pod{'' if pods == 1 else 's'} of the same tenant", pods
    )


def _name(pod: Pod | None) -> str:
    return "an unknown pod" if pod is None else f"{pod.namespace}/{pod.name}"
