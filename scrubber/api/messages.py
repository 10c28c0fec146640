"""Conversion between values of the domain and the engine and protobuf messages.

Invariants: pure, complete in both directions, and never the cause of a failed response. Text from outside (a process
name in a finding) may be invalid UTF-8, which a message does not accept, so it is replaced. Missing values are left out
or empty.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from scrubber import __version__
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.agent_pause import AgentPause, LabelChange, PauseOffer, PauseReport, PauseState, PauseWay
from scrubber.domain.assignment import Claim, JobManager, Pod
from scrubber.domain.baseline import Baseline, baseline_facts
from scrubber.domain.device import Access, Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate, Evidence, Finding, PathKind, ScrubRecord, StepResult
from scrubber.domain.infrastructure import NamedHolder
from scrubber.domain.jobs import Job
from scrubber.domain.record import BreakGlass, Grant
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.statement import statement
from scrubber.domain.states import Cause, Hygiene
from scrubber.engine.views import (
    CertificateView,
    ClaimRelease,
    DeviceView,
    GrantedDevice,
    HandOverCall,
    NodeView,
    PodNotice,
    PrepareClaimCall,
    PreparedClaim,
    ScrubUpdate,
    ServiceView,
    StartJobCall,
    UnpreparedClaim,
)
from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow, HistoryEntry

__all__ = [
    "MAX_BREAK_GLASS_SECONDS",
    "MAX_REASON_CHARS",
    "MAX_WAIT_SECONDS",
    "DeviceMessages",
    "SnapshotKey",
    "audit_page_message",
    "certificate_message",
    "claim_certificate_message",
    "claim_list_message",
    "claim_release_message",
    "device_list_message",
    "device_message",
    "granted_message",
    "history_entry_message",
    "job_end_message",
    "parse_break_glass_seconds",
    "parse_claim_pods",
    "parse_claim_uid",
    "parse_hand_over_call",
    "parse_job",
    "parse_pause_report",
    "parse_prepare_claim_call",
    "parse_reason",
    "parse_resource_mapping",
    "parse_scrub_path",
    "parse_start_job_call",
    "parse_wait",
    "progress_message",
    "quarantine_message",
    "reset_plan_message",
    "scrub_message",
    "service_info_message",
    "signed_certificate_message",
    "snapshot_device_message",
    "snapshot_key",
    "snapshot_message",
]

_M = TypeVar("_M")

MAX_REASON_CHARS = 500
"""Limit of a reason in characters: it is kept in the audit log permanently."""
MAX_PLUGIN_NAME_CHARS = 320
"""Limit of a plugin's name in characters; the name of a resource is not longer."""
_MAX_OFFERS = 16
_MAX_CHANGES = 64
"""Limit of the changes of a pause of agents: they are kept in the ledger, and in an audit row."""
_MAX_CLAIM_DEVICES = 1024
_MAX_EXTENDED_RESOURCES = 128
_MAX_CLAIM_PODS = 256
"""Limit of Kubernetes: ``status.reservedFor`` has no more entries."""
_MAX_OBJECT_NAME = 253
"""Limit of Kubernetes for names, in characters; UIDs and namespaces are shorter."""
_MAX_LABEL_KEY = 317
_MAX_LABEL_VALUE = 63
"""Limits of Kubernetes, in characters."""
MAX_WAIT_SECONDS = 3600.0
"""Limit of the requested wait of a hand-over, in seconds."""
MAX_BREAK_GLASS_SECONDS = 7 * 24 * 3600.0
"""Limit of the requested duration of a break-glass override, in seconds; the policy may allow less."""


# -- requests ----------------------------------------------------------------------------------------------------------


def parse_hand_over_call(request: pb.HandOverRequest) -> HandOverCall:
    """Return the call for ``request``; the engine decides whether its ids are known.

    Raises:
        InvalidRequest: an invalid time, or an id in ``unreserved_ids`` that is not requested.
    """
    wait = parse_wait(request.wait_seconds, "wait_seconds")
    unseen = frozenset(request.unreserved_ids)
    unexpected = sorted(unseen - set(request.device_ids))
    if unexpected:
        raise InvalidRequest(
            f"unreserved_ids contains {', '.join(unexpected)}, which this request does not name in device_ids."
        )
    return HandOverCall(
        devices=tuple(request.device_ids),
        wait_seconds=wait or None,
        unreported_allocations=unseen,
        resource=request.resource,
    )


