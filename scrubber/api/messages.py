"""Values of the domain and the engine ↔ protobuf messages.

Promise: pure, complete in both directions, and never the reason for a failed answer: text that came from outside (a
process name in a finding) may be no UTF-8, and a message takes nothing else. What is not there is left out or empty.
"""

from __future__ import annotations

import base64
import json
import math
import os

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.baseline import Baseline, baseline_facts
from scrubber.domain.device import Access, Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate, Evidence, Finding, PathKind, ScrubRecord, StepResult
from scrubber.domain.record import BreakGlass, Grant
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.statement import statement
from scrubber.domain.states import Cause, Hygiene
from scrubber.engine.views import (
    CertificateView,
    DeviceView,
    GrantedDevice,
    HandOverCall,
    NodeView,
    PodNotice,
    ScrubUpdate,
    ServiceView,
)
from scrubber.ports.record import AuditHead, AuditRow, HistoryEntry, TrailPage

__all__ = [
    "MAX_BREAK_GLASS_SECONDS",
    "MAX_REASON_CHARS",
    "MAX_WAIT_SECONDS",
    "SnapshotKey",
    "audit_page_message",
    "certificate_message",
    "device_list_message",
    "device_message",
    "granted_message",
    "history_entry_message",
    "parse_break_glass_seconds",
    "parse_hand_over_call",
    "parse_reason",
    "parse_resource_mapping",
    "parse_scrub_path",
    "progress_message",
    "reset_plan_message",
    "scrub_message",
    "service_info_message",
    "signed_certificate_message",
    "snapshot_key",
    "snapshot_message",
]

MAX_REASON_CHARS = 500
"""Characters of a reason: it is kept in the audit for good."""
MAX_WAIT_SECONDS = 3600.0
"""Seconds that a hand-over may ask to wait."""
MAX_BREAK_GLASS_SECONDS = 7 * 24 * 3600.0
"""Seconds for which a glass may be asked to be broken; how many are granted, the policy says."""


# -- requests ----------------------------------------------------------------------------------------------------------


def parse_hand_over_call(request: pb.HandOverRequest) -> HandOverCall:
    """The call that ``request`` asks for; whether its ids are known is the engine's to say.

    Raises:
        InvalidRequest: an impossible time, or an id in ``reserved_unseen`` that is not asked for.
    """
    wait = request.wait_seconds
    if not math.isfinite(wait) or not 0 <= wait <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"A hand-over waits between 0 and {MAX_WAIT_SECONDS:.0f} seconds, not {wait}.")
    unseen = frozenset(request.reserved_unseen)
    unexpected = sorted(unseen - set(request.device_ids))
    if unexpected:
        raise InvalidRequest(f"reserved_unseen names {', '.join(unexpected)}, which this request does not ask for.")
    return HandOverCall(
        devices=tuple(request.device_ids),
        wait_seconds=wait or None,
        unreported_allocations=unseen,
        resource=request.resource,
    )


def parse_resource_mapping(request: pb.AnnounceRequest) -> dict[str, str]:
    """Device by id; raises :class:`InvalidRequest` for an id that is announced twice."""
    offers = {offer.id: offer.device for offer in request.offers}
    if len(offers) != len(request.offers):
        raise InvalidRequest(f"An id of {request.resource} is announced twice.")
    return offers


def parse_scrub_path(name: str) -> PathKind:
    """The path that is called ``name``; raises :class:`InvalidRequest` for any other word."""
    try:
        return PathKind(name)
    except ValueError:
        raise InvalidRequest(f"There is no path {name!r}; there are: {', '.join(PathKind)}.") from None


def parse_reason(
    request: pb.QuarantineRequest | pb.BreakGlassRequest | pb.ResetRequest | pb.AcceptBaselineRequest,
) -> str:
    """Why a person acts, for the audit; raises :class:`InvalidRequest` for none, or one too long to keep."""
    reason: str = request.reason.strip()
    if not reason:
        raise InvalidRequest("Say why: the reason goes into the audit, and whoever comes next reads it.")
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidRequest(f"The reason has {len(reason)} characters; the audit takes {MAX_REASON_CHARS}.")
    return reason


