"""The one answer to "may this device be handed over?", case by case; ``tests/property`` holds what is true of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.handover import Decision, HandoverVerdict, certificate_flaw
from scrubber.domain.health import ADVERTISED, Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Policy, Proof
from scrubber.domain.record import DeviceRecord
from tests.world.samples import NODE, POLICY, by_record, certificate, grant, record

CLEAN = record(Hygiene.CLEAN, certificate=certificate(), watched=True)
RESTARTING = record(Hygiene.IN_USE, last_grant=grant(), open_grants=(grant(),), watched=True)


def decision(device: DeviceRecord, kind: HandOver = HandOver.OTHER_TENANT, policy: Policy = POLICY) -> Decision:
    return by_record(device, kind, policy)


def answer(device: DeviceRecord, kind: HandOver = HandOver.OTHER_TENANT, policy: Policy = POLICY) -> HandoverVerdict:
    return decision(device, kind, policy).verdict


@pytest.mark.parametrize("kind", HandOver)
def test_a_certified_device_goes_to_anybody(kind: HandOver) -> None:
    assert decision(CLEAN, kind).basis is Basis.CERTIFICATE
    assert answer(CLEAN, kind) is HandoverVerdict.GRANT


@pytest.mark.parametrize("health", [health for health in Health if health not in ADVERTISED])
@pytest.mark.parametrize("hygiene", Hygiene)
def test_no_device_leaves_quarantine_through_here_whatever_its_bytes(hygiene: Hygiene, health: Health) -> None:
    device = replace(CLEAN, hygiene=hygiene, health=health)
    assert answer(device, HandOver.SAME_CONTAINER) is HandoverVerdict.REFUSE


@pytest.mark.parametrize("hygiene", [Hygiene.DIRTY, Hygiene.IN_USE])
@pytest.mark.parametrize("kind", [kind for kind in HandOver if kind is not HandOver.SAME_CONTAINER])
def test_a_dirty_device_is_scrubbed_for_everybody_but_its_own_container(hygiene: Hygiene, kind: HandOver) -> None:
    assert answer(replace(RESTARTING, hygiene=hygiene), kind) is HandoverVerdict.SCRUB


def test_a_restart_of_the_same_container_goes_by_the_exception_that_the_policy_names() -> None:
    found = decision(RESTARTING, HandOver.SAME_CONTAINER)
    assert (found.verdict, found.basis) == (HandoverVerdict.GRANT, Basis.SAME_CONTAINER)


def test_a_suspect_device_has_no_exceptions() -> None:
    assert answer(replace(RESTARTING, health=Health.SUSPECT), HandOver.SAME_CONTAINER) is HandoverVerdict.SCRUB


def test_an_exception_needs_to_know_whose_bytes_are_on_the_device() -> None:
    assert answer(replace(RESTARTING, watched=False), HandOver.SAME_CONTAINER) is HandoverVerdict.SCRUB
    assert answer(replace(RESTARTING, last_grant=grant(unknown=True)), HandOver.SAME_CONTAINER) is HandoverVerdict.SCRUB


def test_no_policy_lets_an_unknown_hand_over_start_on_checks() -> None:
    lax = replace(POLICY, proofs=dict.fromkeys(HandOver, Proof.CHECKS))
    assert answer(RESTARTING, HandOver.UNKNOWN, lax) is HandoverVerdict.SCRUB
    assert decision(RESTARTING, HandOver.SAME_TENANT, lax).basis is Basis.SAME_TENANT


def test_a_kind_that_the_policy_leaves_out_needs_a_certificate() -> None:
    assert answer(RESTARTING, HandOver.SAME_CONTAINER, replace(POLICY, proofs={})) is HandoverVerdict.SCRUB


def test_whoever_asks_during_a_scrub_waits_for_it() -> None:
    assert answer(record(Hygiene.SCRUBBING)) is HandoverVerdict.JOIN


@pytest.mark.parametrize(
    ("flaw", "change"),
    [
        ("another device's", {"device": "GPU-0001"}),
        ("used up", {"next_grant": 1}),
        ("granted since", {"previous_grant": 3}),
        ("another node or boot", {"boot": "boot-0"}),
        ("another node or boot", {"node": "node-2"}),
        ("driver has changed", {"driver": "driver-2"}),
        ("policy has changed", {"policy_digest": "sha256:older"}),
    ],
)
def test_a_certificate_speaks_for_one_device_one_grant_one_boot_one_driver_and_one_policy(
    flaw: str, change: dict[str, object]
) -> None:
    flawed = certificate(**change)
    said = certificate_flaw(flawed, CLEAN, NODE, POLICY)
    assert said is not None
    assert flaw in said
    assert answer(replace(CLEAN, certificate=flawed)) is HandoverVerdict.SCRUB


def test_a_certificate_without_a_flaw_has_none() -> None:
    assert certificate_flaw(certificate(), CLEAN, NODE, POLICY) is None


def test_a_clean_device_without_a_certificate_is_scrubbed() -> None:
    assert answer(replace(CLEAN, certificate=None), HandOver.SAME_CONTAINER) is HandoverVerdict.SCRUB


# -- observe mode ------------------------------------------------------------------------------------------------------

OBSERVE = replace(POLICY, enforcement=Enforcement.OBSERVE)


def test_observing_lets_everything_go_and_says_what_would_have_been_refused() -> None:
    found = decision(replace(CLEAN, health=Health.QUARANTINED), HandOver.OTHER_TENANT, OBSERVE)
    assert (found.verdict, found.basis) == (HandoverVerdict.GRANT, Basis.OBSERVED)
    assert "quarantined" in found.reason


def test_observing_still_waits_for_a_scrub_under_way() -> None:
    assert answer(record(Hygiene.SCRUBBING), policy=OBSERVE) is HandoverVerdict.JOIN


def test_observing_does_not_call_a_certified_hand_over_an_exception() -> None:
    assert decision(CLEAN, HandOver.OTHER_TENANT, OBSERVE).basis is Basis.CERTIFICATE
