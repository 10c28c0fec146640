"""Which pods may share a device: the truth table. ``tests/property/test_sharing.py`` tests its invariants."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Pod
from scrubber.domain.pods import PodState
from scrubber.domain.policy import SharingMode
from scrubber.domain.sharing import GrantedPod, SharingAction, decide_sharing

ME = Pod("acme", "train-1", "uid-1")
MATE = Pod("acme", "train-2", "uid-2")
OTHER = Pod("umbrella", "train-3", "uid-3")
NAMELESS = Pod("acme", "train-4", None)
LIVING, OVER, LEFTOVER = PodState.ALIVE, PodState.OVER, PodState.LEFTOVER


def on(pod: Pod | None, state: PodState = LIVING, *, share: bool = True, proved: bool = True) -> GrantedPod:
    return GrantedPod(pod, state, share, proved)


@pytest.mark.parametrize(
    ("starting", "neighbours", "same_tenant", "never"),
    [
        # no other pod
        (ME, [], SharingAction.ALONE, SharingAction.ALONE),
        (ME, [on(MATE, OVER)], SharingAction.ALONE, SharingAction.ALONE),
        (ME, [on(OTHER, OVER)], SharingAction.ALONE, SharingAction.ALONE),
        (ME, [on(MATE, LEFTOVER)], SharingAction.ALONE, SharingAction.ALONE),
        (None, [on(OTHER, OVER)], SharingAction.ALONE, SharingAction.ALONE),
        # another pod of the same tenant
        (ME, [on(MATE)], SharingAction.JOIN, SharingAction.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"))], SharingAction.JOIN, SharingAction.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), OVER)], SharingAction.JOIN, SharingAction.WAIT),
        # the same pod, by another share: it cannot wait for its own end
        (ME, [on(ME)], SharingAction.JOIN, SharingAction.JOIN),
        (ME, [on(ME), on(MATE)], SharingAction.JOIN, SharingAction.WAIT),
        (ME, [on(ME), on(MATE, OVER)], SharingAction.JOIN, SharingAction.JOIN),
        (ME, [on(ME, share=False)], SharingAction.WAIT, SharingAction.WAIT),
        # another tenant, now or since the device was clean
        (ME, [on(OTHER)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(MATE), on(OTHER)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(MATE), on(OTHER, OVER)], SharingAction.WAIT, SharingAction.WAIT),
        # an unknown pod
        (ME, [on(None)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(NAMELESS)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(MATE), on(None, OVER)], SharingAction.WAIT, SharingAction.WAIT),
        (None, [on(MATE)], SharingAction.WAIT, SharingAction.WAIT),
        (NAMELESS, [on(MATE)], SharingAction.WAIT, SharingAction.WAIT),
        # a leftover among them
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), LEFTOVER)], SharingAction.WAIT, SharingAction.WAIT),
        # another pod has the whole device
        (ME, [on(MATE, share=False)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), share=False)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), OVER, share=False)], SharingAction.JOIN, SharingAction.WAIT),
        # the device was not proved clean before
        (ME, [on(MATE, proved=False)], SharingAction.WAIT, SharingAction.WAIT),
        (ME, [on(MATE), on(Pod("acme", "x", "uid-9"), OVER, proved=False)], SharingAction.WAIT, SharingAction.WAIT),
    ],
)
def test_shared_start_is_decided_by_the_tenants_and_liveness_of_the_other_pods(
    starting: Pod | None, neighbours: list[GrantedPod], same_tenant: SharingAction, never: SharingAction
) -> None:
    assert decide_sharing(starting, neighbours, SharingMode.SAME_TENANT).action is same_tenant
    assert decide_sharing(starting, neighbours, SharingMode.NEVER).action is never


def test_unsound_device_is_never_shared() -> None:
    assert decide_sharing(ME, [on(MATE)], SharingMode.SAME_TENANT, device_is_sound=False).action is SharingAction.WAIT
    assert decide_sharing(ME, [], SharingMode.SAME_TENANT, device_is_sound=False).action is SharingAction.ALONE


def test_refusal_of_a_shared_start_names_the_other_pod_and_counts_pods_once() -> None:
    refused = decide_sharing(ME, [on(OTHER), on(OTHER)], SharingMode.SAME_TENANT)
    assert "umbrella/train-3" in refused.reason
    assert decide_sharing(ME, [on(MATE), on(MATE), on(ME)], SharingMode.SAME_TENANT).pods == 2
