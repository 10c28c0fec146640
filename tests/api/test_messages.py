"""Values become messages whole: nothing is lost on the way, and nothing from outside can make an answer fail."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from scrubber.adapters.signing.ed25519 import EphemeralKey, verify
from scrubber.api import messages
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.baseline import Baseline, Difference
from scrubber.domain.basis import HandOver
from scrubber.domain.breaker import Breaker
from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import (
    Certificate,
    Finding,
    Occasion,
    Path,
    ScrubRecord,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord, Glass, Grant, Lasting
from scrubber.domain.statement import claim, sealed
from scrubber.domain.tally import Attempt, Strike
from scrubber.engine.views import (
    CertificateView,
    DeviceView,
    HandOverCall,
    NodeView,
    PodNotice,
    ServiceView,
    Standing,
)
from scrubber.ports.record import AuditRow, Head, TrailPage
from tests.api.service import CERTIFICATE, IDENTITY, device, of_record

CAUSE = Cause("xid-95", "Uncontained ECC error.", WayBack.RESET, 900.0)
CLEAN = DeviceRecord("GPU-a0", hygiene=Hygiene.CLEAN, certificate=CERTIFICATE)
NOTICE = PodNotice(
    Pod("team-a", "train", "uid-1"), ("GPU-a0", "GPU-a1"), "GpuOutOfService", "GPU-a0 is quarantined.", 900.5, False
)
NOT_TEXT = b"\xff\xfe".decode("utf-8", "surrogateescape")


def view(record: DeviceRecord = CLEAN, of: Device | None = None, **changes: object) -> NodeView:
    node = NodeView(version=7, devices=(of_record(of or device(0), record),), ready=True, epoch="e1")
    return replace(node, **changes)  # type: ignore[arg-type]


def grant(number: int, pod: str | None = None) -> Grant:
    assignment = None if pod is None else Assignment(Pod("team-a", pod, "uid-1"), "main", frozenset({"GPU-a0"}))
    return Grant(number, assignment, HandOver.OTHER_TENANT, 1000.0, "boot-1")


# -- what the plugin is told -------------------------------------------------------------------------------------------


def test_a_snapshot_carries_all_that_a_container_needs() -> None:
    (told,) = messages.snapshot(view()).devices
    assert (told.id, told.index, told.numa_node, list(told.peers)) == ("GPU-a0", "0", 0, ["GPU-a1"])
    assert [(each.kind, each.host_path, each.container_path) for each in told.access] == [
        ("mount", "/sim/devices/0/memory", "/dev/simgpu0")
    ]


def test_numa_node_zero_is_not_the_same_as_not_known() -> None:
    (zero,) = messages.snapshot(view()).devices
    (unknown,) = messages.snapshot(view(of=replace(device(0), numa_node=None))).devices
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
def test_a_snapshot_tells_what_the_record_says(
    record: DeviceRecord, certified: bool, advertised: bool, scrubbing: bool
) -> None:
    (told,) = messages.snapshot(view(record)).devices
    assert (told.certified, told.advertised, told.scrubbing) == (certified, advertised, scrubbing)
    assert bool(told.refusal) is not advertised


def test_what_is_offered_is_advertised_whatever_is_known_of_it() -> None:
    """A glass that is broken, a policy that observes, news that are held back until a pod is gone."""
    sick = replace(CLEAN, health=Health.QUARANTINED, cause=CAUSE)
    (told,) = messages.snapshot(view(devices=(DeviceView(device(0), sick, offered=True),))).devices
    assert (told.advertised, told.state, told.refusal) == (True, "quarantined", "")
    (withheld,) = messages.snapshot(view(devices=(DeviceView(device(0), sick, offered=False),))).devices
    assert (withheld.advertised, "xid-95" in withheld.refusal) == (False, True)


def test_a_notice_reaches_the_plugin_whole() -> None:
    (told,) = messages.snapshot(view(notices=(NOTICE,))).notices
    assert (told.namespace, told.name, told.uid, list(told.devices)) == (
        "team-a",
        "train",
        "uid-1",
        ["GPU-a0", "GPU-a1"],
    )
    assert (told.reason, told.sentence, told.since, told.evict) == (
        "GpuOutOfService",
        "GPU-a0 is quarantined.",
        900.5,
        False,
    )


def test_a_notice_of_a_pod_whose_uid_nobody_knows_has_none() -> None:
    (told,) = messages.snapshot(view(notices=(replace(NOTICE, pod=Pod("team-a", "train", None), evict=True),))).notices
    assert (told.uid, told.evict) == ("", True)


@pytest.mark.parametrize(
    "later",
    [
        view(version=8),
        view(replace(CLEAN, version=99)),
        view(replace(CLEAN, rests_on="cert-0")),
    ],
)
def test_what_does_not_concern_the_plugin_is_not_told_again(later: NodeView) -> None:
    assert messages.plugin_part(later) == messages.plugin_part(view())


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
        view(devices=(DeviceView(device(0), CLEAN, offered=False),)),
        view(notices=(NOTICE,)),
    ],
)
def test_what_concerns_the_plugin_is_told(later: NodeView) -> None:
    assert messages.plugin_part(later) != messages.plugin_part(view())


# -- what operators are told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        (Certificate, pb.Certificate),
        (ScrubRecord, pb.Scrub),
        (Finding, pb.Finding),
        (Glass, pb.Glass),
        (Breaker, pb.Breaker),
        (Lasting, pb.Lasting),
        (Attempt, pb.Attempt),
        (Strike, pb.Strike),
        (Baseline, pb.Baseline),
        (Difference, pb.Fact),
        (AuditRow, pb.AuditRow),
        (TrailPage, pb.AuditPage),
        (Head, pb.AuditHead),
    ],
)
def test_a_message_has_every_field_of_its_value(kind: tuple[type, type]) -> None:
    value, message = kind
    encoded = {"measured": "measured_json", "evidence": "evidence_json", "tenant": "tenant_namespace"}
    wanted = {encoded.get(each.name, each.name) for each in fields(value)}
    assert wanted == {each.name for each in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_a_certificate_is_shown_whole() -> None:
    signed = replace(CERTIFICATE, next_grant=0, rests_on="cert-0", key_id="sha256:00", signature="c2lnbmVk")
    told = messages.certificate_message(signed)
    for each in fields(Certificate):
        wanted = b"signed" if each.name == "signature" else getattr(signed, each.name)
        got = getattr(told, each.name)
        assert (tuple(got) if isinstance(wanted, tuple) else got) == wanted, each.name


def test_an_unused_certificate_has_no_next_grant() -> None:
    assert not messages.certificate_message(CERTIFICATE).HasField("next_grant")


def test_a_device_in_use_shows_whose_it_is() -> None:
    record = DeviceRecord(
        "GPU-a0", hygiene=Hygiene.IN_USE, last_grant=grant(2, "new"), open_grants=(grant(1, "old"), grant(2, "new"))
    )
    told = messages.device_message(DeviceView(device(0), record, scrub="scrub-9"))
    assert (told.tenant_namespace, told.pod, told.container, told.grants) == ("team-a", "new", "main", 2)
    assert (told.kind, told.scrub, told.state) == ("other-tenant", "scrub-9", "in-use")


@pytest.mark.parametrize(
    "change",
    [{"evict": True}, {"sentence": "GPU-a0 is back."}, {"devices": ("GPU-a0",)}, {"reason": "GpuNotHandedOver"}],
)
def test_a_notice_that_changed_is_told_again(change: dict[str, Any]) -> None:
    before, after = view(notices=(NOTICE,)), view(version=8, notices=(replace(NOTICE, **change),))
    assert messages.plugin_part(after) != messages.plugin_part(before)
    assert messages.plugin_part(replace(before, version=9)) == messages.plugin_part(before)


def test_a_device_shows_whose_rules_it_is_under() -> None:
    policy = Policy(name="h200", enforcement=Enforcement.OBSERVE)
    told = messages.device_message(DeviceView(device(0), replace(CLEAN, failures=3), offered=False, policy=policy))
    assert (told.policy, told.enforcement, told.offered, told.failures) == ("h200", "observe", False, 3)
    assert not told.HasField("glass")
    assert messages.device_message(DeviceView(device(0), CLEAN, offered=True, policy=policy)).offered


def test_a_broken_glass_shows_until_when_by_whom_and_why() -> None:
    record = replace(CLEAN, glass=Glass(1234.5, "a deadline", "uid:7"))
    told = messages.device_message(DeviceView(device(0), record)).glass
    assert (told.until, told.reason, told.actor) == (1234.5, "a deadline", "uid:7")


def test_a_breaker_that_is_closed_says_nothing() -> None:
    def shown(breaker: Breaker) -> tuple[str, float, str]:
        info = ServiceView("0.1.0", "sim", IDENTITY, Policy(), "ok", "e1", breaker)
        told = messages.service_info(info).breaker
        return (told.resets, told.resets_until, told.soft)

    assert shown(Breaker()) == ("", 0.0, "")
    assert shown(Breaker("8 resets.", 1234.5, "2 are out.")) == ("8 resets.", 1234.5, "2 are out.")


def test_a_device_that_nobody_has_shows_nobody() -> None:
    told = messages.device_message(DeviceView(device(0), replace(CLEAN, last_grant=grant(2, "gone"))))
    assert (told.tenant_namespace, told.pod, told.container, told.grants) == ("", "", "", 2)
    assert told.HasField("certificate")
    assert not told.HasField("cause")


def test_a_device_out_of_service_shows_why_and_what_next() -> None:
    record = DeviceRecord("GPU-a0", health=Health.QUARANTINED, cause=CAUSE, retry_at=1234.5)
    told = messages.device_message(DeviceView(device(0), record))
    assert (told.state, told.health, told.hygiene, told.retry_at) == ("quarantined", "quarantined", "dirty", 1234.5)
    assert (told.cause.code, told.cause.way_back, told.cause.since) == ("xid-95", "reset", 900.0)
    assert not told.HasField("certificate")


def test_a_device_shows_everybody_whose_grant_is_not_over_yet() -> None:
    record = DeviceRecord("GPU-a0", open_grants=(replace(grant(1, "old"), certificate="cert-1"), grant(2)))
    old, nameless = messages.device_message(DeviceView(device(0), record)).tenancies
    assert (old.grant, old.tenant_namespace, old.pod, old.uid, old.container) == (1, "team-a", "old", "uid-1", "main")
    assert (old.kind, old.at, old.certificate, old.exception) == ("other-tenant", 1000.0, "cert-1", "")
    assert (nameless.grant, nameless.tenant_namespace, nameless.pod, nameless.uid, nameless.container) == (
        2,
        *("", "", "", ""),
    )


def test_a_device_shows_what_its_health_rests_on() -> None:
    record = DeviceRecord(
        "GPU-a0",
        health=Health.QUARANTINED,
        cause=CAUSE,
        lasting=(Lasting("too-hot", 2.5),),
        lifetime=(("retired_pages", 3), ("xid-95", 7)),
        must_reset=True,
        clean_scrubs=1,
        strikes=(Strike(1.0, "xid-95", "team-a"), Strike(2.0, "too-hot")),
        attempts=(Attempt(1.5, reset=True, ordered=True), Attempt(2.5, reset=False)),
    )
    told = messages.device_message(DeviceView(device(0), record, waits="8 resets within an hour."))
    assert (told.waits, told.must_reset, told.clean_scrubs) == ("8 resets within an hour.", True, 1)
    assert [(each.code, each.since) for each in told.lasting] == [("too-hot", 2.5)]
    assert dict(told.lifetime) == {"retired_pages": 3, "xid-95": 7}
    assert [(each.at, each.code, each.tenant_namespace) for each in told.strikes] == [
        (1.0, "xid-95", "team-a"),
        (2.0, "too-hot", ""),
    ]
    assert [(each.at, each.reset, each.ordered) for each in told.attempts] == [(1.5, True, True), (2.5, False, False)]


def test_a_device_shows_what_it_should_be_beside_what_it_is() -> None:
    baseline = Baseline(
        (("inforom", "G1"), ("model", device(0).model), ("vbios", "1")),
        (("pcie-width", "x8 of x16"),),
        *(900.0, "uid:7", "moved"),
    )
    of = replace(device(0), traits=(("vbios", "2"), ("serial", "never told"), ("pci_address", "0000:0a:00.0")))
    told = messages.device_message(DeviceView(of, replace(CLEAN, baseline=baseline))).baseline
    assert (told.at, told.actor, told.reason) == (900.0, "uid:7", "moved")
    assert [(each.name, each.expected, each.found) for each in told.facts] == [
        ("inforom", "G1", ""),
        ("model", of.model, of.model),
        ("vbios", "1", "2"),
    ]
    assert [(each.name, each.expected) for each in told.conditions] == [("pcie-width", "x8 of x16")]


def test_a_device_that_was_never_looked_at_has_no_baseline() -> None:
    assert not messages.device_message(DeviceView(device(0), CLEAN)).HasField("baseline")


def test_the_service_shows_its_key_its_audit_where_things_are_and_who_may_ask() -> None:
    info = ServiceView(
        *("0.1.0", "sim", IDENTITY, Policy(), "ok", "e1"),
        key_id="sha256:00",
        public_key="PEM",
        audit_head=Head(7, "00ff"),
        places={"state": "/var/lib/scrubber", "cgroups": "/sys/fs/cgroup"},
        policy_refused="mine.yaml:2: no",
        kubelet="It lists nothing.",
        admin_group="ops",
        read_group="look",
    )
    told = messages.service_info(info)
    assert (told.key_id, told.public_key) == ("sha256:00", "PEM")
    assert (told.audit_head.sequence, told.audit_head.hash) == (7, "00ff")
    assert dict(told.places) == {"state": "/var/lib/scrubber", "cgroups": "/sys/fs/cgroup"}
    assert (told.policy_refused, told.kubelet, told.pid) == ("mine.yaml:2: no", "It lists nothing.", os.getpid())
    assert (told.admin_group, told.read_group) == ("ops", "look")


@pytest.mark.parametrize("standing", list(Standing))
def test_a_certificate_comes_with_the_very_bytes_that_were_signed(standing: Standing) -> None:
    key = EphemeralKey()
    signed = replace(sealed(CERTIFICATE, key.key_id, key.sign), next_grant=3)
    told = messages.signed_certificate(CertificateView(signed, standing))
    assert verify(key.public_key, told.payload, told.certificate.signature)
    assert claim(told.payload) == CERTIFICATE
    assert (told.certificate.key_id, told.certificate.next_grant, told.standing) == (key.key_id, 3, standing.value)


def test_a_certificate_of_before_there_were_keys_has_no_signature() -> None:
    told = messages.signed_certificate(CertificateView(CERTIFICATE, Standing.VOID))
    assert (told.certificate.key_id, told.certificate.signature) == ("", b"")
    assert told.payload


def test_a_page_of_the_audit_shows_its_rows_as_they_were_hashed() -> None:
    row = AuditRow(8, 9.25, "scrub.finished", "GPU-a0", "s1", "uid:7", '{"reason":"\\ud800"}', "00", "ff")
    of_the_node = AuditRow(9, 9.5, "service.started", None, None, "service", "{}", "ff", "0f")
    told = messages.audit_page(TrailPage(Head(7, "00"), Head(9, "0f"), (row, of_the_node)))
    assert (told.pruned.sequence, told.pruned.hash, told.head.sequence, told.head.hash) == (7, "00", 9, "0f")
    for each, shown in zip((row, of_the_node), told.rows, strict=True):
        for name in (each.name for each in fields(AuditRow)):
            value = getattr(each, name)
            assert (getattr(shown, name) == value) if value is not None else not shown.HasField(name)


def test_a_scrub_is_shown_with_its_evidence() -> None:
    finding = Finding(Step.HOLDERS, "leftover", Severity.NOTE, "PID 7 was ended.", {"ended": 1})
    step = StepResult(Step.HOLDERS, Verdict.PASSED, 0.25, (finding,), {"walked": True}, ("other users",))
    told = messages.scrub_message(ScrubRecord("s1", "GPU-a0", Path.SLOW, Occasion.RELEASE, 1.0, steps=(step,)))
    assert (told.ended, told.outcome, told.occasion) == (0.0, "", "release")
    assert json.loads(told.steps[0].measured_json) == {"walked": True}
    assert json.loads(told.steps[0].findings[0].evidence_json) == {"ended": 1}
    assert list(told.steps[0].not_covered) == ["other users"]


@pytest.mark.parametrize(
    "told",
    [
        lambda: messages.device_message(
            DeviceView(
                device(0), DeviceRecord("GPU-a0", health=Health.CONDEMNED, cause=replace(CAUSE, sentence=NOT_TEXT))
            )
        ),
        lambda: messages.device_message(
            DeviceView(device(0), replace(CLEAN, glass=Glass(1.0, NOT_TEXT, "uid:7")), policy=Policy())
        ),
        lambda: messages.device_message(DeviceView(device(0), CLEAN, waits=NOT_TEXT)),
        lambda: messages.device_message(DeviceView(device(0), CLEAN, strangers=(NOT_TEXT,))),
        lambda: messages.device_message(
            DeviceView(
                replace(device(0), model=NOT_TEXT),
                replace(CLEAN, baseline=Baseline((("vbios", NOT_TEXT),), (("pcie-width", NOT_TEXT),), reason=NOT_TEXT)),
            )
        ),
        lambda: messages.device_message(DeviceView(device(0), replace(CLEAN, lasting=(Lasting(NOT_TEXT, 1.0),)))),
        lambda: messages.service_info(
            replace(
                ServiceView("0.1.0", "sim", IDENTITY, Policy(), "ok", "e1"),
                places={"state": f"/var/lib/{NOT_TEXT}"},
                policy_refused=NOT_TEXT,
                kubelet=NOT_TEXT,
            )
        ),
        lambda: messages.snapshot(view(notices=(replace(NOTICE, sentence=NOT_TEXT),))),
        lambda: messages.service_info(
            ServiceView("0.1.0", "sim", IDENTITY, Policy(), NOT_TEXT, "e1", Breaker(NOT_TEXT, None, NOT_TEXT))
        ),
        lambda: messages.certificate_message(replace(CERTIFICATE, not_covered=(NOT_TEXT,), covered=(NOT_TEXT,))),
        lambda: messages.scrub_message(
            ScrubRecord(
                "s1",
                "GPU-a0",
                Path.SLOW,
                Occasion.RELEASE,
                1.0,
                steps=(
                    StepResult(
                        Step.HOLDERS,
                        Verdict.FAILED,
                        0.1,
                        (Finding(Step.HOLDERS, "held", Severity.DIRTY, NOT_TEXT, {"command": NOT_TEXT}),),
                        {"command": NOT_TEXT},
                        (NOT_TEXT,),
                    ),
                ),
            )
        ),
    ],
)
def test_a_process_name_that_is_no_text_does_not_break_an_answer(told: Callable[[], Message]) -> None:
    assert told().SerializeToString()


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_a_hand_over_without_a_time_waits_as_long_as_the_policy_says() -> None:
    request = pb.HandOverRequest(device_ids=["b", "a", "a"], reserved_unseen=["a"])
    assert messages.hand_over_call(request) == HandOverCall(("b", "a", "a"), None, frozenset({"a"}))


def test_an_id_that_is_announced_twice_is_refused() -> None:
    twice = pb.AnnounceRequest(resource="a.b/c", offers=[pb.Offer(id="0", device="x"), pb.Offer(id="0", device="y")])
    with pytest.raises(InvalidRequest, match="twice"):
        messages.offers_of(twice)


def test_a_hand_over_waits_as_long_as_it_is_asked_to() -> None:
    assert messages.hand_over_call(pb.HandOverRequest(device_ids=["a"], wait_seconds=2.5)).wait_seconds == 2.5


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, -math.inf, 1e9])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="waits between 0 and 3600 seconds"):
        messages.hand_over_call(pb.HandOverRequest(device_ids=["a"], wait_seconds=seconds))


def test_an_unseen_reservation_of_a_device_that_is_not_asked_for_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="names b"):
        messages.hand_over_call(pb.HandOverRequest(device_ids=["a"], reserved_unseen=["a", "b"]))


@pytest.mark.parametrize("name", ["", "Fast", "medium"])
def test_a_path_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="there are: fast, slow"):
        messages.path_of(name)


@pytest.mark.parametrize(("reason", "why"), [("", "Say why"), ("  \n", "Say why"), ("x" * 501, "501 characters")])
def test_an_act_without_a_fit_reason_is_refused(reason: str, why: str) -> None:
    for request in (
        pb.QuarantineRequest(device="0", reason=reason),
        pb.BreakGlassRequest(device="0", reason=reason, seconds=60.0),
        pb.ResetRequest(device="0", reason=reason),
        pb.AcceptBaselineRequest(device="0", reason=reason),
    ):
        with pytest.raises(InvalidRequest, match=why):
            messages.reason_of(request)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1800.0, 7 * 86400.0])
def test_a_glass_is_broken_for_as_long_as_is_asked(seconds: float) -> None:
    assert messages.glass_seconds(pb.BreakGlassRequest(device="0", reason="why", seconds=seconds)) == seconds


@pytest.mark.parametrize("seconds", [-0.001, math.nan, math.inf, -math.inf, 7 * 86400.1, 1e300])
def test_a_glass_is_broken_for_no_impossible_time(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"between 0 \(which ends it\) and 604800 seconds"):
        messages.glass_seconds(pb.BreakGlassRequest(device="0", reason="why", seconds=seconds))
