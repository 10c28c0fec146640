"""The record of a device: what a grant, an adoption and a scrub leave in it."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.basis import Basis
from scrubber.domain.hygiene import Hygiene
from tests.world.samples import assignment, certificate, grant, pod, record

A, B = assignment(pod("acme", "a", "uid-a")), assignment(pod("umbrella", "b", "uid-b"))
CLEAN = record(Hygiene.CLEAN, certificate=certificate(), watched=True)


def test_a_grant_uses_the_certificate_up_in_the_very_same_change() -> None:
    fast = certificate(id="cert-2", sequence=2)
    granted = CLEAN.granted(grant(1, A), fast, certain=True)
    assert (granted.hygiene, granted.certificate, granted.certificates) == (Hygiene.IN_USE, None, 2)
    assert granted.version == CLEAN.version + 1
    assert granted.grants == 1
    assert granted.previous == A


def test_whose_bytes_are_on_a_device_is_only_certain_after_a_certain_grant_from_clean() -> None:
    assert CLEAN.granted(grant(1, A), None, certain=False).previous is None
    assert CLEAN.granted(grant(1, A, basis=Basis.OBSERVED), None, certain=True).previous is None
    assert CLEAN.granted(grant(1, unknown=True), None, certain=True).previous is None
    unwatched = replace(CLEAN, watched=False)
    assert unwatched.granted(grant(1, A), None, certain=True).previous is None


def test_a_restart_is_one_with_its_pods_earlier_grant_and_others_stay_open() -> None:
    first = CLEAN.granted(grant(1, A), None, certain=True)
    again = first.granted(grant(2, A), None, certain=True)
    assert [each.sequence for each in again.open_grants] == [2]
    other = again.granted(grant(3, B), None, certain=True)
    assert [each.sequence for each in other.open_grants] == [2, 3]


def test_grants_to_pods_that_nobody_can_name_never_swallow_each_other() -> None:
    nameless = assignment(pod("acme", "a", None))
    device = CLEAN.granted(grant(1, nameless), None, certain=True).granted(grant(2, nameless), None, certain=True)
    assert [each.sequence for each in device.open_grants] == [1, 2]
    device = CLEAN.granted(grant(1, unknown=True), None, certain=True).granted(grant(2, A), None, certain=True)
    assert [each.sequence for each in device.open_grants] == [1, 2]


def test_a_release_leaves_the_grants_open_until_a_scrub_has_shown_them_over() -> None:
    device = CLEAN.granted(grant(1, A), None, certain=True).released()
    assert device.open_grants
    scrubbing = device.scrub_started()
    assert scrubbing.scrub_ended().open_grants
    assert scrubbing.scrub_passed(certificate(), was_reset=False).open_grants == ()


def test_a_scrub_voids_the_certificate_before_it_touches_anything() -> None:
    assert CLEAN.scrub_started().certificate is None


def test_a_touch_voids_the_certificate_and_what_was_certain() -> None:
    touched = CLEAN.touched()
    assert (touched.hygiene, touched.certificate, touched.watched) == (Hygiene.DIRTY, None, False)


def test_an_adopted_device_is_its_pods_and_nothing_about_it_is_certain() -> None:
    adopted = record().adopted(grant(3, A, basis=Basis.ADOPTED))
    assert (adopted.hygiene, adopted.grants, adopted.previous) == (Hygiene.IN_USE, 3, None)
    kept = record(open_grants=(grant(1, A),), last_grant=grant(1, A)).adopted(None)
    assert (kept.hygiene, kept.grants, kept.previous) == (Hygiene.IN_USE, 1, None)


def test_a_reset_that_was_owed_and_happened_is_no_longer_owed() -> None:
    scrubbing = record(Hygiene.SCRUBBING, must_reset=True)
    assert scrubbing.scrub_passed(certificate(), was_reset=False).must_reset
    assert not scrubbing.scrub_passed(certificate(), was_reset=True).must_reset


def test_a_new_boot_closes_the_grants_of_the_old_one() -> None:
    device = record(open_grants=(grant(1, A), grant(2, B, boot="boot-2")), last_grant=grant(2, B))
    assert [each.sequence for each in device.service_started("boot-2").open_grants] == [2]
    assert [each.sequence for each in device.service_started("boot-1").open_grants] == [1]
    assert device.service_started("boot-2").grants == 2
