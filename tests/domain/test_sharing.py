"""Who may start on a device beside whom: the truth table. ``tests/property/test_sharing.py`` holds what is true of all."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Pod
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Sharing
from scrubber.domain.sharing import Beside, Neighbour, beside

ME = Pod("acme", "train-1", "uid-1")
MATE = Pod("acme", "train-2", "uid-2")
OTHER = Pod("umbrella", "train-3", "uid-3")
NAMELESS = Pod("acme", "train-4", None)
LIVING, OVER, LEFTOVER = PodState.LIVING, PodState.OVER, PodState.LEFTOVER


def on(pod: Pod | None, state: PodState = LIVING, *, share: bool = True, proved: bool = True) -> Neighbour:
    return Neighbour(pod, state, share, proved)


@pytest.mark.parametrize(
    ("asking", "neighbours", "same_tenant", "never"),
    [
        # nobody is there
        (ME, [], Beside.ALONE, Beside.ALONE),
        (ME, [on(MATE, OVER)], Beside.ALONE, Beside.ALONE),
        (ME, [on(OTHER, OVER)], Beside.ALONE, Beside.ALONE),
        (ME, [on(MATE, LEFTOVER)], Beside.ALONE, Beside.ALONE),
        (None, [on(OTHER, OVER)], Beside.ALONE, Beside.ALONE),
        # somebody of the same tenant
        (ME, [on(MATE)], Beside.JOIN, Beside.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"))], Beside.JOIN, Beside.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), OVER)], Beside.JOIN, Beside.WAIT),
        # the same pod, by another share: it cannot wait for its own end
        (ME, [on(ME)], Beside.JOIN, Beside.JOIN),
        (ME, [on(ME), on(MATE)], Beside.JOIN, Beside.WAIT),
        (ME, [on(ME), on(MATE, OVER)], Beside.JOIN, Beside.JOIN),
        (ME, [on(ME, share=False)], Beside.WAIT, Beside.WAIT),
        # another tenant, now or since the device was clean
        (ME, [on(OTHER)], Beside.WAIT, Beside.WAIT),
        (ME, [on(MATE), on(OTHER)], Beside.WAIT, Beside.WAIT),
        (ME, [on(MATE), on(OTHER, OVER)], Beside.WAIT, Beside.WAIT),
        # somebody unknown
        (ME, [on(None)], Beside.WAIT, Beside.WAIT),
        (ME, [on(NAMELESS)], Beside.WAIT, Beside.WAIT),
        (ME, [on(MATE), on(None, OVER)], Beside.WAIT, Beside.WAIT),
        (None, [on(MATE)], Beside.WAIT, Beside.WAIT),
        (NAMELESS, [on(MATE)], Beside.WAIT, Beside.WAIT),
        # a leftover among them
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), LEFTOVER)], Beside.WAIT, Beside.WAIT),
        # the whole of the device is somebody's
        (ME, [on(MATE, share=False)], Beside.WAIT, Beside.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), share=False)], Beside.WAIT, Beside.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), OVER, share=False)], Beside.JOIN, Beside.WAIT),
        # nobody proved it clean before
        (ME, [on(MATE, proved=False)], Beside.WAIT, Beside.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), OVER, proved=False)], Beside.WAIT, Beside.WAIT),
    ],
)
def test_who_may_start_beside_whom(
    asking: Pod | None, neighbours: list[Neighbour], same_tenant: Beside, never: Beside
) -> None:
    assert beside(asking, neighbours, Sharing.SAME_TENANT).answer is same_tenant
    assert beside(asking, neighbours, Sharing.NEVER).answer is never


def test_a_device_that_is_not_sound_is_joined_by_nobody() -> None:
    assert beside(ME, [on(MATE)], Sharing.SAME_TENANT, sound=False).answer is Beside.WAIT
    assert beside(ME, [], Sharing.SAME_TENANT, sound=False).answer is Beside.ALONE


def test_a_reason_names_whom_the_operator_has_to_look_at_and_counts_pods_once() -> None:
    refused = beside(ME, [on(OTHER), on(OTHER)], Sharing.SAME_TENANT)
    assert "umbrella/train-3" in refused.reason
    assert beside(ME, [on(MATE), on(MATE), on(ME)], Sharing.SAME_TENANT).pods == 2
