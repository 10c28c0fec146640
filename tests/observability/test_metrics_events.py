"""Counters of events: hand-overs, scrubs and their steps, quarantines, XIDs."""

from __future__ import annotations

from typing import Any

import pytest

from scrubber.domain.errors import (
    DeviceBusy,
    DriverTimeout,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    Quarantined,
    ScrubberError,
    Unavailable,
)
from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger, Severity, Step, StepResult, Verdict
from scrubber.domain.handover_kind import HandOverKind
from scrubber.observability.log_context import LogContextTracer
from scrubber.observability.metrics.labels import exemplar
from scrubber.ports.record import Event
from tests.measures import NOON, Measures, event, finding, memory, scrub, shown
from tests.observability.traces_stage import Sent, trace_of


@pytest.fixture
def measures() -> Measures:
    return Measures()


# -- hand-overs --------------------------------------------------------------------------------------------------------


def test_granted_and_refused_hand_overs_are_counted(measures: Measures) -> None:
    granted = event("handover.granted", kind=HandOverKind.SAME_TENANT.value, path=PathKind.SLOW.value)
    measures(granted, granted, event("handover.refused", code=NotReady.code), event("handover.waiting"))
    assert measures.value("scrubber_handovers_total", kind="same-tenant", path="slow", outcome="granted") == 2
    assert measures.value("scrubber_handovers_total", kind="unknown", path="none", outcome="not-ready") == 1


def test_hand_over_duration_is_measured_by_path_and_outcome(measures: Measures) -> None:
    fast = event("handover.granted", kind=HandOverKind.SAME_POD.value, path=PathKind.FAST.value, duration_seconds=0.004)
    measures(fast, fast, event("handover.refused", code="scrubbing", duration_seconds=25.0), event("handover.refused"))
    name, at_most = "scrubber_handover_duration_seconds", {"path": "fast", "outcome": "granted"}
    assert measures.value(f"{name}_count", **at_most) == 2
    assert measures.value(f"{name}_sum", path="none", outcome="scrubbing") == 25.0
    assert measures.value(f"{name}_bucket", le="0.0025", **at_most) == 0
    assert measures.value(f"{name}_bucket", le="0.005", **at_most) == 2
    assert measures.value(f"{name}_count", path="none", outcome="other") is None


@pytest.mark.parametrize("bound", ["10.0", "15.0", "20.0", "25.0", "30.0"])
def test_hand_over_duration_buckets_distinguish_waits_up_to_the_deadline(measures: Measures, bound: str) -> None:
    measures(event("handover.granted", path="slow", kind="unknown", duration_seconds=14.0))
    counted = measures.value("scrubber_handover_duration_seconds_bucket", path="slow", outcome="granted", le=bound)
    assert counted == (float(bound) >= 14.0)


@pytest.mark.parametrize("error", [Unavailable, DeviceBusy, InvalidRequest, LedgerFailure, Quarantined, DriverTimeout])
def test_refusal_is_counted_under_its_error_code(measures: Measures, error: type[ScrubberError]) -> None:
    measures(event("handover.refused", code=error.code))
    assert measures.value("scrubber_handovers_total", kind="unknown", path="none", outcome=error.code) == 1


# -- scrubs ------------------------------------------------------------------------------------------------------------


def finished(**fields: Any) -> Event:
    words = {"path": PathKind.SLOW.value, "trigger": ScrubTrigger.RELEASE.value, "outcome": Outcome.PASSED.value}
    return event("scrub.finished", **{**words, "duration_seconds": 20.0, **fields})


def test_scrub_is_counted_and_measured(measures: Measures) -> None:
    measures(finished(residue_bytes=4096))
    labels = {"path": "slow", "trigger": "release", "outcome": "passed"}
    assert measures.value("scrubber_scrubs_total", **labels) == 1
    assert measures.value("scrubber_scrub_duration_seconds_sum", **labels) == 20.0
    assert measures.value("scrubber_scrub_duration_seconds_bucket", **labels, le="10.0") == 0
    assert measures.value("scrubber_scrub_duration_seconds_bucket", **labels, le="30.0") == 1
    assert measures.value("scrubber_residue_bytes_total") == 4096


