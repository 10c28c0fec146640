"""Invariants of the decision whether a device may be handed over, for any record that a ledger could hold."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from scrubber.domain.handover import HandoverVerdict
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.policy import Policy, RequiredProof
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene
from tests.simulation.samples import NODE, POLICY, by_record, certificate, grant, policies, record, records

kinds = st.sampled_from(HandOverKind)

RESTART = HandOverKind.SAME_CONTAINER
PERMITTED = replace(POLICY, required_proofs={RESTART: RequiredProof.CHECKS})
UNWATCHED = record(last_grant=grant(), exclusive_use=False)
SUSPECT = record(health=Health.SUSPECT, last_grant=grant(), exclusive_use=True)
USED = record(Hygiene.CLEAN, certificate=certificate(next_grant=1))
OUTDATED = record(Hygiene.CLEAN, certificate=certificate(), last_grant=grant())
"""Records that lack one condition of a grant: arbitrary ones lack several, so that no single condition would be missed."""


@given(records, kinds, policies)
def test_device_that_is_not_advertised_is_never_granted(
    device: DeviceRecord, kind: HandOverKind, policy: Policy
) -> None:
    if by_record(device, kind, policy).verdict is HandoverVerdict.GRANT:
        assert device.advertised


@given(records, kinds, policies)
@example(USED, RESTART, POLICY)
@example(OUTDATED, RESTART, POLICY)
def test_grant_on_a_certificate_needs_an_unused_certificate_of_the_same_grant_boot_driver_and_policy(
    device: DeviceRecord, kind: HandOverKind, policy: Policy
) -> None:
    found = by_record(device, kind, policy)
    if (found.verdict, found.basis) != (HandoverVerdict.GRANT, Basis.CERTIFICATE):
        return
    rests_on = device.certificate
    assert rests_on is not None
    assert device.hygiene is Hygiene.CLEAN
    assert rests_on.next_grant is None
    assert rests_on.previous_grant == device.grant_sequence
    assert (rests_on.device, rests_on.node, rests_on.boot) == (device.device, NODE.node, NODE.boot)
    assert (rests_on.driver, rests_on.policy_digest) == (NODE.driver, policy.digest)


@given(records, kinds, policies)
@example(UNWATCHED, RESTART, PERMITTED)
@example(SUSPECT, RESTART, PERMITTED)
def test_grant_by_exception_needs_a_policy_exception_and_a_known_previous_tenant(
    device: DeviceRecord, kind: HandOverKind, policy: Policy
) -> None:
    decision = by_record(device, kind, policy)
    assert (decision.verdict is HandoverVerdict.GRANT) == (decision.basis is not None)
    if decision.verdict is HandoverVerdict.GRANT and decision.basis is not Basis.CERTIFICATE:
        assert decision.basis == kind.value
        assert policy.required_proof(kind) is RequiredProof.CHECKS
        assert kind is not HandOverKind.UNKNOWN
        assert device.previous_assignment is not None
        assert device.health is Health.HEALTHY
        assert device.hygiene in (Hygiene.DIRTY, Hygiene.IN_USE)


@given(records, kinds, policies)
def test_every_hand_over_decision_gives_a_reason(device: DeviceRecord, kind: HandOverKind, policy: Policy) -> None:
    assert by_record(device, kind, policy).reason
