"""When a list from the kubelet is trusted: never merely because it is empty."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.adapters.kubelet.trust import ListAttempt, SocketIdentity, TrustState, TrustVerdict, judge_trust
from scrubber.domain.assignment import Trust

SETTLE = 60.0
SOCKET = SocketIdentity(inode=7, created_ns=1_000, age=3_600.0)
RESTARTED = SocketIdentity(inode=7, created_ns=2_000)
PROVED = TrustState(SOCKET, None, queried_before=True)


def seen(at: float, pods: int | None, socket: SocketIdentity | None = SOCKET, **more: object) -> ListAttempt:
    return replace(ListAttempt(at, socket, pods), **more)  # type: ignore[arg-type]


def judged(*attempts: ListAttempt, state: TrustState = PROVED) -> TrustVerdict:
    verdict = None
    for attempt in attempts:
        verdict = judge_trust(state, attempt, restart_grace=SETTLE)
        state = verdict.state
    assert verdict is not None
    return verdict


def test_empty_list_of_a_proven_kubelet_is_trusted() -> None:
    assert judged(seen(10, 0)) == TrustVerdict(Trust.TRUSTED, "", PROVED)


def test_unreadable_list_is_reported_with_the_reason() -> None:
    verdict = judged(seen(10, None, failure="The kubelet is away."))
    assert (verdict.trust, verdict.untrusted_reason) == (Trust.UNREADABLE, "The kubelet is away.")


@pytest.mark.parametrize("socket", [SOCKET, None])
def test_empty_list_after_a_failed_query_is_untrusted(socket: SocketIdentity | None) -> None:
    verdict = judged(seen(10, None, socket), seen(11, 0))
    assert verdict.trust is Trust.EMPTY_AFTER_RESTART
    assert "lists no pod yet" in verdict.untrusted_reason


def test_kubelet_that_was_too_busy_to_answer_stays_proven() -> None:
    busy = seen(10, None, answered=True, failure="Too many requests.")
    assert judged(busy) == TrustVerdict(Trust.UNREADABLE, "Too many requests.", PROVED)
    assert judged(busy, seen(11, 0)).trust is Trust.TRUSTED


def test_restarted_kubelet_that_is_too_busy_to_answer_is_not_proven() -> None:
    busy = seen(10, None, RESTARTED, answered=True)
    assert judged(busy, seen(11, 0, RESTARTED)).trust is Trust.EMPTY_AFTER_RESTART
    first = judged(busy, seen(11, 0, RESTARTED), state=TrustState())
    assert first.trust is Trust.EMPTY_AFTER_RESTART


def test_new_socket_with_a_reused_inode_is_a_restart() -> None:
    assert judged(seen(10, 0, RESTARTED)).trust is Trust.EMPTY_AFTER_RESTART


def test_list_with_pods_proves_the_kubelet_and_the_next_empty_list_is_trusted() -> None:
    restart = [seen(10, 0, RESTARTED), seen(12, 3, RESTARTED)]
    assert judged(*restart).trust is Trust.TRUSTED
    assert judged(*restart, seen(13, 0, RESTARTED)).trust is Trust.TRUSTED


def test_empty_list_is_trusted_after_the_stabilization_period() -> None:
    restart = seen(10, 0, RESTARTED)
    assert judged(restart, seen(10 + SETTLE - 1, 0, RESTARTED)).trust is Trust.EMPTY_AFTER_RESTART
    assert judged(restart, seen(10 + SETTLE, 0, RESTARTED)).trust is Trust.TRUSTED


def test_list_that_lacks_checkpoint_pods_is_untrusted_after_a_restart() -> None:
    short = seen(12, 1, RESTARTED, missing_pods=("team-a/train",))
    verdict = judged(seen(10, 0, RESTARTED), short)
    assert verdict.trust is Trust.EMPTY_AFTER_RESTART
    assert "team-a/train" in verdict.untrusted_reason
    assert judged(seen(10, 0, RESTARTED), replace(short, started_at=10 + SETTLE)).trust is Trust.TRUSTED


def test_empty_list_stays_untrusted_while_the_checkpoint_names_existing_pods() -> None:
    lacking = seen(10, 0, RESTARTED, missing_pods=("team-a/train",))
    assert judged(lacking, replace(lacking, started_at=10 + 10 * SETTLE)).trust is Trust.EMPTY_AFTER_RESTART
    assert judged(lacking, seen(10 + 10 * SETTLE, 0, RESTARTED)).trust is Trust.TRUSTED


def test_only_elapsed_time_proves_a_list_when_the_checkpoint_is_unreadable() -> None:
    unsure = seen(12, 2, RESTARTED, checkpoint_unreliable=True)
    assert judged(seen(10, 0, RESTARTED), unsure).trust is Trust.EMPTY_AFTER_RESTART
    assert judged(seen(10, 0, RESTARTED), replace(unsure, started_at=10 + SETTLE)).trust is Trust.TRUSTED
    assert judged(replace(unsure, socket=SOCKET)).trust is Trust.TRUSTED


def test_each_kubelet_restart_begins_the_stabilization_period_again() -> None:
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
def test_socket_age_shows_at_service_start_whether_the_kubelet_is_young(age: float, trust: Trust) -> None:
    first = seen(1_000, 0, replace(SOCKET, age=age))
    assert judged(first, state=TrustState()).trust is trust


def test_young_kubelet_is_trusted_by_its_own_age_not_by_the_services() -> None:
    first = seen(1_000, 0, replace(SOCKET, age=SETTLE - 1))
    assert judged(first, seen(1_002, 0), state=TrustState()).trust is Trust.TRUSTED


def test_kubelet_that_started_after_the_service_is_young() -> None:
    away = seen(5, None, None, failure="away")
    assert judged(away, seen(6, 0), state=TrustState()).trust is Trust.EMPTY_AFTER_RESTART
