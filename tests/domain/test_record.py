"""The record of a device: what a grant, an adoption and a scrub store in it."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.handover_kind import Basis
from scrubber.domain.states import Health, Hygiene
from tests.simulation.samples import NOW, assignment, cause, certificate, grant, pod, record

A, B = assignment(pod("acme", "a", "uid-a")), assignment(pod("umbrella", "b", "uid-b"))
CLEAN = record(Hygiene.CLEAN, certificate=certificate(), exclusive_use=True)


def test_grant_consumes_the_certificate_in_the_same_change() -> None:
    fast = certificate(id="cert-2", sequence=2)
    granted = CLEAN.after_grant(grant(1, A), fast, certain=True)
    assert (granted.hygiene, granted.certificate, granted.certificate_count) == (Hygiene.IN_USE, None, 2)
    assert granted.version == CLEAN.version + 1
    assert granted.grant_sequence == 1
    assert granted.previous_assignment == A


def test_previous_assignment_is_known_only_after_a_certain_grant_of_a_certified_device() -> None:
    assert CLEAN.after_grant(grant(1, A), None, certain=False).previous_assignment is None
    assert CLEAN.after_grant(grant(1, A, basis=Basis.OBSERVE_MODE), None, certain=True).previous_assignment is None
    assert CLEAN.after_grant(grant(1, unknown=True), None, certain=True).previous_assignment is None
    unwatched = replace(CLEAN, exclusive_use=False)
    assert unwatched.after_grant(grant(1, A), None, certain=True).previous_assignment is None


def test_grant_for_a_restart_replaces_the_pods_earlier_grant_and_other_grants_stay_open() -> None:
    first = CLEAN.after_grant(grant(1, A), None, certain=True)
    again = first.after_grant(grant(2, A), None, certain=True)
    assert [each.sequence for each in again.open_grants] == [2]
    other = again.after_grant(grant(3, B), None, certain=True)
    assert [each.sequence for each in other.open_grants] == [2, 3]


def test_grants_to_unnamed_pods_never_replace_each_other() -> None:
    nameless = assignment(pod("acme", "a", None))
    device = CLEAN.after_grant(grant(1, nameless), None, certain=True).after_grant(
        grant(2, nameless), None, certain=True
    )
    assert [each.sequence for each in device.open_grants] == [1, 2]
    device = CLEAN.after_grant(grant(1, unknown=True), None, certain=True).after_grant(grant(2, A), None, certain=True)
    assert [each.sequence for each in device.open_grants] == [1, 2]


def test_grants_stay_open_after_a_release_until_a_scrub_has_passed() -> None:
    device = CLEAN.after_grant(grant(1, A), None, certain=True).after_release()
    assert device.open_grants
    scrubbing = device.after_scrub_start()
    assert scrubbing.after_unproven_scrub().open_grants
    assert scrubbing.after_passed_scrub(certificate(), was_reset=False).open_grants == ()


def test_scrub_start_voids_the_certificate() -> None:
    assert CLEAN.after_scrub_start().certificate is None


def test_voided_certificate_makes_the_device_dirty_without_exclusive_use() -> None:
    touched = CLEAN.after_voided_certificate()
    assert (touched.hygiene, touched.certificate, touched.exclusive_use) == (Hygiene.DIRTY, None, False)


def test_adopted_device_is_in_use_with_an_uncertain_assignment() -> None:
    adopted = record().after_adoption(grant(3, A, basis=Basis.ADOPTED))
    assert (adopted.hygiene, adopted.grant_sequence, adopted.previous_assignment) == (Hygiene.IN_USE, 3, None)
    kept = record(open_grants=(grant(1, A),), last_grant=grant(1, A)).after_adoption(None)
    assert (kept.hygiene, kept.grant_sequence, kept.previous_assignment) == (Hygiene.IN_USE, 1, None)


def test_owed_reset_is_cleared_only_by_a_scrub_that_reset_the_device() -> None:
    scrubbing = record(Hygiene.SCRUBBING, must_reset=True)
    assert scrubbing.after_passed_scrub(certificate(), was_reset=False).must_reset
    assert not scrubbing.after_passed_scrub(certificate(), was_reset=True).must_reset


def test_service_start_in_a_new_boot_closes_the_grants_of_the_old_boot() -> None:
    device = record(open_grants=(grant(1, A), grant(2, B, boot="boot-2")), last_grant=grant(2, B))
    assert [each.sequence for each in device.after_service_start("boot-2").open_grants] == [2]
    assert [each.sequence for each in device.after_service_start("boot-1").open_grants] == [1]
    assert device.after_service_start("boot-2").grant_sequence == 2


def test_obligation_to_reset_ends_on_another_services_word_only_with_a_recovery_that_passes() -> None:
    reported = record(Hygiene.SCRUBBING, must_reset=True).after_external_reset(NOW)
    assert not reported.owes_reset
    assert reported.must_reset, "it is no proof"
    checked = reported.after_passed_scrub(certificate(), was_reset=False)
    assert (checked.must_reset, checked.externally_reset) == (True, True), "no recovery has proved health"
    recovered = reported.after_passed_scrub(certificate(), was_reset=False, restores=True)
    assert (recovered.must_reset, recovered.externally_reset) == (False, False)
    assert reported.after_unproven_scrub().externally_reset


def test_later_fault_or_grant_forgets_that_another_service_reset_the_device() -> None:
    reported = record(Hygiene.DIRTY, Health.QUARANTINED, cause=cause(), must_reset=True).after_external_reset(NOW)
    assert reported.with_reset_required().owes_reset
    assert reported.after_fault(cause(), retry_at=NOW, is_failed_attempt=True).owes_reset
    free = record(Hygiene.CLEAN, certificate=certificate(), must_reset=True).after_external_reset(NOW)
    assert free.after_grant(grant(1, A), None, certain=True).owes_reset


def test_recovery_goes_on_at_once_after_a_reset_by_another_service() -> None:
    waiting = record(Hygiene.DIRTY, Health.QUARANTINED, cause=cause(), must_reset=True, retry_at=NOW + 100)
    assert waiting.after_external_reset(NOW).retry_at == NOW
