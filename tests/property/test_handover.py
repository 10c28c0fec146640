"""What is true of every answer to "may this device be handed over?", for any record that a ledger could hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.handover import HandoverVerdict
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Policy, Proof
from scrubber.domain.record import DeviceRecord
from tests.world.samples import NODE, by_record, policies, records

kinds = st.sampled_from(HandOver)


@given(records, kinds, policies)
def test_nothing_goes_that_the_kubelet_is_not_shown_as_healthy(
    device: DeviceRecord, kind: HandOver, policy: Policy
) -> None:
    if by_record(device, kind, policy).verdict is HandoverVerdict.GRANT:
        assert device.advertised


@given(records, kinds, policies)
def test_a_go_on_a_certificate_has_one_that_is_unused_and_of_this_grant_boot_driver_and_policy(
    device: DeviceRecord, kind: HandOver, policy: Policy
) -> None:
    found = by_record(device, kind, policy)
    if (found.verdict, found.basis) != (HandoverVerdict.GRANT, Basis.CERTIFICATE):
        return
    rests_on = device.certificate
    assert rests_on is not None
    assert device.hygiene is Hygiene.CLEAN
    assert rests_on.next_grant is None
    assert rests_on.previous_grant == device.grants
    assert (rests_on.device, rests_on.node, rests_on.boot) == (device.device, NODE.node, NODE.boot)
    assert (rests_on.driver, rests_on.policy_digest) == (NODE.driver, policy.digest)


@given(records, kinds, policies)
def test_an_exception_is_named_by_the_policy_and_knows_the_previous_tenant(
    device: DeviceRecord, kind: HandOver, policy: Policy
) -> None:
    decision = by_record(device, kind, policy)
    assert (decision.verdict is HandoverVerdict.GRANT) == (decision.basis is not None)
    if decision.verdict is HandoverVerdict.GRANT and decision.basis is not Basis.CERTIFICATE:
        assert decision.basis == kind.value
        assert policy.proof_for(kind) is Proof.CHECKS
        assert kind is not HandOver.UNKNOWN
        assert device.previous is not None
        assert device.health is Health.HEALTHY
        assert device.hygiene in (Hygiene.DIRTY, Hygiene.IN_USE)


@given(records, kinds, policies)
def test_every_answer_gives_a_reason(device: DeviceRecord, kind: HandOver, policy: Policy) -> None:
    assert by_record(device, kind, policy).reason
