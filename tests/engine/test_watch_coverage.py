"""Results of the usage checks: since when a device has had no holder, and whether it was watched without a gap."""

from __future__ import annotations

from scrubber.adapters.clock import SystemClock
from scrubber.engine.device.occupancy import MAX_WATCH_GAP, WatchCoverage


class Now(SystemClock):
    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


def test_device_counts_as_free_from_the_first_check_without_a_holder_until_a_check_with_a_holder() -> None:
    now = Now()
    coverage = WatchCoverage(now)
    assert coverage.free_for == 0.0
    coverage.record_check(held=False)
    now.seconds += 3.0
    coverage.record_check(held=False)
    now.seconds += 2.0
    assert coverage.free_for == 5.0
    coverage.record_check(held=True)
    now.seconds += 7.0
    assert coverage.free_for == 0.0


def test_free_time_before_a_grant_does_not_count_after_the_grant() -> None:
    now = Now()
    coverage = WatchCoverage(now)
    coverage.record_check(held=False)
    now.seconds += 60.0
    coverage.note_grant()
    now.seconds += 1.0
    assert coverage.free_for == 0.0
    coverage.record_check(held=False)
    now.seconds += 1.0
    assert coverage.free_for == 1.0


def test_watch_gap_found_by_a_check_persists_until_it_is_reset() -> None:
    now = Now()
    coverage = WatchCoverage(now)
    gaps = []
    for seconds in (MAX_WATCH_GAP, MAX_WATCH_GAP + 1.0, 1.0):
        now.seconds += seconds
        coverage.begin_check()
        coverage.record_check(held=False)
        gaps.append(coverage.has_gap)
    coverage.reset()
    assert [*gaps, coverage.has_gap] == [False, True, True, False]
