"""When a list of the kubelet's is believed: never merely because it is empty."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.adapters.kubelet.trust import Judgement, Observation, SocketIdentity, Standing, judge
from scrubber.domain.assignment import Trust

SETTLE = 60.0
SOCKET = SocketIdentity(inode=7, created_ns=1_000, age=3_600.0)
RESTARTED = SocketIdentity(inode=7, created_ns=2_000)
PROVED = Standing(SOCKET, None, asked_before=True)


def seen(at: float, pods: int | None, socket: SocketIdentity | None = SOCKET, **more: object) -> Observation:
    return replace(Observation(at, socket, pods), **more)  # type: ignore[arg-type]


def judged(*attempts: Observation, standing: Standing = PROVED) -> Judgement:
    verdict = None
    for attempt in attempts:
        verdict = judge(standing, attempt, settle=SETTLE)
        standing = verdict.standing
    assert verdict is not None
    return verdict


def test_a_kubelet_that_has_proved_itself_is_believed_when_its_list_is_empty() -> None:
    assert judged(seen(10, 0)) == Judgement(Trust.TRUSTED, "", PROVED)


def test_a_list_that_cannot_be_read_is_unreadable_and_says_why() -> None:
    verdict = judged(seen(10, None, failure="The kubelet is away."))
    assert (verdict.trust, verdict.detail) == (Trust.UNREADABLE, "The kubelet is away.")


@pytest.mark.parametrize("socket", [SOCKET, None])
def test_after_a_failed_question_an_empty_list_is_not_believed(socket: SocketIdentity | None) -> None:
    verdict = judged(seen(10, None, socket), seen(11, 0))
    assert verdict.trust is Trust.EMPTY_AFTER_RESTART
    assert "lists no pod yet" in verdict.detail


def test_a_kubelet_that_was_too_busy_to_answer_keeps_what_it_proved() -> None:
    busy = seen(10, None, answered=True, failure="It is asked too often.")
    assert judged(busy) == Judgement(Trust.UNREADABLE, "It is asked too often.", PROVED)
    assert judged(busy, seen(11, 0)).trust is Trust.TRUSTED


def test_a_restarted_kubelet_that_is_too_busy_to_answer_has_proved_nothing() -> None:
    busy = seen(10, None, RESTARTED, answered=True)
    assert judged(busy, seen(11, 0, RESTARTED)).trust is Trust.EMPTY_AFTER_RESTART
    first = judged(busy, seen(11, 0, RESTARTED), standing=Standing())
    assert first.trust is Trust.EMPTY_AFTER_RESTART


def test_a_new_socket_with_a_reused_inode_is_a_restart() -> None:
    assert judged(seen(10, 0, RESTARTED)).trust is Trust.EMPTY_AFTER_RESTART


def test_a_list_with_pods_ends_the_doubt_and_so_the_next_empty_one_is_believed() -> None:
    restart = [seen(10, 0, RESTARTED), seen(12, 3, RESTARTED)]
    assert judged(*restart).trust is Trust.TRUSTED
    assert judged(*restart, seen(13, 0, RESTARTED)).trust is Trust.TRUSTED


def test_an_empty_list_is_believed_when_the_kubelet_had_time_enough() -> None:
    restart = seen(10, 0, RESTARTED)
    assert judged(restart, seen(10 + SETTLE - 1, 0, RESTARTED)).trust is Trust.EMPTY_AFTER_RESTART
    assert judged(restart, seen(10 + SETTLE, 0, RESTARTED)).trust is Trust.TRUSTED


def test_a_list_that_lacks_pods_of_the_checkpoint_is_not_believed_after_a_restart() -> None:
    short = seen(12, 1, RESTARTED, missing=("team-a/train",))
    verdict = judged(seen(10, 0, RESTARTED), short)
    assert verdict.trust is Trust.EMPTY_AFTER_RESTART
    assert "team-a/train" in verdict.detail
    assert judged(seen(10, 0, RESTARTED), replace(short, at=10 + SETTLE)).trust is Trust.TRUSTED


def test_an_empty_list_never_outlasts_a_checkpoint_that_names_pods_which_are_still_there() -> None:
    lacking = seen(10, 0, RESTARTED, missing=("team-a/train",))
    assert judged(lacking, replace(lacking, at=10 + 10 * SETTLE)).trust is Trust.EMPTY_AFTER_RESTART
    assert judged(lacking, seen(10 + 10 * SETTLE, 0, RESTARTED)).trust is Trust.TRUSTED


def test_with_an_unreadable_checkpoint_only_time_proves_a_list() -> None:
    unsure = seen(12, 2, RESTARTED, uncertain=True)
    assert judged(seen(10, 0, RESTARTED), unsure).trust is Trust.EMPTY_AFTER_RESTART
    assert judged(seen(10, 0, RESTARTED), replace(unsure, at=10 + SETTLE)).trust is Trust.TRUSTED
    assert judged(replace(unsure, socket=SOCKET)).trust is Trust.TRUSTED


def test_each_restart_starts_the_doubt_anew() -> None:
    again = SocketIdentity(inode=8, created_ns=3_000)
    verdict = judged(seen(10, 0, RESTARTED), seen(65, 0, again), seen(75, 0, again))
    assert verdict.trust is Trust.EMPTY_AFTER_RESTART


@pytest.mark.parametrize(
    ("age", "trust"),
    [
        (SETTLE + 1, Trust.TRUSTED),
        (SETTLE - 1, Trust.EMPTY_AFTER_RESTART),
        (-5.0, Trust.EMPTY_AFTER_RESTART),
    ],
)
def test_at_our_own_start_the_sockets_age_tells_whether_the_kubelet_is_young(age: float, trust: Trust) -> None:
    first = seen(1_000, 0, replace(SOCKET, age=age))
    assert judged(first, standing=Standing()).trust is trust


def test_a_young_kubelet_is_believed_when_it_is_old_enough_not_when_we_are() -> None:
    first = seen(1_000, 0, replace(SOCKET, age=SETTLE - 1))
    assert judged(first, seen(1_002, 0), standing=Standing()).trust is Trust.TRUSTED


def test_a_kubelet_that_came_after_us_is_young() -> None:
    away = seen(5, None, None, failure="away")
    assert judged(away, seen(6, 0), standing=Standing()).trust is Trust.EMPTY_AFTER_RESTART
