"""A policy's computed values: the steps of a path, when it includes a reset, and the time limit for clearing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.evidence import PathKind, ScrubTrigger, Step
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import DiagnosticsRule, Limits, Policy, RequiredProof, ResetMode

MIB = 1024 * 1024


@pytest.mark.parametrize("kind", HandOverKind)
def test_by_default_only_a_restart_of_the_same_container_may_start_on_checks(kind: HandOverKind) -> None:
    assert Policy().required_proof(kind) is (
        RequiredProof.CHECKS if kind is HandOverKind.SAME_CONTAINER else RequiredProof.CERTIFICATE
    )


def test_hand_over_kind_or_xid_missing_from_the_policy_gets_the_strictest_treatment() -> None:
    empty = Policy(required_proofs={}, error_classes={})
    assert {empty.required_proof(kind) for kind in HandOverKind} == {RequiredProof.CERTIFICATE}
    assert empty.error_class(31) is ErrorClass.UNKNOWN


def test_fast_path_has_checks_only() -> None:
    plan = Policy().plan(PathKind.FAST, ScrubTrigger.CONTAINER_START, must_reset=True)
    assert plan.steps == (Step.HOLDERS, Step.SETTINGS, Step.HEALTH)
    assert plan.reset is ResetMode.NEVER


@pytest.mark.parametrize(
    ("use", "must", "has"),
    [
        (ResetMode.BEST_EFFORT, False, False),
        (ResetMode.BEST_EFFORT, True, True),
        (ResetMode.REQUIRED, False, True),
        (ResetMode.REQUIRED, True, True),
        (ResetMode.NEVER, False, False),
        (ResetMode.NEVER, True, False),
    ],
)
def test_reset_is_part_of_the_slow_path_if_owed_or_required_and_never_against_the_policy(
    use: ResetMode, must: bool, has: bool
) -> None:
    steps = replace(Policy(), reset=use).plan(PathKind.SLOW, ScrubTrigger.CONTAINER_START, must_reset=must).steps
    assert (Step.RESET in steps) is has


def test_slow_path_checks_holders_first_and_clears_memory_after_a_reset() -> None:
    steps = replace(Policy(), reset=ResetMode.REQUIRED).plan(PathKind.SLOW, ScrubTrigger.CONTAINER_START).steps
    assert steps == (Step.HOLDERS, Step.RESET, Step.MEMORY, Step.ON_CHIP, Step.SETTINGS, Step.HEALTH)


def test_memory_deadline_is_a_base_plus_the_time_at_the_minimum_rate() -> None:
    limits = Limits(clear_timeout_base=5.0, min_clear_rate=64 * MIB)
    assert limits.memory_deadline(0) == 5.0
    assert limits.memory_deadline(640 * MIB) == 15.0


@pytest.mark.parametrize(
    ("always", "at_recovery", "recovering", "level"),
    [
        (DiagnosticLevel.NONE, DiagnosticLevel.QUICK, False, DiagnosticLevel.NONE),
        (DiagnosticLevel.NONE, DiagnosticLevel.QUICK, True, DiagnosticLevel.QUICK),
        (DiagnosticLevel.STANDARD, DiagnosticLevel.QUICK, True, DiagnosticLevel.STANDARD),
        (DiagnosticLevel.QUICK, DiagnosticLevel.EXTENDED, False, DiagnosticLevel.QUICK),
    ],
)
def test_diagnostics_run_before_clearing_at_the_level_that_the_policy_sets(
    always: DiagnosticLevel, at_recovery: DiagnosticLevel, recovering: bool, level: DiagnosticLevel
) -> None:
    policy = replace(Policy(), diagnostics=DiagnosticsRule(slow_path=always, recovery=at_recovery))
    plan = policy.plan(PathKind.SLOW, ScrubTrigger.RECOVERY, recovering=recovering)
    assert plan.diagnostics is level
    assert (Step.DIAGNOSTICS in plan.steps) is (level is not DiagnosticLevel.NONE)
    if Step.DIAGNOSTICS in plan.steps:
        assert plan.steps.index(Step.DIAGNOSTICS) < plan.steps.index(Step.MEMORY)


@pytest.mark.parametrize("reset", ResetMode)
@pytest.mark.parametrize("must_reset", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_reset_may_be_left_to_another_service_only_for_a_recovery_or_an_operator(
    reset: ResetMode, must_reset: bool, ordered: bool
) -> None:
    plan = replace(Policy(), reset=reset).plan(
        PathKind.SLOW, ScrubTrigger.RECOVERY, must_reset=must_reset, operator_ordered=ordered
    )
    by_operator = ordered and reset is not ResetMode.NEVER
    by_recovery = must_reset and reset is ResetMode.BEST_EFFORT
    assert plan.may_leave_reset is (by_operator or by_recovery)
    assert Step.RESET in plan.steps or not plan.may_leave_reset