def test_scrub_and_step_durations_carry_the_scrub_id_as_exemplar(measures: Measures) -> None:
    measures(finished())
    measures.metrics.record_scrub(scrub(memory(3.0), id="scrub-7"))
    page = measures.page("application/openmetrics-text; version=1.0.0").splitlines()
    (of_the_scrub,) = (line for line in page if line.startswith("scrubber_scrub_duration") and "# {" in line)
    (of_the_step,) = (line for line in page if line.startswith("scrubber_step_duration") and "# {" in line)
    assert '# {scrub_id="S-1"} 20.0' in of_the_scrub
    assert '# {scrub_id="scrub-7"} 3.0' in of_the_step


@pytest.mark.parametrize("kept", [True, False])
def test_exemplar_names_the_trace_only_if_the_sampler_keeps_it(
    kept: bool, measures: Measures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on" if kept else "always_off")
    sent = Sent()
    with LogContextTracer(sent.traces).span("hand-over"):
        measures(event("handover.granted", path="fast", kind="unknown", duration_seconds=0.004))
        measures.metrics.record_scrub(scrub(memory(3.0), id="scrub-7"))
        measures(finished())
    trace = f',trace_id="{trace_of(sent.named("hand-over")):032x}"' if kept else ""
    page = measures.page("application/openmetrics-text; version=1.0.0").splitlines()
    found = {line.split("_bucket")[0]: line.split("# ")[1] for line in page if "_bucket{" in line and "# {" in line}
    assert {name: text.rsplit(" ", 1)[0] for name, text in found.items()} == {
        "scrubber_handover_duration_seconds": f'{{scrub_id="S-1"{trace}}} 0.004',
        "scrubber_scrub_duration_seconds": f'{{scrub_id="S-1"{trace}}} 20.0',
        "scrubber_step_duration_seconds": f'{{scrub_id="scrub-7"{trace}}} 3.0',
    }


@pytest.mark.parametrize(
    ("scrub_id", "trace", "labels"),
    [
        (None, None, None),
        (None, "ab" * 16, {"trace_id": "ab" * 16}),
        ("s" * 80, "ab" * 16, {"scrub_id": "s" * 80, "trace_id": "ab" * 16}),
        ("s" * 81, "ab" * 16, {"scrub_id": "s" * 81}),
        ("s" * 120, None, {"scrub_id": "s" * 120}),
        ("s" * 121, "ab" * 16, {"trace_id": "ab" * 16}),
    ],
)
def test_exemplar_has_at_most_128_characters(
    scrub_id: str | None, trace: str | None, labels: dict[str, str] | None
) -> None:
    assert exemplar(scrub_id, trace) == labels


def test_step_duration_is_measured_by_path_and_verdict(measures: Measures) -> None:
    failed = StepResult(Step.HOLDERS, Verdict.FAILED, 0.25)
    measures.metrics.record_scrub(scrub(failed, path=PathKind.FAST))
    measures.metrics.record_scrub(scrub(failed, memory(2.0)))
    name = "scrubber_step_duration_seconds_sum"
    assert measures.value(name, step="holders", path="fast", verdict="failed") == 0.25
    assert measures.value(name, step="holders", path="slow", verdict="failed") == 0.25
    assert measures.value(name, step="memory", path="slow", verdict="passed") == 2.0


def test_cleared_and_verified_bytes_are_added_up(measures: Measures) -> None:
    for _ in range(2):
        measures.metrics.record_scrub(scrub(memory(cleared_bytes=1000, verified_bytes=900)))
    assert measures.value("scrubber_cleared_bytes_total") == 2000
    assert measures.value("scrubber_verified_bytes_total") == 1800


@pytest.mark.parametrize(
    ("step", "severity", "code", "counted"),
    [
        (Step.MEMORY, Severity.FAULT, "verification-failed", "verification-failed"),
        (Step.MEMORY, Severity.NOTE, "residue", "residue"),
        (Step.HEALTH, Severity.FAULT, "xid-95", "xid"),
        (Step.HEALTH, Severity.NOTE, "xid-4294967295", "xid"),
        (Step.SETTINGS, Severity.FAULT, "driver-timeout", "driver-timeout"),
        (Step.HEALTH, Severity.WARNING, "unknown-code", "other"),
        (Step.ON_CHIP, Severity.FAULT, "residue", "other"),
    ],
)
def test_findings_are_counted_by_code(
    measures: Measures, step: Step, severity: Severity, code: str, counted: str
) -> None:
    measures.metrics.record_scrub(scrub(StepResult(step, Verdict.FAILED, 0.1, (finding(step, code, severity),))))
    assert measures.value("scrubber_findings_total", step=step.value, severity=severity.value, code=counted) == 1


@pytest.mark.parametrize(
    ("words", "verdict", "found", "method", "outcome"),
    [
        ("nvidia-smi --gpu-reset", Verdict.PASSED, None, "nvidia-smi", "ok"),
        ("the simulated driver", Verdict.FAILED, ("reset-failed", Severity.FAULT), "sim", "reset-failed"),
        ("nvidia-smi --gpu-reset", Verdict.FAILED, ("device-busy", Severity.BLOCKING), "nvidia-smi", "device-busy"),
        ("a hammer", Verdict.NOT_COVERED, ("reset-unavailable", Severity.NOTE), "other", "reset-unavailable"),
        (None, Verdict.FAILED, ("moon", Severity.FAULT), "other", "other"),
        (None, Verdict.FAILED, None, "other", "other"),
    ],
)
def test_resets_are_counted_by_method_and_outcome(
    measures: Measures,
    words: str | None,
    verdict: Verdict,
    found: tuple[str, Severity] | None,
    method: str,
    outcome: str,
) -> None:
    findings = () if found is None else (finding(Step.RESET, *found),)
    measures.metrics.record_scrub(scrub(StepResult(Step.RESET, verdict, 1.0, findings, {"method": words})))
    assert measures.value("scrubber_resets_total", method=method, outcome=outcome) == 1


@pytest.mark.parametrize(
    ("name", "fields", "target", "times"),
    [
        ("leftover.process.killed", {"pid": 17}, "leftover-process", 1),
        ("leftover.pod.killed", {}, "leftover-pod", 1),
        ("unauthorized.process.killed", {"pid": 17}, "unauthorized-process", 1),
        ("uninspected.process.killed", {"pid": 17}, "uninspected-process", 1),
        ("eraser.orphan.found", {"pid": 17, "killed": True}, "orphaned-eraser", 1),
        ("eraser.orphan.found", {"pid": 17, "killed": False}, "orphaned-eraser", 0),
    ],
)
def test_killed_leftovers_are_counted_by_action(
    measures: Measures, name: str, fields: dict[str, Any], target: str, times: int
) -> None:
    measures(event(name, **fields))
    assert measures.value("scrubber_kills_total", target=target) == times


def test_unexplained_residue_is_counted_separately(measures: Measures) -> None:
    measures.show(shown("GPU-a"), shown("GPU-b"))
    assert measures.value("scrubber_unexplained_residue_bytes_total", device="GPU-a") == 0
    measures(event("residue.unexplained", residue_bytes=512))
    assert measures.value("scrubber_unexplained_residue_bytes_total", device="GPU-a") == 512
    assert measures.value("scrubber_unexplained_residue_bytes_total", device="GPU-b") == 0


def test_failed_verification_is_counted_once_for_each_scrub_and_by_device(measures: Measures) -> None:
    measures.show(shown("GPU-a"), shown("GPU-b"))
    failed = StepResult(
        Step.MEMORY, Verdict.FAILED, 1.0, (finding(Step.MEMORY, "verification-failed", Severity.FAULT),) * 2
    )
    measures.metrics.record_scrub(scrub(failed, device="GPU-a"))
    counted = {
        (device, code): measures.value("scrubber_failed_verifications_total", device=device, code=code)
        for device in ("GPU-a", "GPU-b")
        for code in ("verification-failed", "on-chip-failed")
    }
    assert counted.pop(("GPU-a", "verification-failed")) == 1
    assert set(counted.values()) == {0}


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "counted"),
    [
        ("xid-95", "xid"),
        ("xid-4294967295", "xid"),
        ("driver-timeout", "driver-timeout"),
        ("verification-failed", "verification-failed"),
        ("ecc-uncorrected", "ecc-uncorrected"),
        (Quarantined.code, "other"),
        ("unknown-code", "other"),
        (None, "other"),
    ],
)
def test_quarantine_is_counted_by_cause_class(measures: Measures, cause: str | None, counted: str) -> None:
    measures(event("health.quarantined", cause=cause))
    assert measures.value("scrubber_quarantines_total", cause_class=counted) == 1


