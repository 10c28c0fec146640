"""The judge of the chaos test finds every flaw that it should find, and no others."""

from __future__ import annotations

from dataclasses import replace

from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.evidence import Certificate, PathKind
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.record import Grant
from scrubber.emulator.events import KubeletEvent
from tests.chaos.verdict import (
    Record,
    Report,
    bytes_that_were_touched,
    certificates_that_do_not_carry_their_grant,
    dirty_starts,
    skipped_starts,
    starts_without_a_grant,
)

PRE_START = KubeletEvent(
    1.0, "PreStartContainer", duration=0.5, devices=("gpu",), pod="team-a/p", pod_uid="u", container="main"
)
STARTED = replace(PRE_START, at=2.0, name="ContainerStarted", duration=0.0)
AGAIN = replace(STARTED, at=9.0)
CAME = Report("came", "team-a/p/main", at=2.1, device="simgpu0")
SLOW = Certificate(
    *(
        "slow-1",
        "node",
        "boot",
        "driver",
        "gpu",
        1,
        0,
        PathKind.SLOW,
        "scrub-1",
        ("memory",),
        (),
        "chaos",
        "digest",
        100.0,
    ),
    next_grant=1,
)
FAST = replace(SLOW, id="fast-1", sequence=2, path=PathKind.FAST, rests_on="slow-1")
GRANT = Grant(
    1,
    Assignment(Pod("team-a", "p", "u"), "main", frozenset({"gpu"})),
    HandOverKind.OTHER_TENANT,
    at=101.4,
    boot="boot",
    certificate="fast-1",
)
CLOCKS_APART = 100.0


def record(*grants: Grant, **changed: Certificate) -> Record:
    return Record({"gpu": grants}, {"slow-1": SLOW, "fast-1": FAST} | changed, ())


def test_start_on_foreign_bytes_is_a_dirty_start() -> None:
    assert dirty_starts([CAME], [PRE_START, STARTED]) == []
    (flaw,) = dirty_starts([replace(CAME, strange=7, found="secret")], [PRE_START, STARTED])
    assert "found 7 bytes on simgpu0: 'secret'" in flaw


def test_start_that_the_kubelet_did_not_gate_is_a_skipped_start() -> None:
    assert skipped_starts([PRE_START, STARTED]) == []
    assert skipped_starts([PRE_START, STARTED, AGAIN]) == [AGAIN]
    assert skipped_starts([replace(PRE_START, outcome="Unavailable"), STARTED]) == [STARTED]
    assert dirty_starts([replace(CAME, strange=7, at=9.5)], [PRE_START, STARTED, AGAIN]) == []


def test_damaged_bytes_of_a_tenant_are_detected() -> None:
    left = Report("left", "team-a/p/main", at=3.0)
    assert bytes_that_were_touched([CAME, left]) == []
    assert bytes_that_were_touched([CAME, replace(left, damaged=4096)]) != []


def test_start_without_a_grant_of_its_own_is_detected() -> None:
    assert starts_without_a_grant([PRE_START, STARTED], record(GRANT), wall=CLOCKS_APART) == []
    twice = [PRE_START, STARTED, replace(PRE_START, at=8.0), AGAIN]
    assert len(starts_without_a_grant(twice, record(GRANT), wall=CLOCKS_APART)) == 1
    assert starts_without_a_grant([PRE_START, STARTED], record(), wall=CLOCKS_APART) != []
    another = replace(GRANT, assignment=Assignment(Pod("team-a", "p", "v"), "main", frozenset({"gpu"})))
    assert starts_without_a_grant([PRE_START, STARTED], record(another), wall=CLOCKS_APART) != []
    unassigned = replace(GRANT, assignment=None)
    assert starts_without_a_grant([PRE_START, STARTED], record(unassigned), wall=CLOCKS_APART) == []


def test_certificate_used_for_another_grant_is_detected() -> None:
    flaws = certificates_that_do_not_carry_their_grant
    assert flaws(record(GRANT)) == []
    assert "rests on nothing" in flaws(record(replace(GRANT, certificate=None)))[0]
    assert "is in the place of number 1" in flaws(record(replace(GRANT, sequence=2)))[0]
    assert any("used up" in flaw for flaw in flaws(record(GRANT, replace(GRANT, sequence=2))))
    assert any("proves its memory" in each for each in flaws(record(GRANT, **{"fast-1": replace(FAST, rests_on=None)})))
    assert any("older" in each for each in flaws(record(GRANT, **{"slow-1": replace(SLOW, previous_grant=5)})))
    assert any("for grant 3" in each for each in flaws(record(GRANT, **{"slow-1": replace(SLOW, next_grant=3)})))
    assert any(
        "cleared no memory" in each for each in flaws(record(GRANT, **{"slow-1": replace(SLOW, path=PathKind.FAST)}))
    )


def test_grant_by_exception_or_adoption_needs_no_memory_certificate() -> None:
    by_exception = replace(GRANT, sequence=2, basis=Basis.SAME_CONTAINER, certificate="fast-2")
    checks = replace(FAST, id="fast-2", sequence=3, previous_grant=1, next_grant=2, rests_on=None)
    adopted = replace(GRANT, sequence=3, basis=Basis.ADOPTED, certificate=None)
    assert certificates_that_do_not_carry_their_grant(record(GRANT, by_exception, adopted, **{"fast-2": checks})) == []
