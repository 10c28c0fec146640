"""How a diagnostic's time is divided among its checks, and what its report must contain to be accepted."""

import pytest

from scrubber.adapters.children.diagnostics import CheckTally, CheckTimeBudget, parse_checks
from scrubber.domain.diagnostics import CHECK_NAMES, DiagnosticCheck
from scrubber.domain.errors import Unreadable


class Clock:
    """A clock that advances only when the test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_no_check_uses_the_whole_time_budget_and_time_remains_for_clearing() -> None:
    clock = Clock()
    allotment = CheckTimeBudget(clock.now + 10.0, clock)
    assert not allotment.is_exhausted("memory-pattern")
    clock.now = 104.6
    assert allotment.is_exhausted("memory-pattern")
    assert not allotment.is_exhausted("matrix-product")
    clock.now = 108.6
    assert allotment.is_exhausted("transfers")


def test_half_of_a_checks_time_is_reserved_for_verification() -> None:
    clock = Clock()
    half_over = CheckTimeBudget(clock.now + 10.0, clock).halfway_check("memory-pattern")
    clock.now = 102.2
    assert not half_over()
    clock.now = 102.3
    assert half_over()


def row(name: str) -> dict[str, object]:
    clock = Clock()
    tally = CheckTally(name, "bytes", clock)
    with tally.measure_time():
        clock.now += 2.0
    tally.amount = 10
    return tally.to_message()


def test_diagnostic_report_is_parsed_with_its_rates() -> None:
    checks = parse_checks({"checks": [row(name) for name in CHECK_NAMES]})
    assert checks[0] == DiagnosticCheck("memory-pattern", 0, {"bytes": 10, "seconds": 2.0, "bytes_per_second": 5.0})


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
        {"seconds": 10**400},
        {"errors": 10**400},
        {"done": 2**63 - 1, "seconds": 5e-324},
        {"unit": "furlongs"},
        {"name": "horoscope"},
    ],
    ids=lambda broken: f"{broken!s:.40}",
)
def test_malformed_diagnostic_report_is_unreadable_and_never_healthy(broken: dict[str, object]) -> None:
    rows = [{**row("memory-pattern"), **broken}, *(row(name) for name in CHECK_NAMES[1:])]
    with pytest.raises(Unreadable, match="is invalid"):
        parse_checks({"checks": rows})


@pytest.mark.parametrize(
    "answer", [{}, {"checks": "none"}, {"checks": [row(name) for name in CHECK_NAMES[:3]]}], ids=str
)
def test_diagnostic_report_that_omits_a_check_is_unreadable(answer: dict[str, object]) -> None:
    with pytest.raises(Unreadable):
        parse_checks(answer)
