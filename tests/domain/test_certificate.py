"""A certificate states what was measured, and lists everything that was not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from scrubber.domain.certificate import certify
from scrubber.domain.evidence import Attestation, Certificate, PathKind, Step, StepResult, Verdict
from scrubber.domain.handover_kind import Basis
from scrubber.domain.states import Hygiene
from tests.simulation.samples import NODE, NOW, POLICY, grant, record, result, scrub

MEMORY = result(Step.MEMORY, measured={"total_bytes": 8, "cleared_bytes": 8, "verified_bytes": 8, "residue_bytes": 3})
ALL = (result(Step.HOLDERS), result(Step.RESET), MEMORY, result(Step.SETTINGS), result(Step.HEALTH))


def certified(
    path: PathKind, *steps: StepResult, rests_on: str | None = None, basis: Basis = Basis.CERTIFICATE
) -> Certificate:
    device = record(Hygiene.SCRUBBING, last_grant=grant(4), certificate_count=11)
    return certify(
        scrub(path, *steps),
        steps,
        device,
        identity=NODE,
        policy=POLICY,
        certificate_id="cert-12",
        now=NOW,
        rests_on=rests_on,
        basis=basis,
    )


def named(lines: tuple[str, ...]) -> set[str]:
    return {line.partition(":")[0] for line in lines}


def test_every_step_is_either_covered_or_not_covered_by_a_certificate() -> None:
    for length in range(len(ALL) + 1):
        issued = certified(PathKind.SLOW, *ALL[:length])
        assert named(issued.covered) | named(issued.not_covered) == {"use", *(step.value for step in Step)}
        assert not named(issued.covered) & named(issued.not_covered)


@pytest.mark.parametrize("path", PathKind)
def test_every_certificate_states_that_a_short_use_may_be_missed(path: PathKind) -> None:
    line = "use: a process that used the device for less than 1 s may have gone undetected"
    assert line in certified(path, *ALL).not_covered


@pytest.mark.parametrize("path", PathKind)
def test_every_certificate_states_that_unannounced_starts_are_not_covered(path: PathKind) -> None:
    line = "use: a container that the kubelet starts without calling the plugin, while the plugin is not registered"
    assert line in certified(path, *ALL).not_covered


def test_memory_claim_states_the_measured_bytes() -> None:
    short = replace(MEMORY, measured={"total_bytes": 8, "cleared_bytes": 7, "verified_bytes": 6})
    (claim,) = (line for line in certified(PathKind.SLOW, short).covered if line.startswith("memory"))
    assert "7 of 8 bytes cleared" in claim
    assert "6 of 8 bytes read back as zeros" in claim


def test_gaps_reported_by_a_step_are_listed_verbatim_as_not_covered() -> None:
    blind = result(Step.HOLDERS, not_covered=("holders: processes of other users",))
    assert "holders: processes of other users" in certified(PathKind.SLOW, blind).not_covered


def test_step_that_could_not_run_is_listed_as_not_covered() -> None:
    issued = certified(PathKind.SLOW, result(Step.ON_CHIP, Verdict.NOT_COVERED))
    assert "on-chip" not in named(issued.covered)
    assert "on-chip" in named(issued.not_covered)


def test_device_without_on_chip_memory_is_certified_with_that_statement() -> None:
    issued = certified(PathKind.SLOW, result(Step.ON_CHIP, Verdict.NOT_COVERED))
    assert "on-chip: the device has none" in issued.not_covered


def test_step_that_could_not_run_is_listed_once_with_its_reason() -> None:
    issued = certified(
        PathKind.SLOW, result(Step.RESET, Verdict.NOT_COVERED, not_covered=("reset: not in a machine like this",))
    )
    assert [line for line in issued.not_covered if line.startswith("reset:")] == ["reset: not in a machine like this"]


def test_failed_step_that_an_exception_allowed_is_listed_as_not_covered() -> None:
    issued = certified(PathKind.FAST, result(Step.HOLDERS, Verdict.FAILED), basis=Basis.OBSERVE_MODE)
    assert "holders" not in named(issued.covered)
    assert "holders" in named(issued.not_covered)


def test_fast_certificate_names_the_slow_certificate_that_its_memory_claim_rests_on() -> None:
    issued = certified(PathKind.FAST, result(Step.HOLDERS), rests_on="cert-7")
    assert issued.rests_on == "cert-7"
    assert "memory: proved by cert-7, not checked again" in issued.not_covered


def test_certificate_by_exception_states_that_memory_was_left() -> None:
    issued = certified(PathKind.FAST, result(Step.HOLDERS), rests_on="cert-7", basis=Basis.SAME_CONTAINER)
    assert any(line.startswith("memory: not cleared") and "same-container" in line for line in issued.not_covered)


def test_slow_certificate_rests_on_no_other_certificate() -> None:
    assert certified(PathKind.SLOW, *ALL, rests_on="cert-7").rests_on is None


def test_certificate_names_previous_grant_node_boot_driver_and_policy() -> None:
    issued = certified(PathKind.SLOW, *ALL)
    assert (issued.previous_grant, issued.next_grant, issued.sequence) == (4, None, 12)
    assert (issued.node, issued.boot, issued.driver) == (NODE.node, NODE.boot, NODE.driver)
    assert (issued.policy, issued.policy_digest, issued.issued_at) == (POLICY.name, POLICY.digest, NOW)


def test_attestation_is_claimed_by_the_slow_path_and_named_as_not_repeated_by_the_fast_path() -> None:
    attestation = Attestation("a" * 64, "b" * 64)
    device = record(Hygiene.SCRUBBING, last_grant=grant(4))
    issue = partial(certify, identity=NODE, policy=POLICY, now=NOW)
    slow = issue(scrub(PathKind.SLOW, *ALL), ALL, device, certificate_id="cert-1", attestation=attestation)
    assert slow.attestation == attestation
    assert f"attestation: report with SHA-256 {'a' * 64}; not compared with reference values" in slow.covered
    clean = replace(device, hygiene=Hygiene.CLEAN, certificate=slow)
    fast = issue(scrub(PathKind.FAST, *ALL), ALL, clean, certificate_id="cert-2", rests_on="cert-1")
    assert fast.attestation is None
    assert "attestation: reported for cert-1, not requested again" in fast.not_covered


def test_reset_that_only_another_service_claims_is_not_covered() -> None:
    device = record(Hygiene.SCRUBBING, externally_reset=True)
    without = tuple(each for each in ALL if each.step is not Step.RESET)
    line = "reset: by another service, as that service says; not observed by this one"
    for steps, claimed in ((without, False), (ALL, True)):
        issued = certify(
            scrub(PathKind.SLOW, *steps),
            steps,
            device,
            identity=NODE,
            policy=POLICY,
            certificate_id="cert-1",
            now=NOW,
        )
        assert (line in issued.not_covered, "reset: done" in issued.covered) == (not claimed, claimed)