@pytest.mark.parametrize(
    ("use", "counted"),
    [
        ("unauthorized-process", "unauthorized-process"),
        ("assigned-by-another-plugin", "assigned-by-another-plugin"),
        ("odd", "other"),
    ],
)
def test_unauthorized_use_is_counted_by_kind(measures: Measures, use: str, counted: str) -> None:
    measures.show(shown("GPU-a"))
    measures(event("unauthorized.use.detected", use=use, pid=1))
    assert measures.value("scrubber_unauthorized_uses_total", device="GPU-a", use=counted) == 1


def test_operator_quarantine_is_counted_once_and_for_no_tenant(measures: Measures) -> None:
    measures(
        event("operator.quarantined", reason="noise", tenant="team-a"),
        event("health.quarantined", cause="operator", tenant="team-a"),
    )
    assert measures.value("scrubber_quarantines_total", cause_class="operator") == 1
    assert measures.labels("scrubber_tenant_quarantines_total") == []


def test_quarantine_is_counted_for_the_devices_tenant(measures: Measures) -> None:
    hit = event("health.quarantined", cause="xid-95", tenant="team-a")
    measures(hit, hit, event("health.quarantined", cause="xid-95", tenant="team-b"))
    measures(event("health.condemned", cause="xid-95"), event("health.healthy", tenant="team-b"))
    assert measures.value("scrubber_tenant_quarantines_total", tenant="team-a") == 2
    assert measures.value("scrubber_tenant_quarantines_total", tenant="team-b") == 1
    assert measures.value("scrubber_quarantines_total", cause_class="xid") == 3
    measures(event("health.condemned", cause="xid-95", tenant="team-b"))
    assert measures.value("scrubber_tenant_quarantines_total", tenant="team-b") == 2