def parse_wait(seconds: float, name: str = "deadline_seconds") -> float:
    """Return how long the caller waits, in seconds; raises :class:`InvalidRequest` for an invalid time."""
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_WAIT_SECONDS:.0f}, not {seconds}.")
    return seconds


def parse_prepare_claim_call(request: pb.PrepareClaimRequest) -> PrepareClaimCall:
    """Return the call for ``request``; the engine decides whether its devices are known.

    Raises:
        InvalidRequest: an invalid time, a missing or invalid name, no pod, a pod of another namespace, or too many entries.
    """
    wait = parse_wait(request.deadline_seconds)
    pods = parse_claim_pods(request.pods)
    if not pods:
        raise InvalidRequest("The claim is reserved for no pod, so that no pod may use it.")
    claim = Claim(
        parse_claim_uid(request.claim.uid),
        _object_name(request.claim.namespace, "namespace of the claim"),
        _object_name(request.claim.name, "name of the claim"),
        _object_name(request.driver, "name of the driver"),
        pods,
    )
    if any(pod.namespace != claim.namespace for pod in pods):
        raise InvalidRequest("The claim is reserved for a pod of another namespace, which Kubernetes does not allow.")
    if len(request.devices) > _MAX_CLAIM_DEVICES:
        raise InvalidRequest(f"A claim has at most {_MAX_CLAIM_DEVICES} devices.")
    return PrepareClaimCall(
        claim,
        tuple(each.device_id for each in request.devices if not each.admin_access),
        tuple(each.device_id for each in request.devices if each.admin_access),
        wait or None,
        _extended_resources(request.extended_resources),
        restores=request.restores,
        withdrawn=request.withdrawn,
    )


def _extended_resources(names: Sequence[str]) -> frozenset[str]:
    if len(names) > _MAX_EXTENDED_RESOURCES:
        raise InvalidRequest(f"A claim is for at most {_MAX_EXTENDED_RESOURCES} extended resources.")
    if any(not 0 < len(name) <= MAX_PLUGIN_NAME_CHARS for name in names):
        raise InvalidRequest("The name of an extended resource is empty or too long.")
    return frozenset(names)


def parse_claim_uid(uid: str) -> str:
    """Return the UID of a claim; raises :class:`InvalidRequest` if it is missing or invalid, or names a job."""
    if ":" in uid:
        raise InvalidRequest("The UID of a claim contains no colon.")
    return _object_name(uid, "UID of the claim")


def parse_claim_pods(pods: Sequence[pb.ClaimPod]) -> tuple[Pod, ...]:
    """Return the pods, without duplicates; raises :class:`InvalidRequest` for a missing or invalid name, or too many."""
    if len(pods) > _MAX_CLAIM_PODS:
        raise InvalidRequest(f"A claim is reserved for at most {_MAX_CLAIM_PODS} pods.")
    found = (
        Pod(
            _object_name(each.namespace, "namespace of a pod"),
            _object_name(each.name, "name of a pod"),
            _object_name(each.uid, "UID of a pod"),
        )
        for each in pods
    )
    return tuple(dict.fromkeys(found))


def _object_name(name: str, what: str) -> str:
    if not name.strip() or len(name) > _MAX_OBJECT_NAME or not name.isprintable():
        raise InvalidRequest(f"The {what} must have 1 to {_MAX_OBJECT_NAME} printable characters.")
    return name


def parse_resource_mapping(request: pb.SetResourceMappingRequest) -> dict[str, str]:
    """Return id → device; raises :class:`InvalidRequest` for an id that is announced twice."""
    offers = {offer.id: offer.device_id for offer in request.mappings}
    if len(offers) != len(request.mappings):
        raise InvalidRequest(f"An id of {request.resource} is announced twice.")
    return offers


def parse_plugin_identity(name: str) -> str:
    """Return the identity of a plugin's process; empty if it states none."""
    return _object_name(name, "plugin's identity") if name else ""


def parse_scrub_path(name: str) -> PathKind:
    """Return the path named ``name``; raises :class:`InvalidRequest` for an unknown one."""
    try:
        return PathKind(name)
    except ValueError:
        raise InvalidRequest(f"Unknown path {name!r}; the paths are: {', '.join(PathKind)}.") from None


