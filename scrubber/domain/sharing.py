"""Who may start on a device beside whom, while it is shared.

Promises: two tenants are never on one device, and nobody starts where another tenant's bytes may lie. A share is joined
only while every grant since the device was last proved clean went, by a certificate or by joining, to pods of the one
tenant that asks: then all that can lie on it is that tenant's own. Nothing is cleared for a joiner; the device is scrubbed
when the last pod has left it.

Because other pods of the tenant leave their bytes there, a device that was joined is no longer the last grant's alone: no
exception of the policy (a restart of the same container on checks) holds for it before it was scrubbed. While others are
on it a restart is one more joining; once nobody is, it waits for the scrub like everybody else.
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
    """Nobody is there: the ordinary path, with its certificate."""
    JOIN = "join"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class GrantedPod:
    """The pod of a grant that no scrub has closed yet.

    Attributes:
        pod: None where no witness says.
        is_share: whether what it has of the device is a share; False where that is not known.
        proved_clean: whether the device was proved clean before it, or before those whom it joined.
    """

    pod: Pod | None
    state: PodState
    is_share: bool = False
    proved_clean: bool = True


@dataclass(frozen=True, slots=True)
class SharingDecision:
    """``reason`` is for the operator; ``pods`` counts those that are on the device."""

    action: SharingAction
    reason: str = ""
    pods: int = 0


def decide_sharing(
    starting_pod: Pod | None, granted_pods: Iterable[GrantedPod], sharing: SharingMode, *, device_is_sound: bool = True
) -> SharingDecision:
    """Whether ``starting_pod`` may start on a share of a device now.

    Args:
        starting_pod: as the kubelet says for certain; None, or a pod without a UID, is nobody's neighbour.
        granted_pods: of all grants since the device was last proved clean, those whose pods are over included. Grants of
            the asking pod itself are among them only where it has several shares of the device.
        device_is_sound: the device is healthy, and in use by nobody but those to whom it was granted, as far as is known.
    """
    everybody = tuple(granted_pods)
    living = [each for each in everybody if each.state is PodState.ALIVE]
    pods = len({each.pod for each in living})
    if not living:
        return SharingDecision(SharingAction.ALONE)

    def wait(reason: str) -> SharingDecision:
        return SharingDecision(SharingAction.WAIT, reason, pods)

    if starting_pod is None or starting_pod.uid is None:
        return wait("no witness says for certain which pod is about to start")
    unknown = [each for each in everybody if each.pod is None or each.pod.uid is None]
    if unknown:
        return wait("it was granted to a pod that no witness names")
    others = sorted(
        {_name(each.pod) for each in everybody if each.pod is not None and each.pod.tenant != starting_pod.tenant}
    )
    if others:
        return wait(f"it went to another tenant since it was last clean ({', '.join(others)})")
    if not all(each.proved_clean for each in everybody):
        return wait("somebody had it before it was proved clean")
    if any(each.state is PodState.LEFTOVER for each in everybody):
        return wait("a pod that is gone has left processes behind")
    whole = sorted({_name(each.pod) for each in living if each.pod is not None and not each.is_share})
    if whole:
        return wait(f"{', '.join(whole)} has the whole of it, or had a share that the kubelet lists no longer")
    if sharing is SharingMode.NEVER and any(each.pod != starting_pod for each in living):
        return wait("the policy lets no two pods be on one device (sharing: never)")
    if not device_is_sound:
        return wait("it is not healthy, or was used without a grant since it was last clean")
    return SharingDecision(
        SharingAction.JOIN, f"shared with {pods} pod{'' if pods == 1 else 's'} of the same tenant", pods
    )


def _name(pod: Pod | None) -> str:
    return "an unknown pod" if pod is None else f"{pod.namespace}/{pod.name}"