@pytest.mark.parametrize("no_tenant", [{}, {"tenant": None}, {"tenant": ""}])
def test_quarantine_of_an_unassigned_device_is_counted_for_no_tenant(
    measures: Measures, no_tenant: dict[str, Any]
) -> None:
    measures(event("health.quarantined", cause="xid-95", **no_tenant))
    assert measures.labels("scrubber_tenant_quarantines_total") == []


def test_tenants_beyond_the_limit_are_counted_together(measures: Measures) -> None:
    def hit(number: int) -> Event:
        return event("health.quarantined", cause="xid-95", tenant=f"team-{number}")

    measures(*(hit(number) for number in range(100)), hit(0), hit(63), hit(64))
    assert measures.value("scrubber_tenant_quarantines_total", tenant="team-0") == 2
    assert measures.value("scrubber_tenant_quarantines_total", tenant="team-63") == 2
    assert measures.value("scrubber_tenant_quarantines_total", tenant="other") == 37
    assert len(measures.labels("scrubber_tenant_quarantines_total")) == 65


def test_tenant_with_a_grant_has_a_series_before_the_first_quarantine(measures: Measures) -> None:
    measures(event("handover.granted", tenant="team-a"), event("handover.granted", tenant=None))
    assert measures.value("scrubber_tenant_quarantines_total", tenant="team-a") == 0
    assert len(measures.labels("scrubber_tenant_quarantines_total")) == 1


