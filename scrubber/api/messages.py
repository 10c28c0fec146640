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
from scrubber.domain.baseline import Baseline, facts_of
from scrubber.domain.device import Access, Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate, Evidence, Finding, Path, ScrubRecord, StepResult
from scrubber.domain.health import Cause
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.record import Glass, Grant
from scrubber.domain.reset import ResetPlan
from scrubber.domain.statement import statement
from scrubber.engine.views import (
    CertificateView,
    DeviceView,
    Granted,
    HandOverCall,
    NodeView,
    PodNotice,
    ScrubNews,
    ServiceView,
)
from scrubber.ports.record import AuditRow, Head, HistoryEntry, TrailPage

__all__ = [
    "LONGEST_GLASS",
    "LONGEST_REASON",
    "LONGEST_WAIT",
    "PluginPart",
    "audit_page",
    "certificate_message",
    "device_list",
    "device_message",
    "glass_seconds",
    "granted_message",
    "hand_over_call",
    "history_entry",
    "offers_of",
    "path_of",
    "plugin_part",
    "progress_message",
    "reason_of",
    "reset_plan_message",
    "scrub_message",
    "service_info",
    "signed_certificate",
    "snapshot",
]

LONGEST_REASON = 500
"""Characters of a reason: it is kept in the audit for good."""
LONGEST_WAIT = 3600.0
"""Seconds that a hand-over may ask to wait."""
LONGEST_GLASS = 7 * 24 * 3600.0
"""Seconds for which a glass may be asked to be broken; how many are granted, the policy says."""


# -- requests ----------------------------------------------------------------------------------------------------------


def hand_over_call(request: pb.HandOverRequest) -> HandOverCall:
    """The call that ``request`` asks for; whether its ids are known is the engine's to say.

    Raises:
        InvalidRequest: an impossible time, or an id in ``reserved_unseen`` that is not asked for.
    """
    wait = request.wait_seconds
    if not math.isfinite(wait) or not 0 <= wait <= LONGEST_WAIT:
        raise InvalidRequest(f"A hand-over waits between 0 and {LONGEST_WAIT:.0f} seconds, not {wait}.")
    unseen = frozenset(request.reserved_unseen)
    strangers = sorted(unseen - set(request.device_ids))
    if strangers:
        raise InvalidRequest(f"reserved_unseen names {', '.join(strangers)}, which this request does not ask for.")
    return HandOverCall(
        devices=tuple(request.device_ids),
        wait_seconds=wait or None,
        reserved_unseen=unseen,
        resource=request.resource,
    )


def offers_of(request: pb.AnnounceRequest) -> dict[str, str]:
    """Device by id; raises :class:`InvalidRequest` for an id that is announced twice."""
    offers = {offer.id: offer.device for offer in request.offers}
    if len(offers) != len(request.offers):
        raise InvalidRequest(f"An id of {request.resource} is announced twice.")
    return offers


def path_of(name: str) -> Path:
    """The path that is called ``name``; raises :class:`InvalidRequest` for any other word."""
    try:
        return Path(name)
    except ValueError:
        raise InvalidRequest(f"There is no path {name!r}; there are: {', '.join(Path)}.") from None


def reason_of(
    request: pb.QuarantineRequest | pb.BreakGlassRequest | pb.ResetRequest | pb.AcceptBaselineRequest,
) -> str:
    """Why a person acts, for the audit; raises :class:`InvalidRequest` for none, or one too long to keep."""
    reason: str = request.reason.strip()
    if not reason:
        raise InvalidRequest("Say why: the reason goes into the audit, and whoever comes next reads it.")
    if len(reason) > LONGEST_REASON:
        raise InvalidRequest(f"The reason has {len(reason)} characters; the audit takes {LONGEST_REASON}.")
    return reason


def glass_seconds(request: pb.BreakGlassRequest) -> float:
    """How long the glass is to be broken; 0 ends it. Raises :class:`InvalidRequest` for an impossible time."""
    seconds: float = request.seconds
    if not 0 <= seconds <= LONGEST_GLASS:  # NaN is neither
        raise InvalidRequest(
            f"A glass is broken for a time between 0 (which ends it) and {LONGEST_GLASS:.0f} seconds, not {seconds}."
        )
    return seconds


# -- for the plugin ----------------------------------------------------------------------------------------------------

