"""How a diagnostic's seconds are shared out, and what its report has to say to be believed."""

import pytest

from scrubber.adapters.children.checking import Allotment, Tally, checks_of
from scrubber.domain.diagnosis import CHECKS, Check
from scrubber.domain.errors import Unreadable


class Clock:
    """Seconds that pass when it is told so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_no_check_takes_all_of_the_time_and_some_is_left_for_clearing() -> None:
    clock = Clock()
    allotment = Allotment(clock.now + 10.0, clock)
    assert not allotment.over("memory-pattern")
    clock.now = 104.6
    assert allotment.over("memory-pattern")
    assert not allotment.over("matrix-product")
    clock.now = 108.6
    assert allotment.over("transfers")


def test_half_of_a_checks_time_is_for_looking_at_what_was_done() -> None:
    clock = Clock()
    half_over = Allotment(clock.now + 10.0, clock).half("memory-pattern")
    clock.now = 102.2
    assert not half_over()
    clock.now = 102.3
    assert half_over()


def row(name: str) -> dict[str, object]:
    clock = Clock()
    tally = Tally(name, "bytes", clock)
    with tally.timing():
        clock.now += 2.0
    tally.done = 10
    return tally.message()


def test_a_report_is_read_with_its_rates() -> None:
    checks = checks_of({"checks": [row(name) for name in CHECKS]})
    assert checks[0] == Check("memory-pattern", 0, {"bytes": 10, "seconds": 2.0, "bytes_per_second": 5.0})


@pytest.mark.parametrize(
    "broken",
    [
        {"errors": -1},
        {"errors": 0.5},
        {"errors": None},
        {"errors": True},
        {"done": 0},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"unit": "furlongs"},
        {"name": "horoscope"},
    ],
    ids=str,
)
def test_a_report_that_makes_no_sense_is_unreadable_and_never_healthy(broken: dict[str, object]) -> None:
    rows = [{**row("memory-pattern"), **broken}, *(row(name) for name in CHECKS[1:])]
    with pytest.raises(Unreadable, match="makes no sense"):
        checks_of({"checks": rows})


@pytest.mark.parametrize("answer", [{}, {"checks": "none"}, {"checks": [row(name) for name in CHECKS[:3]]}], ids=str)
def test_a_report_that_leaves_a_check_out_is_unreadable(answer: dict[str, object]) -> None:
    with pytest.raises(Unreadable):
        checks_of(answer)
