"""Values are converted to messages completely, and no external input can make an answer fail."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from scrubber.adapters.signing.ed25519 import EphemeralKey, verify_signature
from scrubber.api import messages
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.baseline import Baseline, BaselineDifference
from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import (
    Attestation,
    Certificate,
    Finding,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.health.history import PastQuarantine, RecoveryAttempt
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord, Grant
from scrubber.domain.statement import parse_statement, sign_certificate
from scrubber.domain.states import BindingState, Cause, Health, Hygiene, RecoveryMethod, TaintReason
from scrubber.engine.views import (
    CertificateStatus,
    CertificateView,
    DeviceView,
    HandOverCall,
    NodeView,
    PodNotice,
    ServiceView,
)
from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow
from tests.api.service import CERTIFICATE, IDENTITY, device, of_record

CAUSE = Cause("xid-95", "Uncontained ECC error.", RecoveryMethod.RESET, 900.0)
CLEAN = DeviceRecord("GPU-a0", hygiene=Hygiene.CLEAN, certificate=CERTIFICATE)
NOTICE = PodNotice(
    Pod("team-a", "train", "uid-1"), ("GPU-a0", "GPU-a1"), "GpuOutOfService", "GPU-a0 is quarantined.", 900.5, False
)
NAMES_IN_MESSAGES = {
    "at": "timestamp",
    "awaiting_reset": "awaiting_reset_ids",
    "boot": "boot_id",
    "certificate": "certificate_id",
    "conditions": "accepted_conditions",
    "device": "device_id",
    "driver": "driver_version",
    "ended": "finished_at",
    "evidence": "evidence_json",
    "kept_in_service": "kept_in_service_ids",
    "measured": "measurements_json",
    "name": "event",
    "node": "node_name",
    "operator_ordered": "by_operator",
    "preceding_head": "pruned",
    "prev_hash": "previous_hash",
    "rests_on": "base_certificate_id",
    "scrub": "scrub_id",
    "soft_signals_stopped_reason": "soft_quarantines_stopped_reason",
    "started": "started_at",
    "until": "expires_at",
}
"""Fields of values with another name in the message."""
NOT_TEXT = b"\xff\xfe".decode("utf-8", "surrogateescape")


def view(record: DeviceRecord = CLEAN, of: Device | None = None, **changes: object) -> NodeView:
    node = NodeView(version=7, devices=(of_record(of or device(0), record),), ready=True, epoch="e1")
    return replace(node, **changes)  # type: ignore[arg-type]


def grant(number: int, pod: str | None = None) -> Grant:
    assignment = None if pod is None else Assignment(Pod("team-a", pod, "uid-1"), "main", frozenset({"GPU-a0"}))
    return Grant(number, assignment, HandOverKind.OTHER_TENANT, 1000.0, "boot-1")


# -- messages to the plugin --------------------------------------------------------------------------------------------


def test_snapshot_carries_everything_a_container_needs() -> None:
    (first,) = messages.snapshot_message(view()).devices
    assert (first.id, first.index, first.numa_node, list(first.peers)) == ("GPU-a0", "0", 0, ["GPU-a1"])
    assert [(each.kind, each.host_path, each.container_path) for each in first.access] == [
        ("mount", "/sim/devices/0/memory", "/dev/simgpu0")
    ]


def test_snapshot_describes_a_device_and_why_the_scheduler_should_not_choose_it() -> None:
    described = replace(device(0), model="H200", memory_bytes=141 << 30, driver="6.1")
    described_device = DeviceView(described, CLEAN, taints=(TaintReason("xid-79", evicts=True), TaintReason("held")))
    described_device = replace(described_device, binding=BindingState.BEING_CLEANED)
    (first,) = messages.snapshot_message(view(devices=(described_device,))).devices
    assert (first.model, first.memory_bytes, first.driver_version) == ("H200", 141 << 30, "6.1")
    assert [(each.reason, each.evicts) for each in first.taints] == [("xid-79", True), ("held", False)]
    assert first.binding == "being-cleaned"


def test_device_without_a_driver_of_its_own_has_the_version_of_the_nodes_driver() -> None:
    (first,) = messages.snapshot_message(view(driver_version="580.95.05")).devices
    assert first.driver_version == "580.95.05"


def test_device_that_did_not_change_keeps_its_message_until_the_drivers_version_changes() -> None:
    made: list[str] = []

    def make(each: DeviceView, driver_version: str) -> pb.SnapshotDevice:
        made.append(f"{each.device.id} {each.record.version} {driver_version}")
        return messages.snapshot_device_message(each, driver_version)

    devices = messages.DeviceMessages(make)
    one, other = (DeviceView(device(number), replace(CLEAN, device=f"GPU-a{number}", version=1)) for number in (0, 1))
    first = view(devices=(one, other), driver_version="1")
    second = replace(first, devices=(one, replace(other, advertised=False)))
    for each in (first, first, second, replace(second, driver_version="2")):
        found = messages.snapshot_message(each, devices)
        assert found.devices == messages.snapshot_message(each).devices
    assert made == ["GPU-a0 1 1", "GPU-a1 1 1", "GPU-a1 1 1", "GPU-a0 1 2", "GPU-a1 1 2"]


def test_numa_node_zero_differs_from_an_unknown_numa_node() -> None:
    (zero,) = messages.snapshot_message(view()).devices
    (unknown,) = messages.snapshot_message(view(of=replace(device(0), numa_node=None))).devices
    assert (zero.HasField("numa_node"), unknown.HasField("numa_node")) == (True, False)


@pytest.mark.parametrize(
    ("record", "certified", "advertised", "scrubbing"),
    [
        (CLEAN, True, True, False),
        (replace(CLEAN, certificate=replace(CERTIFICATE, next_grant=3)), False, True, False),
        (DeviceRecord("GPU-a0"), False, True, False),
        (DeviceRecord("GPU-a0", hygiene=Hygiene.SCRUBBING), False, True, True),
        (replace(CLEAN, health=Health.QUARANTINED, cause=CAUSE), True, False, False),
        (DeviceRecord("GPU-a0", health=Health.PROBATION), False, False, False),
    ],
)
def test_snapshot_carries_the_devices_record(
    record: DeviceRecord, certified: bool, advertised: bool, scrubbing: bool
) -> None:
    (first,) = messages.snapshot_message(view(record)).devices
    assert (first.certified, first.advertised, first.scrubbing) == (certified, advertised, scrubbing)
    assert bool(first.refusal) is not advertised


def test_snapshot_advertises_a_device_as_decided_whatever_its_health() -> None:
    """Covers a break-glass override, an observing policy, and a withdrawal postponed until a pod is gone."""
    sick = replace(CLEAN, health=Health.QUARANTINED, cause=CAUSE)
    (first,) = messages.snapshot_message(view(devices=(DeviceView(device(0), sick, advertised=True),))).devices
    assert (first.advertised, first.state, first.refusal) == (True, "quarantined", "")
    (withheld,) = messages.snapshot_message(view(devices=(DeviceView(device(0), sick, advertised=False),))).devices
    assert (withheld.advertised, "xid-95" in withheld.refusal) == (False, True)


def test_pod_notice_reaches_the_plugin_complete() -> None:
    (message,) = messages.snapshot_message(view(notices=(NOTICE,))).notices
    assert (message.namespace, message.name, message.uid, list(message.devices)) == (
        "team-a",
        "train",
        "uid-1",
        ["GPU-a0", "GPU-a1"],
    )
    assert (message.reason, message.message, message.since, message.evict) == (
        "GpuOutOfService",
        "GPU-a0 is quarantined.",
        900.5,
        False,
    )


def test_notice_for_a_pod_with_an_unknown_uid_has_no_uid() -> None:
    (message,) = messages.snapshot_message(
        view(notices=(replace(NOTICE, pod=Pod("team-a", "train", None), evict=True),))
    ).notices
    assert (message.uid, message.evict) == ("", True)


@pytest.mark.parametrize(
    "later",
    [
        view(version=8),
        view(replace(CLEAN, version=99)),
        view(replace(CLEAN, rests_on="cert-0")),
    ],
)
def test_change_irrelevant_to_the_plugin_sends_no_snapshot(later: NodeView) -> None:
    assert messages.snapshot_key(later) == messages.snapshot_key(view())


@pytest.mark.parametrize(
    "later",
    [
        view(DeviceRecord("GPU-a0")),
        view(DeviceRecord("GPU-a0", hygiene=Hygiene.SCRUBBING)),
        view(replace(CLEAN, health=Health.QUARANTINED, cause=CAUSE)),
        view(of=replace(device(0), access=())),
        view(ready=False),
        view(epoch="e2"),
        view(devices=()),
        view(devices=(DeviceView(device(0), CLEAN, advertised=False),)),
        view(devices=(DeviceView(device(0), CLEAN, taints=(TaintReason("dirty"),)),)),
        view(devices=(DeviceView(device(0), CLEAN, binding=BindingState.IN_USE),)),
        view(notices=(NOTICE,)),
    ],
)
def test_change_relevant_to_the_plugin_sends_a_snapshot(later: NodeView) -> None:
    assert messages.snapshot_key(later) != messages.snapshot_key(view())


# -- messages to operators ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        (Certificate, pb.Certificate),
        (ScrubRecord, pb.Scrub),
        (Finding, pb.Finding),
        (BreakGlass, pb.BreakGlass),
        (BreakerState, pb.Breaker),
        (ActiveWarning, pb.Condition),
        (RecoveryAttempt, pb.RecoveryAttempt),
        (PastQuarantine, pb.QuarantineRecord),
        (Baseline, pb.Baseline),
        (BaselineDifference, pb.Fact),
        (AuditRow, pb.AuditRow),
        (AuditLogPage, pb.AuditPage),
        (AuditHead, pb.AuditHead),
    ],
)
def test_message_has_every_field_of_its_value(kind: tuple[type, type]) -> None:
    value, message = kind
    names = {each.name for each in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    expected = {"recorded_at" if (value, each.name) == (Baseline, "at") else each.name for each in fields(value)}
    assert {each if each in names else NAMES_IN_MESSAGES.get(each) for each in expected} == names


def test_certificate_message_is_complete() -> None:
    attestation = Attestation("a7" * 32, "c3" * 32)
    signed = replace(
        CERTIFICATE,
        next_grant=0,
        rests_on="cert-0",
        key_id="sha256:00",
        signature="c2lnbmVk",
        attestation=attestation,
    )
    message = messages.certificate_message(signed)
    converted = {
        "signature": b"signed",
        "attestation": pb.Attestation(digest=attestation.digest, nonce=attestation.nonce),
    }
    for each in fields(Certificate):
        expected = converted.get(each.name, getattr(signed, each.name))
        got = getattr(message, NAMES_IN_MESSAGES.get(each.name, each.name))
        assert (tuple(got) if isinstance(expected, tuple) else got) == expected, each.name


def test_unused_certificate_has_no_next_grant() -> None:
    assert not messages.certificate_message(CERTIFICATE).HasField("next_grant")


def test_certificate_without_an_attestation_has_none_in_its_message() -> None:
    assert not messages.certificate_message(CERTIFICATE).HasField("attestation")


def test_device_in_use_names_its_pod() -> None:
    record = DeviceRecord(
        "GPU-a0", hygiene=Hygiene.IN_USE, last_grant=grant(2, "new"), open_grants=(grant(1, "old"), grant(2, "new"))
    )
    message = messages.device_message(DeviceView(device(0), record, scrub="scrub-9"))
    assert (message.tenant, message.pod, message.container, message.grant_count) == ("team-a", "new", "main", 2)
    assert (message.last_hand_over_kind, message.active_scrub_id, message.state) == (
        "other-tenant",
        "scrub-9",
        "in-use",
    )


@pytest.mark.parametrize(
    "change",
    [{"evict": True}, {"message": "GPU-a0 is back."}, {"devices": ("GPU-a0",)}, {"reason": "GpuHandOverRefused"}],
)
def test_changed_notice_is_sent_again(change: dict[str, Any]) -> None:
    before, after = view(notices=(NOTICE,)), view(version=8, notices=(replace(NOTICE, **change),))
    assert messages.snapshot_key(after) != messages.snapshot_key(before)
    assert messages.snapshot_key(replace(before, version=9)) == messages.snapshot_key(before)


def test_device_message_names_its_policy_and_enforcement() -> None:
    policy = Policy(name="h200", enforcement=Enforcement.OBSERVE)
    message = messages.device_message(
        DeviceView(device(0), replace(CLEAN, failures=3), advertised=False, policy=policy)
    )
    assert (message.policy, message.enforcement, message.advertised, message.failed_recoveries) == (
        "h200",
        "observe",
        False,
        3,
    )
    assert not message.HasField("break_glass")
    assert messages.device_message(DeviceView(device(0), CLEAN, advertised=True, policy=policy)).advertised


def test_active_break_glass_override_shows_end_time_actor_and_reason() -> None:
    record = replace(CLEAN, break_glass=BreakGlass(1234.5, "a deadline", "uid:7"))
    message = messages.device_message(DeviceView(device(0), record)).break_glass
    assert (message.expires_at, message.reason, message.actor) == (1234.5, "a deadline", "uid:7")


def test_closed_breaker_has_an_empty_message() -> None:
    def shown(breaker: BreakerState) -> tuple[str, float, str]:
        info = ServiceView("0.1.0", "sim", IDENTITY, Policy(), "ok", "e1", breaker)
        message = messages.service_info_message(info).breaker
        return (message.resets_stopped_reason, message.resets_stopped_until, message.soft_quarantines_stopped_reason)

    assert shown(BreakerState()) == ("", 0.0, "")
    assert shown(BreakerState("8 resets.", 1234.5, "2 are out.")) == ("8 resets.", 1234.5, "2 are out.")


def test_unassigned_device_has_no_tenant() -> None:
    message = messages.device_message(DeviceView(device(0), replace(CLEAN, last_grant=grant(2, "gone"))))
    assert (message.tenant, message.pod, message.container, message.grant_count) == ("", "", "", 2)
    assert message.HasField("certificate")
    assert not message.HasField("cause")


def test_device_out_of_service_shows_cause_and_next_action() -> None:
    record = DeviceRecord("GPU-a0", health=Health.QUARANTINED, cause=CAUSE, retry_at=1234.5)
    message = messages.device_message(DeviceView(device(0), record))
    assert (message.state, message.health, message.hygiene, message.next_attempt_at) == (
        "quarantined",
        "quarantined",
        "dirty",
        1234.5,
    )
    assert (message.cause.code, message.cause.recovery_method, message.cause.since) == ("xid-95", "reset", 900.0)
    assert not message.HasField("certificate")


def test_device_lists_every_pod_with_an_open_grant() -> None:
    record = DeviceRecord("GPU-a0", open_grants=(replace(grant(1, "old"), certificate="cert-1"), grant(2)))
    old, nameless = messages.device_message(DeviceView(device(0), record)).open_grants
    assert (old.sequence, old.tenant, old.pod, old.pod_uid, old.container) == (1, "team-a", "old", "uid-1", "main")
    assert (old.hand_over_kind, old.granted_at, old.certificate_id, old.exception) == (
        "other-tenant",
        1000.0,
        "cert-1",
        "",
    )
    assert (nameless.sequence, nameless.tenant, nameless.pod, nameless.pod_uid, nameless.container) == (
        2,
        *("", "", "", ""),
    )


def test_device_message_carries_the_health_evidence() -> None:
    record = DeviceRecord(
        "GPU-a0",
        health=Health.QUARANTINED,
        cause=CAUSE,
        warnings=(ActiveWarning("too-hot", 2.5),),
        lifetime_counters=(("retired_pages", 3), ("xid-95", 7)),
        must_reset=True,
        clean_scrubs=1,
        recent_quarantines=(PastQuarantine(1.0, "xid-95", "team-a"), PastQuarantine(2.0, "too-hot")),
        recovery_attempts=(RecoveryAttempt(1.5, reset=True, operator_ordered=True), RecoveryAttempt(2.5, reset=False)),
    )
    message = messages.device_message(DeviceView(device(0), record, recovery_blocker="8 resets within an hour."))
    assert (message.recovery_blocker, message.reset_pending, message.probation_scrubs_passed) == (
        "8 resets within an hour.",
        True,
        1,
    )
    assert [(each.code, each.since) for each in message.conditions] == [("too-hot", 2.5)]
    assert dict(message.lifetime_counters) == {"retired_pages": 3, "xid-95": 7}
    assert [(each.timestamp, each.code, each.tenant) for each in message.quarantines] == [
        (1.0, "xid-95", "team-a"),
        (2.0, "too-hot", ""),
    ]
    assert [(each.timestamp, each.reset, each.by_operator) for each in message.recovery_attempts] == [
        (1.5, True, True),
        (2.5, False, False),
    ]


def test_device_message_carries_expected_and_found_baseline_facts() -> None:
    baseline = Baseline(
        (("inforom", "G1"), ("model", device(0).model), ("vbios", "1")),
        (("pcie-width", "x8 of x16"),),
        *(900.0, "uid:7", "moved"),
    )
    of = replace(device(0), traits=(("vbios", "2"), ("serial", "never sent"), ("pci_address", "0000:0a:00.0")))
    message = messages.device_message(DeviceView(of, replace(CLEAN, baseline=baseline))).baseline
    assert (message.recorded_at, message.actor, message.reason) == (900.0, "uid:7", "moved")
    assert [(each.name, each.expected, each.actual) for each in message.facts] == [
        ("inforom", "G1", ""),
        ("model", of.model, of.model),
        ("vbios", "1", "2"),
    ]
    assert [(each.name, each.expected) for each in message.accepted_conditions] == [("pcie-width", "x8 of x16")]


def test_device_without_a_baseline_has_no_baseline_facts() -> None:
    assert not messages.device_message(DeviceView(device(0), CLEAN)).HasField("baseline")


def test_service_info_carries_key_audit_head_paths_and_groups() -> None:
    info = ServiceView(
        *("0.1.0", "sim", IDENTITY, Policy(), "ok", "e1"),
        key_id="sha256:00",
        public_key="PEM",
        audit_head=AuditHead(7, "00ff"),
        paths={"state": "/var/lib/scrubber", "cgroups": "/sys/fs/cgroup"},
        policy_error="mine.yaml:2: no",
        kubelet_status="It lists nothing.",
        admin_group="ops",
        read_group="look",
    )
    message = messages.service_info_message(info)
    assert (message.key_id, message.public_key) == ("sha256:00", "PEM")
    assert (message.audit_head.sequence, message.audit_head.hash) == (7, "00ff")
    assert dict(message.paths) == {"state": "/var/lib/scrubber", "cgroups": "/sys/fs/cgroup"}
    assert (message.policy_rejection, message.kubelet_status, message.pid) == (
        "mine.yaml:2: no",
        "It lists nothing.",
        os.getpid(),
    )
    assert (message.admin_group, message.read_group) == ("ops", "look")


@pytest.mark.parametrize("status", list(CertificateStatus))
def test_certificate_message_contains_the_signed_bytes(status: CertificateStatus) -> None:
    key = EphemeralKey()
    signed = replace(sign_certificate(CERTIFICATE, key.key_id, key.sign), next_grant=3)
    message = messages.signed_certificate_message(CertificateView(signed, status))
    assert verify_signature(key.public_key, message.payload, message.certificate.signature)
    assert parse_statement(message.payload) == CERTIFICATE
    assert (message.certificate.key_id, message.certificate.next_grant, message.status) == (key.key_id, 3, status.value)


def test_certificate_from_before_signing_keys_has_no_signature() -> None:
    message = messages.signed_certificate_message(CertificateView(CERTIFICATE, CertificateStatus.VOIDED))
    assert (message.certificate.key_id, message.certificate.signature) == ("", b"")
    assert message.payload


def test_audit_page_message_carries_rows_in_their_hashed_form() -> None:
    row = AuditRow(8, 9.25, "scrub.finished", "GPU-a0", "s1", "uid:7", '{"reason":"\\ud800"}', "00", "ff")
    of_the_node = AuditRow(9, 9.5, "service.started", None, None, "service", "{}", "ff", "0f")
    message = messages.audit_page_message(AuditLogPage(AuditHead(7, "00"), AuditHead(9, "0f"), (row, of_the_node)))
    assert (message.pruned.sequence, message.pruned.hash, message.head.sequence, message.head.hash) == (
        7,
        "00",
        9,
        "0f",
    )
    for each, shown in zip((row, of_the_node), message.rows, strict=True):
        for name in (each.name for each in fields(AuditRow)):
            value = getattr(each, name)
            message_name = NAMES_IN_MESSAGES.get(name, name)
            assert (getattr(shown, message_name) == value) if value is not None else not shown.HasField(message_name)


def test_scrub_message_carries_its_evidence() -> None:
    finding = Finding(Step.HOLDERS, "leftover", Severity.NOTE, "PID 7 was ended.", {"ended": 1})
    step = StepResult(Step.HOLDERS, Verdict.PASSED, 0.25, (finding,), {"walked": True}, ("other users",))
    message = messages.scrub_message(
        ScrubRecord("s1", "GPU-a0", PathKind.SLOW, ScrubTrigger.RELEASE, 1.0, steps=(step,))
    )
    assert (message.finished_at, message.outcome, message.trigger) == (0.0, "", "release")
    assert json.loads(message.steps[0].measurements_json) == {"walked": True}
    assert json.loads(message.steps[0].findings[0].evidence_json) == {"ended": 1}
    assert list(message.steps[0].not_covered) == ["other users"]


@pytest.mark.parametrize(
    "message",
    [
        lambda: messages.device_message(
            DeviceView(
                device(0), DeviceRecord("GPU-a0", health=Health.CONDEMNED, cause=replace(CAUSE, message=NOT_TEXT))
            )
        ),
        lambda: messages.device_message(
            DeviceView(device(0), replace(CLEAN, break_glass=BreakGlass(1.0, NOT_TEXT, "uid:7")), policy=Policy())
        ),
        lambda: messages.device_message(DeviceView(device(0), CLEAN, recovery_blocker=NOT_TEXT)),
        lambda: messages.device_message(DeviceView(device(0), CLEAN, unauthorized_users=(NOT_TEXT,))),
        lambda: messages.device_message(
            DeviceView(
                replace(device(0), model=NOT_TEXT),
                replace(CLEAN, baseline=Baseline((("vbios", NOT_TEXT),), (("pcie-width", NOT_TEXT),), reason=NOT_TEXT)),
            )
        ),
        lambda: messages.device_message(
            DeviceView(device(0), replace(CLEAN, warnings=(ActiveWarning(NOT_TEXT, 1.0),)))
        ),
        lambda: messages.service_info_message(
            replace(
                ServiceView("0.1.0", "sim", IDENTITY, Policy(), "ok", "e1"),
                paths={"state": f"/var/lib/{NOT_TEXT}"},
                policy_error=NOT_TEXT,
                kubelet_status=NOT_TEXT,
            )
        ),
        lambda: messages.snapshot_message(view(notices=(replace(NOTICE, message=NOT_TEXT),))),
        lambda: messages.service_info_message(
            ServiceView("0.1.0", "sim", IDENTITY, Policy(), NOT_TEXT, "e1", BreakerState(NOT_TEXT, None, NOT_TEXT))
        ),
        lambda: messages.certificate_message(replace(CERTIFICATE, not_covered=(NOT_TEXT,), covered=(NOT_TEXT,))),
        lambda: messages.scrub_message(
            ScrubRecord(
                "s1",
                "GPU-a0",
                PathKind.SLOW,
                ScrubTrigger.RELEASE,
                1.0,
                steps=(
                    StepResult(
                        Step.HOLDERS,
                        Verdict.FAILED,
                        0.1,
                        (Finding(Step.HOLDERS, "device-busy", Severity.BLOCKING, NOT_TEXT, {"command": NOT_TEXT}),),
                        {"command": NOT_TEXT},
                        (NOT_TEXT,),
                    ),
                ),
            )
        ),
    ],
)
def test_process_name_that_is_not_utf8_does_not_break_an_answer(message: Callable[[], Message]) -> None:
    assert message().SerializeToString()


# -- requests ----------------------------------------------------------------------------------------------------------


def test_hand_over_without_a_timeout_waits_as_long_as_the_policy_allows() -> None:
    request = pb.HandOverRequest(device_ids=["b", "a", "a"], unreserved_ids=["a"])
    assert messages.parse_hand_over_call(request) == HandOverCall(("b", "a", "a"), None, frozenset({"a"}))


def test_id_announced_twice_in_a_resource_mapping_is_refused() -> None:
    twice = pb.SetResourceMappingRequest(
        resource="a.b/c", mappings=[pb.IdMapping(id="0", device_id="x"), pb.IdMapping(id="0", device_id="y")]
    )
    with pytest.raises(InvalidRequest, match="twice"):
        messages.parse_resource_mapping(twice)


def test_hand_over_waits_for_the_requested_time() -> None:
    assert messages.parse_hand_over_call(pb.HandOverRequest(device_ids=["a"], wait_seconds=2.5)).wait_seconds == 2.5


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, -math.inf, 1e9])
def test_impossible_wait_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="wait_seconds must be between 0 and 3600"):
        messages.parse_hand_over_call(pb.HandOverRequest(device_ids=["a"], wait_seconds=seconds))


def test_unseen_reservation_of_a_device_outside_the_request_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unreserved_ids contains b"):
        messages.parse_hand_over_call(pb.HandOverRequest(device_ids=["a"], unreserved_ids=["a", "b"]))


@pytest.mark.parametrize("name", ["", "Fast", "medium"])
def test_unknown_scrub_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="the paths are: fast, slow"):
        messages.parse_scrub_path(name)


@pytest.mark.parametrize(
    ("reason", "why"), [("", "A reason is required"), ("  \n", "A reason is required"), ("x" * 501, "501 characters")]
)
def test_operator_action_with_an_unusable_reason_is_refused(reason: str, why: str) -> None:
    for request in (
        pb.QuarantineRequest(device="0", reason=reason),
        pb.BreakGlassRequest(device="0", reason=reason, duration_seconds=60.0),
        pb.ResetRequest(device="0", reason=reason),
        pb.AcceptBaselineRequest(device="0", reason=reason),
    ):
        with pytest.raises(InvalidRequest, match=why):
            messages.parse_reason(request)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1800.0, 7 * 86400.0])
def test_break_glass_duration_is_taken_from_the_request(seconds: float) -> None:
    assert (
        messages.parse_break_glass_seconds(pb.BreakGlassRequest(device="0", reason="why", duration_seconds=seconds))
        == seconds
    )


@pytest.mark.parametrize("seconds", [-0.001, math.nan, math.inf, -math.inf, 7 * 86400.1, 1e300])
def test_impossible_break_glass_duration_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"between 0 \(which ends it\) and 604800 seconds"):
        messages.parse_break_glass_seconds(pb.BreakGlassRequest(device="0", reason="why", duration_seconds=seconds))
