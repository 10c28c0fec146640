"""What the looks at a device say: since when nobody held it, and whether anybody looked all the while."""

from __future__ import annotations

from scrubber.adapters.clock import SystemClock
from scrubber.engine.device.occupancy import GAP, WatchCoverage


class Now(SystemClock):
    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


def test_a_device_is_free_from_the_first_look_that_showed_nobody_until_one_shows_somebody() -> None:
    now = Now()
    coverage = WatchCoverage(now)
    assert coverage.free_for == 0.0
    coverage.saw(held=False)
    now.seconds += 3.0
    coverage.saw(held=False)
    now.seconds += 2.0
    assert coverage.free_for == 5.0
    coverage.saw(held=True)
    now.seconds += 7.0
    assert coverage.free_for == 0.0


def test_that_a_device_was_free_before_its_grant_says_nothing_about_who_was_granted_it() -> None:
    now = Now()
    coverage = WatchCoverage(now)
    coverage.saw(held=False)
    now.seconds += 60.0
    coverage.granted()
    now.seconds += 1.0
    assert coverage.free_for == 0.0
    coverage.saw(held=False)
    now.seconds += 1.0
    assert coverage.free_for == 1.0


def test_a_gap_that_somebody_came_upon_stays_until_it_is_dealt_with() -> None:
    now = Now()
    coverage = WatchCoverage(now)
    gaps = []
    for seconds in (GAP, GAP + 1.0, 1.0):
        now.seconds += seconds
        coverage.look()
        coverage.saw(held=False)
        gaps.append(coverage.gap)
    coverage.begin()
    assert [*gaps, coverage.gap] == [False, True, True, False]
