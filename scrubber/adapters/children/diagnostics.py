"""The protocol between a diagnostic child and its parent: how time is divided, and how a check is reported.

Guarantee: every check does at least one unit of work and no check can use all of the time, so a slow device is reported
as slow instead of as not checked. A malformed check is rejected, never rounded to a healthy one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from scrubber.adapters.children.message import Message
from scrubber.domain.diagnostics import CHECK_NAMES, DiagnosticCheck
from scrubber.domain.errors import Unreadable

__all__ = ["CheckTally", "CheckTimeBudget", "parse_checks"]

_SHARES: Mapping[str, float] = {"memory-pattern": 0.45, "matrix-product": 0.20, "transfers": 0.20}
"""Share of the available seconds for each part; the rest is for zeroing the memory."""

_UNITS = ("bytes", "operations")
_MAX_NUMBER = 2**63 - 1
"""What the API's messages can represent; as a quotient, a float can."""


class CheckTimeBudget:
    """The time of a diagnostic from now on, divided among its parts.

    Args:
        deadline: monotonic time in seconds at which everything must be complete, including cleanup.
        clock: monotonic seconds of this machine, the same for parent and child.
    """

    def __init__(self, deadline: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}
        end = clock()
        seconds = max(0.0, deadline - end)
        for part, share in _SHARES.items():
            end += seconds * share
            self._ends[part] = end

    def remaining(self, part: str) -> float:
        """Return the seconds until the time of ``part`` (and of those before it) is used up; 0 when it is."""
        return max(0.0, self._ends[part] - self._clock())

    def is_exhausted(self, part: str) -> bool:
        return self.remaining(part) == 0.0

    def halfway_check(self, part: str) -> Callable[[], bool]:
        """Return a function that reports whether half of the remaining time of ``part`` is over.

        It is for work that is done first and verified afterwards.
        """
        middle = self._clock() + self.remaining(part) / 2
        return lambda: self._clock() >= middle


class CheckTally:
    """The running totals of one check: errors, amount of work, and the seconds that the work took.

    Args:
        unit: unit of the amount: ``bytes`` or ``operations``.
    """

    def __init__(self, name: str, unit: str, clock: Callable[[], float]) -> None:
        if name not in CHECK_NAMES or unit not in _UNITS:
            raise ValueError(f"{name!r} is not a check, or {unit!r} is not a unit")
        self._clock = clock
        self.name = name
        self.unit = unit
        self.errors = 0
        self.amount = 0
        self.seconds = 0.0

    @contextmanager
    def measure_time(self) -> Iterator[None]:
        """Add the seconds that the body takes; nothing when it raises."""
        start = self._clock()
        yield
        self.seconds += self._clock() - start

    def to_message(self) -> Message:
        """Return the check in the form that :func:`parse_checks` reads."""
        return {
            "name": self.name,
            "errors": self.errors,
            "unit": self.unit,
            "done": self.amount,
            "seconds": self.seconds,
        }


def parse_checks(answer: Message) -> tuple[DiagnosticCheck, ...]:
    """Return the checks in a diagnostic child's ``answer``, all of :data:`CHECK_NAMES` in their order.

    Raises:
        Unreadable: A check is missing or malformed.
    """
    rows = answer.get("checks")
    if not isinstance(rows, list) or [_name(row) for row in rows] != list(CHECK_NAMES):
        raise Unreadable("The diagnostic's report is invalid: it does not contain each check once.")
    return tuple(_check(row) for row in rows)


def _name(row: object) -> object:
    return row.get("name") if isinstance(row, dict) else None


def _check(row: Message) -> DiagnosticCheck:
    name, unit = str(row["name"]), row.get("unit")
    errors, done, seconds = (_number(row, key) for key in ("errors", "done", "seconds"))
    if unit not in _UNITS or errors != int(errors) or done <= 0 or seconds <= 0 or not math.isfinite(done / seconds):
        raise Unreadable(f"The diagnostic's report is invalid: {name} did {done:g} {unit} in {seconds:g} s.")
    return DiagnosticCheck(
        name, int(errors), {str(unit): done, "seconds": seconds, f"{unit}_per_second": done / seconds}
    )


def _number(row: Message, key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_NUMBER:  # nor is NaN
        raise Unreadable(f"The diagnostic's report is invalid: {key!r} is {value!r}.")
    return value
