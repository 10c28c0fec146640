"""What is so at present is shown, and nothing that is over: of devices, of the service, of its sockets."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256

import pytest

from scrubber.domain.evidence import Certificate, Path, Step, StepResult, Verdict
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.record import DeviceRecord, Glass, Lasting
from scrubber.ports.record import Head
from tests.measures import Measures, event, memory, scrub, shown

RECORD = DeviceRecord("GPU-a")
XID = Cause("xid-95", "A sentence.", WayBack.RESET, since=100.0)


@pytest.fixture
def told() -> Measures:
    return Measures()


def certificate() -> Certificate:
    return Certificate(
        *("C-1", "node", "boot", "driver", "GPU-a", 1, 0, Path.SLOW, "S-1", (), (), "default", "digest"),
        issued_at=77.0,
    )


# -- devices -----------------------------------------------------------------------------------------------------------


def test_each_device_shows_its_present_state_only(told: Measures) -> None:
    told.show(shown("GPU-a"), shown("GPU-b"))
    assert told.value("scrubber_device_state", device="GPU-b", hygiene="dirty", health="healthy") == 1
    told.show(shown("GPU-a", replace(RECORD, hygiene=Hygiene.IN_USE)))
    assert told.labels("scrubber_device_state") == [{"device": "GPU-a", "hygiene": "in-use", "health": "healthy"}]
    assert told.value("scrubber_device_info", device="GPU-a", index="0", model="A model") == 1


@pytest.mark.parametrize("offered", [True, False])
def test_what_the_kubelet_is_told_is_shown(told: Measures, offered: bool) -> None:
    told.show(shown(offered=offered))
    assert told.value("scrubber_device_offered", device="GPU-a") == offered


def test_a_device_out_of_service_shows_since_when_why_and_its_way_back(told: Measures) -> None:
    told.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=XID)))
    name = "scrubber_quarantine_start_timestamp_seconds"
    assert told.value(name, device="GPU-a", cause_class="xid", way_back="reset") == 100.0
    told.show(shown(record=replace(RECORD, health=Health.SUSPECT, cause=XID)))
    assert told.labels(name) == []


def test_what_is_off_with_a_device_is_shown_for_as_long_as_it_is(told: Measures) -> None:
    standing = (Lasting("too-hot", 1.0), Lasting("moon", 1.0), Lasting("sun", 1.0))
    told.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=XID, lasting=standing)))
    codes = {each["code"] for each in told.labels("scrubber_device_signal")}
    assert codes == {"xid", "too-hot", "other"}
    told.show(shown())
    assert told.labels("scrubber_device_signal") == []


def test_a_persons_word_is_nothing_that_is_off_with_a_device(told: Measures) -> None:
    cause = replace(XID, code="operator", actor="uid:0")
    told.show(shown(record=replace(RECORD, health=Health.QUARANTINED, cause=cause)))
    assert told.labels("scrubber_device_signal") == []


def test_an_unused_certificate_shows_when_it_was_issued(told: Measures) -> None:
    told.show(shown(record=replace(RECORD, certificate=certificate())))
    assert told.value("scrubber_certificate_issued_timestamp_seconds", device="GPU-a") == 77.0
    told.show(shown())
    assert told.labels("scrubber_certificate_issued_timestamp_seconds") == []


def test_a_broken_glass_shows_until_it_is_whole(told: Measures) -> None:
    told.show(shown(record=replace(RECORD, glass=Glass(900.0, "why", "uid:0")), observed=True), shown("GPU-b"))
    assert told.labels("scrubber_break_glass") == [{"device": "GPU-a"}]
    assert told.value("scrubber_break_glass_end_timestamp_seconds", device="GPU-a") == 900.0
    told.show(shown(), shown("GPU-b"))
    assert told.labels("scrubber_break_glass") == []
    assert told.labels("scrubber_break_glass_end_timestamp_seconds") == []


def test_devices_are_counted_by_how_they_are_judged(told: Measures) -> None:
    def judged() -> dict[str, float | None]:
        return {mode: told.value("scrubber_enforcement", mode=mode) for mode in ("enforce", "observe")}

    assert judged() == {"enforce": 0, "observe": 0}
    told.show(shown("GPU-a"), shown("GPU-b"), shown("GPU-c", observed=True))
    assert judged() == {"enforce": 2, "observe": 1}


def test_the_last_slow_path_shows_its_steps_its_coverage_and_its_rate(told: Measures) -> None:
    told.show(shown())
    figures = {"total_bytes": 1000, "verified_bytes": 750, "cleared_bytes": 800, "clear_seconds": 0.5}
    told.metrics.scrubbed(scrub(StepResult(Step.HOLDERS, Verdict.PASSED, 0.25), memory(2.0, **figures)))
    assert told.value("scrubber_memory_coverage_ratio", device="GPU-a") == 0.75
    assert told.value("scrubber_clear_rate_bytes_per_second", device="GPU-a") == 1600.0
    name = "scrubber_last_scrub_step_duration_seconds"
    assert told.value(name, device="GPU-a", step="holders", verdict="passed") == 0.25
    assert told.value(name, device="GPU-a", step="memory", verdict="passed") == 2.0


def test_the_next_slow_path_takes_the_place_of_all_steps_and_keeps_what_it_did_not_measure(told: Measures) -> None:
    told.show(shown())
    told.metrics.scrubbed(scrub(memory(2.0, total_bytes=10, verified_bytes=10, cleared_bytes=10, clear_seconds=1.0)))
    told.metrics.scrubbed(scrub(StepResult(Step.HOLDERS, Verdict.FAILED, 0.5)))
    name = "scrubber_last_scrub_step_duration_seconds"
    assert told.labels(name) == [{"device": "GPU-a", "step": "holders", "verdict": "failed"}]
    assert told.value("scrubber_memory_coverage_ratio", device="GPU-a") == 1.0


def test_a_fast_path_is_no_last_scrub(told: Measures) -> None:
    told.show(shown())
    told.metrics.scrubbed(scrub(StepResult(Step.HOLDERS, Verdict.PASSED, 0.1), path=Path.FAST))
    assert told.labels("scrubber_last_scrub_step_duration_seconds") == []


@pytest.mark.parametrize("odd", [None, "many", True, float("nan"), float("inf"), -1, 0, 10**400])
def test_a_measurement_that_makes_no_sense_is_not_shown(told: Measures, odd: str | float | None) -> None:
    told.show(shown())
    told.metrics.scrubbed(scrub(memory(total_bytes=0, verified_bytes=odd, cleared_bytes=odd, clear_seconds=0)))
    assert told.labels("scrubber_memory_coverage_ratio") == []
    assert told.labels("scrubber_clear_rate_bytes_per_second") == []


def test_a_device_that_is_gone_takes_its_series_along(told: Measures) -> None:
    told.show(shown("GPU-a"))
    told.metrics.scrubbed(scrub(memory(total_bytes=10, verified_bytes=10)))
    told(event("health.signal", code="xid-95", new=1))
    assert 'device="GPU-a"' in told.page()
    told.show(shown("GPU-b"))
    assert "GPU-a" not in told.page()
    told.show(shown("GPU-a"))
    assert told.value("scrubber_xids_total", device="GPU-a", code="95") == 1


# -- the service -------------------------------------------------------------------------------------------------------


def test_queues_and_slots_are_shown_as_they_are_when_somebody_scrapes(told: Measures) -> None:
    told.show(handovers_waiting=3, slots_busy=2, slots_free=6, erasers_waiting=5)
    assert told.value("scrubber_handovers_waiting") == 3
    assert told.value("scrubber_eraser_slots", state="busy") == 2
    assert told.value("scrubber_eraser_slots", state="free") == 6
    assert told.value("scrubber_erasers_waiting") == 5


def test_children_are_counted_by_what_runs_in_them(told: Measures) -> None:
    starts = {"scrubber.adapters.sim.driver": 2, "scrubber.adapters.nvidia.driver": 1, "a.walker": 4, "a.surprise": 1}
    told.show(child_starts=starts, children_abandoned=2)
    shown_starts = {
        child: told.value("scrubber_child_starts_total", child=child) for child in ("driver", "walker", "other")
    }
    assert shown_starts == {"driver": 3, "walker": 4, "other": 1}
    assert told.value("scrubber_children_abandoned_total") == 2


def test_the_ledger_stores_nothing_until_it_is_said_that_it_does(told: Measures) -> None:
    assert told.value("scrubber_ledger_ok") == 0
    assert told.value("scrubber_ledger_size_bytes") is None
    told.show(ledger_ok=True, ledger_bytes=4096)
    assert told.value("scrubber_ledger_ok") == 1
    assert told.value("scrubber_ledger_size_bytes") == 4096


def test_commits_are_timed_and_those_that_fail_are_counted(told: Measures) -> None:
    told.metrics.service.committed(0.002, True)
    told.metrics.service.committed(0.5, False)
    assert told.value("scrubber_ledger_commit_duration_seconds_count") == 2
    assert told.value("scrubber_ledger_commit_duration_seconds_bucket", le="0.0025") == 1
    assert told.value("scrubber_ledger_failures_total") == 1


def parts_on(page: str) -> str:
    """The hash that the page's eight parts make, as docs/audit.md puts them together."""
    found = dict(re.findall(r'^scrubber_audit_head_hash\{part="(\d)"\} (\S+)$', page, re.MULTILINE))
    return "".join(f"{int(float(found[part])):08x}" for part in sorted(found))


