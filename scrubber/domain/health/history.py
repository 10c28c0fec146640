"""The last day of a device: its quarantines, with the tenant that had it, and its recovery attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = [
    "DAY",
    "MAX_ENTRIES",
    "PastQuarantine",
    "RecoveryAttempt",
    "append_entry",
    "entries_of_last_day",
    "quarantines_by_tenant",
]

DAY = 24 * 3600.0
MAX_ENTRIES = 64
"""Maximum number of entries of one kind in a record; the newest are stored."""


@dataclass(frozen=True, slots=True)
class RecoveryAttempt:
    """A started recovery; ``at`` is in wall-clock seconds.

    Attributes:
        reset: whether it includes a reset of the device.
        operator_ordered: whether an operator ordered it: it does not count for the limits on automatic recoveries.
    """

    at: float
    reset: bool
    operator_ordered: bool = False


@dataclass(frozen=True, slots=True)
class PastQuarantine:
    """A quarantine that no operator ordered. ``tenant`` had the device then; None when none had or it is uncertain."""

    at: float
    code: str
    tenant: str | None = None


class _Dated(Protocol):
    @property
    def at(self) -> float: ...


_D = TypeVar("_D", bound=_Dated)


def entries_of_last_day(entries: Iterable[_D], now: float, *, after: float | None = None) -> tuple[_D, ...]:
    """Return the entries of the 24 hours before ``now`` that are later than ``after``.

    Entries in the future, after a clock was set back, are excluded.
    """
    begin = now - DAY if after is None else max(now - DAY, after)
    return tuple(each for each in entries if begin < each.at <= now)


def append_entry(entries: Iterable[_D], new: _D) -> tuple[_D, ...]:
    """Return ``entries`` with ``new``, limited to what a record stores."""
    return (*entries_of_last_day(entries, new.at), new)[-MAX_ENTRIES:]


def quarantines_by_tenant(strikes: Iterable[PastQuarantine], now: float) -> Mapping[str, int]:
    """Return how many quarantines of the day occurred while each tenant had the device."""
    return Counter(each.tenant for each in entries_of_last_day(strikes, now) if each.tenant is not None)