PluginPart = tuple[bool, str, bool, tuple[tuple[object, ...], ...], tuple[PodNotice, ...]]
"""What of a node concerns the plugin; two equal ones need no second snapshot."""


def plugin_part(view: NodeView) -> PluginPart:
    """Everything that changes what the kubelet or a pod's owner is told, or a container is given, and nothing else."""
    devices = tuple(
        (each.device, each.offered, each.record.health, _certified(each), _scrubbing(each), _refusal(each))
        for each in view.devices
    )
    return (view.ready, view.epoch, view.envvar_refused, devices, view.notices)


def snapshot(view: NodeView) -> pb.Snapshot:
    """All devices as the plugin sees them."""
    return pb.Snapshot(
        version=view.version,
        devices=[_snapshot_device(each) for each in view.devices],
        ready=view.ready,
        epoch=view.epoch,
        envvar_refused=view.envvar_refused,
        notices=[_notice(each) for each in view.notices],
    )


def _notice(notice: PodNotice) -> pb.PodNotice:
    return pb.PodNotice(
        namespace=notice.pod.namespace,
        name=notice.pod.name,
        uid=notice.pod.uid or "",
        devices=notice.devices,
        reason=notice.reason,
        sentence=_text(notice.sentence),
        since=notice.since,
        evict=notice.evict,
    )


