"""A certificate claims what was measured, and lists everything that was not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.basis import Basis
from scrubber.domain.certify import certify
from scrubber.domain.evidence import Certificate, Path, Step, StepResult, Verdict
from scrubber.domain.hygiene import Hygiene
from tests.world.samples import NODE, NOW, POLICY, grant, record, result, scrub

MEMORY = result(Step.MEMORY, measured={"total_bytes": 8, "cleared_bytes": 8, "verified_bytes": 8, "residue_bytes": 3})
ALL = (result(Step.HOLDERS), result(Step.RESET), MEMORY, result(Step.SETTINGS), result(Step.HEALTH))


def certified(
    path: Path, *steps: StepResult, rests_on: str | None = None, basis: Basis = Basis.CERTIFICATE
) -> Certificate:
    device = record(Hygiene.SCRUBBING, last_grant=grant(4), certificates=11)
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


def test_every_step_is_claimed_or_left_out_and_none_is_both() -> None:
    for length in range(len(ALL) + 1):
        issued = certified(Path.SLOW, *ALL[:length])
        assert named(issued.covered) | named(issued.not_covered) == {"use", *(step.value for step in Step)}
        assert not named(issued.covered) & named(issued.not_covered)


@pytest.mark.parametrize("path", Path)
def test_every_certificate_says_that_a_short_use_can_go_unseen(path: Path) -> None:
    line = "use: a process that used the device for less than 1 s may not have been seen"
    assert line in certified(path, *ALL).not_covered


@pytest.mark.parametrize("path", Path)
def test_every_certificate_says_that_a_start_which_the_kubelet_does_not_announce_is_not_covered(path: Path) -> None:
    line = "use: a container that the kubelet starts without asking, while the plugin is not registered"
    assert line in certified(path, *ALL).not_covered


def test_the_memory_claim_is_what_was_measured() -> None:
    short = replace(MEMORY, measured={"total_bytes": 8, "cleared_bytes": 7, "verified_bytes": 6})
    (claim,) = (line for line in certified(Path.SLOW, short).covered if line.startswith("memory"))
    assert "7 of 8 bytes cleared" in claim
    assert "6 of 8 bytes read back as zeros" in claim


def test_what_a_step_could_not_see_is_left_out_in_its_own_words() -> None:
    blind = result(Step.HOLDERS, not_covered=("holders: processes of other users",))
    assert "holders: processes of other users" in certified(Path.SLOW, blind).not_covered


def test_a_step_that_could_not_be_done_is_not_claimed() -> None:
    issued = certified(Path.SLOW, result(Step.ON_CHIP, Verdict.NOT_COVERED))
    assert "on-chip" not in named(issued.covered)
    assert "on-chip" in named(issued.not_covered)


def test_a_device_without_on_chip_memory_is_not_said_to_have_some_that_was_left() -> None:
    issued = certified(Path.SLOW, result(Step.ON_CHIP, Verdict.NOT_COVERED))
    assert "on-chip: the device has none" in issued.not_covered


def test_a_step_that_could_not_be_done_and_says_why_is_listed_once() -> None:
    issued = certified(
        Path.SLOW, result(Step.RESET, Verdict.NOT_COVERED, not_covered=("reset: not in a machine like this",))
    )
    assert [line for line in issued.not_covered if line.startswith("reset:")] == ["reset: not in a machine like this"]


def test_a_step_that_failed_and_was_let_go_by_an_exception_is_not_claimed_and_not_forgotten() -> None:
    issued = certified(Path.FAST, result(Step.HOLDERS, Verdict.FAILED), basis=Basis.OBSERVED)
    assert "holders" not in named(issued.covered)
    assert "holders" in named(issued.not_covered)


def test_a_fast_path_names_the_slow_one_that_its_memory_rests_on() -> None:
    issued = certified(Path.FAST, result(Step.HOLDERS), rests_on="cert-7")
    assert issued.rests_on == "cert-7"
    assert "memory: proved by cert-7, not looked at again" in issued.not_covered


def test_an_exception_says_that_the_memory_was_left_as_it_was() -> None:
    issued = certified(Path.FAST, result(Step.HOLDERS), rests_on="cert-7", basis=Basis.SAME_CONTAINER)
    assert any(line.startswith("memory: left as it was") and "same-container" in line for line in issued.not_covered)


def test_a_slow_path_rests_on_nothing_but_itself() -> None:
    assert certified(Path.SLOW, *ALL, rests_on="cert-7").rests_on is None


def test_a_certificate_stands_between_the_last_grant_and_the_next() -> None:
    issued = certified(Path.SLOW, *ALL)
    assert (issued.previous_grant, issued.next_grant, issued.sequence) == (4, None, 12)
    assert (issued.node, issued.boot, issued.driver) == (NODE.node, NODE.boot, NODE.driver)
    assert (issued.policy, issued.policy_digest, issued.issued_at) == (POLICY.name, POLICY.digest, NOW)