def parse_break_glass_seconds(request: pb.BreakGlassRequest) -> float:
    """How long the glass is to be broken; 0 ends it. Raises :class:`InvalidRequest` for an impossible time."""
    seconds: float = request.seconds
    if not 0 <= seconds <= MAX_BREAK_GLASS_SECONDS:  # NaN is neither
        raise InvalidRequest(
            f"A glass is broken for a time between 0 (which ends it) and {MAX_BREAK_GLASS_SECONDS:.0f} seconds, not {seconds}."
        )
    return seconds


# -- for the plugin ----------------------------------------------------------------------------------------------------

SnapshotKey = tuple[bool, str, bool, tuple[tuple[object, ...], ...], tuple[PodNotice, ...]]
"""What of a node concerns the plugin; two equal ones need no second snapshot."""


def snapshot_key(view: NodeView) -> SnapshotKey:
    """Everything that changes what the kubelet or a pod's owner is told, or a container is given, and nothing else."""
    devices = tuple(
        (each.device, each.advertised, each.record.health, _is_certified(each), _is_scrubbing(each), _refusal(each))
        for each in view.devices
    )
    return (view.ready, view.epoch, view.refuses_envvar, devices, view.notices)


def snapshot_message(view: NodeView) -> pb.Snapshot:
    """All devices as the plugin sees them."""
    return pb.Snapshot(
        version=view.version,
        devices=[_snapshot_device(each) for each in view.devices],
        ready=view.ready,
        epoch=view.epoch,
        envvar_refused=view.refuses_envvar,
        notices=[_notice(each) for each in view.notices],
    )


def _notice(notice: PodNotice) -> pb.PodNotice:
    return pb.PodNotice(
        namespace=notice.pod.namespace,
        name=notice.pod.name,
        uid=notice.pod.uid or "",
        devices=notice.devices,
        reason=notice.reason,
        sentence=_utf8_text(notice.message),
        since=notice.since,
        evict=notice.evict,
    )


def _snapshot_device(view: DeviceView) -> pb.SnapshotDevice:
    return pb.SnapshotDevice(
        id=view.device.id,
        index=view.device.index,
        advertised=view.advertised,
        certified=_is_certified(view),
        scrubbing=_is_scrubbing(view),
        state=view.record.state,
        numa_node=view.device.numa_node,
        peers=sorted(view.device.peers),
        parent=view.device.parent or "",
        access=[_access(each) for each in view.device.access],
        refusal=_refusal(view),
        profile=view.device.profile or "",
        pci_address=dict(view.device.traits).get("pci_address", ""),
    )


def _refusal(view: DeviceView) -> str:
    """What a pod's status says of the device; nothing while it is offered, whatever is known of it."""
    return "" if view.advertised else view.refusal_message


def _access(access: Access) -> pb.Access:
    return pb.Access(kind=access.kind.value, host_path=access.host_path, container_path=access.container_path)


def _is_certified(view: DeviceView) -> bool:
    certificate = view.record.certificate
    return view.record.hygiene is Hygiene.CLEAN and certificate is not None and certificate.next_grant is None


def _is_scrubbing(view: DeviceView) -> bool:
    return view.record.hygiene is Hygiene.SCRUBBING


def granted_message(granted: GrantedDevice) -> pb.GrantedDevice:
    """One device of a hand-over that was granted."""
    return pb.GrantedDevice(
        id=granted.device,
        grant=granted.grant,
        path=granted.path.value,
        certificate=granted.certificate or "",
        exception=granted.basis.exception or "",
        kind=granted.kind.value,
    )


# -- for people --------------------------------------------------------------------------------------------------------


def device_list_message(view: NodeView) -> pb.ListDevicesResponse:
    """All devices as operators see them."""
    return pb.ListDevicesResponse(version=view.version, devices=[device_message(each) for each in view.devices])


