"""What a diagnostic child and its parent agree on: how the seconds are shared out, and how a check is told.

Promise: every check does at least one piece of work and no check can take all of the time, so a device that is slow
shows as slow instead of as not looked at; and a check that makes no sense is refused, never rounded to a healthy one.
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
"""Of the seconds that there are; the rest is for leaving zeros behind."""

_UNITS = ("bytes", "operations")


class CheckTimeBudget:
    """The seconds of a diagnostic from now on, shared out among its parts.

    Args:
        deadline: when everything should be over, clearing up included.
        clock: monotonic seconds of this machine, which parent and child read alike.
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
        """Seconds until the time of ``part`` (and of those before it) is over; 0 when it is."""
        return max(0.0, self._ends[part] - self._clock())

    def is_exhausted(self, part: str) -> bool:
        return self.remaining(part) == 0.0

    def halfway_check(self, part: str) -> Callable[[], bool]:
        """Whether half of what is left of ``part`` from now on is over: for work that is done, then looked at."""
        middle = self._clock() + self.remaining(part) / 2
        return lambda: self._clock() >= middle


class CheckTally:
    """One check as it grows: what was wrong, how much was done, and the seconds that the doing took.

    Args:
        unit: what is counted: ``bytes`` or ``operations``.
    """

    def __init__(self, name: str, unit: str, clock: Callable[[], float]) -> None:
        if name not in CHECK_NAMES or unit not in _UNITS:
            raise ValueError(f"no check is called {name!r}, or it does not count {unit!r}")
        self._clock = clock
        self.name = name
        self.unit = unit
        self.errors = 0
        self.amount = 0
        self.seconds = 0.0

    @contextmanager
    def measure_time(self) -> Iterator[None]:
        """Count the seconds of what runs inside; nothing when it raises."""
        start = self._clock()
        yield
        self.seconds += self._clock() - start

    def to_message(self) -> Message:
        """As :func:`parse_checks` reads it."""
        return {
            "name": self.name,
            "errors": self.errors,
            "unit": self.unit,
            "done": self.amount,
            "seconds": self.seconds,
        }


def parse_checks(answer: Message) -> tuple[DiagnosticCheck, ...]:
    """The checks in a diagnostic child's ``answer``, all of :data:`CHECK_NAMES` in their order.

    Raises:
        Unreadable: one is missing, or says something that makes no sense.
    """
    rows = answer.get("checks")
    if not isinstance(rows, list) or [_name(row) for row in rows] != list(CHECK_NAMES):
        raise Unreadable("The diagnostic's report makes no sense: it does not hold each check once.")
    return tuple(_check(row) for row in rows)


def _name(row: object) -> object:
    return row.get("name") if isinstance(row, dict) else None


def _check(row: Message) -> DiagnosticCheck:
    name, unit = str(row["name"]), row.get("unit")
    errors, done, seconds = (_number(row, key) for key in ("errors", "done", "seconds"))
    if unit not in _UNITS or errors != int(errors) or done <= 0 or seconds <= 0:
        raise Unreadable(f"The diagnostic's report makes no sense: {name} did {done:g} {unit} in {seconds:g} s.")
    return DiagnosticCheck(
        name, int(errors), {str(unit): done, "seconds": seconds, f"{unit}_per_second": done / seconds}
    )


def _number(row: Message, key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise Unreadable(f"The diagnostic's report makes no sense: {key!r} is {value!r}.")
    return value
