"""Decides about resource claims: what keeps one from being prepared, and when its release is complete. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.codes import ErrorCode
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import SharingMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene

__all__ = [
    "ReleaseDecision",
    "ReleasingDevice",
    "claim_kind",
    "claim_problem",
    "decide_release",
    "is_prepared_for",
    "merge_pods",
    "shares_against_policy",
]


def is_prepared_for(claim: str, devices: Collection[str], records: Iterable[DeviceRecord]) -> bool | None:
    """Return whether the claim with the UID ``claim`` is prepared with exactly ``devices``.

    None: it is prepared with other devices, which no kubelet asks for.
    """
    has = {record.device for record in records if any(each.uid == claim for each in record.prepared_claims)}
    if not has:
        return False
    return True if has == set(devices) else None


def claim_problem(
    claim: Claim,
    record: DeviceRecord,
    *,
    plugin_resources: Collection[str],
    sharing: SharingMode,
    extended_resources: Collection[str] = (),
    node_resources: Collection[str] = (),
) -> ErrorCode | None:
    """Return what keeps the device of ``record`` from being prepared for ``claim``; None when nothing does.

    Args:
        plugin_resources: the resources under which a device plugin advertises the device.
        sharing: of the device's policy.
        extended_resources: for which the scheduler created the claim.
        node_resources: the resources under which a device plugin advertises any device of the node. The scheduler takes one
            of them from DRA if the plugin has no healthy device left, and both would seem to have devices that only one has.
    """
    if any(each.uid != claim.uid for each in record.prepared_claims):
        return ErrorCode.PREPARED_FOR_CLAIM
    if plugin_resources:
        return ErrorCode.ADVERTISED_BY_PLUGIN
    if not set(node_resources).isdisjoint(extended_resources):
        return ErrorCode.RESOURCE_OF_PLUGIN
    if sharing is SharingMode.NEVER and len(claim.pods) > 1:
        return ErrorCode.CLAIM_SHARED
    return None


def claim_kind(record: DeviceRecord, tenant: str) -> HandOverKind:
    """Return how a grant to a claim of ``tenant`` relates to the last grant. It is never the same pod or container."""
    before = record.last_grant.tenant if record.exclusive_use and record.last_grant is not None else None
    if before is None:
        return HandOverKind.UNKNOWN
    return HandOverKind.SAME_TENANT if before == tenant else HandOverKind.OTHER_TENANT


def merge_pods(claim: Claim, pods: Iterable[Pod], *, over: Collection[Pod] = ()) -> tuple[Pod, ...]:
    """Return the pods of ``claim`` after a report that names ``pods``.

    A pod that the report lacks is dropped only if it is ``over``: its process may still run. A claim never loses its last
    pod.
    """
    reported = tuple(dict.fromkeys(pods))
    kept = tuple(each for each in claim.pods if each in reported or each not in over)
    merged = (*kept, *(each for each in reported if each not in kept))
    return merged or claim.pods


def shares_against_policy(record: DeviceRecord, sharing: SharingMode) -> bool:
    """Whether several pods have the device by one prepared claim although the policy allows one pod at a time."""
    return (
        sharing is SharingMode.NEVER
        and record.hygiene is Hygiene.IN_USE
        and any(len(each.pods) > 1 for each in record.prepared_claims)
    )


@dataclass(frozen=True, slots=True)
class ReleasingDevice:
    """A device that still has an open grant of a claim that is to be released.

    Attributes:
        withheld: the code why no hand-over gets the device; empty while it is in service.
        observes: whether its policy observes, and so delays nothing.
    """

    record: DeviceRecord
    withheld: str = ""
    observes: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """Whether the release of a claim is complete.

    Attributes:
        waits_for: the devices that are still to be scrubbed; empty when it is complete.
        withheld: device and code of each device that is out of service instead of clean.
    """

    waits_for: tuple[str, ...] = ()
    withheld: tuple[tuple[str, str], ...] = ()

    @property
    def is_done(self) -> bool:
        return not self.waits_for


def decide_release(devices: Iterable[ReleasingDevice]) -> ReleaseDecision:
    """Return whether the request to unprepare a claim may be answered with success.

    The kubelet never asks again after a success, so each device must be clean by then, which closes its grant, or out of service.
    A device that is out of service keeps no pod from ending: the ledger keeps its grant, so that no hand-over gets it.
    """
    everything = sorted(devices, key=lambda each: each.record.device)
    return ReleaseDecision(
        tuple(each.record.device for each in everything if not each.withheld and not each.observes),
        tuple((each.record.device, each.withheld) for each in everything if each.withheld),
    )