def device_message(view: DeviceView) -> pb.Device:
    """One device. Tenant, pod and container are those of the newest grant whose pod is not over; else empty."""
    device, record = view.device, view.record
    holding = record.open_grants[-1].assignment if record.open_grants else None
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
        tenant_namespace="" if holding is None else holding.pod.tenant,
        pod="" if holding is None else holding.pod.name,
        container="" if holding is None else holding.container,
        grants=record.grant_sequence,
        scrub=view.scrub or "",
        parent=device.parent or "",
        numa_node=device.numa_node,
        profile=device.profile or "",
        peers=sorted(device.peers),
        traits={name: _utf8_text(value) for name, value in device.traits},
        retry_at=record.retry_at or 0.0,
        kind="" if record.last_grant is None else record.last_grant.kind.value,
        offered=view.advertised,
        policy=view.policy.name,
        enforcement=view.policy.enforcement.value,
        glass=None if record.break_glass is None else _break_glass(record.break_glass),
        failures=record.failures,
        waits=_utf8_text(view.recovery_blocker),
        strangers=[_utf8_text(each) for each in view.unauthorized_users],
        uninspected=[_utf8_text(each) for each in view.uninspected_processes],
        tenancies=[_tenancy(each) for each in record.open_grants],
        lasting=[pb.Lasting(code=_utf8_text(each.code), since=each.since) for each in record.warnings],
        lifetime=dict(record.lifetime_counters),
        must_reset=record.must_reset,
        clean_scrubs=record.clean_scrubs,
        strikes=[
            pb.Strike(at=each.at, code=each.code, tenant_namespace=each.tenant or "")
            for each in record.recent_quarantines
        ],
        attempts=[
            pb.Attempt(at=each.at, reset=each.reset, ordered=each.operator_ordered) for each in record.recovery_attempts
        ],
        baseline=None if record.baseline is None else _baseline(device, record.baseline),
    )


def _tenancy(grant: Grant) -> pb.Tenancy:
    pod = grant.pod
    return pb.Tenancy(
        grant=grant.sequence,
        tenant_namespace="" if pod is None else pod.tenant,
        pod="" if pod is None else pod.name,
        uid="" if pod is None else pod.uid or "",
        container="" if grant.assignment is None else grant.assignment.container,
        kind=grant.kind.value,
        at=grant.at,
        certificate=grant.certificate or "",
        exception=grant.basis.exception or "",
    )


def _baseline(device: Device, baseline: Baseline) -> pb.Baseline:
    expected, found = dict(baseline.facts), dict(baseline_facts(device))
    return pb.Baseline(
        at=baseline.at,
        actor=baseline.actor,
        reason=_utf8_text(baseline.reason),
        facts=[
            pb.Fact(name=name, expected=_utf8_text(expected.get(name, "")), found=_utf8_text(found.get(name, "")))
            for name in sorted(expected)
        ],
        conditions=[pb.Fact(name=name, expected=_utf8_text(read)) for name, read in baseline.conditions],
    )


def _break_glass(glass: BreakGlass) -> pb.Glass:
    return pb.Glass(until=glass.until, reason=_utf8_text(glass.reason), actor=glass.actor)


def _cause(cause: Cause) -> pb.Cause:
    return pb.Cause(
        code=cause.code,
        sentence=_utf8_text(cause.message),
        way_back=cause.recovery_method.value,
        since=cause.since,
        actor=cause.actor,
    )


def certificate_message(certificate: Certificate) -> pb.Certificate:
    """A certificate, whole."""
    return pb.Certificate(
        id=certificate.id,
        node=certificate.node,
        boot=certificate.boot,
        driver=certificate.driver,
        device=certificate.device,
        sequence=certificate.sequence,
        previous_grant=certificate.previous_grant,
        next_grant=certificate.next_grant,
        path=certificate.path.value,
        scrub=certificate.scrub,
        covered=[_utf8_text(each) for each in certificate.covered],
        not_covered=[_utf8_text(each) for each in certificate.not_covered],
        policy=certificate.policy,
        policy_digest=certificate.policy_digest,
        issued_at=certificate.issued_at,
        rests_on=certificate.rests_on or "",
        key_id=certificate.key_id or "",
        signature=base64.b64decode(certificate.signature or ""),
    )


def signed_certificate_message(view: CertificateView) -> pb.SignedCertificate:
    """A certificate with what was signed of it, byte for byte, and what became of it."""
    return pb.SignedCertificate(
        certificate=certificate_message(view.certificate),
        payload=statement(view.certificate),
        standing=view.status.value,
    )


def scrub_message(scrub: ScrubRecord) -> pb.Scrub:
    """A scrub with its evidence; ``ended`` is 0 and ``outcome`` empty while it is under way."""
    return pb.Scrub(
        id=scrub.id,
        device=scrub.device,
        path=scrub.path.value,
        occasion=scrub.trigger.value,
        started=scrub.started,
        ended=scrub.ended or 0.0,
        outcome="" if scrub.outcome is None else scrub.outcome.value,
        steps=[_step(each) for each in scrub.steps],
        certificate=scrub.certificate or "",
        actor=scrub.actor,
    )


