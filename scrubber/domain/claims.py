"""Decides about resource claims: what keeps one from being prepared, and when its release is complete. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.assignment import Claim, KubeletReading, ListedClaim, Pod, Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import SharingMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene

__all__ = [
    "ClaimPodFacts",
    "PreparedClaimState",
    "ReleaseDecision",
    "ReleasingDevice",
    "claim_kind",
    "claim_problem",
    "decide_release",
    "is_prepared_for",
    "merge_pods",
    "prepared_claim_state",
    "replaced_claims",
    "shares_against_policy",
    "unprepared_claims",
]


def is_prepared_for(claim: str, devices: Collection[str], records: Iterable[DeviceRecord]) -> bool | None:
    """Return whether the claim with the UID ``claim`` is prepared with exactly ``devices``.

    None: it is prepared with other devices, which no kubelet asks for.
    """
    has = {record.device for record in records if any(each.uid == claim for each in record.prepared_claims)}
    if not has:
        return False
    return True if has == set(devices) else None


def replaced_claims(records: Iterable[DeviceRecord], reading: KubeletReading) -> frozenset[str]:
    """Return the UIDs of the prepared claims after which another claim of the same name was prepared.

    The kubelet prepares a claim only once it has forgotten every other one of the same name. If several are
    prepared, its list refers to the one that it names for a known pod. The times of the grants decide only if it names none,
    because the clock may have been set back in the meantime.
    """
    by_name: defaultdict[tuple[str, str, str], list[tuple[float, Claim]]] = defaultdict(list)
    for grant in (each for record in records for each in record.open_grants):
        if (claim := grant.claim) is not None and claim.is_prepared:
            by_name[claim.driver, claim.namespace, claim.name].append((grant.at, claim))
    replaced: set[str] = set()
    for found in by_name.values():
        listed = {claim.uid for _, claim in found if reading.pods_of_claim(claim).intersection(claim.pods)}
        newest = max(found, key=lambda each: each[0])[1].uid
        replaced |= {claim.uid for _, claim in found} - (listed or {newest})
    return frozenset(replaced)


def unprepared_claims(records: Iterable[DeviceRecord], reading: KubeletReading) -> frozenset[tuple[str, str, str]]:
    """Return driver, namespace and name of each claim that the kubelet lists with devices and that is not prepared.

    For a moment these are the claims whose call to prepare or to unprepare is in progress. If a claim stays so, the kubelet
    takes it for prepared: a pod joined it between two attempts to unprepare it, and the kubelet makes no call for that pod.

    The kubelet names no UID. If one claim of a name is prepared, which the kubelet may have forgotten, and another one was
    released, the name is returned: only the caller can find out which of them exists.
    """
    prepared: set[Claim] = set()
    granted: set[Claim] = set()
    for record in records:
        prepared.update((*record.prepared_claims, *record.admin_claims))
        granted.update(each.claim for each in (*record.open_grants, record.last_grant) if each and each.claim)
    uids = {each.uid for each in prepared}
    certain = {_name(each) for each in prepared} - {_name(each) for each in granted if each.uid not in uids}
    return frozenset({_name(each) for each in reading.claims} - certain)


def _name(claim: Claim | ListedClaim) -> tuple[str, str, str]:
    return (claim.driver, claim.namespace, claim.name)


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


class PreparedClaimState(StrEnum):
    """Whether a claim that was never unprepared may still be used."""

    LISTED = "listed"
    """The kubelet lists it for a pod, and so releases it when that pod ends."""
    UNPROVED = "unproved"
    """A pod of it may still use the devices, or start."""
    ABANDONED = "abandoned"
    """No pod of it is left or has started, and the kubelet starts none without another request to prepare it."""


@dataclass(frozen=True, slots=True)
class ClaimPodFacts:
    """What is known about a pod of a prepared claim. The defaults prove nothing, as for a pod that cannot be read.

    Attributes:
        has_processes: whether it may have a process, sandbox included.
        is_removed: whether it is proved that the kubelet no longer lists the pod, and the pod's own cgroup is gone.
        is_requested: whether the kubelet requests the claim for this pod right now, which it does before the sandbox.
        is_long_gone: whether it is proved that the kubelet has not listed the pod for the leftover grace period. What is left of
            it then is a leftover, which keeps the devices from being cleared but not the claim from being released.
    """

    has_processes: bool = True
    is_removed: bool = False
    is_requested: bool = False
    is_long_gone: bool = False

    @property
    def is_starting(self) -> bool:
        """Whether the pod starts only with the answer to the present request."""
        return self.is_requested and not self.has_processes

    @property
    def is_over(self) -> bool:
        return self.is_long_gone or self.is_starting or (self.is_removed and not self.has_processes)


# See docs/decisions/0044-claims.md.
def prepared_claim_state(
    claim: Claim,
    pods: Mapping[Pod, ClaimPodFacts],
    reading: KubeletReading,
    *,
    is_replaced: bool = False,
    same_devices: bool = False,
) -> PreparedClaimState:
    """Return whether a prepared ``claim`` may still be used, although its devices are requested again.

    A kubelet that lists a claim for no pod, or only for the pod for which it requests it, can start none on its devices without
    another request. Only the end of a job releases a job.

    Args:
        pods: what is known about the pods of the claim; a pod without an entry counts as alive.
        reading: the newest one; it must have begun after the devices were requested.
        is_replaced: whether a claim of the same name was prepared after it: the kubelet's list means that one.
        same_devices: whether the kubelet requests it with the devices that it is prepared with. For the requesting pod, the
            kubelet then lists an earlier answer, which the next one repeats; with other devices it would add the two up.
    """
    starting = {pod for pod, facts in pods.items() if same_devices and facts.is_starting}
    if reading.pods_of_claim(claim) - starting and not is_replaced:
        return PreparedClaimState.LISTED
    provable = reading.trust is Trust.TRUSTED and claim.manager is None and bool(claim.pods)
    over = provable and all(pods.get(pod, ClaimPodFacts()).is_over for pod in claim.pods)
    return PreparedClaimState.ABANDONED if over else PreparedClaimState.UNPROVED


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
