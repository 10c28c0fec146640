"""What a day holds: where it begins, how much of it is kept, and whom it points at."""

from __future__ import annotations

import pytest

from scrubber.domain.tally import DAY, KEPT, Attempt, Strike, blamed, kept, of_the_day
from tests.world.samples import NOW


@pytest.mark.parametrize(
    ("age", "counts"),
    [(0.0, True), (1.0, True), (DAY - 0.001, True), (DAY, False), (DAY + 1, False), (-0.001, False), (-DAY, False)],
)
def test_a_day_is_the_24_hours_before_now_and_nothing_that_is_ahead(age: float, counts: bool) -> None:
    entry = Attempt(NOW - age, reset=True)
    assert (entry in of_the_day([entry], NOW)) is counts


def test_the_day_moves_on_and_its_order_stays() -> None:
    entries = tuple(Attempt(NOW + hour * 3600, reset=False) for hour in range(30))
    assert of_the_day(entries, NOW + 25 * 3600) == entries[2:26]


def test_what_is_kept_is_the_days_and_the_new_one_last() -> None:
    old, young, new = (Strike(NOW - age, "xid-95") for age in (DAY + 1, 10, 0))
    assert kept((old, young), new) == (young, new)


def test_of_more_than_a_record_keeps_the_newest_are_kept() -> None:
    entries: tuple[Attempt, ...] = ()
    for number in range(KEPT + 10):
        entries = kept(entries, Attempt(NOW + number, reset=True))
    assert len(entries) == KEPT
    assert entries[-1].at == NOW + KEPT + 9
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)


def test_a_clock_that_was_set_back_by_a_day_leaves_nothing_of_the_future_behind() -> None:
    """Else entries that no day ever ends would condemn a device."""
    ahead = Attempt(NOW + 2 * DAY, reset=True)
    assert kept((ahead,), Attempt(NOW, reset=True)) == (Attempt(NOW, reset=True),)


def test_quarantines_are_counted_by_the_tenant_that_had_the_device() -> None:
    strikes = [
        Strike(NOW, "xid-95", "acme"),
        Strike(NOW - 60, "too-hot", "acme"),
        Strike(NOW - 60, "xid-95", "umbrella"),
        Strike(NOW - 60, "xid-95"),
        Strike(NOW - DAY - 60, "xid-95", "acme"),
    ]
    assert blamed(strikes, NOW) == {"acme": 2, "umbrella": 1}


def test_nobody_is_blamed_for_a_device_that_nobody_had() -> None:
    assert blamed([Strike(NOW, "xid-95"), Strike(NOW, "too-hot")], NOW) == {}