def parse_reason(
    request: pb.QuarantineRequest
    | pb.BreakGlassRequest
    | pb.ResetRequest
    | pb.AcceptBaselineRequest
    | pb.YieldNodeRequest
    | pb.ResumeNodeRequest
    | pb.SetYieldRequest,
) -> str:
    """Return the operator's reason, for the audit log; raises :class:`InvalidRequest` if it is missing or too long."""
    reason: str = request.reason.strip()
    if not reason:
        raise InvalidRequest("A reason is required: it is recorded in the audit log for other operators.")
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidRequest(
            f"The reason has {len(reason)} characters; the audit log accepts at most {MAX_REASON_CHARS}."
        )
    return reason


def parse_plugin_name(request: pb.SetYieldRequest) -> str:
    """Return how the plugin is named among requesters; raises :class:`InvalidRequest` if the name is missing or invalid."""
    name: str = request.plugin
    if not name.strip() or len(name) > MAX_PLUGIN_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(
            f"A plugin that requests a yield is named by 1 to {MAX_PLUGIN_NAME_CHARS} printable characters."
        )
    return f"plugin of {name}"


def parse_yield_reason(request: pb.SetYieldRequest) -> str:
    """Return the plugin's reason, empty if it requests nothing; raises :class:`InvalidRequest` if it is too long."""
    return parse_reason(request) if request.reason.strip() else ""


def parse_pause_report(request: pb.AgentPauseReport) -> PauseReport:
    """Return the plugin's report, without ways that this service does not know.

    Raises:
        InvalidRequest: an unknown state, or more or longer texts than a report of labels of a node has.
    """
    try:
        state = PauseState(request.state)
    except ValueError:
        raise InvalidRequest(f"Unknown state {request.state!r} of a pause of agents.") from None
    if len(request.offers) > _MAX_OFFERS or any(len(each.actions) > _MAX_CHANGES for each in request.offers):
        raise InvalidRequest(f"At most {_MAX_OFFERS} ways with {_MAX_CHANGES} actions each can be offered.")
    if len(request.changes) > _MAX_CHANGES:
        raise InvalidRequest(f"A pause of agents changes at most {_MAX_CHANGES} labels.")
    for each in request.changes:
        if not 0 < len(each.key) <= _MAX_LABEL_KEY or max(len(each.before), len(each.during)) > _MAX_LABEL_VALUE:
            raise InvalidRequest(f"{each.key[:_MAX_LABEL_KEY]!r} is no label of a node with a valid value.")
    ways = set(PauseWay) - {PauseWay.BACKEND}
    return PauseReport(
        offers=tuple(
            PauseOffer(PauseWay(each.way), tuple(action[:MAX_REASON_CHARS] for action in each.actions))
            for each in request.offers
            if each.way in ways
        ),
        pause=request.pause_id,
        state=state,
        changes=tuple(
            LabelChange(each.key, each.before if each.HasField("before") else None, each.during)
            for each in request.changes
        ),
        message=request.message[:MAX_REASON_CHARS],
    )


def parse_break_glass_seconds(request: pb.BreakGlassRequest) -> float:
    """Return the duration of the override in seconds; 0 ends it. Raises :class:`InvalidRequest` for an invalid time."""
    seconds: float = request.duration_seconds
    if not 0 <= seconds <= MAX_BREAK_GLASS_SECONDS:  # also refuses NaN
        raise InvalidRequest(
            f"A break-glass override lasts between 0 (which ends it) and {MAX_BREAK_GLASS_SECONDS:.0f} "
            f"seconds, not {seconds}."
        )
    return seconds


# -- for the plugin ----------------------------------------------------------------------------------------------------

SnapshotKey = tuple[
    bool, str, bool, str, tuple[tuple[object, ...], ...], tuple[PodNotice, ...], AgentPause | None, bool
]
"""The part of a node's state that concerns the plugin; equal keys need no second snapshot."""


def snapshot_key(view: NodeView) -> SnapshotKey:
    """Return everything that affects the kubelet's list, the scheduler, notices to pod owners or containers; nothing else."""
    devices = tuple(
        (
            *(each.device, each.advertised, each.record.health, each.record.is_certified, _is_scrubbing(each)),
            *(_refusal(each), each.taints, each.binding),
        )
        for each in view.devices
    )
    pause = _plugins_pause(view.agent_pause)
    closed = view.driver_closed and pause is not None
    return (view.ready, view.epoch, view.refuses_envvar, view.yielded, devices, view.notices, pause, closed)