@pytest.mark.parametrize("digest", ["f" * 64, "fffffffe" * 8, "00ff" * 16, sha256(b"row 8").hexdigest()])
def test_the_metrics_carry_every_bit_of_the_audits_head(told: Measures, digest: str) -> None:
    told.show(audit_head=Head(8, digest))
    assert told.value("scrubber_audit_head_sequence") == 8
    assert parts_on(told.page()) == digest


def test_another_row_of_the_audit_makes_no_new_series(told: Measures) -> None:
    assert told.value("scrubber_audit_head_sequence") is None
    told.show(audit_head=Head(7, "00ff" * 16))
    before = told.series()
    told.show(audit_head=Head(8, "3f9a5c0d71e2" + "9" * 52))
    assert told.series() == before


def test_a_trail_that_has_no_row_yet_has_a_head_of_zero(told: Measures) -> None:
    told.show(audit_head=Head())
    assert told.value("scrubber_audit_head_sequence") == 0
    assert parts_on(told.page()) == "0" * 64


def test_whether_the_trail_is_intact_is_not_said_before_somebody_looked(told: Measures) -> None:
    assert told.value("scrubber_audit_intact") is None
    told.metrics.service.audit(intact=True, at=50.0)
    assert (told.value("scrubber_audit_intact"), told.value("scrubber_audit_verified_timestamp_seconds")) == (1, 50.0)
    told.metrics.service.audit(intact=False, at=60.0)
    assert (told.value("scrubber_audit_intact"), told.value("scrubber_audit_verified_timestamp_seconds")) == (0, 60.0)


