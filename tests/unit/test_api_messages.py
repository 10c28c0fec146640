"""Values become messages whole: nothing is lost on the way, and nothing from outside can make an answer fail."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from scrubber.api import messages
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.assignment import Assignment, Pod
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
from scrubber.domain.handover import HandOver
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.engine.views import DeviceView, HandOverCall, NodeView
from tests.contract.api_service import CERTIFICATE, device

CAUSE = Cause("xid-95", "Uncontained ECC error.", WayBack.RESET, 900.0)
CLEAN = DeviceRecord("GPU-a0", hygiene=Hygiene.CLEAN, certificate=CERTIFICATE)
NOT_TEXT = b"\xff\xfe".decode("utf-8", "surrogateescape")


def view(record: DeviceRecord = CLEAN, of: Device | None = None, **changes: object) -> NodeView:
    node = NodeView(version=7, devices=(DeviceView(of or device(0), record),), ready=True, epoch="e1")
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
    ],
)
def test_what_concerns_the_plugin_is_told(later: NodeView) -> None:
    assert messages.plugin_part(later) != messages.plugin_part(view())


# -- what operators are told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [(Certificate, pb.Certificate), (ScrubRecord, pb.Scrub), (Finding, pb.Finding)])
def test_a_message_has_every_field_of_its_value(kind: tuple[type, type]) -> None:
    value, message = kind
    encoded = {"measured": "measured_json", "evidence": "evidence_json"}
    wanted = {encoded.get(each.name, each.name) for each in fields(value)}
    assert wanted == {each.name for each in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_a_certificate_is_shown_whole() -> None:
    told = messages.certificate_message(replace(CERTIFICATE, next_grant=0, rests_on="cert-0"))
    for each in fields(Certificate):
        wanted = getattr(replace(CERTIFICATE, next_grant=0, rests_on="cert-0"), each.name)
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
def test_a_process_name_that_is_no_text_does_not_break_an_answer(told: Callable[[], pb.Scrub]) -> None:
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
    with pytest.raises(InvalidRequest, match=why):
        messages.reason_of(pb.QuarantineRequest(device="0", reason=reason))