class DeviceMessages(Generic[_M]):
    """The messages of the devices, each made by ``make`` from its view and the driver's version.

    A device whose view is the same object as in the last call keeps its message.
    """

    def __init__(self, make: Callable[[DeviceView, str], _M]) -> None:
        self._make = make
        self._made: dict[tuple[int, str], tuple[DeviceView, _M]] = {}

    def of(self, view: NodeView) -> list[_M]:
        before, self._made = self._made, {}
        for each in view.devices:
            key = id(each), view.driver_version  # the id is still that of the same view, which is kept for this
            self._made[key] = before.get(key) or (each, self._make(each, view.driver_version))
        return [message for _, message in self._made.values()]


def snapshot_message(view: NodeView, devices: DeviceMessages[pb.SnapshotDevice] | None = None) -> pb.Snapshot:
    """Return all devices as the plugin sees them.

    Args:
        devices: keeps messages of :func:`snapshot_device_message` from one call to the next.
    """
    return pb.Snapshot(
        version=view.version,
        devices=(devices or DeviceMessages(snapshot_device_message)).of(view),
        ready=view.ready,
        epoch=view.epoch,
        envvar_refused=view.refuses_envvar,
        notices=[_notice(each) for each in view.notices],
        yielded=_utf8_text(view.yielded),
        agent_pause=(
            None
            if (pause := _plugins_pause(view.agent_pause)) is None
            else _pause_message(pause, driver_closed=view.driver_closed)
        ),
        service_version=__version__,
    )


def _plugins_pause(pause: AgentPause | None) -> AgentPause | None:
    """Return ``pause`` if the plugin carries it out."""
    return None if pause is None or pause.way is PauseWay.BACKEND else pause


def _pause_message(pause: AgentPause, message: str = "", *, driver_closed: bool = False) -> pb.AgentPause:
    return pb.AgentPause(
        id=pause.id,
        way=pause.way.value,
        device_ids=pause.devices,
        ending=pause.ending,
        changes=[pb.LabelChange(key=each.key, before=each.before, during=each.during) for each in pause.changes],
        since=pause.since,
        message=_utf8_text(message),
        driver_closed=driver_closed,
    )


def _notice(notice: PodNotice) -> pb.PodNotice:
    return pb.PodNotice(
        namespace=notice.pod.namespace,
        name=notice.pod.name,
        uid=notice.pod.uid or "",
        devices=notice.devices,
        reason=notice.reason,
        message=_utf8_text(notice.message),
        since=notice.since,
        evict=notice.evict,
    )


def snapshot_device_message(view: DeviceView, driver_version: str) -> pb.SnapshotDevice:
    """Return one device as the plugin sees it."""
    return pb.SnapshotDevice(
        id=view.device.id,
        index=view.device.index,
        advertised=view.advertised,
        certified=view.record.is_certified,
        scrubbing=_is_scrubbing(view),
        state=view.record.state,
        numa_node=view.device.numa_node,
        peers=sorted(view.device.peers),
        parent=view.device.parent or "",
        access=[_access(each) for each in view.device.access],
        refusal=_refusal(view),
        profile=view.device.profile or "",
        pci_address=dict(view.device.traits).get("pci_address", ""),
        withheld=bool(view.withheld),
        model=_utf8_text(view.device.model),
        memory_bytes=view.device.memory_bytes,
        driver_version=view.device.driver or driver_version,
        taints=[pb.DeviceTaint(reason=each.reason, evicts=each.evicts) for each in view.taints],
        binding=view.binding,
    )


def _refusal(view: DeviceView) -> str:
    """Return the device's message for a pod's status; empty while it is offered, in any state."""
    return "" if view.advertised else view.refusal_message


def _access(access: Access) -> pb.Access:
    return pb.Access(kind=access.kind.value, host_path=access.host_path, container_path=access.container_path)


def _is_scrubbing(view: DeviceView) -> bool:
    return view.record.hygiene is Hygiene.SCRUBBING


def granted_message(granted: GrantedDevice) -> pb.GrantedDevice:
    """Return one device of a granted hand-over."""
    return pb.GrantedDevice(
        id=granted.device,
        grant=granted.grant,
        path=granted.path.value,
        certificate_id=granted.certificate or "",
        exception=granted.basis.exception or "",
        hand_over_kind=granted.kind.value,
    )


