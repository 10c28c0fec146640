"""What a device did within a day: its quarantines, with the tenant that had it, and the attempts to bring it back."""

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
"""Entries of one kind that a record keeps, the newest."""


@dataclass(frozen=True, slots=True)
class RecoveryAttempt:
    """A recovery that was begun, by the wall clock.

    Attributes:
        reset: with a reset of the device.
        operator_ordered: a person ordered it: what the service may do by itself is not used up by it.
    """

    at: float
    reset: bool
    operator_ordered: bool = False


@dataclass(frozen=True, slots=True)
class PastQuarantine:
    """A quarantine that no person ordered. ``tenant`` had the device then; None when nobody had, or it is not certain."""

    at: float
    code: str
    tenant: str | None = None


class _Dated(Protocol):
    @property
    def at(self) -> float: ...


_D = TypeVar("_D", bound=_Dated)


def entries_of_last_day(entries: Iterable[_D], now: float, *, after: float | None = None) -> tuple[_D, ...]:
    """Those of the 24 hours before ``now``, and later than ``after``.

    Those that lie ahead of a clock that was set back are none of them.
    """
    begin = now - DAY if after is None else max(now - DAY, after)
    return tuple(each for each in entries if begin < each.at <= now)


def append_entry(entries: Iterable[_D], new: _D) -> tuple[_D, ...]:
    """``entries`` with ``new``, as far as a record keeps them."""
    return (*entries_of_last_day(entries, new.at), new)[-MAX_ENTRIES:]


def quarantines_by_tenant(strikes: Iterable[PastQuarantine], now: float) -> Mapping[str, int]:
    """How many quarantines of the day came while each tenant had the device."""
    return Counter(each.tenant for each in entries_of_last_day(strikes, now) if each.tenant is not None)
