"""The one answer to "may this device be handed over?", case by case; ``tests/property`` holds what is true of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import FindingCode, Severity
from scrubber.domain.handover import Checks, Decision, HandoverFacts, HandoverVerdict, certificate_flaw, decide
from scrubber.domain.health import ADVERTISED, OPERATOR, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Enforcement, Policy, Proof, ResetUse
from scrubber.domain.record import DeviceRecord, Glass
from scrubber.domain.sharing import Neighbour
from tests.world.samples import NODE, NOW, POLICY, by_record, cause, certificate, finding, grant, pod, record

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


def test_observing_policy_refuses_a_device_that_an_operator_quarantined() -> None:
    by_operator = cause(OPERATOR, WayBack.PERSON, actor="jane")
    found = decision(replace(CLEAN, health=Health.QUARANTINED, cause=by_operator), policy=OBSERVE)
    assert (found.verdict, found.code) == (HandoverVerdict.REFUSE, ErrorCode.QUARANTINED)


def test_grant_under_a_break_glass_override_names_the_override_as_its_basis() -> None:
    overridden = replace(CLEAN, health=Health.QUARANTINED, glass=Glass(NOW + 60, "maintenance", "jane"))
    assert decision(overridden, policy=OBSERVE).basis is Basis.BREAK_GLASS


# -- certificates ------------------------------------------------------------------------------------------------------


def test_certificate_that_was_issued_before_the_last_grant_is_void() -> None:
    granted_since = replace(CLEAN, last_grant=grant(1), certificate=certificate(previous_grant=0))
    assert answer(granted_since) is HandoverVerdict.SCRUB


@pytest.mark.parametrize("hygiene", [Hygiene.DIRTY, Hygiene.IN_USE])
def test_certificate_of_a_device_that_is_not_clean_counts_for_nothing(hygiene: Hygiene) -> None:
    assert answer(replace(CLEAN, hygiene=hygiene)) is HandoverVerdict.SCRUB


def test_certificate_of_an_observing_policy_counts_under_that_policy_only() -> None:
    enforced = replace(POLICY, reset=ResetUse.REQUIRED)
    observed = replace(enforced, enforcement=Enforcement.OBSERVE)
    issued = certificate(policy_digest=observed.proof_digest)
    assert certificate_flaw(issued, CLEAN, NODE, observed) is None
    assert certificate_flaw(issued, CLEAN, NODE, enforced) == "the policy has changed since"


# -- the assignment ----------------------------------------------------------------------------------------------------


def by_facts(
    device: DeviceRecord, kind: HandOver = HandOver.OTHER_TENANT, policy: Policy = POLICY, **known: object
) -> Decision:
    """Return the answer for a device with which nothing is wrong but what is ``known``."""
    facts = HandoverFacts(record=device, kind=kind, policy=policy, identity=NODE, ran=True, neighbours=())
    facts = replace(facts, earlier=frozenset(), checks=Checks(passed=True))
    return decide(replace(facts, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trouble", "verdict"),
    [
        (ErrorCode.REASSIGNED, HandoverVerdict.REFUSE),
        (ErrorCode.UNASSIGNED, HandoverVerdict.REFUSE),
        (ErrorCode.FOREIGN_ASSIGNMENT, HandoverVerdict.WAIT),
    ],
)
def test_clean_device_is_not_granted_without_a_certain_assignment(trouble: ErrorCode, verdict: HandoverVerdict) -> None:
    found = by_facts(CLEAN, trouble=trouble)
    assert (found.verdict, found.code) == (verdict, trouble)


def test_observing_policy_grants_on_the_certificate_although_the_assignment_is_not_certain() -> None:
    found = by_facts(CLEAN, policy=OBSERVE, trouble=ErrorCode.REASSIGNED)
    assert (found.verdict, found.basis) == (HandoverVerdict.GRANT, Basis.CERTIFICATE)


# -- exceptions, earlier pods and checks -------------------------------------------------------------------------------

RESTART = HandOver.SAME_CONTAINER
WARNING = finding("too-hot", Severity.WARNING)
HELD = finding(FindingCode.HELD, Severity.DIRTY)
FAULT = finding()


def test_restart_of_a_container_that_was_never_seen_to_run_needs_a_certificate() -> None:
    assert by_facts(RESTARTING, RESTART, ran=False).verdict is HandoverVerdict.SCRUB


def test_clean_device_that_lost_its_certificate_is_scrubbed_for_a_restart_too() -> None:
    assert by_facts(replace(RESTARTING, hygiene=Hygiene.CLEAN), RESTART).verdict is HandoverVerdict.SCRUB


@pytest.mark.parametrize(
    ("earlier", "verdict"),
    [
        ({PodState.OVER}, HandoverVerdict.GRANT),
        ({PodState.LIVING}, HandoverVerdict.WAIT),
        ({PodState.LIVING, PodState.OVER}, HandoverVerdict.WAIT),
        ({PodState.LIVING, PodState.LEFTOVER}, HandoverVerdict.WAIT),
        ({PodState.LEFTOVER}, HandoverVerdict.SCRUB),
        ({PodState.LEFTOVER, PodState.OVER}, HandoverVerdict.SCRUB),
    ],
)
def test_grant_waits_for_living_pods_and_leftover_processes_are_scrubbed_away(
    earlier: set[PodState], verdict: HandoverVerdict
) -> None:
    assert by_facts(RESTARTING, RESTART, earlier=frozenset(earlier)).verdict is verdict


@pytest.mark.parametrize(
    ("basis", "checks", "verdict"),
    [
        (Basis.CERTIFICATE, Checks(True, (WARNING,)), HandoverVerdict.GRANT),
        (Basis.SAME_CONTAINER, Checks(True, (WARNING,)), HandoverVerdict.RECORD),
        (Basis.CERTIFICATE, Checks(False, (FAULT,)), HandoverVerdict.RECORD),
        (Basis.SAME_CONTAINER, Checks(False, (FAULT, HELD)), HandoverVerdict.RECORD),
        (Basis.CERTIFICATE, Checks(False, (HELD,)), HandoverVerdict.WAIT),
        (Basis.CERTIFICATE, Checks(False, (HELD,), ghost=True), HandoverVerdict.SCRUB),
        (Basis.SAME_CONTAINER, Checks(False, (HELD,)), HandoverVerdict.WAIT),
        (Basis.SAME_CONTAINER, Checks(False, (HELD,), ghost=True), HandoverVerdict.SCRUB),
        (Basis.SAME_CONTAINER, Checks(False, (finding("setting", Severity.DIRTY),)), HandoverVerdict.SCRUB),
    ],
)
def test_checks_of_the_fast_path_decide_about_a_grant(basis: Basis, checks: Checks, verdict: HandoverVerdict) -> None:
    device, kind = (CLEAN, HandOver.OTHER_TENANT) if basis is Basis.CERTIFICATE else (RESTARTING, RESTART)
    assert by_facts(device, kind, checks=checks).verdict is verdict


# -- shares ------------------------------------------------------------------------------------------------------------

ME = pod()
MATE = Neighbour(pod(name="train-1", uid="uid-2"), PodState.LIVING, share=True)
SHARED = record(Hygiene.IN_USE, last_grant=grant(), open_grants=(grant(),))


def of_a_share(device: DeviceRecord, *neighbours: Neighbour, **known: object) -> Decision:
    asked: dict[str, object] = {"share": True, "asking": ME, "neighbours": neighbours}
    return by_facts(device, HandOver.SAME_TENANT, POLICY, **(asked | known))


@pytest.mark.parametrize(
    ("device", "verdict"),
    [
        (SHARED, HandoverVerdict.GRANT),
        (replace(SHARED, hygiene=Hygiene.DIRTY), HandoverVerdict.WAIT),
        (replace(SHARED, health=Health.SUSPECT), HandoverVerdict.WAIT),
        (replace(SHARED, tainted=True), HandoverVerdict.WAIT),
    ],
)
def test_share_is_joined_only_on_a_healthy_device_that_nobody_used_without_a_grant(
    device: DeviceRecord, verdict: HandoverVerdict
) -> None:
    found = of_a_share(device, MATE)
    assert found.verdict is verdict
    assert (found.basis or found.code) in (Basis.SHARED, ErrorCode.SHARING)


def test_pod_does_not_wait_for_its_own_share_of_an_unsound_device() -> None:
    mine = Neighbour(ME, PodState.LIVING, share=True)
    assert of_a_share(replace(SHARED, tainted=True), mine).verdict is HandoverVerdict.SCRUB
    assert of_a_share(replace(SHARED, tainted=True), mine, MATE).verdict is HandoverVerdict.WAIT


def test_unknown_pod_waits_for_the_share_of_an_unknown_pod() -> None:
    assert of_a_share(SHARED, Neighbour(None, PodState.LIVING), asking=None).verdict is HandoverVerdict.WAIT


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        (Checks(True, (WARNING,)), HandoverVerdict.GRANT),
        (Checks(False, (FAULT,)), HandoverVerdict.RECORD),
        (Checks(False, (HELD,), ghost=True), HandoverVerdict.WAIT),
    ],
)
def test_shared_device_is_never_scrubbed_under_the_pods_that_use_it(checks: Checks, verdict: HandoverVerdict) -> None:
    assert of_a_share(SHARED, MATE, checks=checks).verdict is verdict
