"""Quarantine and recovery: the effect of findings and scrubs on health, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrubber.domain.evidence import Evidence, Finding, Outcome, Severity
from scrubber.domain.health.history import DAY, PastQuarantine, RecoveryAttempt
from scrubber.domain.health.recovery import after_findings, after_scrub, apply_attempt_limits, condition_persists
from scrubber.domain.policy import RecoveryRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from tests.simulation.samples import NOW, POLICY, cause, finding, grant, record

BY_OPERATOR = cause("operator", RecoveryMethod.OPERATOR, actor="uid:1000")


def found(device: DeviceRecord, *codes: str, severity: Severity = Severity.FAULT) -> DeviceRecord:
    return after_findings(device, [finding(code, severity) for code in codes], POLICY, NOW)


def scrubbed(device: DeviceRecord, outcome: Outcome, *codes: str) -> DeviceRecord:
    return after_scrub(device, outcome, [finding(code) for code in codes], POLICY, NOW)


# -- findings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("xid-95", RecoveryMethod.RESET),
        ("xid-79", RecoveryMethod.REBOOT),
        ("xid-122", RecoveryMethod.OPERATOR),
        ("xid-999", RecoveryMethod.OPERATOR),
        ("driver-timeout", RecoveryMethod.WAIT),
        ("device-unreadable", RecoveryMethod.WAIT),
        ("device-lost", RecoveryMethod.RESET),
        ("not-in-any-table", RecoveryMethod.OPERATOR),
    ],
)
def test_fault_quarantines_the_device_with_its_cause_and_recovery_method(code: str, way: RecoveryMethod) -> None:
    out = found(record(), code)
    assert out.health is Health.QUARANTINED
    assert out.cause is not None
    assert (out.cause.code, out.cause.recovery_method, out.cause.by_operator) == (code, way, False)
    assert out.must_reset is (way is RecoveryMethod.RESET)
    assert out.retry_at == NOW + POLICY.recovery.backoff(0)
    assert out.failures == 0


def test_fault_with_the_hardest_recovery_method_becomes_the_cause() -> None:
    out = found(record(), "driver-timeout", "xid-79", "xid-95")
    assert out.cause is not None
    assert out.cause.code == "xid-79"


def test_warning_makes_a_device_suspect_and_its_end_makes_the_device_healthy_again() -> None:
    suspect = found(record(), "too-hot", severity=Severity.WARNING)
    assert suspect.health is Health.SUSPECT
    assert suspect.advertised
    calm = found(suspect)
    assert (calm.health, calm.cause) == (Health.HEALTHY, None)


@pytest.mark.parametrize("severity", [Severity.NOTE, Severity.BLOCKING])
def test_notes_and_blocking_findings_leave_health_unchanged(severity: Severity) -> None:
    assert found(record(), "residue", severity=severity) == record()


@pytest.mark.parametrize("health", [Health.CONDEMNED, Health.RECOVERING])
def test_findings_on_a_condemned_or_recovering_device_do_not_change_its_health(health: Health) -> None:
    device = record(health=health, cause=cause())
    assert found(device, "xid-79") == device


def test_harder_fault_replaces_the_cause_of_a_quarantine_and_an_easier_fault_does_not() -> None:
    waiting = found(record(), "driver-timeout")
    harder = found(waiting, "xid-95")
    assert harder.cause is not None
    assert harder.cause.code == "xid-95"
    assert found(harder, "driver-timeout") == harder


def test_fault_on_probation_counts_as_a_failed_attempt() -> None:
    out = found(record(health=Health.PROBATION, failures=1, clean_scrubs=1, cause=cause()), "xid-95")
    assert (out.health, out.failures, out.clean_scrubs) == (Health.QUARANTINED, 2, 0)
    assert out.retry_at == NOW + POLICY.recovery.backoff(2)


# -- operator actions --------------------------------------------------------------------------------------------------


def test_device_quarantined_by_an_operator_is_returned_by_no_finding_and_no_scrub() -> None:
    device = record(health=Health.QUARANTINED, cause=BY_OPERATOR)
    for after in (
        found(device, "xid-95"),
        found(device),
        scrubbed(device, Outcome.PASSED),
        scrubbed(device, Outcome.FAILED, "verification-failed"),
        scrubbed(device, Outcome.BLOCKED),
    ):
        assert (after.health, after.cause) == (Health.QUARANTINED, BY_OPERATOR)


def test_recovery_does_not_return_a_device_that_an_operator_quarantined_meanwhile() -> None:
    device = record(health=Health.RECOVERING, cause=cause()).after_operator_quarantine(BY_OPERATOR)
    assert scrubbed(device, Outcome.PASSED).health is Health.QUARANTINED


@pytest.mark.parametrize("health", [Health.QUARANTINED, Health.CONDEMNED])
def test_release_by_an_operator_leads_to_probation_without_recorded_failures(health: Health) -> None:
    back = record(health=health, cause=BY_OPERATOR, failures=5).after_operator_release(retry_at=NOW)
    assert (back.health, back.failures, back.clean_scrubs, back.retry_at) == (Health.PROBATION, 0, 0, NOW)


def test_device_that_faults_after_its_release_is_quarantined_for_the_new_cause_and_may_recover() -> None:
    back = record(health=Health.QUARANTINED, cause=BY_OPERATOR).after_operator_release(retry_at=NOW)
    out = found(back, "xid-95")
    assert out.cause is not None
    assert (out.health, out.cause.code, out.cause.by_operator) == (Health.QUARANTINED, "xid-95", False)


# -- scrubs ------------------------------------------------------------------------------------------------------------


def test_passed_recovery_leads_to_probation() -> None:
    after = scrubbed(record(health=Health.RECOVERING, cause=cause()), Outcome.PASSED)
    assert after.health is Health.PROBATION
    assert after.retry_at == NOW + POLICY.recovery.probation_interval


def test_enough_clean_scrubs_end_the_probation_and_clear_the_failures() -> None:
    device = record(health=Health.PROBATION, cause=cause(), failures=3, must_reset=True)
    once = scrubbed(device, Outcome.PASSED)
    assert (once.health, once.clean_scrubs) == (Health.PROBATION, 1)
    twice = scrubbed(once, Outcome.PASSED)
    assert (twice.health, twice.cause, twice.failures, twice.retry_at) == (Health.HEALTHY, None, 0, None)
    assert not twice.must_reset


@pytest.mark.parametrize("outcome", [Outcome.BLOCKED, Outcome.ABANDONED])
def test_recovery_that_was_blocked_or_abandoned_costs_no_attempt(outcome: Outcome) -> None:
    after = scrubbed(record(health=Health.RECOVERING, cause=cause(), failures=1), outcome)
    assert (after.health, after.failures) == (Health.QUARANTINED, 1)
    assert after.retry_at is not None
    assert after.retry_at > NOW


@pytest.mark.parametrize("outcome", [Outcome.BLOCKED, Outcome.ABANDONED])
@pytest.mark.parametrize("health", [Health.HEALTHY, Health.SUSPECT, Health.PROBATION, Health.QUARANTINED])
def test_inconclusive_scrub_does_not_change_health(health: Health, outcome: Outcome) -> None:
    device = record(health=health, cause=cause())
    assert scrubbed(device, outcome) == device


def test_failed_scrub_quarantines_a_healthy_device() -> None:
    after = scrubbed(record(), Outcome.FAILED, "verification-failed")
    assert after.health is Health.QUARANTINED
    assert after.must_reset


def test_each_failed_recovery_doubles_the_backoff_and_the_last_one_condemns_the_device() -> None:
    device, pauses = record(health=Health.QUARANTINED, cause=cause()), []
    for _ in range(POLICY.recovery.max_attempts):
        device = scrubbed(replace(device, health=Health.RECOVERING), Outcome.FAILED, "reset-failed")
        if device.health is Health.QUARANTINED:
            assert device.retry_at is not None
            pauses.append(device.retry_at - NOW)
    assert device.health is Health.CONDEMNED
    assert pauses == [2.0, 4.0, 8.0, 16.0]
    assert device.cause is not None
    assert device.cause.recovery_method is RecoveryMethod.OPERATOR
    assert "an operator must inspect it" in device.cause.message


def test_recovery_backoff_never_exceeds_its_maximum() -> None:
    rule = RecoveryRule(initial_backoff=1.0, max_backoff=60.0)
    assert [rule.backoff(failures) for failures in (0, 1, 5, 6, 7, 10_000)] == [1.0, 2.0, 32.0, 60.0, 60.0, 60.0]


# -- invariants of the record ------------------------------------------------------------------------------------------


def test_owed_reset_survives_a_harder_fault_and_a_release_by_an_operator() -> None:
    owed = found(record(), "xid-95")
    assert found(owed, "xid-79").must_reset
    assert owed.after_operator_release(retry_at=NOW).must_reset


def test_service_start_voids_the_certificate_ends_a_recovery_and_recognizes_a_reboot() -> None:
    device = record(
        Hygiene.CLEAN, Health.RECOVERING, cause=Cause("xid-79", "off", RecoveryMethod.REBOOT, NOW), exclusive_use=True
    )
    same = device.after_service_start(device.boot)
    assert (same.hygiene, same.certificate, same.exclusive_use) == (Hygiene.DIRTY, None, False)
    assert same.health is Health.QUARANTINED
    assert same.cause is not None
    assert same.cause.recovery_method is RecoveryMethod.REBOOT
    rebooted = device.after_service_start("boot-2")
    assert rebooted.cause is not None
    assert rebooted.cause.recovery_method is RecoveryMethod.SCRUB
    assert rebooted.boot == "boot-2"


# -- the device's own counters -----------------------------------------------------------------------------------------


def counted(value: int, severity: Severity) -> Finding:
    evidence: Evidence = {"counter": "ecc_uncorrected_aggregate", "value": value}
    return replace(finding("lifetime-ecc-uncorrected-aggregate", severity), evidence=evidence)


def test_counter_value_is_recorded_together_with_its_effect_on_health() -> None:
    seen = after_findings(record(), [counted(3, Severity.NOTE)], POLICY, NOW)
    assert (seen.lifetime_counters, seen.health) == ((("ecc_uncorrected_aggregate", 3),), Health.HEALTHY)
    more = after_findings(seen, [counted(4, Severity.FAULT)], POLICY, NOW)
    assert (more.lifetime_counters, more.health) == ((("ecc_uncorrected_aggregate", 4),), Health.QUARANTINED)


def test_scrub_that_finds_new_errors_fails_and_records_the_counter() -> None:
    out = after_scrub(record(), Outcome.FAILED, [counted(4, Severity.FAULT)], POLICY, NOW)
    assert (dict(out.lifetime_counters), out.health) == ({"ecc_uncorrected_aggregate": 4}, Health.QUARANTINED)


def test_counter_with_only_a_warning_is_not_recorded_by_a_scrub() -> None:
    """If a scrub recorded it, no device would become suspect, and the growth would not be found again."""
    evidence: Evidence = {"counter": "retired_pages", "value": 4}
    grown = replace(finding("lifetime-retired-pages", Severity.WARNING), evidence=evidence)
    assert after_scrub(record(), Outcome.PASSED, [grown], POLICY, NOW).lifetime_counters == ()


# -- transient conditions ----------------------------------------------------------------------------------------------

SUSTAINED = POLICY.health.quarantine_after["too-hot"]
HOT = finding("too-hot", Severity.WARNING)


def look(
    device: DeviceRecord, at: float, *codes: str, ended: set[str] | None = None, stopped: bool = False
) -> DeviceRecord:
    seen = [finding(code, Severity.WARNING) for code in codes]
    return after_findings(device, seen, POLICY, at, ended=ended, soft_quarantines_stopped=stopped)


def test_lasting_condition_quarantines_a_device_after_the_configured_time_and_not_earlier() -> None:
    suspect = look(record(), NOW, "too-hot")
    assert look(suspect, NOW + SUSTAINED - 1.0, "too-hot") == suspect
    out = look(suspect, NOW + SUSTAINED, "too-hot")
    assert out.cause is not None
    assert (out.health, out.cause.code, out.cause.recovery_method) == (
        Health.QUARANTINED,
        "too-hot",
        RecoveryMethod.WAIT,
    )
    assert f"lasted for {SUSTAINED:.0f} s" in out.cause.message


def test_condition_missed_once_continues_and_an_ended_condition_starts_over() -> None:
    suspect = look(record(), NOW, "too-hot")
    missed = look(suspect, NOW + 10.0, ended=set())
    assert (missed.health, missed.warnings) == (Health.SUSPECT, suspect.warnings)
    over = look(suspect, NOW + 70.0, ended={"too-hot"})
    assert (over.health, over.warnings, over.cause) == (Health.HEALTHY, (), None)
    again = look(over, NOW + 80.0, "too-hot")
    assert look(again, NOW + SUSTAINED, "too-hot").health is Health.SUSPECT


def test_condition_without_a_time_limit_or_not_read_now_quarantines_no_device() -> None:
    assert look(look(record(), NOW, "event-stream-lost"), NOW + 1e6, "event-stream-lost").health is Health.SUSPECT
    assert look(look(record(), NOW, "too-hot"), NOW + 1e6, ended=set()).health is Health.SUSPECT


def test_open_breaker_keeps_a_device_with_a_lasting_condition_suspect_but_not_one_with_a_fault() -> None:
    suspect = look(record(), NOW, "too-hot")
    assert look(suspect, NOW + 1e6, "too-hot", stopped=True).health is Health.SUSPECT
    out = after_findings(suspect, [HOT, finding("xid-95")], POLICY, NOW + 1e6, soft_quarantines_stopped=True)
    assert out.health is Health.QUARANTINED


def test_condition_persists_while_it_is_recorded_or_a_fault_is_found() -> None:
    out = look(look(record(), NOW, "too-hot"), NOW + SUSTAINED, "too-hot")
    assert condition_persists(out, ())
    assert not condition_persists(look(out, NOW + SUSTAINED + 70.0, ended={"too-hot"}), ())
    assert condition_persists(found(record(), "driver-timeout"), [finding("driver-timeout")])
    assert not condition_persists(found(record(), "driver-timeout"), [HOT])


def test_passed_recovery_while_its_condition_persists_counts_as_failed() -> None:
    device = record(health=Health.RECOVERING, cause=cause("pcie-width", RecoveryMethod.RESET))
    narrow = finding("pcie-width", Severity.WARNING)
    assert after_scrub(device, Outcome.PASSED, [narrow], POLICY, NOW).failures == 1
    assert after_scrub(device, Outcome.PASSED, [HOT], POLICY, NOW).health is Health.PROBATION


# -- daily limits ------------------------------------------------------------------------------------------------------

DAILY = POLICY.recovery
RESETS = tuple(RecoveryAttempt(NOW - 600.0 * number, reset=True) for number in range(DAILY.max_resets_per_day, 0, -1))
SCRUBS = tuple(RecoveryAttempt(NOW - 60.0 * number, reset=False) for number in range(DAILY.max_attempts_per_day, 0, -1))


def out_of_service(way: RecoveryMethod, *tenants: str | None, **more: Any) -> DeviceRecord:
    quarantines = tuple(PastQuarantine(NOW - 10.0, "xid-95", tenant) for tenant in tenants)
    changes: dict[str, Any] = {
        "cause": cause("some-code", way),
        "recent_quarantines": quarantines,
        "must_reset": way is RecoveryMethod.RESET,
    }
    return record(health=Health.QUARANTINED, **{**changes, **more})


@pytest.mark.parametrize(
    ("way", "attempts"),
    [(RecoveryMethod.RESET, RESETS), (RecoveryMethod.SCRUB, SCRUBS), (RecoveryMethod.RESET, SCRUBS)],
)
def test_device_that_reached_its_daily_limit_is_condemned_with_a_message(
    way: RecoveryMethod, attempts: tuple[RecoveryAttempt, ...]
) -> None:
    device = out_of_service(way, None, recovery_attempts=attempts)
    condemned = apply_attempt_limits(device, POLICY, NOW)
    assert condemned.cause is not None
    assert (condemned.health, condemned.cause.recovery_method) == (Health.CONDEMNED, RecoveryMethod.OPERATOR)
    assert f"{len(attempts)} times within a day" in condemned.cause.message
    one_less = replace(device, recovery_attempts=attempts[1:])
    assert apply_attempt_limits(one_less, POLICY, NOW) is one_less


@pytest.mark.parametrize("tenants", [(None,), ("acme", "umbrella"), ("acme", None), ()])
def test_device_is_condemned_unless_all_quarantines_of_the_day_were_of_one_tenant(
    tenants: tuple[str | None, ...],
) -> None:
    assert (
        apply_attempt_limits(
            out_of_service(RecoveryMethod.RESET, *tenants, recovery_attempts=RESETS), POLICY, NOW
        ).health
        is Health.CONDEMNED
    )


def test_device_quarantined_by_one_tenant_only_rests_until_its_oldest_reset_is_a_day_old() -> None:
    device = out_of_service(RecoveryMethod.RESET, "acme", "acme", recovery_attempts=RESETS)
    rests = apply_attempt_limits(device, POLICY, NOW)
    assert (rests.health, rests.retry_at) == (Health.QUARANTINED, RESETS[0].at + DAY)
    assert rests.cause is not None
    assert "the same tenant" in rests.cause.message
    assert "acme" not in rests.cause.message
    assert apply_attempt_limits(replace(rests, retry_at=NOW), POLICY, RESETS[0].at + DAY).health is Health.QUARANTINED
    assert apply_attempt_limits(rests, POLICY, NOW).cause == rests.cause


def test_reset_that_is_a_day_old_does_not_count_towards_the_limit() -> None:
    device = out_of_service(RecoveryMethod.RESET, None, recovery_attempts=RESETS)
    later = RESETS[0].at + DAY
    assert apply_attempt_limits(device, POLICY, later) is device
    assert apply_attempt_limits(device, POLICY, later - 1.0).health is Health.CONDEMNED


def test_device_that_waits_for_a_condition_to_end_is_never_condemned_and_rests_at_the_limits() -> None:
    waits = out_of_service(RecoveryMethod.WAIT, None, failures=100)
    assert apply_attempt_limits(waits, POLICY, NOW) is waits
    limited = apply_attempt_limits(replace(waits, recovery_attempts=SCRUBS), POLICY, NOW)
    assert (limited.health, limited.retry_at) == (Health.QUARANTINED, SCRUBS[0].at + DAY)


def test_device_quarantined_by_an_operator_is_not_subject_to_attempt_limits() -> None:
    device = record(
        health=Health.QUARANTINED, cause=BY_OPERATOR, recovery_attempts=RESETS, failures=100, must_reset=True
    )
    assert apply_attempt_limits(device, POLICY, NOW) is device


def recovering(*, reset: bool = True) -> DeviceRecord:
    return record(
        health=Health.RECOVERING, cause=cause(), recovery_attempts=(RecoveryAttempt(NOW, reset),), must_reset=reset
    )


@pytest.mark.parametrize(
    ("outcome", "codes", "reset", "left"),
    [
        (Outcome.PASSED, (), True, (True,)),
        (Outcome.PASSED, (), False, (False,)),
        (Outcome.FAILED, ("verification-failed",), True, (True,)),
        (Outcome.FAILED, ("verification-failed",), False, (False,)),
        (Outcome.FAILED, ("holder-unkillable",), True, (True,)),
        (Outcome.FAILED, ("holder-unkillable",), False, ()),
        (Outcome.BLOCKED, (), True, (True,)),
        (Outcome.BLOCKED, (), False, ()),
        (Outcome.ABANDONED, (), False, (True,)),
    ],
)
def test_recovery_attempt_is_recorded_with_or_without_reset_by_its_outcome(
    outcome: Outcome, codes: tuple[str, ...], reset: bool, left: tuple[bool, ...]
) -> None:
    after = after_scrub(recovering(), outcome, [finding(code) for code in codes], POLICY, NOW, reset=reset)
    assert tuple(each.reset for each in after.recovery_attempts) == left


def test_attempts_blocked_by_a_transient_condition_are_no_failures_and_lengthen_the_backoff() -> None:
    device, pauses = recovering(), []
    for _ in range(8):
        device = scrubbed(replace(device, health=Health.RECOVERING), Outcome.FAILED, "holder-unkillable")
        assert device.health is Health.QUARANTINED
        assert device.retry_at is not None
        pauses.append(device.retry_at - NOW)
    assert device.failures == 0
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]
    assert found(device, "xid-95").health is Health.QUARANTINED


def test_relapse_by_a_transient_condition_on_probation_is_no_failure() -> None:
    back = record(health=Health.PROBATION, failures=1, cause=cause())
    assert found(back, "driver-timeout").failures == 1


def test_relapse_on_probation_while_a_tenant_has_the_device_is_no_failure() -> None:
    """A device on probation is handed out under a break-glass override."""
    given = record(Hygiene.IN_USE, Health.PROBATION, failures=1, cause=cause(), open_grants=(grant(),))
    out = found(given, "xid-95")
    assert (out.health, out.failures, out.recent_quarantines[-1].tenant) == (Health.QUARANTINED, 1, "acme")


def test_each_quarantine_of_the_same_day_doubles_the_backoff_like_a_failure() -> None:
    quarantines = tuple(PastQuarantine(NOW - 60.0, "xid-95", None) for _ in range(3))
    out = found(record(recent_quarantines=quarantines), "xid-95")
    assert out.retry_at == NOW + POLICY.recovery.backoff(3)
