"""The previous and the next user of a device, and how far the kubelet's data can be trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.assignment import (
    Assignment,
    KubeletReading,
    Pod,
    PodAbsence,
    Trust,
    exclude_baseline,
    presumed_sandbox,
    started_container,
    starting_container,
)
from scrubber.domain.handover_kind import HandOverKind, classify_hand_over
from tests.simulation.samples import DEVICE, assignment, pod, process

A = pod("acme", "train-0", "uid-a")
B = pod("acme", "serve-0", "uid-b")
C = pod("umbrella", "train-0", "uid-c")


def reading(
    *assignments: Assignment, trust: Trust = Trust.TRUSTED, hinted: tuple[Assignment, ...] = ()
) -> KubeletReading:
    return KubeletReading(trust, assignments, hinted, started_at=10.0)


# -- the kind of a hand-over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "following", "allocated_since", "containers", "kind"),
    [
        (assignment(A), assignment(A), False, 1, HandOverKind.SAME_CONTAINER),
        (assignment(A), assignment(A), True, 1, HandOverKind.SAME_POD),
        (assignment(A), assignment(A), False, 2, HandOverKind.SAME_POD),
        (assignment(A, "init"), assignment(A, "main"), False, 1, HandOverKind.SAME_POD),
        (assignment(A), assignment(B), False, 1, HandOverKind.SAME_TENANT),
        (assignment(A), assignment(C), False, 1, HandOverKind.OTHER_TENANT),
        (assignment(A), assignment(replace(A, uid="uid-z")), False, 1, HandOverKind.SAME_TENANT),
        (assignment(replace(A, uid=None)), assignment(replace(A, uid=None)), False, 1, HandOverKind.SAME_TENANT),
        (assignment(A), assignment(replace(A, uid=None)), False, 1, HandOverKind.SAME_TENANT),
        (None, assignment(A), False, 1, HandOverKind.UNKNOWN),
        (assignment(A), None, False, 1, HandOverKind.UNKNOWN),
        (None, None, False, 0, HandOverKind.UNKNOWN),
    ],
)
def test_hand_over_kind_depends_on_pod_uid_container_and_namespace(
    previous: Assignment | None,
    following: Assignment | None,
    allocated_since: bool,
    containers: int,
    kind: HandOverKind,
) -> None:
    assert classify_hand_over(previous, following, allocated_since=allocated_since, container_count=containers) is kind


def test_tenant_of_a_pod_is_its_namespace() -> None:
    assert A.tenant == B.tenant == "acme"
    assert C.tenant == "umbrella"


# -- a reading ---------------------------------------------------------------------------------------------------------


def test_single_pod_listed_with_the_device_is_its_assignment() -> None:
    assert reading(assignment(A)).assignment_of(DEVICE) == assignment(A)


def test_two_pods_listed_with_one_device_give_no_assignment() -> None:
    both = reading(assignment(A), assignment(C))
    assert both.assignment_of(DEVICE) is None
    assert both.checkpoint_assignment(DEVICE) is None


def test_restart_without_a_readable_checkpoint_is_not_of_the_same_container() -> None:
    """An ordinary init container of the pod may have had the device without being listed."""
    same = assignment(A)
    assert (
        classify_hand_over(same, same, allocated_since=False, container_count=1, init_containers_known=False)
        is HandOverKind.SAME_POD
    )


def test_containers_of_one_pod_with_the_device_are_counted_and_give_one_assignment() -> None:
    both = reading(assignment(A, "worker"), assignment(A, "loader"))
    assert both.assignment_of(DEVICE) == assignment(A, "loader")
    assert both.container_count(DEVICE) == 2


def test_init_container_named_only_by_the_checkpoint_is_counted() -> None:
    listed = reading(assignment(A, "main"), hinted=(assignment(A, "init"),))
    assert listed.container_count(DEVICE) == 2
    assert listed.assignment_of(DEVICE) == assignment(A, "main")


def test_a_checkpoint_that_names_another_pod_makes_the_assignment_uncertain() -> None:
    torn = reading(assignment(A, "main"), hinted=(assignment(C, "init"),))
    assert torn.assignment_of(DEVICE) is None


def test_checkpoint_never_overrides_the_kubelets_list() -> None:
    assert reading(assignment(A), hinted=(assignment(C, "init"),)).checkpoint_assignment(DEVICE) is None


def test_checkpoint_names_the_pod_if_the_list_names_none() -> None:
    hinted = reading(hinted=(assignment(A, "init"),))
    assert hinted.assignment_of(DEVICE) is None
    assert hinted.checkpoint_assignment(DEVICE) == assignment(A, "init")


def test_two_pods_in_the_checkpoint_give_no_checkpoint_assignment() -> None:
    assert reading(hinted=(assignment(A, "init"), assignment(C, "init"))).checkpoint_assignment(DEVICE) is None


def test_unreadable_kubelet_gives_no_assignment() -> None:
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
def test_pod_is_listed_by_name_unless_the_uids_differ(other: Pod, listed: bool) -> None:
    assert reading(assignment(A)).is_listed(other) is listed
    assert reading(hinted=(assignment(A),)).is_listed(other) is listed


# -- absence -----------------------------------------------------------------------------------------------------------


def test_pod_absence_is_proved_by_two_readings_and_not_by_one() -> None:
    once = PodAbsence().with_reading(replace(reading(), started_at=10.0), A)
    twice = once.with_reading(replace(reading(), started_at=11.0), A)
    assert not once.proved
    assert twice.proved
    assert twice.since == 10.0


def test_pod_is_absent_since_the_list_was_received_and_not_since_the_list_was_requested() -> None:
    once = PodAbsence().with_reading(replace(reading(), started_at=10.0, finished_at=12.0), A)
    assert once.since == 12.0


def test_simultaneous_readings_count_as_one_for_the_absence_of_a_pod() -> None:
    once = PodAbsence().with_reading(replace(reading(), started_at=10.0), A)
    assert once.with_reading(replace(reading(), started_at=10.1), A) == once
    assert once.with_reading(replace(reading(), started_at=10.3), A).proved


@pytest.mark.parametrize("trust", [Trust.UNREADABLE, Trust.EMPTY_AFTER_RESTART])
def test_untrusted_reading_neither_counts_as_an_absence_nor_resets_the_count(trust: Trust) -> None:
    absence = PodAbsence(1, 3.0)
    assert absence.with_reading(reading(trust=trust), A) == absence


@pytest.mark.parametrize("trust", Trust)
def test_listed_pod_resets_its_absence(trust: Trust) -> None:
    assert PodAbsence(5, 3.0).with_reading(reading(assignment(A), trust=trust), A) == PodAbsence()
    assert PodAbsence(5, 3.0).with_reading(reading(hinted=(assignment(A),), trust=trust), A) == PodAbsence()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_from_before_the_first_grant_do_not_keep_a_pod_alive() -> None:
    pause, main = process(10, "sandbox"), process(20)
    assert exclude_baseline((main, pause), (pause,)) == (main,)
    assert exclude_baseline((pause,), (pause,)) == ()


def test_reused_pid_is_another_process() -> None:
    assert exclude_baseline((process(10, started=999),), (process(10),)) == (process(10, started=999),)


def test_oldest_process_of_a_pod_alone_in_its_container_is_presumed_the_sandbox() -> None:
    pause, main, worker = process(10, "sandbox"), process(20), process(30)
    assert presumed_sandbox((worker, pause, main), held=True) == (pause,)


def test_oldest_process_that_shares_its_container_is_not_presumed_the_sandbox() -> None:
    assert presumed_sandbox((process(10, "main"), process(20, "main"), process(30, "side")), held=False) == ()


def test_pod_without_processes_has_no_presumed_sandbox() -> None:
    assert presumed_sandbox((), held=False) == ()


def test_only_process_of_a_pod_is_not_presumed_the_sandbox_while_the_device_is_held() -> None:
    assert presumed_sandbox((process(10),), held=True) == ()
    assert presumed_sandbox((process(10),), held=False) == (process(10),)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ({}, "fetch"),  # no container of the pod was started: an init container comes first
        ({"fetch": 1}, "prepare"),
        ({"fetch": 1, "prepare": 3}, "main"),
        ({"fetch": 1, "prepare": 1, "main": 1}, "main"),
    ],
)
def test_init_container_that_never_started_is_the_starting_container(starts: dict[str, int], expected: str) -> None:
    assert starting_container("main", {"prepare", "fetch"}, starts) == expected


def test_started_container_is_the_one_whose_start_count_grew_unless_several_grew() -> None:
    assert started_container({"init": 1}, {"init": 2, "main": 0}) == "init"
    assert started_container({}, {"main": 1}) == "main"
    assert started_container({"main": 1}, {"main": 1}) is None
    assert started_container({}, {"init": 1, "main": 1}) is None
