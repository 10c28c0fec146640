"""Whose use of a device it is: by a grant, by an assignment that nobody asked us about, or by nobody's leave."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from scrubber.domain.assignment import KubeletReading, Trust
from scrubber.domain.record import Grant

__all__ = ["MAX_UNDETECTED_SECONDS", "UseKind", "classify_use", "may_be_killed", "may_hold_undetected"]

MAX_UNDETECTED_SECONDS = 1.0
"""Seconds between two looks at who uses a device, at most. A shorter use can go unseen; certificates say so."""


class UseKind(StrEnum):
    """How the use of a device by one process came about."""

    GRANTED = "granted"
    """Its pod was granted the device, and no scrub has shown yet that the pod is over."""
    STARTED_WITHOUT_HAND_OVER = "unannounced"
    """The kubelet gave its pod the device, and started it without asking."""
    UNAUTHORIZED = "stranger"
    """Nobody gave it the device."""
    UNDETERMINED = "untellable"
    """The device was granted to somebody whom no witness names, or the kubelet has not come to this pod yet."""


def classify_use(uid: str | None, device: str, grants: Iterable[Grant], reading: KubeletReading) -> UseKind:
    """What a process of pod ``uid`` (None: of no pod) has ``device`` by.

    Args:
        grants: those of the device that are still open.
        reading: the newest; what it lists counts, whatever its silence is worth.
    """
    open_grants = tuple(grants)
    if uid is not None and any(grant.pod is not None and grant.pod.uid == uid for grant in open_grants):
        return UseKind.GRANTED
    if any(grant.pod is None or grant.pod.uid is None for grant in open_grants):
        return UseKind.UNDETERMINED
    if not open_grants and _is_not_yet_listed(uid, reading):
        return UseKind.UNDETERMINED
    return (
        UseKind.STARTED_WITHOUT_HAND_OVER
        if uid is not None and _assigned(uid, device, reading)
        else UseKind.UNAUTHORIZED
    )


def may_be_killed(uid: str | None, device: str, grants: Iterable[Grant], reading: KubeletReading) -> bool:
    """Whether a stranger's process may be ended where the policy says so.

    Only a pod's process, and only by a list that is believed. A process of the node itself is a person's to judge, and so
    is that of a pod which may have the device under an id that nobody has explained.
    """
    if uid is None or reading.trust is not Trust.TRUSTED or _is_not_yet_listed(uid, reading):
        return False
    if any(pod.uid in (uid, None) for pod in reading.with_unmapped_ids):
        return False
    return classify_use(uid, device, grants, reading) is UseKind.UNAUTHORIZED


def may_hold_undetected(
    uid: str | None, device: str, grants: Iterable[Grant], reading: KubeletReading, *, confined: bool
) -> bool:
    """Whether a process of pod ``uid`` that could not be looked through keeps the device from being scrubbed.

    It does not if it is confined, and its pod was never given the device, by a list that is trusted. That is no proof that
    it does not hold the device, and the certificate says so. But otherwise any pod could keep every device of its node out
    of use, by being slow to look through. A descriptor alone shows nothing of what was on the device, and to use it opens a
    context, which the driver lists.

    Args:
        confined: as :attr:`~scrubber.domain.telemetry.UninspectedProcess.confined`.
    """
    if uid is None or not confined or reading.trust is not Trust.TRUSTED or _is_not_yet_listed(uid, reading):
        return True
    if any(pod.uid in (uid, None) for pod in reading.with_unmapped_ids):
        return True
    return classify_use(uid, device, grants, reading) is not UseKind.UNAUTHORIZED


def _is_not_yet_listed(uid: str | None, reading: KubeletReading) -> bool:
    """Whether that the reading does not list the pod says nothing, because the kubelet may not have come to it yet."""
    return uid is not None and any(pod.uid in (uid, None) for pod in reading.not_yet_listed)


def _assigned(uid: str, device: str, reading: KubeletReading) -> bool:
    return any(each.pod.uid == uid for each in reading.all_assignments(device))