def _step(result: StepResult) -> pb.StepResult:
    return pb.StepResult(
        step=result.step.value,
        verdict=result.verdict.value,
        seconds=result.seconds,
        findings=[_finding(each) for each in result.findings],
        measured_json=_json(result.measured),
        not_covered=[_utf8_text(each) for each in result.not_covered],
    )


def _finding(finding: Finding) -> pb.Finding:
    return pb.Finding(
        step=finding.step.value,
        code=finding.code,
        severity=finding.severity.value,
        sentence=_utf8_text(finding.message),
        evidence_json=_json(finding.evidence),
    )


def progress_message(update: ScrubUpdate) -> pb.ScrubProgress:
    """How far a scrub is."""
    progress = update.progress
    return pb.ScrubProgress(
        scrub=update.scrub,
        device=update.device,
        step="" if update.step is None else update.step.value,
        phase="" if progress is None else progress.phase,
        done_bytes=0 if progress is None else progress.done_bytes,
        total_bytes=0 if progress is None else progress.total_bytes,
        joined=update.joined,
    )


def reset_plan_message(plan: ResetPlan) -> pb.ResetPlan:
    """A plan, whole; ``unavailable`` is empty when the device can be reset here."""
    return pb.ResetPlan(
        device=plan.device,
        method=_utf8_text(plan.method),
        acts=[_utf8_text(each) for each in plan.actions],
        unavailable=_utf8_text(plan.unavailable or ""),
        blockers=[_utf8_text(each) for each in plan.blockers],
        together=plan.also_reset,
    )


def history_entry_message(entry: HistoryEntry) -> pb.HistoryEntry:
    """One audit row, with the scrub and the certificate that it names."""
    event = entry.event
    return pb.HistoryEntry(
        sequence=entry.sequence,
        hash=entry.hash,
        name=event.name,
        at=event.at,
        device=event.device or "",
        scrub_id=event.scrub or "",
        actor=event.actor,
        fields_json=_json(event.fields),
        scrub=None if entry.scrub is None else scrub_message(entry.scrub),
        certificate=None if entry.certificate is None else certificate_message(entry.certificate),
    )


def service_info_message(info: ServiceView) -> pb.ServiceInfo:
    """What runs here."""
    return pb.ServiceInfo(
        version=info.version,
        backend=info.backend,
        node=info.identity.node,
        boot=info.identity.boot,
        driver=info.identity.driver,
        policy=info.policy.name,
        policy_digest=info.policy.digest,
        enforcement=info.policy.enforcement.value,
        ledger=_utf8_text(info.ledger_status),
        epoch=info.epoch,
        breaker=pb.Breaker(
            resets=_utf8_text(info.breaker.resets_stopped_reason),
            resets_until=info.breaker.resets_stopped_until or 0.0,
            soft=_utf8_text(info.breaker.soft_signals_stopped_reason),
            waiting=sorted(info.breaker.awaiting_reset),
            spared=sorted(info.breaker.kept_in_service),
        ),
        key_id=info.key_id,
        public_key=info.public_key,
        audit_head=_head(info.audit_head),
        places={name: _utf8_text(path) for name, path in info.paths.items()},
        policy_refused=_utf8_text(info.policy_error),
        kubelet=_utf8_text(info.kubelet_status),
        pid=os.getpid(),
        admin_group=info.admin_group,
        read_group=info.read_group,
    )


def audit_page_message(page: TrailPage) -> pb.AuditPage:
    """A part of the audit trail, as it is stored and hashed."""
    return pb.AuditPage(
        pruned=_head(page.preceding_head), head=_head(page.head), rows=[_audit_row(each) for each in page.rows]
    )


def _head(head: AuditHead) -> pb.AuditHead:
    return pb.AuditHead(sequence=head.sequence, hash=head.hash)


def _audit_row(row: AuditRow) -> pb.AuditRow:
    return pb.AuditRow(
        sequence=row.sequence,
        at=row.at,
        name=row.name,
        device=row.device,
        scrub=row.scrub,
        actor=row.actor,
        fields=row.fields,
        prev_hash=row.prev_hash,
        hash=row.hash,
    )


def _json(values: Evidence) -> str:
    return json.dumps(dict(values), sort_keys=True)


def _utf8_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
