"""Who had a device, who gets it, and how far the kubelet's witnesses can be believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.assignment import (
    Assignment,
    Pod,
    PodAbsence,
    Reading,
    Trust,
    presumed_sandbox,
    remaining,
    started_container,
    starting_container,
)
from scrubber.domain.basis import HandOver, judge
from tests.world.samples import DEVICE, assignment, pod, process

A = pod("acme", "train-0", "uid-a")
B = pod("acme", "serve-0", "uid-b")
C = pod("umbrella", "train-0", "uid-c")


def reading(*assignments: Assignment, trust: Trust = Trust.TRUSTED, hinted: tuple[Assignment, ...] = ()) -> Reading:
    return Reading(trust, assignments, hinted, at=10.0)


# -- the kind of a hand-over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "following", "allocated_since", "containers", "kind"),
    [
        (assignment(A), assignment(A), False, 1, HandOver.SAME_CONTAINER),
        (assignment(A), assignment(A), True, 1, HandOver.SAME_POD),
        (assignment(A), assignment(A), False, 2, HandOver.SAME_POD),
        (assignment(A, "init"), assignment(A, "main"), False, 1, HandOver.SAME_POD),
        (assignment(A), assignment(B), False, 1, HandOver.SAME_TENANT),
        (assignment(A), assignment(C), False, 1, HandOver.OTHER_TENANT),
        (assignment(A), assignment(replace(A, uid="uid-z")), False, 1, HandOver.SAME_TENANT),
        (assignment(replace(A, uid=None)), assignment(replace(A, uid=None)), False, 1, HandOver.SAME_TENANT),
        (assignment(A), assignment(replace(A, uid=None)), False, 1, HandOver.SAME_TENANT),
        (None, assignment(A), False, 1, HandOver.UNKNOWN),
        (assignment(A), None, False, 1, HandOver.UNKNOWN),
        (None, None, False, 0, HandOver.UNKNOWN),
    ],
)
def test_a_hand_over_is_judged_by_uid_container_and_namespace(
    previous: Assignment | None, following: Assignment | None, allocated_since: bool, containers: int, kind: HandOver
) -> None:
    assert judge(previous, following, allocated_since=allocated_since, containers=containers) is kind


def test_a_tenant_is_a_namespace_whatever_a_pod_calls_itself() -> None:
    assert A.tenant == B.tenant == "acme"
    assert C.tenant == "umbrella"


# -- a reading ---------------------------------------------------------------------------------------------------------


def test_one_pod_that_has_the_device_is_its_assignment() -> None:
    assert reading(assignment(A)).assignment_of(DEVICE) == assignment(A)


def test_two_pods_with_the_same_device_are_no_assignment_at_all() -> None:
    both = reading(assignment(A), assignment(C))
    assert both.assignment_of(DEVICE) is None
    assert both.hint_of(DEVICE) is None


def test_without_a_readable_checkpoint_no_start_is_an_exception() -> None:
    """An ordinary init container of the pod may have had the device, and nobody would know."""
    same = assignment(A)
    assert judge(same, same, allocated_since=False, containers=1, init_containers_known=False) is HandOver.SAME_POD


def test_several_containers_of_one_pod_are_the_pods_and_are_counted() -> None:
    both = reading(assignment(A, "worker"), assignment(A, "loader"))
    assert both.assignment_of(DEVICE) == assignment(A, "loader")
    assert both.containers_with(DEVICE) == 2


def test_an_init_container_that_only_the_checkpoint_knows_is_counted_too() -> None:
    listed = reading(assignment(A, "main"), hinted=(assignment(A, "init"),))
    assert listed.containers_with(DEVICE) == 2
    assert listed.assignment_of(DEVICE) == assignment(A, "main")


def test_a_checkpoint_that_names_another_pod_makes_the_assignment_uncertain() -> None:
    torn = reading(assignment(A, "main"), hinted=(assignment(C, "init"),))
    assert torn.assignment_of(DEVICE) is None


def test_a_hint_never_speaks_against_the_list() -> None:
    assert reading(assignment(A), hinted=(assignment(C, "init"),)).hint_of(DEVICE) is None


def test_a_hint_names_the_pod_when_nothing_else_does() -> None:
    hinted = reading(hinted=(assignment(A, "init"),))
    assert hinted.assignment_of(DEVICE) is None
    assert hinted.hint_of(DEVICE) == assignment(A, "init")


def test_two_hinted_pods_are_no_hint() -> None:
    assert reading(hinted=(assignment(A, "init"), assignment(C, "init"))).hint_of(DEVICE) is None


def test_an_unreadable_kubelet_assigns_nothing() -> None:
    assert reading(assignment(A), trust=Trust.UNREADABLE).assignment_of(DEVICE) is None


@pytest.mark.parametrize(
    ("other", "listed"),
    [
        (A, True),
        (replace(A, uid=None), True),
        (replace(A, uid="uid-new"), False),
        (replace(A, name="train-1"), False),
        (replace(A, namespace="umbrella"), False),
    ],
)
def test_a_pod_is_listed_under_its_name_unless_the_uids_say_it_is_another(other: Pod, listed: bool) -> None:
    assert reading(assignment(A)).lists(other) is listed
    assert reading(hinted=(assignment(A),)).lists(other) is listed


# -- absence -----------------------------------------------------------------------------------------------------------


def test_absent_once_proves_nothing_and_twice_proves_it() -> None:
    once = PodAbsence().after(replace(reading(), at=10.0), A)
    twice = once.after(replace(reading(), at=11.0), A)
    assert not once.proved
    assert twice.proved
    assert twice.since == 10.0


def test_a_pod_is_absent_since_the_list_that_lacks_it_was_there_and_not_since_it_was_asked_for() -> None:
    once = PodAbsence().after(replace(reading(), at=10.0, done=12.0), A)
    assert once.since == 12.0


def test_two_readings_at_once_are_one() -> None:
    once = PodAbsence().after(replace(reading(), at=10.0), A)
    assert once.after(replace(reading(), at=10.1), A) == once
    assert once.after(replace(reading(), at=10.3), A).proved


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_an_untrusted_reading_neither_counts_nor_resets(trust: Trust) -> None:
    absence = PodAbsence(1, 3.0)
    assert absence.after(reading(trust=trust), A) == absence


@pytest.mark.parametrize("trust", Trust)
def test_a_pod_that_is_seen_again_was_never_absent(trust: Trust) -> None:
    assert PodAbsence(5, 3.0).after(reading(assignment(A), trust=trust), A) == PodAbsence()
    assert PodAbsence(5, 3.0).after(reading(hinted=(assignment(A),), trust=trust), A) == PodAbsence()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_what_stood_there_before_the_first_grant_does_not_keep_a_pod_alive() -> None:
    pause, main = process(10, "sandbox"), process(20)
    assert remaining((main, pause), (pause,)) == (main,)
    assert remaining((pause,), (pause,)) == ()


def test_a_pid_that_came_back_is_another_process() -> None:
    assert remaining((process(10, started=999),), (process(10),)) == (process(10, started=999),)


def test_a_pods_oldest_process_alone_in_its_container_is_presumed_its_sandbox() -> None:
    pause, main, worker = process(10, "sandbox"), process(20), process(30)
    assert presumed_sandbox((worker, pause, main), held=True) == (pause,)


def test_an_oldest_process_with_company_is_no_sandbox() -> None:
    assert presumed_sandbox((process(10, "main"), process(20, "main"), process(30, "side")), held=False) == ()


def test_a_pod_without_processes_has_no_sandbox_to_presume() -> None:
    assert presumed_sandbox((), held=False) == ()


def test_the_only_process_of_a_pod_is_no_sandbox_while_somebody_holds_the_device() -> None:
    assert presumed_sandbox((process(10),), held=True) == ()
    assert presumed_sandbox((process(10),), held=False) == (process(10),)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ({}, "fetch"),  # nothing of the pod was started: an init container comes first
        ({"fetch": 1}, "prepare"),
        ({"fetch": 1, "prepare": 3}, "main"),
        ({"fetch": 1, "prepare": 1, "main": 1}, "main"),
    ],
)
def test_an_init_container_that_was_never_started_is_what_starts_before_the_listed_container(
    starts: dict[str, int], expected: str
) -> None:
    assert starting_container("main", {"prepare", "fetch"}, starts) == expected


def test_the_container_that_was_started_is_the_one_whose_starts_grew_and_nobody_when_two_did() -> None:
    assert started_container({"init": 1}, {"init": 2, "main": 0}) == "init"
    assert started_container({}, {"main": 1}) == "main"
    assert started_container({"main": 1}, {"main": 1}) is None
    assert started_container({}, {"init": 1, "main": 1}) is None
