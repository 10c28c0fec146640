"""A policy's own arithmetic: which steps a path has, when a reset is part of it, how long clearing may take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.basis import HandOver
from scrubber.domain.diagnosis import Level
from scrubber.domain.evidence import Occasion, Path, Step
from scrubber.domain.policy import DiagnosticsRule, Limits, Policy, Proof, ResetUse
from scrubber.domain.signal_table import ErrorClass

MIB = 1024 * 1024


@pytest.mark.parametrize("kind", HandOver)
def test_by_default_only_a_restart_of_the_same_container_may_start_on_checks(kind: HandOver) -> None:
    assert Policy().proof_for(kind) is (Proof.CHECKS if kind is HandOver.SAME_CONTAINER else Proof.CERTIFICATE)


def test_what_a_policy_does_not_name_needs_a_certificate_and_is_an_unknown_xid() -> None:
    empty = Policy(proofs={}, error_classes={})
    assert {empty.proof_for(kind) for kind in HandOver} == {Proof.CERTIFICATE}
    assert empty.error_class(31) is ErrorClass.UNKNOWN


def test_the_fast_path_only_checks() -> None:
    plan = Policy().plan(Path.FAST, Occasion.START, must_reset=True)
    assert plan.steps == (Step.HOLDERS, Step.SETTINGS, Step.HEALTH)
    assert plan.reset is ResetUse.NEVER


@pytest.mark.parametrize(
    ("use", "must", "has"),
    [
        (ResetUse.BEST_EFFORT, False, False),
        (ResetUse.BEST_EFFORT, True, True),
        (ResetUse.REQUIRED, False, True),
        (ResetUse.REQUIRED, True, True),
        (ResetUse.NEVER, False, False),
        (ResetUse.NEVER, True, False),
    ],
)
def test_a_reset_is_part_of_the_slow_path_when_needed_or_required_and_never_against_the_policy(
    use: ResetUse, must: bool, has: bool
) -> None:
    steps = replace(Policy(), reset=use).plan(Path.SLOW, Occasion.START, must_reset=must).steps
    assert (Step.RESET in steps) is has


def test_the_slow_path_looks_for_holders_before_it_acts_and_clears_what_a_reset_leaves_behind() -> None:
    steps = replace(Policy(), reset=ResetUse.REQUIRED).plan(Path.SLOW, Occasion.START).steps
    assert steps == (Step.HOLDERS, Step.RESET, Step.MEMORY, Step.ON_CHIP, Step.SETTINGS, Step.HEALTH)


def test_clearing_may_take_a_floor_and_what_the_slowest_rate_needs() -> None:
    limits = Limits(memory_floor=5.0, memory_bytes_per_second=64 * MIB)
    assert limits.memory_deadline(0) == 5.0
    assert limits.memory_deadline(640 * MIB) == 15.0


@pytest.mark.parametrize(
    ("always", "at_recovery", "recovering", "level"),
    [
        (Level.NONE, Level.QUICK, False, Level.NONE),
        (Level.NONE, Level.QUICK, True, Level.QUICK),
        (Level.STANDARD, Level.QUICK, True, Level.STANDARD),
        (Level.QUICK, Level.EXTENDED, False, Level.QUICK),
    ],
)
def test_a_device_is_tried_out_before_its_memory_is_cleared_as_thoroughly_as_the_policy_says(
    always: Level, at_recovery: Level, recovering: bool, level: Level
) -> None:
    policy = replace(Policy(), diagnostics=DiagnosticsRule(slow_path=always, recovery=at_recovery))
    plan = policy.plan(Path.SLOW, Occasion.RECOVERY, recovering=recovering)
    assert plan.diagnostics is level
    assert (Step.DIAGNOSTICS in plan.steps) is (level is not Level.NONE)
    if Step.DIAGNOSTICS in plan.steps:
        assert plan.steps.index(Step.DIAGNOSTICS) < plan.steps.index(Step.MEMORY)