def claim_certificate_message(certificate: Certificate) -> pb.ClaimCertificate:
    """Return the part of a certificate that says nothing about earlier tenants."""
    return pb.ClaimCertificate(
        id=certificate.id,
        digest=f"sha256:{hashlib.sha256(statement(certificate)).hexdigest()}",
        device_id=certificate.device,
        issued_at=certificate.issued_at,
        covered=certificate.covered,
        not_covered=certificate.not_covered,
    )


def claim_release_message(release: ClaimRelease) -> pb.UnprepareClaimResponse:
    """Return the progress of the release of a claim."""
    return pb.UnprepareClaimResponse(
        done=release.done,
        waits_for=_utf8_text(release.waits_for),
        withheld=[pb.WithheldDevice(device_id=each.device, cause_code=each.code) for each in release.withheld],
    )


def parse_start_job_call(request: pb.StartJobRequest, actor: str) -> StartJobCall:
    """Return the call for ``request`` of ``actor``.

    Raises:
        InvalidRequest: an invalid job or time, both devices and a number of them, or too many devices.
    """
    if bool(request.devices) == bool(request.count):
        raise InvalidRequest("A job needs either the names of devices or their number.")
    if len(request.devices) > _MAX_CLAIM_DEVICES:
        raise InvalidRequest(f"A job has at most {_MAX_CLAIM_DEVICES} devices.")
    wait = parse_wait(request.wait_seconds, "wait_seconds")
    return StartJobCall(parse_job(request.job), actor, tuple(request.devices), request.count, wait or None)


def parse_job(job: pb.Job) -> Job:
    """Return the job; raises :class:`InvalidRequest` for an unknown manager, or an invalid ID or user."""
    if job.manager not in tuple(JobManager):
        raise InvalidRequest(f"The manager of a job is one of: {', '.join(JobManager)}; not {job.manager[:64]!r}.")
    return Job(JobManager(job.manager), job.id, job.user, job.user_id)


def job_end_message(release: ClaimRelease) -> pb.EndJobResponse:
    """Return the progress of the release of a job's devices."""
    return pb.EndJobResponse(
        done=release.done,
        waits_for=_utf8_text(release.waits_for),
        withheld=[pb.WithheldDevice(device_id=each.device, cause_code=each.code) for each in release.withheld],
    )


def claim_list_message(claims: Sequence[PreparedClaim], unprepared: Sequence[UnpreparedClaim]) -> pb.ListClaimsResponse:
    """Return the claims with their devices and pods, and those that are not prepared; jobs are none."""
    return pb.ListClaimsResponse(
        claims=[
            pb.PreparedClaim(
                claim=_claim(each.claim),
                devices=[
                    *(pb.ClaimDevice(device_id=device) for device in each.devices),
                    *(pb.ClaimDevice(device_id=device, admin_access=True) for device in each.admin_devices),
                ],
                pods=[_claim_pod(pod) for pod in each.claim.pods],
                driver=each.claim.driver,
                releasing=not each.claim.is_prepared,
            )
            for each in claims
            if each.claim.manager is None
        ],
        unprepared=[
            pb.UnpreparedClaim(driver=each.driver, namespace=each.namespace, name=each.name) for each in unprepared
        ],
    )


def _job(claim: Claim | None) -> pb.Job | None:
    if claim is None or claim.manager is None:
        return None
    return pb.Job(
        manager=claim.manager.value, id=claim.name, user=claim.namespace, user_id=int(claim.uid.split(":")[1])
    )


def _resource_claim(claim: Claim | None) -> pb.Claim | None:
    return None if claim is None or claim.manager is not None else _claim(claim)


def _claim(claim: Claim) -> pb.Claim:
    return pb.Claim(uid=claim.uid, namespace=claim.namespace, name=claim.name)


def _claim_pod(pod: Pod) -> pb.ClaimPod:
    return pb.ClaimPod(uid=pod.uid or "", namespace=pod.namespace, name=pod.name)


# -- for operators -----------------------------------------------------------------------------------------------------


def device_list_message(view: NodeView, devices: DeviceMessages[pb.Device] | None = None) -> pb.ListDevicesResponse:
    """Return all devices as operators see them.

    Args:
        devices: keeps messages of :func:`device_message` from one call to the next.
    """
    found = (devices or DeviceMessages(device_message)).of(view)
    return pb.ListDevicesResponse(version=view.version, devices=found)


