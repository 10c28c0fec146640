"""Whose use of a device it is, by every witness that there may be; and who may never be ended for it."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.basis import HandOver
from scrubber.domain.record import Grant
from scrubber.domain.using import Use, judge_use, may_be_ended

DEVICE, OTHER = "gpu-0", "gpu-1"
TENANT, NAMELESS = Pod("acme", "train-0", "uid-1"), Pod("acme", "train-1", None)


def granted(pod: Pod | None) -> Grant:
    to = None if pod is None else Assignment(pod, "main", frozenset({DEVICE}))
    return Grant(1, to, HandOver.UNKNOWN, 0.0, "boot")


def assigned(uid: str, device: str = DEVICE) -> tuple[Assignment, ...]:
    return (Assignment(Pod("acme", "train-9", uid), "main", frozenset({device})),)


LISTED = Reading(Trust.TRUSTED, assigned("uid-9"))
HINTED = Reading(Trust.TRUSTED, hinted=assigned("uid-9"))
ELSEWHERE = Reading(Trust.TRUSTED, assigned("uid-9", OTHER), assigned("uid-9", OTHER))
NOTHING = Reading(Trust.TRUSTED)


@pytest.mark.parametrize(
    ("uid", "grants", "reading", "use"),
    [
        ("uid-1", [granted(TENANT)], NOTHING, Use.GRANTED),
        ("uid-1", [granted(None), granted(TENANT)], NOTHING, Use.GRANTED),
        # it may be whoever was granted the device
        ("uid-9", [granted(None)], NOTHING, Use.UNTELLABLE),
        ("uid-9", [granted(NAMELESS)], NOTHING, Use.UNTELLABLE),
        ("uid-9", [granted(TENANT), granted(NAMELESS)], LISTED, Use.UNTELLABLE),
        (None, [granted(NAMELESS)], NOTHING, Use.UNTELLABLE),
        # the kubelet gave it the device
        ("uid-9", [], LISTED, Use.UNANNOUNCED),
        ("uid-9", [granted(TENANT)], LISTED, Use.UNANNOUNCED),
        ("uid-9", [granted(TENANT)], HINTED, Use.UNANNOUNCED),
        # nobody did
        ("uid-9", [granted(TENANT)], NOTHING, Use.STRANGER),
        ("uid-9", [granted(TENANT)], ELSEWHERE, Use.STRANGER),
        ("uid-8", [granted(TENANT)], LISTED, Use.STRANGER),
        (None, [granted(TENANT)], LISTED, Use.STRANGER),
    ],
)
def test_whose_use_it_is(uid: str | None, grants: list[Grant], reading: Reading, use: Use) -> None:
    assert judge_use(uid, DEVICE, grants, reading) is use


def test_only_a_pod_that_a_believed_list_gives_nothing_may_be_ended() -> None:
    assert may_be_ended("uid-9", DEVICE, [granted(TENANT)], NOTHING)
    assert may_be_ended("uid-9", DEVICE, [granted(TENANT)], ELSEWHERE)
    for rightful in (LISTED, HINTED, Reading(Trust.UNREADABLE), Reading(Trust.EMPTY_AFTER_RESTART)):
        assert not may_be_ended("uid-9", DEVICE, [granted(TENANT)], rightful)
    for grant in (granted(Pod("acme", "train-9", "uid-9")), granted(NAMELESS), granted(None)):
        assert not may_be_ended("uid-9", DEVICE, [grant], NOTHING)
    assert not may_be_ended(None, DEVICE, [granted(TENANT)], NOTHING)
