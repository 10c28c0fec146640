"""When the pod of an earlier grant is over, and when its leftover processes may be killed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scrubber.domain.assignment import PodAbsence, Process
from scrubber.domain.pods import (
    PodLiveness,
    PodState,
    RemainingCgroups,
    has_ended,
    pod_liveness,
    unreadable_pod_liveness,
)
from tests.simulation.samples import process

MAIN, CHILD = process(20), process(21)
GONE = PodAbsence(2, since=100.0)


def liveness(
    *processes: Process,
    absence: PodAbsence | None = None,
    listed: bool = False,
    trusted: bool = True,
    sandbox: bool = False,
    firsts: Mapping[str, Process] | None = None,
    now: float = 101.0,
    grant_age: float = 60.0,
) -> PodLiveness:
    return pod_liveness(
        processes,
        absence or PodAbsence(),
        listed=listed,
        trusted=trusted,
        sandbox=sandbox,
        first_processes=firsts or {},
        now=now,
        grant_age=grant_age,
        leftover_grace_period=30.0,
        unknown_pod_idle_period=5.0,
    )


def test_unlisted_pod_without_processes_is_over() -> None:
    assert liveness().state is PodState.OVER


def test_listed_pod_without_processes_is_alive() -> None:
    assert liveness(listed=True).state is PodState.ALIVE


def test_force_deleted_pod_is_alive_for_a_grace_period_while_its_sandbox_exists() -> None:
    assert liveness(sandbox=True, grant_age=29.9).state is PodState.ALIVE
    assert liveness(sandbox=True, grant_age=30.0).state is PodState.OVER


def test_pod_with_a_recent_grant_is_alive_without_a_trusted_reading() -> None:
    assert liveness(trusted=False, grant_age=4.9).state is PodState.ALIVE
    assert liveness(trusted=False, grant_age=5.1).state is PodState.OVER


@pytest.mark.parametrize("absence", [PodAbsence(), PodAbsence(1, 0.0)])
def test_pod_that_was_not_absent_twice_is_alive(absence: PodAbsence) -> None:
    where = liveness(MAIN, absence=absence, firsts={}, now=10_000.0)
    assert where.state is PodState.ALIVE
    assert where.processes == (MAIN,)
    orphan = liveness(CHILD, absence=absence, firsts={"main#1": MAIN}, now=10_000.0)
    assert (orphan.state, orphan.processes) == (PodState.ALIVE, (CHILD,)), "its container may be restarted"


def test_absent_pod_with_a_living_first_process_is_alive_within_the_grace_period() -> None:
    assert liveness(MAIN, CHILD, absence=GONE, firsts={"main#1": MAIN}).state is PodState.ALIVE


def test_children_of_a_dead_first_process_are_leftovers_once_the_pod_is_gone() -> None:
    where = liveness(CHILD, absence=GONE, firsts={"main#1": MAIN})
    assert where.state is PodState.LEFTOVER
    assert where.processes == (CHILD,)
    assert "first process of its container is dead" in where.proof


def test_processes_of_a_gone_pod_are_no_leftovers_while_a_new_start_is_possible() -> None:
    """Its sandbox lives and its grant is recent: leftovers of its last start are killed once no start is possible."""
    where = liveness(CHILD, absence=GONE, firsts={"main#1": MAIN}, sandbox=True, grant_age=1.0)
    assert where.state is PodState.ALIVE
    assert liveness(CHILD, absence=GONE, firsts={"main#1": MAIN}, sandbox=True).state is PodState.LEFTOVER


def test_first_process_that_was_never_observed_does_not_count_as_dead() -> None:
    assert liveness(CHILD, absence=GONE).state is PodState.ALIVE


def test_living_first_process_of_one_container_keeps_the_whole_pod_alive() -> None:
    firsts = {"main#1": MAIN, "side#1": process(30, "side#1")}
    assert liveness(CHILD, process(30, "side#1"), absence=GONE, firsts=firsts).state is PodState.ALIVE


def test_first_process_whose_pid_was_reused_is_dead() -> None:
    back = process(MAIN.pid, started=MAIN.started + 1)
    assert liveness(back, absence=GONE, firsts={"main#1": MAIN}).state is PodState.LEFTOVER


def test_all_processes_of_a_gone_pod_are_leftovers_after_the_grace_period() -> None:
    assert liveness(MAIN, absence=GONE, firsts={"main#1": MAIN}, now=129.9).state is PodState.ALIVE
    where = liveness(MAIN, absence=GONE, firsts={"main#1": MAIN}, now=130.0)
    assert where.state is PodState.LEFTOVER
    assert "over 30 s" in where.proof


@pytest.mark.parametrize(
    ("absence", "state"),
    [
        (PodAbsence(), PodState.ALIVE),
        (PodAbsence(1, since=0.0), PodState.ALIVE),
        (PodAbsence(2, since=71.0), PodState.ALIVE),
        (PodAbsence(2, since=70.0), PodState.LEFTOVER),
    ],
)
def test_unreadable_pod_is_alive_until_its_absence_is_proved_and_its_grace_period_is_over(
    absence: PodAbsence, state: PodState
) -> None:
    where = unreadable_pod_liveness(absence, now=100.0, leftover_grace_period=30.0)
    assert where.state is state
    assert where.unreadable is (state is PodState.LEFTOVER)
    assert where.processes == ()


# -- ended, by the kernel's evidence -----------------------------------------------------------------------------------

NO_CONTAINER = RemainingCgroups(True)
"""The pod's own cgroup is left."""
REMOVED = RemainingCgroups(False)


def ended(
    remaining: RemainingCgroups, *, started: str = "main", seen: frozenset[str] = frozenset(), sandbox: bool = True
) -> bool:
    return has_ended(remaining, started=started, seen=seen, sandbox=(process(1),) if sandbox else ())


def test_pod_has_ended_when_neither_its_container_nor_its_sandbox_is_left() -> None:
    assert ended(NO_CONTAINER)


def test_pod_whose_granted_start_was_not_observed_has_not_ended_because_the_start_may_still_happen() -> None:
    assert not ended(NO_CONTAINER, started="")
    assert not ended(REMOVED, started="")


def test_container_cgroup_without_a_process_may_be_about_to_get_its_first_one() -> None:
    created = RemainingCgroups(True, frozenset({"main"}))
    assert not ended(created)
    assert ended(created, seen=frozenset({"main"}))


def test_pod_without_a_sandbox_has_ended_only_when_the_kubelet_has_removed_its_cgroup() -> None:
    assert not ended(NO_CONTAINER, sandbox=False)
    assert ended(REMOVED, sandbox=False)


def test_ended_pod_is_over_although_the_kubelet_lists_it() -> None:
    where = pod_liveness(
        (),
        PodAbsence(),
        listed=True,
        trusted=True,
        sandbox=False,
        first_processes={},
        now=101.0,
        grant_age=0.1,
        leftover_grace_period=30.0,
        unknown_pod_idle_period=5.0,
        ended=True,
    )
    assert where == PodLiveness(PodState.OVER, ended=True)
