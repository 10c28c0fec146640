"""Gauges of the current state, without anything outdated: of devices, of the service, of its sockets."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256

import pytest

from scrubber.domain.evidence import Certificate, PathKind, Step, StepResult, Verdict
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from scrubber.ports.record import AuditHead
from tests.measures import Measures, event, memory, scrub, shown

RECORD = DeviceRecord("GPU-a")
XID = Cause("xid-95", "A sentence.", RecoveryMethod.RESET, since=100.0)


@pytest.fixture
def told() -> Measures:
    return Measures()


def certificate() -> Certificate:
    return Certificate(
        *("C-1", "node", "boot", "driver", "GPU-a", 1, 0, PathKind.SLOW, "S-1", (), (), "default", "digest"),
        issued_at=77.0,
    )


# -- devices -----------------------------------------------------------------------------------------------------------


def test_device_state_metric_has_only_the_current_state(told: Measures) -> None:
    told.show(shown("GPU-a"), shown("GPU-b"))
    assert told.value("scrubber_device_state", device="GPU-b", hygiene="dirty", health="healthy") == 1
    told.show(shown("GPU-a", replace(RECORD, hygiene=Hygiene.IN_USE)))
    assert told.labels("scrubber_device_state") == [{"device": "GPU-a", "hygiene": "in-use", "health": "healthy"}]
    assert told.value("scrubber_device_info", device="GPU-a", index="0", model="A model") == 1


@pytest.mark.parametrize("offered", [True, False])
def test_advertised_device_is_shown_as_offered(told: Measures, offered: bool) -> None:
    told.show(shown(offered=offered))
    assert told.value("scrubber_device_advertised", device="GPU-a") == offered


def test_device_out_of_service_shows_since_cause_and_next_action(told: Measures) -> None:
    told.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=XID)))
    name = "scrubber_quarantine_start_timestamp_seconds"
    assert told.value(name, device="GPU-a", cause_class="xid", recovery_method="reset") == 100.0
    told.show(shown(record=replace(RECORD, health=Health.SUSPECT, cause=XID)))
    assert told.labels(name) == []


def test_device_signal_metric_lasts_as_long_as_the_signal(told: Measures) -> None:
    standing = (ActiveWarning("too-hot", 1.0), ActiveWarning("moon", 1.0), ActiveWarning("sun", 1.0))
    told.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=XID, warnings=standing)))
    codes = {each["code"] for each in told.labels("scrubber_device_condition")}
    assert codes == {"xid", "too-hot", "other"}
    told.show(shown())
    assert told.labels("scrubber_device_condition") == []


def test_operator_quarantine_is_no_device_signal(told: Measures) -> None:
    cause = replace(XID, code="operator", actor="uid:0")
    told.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=cause)))
    assert told.labels("scrubber_device_condition") == []


def test_unused_certificate_shows_its_issue_time(told: Measures) -> None:
    told.show(shown(record=replace(RECORD, certificate=certificate())))
    assert told.value("scrubber_certificate_issued_timestamp_seconds", device="GPU-a") == 77.0
    told.show(shown())
    assert told.labels("scrubber_certificate_issued_timestamp_seconds") == []


def test_break_glass_metric_lasts_as_long_as_the_override(told: Measures) -> None:
    told.show(
        shown(record=replace(RECORD, break_glass=BreakGlass(900.0, "why", "uid:0")), observed=True), shown("GPU-b")
    )
    assert told.labels("scrubber_break_glass_active") == [{"device": "GPU-a"}]
    assert told.value("scrubber_break_glass_expiry_timestamp_seconds", device="GPU-a") == 900.0
    told.show(shown(), shown("GPU-b"))
    assert told.labels("scrubber_break_glass_active") == []
    assert told.labels("scrubber_break_glass_expiry_timestamp_seconds") == []


def test_devices_are_counted_by_enforcement_mode(told: Measures) -> None:
    def judged() -> dict[str, float | None]:
        return {mode: told.value("scrubber_devices", enforcement=mode) for mode in ("enforce", "observe")}

    assert judged() == {"enforce": 0, "observe": 0}
    told.show(shown("GPU-a"), shown("GPU-b"), shown("GPU-c", observed=True))
    assert judged() == {"enforce": 2, "observe": 1}


def test_last_slow_path_shows_its_steps_coverage_and_rate(told: Measures) -> None:
    told.show(shown())
    figures = {"total_bytes": 1000, "verified_bytes": 750, "cleared_bytes": 800, "clear_seconds": 0.5}
    told.metrics.record_scrub(scrub(StepResult(Step.HOLDERS, Verdict.PASSED, 0.25), memory(2.0, **figures)))
    assert told.value("scrubber_memory_coverage_ratio", device="GPU-a") == 0.75
    assert told.value("scrubber_clear_rate_bytes_per_second", device="GPU-a") == 1600.0
    name = "scrubber_last_scrub_step_duration_seconds"
    assert told.value(name, device="GPU-a", step="holders", verdict="passed") == 0.25
    assert told.value(name, device="GPU-a", step="memory", verdict="passed") == 2.0


def test_next_slow_path_replaces_all_steps_and_keeps_what_was_not_measured_again(told: Measures) -> None:
    told.show(shown())
    told.metrics.record_scrub(
        scrub(memory(2.0, total_bytes=10, verified_bytes=10, cleared_bytes=10, clear_seconds=1.0))
    )
    told.metrics.record_scrub(scrub(StepResult(Step.HOLDERS, Verdict.FAILED, 0.5)))
    name = "scrubber_last_scrub_step_duration_seconds"
    assert told.labels(name) == [{"device": "GPU-a", "step": "holders", "verdict": "failed"}]
    assert told.value("scrubber_memory_coverage_ratio", device="GPU-a") == 1.0


def test_fast_path_does_not_change_the_last_scrub_metrics(told: Measures) -> None:
    told.show(shown())
    told.metrics.record_scrub(scrub(StepResult(Step.HOLDERS, Verdict.PASSED, 0.1), path=PathKind.FAST))
    assert told.labels("scrubber_last_scrub_step_duration_seconds") == []


@pytest.mark.parametrize("odd", [None, "many", True, float("nan"), float("inf"), -1, 0, 10**400])
def test_implausible_measurement_is_not_shown(told: Measures, odd: str | float | None) -> None:
    told.show(shown())
    told.metrics.record_scrub(scrub(memory(total_bytes=0, verified_bytes=odd, cleared_bytes=odd, clear_seconds=0)))
    assert told.labels("scrubber_memory_coverage_ratio") == []
    assert told.labels("scrubber_clear_rate_bytes_per_second") == []


def test_removed_device_removes_its_series(told: Measures) -> None:
    told.show(shown("GPU-a"))
    told.metrics.record_scrub(scrub(memory(total_bytes=10, verified_bytes=10)))
    told(event("health.errors-reported", code="xid-95", new=1))
    assert 'device="GPU-a"' in told.page()
    told.show(shown("GPU-b"))
    assert "GPU-a" not in told.page()
    told.show(shown("GPU-a"))
    assert told.value("scrubber_xids_total", device="GPU-a", code="95") == 1


# -- the service -------------------------------------------------------------------------------------------------------


def test_queues_and_eraser_slots_are_shown_as_of_the_scrape(told: Measures) -> None:
    told.show(handovers_waiting=3, erasers_busy=2, erasers_free=6, erasers_waiting=5)
    assert told.value("scrubber_handovers_waiting") == 3
    assert told.value("scrubber_eraser_slots", state="busy") == 2
    assert told.value("scrubber_eraser_slots", state="free") == 6
    assert told.value("scrubber_eraser_queue_length") == 5


def test_children_are_counted_by_module(told: Measures) -> None:
    starts = {"scrubber.adapters.sim.driver": 2, "scrubber.adapters.nvidia.driver": 1, "a.walker": 4, "a.surprise": 1}
    told.show(child_starts=starts, children_abandoned=2)
    shown_starts = {
        child: told.value("scrubber_child_process_starts_total", child=child) for child in ("driver", "walker", "other")
    }
    assert shown_starts == {"driver": 3, "walker": 4, "other": 1}
    assert told.value("scrubber_child_processes_abandoned_total") == 2


def test_ledger_metric_is_not_ok_before_the_first_status(told: Measures) -> None:
    assert told.value("scrubber_ledger_ok") == 0
    assert told.value("scrubber_ledger_size_bytes") is None
    told.show(ledger_ok=True, ledger_bytes=4096)
    assert told.value("scrubber_ledger_ok") == 1
    assert told.value("scrubber_ledger_size_bytes") == 4096


def test_commits_are_timed_and_failures_counted(told: Measures) -> None:
    told.metrics.service.observe_commit(0.002, True)
    told.metrics.service.observe_commit(0.5, False)
    assert told.value("scrubber_ledger_commit_duration_seconds_count") == 2
    assert told.value("scrubber_ledger_commit_duration_seconds_bucket", le="0.0025") == 1
    assert told.value("scrubber_ledger_failures_total") == 1


def parts_on(page: str) -> str:
    """Return the hash assembled from the eight parts on the page, as described in docs/audit.md."""
    found = dict(re.findall(r'^scrubber_audit_head_hash\{part="(\d)"\} (\S+)$', page, re.MULTILINE))
    return "".join(f"{int(float(found[part])):08x}" for part in sorted(found))


@pytest.mark.parametrize("digest", ["f" * 64, "fffffffe" * 8, "00ff" * 16, sha256(b"row 8").hexdigest()])
def test_metrics_carry_every_bit_of_the_audit_head(told: Measures, digest: str) -> None:
    told.show(audit_head=AuditHead(8, digest))
    assert told.value("scrubber_audit_head_sequence") == 8
    assert parts_on(told.page()) == digest


def test_new_audit_head_creates_no_new_series(told: Measures) -> None:
    assert told.value("scrubber_audit_head_sequence") is None
    told.show(audit_head=AuditHead(7, "00ff" * 16))
    before = told.series()
    told.show(audit_head=AuditHead(8, "3f9a5c0d71e2" + "9" * 52))
    assert told.series() == before


def test_empty_trail_has_an_audit_head_of_zero(told: Measures) -> None:
    told.show(audit_head=AuditHead())
    assert told.value("scrubber_audit_head_sequence") == 0
    assert parts_on(told.page()) == "0" * 64


def test_audit_intact_metric_is_absent_before_the_first_verification(told: Measures) -> None:
    assert told.value("scrubber_audit_intact") is None
    told.metrics.service.set_audit_result(intact=True, at=50.0)
    assert (told.value("scrubber_audit_intact"), told.value("scrubber_audit_verified_timestamp_seconds")) == (1, 50.0)
    told.metrics.service.set_audit_result(intact=False, at=60.0)
    assert (told.value("scrubber_audit_intact"), told.value("scrubber_audit_verified_timestamp_seconds")) == (0, 60.0)


def test_kubelet_status_is_shown(told: Measures) -> None:
    assert told.value("scrubber_kubelet_trusted") == 0
    told.show(kubelet_trusted=True, kubelet_restarts=2)
    assert told.value("scrubber_kubelet_trusted") == 1
    assert told.value("scrubber_kubelet_restarts_total") == 2


def test_only_the_current_policy_key_and_build_are_shown(told: Measures) -> None:
    told.metrics.service.set_signing_key("sha256:00ff")
    told.metrics.service.set_signing_key("sha256:ff00")
    assert told.labels("scrubber_signing_key_info") == [{"key_id": "sha256:ff00"}]
    told.show(policy=("default", "0123456789abcdef"))
    told.show(policy=("strict", "fedcba9876543210"))
    assert told.labels("scrubber_policy_info") == [{"policy": "strict", "digest": "fedcba987654"}]
    told.metrics.service.set_build_info(version="1.2", backend="sim", driver="sim-1")
    (build,) = told.labels("scrubber_build_info")
    assert (build["version"], build["backend"], build["driver"]) == ("1.2", "sim", "sim-1")
    assert build["python"].startswith("3.")


def test_rejected_policy_is_shown_until_a_policy_is_accepted(told: Measures) -> None:
    told(event("policy.rejected", message="mine.yaml:2: no"))
    assert told.value("scrubber_policy_rejected") == 1
    told(event("policy.accepted", changed=False))
    assert told.value("scrubber_policy_rejected") == 0


def test_open_breaker_is_shown_until_closed(told: Measures) -> None:
    def stands() -> tuple[float | None, float | None]:
        return told.value("scrubber_breaker_open", breaker="resets"), told.value(
            "scrubber_breaker_open", breaker="soft-quarantines"
        )

    assert stands() == (0, 0)
    told(event("breaker.opened", breaker="soft-quarantines", message="2 of 8 devices."))
    assert stands() == (0, 1)
    told(event("breaker.opened", what="moon"), event("breaker.opened"))
    assert stands() == (0, 1)
    told(event("breaker.closed", breaker="soft-quarantines"), event("breaker.opened", breaker="resets"))
    assert stands() == (1, 0)


# -- its sockets -------------------------------------------------------------------------------------------------------


def test_calls_are_timed_by_service_method_and_status(told: Measures) -> None:
    told.metrics.rpc.on_call_finished("/scrubber.v1.Plugin/HandOver", "UNAVAILABLE", 25.0)
    labels = {"service": "scrubber.v1.Plugin", "method": "HandOver", "code": "UNAVAILABLE"}
    assert told.value("scrubber_rpc_duration_seconds_sum", **labels) == 25.0


def test_streams_are_counted_while_open(told: Measures) -> None:
    labels = {"service": "scrubber.v1.Read", "method": "WatchDevices"}
    for change, many in ((1, 1), (1, 2), (-1, 1), (-1, 0)):
        told.metrics.rpc.on_open_streams_changed("/scrubber.v1.Read/WatchDevices", change)
        assert told.value("scrubber_rpc_streams", **labels) == many
