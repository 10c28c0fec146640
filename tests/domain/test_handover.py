"""The decision whether a device may be handed over, case by case; ``tests/property`` tests its invariants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import FindingCode, Severity
from scrubber.domain.handover import (
    FastPathChecks,
    HandoverDecision,
    HandoverFacts,
    HandoverVerdict,
    certificate_flaw,
    decide,
)
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.pods import PodState
from scrubber.domain.policy import Enforcement, Policy, RequiredProof, ResetMode
from scrubber.domain.record import BreakGlass, DeviceRecord
from scrubber.domain.sharing import GrantedPod
from scrubber.domain.states import ADVERTISED, OPERATOR_CAUSE, Health, Hygiene, RecoveryMethod
from tests.simulation.samples import NODE, NOW, POLICY, by_record, cause, certificate, finding, grant, pod, record

CLEAN = record(Hygiene.CLEAN, certificate=certificate(), exclusive_use=True)
RESTARTING = record(Hygiene.IN_USE, last_grant=grant(), open_grants=(grant(),), exclusive_use=True)


def decision(
    device: DeviceRecord, kind: HandOverKind = HandOverKind.OTHER_TENANT, policy: Policy = POLICY
) -> HandoverDecision:
    return by_record(device, kind, policy)


def answer(
    device: DeviceRecord, kind: HandOverKind = HandOverKind.OTHER_TENANT, policy: Policy = POLICY
) -> HandoverVerdict:
    return decision(device, kind, policy).verdict


@pytest.mark.parametrize("kind", HandOverKind)
def test_certified_device_is_granted_for_every_kind_of_hand_over(kind: HandOverKind) -> None:
    assert decision(CLEAN, kind).basis is Basis.CERTIFICATE
    assert answer(CLEAN, kind) is HandoverVerdict.GRANT


@pytest.mark.parametrize("health", [health for health in Health if health not in ADVERTISED])
@pytest.mark.parametrize("hygiene", Hygiene)
def test_device_out_of_service_is_refused_whatever_its_hygiene(hygiene: Hygiene, health: Health) -> None:
    device = replace(CLEAN, hygiene=hygiene, health=health)
    assert answer(device, HandOverKind.SAME_CONTAINER) is HandoverVerdict.REFUSE


@pytest.mark.parametrize("hygiene", [Hygiene.DIRTY, Hygiene.IN_USE])
@pytest.mark.parametrize("kind", [kind for kind in HandOverKind if kind is not HandOverKind.SAME_CONTAINER])
def test_dirty_device_is_scrubbed_for_every_hand_over_except_a_container_restart(
    hygiene: Hygiene, kind: HandOverKind
) -> None:
    assert answer(replace(RESTARTING, hygiene=hygiene), kind) is HandoverVerdict.SCRUB


def test_restart_of_the_same_container_is_granted_by_the_policys_exception() -> None:
    found = decision(RESTARTING, HandOverKind.SAME_CONTAINER)
    assert (found.verdict, found.basis) == (HandoverVerdict.GRANT, Basis.SAME_CONTAINER)


def test_suspect_device_is_not_granted_by_an_exception() -> None:
    assert answer(replace(RESTARTING, health=Health.SUSPECT), HandOverKind.SAME_CONTAINER) is HandoverVerdict.SCRUB


def test_exception_needs_a_known_last_pod_and_exclusive_use() -> None:
    assert answer(replace(RESTARTING, exclusive_use=False), HandOverKind.SAME_CONTAINER) is HandoverVerdict.SCRUB
    assert (
        answer(replace(RESTARTING, last_grant=grant(unknown=True)), HandOverKind.SAME_CONTAINER)
        is HandoverVerdict.SCRUB
    )


def test_unknown_hand_over_always_needs_a_certificate() -> None:
    lax = replace(POLICY, required_proofs=dict.fromkeys(HandOverKind, RequiredProof.CHECKS))
    assert answer(RESTARTING, HandOverKind.UNKNOWN, lax) is HandoverVerdict.SCRUB
    assert decision(RESTARTING, HandOverKind.SAME_TENANT, lax).basis is Basis.SAME_TENANT


def test_hand_over_kind_missing_from_the_policy_needs_a_certificate() -> None:
    assert answer(RESTARTING, HandOverKind.SAME_CONTAINER, replace(POLICY, required_proofs={})) is HandoverVerdict.SCRUB


def test_request_during_a_scrub_joins_the_scrub() -> None:
    assert answer(record(Hygiene.SCRUBBING)) is HandoverVerdict.JOIN


@pytest.mark.parametrize(
    ("flaw", "change"),
    [
        ("for another device", {"device": "GPU-0001"}),
        ("already used", {"next_grant": 1}),
        ("granted since", {"previous_grant": 3}),
        ("another node or boot", {"boot": "boot-0"}),
        ("another node or boot", {"node": "node-2"}),
        ("driver has changed", {"driver": "driver-2"}),
        ("policy has changed", {"policy_digest": "sha256:older"}),
    ],
)
def test_certificate_is_valid_for_one_device_grant_boot_driver_and_policy_only(
    flaw: str, change: dict[str, object]
) -> None:
    flawed = certificate(**change)
    reason = certificate_flaw(flawed, CLEAN, NODE, POLICY)
    assert reason is not None
    assert flaw in reason
    assert answer(replace(CLEAN, certificate=flawed)) is HandoverVerdict.SCRUB


def test_valid_certificate_has_no_flaw() -> None:
    assert certificate_flaw(certificate(), CLEAN, NODE, POLICY) is None


def test_a_clean_device_without_a_certificate_is_scrubbed() -> None:
    assert answer(replace(CLEAN, certificate=None), HandOverKind.SAME_CONTAINER) is HandoverVerdict.SCRUB


# -- observe mode ------------------------------------------------------------------------------------------------------

OBSERVE = replace(POLICY, enforcement=Enforcement.OBSERVE)


def test_observing_policy_grants_everything_and_states_the_reason_of_the_suppressed_refusal() -> None:
    found = decision(replace(CLEAN, health=Health.QUARANTINED), HandOverKind.OTHER_TENANT, OBSERVE)
    assert (found.verdict, found.basis) == (HandoverVerdict.GRANT, Basis.OBSERVE_MODE)
    assert "quarantined" in found.reason


def test_observing_policy_waits_for_a_running_scrub() -> None:
    assert answer(record(Hygiene.SCRUBBING), policy=OBSERVE) is HandoverVerdict.JOIN


def test_certified_hand_over_under_an_observing_policy_is_not_marked_as_an_exception() -> None:
    assert decision(CLEAN, HandOverKind.OTHER_TENANT, OBSERVE).basis is Basis.CERTIFICATE


def test_observing_policy_refuses_a_device_that_an_operator_quarantined() -> None:
    by_operator = cause(OPERATOR_CAUSE, RecoveryMethod.OPERATOR, actor="jane")
    found = decision(replace(CLEAN, health=Health.QUARANTINED, cause=by_operator), policy=OBSERVE)
    assert (found.verdict, found.code) == (HandoverVerdict.REFUSE, ErrorCode.QUARANTINED)


def test_grant_under_a_break_glass_override_names_the_override_as_its_basis() -> None:
    overridden = replace(CLEAN, health=Health.QUARANTINED, break_glass=BreakGlass(NOW + 60, "maintenance", "jane"))
    assert decision(overridden, policy=OBSERVE).basis is Basis.BREAK_GLASS


# -- certificates ------------------------------------------------------------------------------------------------------


def test_certificate_that_was_issued_before_the_last_grant_is_void() -> None:
    granted_since = replace(CLEAN, last_grant=grant(1), certificate=certificate(previous_grant=0))
    assert answer(granted_since) is HandoverVerdict.SCRUB


@pytest.mark.parametrize("hygiene", [Hygiene.DIRTY, Hygiene.IN_USE])
def test_certificate_of_a_device_that_is_not_clean_is_void(hygiene: Hygiene) -> None:
    assert answer(replace(CLEAN, hygiene=hygiene)) is HandoverVerdict.SCRUB


def test_certificate_of_an_observing_policy_counts_under_that_policy_only() -> None:
    enforced = replace(POLICY, reset=ResetMode.REQUIRED)
    observed = replace(enforced, enforcement=Enforcement.OBSERVE)
    issued = certificate(policy_digest=observed.proof_digest)
    assert certificate_flaw(issued, CLEAN, NODE, observed) is None
    assert certificate_flaw(issued, CLEAN, NODE, enforced) == "the policy has changed since it was issued"


# -- the assignment ----------------------------------------------------------------------------------------------------


def by_facts(
    device: DeviceRecord, kind: HandOverKind = HandOverKind.OTHER_TENANT, policy: Policy = POLICY, **known: object
) -> HandoverDecision:
    """Return the answer for a device without any problem except what is ``known``."""
    facts = HandoverFacts(record=device, kind=kind, policy=policy, identity=NODE, last_pod_ran=True, granted_pods=())
    facts = replace(facts, earlier_pods=frozenset(), checks=FastPathChecks(passed=True))
    return decide(replace(facts, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problem", "verdict"),
    [
        (ErrorCode.REASSIGNED, HandoverVerdict.REFUSE),
        (ErrorCode.UNASSIGNED, HandoverVerdict.REFUSE),
        (ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN, HandoverVerdict.WAIT),
    ],
)
def test_clean_device_is_not_granted_without_a_certain_assignment(problem: ErrorCode, verdict: HandoverVerdict) -> None:
    found = by_facts(CLEAN, assignment_problem=problem)
    assert (found.verdict, found.code) == (verdict, problem)


def test_observing_policy_grants_on_the_certificate_although_the_assignment_is_not_certain() -> None:
    found = by_facts(CLEAN, policy=OBSERVE, assignment_problem=ErrorCode.REASSIGNED)
    assert (found.verdict, found.basis) == (HandoverVerdict.GRANT, Basis.CERTIFICATE)


# -- exceptions, earlier pods and checks -------------------------------------------------------------------------------

RESTART = HandOverKind.SAME_CONTAINER
WARNING = finding("too-hot", Severity.WARNING)
HELD = finding(FindingCode.DEVICE_BUSY, Severity.BLOCKING)
FAULT = finding()


def test_restart_of_a_container_that_was_never_observed_running_needs_a_certificate() -> None:
    assert by_facts(RESTARTING, RESTART, last_pod_ran=False).verdict is HandoverVerdict.SCRUB


def test_clean_device_that_lost_its_certificate_is_scrubbed_before_a_restart() -> None:
    assert by_facts(replace(RESTARTING, hygiene=Hygiene.CLEAN), RESTART).verdict is HandoverVerdict.SCRUB


@pytest.mark.parametrize(
    ("earlier", "verdict"),
    [
        ({PodState.OVER}, HandoverVerdict.GRANT),
        ({PodState.ALIVE}, HandoverVerdict.WAIT),
        ({PodState.ALIVE, PodState.OVER}, HandoverVerdict.WAIT),
        ({PodState.ALIVE, PodState.LEFTOVER}, HandoverVerdict.WAIT),
        ({PodState.LEFTOVER}, HandoverVerdict.SCRUB),
        ({PodState.LEFTOVER, PodState.OVER}, HandoverVerdict.SCRUB),
    ],
)
def test_grant_waits_for_living_pods_and_leftover_processes_are_scrubbed_away(
    earlier: set[PodState], verdict: HandoverVerdict
) -> None:
    assert by_facts(RESTARTING, RESTART, earlier_pods=frozenset(earlier)).verdict is verdict


@pytest.mark.parametrize(
    ("basis", "checks", "verdict"),
    [
        (Basis.CERTIFICATE, FastPathChecks(True, (WARNING,)), HandoverVerdict.GRANT),
        (Basis.SAME_CONTAINER, FastPathChecks(True, (WARNING,)), HandoverVerdict.RECORD),
        (Basis.CERTIFICATE, FastPathChecks(False, (FAULT,)), HandoverVerdict.RECORD),
        (Basis.SAME_CONTAINER, FastPathChecks(False, (FAULT, HELD)), HandoverVerdict.RECORD),
        (Basis.CERTIFICATE, FastPathChecks(False, (HELD,)), HandoverVerdict.WAIT),
        (Basis.CERTIFICATE, FastPathChecks(False, (HELD,), held_without_process=True), HandoverVerdict.SCRUB),
        (Basis.SAME_CONTAINER, FastPathChecks(False, (HELD,)), HandoverVerdict.WAIT),
        (Basis.SAME_CONTAINER, FastPathChecks(False, (HELD,), held_without_process=True), HandoverVerdict.SCRUB),
        (Basis.SAME_CONTAINER, FastPathChecks(False, (finding("setting", Severity.BLOCKING),)), HandoverVerdict.SCRUB),
    ],
)
def test_checks_of_the_fast_path_decide_about_a_grant(
    basis: Basis, checks: FastPathChecks, verdict: HandoverVerdict
) -> None:
    device, kind = (CLEAN, HandOverKind.OTHER_TENANT) if basis is Basis.CERTIFICATE else (RESTARTING, RESTART)
    assert by_facts(device, kind, checks=checks).verdict is verdict


# -- shares ------------------------------------------------------------------------------------------------------------

ME = pod()
MATE = GrantedPod(pod(name="train-1", uid="uid-2"), PodState.ALIVE, is_share=True)
SHARED = record(Hygiene.IN_USE, last_grant=grant(), open_grants=(grant(),))


def of_a_share(device: DeviceRecord, *granted_pods: GrantedPod, **known: object) -> HandoverDecision:
    facts: dict[str, object] = {"is_share": True, "starting_pod": ME, "granted_pods": granted_pods}
    return by_facts(device, HandOverKind.SAME_TENANT, POLICY, **(facts | known))


@pytest.mark.parametrize(
    ("device", "verdict"),
    [
        (SHARED, HandoverVerdict.GRANT),
        (replace(SHARED, hygiene=Hygiene.DIRTY), HandoverVerdict.WAIT),
        (replace(SHARED, health=Health.SUSPECT), HandoverVerdict.WAIT),
        (replace(SHARED, contaminated=True), HandoverVerdict.WAIT),
    ],
)
def test_shared_start_is_granted_only_on_a_healthy_device_without_unauthorized_use(
    device: DeviceRecord, verdict: HandoverVerdict
) -> None:
    found = of_a_share(device, MATE)
    assert found.verdict is verdict
    assert (found.basis or found.code) in (Basis.SHARED, ErrorCode.SHARING_NOT_ALLOWED)


def test_pod_does_not_wait_for_its_own_share_of_a_contaminated_device() -> None:
    mine = GrantedPod(ME, PodState.ALIVE, is_share=True)
    assert of_a_share(replace(SHARED, contaminated=True), mine).verdict is HandoverVerdict.SCRUB
    assert of_a_share(replace(SHARED, contaminated=True), mine, MATE).verdict is HandoverVerdict.WAIT


def test_unknown_pod_waits_for_the_share_of_an_unknown_pod() -> None:
    assert of_a_share(SHARED, GrantedPod(None, PodState.ALIVE), starting_pod=None).verdict is HandoverVerdict.WAIT


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        (FastPathChecks(True, (WARNING,)), HandoverVerdict.GRANT),
        (FastPathChecks(False, (FAULT,)), HandoverVerdict.RECORD),
        (FastPathChecks(False, (HELD,), held_without_process=True), HandoverVerdict.WAIT),
    ],
)
def test_shared_device_is_never_scrubbed_under_the_pods_that_use_it(
    checks: FastPathChecks, verdict: HandoverVerdict
) -> None:
    assert of_a_share(SHARED, MATE, checks=checks).verdict is verdict
