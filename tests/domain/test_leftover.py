"""When an earlier grant's pod is over, and when what is left of it may be ended."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scrubber.domain.assignment import PodAbsence, Process
from scrubber.domain.leftover import PodState, Standing, standing, unread_standing
from tests.world.samples import process

MAIN, CHILD = process(20), process(21)
GONE = PodAbsence(2, since=100.0)


def stand(
    *processes: Process,
    absence: PodAbsence | None = None,
    listed: bool = False,
    trusted: bool = True,
    sandbox: bool = False,
    firsts: Mapping[str, Process] | None = None,
    now: float = 101.0,
    grant_age: float = 60.0,
) -> Standing:
    return standing(
        processes,
        absence or PodAbsence(),
        listed=listed,
        trusted=trusted,
        sandbox=sandbox,
        firsts=firsts or {},
        now=now,
        grant_age=grant_age,
        dying_grace=30.0,
        settle=5.0,
    )


def test_a_pod_without_processes_that_the_kubelet_does_not_list_is_over() -> None:
    assert stand().state is PodState.OVER


def test_a_listed_pod_without_processes_may_start_one_at_any_moment() -> None:
    assert stand(listed=True).state is PodState.LIVING


def test_a_pod_deleted_by_force_may_still_start_its_container_while_its_sandbox_stands() -> None:
    assert stand(sandbox=True, grant_age=29.9).state is PodState.LIVING
    assert stand(sandbox=True, grant_age=30.0).state is PodState.OVER


def test_without_a_trusted_reading_a_young_grants_container_may_be_about_to_start() -> None:
    assert stand(trusted=False, grant_age=4.9).state is PodState.LIVING
    assert stand(trusted=False, grant_age=5.1).state is PodState.OVER


@pytest.mark.parametrize("absence", [PodAbsence(), PodAbsence(1, 0.0)])
def test_nothing_is_proved_against_a_pod_that_was_not_absent_twice(absence: PodAbsence) -> None:
    where = stand(MAIN, absence=absence, firsts={}, now=10_000.0)
    assert where.state is PodState.LIVING
    assert where.processes == (MAIN,)


def test_being_superseded_or_absent_proves_nothing_within_the_grace() -> None:
    assert stand(MAIN, CHILD, absence=GONE, firsts={"main#1": MAIN}).state is PodState.LIVING


def test_children_of_a_dead_first_process_are_leftovers_once_the_pod_is_gone() -> None:
    where = stand(CHILD, absence=GONE, firsts={"main#1": MAIN})
    assert where.state is PodState.LEFTOVER
    assert where.processes == (CHILD,)
    assert "first process of its container is dead" in where.proof


def test_nothing_is_proved_while_a_new_start_of_the_pod_may_still_happen() -> None:
    """Its sandbox stands and it was granted a moment ago: what its last start left is ended once that is settled."""
    where = stand(CHILD, absence=GONE, firsts={"main#1": MAIN}, sandbox=True, grant_age=1.0)
    assert where.state is PodState.LIVING
    assert stand(CHILD, absence=GONE, firsts={"main#1": MAIN}, sandbox=True).state is PodState.LEFTOVER


def test_a_first_process_that_nobody_saw_is_not_dead() -> None:
    assert stand(CHILD, absence=GONE).state is PodState.LIVING


def test_one_container_whose_first_process_lives_keeps_all_of_the_pod_from_being_leftovers() -> None:
    firsts = {"main#1": MAIN, "side#1": process(30, "side#1")}
    assert stand(CHILD, process(30, "side#1"), absence=GONE, firsts=firsts).state is PodState.LIVING


def test_a_first_process_whose_pid_came_back_is_dead() -> None:
    back = process(MAIN.pid, started=MAIN.started + 1)
    assert stand(back, absence=GONE, firsts={"main#1": MAIN}).state is PodState.LEFTOVER


def test_when_the_grace_is_over_whatever_is_left_is_a_leftover() -> None:
    assert stand(MAIN, absence=GONE, firsts={"main#1": MAIN}, now=129.9).state is PodState.LIVING
    where = stand(MAIN, absence=GONE, firsts={"main#1": MAIN}, now=130.0)
    assert where.state is PodState.LEFTOVER
    assert "over 30 s" in where.proof


@pytest.mark.parametrize(
    ("absence", "state"),
    [
        (PodAbsence(), PodState.LIVING),
        (PodAbsence(1, since=0.0), PodState.LIVING),
        (PodAbsence(2, since=71.0), PodState.LIVING),
        (PodAbsence(2, since=70.0), PodState.LEFTOVER),
    ],
)
def test_a_pod_whose_processes_cannot_be_told_lives_until_its_absence_is_proved_and_its_grace_over(
    absence: PodAbsence, state: PodState
) -> None:
    where = unread_standing(absence, now=100.0, dying_grace=30.0)
    assert where.state is state
    assert where.unread is (state is PodState.LEFTOVER)
    assert where.processes == ()
