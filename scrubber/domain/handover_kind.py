"""The relation of a hand-over to the previous one, and the basis of a grant."""

from __future__ import annotations

from enum import StrEnum

from scrubber.domain.assignment import Assignment

__all__ = ["UNCONDITIONAL_BASES", "UNPROVEN_BASES", "Basis", "HandOverKind", "classify_hand_over"]


class HandOverKind(StrEnum):
    """How the next assignment relates to the previous one, from most to least trusted."""

    SAME_CONTAINER = "same-container"
    SAME_POD = "same-pod"
    SAME_TENANT = "same-tenant"
    OTHER_TENANT = "other-tenant"
    UNKNOWN = "unknown"


class Basis(StrEnum):
    """What a grant rests on: a certificate issued since the previous grant, or an exception to that rule."""

    CERTIFICATE = "certificate"
    SAME_CONTAINER = HandOverKind.SAME_CONTAINER.value
    """The policy allows this kind of hand-over on checks alone; likewise for the next two."""
    SAME_POD = HandOverKind.SAME_POD.value
    SAME_TENANT = HandOverKind.SAME_TENANT.value
    SHARED = "shared"
    """The pod joined a device that other pods of its tenant are using."""
    OBSERVE_MODE = "observe"
    """The policy refuses nothing."""
    BREAK_GLASS = "break-glass"
    """A break-glass override of an operator bypassed all checks."""
    ADOPTED = "adopted"
    """The container was already running, or started without a hand-over."""

    @property
    def exception(self) -> str | None:
        """The name of the exception in events, answers and JSON; None for a certificate."""
        return None if self is Basis.CERTIFICATE else self.value


UNCONDITIONAL_BASES = frozenset({Basis.OBSERVE_MODE, Basis.BREAK_GLASS})
"""Exceptions under which a device is handed over without any check."""
UNPROVEN_BASES = UNCONDITIONAL_BASES | {Basis.ADOPTED}
"""Exceptions of grants before which the device was not proved clean."""


def classify_hand_over(
    previous: Assignment | None,
    next_assignment: Assignment | None,
    *,
    allocated_since: bool,
    container_count: int,
    init_containers_known: bool = True,
) -> HandOverKind:
    """Return the kind of a hand-over.

    A recreated StatefulSet pod has the name of its predecessor: without equal UIDs nothing is the same pod.

    Args:
        previous: the assignment of the last grant; None when there was none, or its owner is unknown.
        next_assignment: the current assignment according to the kubelet's sources; None when they do not agree on one
            pod.
        allocated_since: whether the device was allocated again since the last grant (True when not known).
        container_count: how many containers of the next pod have the device.
        init_containers_known: whether ordinary init containers, which had the device before, would be included.
    """
    if previous is None or next_assignment is None:
        return HandOverKind.UNKNOWN
    if previous.pod.uid is not None and previous.pod.uid == next_assignment.pod.uid:
        alone = container_count == 1 and init_containers_known
        if previous.container == next_assignment.container and alone and not allocated_since:
            return HandOverKind.SAME_CONTAINER
        return HandOverKind.SAME_POD
    if previous.pod.tenant == next_assignment.pod.tenant:
        return HandOverKind.SAME_TENANT
    return HandOverKind.OTHER_TENANT