def device_message(view: DeviceView, driver_version: str = "") -> pb.Device:
    """Return one device. Tenant, pod, container, claim and job are those of the newest open grant; empty without one."""
    device, record = view.device, view.record
    newest = record.open_grants[-1] if record.open_grants else None
    holding = None if newest is None else _only_pod(newest)
    return pb.Device(
        id=device.id,
        index=device.index,
        model=_utf8_text(device.model),
        memory_bytes=device.memory_bytes,
        state=record.state,
        hygiene=record.hygiene.value,
        health=record.health.value,
        cause=None if record.cause is None else _cause(record.cause),
        certificate=None if record.certificate is None else certificate_message(record.certificate),
        tenant="" if newest is None else newest.tenant or "",
        pod="" if holding is None else holding.name,
        container="" if newest is None or newest.assignment is None else newest.assignment.container,
        claim=None if newest is None else _resource_claim(newest.claim),
        job=None if newest is None else _job(newest.claim),
        admin_claims=[_claim(each) for each in record.admin_claims],
        grant_count=record.grant_sequence,
        active_scrub_id=view.scrub or "",
        parent=device.parent or "",
        numa_node=device.numa_node,
        profile=device.profile or "",
        peers=sorted(device.peers),
        attributes={name: _utf8_text(value) for name, value in device.traits},
        next_attempt_at=record.retry_at or 0.0,
        last_hand_over_kind="" if record.last_grant is None else record.last_grant.kind.value,
        advertised=view.advertised,
        policy=view.policy.name,
        enforcement=view.policy.enforcement.value,
        break_glass=None if record.break_glass is None else _break_glass(record.break_glass),
        failed_recoveries=record.failures,
        recovery_blocker=_utf8_text(view.recovery_blocker),
        unauthorized_users=[_utf8_text(each) for each in view.unauthorized_users],
        uninspected_processes=[_utf8_text(each) for each in view.uninspected_processes],
        holders=[_holder(each) for each in view.holders],
        open_grants=[_open_grant(each) for each in record.open_grants],
        conditions=[pb.Condition(code=_utf8_text(each.code), since=each.since) for each in record.warnings],
        lifetime_counters=dict(record.lifetime_counters),
        reset_pending=record.must_reset,
        probation_scrubs_passed=record.clean_scrubs,
        probation_scrubs_required=view.policy.recovery.probation_scrubs,
        quarantines=[
            pb.QuarantineRecord(timestamp=each.at, code=each.code, tenant=each.tenant or "")
            for each in record.recent_quarantines
        ],
        recovery_attempts=[
            pb.RecoveryAttempt(timestamp=each.at, reset=each.reset, by_operator=each.operator_ordered)
            for each in record.recovery_attempts
        ],
        baseline=None if record.baseline is None else _baseline(device, record.baseline),
    )


def quarantine_message(view: DeviceView, previous: Cause | None) -> pb.DeviceResponse:
    """Return a quarantined device, and why it was out of service already, if it was."""
    return pb.DeviceResponse(device=device_message(view), previous_cause=None if previous is None else _cause(previous))


def _holder(named: NamedHolder) -> pb.DeviceHolder:
    holder, owner = named.holder, named.owner
    return pb.DeviceHolder(
        pid=holder.pid,
        command=_utf8_text(holder.command),
        kind=holder.kind.value,
        code=named.code,
        namespace=_utf8_text(owner.namespace),
        pod=_utf8_text(owner.pod),
        pod_uid=_utf8_text(owner.pod_uid),
        unit=_utf8_text(owner.unit),
        since=named.since,
        blocking=named.is_blocking,
        memory_bytes=holder.memory_bytes,
    )


def _open_grant(grant: Grant) -> pb.OpenGrant:
    pod, claim = _only_pod(grant), grant.claim
    is_job = claim is not None and claim.manager is not None
    return pb.OpenGrant(
        sequence=grant.sequence,
        tenant=grant.tenant or "",
        pod="" if pod is None else pod.name,
        pod_uid="" if pod is None else pod.uid or "",
        container="" if grant.assignment is None else grant.assignment.container,
        hand_over_kind=grant.kind.value,
        granted_at=grant.at,
        certificate_id=grant.certificate or "",
        exception=grant.basis.exception or "",
        claim=_resource_claim(claim),
        claim_pods=[] if claim is None or is_job else [_claim_pod(each) for each in claim.pods],
        claim_releasing=claim is not None and not is_job and not claim.is_prepared,
        job=_job(claim),
        job_ended=claim is not None and is_job and not claim.is_prepared,
    )


