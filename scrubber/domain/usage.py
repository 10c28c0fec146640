"""Classifies the use of a device: granted, assigned by the kubelet without a hand-over, or unauthorized."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from scrubber.domain.assignment import Claim, KubeletReading, Trust
from scrubber.domain.record import Grant

__all__ = ["MAX_UNDETECTED_SECONDS", "UseKind", "classify_use", "may_be_killed", "may_hold_undetected"]

MAX_UNDETECTED_SECONDS = 1.0
"""Maximum seconds between two checks of a device's users. Shorter use can go undetected; certificates state this."""


class UseKind(StrEnum):
    """How a process came to use a device."""

    GRANTED = "granted"
    """Its pod was granted the device, and no scrub has shown yet that the pod is over."""
    STARTED_WITHOUT_HAND_OVER = "start-without-handover"
    """The kubelet assigned the device to its pod and started the pod without a hand-over."""
    UNAUTHORIZED = "unauthorized-process"
    """Neither a grant nor an assignment by the kubelet gives the device to its pod."""
    VALIDATION = "validation"
    """A program of the node's infrastructure uses the device, which makes it dirty."""
    ADMIN_ACCESS = "admin-access"
    """Its pod has a claim with admin access to the device, which is no use by a tenant."""
    UNDETERMINED = "undetermined"
    """The device was granted to a pod that no source names, or the kubelet has not listed this pod yet."""


# See docs/decisions/0020-unauthorized-use.md.
def classify_use(
    uid: str | None,
    device: str,
    grants: Iterable[Grant],
    reading: KubeletReading,
    *,
    admin_claims: Iterable[Claim] = (),
) -> UseKind:
    """Classify the use of ``device`` by a process of pod ``uid`` (None: of no pod).

    Args:
        grants: the open grants of the device.
        reading: the newest reading; its entries count even when it is not trusted.
        admin_claims: the claims with admin access to the device.
    """
    open_grants = tuple(grants)
    if uid is not None and any(_is_tenant(uid, grant, reading) for grant in open_grants):
        return UseKind.GRANTED
    if uid is not None and any(_is_pod_of(uid, claim, reading) for claim in admin_claims):
        return UseKind.ADMIN_ACCESS
    if any(not grant.pods or any(pod.uid is None for pod in grant.pods) for grant in open_grants):
        return UseKind.UNDETERMINED
    if not open_grants and _is_not_yet_listed(uid, reading):
        return UseKind.UNDETERMINED
    return (
        UseKind.STARTED_WITHOUT_HAND_OVER
        if uid is not None and _assigned(uid, device, reading)
        else UseKind.UNAUTHORIZED
    )


def may_be_killed(
    uid: str | None,
    device: str,
    grants: Iterable[Grant],
    reading: KubeletReading,
    *,
    admin_claims: Iterable[Claim] = (),
) -> bool:
    """Whether an unauthorized process may be killed where the policy demands it.

    Only a pod's process, and only according to a trusted list. A process of the node itself is left to an operator, and
    so is a process of a pod that may have the device under an ID that no plugin has mapped.
    """
    if uid is None or reading.trust is not Trust.TRUSTED or _is_not_yet_listed(uid, reading):
        return False
    if any(pod.uid in (uid, None) for pod in reading.with_unmapped_ids):
        return False
    return classify_use(uid, device, grants, reading, admin_claims=admin_claims) is UseKind.UNAUTHORIZED


# See docs/decisions/0017-budgeted-process-walk.md.
def may_hold_undetected(
    uid: str | None, device: str, grants: Iterable[Grant], reading: KubeletReading, *, confined: bool
) -> bool:
    """Whether a process of pod ``uid`` that could not be inspected blocks the scrub of the device.

    It does not block if it is confined and, according to a trusted list, its pod was never assigned the device. That
    does not prove that it does not hold the device, and the certificate states this. But otherwise any pod could keep
    every device of its node out of use by being slow to inspect. A descriptor alone reveals nothing of what was on the
    device, and using it opens a context, which the driver lists.

    Args:
        confined: as :attr:`~scrubber.domain.telemetry.UninspectedProcess.confined`.
    """
    if uid is None or not confined or reading.trust is not Trust.TRUSTED or _is_not_yet_listed(uid, reading):
        return True
    if any(pod.uid in (uid, None) for pod in reading.with_unmapped_ids):
        return True
    return classify_use(uid, device, grants, reading) is not UseKind.UNAUTHORIZED


def _is_tenant(uid: str, grant: Grant, reading: KubeletReading) -> bool:
    """Whether pod ``uid`` has the device by ``grant``; a further pod of a prepared claim does as soon as it is listed."""
    if any(pod.uid == uid for pod in grant.pods):
        return True
    return grant.claim is not None and grant.claim.is_prepared and _is_pod_of(uid, grant.claim, reading)


def _is_pod_of(uid: str, claim: Claim, reading: KubeletReading) -> bool:
    return any(pod.uid == uid for pod in (*claim.pods, *reading.pods_of_claim(claim)))


def _is_not_yet_listed(uid: str | None, reading: KubeletReading) -> bool:
    """Whether the pod's absence from the reading proves nothing, because the kubelet may not have listed it yet."""
    return uid is not None and any(pod.uid in (uid, None) for pod in reading.not_yet_listed)


def _assigned(uid: str, device: str, reading: KubeletReading) -> bool:
    return any(each.pod.uid == uid for each in reading.all_assignments(device))