def test_tenants_without_quarantines_do_not_exhaust_the_tenant_limit(measures: Measures) -> None:
    measures(*(event("handover.granted", tenant=f"good-{number}") for number in range(200)))
    assert len(measures.labels("scrubber_tenant_quarantines_total")) == 32
    measures(*(event("health.quarantined", cause="device-lost", tenant=f"bad-{number}") for number in range(32)))
    assert measures.value("scrubber_tenant_quarantines_total", tenant="bad-31") == 1
    assert measures.value("scrubber_tenant_quarantines_total", tenant="other") is None


# -- XIDs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        *(("xid-95", "95"), ("79", "79"), (31, "31"), ("xid-1", "1"), ("xid-200", "200")),
        *(("xid-0", "other"), ("xid-201", "other"), ("xid-095", "other"), (0, "other"), (201, "other"), (-1, "other")),
        *((10**400, "other"), ("xid-" + "9" * 5000, "other")),
    ],
)
def test_new_xids_are_counted_by_device_and_code(measures: Measures, code: str | int, counted: str) -> None:
    measures.show(shown("GPU-a"))
    signal = event("health.errors-reported", code=code, new=3, total=40)
    measures(signal, signal)
    assert measures.value("scrubber_xids_total", device="GPU-a", code=counted) == 6
    assert measures.value("scrubber_xid_last_seen_timestamp_seconds", device="GPU-a", code=counted) == NOON
    assert len(measures.labels("scrubber_xids_total")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"code": "too-hot", "new": 1},
        {"code": True, "new": 1},
        {"code": None, "new": 1},
        {"code": "xid-95"},
        {"code": "xid-95", "new": 0},
        {"code": "xid-95", "new": -1},
        {"code": "xid-95", "new": float("nan")},
    ],
)
def test_signal_without_new_xids_is_not_counted(measures: Measures, fields: dict[str, Any]) -> None:
    measures.show(shown("GPU-a"))
    measures(event("health.errors-reported", **fields))
    assert measures.labels("scrubber_xids_total") == []


def test_device_has_sixteen_xid_series_and_counts_the_rest_together(measures: Measures) -> None:
    measures.show(shown("GPU-a"))
    measures(*(event("health.errors-reported", code=f"xid-{number}", new=1) for number in range(1, 41)))
    measures(event("health.errors-reported", code="xid-1", new=1))
    assert len(measures.labels("scrubber_xids_total")) == 17
    assert measures.value("scrubber_xids_total", device="GPU-a", code="1") == 2
    assert measures.value("scrubber_xids_total", device="GPU-a", code="other") == 24


# -- from the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("scrubber_findings_total", {"step": "memory", "severity": "fault", "code": "verification-failed"}),
        ("scrubber_handovers_total", {"kind": "same-pod", "path": "fast", "outcome": "granted"}),
        ("scrubber_handovers_total", {"kind": "unknown", "path": "none", "outcome": "scrubbing"}),
        ("scrubber_kills_total", {"target": "unauthorized-process"}),
        ("scrubber_quarantines_total", {"cause_class": "xid"}),
        ("scrubber_resets_total", {"method": "nvidia-smi", "outcome": "reset-failed"}),
        ("scrubber_scrubs_total", {"path": "slow", "trigger": "release", "outcome": "failed"}),
        ("scrubber_failed_verifications_total", {"device": "GPU-a", "code": "on-chip-failed"}),
        ("scrubber_unauthorized_uses_total", {"device": "GPU-a", "use": "unauthorized-process"}),
        ("scrubber_unexplained_residue_bytes_total", {"device": "GPU-a"}),
        ("scrubber_child_process_starts_total", {"child": "driver"}),
    ],
)
def test_counters_start_at_zero_before_the_first_event(measures: Measures, name: str, labels: dict[str, str]) -> None:
    measures.show(shown("GPU-a"))
    assert measures.value(name, **labels) == 0