def _only_pod(grant: Grant) -> Pod | None:
    """Return the pod of the grant; None where no source named it, for a claim of several pods, and for a job."""
    if grant.claim is not None and grant.claim.manager is not None:
        return None
    return grant.pods[0] if len(grant.pods) == 1 else None


def _baseline(device: Device, baseline: Baseline) -> pb.Baseline:
    expected, found = dict(baseline.facts), dict(baseline_facts(device))
    return pb.Baseline(
        recorded_at=baseline.at,
        actor=baseline.actor,
        reason=_utf8_text(baseline.reason),
        facts=[
            pb.Fact(name=name, expected=_utf8_text(expected.get(name, "")), actual=_utf8_text(found.get(name, "")))
            for name in sorted(expected)
        ],
        accepted_conditions=[pb.Fact(name=name, expected=_utf8_text(read)) for name, read in baseline.conditions],
    )


def _break_glass(glass: BreakGlass) -> pb.BreakGlass:
    return pb.BreakGlass(expires_at=glass.until, reason=_utf8_text(glass.reason), actor=glass.actor)


def _cause(cause: Cause) -> pb.Cause:
    return pb.Cause(
        code=cause.code,
        message=_utf8_text(cause.message),
        recovery_method=cause.recovery_method.value,
        since=cause.since,
        actor=cause.actor,
    )


def certificate_message(certificate: Certificate) -> pb.Certificate:
    """Return a certificate with all fields."""
    return pb.Certificate(
        id=certificate.id,
        node_name=certificate.node,
        boot_id=certificate.boot,
        driver_version=certificate.driver,
        device_id=certificate.device,
        sequence=certificate.sequence,
        previous_grant=certificate.previous_grant,
        next_grant=certificate.next_grant,
        path=certificate.path.value,
        scrub_id=certificate.scrub,
        covered=[_utf8_text(each) for each in certificate.covered],
        not_covered=[_utf8_text(each) for each in certificate.not_covered],
        policy=certificate.policy,
        policy_digest=certificate.policy_digest,
        issued_at=certificate.issued_at,
        base_certificate_id=certificate.rests_on or "",
        key_id=certificate.key_id or "",
        signature=base64.b64decode(certificate.signature or ""),
        attestation=None
        if certificate.attestation is None
        else pb.Attestation(digest=certificate.attestation.digest, nonce=certificate.attestation.nonce),
    )


def signed_certificate_message(view: CertificateView) -> pb.SignedCertificate:
    """Return a certificate with the signed bytes, unchanged, and its status."""
    return pb.SignedCertificate(
        certificate=certificate_message(view.certificate),
        payload=statement(view.certificate),
        status=view.status.value,
    )


def scrub_message(scrub: ScrubRecord) -> pb.Scrub:
    """Return a scrub with its evidence; ``finished_at`` is 0 and ``outcome`` empty while it is in progress."""
    return pb.Scrub(
        id=scrub.id,
        device_id=scrub.device,
        path=scrub.path.value,
        trigger=scrub.trigger.value,
        started_at=scrub.started,
        finished_at=scrub.ended or 0.0,
        outcome="" if scrub.outcome is None else scrub.outcome.value,
        steps=[_step(each) for each in scrub.steps],
        certificate_id=scrub.certificate or "",
        actor=scrub.actor,
    )


def _step(result: StepResult) -> pb.StepResult:
    return pb.StepResult(
        step=result.step.value,
        verdict=result.verdict.value,
        duration_seconds=result.seconds,
        findings=[_finding(each) for each in result.findings],
        measurements_json=_json(result.measured),
        not_covered=[_utf8_text(each) for each in result.not_covered],
    )


def _finding(finding: Finding) -> pb.Finding:
    return pb.Finding(
        step=finding.step.value,
        code=finding.code,
        severity=finding.severity.value,
        message=_utf8_text(finding.message),
        evidence_json=_json(finding.evidence),
    )


def progress_message(update: ScrubUpdate) -> pb.ScrubProgress:
    """Return the progress of a scrub."""
    progress = update.progress
    return pb.ScrubProgress(
        scrub_id=update.scrub,
        device_id=update.device,
        step="" if update.step is None else update.step.value,
        phase="" if progress is None else progress.phase,
        done_bytes=0 if progress is None else progress.done_bytes,
        total_bytes=0 if progress is None else progress.total_bytes,
        joined=update.joined,
    )


