"""Quarantine and the way back: what findings and scrubs mean for health, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrubber.domain.evidence import Evidence, Finding, Outcome, Severity
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import RecoveryRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.recovery import after_findings, after_scrub, spent, stands
from scrubber.domain.tally import DAY, Attempt, Strike
from tests.world.samples import NOW, POLICY, cause, finding, grant, record

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


def test_what_only_warns_is_left_for_the_next_look_to_find() -> None:
    """A scrub that put it on record would have made nobody suspect, and nobody would have found it again."""
    evidence: Evidence = {"counter": "retired_pages", "value": 4}
    grown = replace(finding("lifetime-retired-pages", Severity.WARNING), evidence=evidence)
    assert after_scrub(record(), Outcome.PASSED, [grown], POLICY, NOW).lifetime == ()


# -- conditions that may pass ------------------------------------------------------------------------------------------

SUSTAINED = POLICY.health.sustained["too-hot"]
HOT = finding("too-hot", Severity.WARNING)


def look(
    device: DeviceRecord, at: float, *codes: str, ended: set[str] | None = None, stopped: bool = False
) -> DeviceRecord:
    seen = [finding(code, Severity.WARNING) for code in codes]
    return after_findings(device, seen, POLICY, at, ended=ended, soft_stopped=stopped)


def test_a_condition_takes_a_device_out_once_it_has_lasted_and_not_a_second_before() -> None:
    suspect = look(record(), NOW, "too-hot")
    assert look(suspect, NOW + SUSTAINED - 1.0, "too-hot") == suspect
    out = look(suspect, NOW + SUSTAINED, "too-hot")
    assert out.cause is not None
    assert (out.health, out.cause.code, out.cause.way_back) == (Health.QUARANTINED, "too-hot", WayBack.WAIT)
    assert f"lasted for {SUSTAINED:.0f} s" in out.cause.sentence


def test_a_condition_that_was_missed_for_a_moment_goes_on_and_one_that_has_ended_begins_anew() -> None:
    suspect = look(record(), NOW, "too-hot")
    missed = look(suspect, NOW + 10.0, ended=set())
    assert (missed.health, missed.lasting) == (Health.SUSPECT, suspect.lasting)
    over = look(suspect, NOW + 70.0, ended={"too-hot"})
    assert (over.health, over.lasting, over.cause) == (Health.HEALTHY, (), None)
    again = look(over, NOW + 80.0, "too-hot")
    assert look(again, NOW + SUSTAINED, "too-hot").health is Health.SUSPECT


def test_a_condition_without_a_limit_and_one_that_is_not_seen_now_take_nobody_out() -> None:
    assert look(look(record(), NOW, "events-unheard"), NOW + 1e6, "events-unheard").health is Health.SUSPECT
    assert look(look(record(), NOW, "too-hot"), NOW + 1e6, ended=set()).health is Health.SUSPECT


def test_an_open_breaker_keeps_what_lasts_suspect_and_lets_a_fault_take_it_out() -> None:
    suspect = look(record(), NOW, "too-hot")
    assert look(suspect, NOW + 1e6, "too-hot", stopped=True).health is Health.SUSPECT
    out = after_findings(suspect, [HOT, finding("xid-95")], POLICY, NOW + 1e6, soft_stopped=True)
    assert out.health is Health.QUARANTINED


def test_a_cause_that_has_to_end_stands_for_as_long_as_it_is_on_record_or_anything_is_at_fault() -> None:
    out = look(look(record(), NOW, "too-hot"), NOW + SUSTAINED, "too-hot")
    assert stands(out, ())
    assert not stands(look(out, NOW + SUSTAINED + 70.0, ended={"too-hot"}), ())
    assert stands(found(record(), "driver-stuck"), [finding("driver-stuck")])
    assert not stands(found(record(), "driver-stuck"), [HOT])


def test_a_recovery_that_passes_while_its_condition_stands_has_failed() -> None:
    device = record(health=Health.RECOVERING, cause=cause("pcie-width", WayBack.RESET))
    narrow = finding("pcie-width", Severity.WARNING)
    assert after_scrub(device, Outcome.PASSED, [narrow], POLICY, NOW).failures == 1
    assert after_scrub(device, Outcome.PASSED, [HOT], POLICY, NOW).health is Health.PROBATION


# -- limits of a day ---------------------------------------------------------------------------------------------------

DAILY = POLICY.recovery
RESETS = tuple(Attempt(NOW - 600.0 * number, reset=True) for number in range(DAILY.resets_per_day, 0, -1))
SCRUBS = tuple(Attempt(NOW - 60.0 * number, reset=False) for number in range(DAILY.attempts_per_day, 0, -1))


def out_of_service(way: WayBack, *tenants: str | None, **more: Any) -> DeviceRecord:
    strikes = tuple(Strike(NOW - 10.0, "xid-95", tenant) for tenant in tenants)
    changes: dict[str, Any] = {
        "cause": cause("some-code", way),
        "strikes": strikes,
        "must_reset": way is WayBack.RESET,
    }
    return record(health=Health.QUARANTINED, **{**changes, **more})


@pytest.mark.parametrize(
    ("way", "attempts"), [(WayBack.RESET, RESETS), (WayBack.SCRUB, SCRUBS), (WayBack.RESET, SCRUBS)]
)
def test_a_device_that_has_used_up_its_day_is_condemned_with_a_sentence(
    way: WayBack, attempts: tuple[Attempt, ...]
) -> None:
    device = out_of_service(way, None, attempts=attempts)
    condemned = spent(device, POLICY, NOW)
    assert condemned.cause is not None
    assert (condemned.health, condemned.cause.way_back) == (Health.CONDEMNED, WayBack.PERSON)
    assert f"{len(attempts)} times within a day" in condemned.cause.sentence
    one_less = replace(device, attempts=attempts[1:])
    assert spent(one_less, POLICY, NOW) is one_less


@pytest.mark.parametrize("tenants", [(None,), ("acme", "umbrella"), ("acme", None), ()])
def test_a_tenant_is_blamed_only_if_every_quarantine_of_the_day_was_his(tenants: tuple[str | None, ...]) -> None:
    assert spent(out_of_service(WayBack.RESET, *tenants, attempts=RESETS), POLICY, NOW).health is Health.CONDEMNED


def test_a_device_that_one_tenant_brings_down_rests_until_the_first_of_its_resets_is_a_day_old() -> None:
    device = out_of_service(WayBack.RESET, "acme", "acme", attempts=RESETS)
    rests = spent(device, POLICY, NOW)
    assert (rests.health, rests.retry_at) == (Health.QUARANTINED, RESETS[0].at + DAY)
    assert rests.cause is not None
    assert "the same tenant" in rests.cause.sentence
    assert "acme" not in rests.cause.sentence
    assert spent(replace(rests, retry_at=NOW), POLICY, RESETS[0].at + DAY).health is Health.QUARANTINED
    assert spent(rests, POLICY, NOW).cause == rests.cause


def test_resets_that_are_a_day_old_count_no_more() -> None:
    device = out_of_service(WayBack.RESET, None, attempts=RESETS)
    later = RESETS[0].at + DAY
    assert spent(device, POLICY, later) is device
    assert spent(device, POLICY, later - 1.0).health is Health.CONDEMNED


def test_what_has_to_end_by_itself_may_take_any_time_and_rests_at_the_limits() -> None:
    waits = out_of_service(WayBack.WAIT, None, failures=100)
    assert spent(waits, POLICY, NOW) is waits
    limited = spent(replace(waits, attempts=SCRUBS), POLICY, NOW)
    assert (limited.health, limited.retry_at) == (Health.QUARANTINED, SCRUBS[0].at + DAY)


def test_what_a_person_ordered_is_never_spent() -> None:
    device = record(health=Health.QUARANTINED, cause=BY_PERSON, attempts=RESETS, failures=100, must_reset=True)
    assert spent(device, POLICY, NOW) is device


def recovering(*, reset: bool = True) -> DeviceRecord:
    return record(health=Health.RECOVERING, cause=cause(), attempts=(Attempt(NOW, reset),), must_reset=reset)


@pytest.mark.parametrize(
    ("outcome", "codes", "reset", "left"),
    [
        (Outcome.PASSED, (), True, (True,)),
        (Outcome.PASSED, (), False, (False,)),
        (Outcome.FAILED, ("verification-failed",), True, (True,)),
        (Outcome.FAILED, ("verification-failed",), False, (False,)),
        (Outcome.FAILED, ("unkillable",), True, (True,)),
        (Outcome.FAILED, ("unkillable",), False, ()),
        (Outcome.HELD_UP, (), True, (True,)),
        (Outcome.HELD_UP, (), False, ()),
        (Outcome.ABANDONED, (), False, (True,)),
    ],
)
def test_a_recovery_counts_for_the_day_as_what_it_came_to(
    outcome: Outcome, codes: tuple[str, ...], reset: bool, left: tuple[bool, ...]
) -> None:
    after = after_scrub(recovering(), outcome, [finding(code) for code in codes], POLICY, NOW, reset=reset)
    assert tuple(each.reset for each in after.attempts) == left


def test_attempts_that_met_what_has_to_end_by_itself_are_no_failures_and_make_the_pause_longer() -> None:
    device, pauses = recovering(), []
    for _ in range(8):
        device = scrubbed(replace(device, health=Health.RECOVERING), Outcome.FAILED, "unkillable")
        assert device.health is Health.QUARANTINED
        assert device.retry_at is not None
        pauses.append(device.retry_at - NOW)
    assert device.failures == 0
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]
    assert found(device, "xid-95").health is Health.QUARANTINED


def test_a_relapse_by_what_has_to_end_by_itself_is_no_failure() -> None:
    back = record(health=Health.PROBATION, failures=1, cause=cause())
    assert found(back, "driver-stuck").failures == 1


def test_a_relapse_while_a_tenant_has_the_device_is_no_failure_of_its_own() -> None:
    """It is handed out on probation where its glass is broken."""
    given = record(Hygiene.IN_USE, Health.PROBATION, failures=1, cause=cause(), open_grants=(grant(),))
    out = found(given, "xid-95")
    assert (out.health, out.failures, out.strikes[-1].tenant) == (Health.QUARANTINED, 1, "acme")


def test_each_quarantine_of_the_same_day_doubles_the_pause_as_a_failure_does() -> None:
    strikes = tuple(Strike(NOW - 60.0, "xid-95", None) for _ in range(3))
    out = found(record(strikes=strikes), "xid-95")
    assert out.retry_at == NOW + POLICY.recovery.backoff(3)
