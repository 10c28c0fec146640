"""Classification of a device's users by all evidence that there may be, and who must never be killed for it."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.record import Grant
from scrubber.domain.usage import UseKind, classify_use, may_be_killed

DEVICE, OTHER = "gpu-0", "gpu-1"
TENANT, NAMELESS = Pod("acme", "train-0", "uid-1"), Pod("acme", "train-1", None)


def granted(pod: Pod | None) -> Grant:
    to = None if pod is None else Assignment(pod, "main", frozenset({DEVICE}))
    return Grant(1, to, HandOverKind.UNKNOWN, 0.0, "boot")


def assigned(uid: str, device: str = DEVICE) -> tuple[Assignment, ...]:
    return (Assignment(Pod("acme", "train-9", uid), "main", frozenset({device})),)


LISTED = KubeletReading(Trust.TRUSTED, assigned("uid-9"))
HINTED = KubeletReading(Trust.TRUSTED, checkpoint_only=assigned("uid-9"))
ELSEWHERE = KubeletReading(Trust.TRUSTED, assigned("uid-9", OTHER), assigned("uid-9", OTHER))
NOTHING = KubeletReading(Trust.TRUSTED)


@pytest.mark.parametrize(
    ("uid", "grants", "reading", "use"),
    [
        ("uid-1", [granted(TENANT)], NOTHING, UseKind.GRANTED),
        ("uid-1", [granted(None), granted(TENANT)], NOTHING, UseKind.GRANTED),
        # it may be the pod that was granted the device
        ("uid-9", [granted(None)], NOTHING, UseKind.UNDETERMINED),
        ("uid-9", [granted(NAMELESS)], NOTHING, UseKind.UNDETERMINED),
        ("uid-9", [granted(TENANT), granted(NAMELESS)], LISTED, UseKind.UNDETERMINED),
        (None, [granted(NAMELESS)], NOTHING, UseKind.UNDETERMINED),
        # the kubelet lists the device for it
        ("uid-9", [], LISTED, UseKind.STARTED_WITHOUT_HAND_OVER),
        ("uid-9", [granted(TENANT)], LISTED, UseKind.STARTED_WITHOUT_HAND_OVER),
        ("uid-9", [granted(TENANT)], HINTED, UseKind.STARTED_WITHOUT_HAND_OVER),
        # no evidence for a grant or a listing
        ("uid-9", [granted(TENANT)], NOTHING, UseKind.UNAUTHORIZED),
        ("uid-9", [granted(TENANT)], ELSEWHERE, UseKind.UNAUTHORIZED),
        ("uid-8", [granted(TENANT)], LISTED, UseKind.UNAUTHORIZED),
        (None, [granted(TENANT)], LISTED, UseKind.UNAUTHORIZED),
    ],
)
def test_use_is_classified_by_grants_and_kubelet_reading(
    uid: str | None, grants: list[Grant], reading: KubeletReading, use: UseKind
) -> None:
    assert classify_use(uid, DEVICE, grants, reading) is use


def test_only_a_pod_without_the_device_on_a_trusted_list_may_be_killed() -> None:
    assert may_be_killed("uid-9", DEVICE, [granted(TENANT)], NOTHING)
    assert may_be_killed("uid-9", DEVICE, [granted(TENANT)], ELSEWHERE)
    for rightful in (LISTED, HINTED, KubeletReading(Trust.UNREADABLE), KubeletReading(Trust.EMPTY_AFTER_RESTART)):
        assert not may_be_killed("uid-9", DEVICE, [granted(TENANT)], rightful)
    for grant in (granted(Pod("acme", "train-9", "uid-9")), granted(NAMELESS), granted(None)):
        assert not may_be_killed("uid-9", DEVICE, [grant], NOTHING)
    assert not may_be_killed(None, DEVICE, [granted(TENANT)], NOTHING)
