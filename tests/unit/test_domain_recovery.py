"""Quarantine and the way back: what findings and scrubs mean for health, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.evidence import Evidence, Finding, Outcome, Severity
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import RecoveryRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.recovery import after_findings, after_scrub
from tests.world.samples import NOW, POLICY, cause, finding, record

BY_PERSON = cause("operator", WayBack.PERSON, actor="uid:1000")


def found(device: DeviceRecord, *codes: str, severity: Severity = Severity.FAULT) -> DeviceRecord:
    return after_findings(device, [finding(code, severity) for code in codes], POLICY, NOW)


def scrubbed(device: DeviceRecord, outcome: Outcome, *codes: str) -> DeviceRecord:
    return after_scrub(device, outcome, [finding(code) for code in codes], POLICY, NOW)


# -- findings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("xid-95", WayBack.RESET),
        ("xid-79", WayBack.REBOOT),
        ("xid-122", WayBack.PERSON),
        ("xid-999", WayBack.PERSON),
        ("driver-stuck", WayBack.WAIT),
        ("unreadable", WayBack.WAIT),
        ("lost", WayBack.RESET),
        ("not-in-any-table", WayBack.PERSON),
    ],
)
def test_a_fault_takes_the_device_out_with_its_cause_and_its_way_back(code: str, way: WayBack) -> None:
    out = found(record(), code)
    assert out.health is Health.QUARANTINED
    assert out.cause is not None
    assert (out.cause.code, out.cause.way_back, out.cause.by_person) == (code, way, False)
    assert out.must_reset is (way is WayBack.RESET)
    assert out.retry_at == NOW + POLICY.recovery.backoff(0)
    assert out.failures == 0


def test_of_several_faults_the_one_with_the_hardest_way_back_is_the_cause() -> None:
    out = found(record(), "driver-stuck", "xid-79", "xid-95")
    assert out.cause is not None
    assert out.cause.code == "xid-79"


def test_a_warning_makes_suspect_and_quiet_makes_healthy_again() -> None:
    suspect = found(record(), "too-hot", severity=Severity.WARNING)
    assert suspect.health is Health.SUSPECT
    assert suspect.advertised
    calm = found(suspect)
    assert (calm.health, calm.cause) == (Health.HEALTHY, None)


@pytest.mark.parametrize("severity", [Severity.NOTE, Severity.DIRTY])
def test_notes_and_dirt_say_nothing_about_health(severity: Severity) -> None:
    assert found(record(), "residue", severity=severity) == record()


@pytest.mark.parametrize("health", [Health.CONDEMNED, Health.RECOVERING])
def test_what_is_condemned_or_recovering_is_not_judged_by_a_look(health: Health) -> None:
    device = record(health=health, cause=cause())
    assert found(device, "xid-79") == device


def test_a_harder_fault_replaces_the_cause_of_a_quarantine_and_an_easier_one_does_not() -> None:
    waiting = found(record(), "driver-stuck")
    harder = found(waiting, "xid-95")
    assert harder.cause is not None
    assert harder.cause.code == "xid-95"
    assert found(harder, "driver-stuck") == harder


def test_a_fault_on_probation_is_a_failed_attempt() -> None:
    out = found(record(health=Health.PROBATION, failures=1, clean_scrubs=1, cause=cause()), "xid-95")
    assert (out.health, out.failures, out.clean_scrubs) == (Health.QUARANTINED, 2, 0)
    assert out.retry_at == NOW + POLICY.recovery.backoff(2)


# -- a person's word ---------------------------------------------------------------------------------------------------


def test_what_a_person_quarantined_no_finding_and_no_scrub_brings_back() -> None:
    device = record(health=Health.QUARANTINED, cause=BY_PERSON)
    for after in (
        found(device, "xid-95"),
        found(device),
        scrubbed(device, Outcome.PASSED),
        scrubbed(device, Outcome.FAILED, "verification-failed"),
        scrubbed(device, Outcome.HELD_UP),
    ):
        assert (after.health, after.cause) == (Health.QUARANTINED, BY_PERSON)


def test_a_person_takes_out_a_device_that_is_recovering_and_the_recovery_does_not_bring_it_back() -> None:
    device = record(health=Health.RECOVERING, cause=cause()).ordered_out(BY_PERSON)
    assert scrubbed(device, Outcome.PASSED).health is Health.QUARANTINED


@pytest.mark.parametrize("health", [Health.QUARANTINED, Health.CONDEMNED])
def test_a_release_by_a_person_leads_to_probation_with_a_clean_slate(health: Health) -> None:
    back = record(health=health, cause=BY_PERSON, failures=5).released_by_person(retry_at=NOW)
    assert (back.health, back.failures, back.clean_scrubs, back.retry_at) == (Health.PROBATION, 0, 0, NOW)


def test_a_device_that_fails_after_its_release_is_out_for_its_own_cause_and_may_recover_by_itself() -> None:
    back = record(health=Health.QUARANTINED, cause=BY_PERSON).released_by_person(retry_at=NOW)
    out = found(back, "xid-95")
    assert out.cause is not None
    assert (out.health, out.cause.code, out.cause.by_person) == (Health.QUARANTINED, "xid-95", False)


# -- scrubs ------------------------------------------------------------------------------------------------------------


def test_a_recovery_that_passes_leads_to_probation() -> None:
    after = scrubbed(record(health=Health.RECOVERING, cause=cause()), Outcome.PASSED)
    assert after.health is Health.PROBATION
    assert after.retry_at == NOW + POLICY.recovery.probation_interval


def test_enough_clean_scrubs_end_the_probation_and_forget_the_failures() -> None:
    device = record(health=Health.PROBATION, cause=cause(), failures=3, must_reset=True)
    once = scrubbed(device, Outcome.PASSED)
    assert (once.health, once.clean_scrubs) == (Health.PROBATION, 1)
    twice = scrubbed(once, Outcome.PASSED)
    assert (twice.health, twice.cause, twice.failures, twice.retry_at) == (Health.HEALTHY, None, 0, None)
    assert not twice.must_reset


@pytest.mark.parametrize("outcome", [Outcome.HELD_UP, Outcome.ABANDONED])
def test_a_recovery_that_could_not_be_made_costs_no_attempt(outcome: Outcome) -> None:
    after = scrubbed(record(health=Health.RECOVERING, cause=cause(), failures=1), outcome)
    assert (after.health, after.failures) == (Health.QUARANTINED, 1)
    assert after.retry_at is not None
    assert after.retry_at > NOW


@pytest.mark.parametrize("outcome", [Outcome.HELD_UP, Outcome.ABANDONED])
@pytest.mark.parametrize("health", [Health.HEALTHY, Health.SUSPECT, Health.PROBATION, Health.QUARANTINED])
def test_a_scrub_that_says_nothing_changes_nothing(health: Health, outcome: Outcome) -> None:
    device = record(health=health, cause=cause())
    assert scrubbed(device, outcome) == device


def test_a_scrub_that_fails_takes_a_healthy_device_out() -> None:
    after = scrubbed(record(), Outcome.FAILED, "verification-failed")
    assert after.health is Health.QUARANTINED
    assert after.must_reset


def test_each_failed_recovery_doubles_the_pause_and_the_last_condemns() -> None:
    device, pauses = record(health=Health.QUARANTINED, cause=cause()), []
    for _ in range(POLICY.recovery.attempts):
        device = scrubbed(replace(device, health=Health.RECOVERING), Outcome.FAILED, "reset-failed")
        if device.health is Health.QUARANTINED:
            assert device.retry_at is not None
            pauses.append(device.retry_at - NOW)
    assert device.health is Health.CONDEMNED
    assert pauses == [2.0, 4.0, 8.0, 16.0]
    assert device.cause is not None
    assert device.cause.way_back is WayBack.PERSON
    assert "a person has to look" in device.cause.sentence


def test_the_pause_never_grows_beyond_its_limit() -> None:
    rule = RecoveryRule(backoff_initial=1.0, backoff_max=60.0)
    assert [rule.backoff(failures) for failures in (0, 1, 5, 6, 7, 10_000)] == [1.0, 2.0, 32.0, 60.0, 60.0, 60.0]


# -- the record's own promises -----------------------------------------------------------------------------------------


def test_a_reset_that_is_owed_stays_owed_until_it_happened_or_the_probation_is_over() -> None:
    owed = found(record(), "xid-95")
    assert found(owed, "xid-79").must_reset
    assert owed.released_by_person(retry_at=NOW).must_reset


def test_a_start_forgets_what_was_not_watched_and_what_an_earlier_boot_left() -> None:
    device = record(Hygiene.CLEAN, Health.RECOVERING, cause=Cause("xid-79", "off", WayBack.REBOOT, NOW), watched=True)
    same = device.service_started(device.boot)
    assert (same.hygiene, same.certificate, same.watched) == (Hygiene.DIRTY, None, False)
    assert same.health is Health.QUARANTINED
    assert same.cause is not None
    assert same.cause.way_back is WayBack.REBOOT
    rebooted = device.service_started("boot-2")
    assert rebooted.cause is not None
    assert rebooted.cause.way_back is WayBack.SCRUB
    assert rebooted.boot == "boot-2"


# -- the device's own counters -----------------------------------------------------------------------------------------


def counted(value: int, severity: Severity) -> Finding:
    evidence: Evidence = {"counter": "ecc_uncorrected_aggregate", "value": value}
    return replace(finding("lifetime-ecc-uncorrected-aggregate", severity), evidence=evidence)


def test_what_a_counter_said_goes_on_record_with_what_it_meant() -> None:
    seen = after_findings(record(), [counted(3, Severity.NOTE)], POLICY, NOW)
    assert (seen.lifetime, seen.health) == ((("ecc_uncorrected_aggregate", 3),), Health.HEALTHY)
    more = after_findings(seen, [counted(4, Severity.FAULT)], POLICY, NOW)
    assert (more.lifetime, more.health) == ((("ecc_uncorrected_aggregate", 4),), Health.QUARANTINED)


def test_a_scrub_that_finds_new_errors_fails_and_records_them_once() -> None:
    out = after_scrub(record(), Outcome.FAILED, [counted(4, Severity.FAULT)], POLICY, NOW)
    assert (dict(out.lifetime), out.health) == ({"ecc_uncorrected_aggregate": 4}, Health.QUARANTINED)
