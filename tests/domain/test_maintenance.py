"""When maintenance is due: the earliest moment after the interval that lies within the policy's window."""

from __future__ import annotations

import pytest

from scrubber.domain.health.history import DAY
from scrubber.domain.maintenance import next_maintenance
from scrubber.domain.policy import MaintenanceRule

HOUR = 3600.0
MIDNIGHT = 20_000 * DAY


def at(hour: float, day: int = 0) -> float:
    return MIDNIGHT + day * DAY + hour * HOUR


def rule(every: float | None = 12, begin: float | None = None, end: float | None = None) -> MaintenanceRule:
    """Return a rule; all arguments are hours."""
    between = None if begin is None or end is None else (begin * HOUR, end * HOUR)
    return MaintenanceRule(None if every is None else every * HOUR, between)


def test_maintenance_without_an_interval_is_never_due() -> None:
    assert next_maintenance(at(0), rule(every=None)) is None
    assert next_maintenance(at(0), rule(every=None, begin=2, end=5)) is None


def test_maintenance_without_hours_is_due_when_the_interval_has_passed() -> None:
    assert next_maintenance(at(3), rule(12)) == at(15)
    assert next_maintenance(at(20), rule(12)) == at(8, day=1)


@pytest.mark.parametrize(
    ("proved", "due"),
    [
        (at(0), at(2, day=1)),  # due at noon: tomorrow
        (at(13), at(2, day=1)),  # due at one, before the window opens
        (at(14), at(2, day=1)),  # due as the window opens
        (at(15), at(3, day=1)),  # due within the window
        (at(17), at(2, day=2)),  # due as the window closes: too late
        (at(18), at(2, day=2)),
    ],
)
def test_maintenance_due_outside_the_hours_waits_for_the_hours(proved: float, due: float) -> None:
    assert next_maintenance(proved, rule(12, begin=2, end=5)) == due


@pytest.mark.parametrize(
    ("proved", "due"),
    [
        (at(9), at(22)),  # due at nine in the evening
        (at(10), at(22)),
        (at(11), at(23)),
        (at(12), at(0, day=1)),
        (at(13), at(1, day=1)),  # due within the window, past midnight
        (at(14), at(22, day=1)),  # due as the window closes
        (at(15), at(22, day=1)),
    ],
)
def test_maintenance_hours_may_span_midnight(proved: float, due: float) -> None:
    assert next_maintenance(proved, rule(12, begin=22, end=2)) == due


@pytest.mark.parametrize(("begin", "end"), [(2, 5), (22, 2), (0, 1), (23, 0), (12, 12)])
@pytest.mark.parametrize("every", [0.5, 12, 24, 100])
def test_maintenance_is_due_within_the_hours_after_the_interval_and_within_a_day(
    every: float, begin: float, end: float
) -> None:
    for quarter in range(4 * 24):
        proved = at(quarter / 4)
        due = next_maintenance(proved, rule(every, begin, end))
        assert due is not None
        assert proved + every * HOUR <= due < proved + every * HOUR + DAY
        of_day = (due % DAY) / HOUR
        assert begin <= of_day < end if begin < end else of_day >= begin or of_day < end