def test_the_kubelet_is_shown_as_the_service_sees_it(told: Measures) -> None:
    assert told.value("scrubber_kubelet_trusted") == 0
    told.show(kubelet_trusted=True, kubelet_restarts=2)
    assert told.value("scrubber_kubelet_trusted") == 1
    assert told.value("scrubber_kubelet_restarts_total") == 2


def test_one_policy_one_key_and_one_build_are_shown(told: Measures) -> None:
    told.metrics.service.key("sha256:00ff")
    told.metrics.service.key("sha256:ff00")
    assert told.labels("scrubber_signing_key_info") == [{"key_id": "sha256:ff00"}]
    told.show(policy=("default", "0123456789abcdef"))
    told.show(policy=("strict", "fedcba9876543210"))
    assert told.labels("scrubber_policy_info") == [{"policy": "strict", "digest": "fedcba987654"}]
    told.metrics.service.runs(version="1.2", backend="sim", driver="sim-1")
    (build,) = told.labels("scrubber_build_info")
    assert (build["version"], build["backend"], build["driver"]) == ("1.2", "sim", "sim-1")
    assert build["python"].startswith("3.")


def test_a_policy_that_is_refused_shows_until_one_is_accepted(told: Measures) -> None:
    told(event("policy.rejected", sentence="mine.yaml:2: no"))
    assert told.value("scrubber_policy_rejected") == 1
    told(event("policy.accepted", changed=False))
    assert told.value("scrubber_policy_rejected") == 0


def test_an_open_breaker_shows_until_it_is_closed(told: Measures) -> None:
    def stands() -> tuple[float | None, float | None]:
        return told.value("scrubber_breaker_open", what="resets"), told.value("scrubber_breaker_open", what="soft")

    assert stands() == (0, 0)
    told(event("breaker.opened", what="soft", sentence="2 of 8 devices."))
    assert stands() == (0, 1)
    told(event("breaker.opened", what="moon"), event("breaker.opened"))
    assert stands() == (0, 1)
    told(event("breaker.closed", what="soft"), event("breaker.opened", what="resets"))
    assert stands() == (1, 0)


# -- its sockets -------------------------------------------------------------------------------------------------------


def test_calls_are_timed_by_service_method_and_status(told: Measures) -> None:
    told.metrics.calls.answered("/scrubber.v1.Plugin/HandOver", "UNAVAILABLE", 25.0)
    labels = {"service": "scrubber.v1.Plugin", "method": "HandOver", "code": "UNAVAILABLE"}
    assert told.value("scrubber_rpc_duration_seconds_sum", **labels) == 25.0


def test_streams_are_counted_while_they_are_open(told: Measures) -> None:
    labels = {"service": "scrubber.v1.Read", "method": "WatchDevices"}
    for change, many in ((1, 1), (1, 2), (-1, 1), (-1, 0)):
        told.metrics.calls.following("/scrubber.v1.Read/WatchDevices", change)
        assert told.value("scrubber_rpc_streams", **labels) == many
