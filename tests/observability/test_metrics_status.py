"""Gauges of the current state, without anything outdated: of devices, of the service, of its sockets."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256

import pytest

from scrubber.domain.assignment import Claim
from scrubber.domain.evidence import Certificate, PathKind, Step, StepResult, Verdict
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.infrastructure import NamedHolder, ProcessOwner
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord, Grant
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.ports.record import AuditHead
from tests.measures import Measures, event, memory, scrub, shown

RECORD = DeviceRecord("GPU-a")
XID = Cause("xid-95", "A message.", RecoveryMethod.RESET, since=100.0)


@pytest.fixture
def measures() -> Measures:
    return Measures()


def certificate() -> Certificate:
    return Certificate(
        *("C-1", "node", "boot", "driver", "GPU-a", 1, 0, PathKind.SLOW, "S-1", (), (), "default", "digest"),
        issued_at=77.0,
    )


# -- devices -----------------------------------------------------------------------------------------------------------


def test_device_state_metric_has_only_the_current_state(measures: Measures) -> None:
    measures.show(shown("GPU-a"), shown("GPU-b"))
    assert measures.value("scrubber_device_state", device="GPU-b", hygiene="dirty", health="healthy") == 1
    measures.show(shown("GPU-a", replace(RECORD, hygiene=Hygiene.IN_USE)))
    assert measures.labels("scrubber_device_state") == [{"device": "GPU-a", "hygiene": "in-use", "health": "healthy"}]
    assert measures.value("scrubber_device_info", device="GPU-a", index="0", model="A model") == 1


@pytest.mark.parametrize("offered", [True, False])
def test_advertised_device_is_shown_as_offered(measures: Measures, offered: bool) -> None:
    measures.show(shown(offered=offered))
    assert measures.value("scrubber_device_advertised", device="GPU-a") == offered


def test_device_out_of_service_shows_since_cause_and_next_action(measures: Measures) -> None:
    measures.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=XID)))
    name = "scrubber_quarantine_start_timestamp_seconds"
    assert measures.value(name, device="GPU-a", cause_class="xid", recovery_method="reset") == 100.0
    measures.show(shown(record=replace(RECORD, health=Health.SUSPECT, cause=XID)))
    assert measures.labels(name) == []


def test_holder_that_keeps_a_device_from_being_scrubbed_is_named_by_its_pod_since_it_was_first_seen(
    measures: Measures,
) -> None:
    def held(kind: HolderKind, owner: ProcessOwner, since: float, code: str = "validation-holder") -> NamedHolder:
        return NamedHolder(Holder(7, int(since), kind, "command"), owner, code, since)

    pod = ProcessOwner("gpu-operator", "nvidia-cuda-validator-x7x9q", "uid")
    holders = (
        held(HolderKind.VALIDATION, pod, 60.0),
        held(HolderKind.VALIDATION, pod, 50.0),
        held(HolderKind.PROCESS, ProcessOwner(), 70.0, "unknown-holder"),
        held(HolderKind.INFRASTRUCTURE, ProcessOwner(unit="nvidia-dcgm.service"), 40.0, "infrastructure-holder"),
    )
    name = "scrubber_device_held_start_timestamp_seconds"
    measures.show(replace(shown(), holders=holders))
    validator = "gpu-operator/nvidia-cuda-validator-x7x9q"
    assert measures.value(name, device="GPU-a", code="validation-holder", holder=validator) == 50.0
    assert measures.value(name, device="GPU-a", code="unknown-holder", holder="") == 70.0
    assert len(measures.labels(name)) == 2, "an agent that is tolerated keeps nothing from being scrubbed"
    measures.show(replace(shown(record=replace(RECORD, hygiene=Hygiene.IN_USE)), holders=holders))
    assert measures.labels(name) == []
    many = tuple(held(HolderKind.PROCESS, ProcessOwner("a", f"pod-{at}"), float(at)) for at in range(20))
    measures.show(replace(shown(), holders=many))
    assert {each["holder"] for each in measures.labels(name)} == {f"a/pod-{at}" for at in range(8)}


def test_device_signal_metric_lasts_as_long_as_the_signal(measures: Measures) -> None:
    warnings = (ActiveWarning("too-hot", 1.0), ActiveWarning("moon", 1.0), ActiveWarning("sun", 1.0))
    measures.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=XID, warnings=warnings)))
    codes = {each["code"] for each in measures.labels("scrubber_device_condition")}
    assert codes == {"xid", "too-hot", "other"}
    measures.show(shown())
    assert measures.labels("scrubber_device_condition") == []


def test_operator_quarantine_is_no_device_signal(measures: Measures) -> None:
    cause = replace(XID, code="operator", actor="uid:0")
    measures.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=cause)))
    assert measures.labels("scrubber_device_condition") == []


def test_unused_certificate_shows_its_issue_time(measures: Measures) -> None:
    measures.show(shown(record=replace(RECORD, certificate=certificate())))
    assert measures.value("scrubber_certificate_issued_timestamp_seconds", device="GPU-a") == 77.0
    measures.show(shown())
    assert measures.labels("scrubber_certificate_issued_timestamp_seconds") == []


def in_use_by(uid: str, *, released_at: float | None = None) -> DeviceRecord:
    claim = Claim(uid, "team-a", "gpus", "gpu.scrubber.dev", released_at=released_at)
    grant = Grant(1, None, HandOverKind.UNKNOWN, 50.0, "boot", claim=claim)
    return replace(RECORD, hygiene=Hygiene.IN_USE, last_grant=grant, open_grants=(grant,))


def test_claims_are_counted_once_each_and_apart_from_those_that_wait_to_be_released(measures: Measures) -> None:
    releasing = in_use_by("claim-2", released_at=77.0)
    measures.show(
        shown("GPU-a", in_use_by("claim-1")),
        shown("GPU-b", in_use_by("claim-1")),
        shown("GPU-c", replace(releasing, device="GPU-c")),
        shown("GPU-d"),
    )
    assert measures.value("scrubber_claims", state="prepared") == 1
    assert measures.value("scrubber_claims", state="releasing") == 1


def test_break_glass_metric_lasts_as_long_as_the_override(measures: Measures) -> None:
    measures.show(
        shown(record=replace(RECORD, break_glass=BreakGlass(900.0, "why", "uid:0")), observed=True), shown("GPU-b")
    )
    assert measures.labels("scrubber_break_glass_active") == [{"device": "GPU-a"}]
    assert measures.value("scrubber_break_glass_expiry_timestamp_seconds", device="GPU-a") == 900.0
    measures.show(shown(), shown("GPU-b"))
    assert measures.labels("scrubber_break_glass_active") == []
    assert measures.labels("scrubber_break_glass_expiry_timestamp_seconds") == []


def test_devices_are_counted_by_enforcement_mode(measures: Measures) -> None:
    def judged() -> dict[str, float | None]:
        return {mode: measures.value("scrubber_devices", enforcement=mode) for mode in ("enforce", "observe")}

    assert judged() == {"enforce": 0, "observe": 0}
    measures.show(shown("GPU-a"), shown("GPU-b"), shown("GPU-c", observed=True))
    assert judged() == {"enforce": 2, "observe": 1}


def test_last_slow_path_shows_its_steps_coverage_and_rate(measures: Measures) -> None:
    measures.show(shown())
    figures = {"total_bytes": 1000, "verified_bytes": 750, "cleared_bytes": 800, "clear_seconds": 0.5}
    measures.metrics.record_scrub(scrub(StepResult(Step.HOLDERS, Verdict.PASSED, 0.25), memory(2.0, **figures)))
    assert measures.value("scrubber_memory_coverage_ratio", device="GPU-a") == 0.75
    assert measures.value("scrubber_clear_rate_bytes_per_second", device="GPU-a") == 1600.0
    name = "scrubber_last_scrub_step_duration_seconds"
    assert measures.value(name, device="GPU-a", step="holders", verdict="passed") == 0.25
    assert measures.value(name, device="GPU-a", step="memory", verdict="passed") == 2.0


def test_next_slow_path_replaces_all_steps_and_keeps_what_was_not_measured_again(measures: Measures) -> None:
    measures.show(shown())
    measures.metrics.record_scrub(
        scrub(memory(2.0, total_bytes=10, verified_bytes=10, cleared_bytes=10, clear_seconds=1.0))
    )
    measures.metrics.record_scrub(scrub(StepResult(Step.HOLDERS, Verdict.FAILED, 0.5)))
    name = "scrubber_last_scrub_step_duration_seconds"
    assert measures.labels(name) == [{"device": "GPU-a", "step": "holders", "verdict": "failed"}]
    assert measures.value("scrubber_memory_coverage_ratio", device="GPU-a") == 1.0


def test_fast_path_does_not_change_the_last_scrub_metrics(measures: Measures) -> None:
    measures.show(shown())
    measures.metrics.record_scrub(scrub(StepResult(Step.HOLDERS, Verdict.PASSED, 0.1), path=PathKind.FAST))
    assert measures.labels("scrubber_last_scrub_step_duration_seconds") == []


@pytest.mark.parametrize("odd", [None, "many", True, float("nan"), float("inf"), -1, 0, 10**400])
def test_implausible_measurement_is_not_shown(measures: Measures, odd: str | float | None) -> None:
    measures.show(shown())
    measures.metrics.record_scrub(scrub(memory(total_bytes=0, verified_bytes=odd, cleared_bytes=odd, clear_seconds=0)))
    assert measures.labels("scrubber_memory_coverage_ratio") == []
    assert measures.labels("scrubber_clear_rate_bytes_per_second") == []


def test_removed_device_removes_its_series(measures: Measures) -> None:
    measures.show(shown("GPU-a"))
    measures.metrics.record_scrub(scrub(memory(total_bytes=10, verified_bytes=10)))
    measures(event("health.errors-reported", code="xid-95", new=1))
    assert 'device="GPU-a"' in measures.page()
    measures.show(shown("GPU-b"))
    assert "GPU-a" not in measures.page()
    measures.show(shown("GPU-a"))
    assert measures.value("scrubber_xids_total", device="GPU-a", code="95") == 1


# -- the service -------------------------------------------------------------------------------------------------------


def test_queues_and_eraser_slots_are_shown_as_of_the_scrape(measures: Measures) -> None:
    measures.show(handovers_waiting=3, erasers_busy=2, erasers_free=6, erasers_waiting=5)
    assert measures.value("scrubber_handovers_waiting") == 3
    assert measures.value("scrubber_eraser_slots", state="busy") == 2
    assert measures.value("scrubber_eraser_slots", state="free") == 6
    assert measures.value("scrubber_eraser_queue_length") == 5


def test_yield_shows_since_when_each_requester_has_requested_it(measures: Measures) -> None:
    name = "scrubber_yield_start_timestamp_seconds"
    requests = [("operator", "uid:0", 70.0), ("plugin", "plugin of a", 60.0), ("plugin", "plugin of b", 50.0)]
    record = NodeRecord(tuple(YieldRequest(YieldRequester(who), "why", actor, at) for who, actor, at in requests))
    measures.show(yielded=True, yield_starts=record.starts)
    assert (measures.value(name, requester="operator"), measures.value(name, requester="plugin")) == (70.0, 50.0)
    assert measures.value("scrubber_node_yielded") == 1
    measures.show(yield_starts=record.without(YieldRequester.OPERATOR).starts)
    assert measures.labels(name) == [{"requester": "plugin"}]
    measures.show(yield_starts=record.without_any().starts)
    assert measures.labels(name) == []


def test_wait_for_the_driver_is_shown_until_it_answers(measures: Measures) -> None:
    assert measures.value("scrubber_waiting_for_driver") == 0
    measures.show(waiting_for_driver=True)
    assert measures.value("scrubber_waiting_for_driver") == 1


def test_children_are_counted_by_module(measures: Measures) -> None:
    starts = {"scrubber.adapters.sim.driver": 2, "scrubber.adapters.nvidia.driver": 1, "a.walker": 4, "a.surprise": 1}
    measures.show(child_starts=starts, children_abandoned=2)
    shown_starts = {
        child: measures.value("scrubber_child_process_starts_total", child=child)
        for child in ("driver", "walker", "other")
    }
    assert shown_starts == {"driver": 3, "walker": 4, "other": 1}
    assert measures.value("scrubber_child_processes_abandoned_total") == 2


def test_ledger_metric_is_not_ok_before_the_first_status(measures: Measures) -> None:
    assert measures.value("scrubber_ledger_ok") == 0
    assert measures.value("scrubber_ledger_size_bytes") is None
    measures.show(ledger_ok=True, ledger_bytes=4096)
    assert measures.value("scrubber_ledger_ok") == 1
    assert measures.value("scrubber_ledger_size_bytes") == 4096


def test_commits_are_timed_and_failures_counted(measures: Measures) -> None:
    measures.metrics.service.observe_commit(0.002, True)
    measures.metrics.service.observe_commit(0.5, False)
    assert measures.value("scrubber_ledger_commit_duration_seconds_count") == 2
    assert measures.value("scrubber_ledger_commit_duration_seconds_bucket", le="0.0025") == 1
    assert measures.value("scrubber_ledger_failures_total") == 1


def parts_on(page: str) -> str:
    """Return the hash assembled from the eight parts on the page, as described in docs/audit.md."""
    found = dict(re.findall(r'^scrubber_audit_head_hash\{part="(\d)"\} (\S+)$', page, re.MULTILINE))
    return "".join(f"{int(float(found[part])):08x}" for part in sorted(found))


@pytest.mark.parametrize("digest", ["f" * 64, "fffffffe" * 8, "00ff" * 16, sha256(b"row 8").hexdigest()])
def test_metrics_carry_every_bit_of_the_audit_head(measures: Measures, digest: str) -> None:
    measures.show(audit_head=AuditHead(8, digest))
    assert measures.value("scrubber_audit_head_sequence") == 8
    assert parts_on(measures.page()) == digest


def test_new_audit_head_creates_no_new_series(measures: Measures) -> None:
    assert measures.value("scrubber_audit_head_sequence") is None
    measures.show(audit_head=AuditHead(7, "00ff" * 16))
    before = measures.series()
    measures.show(audit_head=AuditHead(8, "3f9a5c0d71e2" + "9" * 52))
    assert measures.series() == before


def test_empty_audit_log_has_an_audit_head_of_zero(measures: Measures) -> None:
    measures.show(audit_head=AuditHead())
    assert measures.value("scrubber_audit_head_sequence") == 0
    assert parts_on(measures.page()) == "0" * 64


def test_audit_intact_metric_is_absent_before_the_first_verification(measures: Measures) -> None:
    assert measures.value("scrubber_audit_intact") is None
    measures.metrics.service.set_audit_result(intact=True, at=50.0)
    assert (measures.value("scrubber_audit_intact"), measures.value("scrubber_audit_verified_timestamp_seconds")) == (
        1,
        50.0,
    )
    measures.metrics.service.set_audit_result(intact=False, at=60.0)
    assert (measures.value("scrubber_audit_intact"), measures.value("scrubber_audit_verified_timestamp_seconds")) == (
        0,
        60.0,
    )


def test_kubelet_status_is_shown(measures: Measures) -> None:
    assert measures.value("scrubber_kubelet_trusted") == 0
    measures.show(kubelet_trusted=True, kubelet_restarts=2)
    assert measures.value("scrubber_kubelet_trusted") == 1
    assert measures.value("scrubber_kubelet_restarts_total") == 2


def test_only_the_current_policy_key_and_build_are_shown(measures: Measures) -> None:
    measures.metrics.service.set_signing_key("sha256:00ff")
    measures.metrics.service.set_signing_key("sha256:ff00")
    assert measures.labels("scrubber_signing_key_info") == [{"key_id": "sha256:ff00"}]
    measures.show(policy=("default", "0123456789abcdef"))
    measures.show(policy=("strict", "fedcba9876543210"))
    assert measures.labels("scrubber_policy_info") == [{"policy": "strict", "digest": "fedcba987654"}]
    measures.metrics.service.set_build_info(version="1.2", backend="sim", driver="sim-1")
    (build,) = measures.labels("scrubber_build_info")
    assert (build["version"], build["backend"], build["driver"]) == ("1.2", "sim", "sim-1")
    assert build["python"].startswith("3.")


def test_rejected_policy_is_shown_until_a_policy_is_accepted(measures: Measures) -> None:
    measures(event("policy.rejected", message="mine.yaml:2: no"))
    assert measures.value("scrubber_policy_rejected") == 1
    measures(event("policy.accepted", changed=False))
    assert measures.value("scrubber_policy_rejected") == 0


def test_open_breaker_is_shown_until_closed(measures: Measures) -> None:
    def breaker_values() -> tuple[float | None, float | None]:
        return measures.value("scrubber_breaker_open", breaker="resets"), measures.value(
            "scrubber_breaker_open", breaker="soft-quarantines"
        )

    assert breaker_values() == (0, 0)
    measures(event("breaker.opened", breaker="soft-quarantines", message="2 of 8 devices."))
    assert breaker_values() == (0, 1)
    measures(event("breaker.opened", what="moon"), event("breaker.opened"))
    assert breaker_values() == (0, 1)
    measures(event("breaker.closed", breaker="soft-quarantines"), event("breaker.opened", breaker="resets"))
    assert breaker_values() == (1, 0)


# -- its sockets -------------------------------------------------------------------------------------------------------


def test_calls_are_timed_by_service_method_and_status(measures: Measures) -> None:
    measures.metrics.rpc.on_call_finished("/scrubber.v1.Plugin/HandOver", "UNAVAILABLE", 25.0)
    labels = {"service": "scrubber.v1.Plugin", "method": "HandOver", "code": "UNAVAILABLE"}
    assert measures.value("scrubber_rpc_duration_seconds_sum", **labels) == 25.0


def test_streams_are_counted_while_open(measures: Measures) -> None:
    labels = {"service": "scrubber.v1.Read", "method": "WatchDevices"}
    for change, many in ((1, 1), (1, 2), (-1, 1), (-1, 0)):
        measures.metrics.rpc.on_open_streams_changed("/scrubber.v1.Read/WatchDevices", change)
        assert measures.value("scrubber_rpc_streams", **labels) == many
