"""The history of a day: where it begins, how much of it is kept, and to which tenant it points."""

from __future__ import annotations

import pytest

from scrubber.domain.health.history import (
    DAY,
    MAX_ENTRIES,
    PastQuarantine,
    RecoveryAttempt,
    append_entry,
    entries_of_last_day,
    quarantines_by_tenant,
)
from tests.simulation.samples import NOW


@pytest.mark.parametrize(
    ("age", "counts"),
    [(0.0, True), (1.0, True), (DAY - 0.001, True), (DAY, False), (DAY + 1, False), (-0.001, False), (-DAY, False)],
)
def test_last_day_is_the_24_hours_before_now_without_future_entries(age: float, counts: bool) -> None:
    entry = RecoveryAttempt(NOW - age, reset=True)
    assert (entry in entries_of_last_day([entry], NOW)) is counts


def test_last_day_moves_on_and_keeps_the_order_of_entries() -> None:
    entries = tuple(RecoveryAttempt(NOW + hour * 3600, reset=False) for hour in range(30))
    assert entries_of_last_day(entries, NOW + 25 * 3600) == entries[2:26]


def test_appended_entry_is_last_and_older_days_are_dropped() -> None:
    old, young, new = (PastQuarantine(NOW - age, "xid-95") for age in (DAY + 1, 10, 0))
    assert append_entry((old, young), new) == (young, new)


def test_history_beyond_its_maximum_keeps_the_newest_entries() -> None:
    entries: tuple[RecoveryAttempt, ...] = ()
    for number in range(MAX_ENTRIES + 10):
        entries = append_entry(entries, RecoveryAttempt(NOW + number, reset=True))
    assert len(entries) == MAX_ENTRIES
    assert entries[-1].at == NOW + MAX_ENTRIES + 9
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)


def test_future_entries_are_dropped_after_the_clock_was_set_back() -> None:
    """Otherwise entries that never expire would condemn a device."""
    ahead = RecoveryAttempt(NOW + 2 * DAY, reset=True)
    assert append_entry((ahead,), RecoveryAttempt(NOW, reset=True)) == (RecoveryAttempt(NOW, reset=True),)


def test_quarantines_are_counted_by_the_tenant_that_had_the_device() -> None:
    strikes = [
        PastQuarantine(NOW, "xid-95", "acme"),
        PastQuarantine(NOW - 60, "too-hot", "acme"),
        PastQuarantine(NOW - 60, "xid-95", "umbrella"),
        PastQuarantine(NOW - 60, "xid-95"),
        PastQuarantine(NOW - DAY - 60, "xid-95", "acme"),
    ]
    assert quarantines_by_tenant(strikes, NOW) == {"acme": 2, "umbrella": 1}


def test_quarantines_of_an_unassigned_device_count_for_no_tenant() -> None:
    assert quarantines_by_tenant([PastQuarantine(NOW, "xid-95"), PastQuarantine(NOW, "too-hot")], NOW) == {}