def reset_plan_message(plan: ResetPlan) -> pb.ResetPlan:
    """Return a plan with all fields; ``unavailable_reason`` is empty when the device can be reset here."""
    return pb.ResetPlan(
        device_id=plan.device,
        method=_utf8_text(plan.method),
        actions=[_utf8_text(each) for each in plan.actions],
        unavailable_reason=_utf8_text(plan.unavailable or ""),
        blockers=[_utf8_text(each) for each in plan.blockers],
        also_reset_ids=plan.also_reset,
        agents=[_utf8_text(each) for each in plan.agents],
        pause_ways=[
            pb.PauseOffer(way=each.way.value, actions=[_utf8_text(action) for action in each.actions])
            for each in plan.pause_ways
        ],
    )


def history_entry_message(entry: HistoryEntry) -> pb.HistoryEntry:
    """Return one audit row, with the scrub and the certificate that it names."""
    event = entry.event
    return pb.HistoryEntry(
        sequence=entry.sequence,
        hash=entry.hash,
        event=event.name,
        timestamp=event.at,
        device_id=event.device or "",
        scrub_id=event.scrub or "",
        actor=event.actor,
        fields_json=_json(event.fields),
        scrub=None if entry.scrub is None else scrub_message(entry.scrub),
        certificate=None if entry.certificate is None else certificate_message(entry.certificate),
    )


def service_info_message(info: ServiceView, plugin_versions: Sequence[str] = ()) -> pb.ServiceInfo:
    """Return the description of the service, and the versions of the plugins that follow it."""
    return pb.ServiceInfo(
        version=info.version,
        backend=info.backend,
        node_name=info.identity.node,
        boot_id=info.identity.boot,
        driver_version=info.identity.driver,
        policy=info.policy.name,
        policy_digest=info.policy.digest,
        enforcement=info.policy.enforcement.value,
        ledger_status=_utf8_text(info.ledger_status),
        epoch=info.epoch,
        breaker=pb.Breaker(
            resets_stopped_reason=_utf8_text(info.breaker.resets_stopped_reason),
            resets_stopped_until=info.breaker.resets_stopped_until or 0.0,
            soft_quarantines_stopped_reason=_utf8_text(info.breaker.soft_signals_stopped_reason),
            awaiting_reset_ids=sorted(info.breaker.awaiting_reset),
            kept_in_service_ids=sorted(info.breaker.kept_in_service),
        ),
        key_id=info.key_id,
        public_key=info.public_key,
        audit_head=_head(info.audit_head),
        paths={name: _utf8_text(path) for name, path in info.paths.items()},
        policy_rejection=_utf8_text(info.policy_error),
        kubelet_status=_utf8_text(info.kubelet_status),
        pid=os.getpid(),
        admin_group=info.admin_group,
        read_group=info.read_group,
        node_yield=yield_message(info) if info.yields else None,
        agent_pause=(
            None
            if info.agent_pause is None
            else _pause_message(info.agent_pause, info.agent_pause_message, driver_closed=info.driver_closed)
        ),
        plugin_versions=plugin_versions,
    )


def yield_message(info: ServiceView) -> pb.NodeYield:
    """Return why the node is yielded, and whether the driver is closed."""
    requests = [
        pb.YieldRequest(
            requester=each.requester.value, reason=_utf8_text(each.reason), actor=each.actor, since=each.since
        )
        for each in info.yields
    ]
    return pb.NodeYield(requests=requests, driver_closed=info.driver_closed, remaining_pids=info.remaining_pids)


def audit_page_message(page: AuditLogPage) -> pb.AuditPage:
    """Return a part of the audit log, as it is stored and hashed."""
    return pb.AuditPage(
        pruned=_head(page.preceding_head), head=_head(page.head), rows=[_audit_row(each) for each in page.rows]
    )


def _head(head: AuditHead) -> pb.AuditHead:
    return pb.AuditHead(sequence=head.sequence, hash=head.hash)


def _audit_row(row: AuditRow) -> pb.AuditRow:
    return pb.AuditRow(
        sequence=row.sequence,
        timestamp=row.at,
        event=row.name,
        device_id=row.device,
        scrub_id=row.scrub,
        actor=row.actor,
        fields=row.fields,
        previous_hash=row.prev_hash,
        hash=row.hash,
    )


def _json(values: Evidence) -> str:
    return json.dumps(dict(values), sort_keys=True)


def _utf8_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