def _snapshot_device(view: DeviceView) -> pb.SnapshotDevice:
    return pb.SnapshotDevice(
        id=view.device.id,
        index=view.device.index,
        advertised=view.offered,
        certified=_certified(view),
        scrubbing=_scrubbing(view),
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
    return "" if view.offered else view.refusal


def _access(access: Access) -> pb.Access:
    return pb.Access(kind=access.kind.value, host_path=access.host_path, container_path=access.container_path)


def _certified(view: DeviceView) -> bool:
    certificate = view.record.certificate
    return view.record.hygiene is Hygiene.CLEAN and certificate is not None and certificate.next_grant is None


def _scrubbing(view: DeviceView) -> bool:
    return view.record.hygiene is Hygiene.SCRUBBING


def granted_message(granted: Granted) -> pb.GrantedDevice:
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


def device_list(view: NodeView) -> pb.ListDevicesResponse:
    """All devices as operators see them."""
    return pb.ListDevicesResponse(version=view.version, devices=[device_message(each) for each in view.devices])


def device_message(view: DeviceView) -> pb.Device:
    """One device. Tenant, pod and container are those of the newest grant whose pod is not over; else empty."""
    device, record = view.device, view.record
    holding = record.open_grants[-1].assignment if record.open_grants else None
    return pb.Device(
        id=device.id,
        index=device.index,
        model=_text(device.model),
        memory_bytes=device.memory_bytes,
        state=record.state,
        hygiene=record.hygiene.value,
        health=record.health.value,
        cause=None if record.cause is None else _cause(record.cause),
        certificate=None if record.certificate is None else certificate_message(record.certificate),
        tenant_namespace="" if holding is None else holding.pod.tenant,
        pod="" if holding is None else holding.pod.name,
        container="" if holding is None else holding.container,
        grants=record.grants,
        scrub=view.scrub or "",
        parent=device.parent or "",
        numa_node=device.numa_node,
        profile=device.profile or "",
        peers=sorted(device.peers),
        traits={name: _text(value) for name, value in device.traits},
        retry_at=record.retry_at or 0.0,
        kind="" if record.last_grant is None else record.last_grant.kind.value,
        offered=view.offered,
        policy=view.policy.name,
        enforcement=view.policy.enforcement.value,
        glass=None if record.glass is None else _glass(record.glass),
        failures=record.failures,
        waits=_text(view.waits),
        strangers=[_text(each) for each in view.strangers],
        uninspected=[_text(each) for each in view.uninspected],
        tenancies=[_tenancy(each) for each in record.open_grants],
        lasting=[pb.Lasting(code=_text(each.code), since=each.since) for each in record.lasting],
        lifetime=dict(record.lifetime),
        must_reset=record.must_reset,
        clean_scrubs=record.clean_scrubs,
        strikes=[pb.Strike(at=each.at, code=each.code, tenant_namespace=each.tenant or "") for each in record.strikes],
        attempts=[pb.Attempt(at=each.at, reset=each.reset, ordered=each.ordered) for each in record.attempts],
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
    expected, found = dict(baseline.facts), dict(facts_of(device))
    return pb.Baseline(
        at=baseline.at,
        actor=baseline.actor,
        reason=_text(baseline.reason),
        facts=[
            pb.Fact(name=name, expected=_text(expected.get(name, "")), found=_text(found.get(name, "")))
            for name in sorted(expected)
        ],
        conditions=[pb.Fact(name=name, expected=_text(read)) for name, read in baseline.conditions],
    )


def _glass(glass: Glass) -> pb.Glass:
    return pb.Glass(until=glass.until, reason=_text(glass.reason), actor=glass.actor)


def _cause(cause: Cause) -> pb.Cause:
    return pb.Cause(
        code=cause.code,
        sentence=_text(cause.sentence),
        way_back=cause.way_back.value,
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
        covered=[_text(each) for each in certificate.covered],
        not_covered=[_text(each) for each in certificate.not_covered],
        policy=certificate.policy,
        policy_digest=certificate.policy_digest,
        issued_at=certificate.issued_at,
        rests_on=certificate.rests_on or "",
        key_id=certificate.key_id or "",
        signature=base64.b64decode(certificate.signature or ""),
    )


def signed_certificate(found: CertificateView) -> pb.SignedCertificate:
    """A certificate with what was signed of it, byte for byte, and what became of it."""
    return pb.SignedCertificate(
        certificate=certificate_message(found.certificate),
        payload=statement(found.certificate),
        standing=found.standing.value,
    )


def scrub_message(scrub: ScrubRecord) -> pb.Scrub:
    """A scrub with its evidence; ``ended`` is 0 and ``outcome`` empty while it is under way."""
    return pb.Scrub(
        id=scrub.id,
        device=scrub.device,
        path=scrub.path.value,
        occasion=scrub.occasion.value,
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
        not_covered=[_text(each) for each in result.not_covered],
    )


def _finding(finding: Finding) -> pb.Finding:
    return pb.Finding(
        step=finding.step.value,
        code=finding.code,
        severity=finding.severity.value,
        sentence=_text(finding.sentence),
        evidence_json=_json(finding.evidence),
    )


def progress_message(news: ScrubNews) -> pb.ScrubProgress:
    """How far a scrub is."""
    progress = news.progress
    return pb.ScrubProgress(
        scrub=news.scrub,
        device=news.device,
        step="" if news.step is None else news.step.value,
        phase="" if progress is None else progress.phase,
        done_bytes=0 if progress is None else progress.done_bytes,
        total_bytes=0 if progress is None else progress.total_bytes,
        joined=news.joined,
    )


def reset_plan_message(plan: ResetPlan) -> pb.ResetPlan:
    """A plan, whole; ``unavailable`` is empty when the device can be reset here."""
    return pb.ResetPlan(
        device=plan.device,
        method=_text(plan.method),
        acts=[_text(each) for each in plan.acts],
        unavailable=_text(plan.unavailable or ""),
        blockers=[_text(each) for each in plan.blockers],
        together=plan.together,
    )


def history_entry(entry: HistoryEntry) -> pb.HistoryEntry:
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


def service_info(info: ServiceView) -> pb.ServiceInfo:
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
        ledger=_text(info.ledger),
        epoch=info.epoch,
        breaker=pb.Breaker(
            resets=_text(info.breaker.resets),
            resets_until=info.breaker.resets_until or 0.0,
            soft=_text(info.breaker.soft),
            waiting=sorted(info.breaker.waiting),
            spared=sorted(info.breaker.spared),
        ),
        key_id=info.key_id,
        public_key=info.public_key,
        audit_head=_head(info.audit_head),
        places={name: _text(path) for name, path in info.places.items()},
        policy_refused=_text(info.policy_refused),
        kubelet=_text(info.kubelet),
        pid=os.getpid(),
        admin_group=info.admin_group,
        read_group=info.read_group,
    )


def audit_page(page: TrailPage) -> pb.AuditPage:
    """A part of the audit trail, as it is stored and hashed."""
    return pb.AuditPage(pruned=_head(page.pruned), head=_head(page.head), rows=[_audit_row(each) for each in page.rows])


def _head(head: Head) -> pb.AuditHead:
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


def _text(words: str) -> str:
    return words.encode("utf-8", "replace").decode()
