"""When an unused device is scrubbed again, so that a clean device was verified recently."""

from __future__ import annotations

from scrubber.domain.health.history import DAY
from scrubber.domain.policy import MaintenanceRule

__all__ = ["is_maintenance_window", "next_maintenance"]


def next_maintenance(certified_at: float, rule: MaintenanceRule) -> float | None:
    """Return the earliest time (wall-clock seconds) to verify again what was ``certified_at`` then; None: never."""
    if rule.interval is None:
        return None
    due = certified_at + rule.interval
    if rule.time_of_day is None or is_maintenance_window(rule, due):
        return due
    return due + (rule.time_of_day[0] - due) % DAY


def is_maintenance_window(rule: MaintenanceRule, now: float) -> bool:
    """Whether maintenance may start at ``now`` (wall-clock seconds)."""
    if rule.time_of_day is None:
        return True
    begin, end = rule.time_of_day
    of_day = now % DAY
    return begin <= of_day < end if begin < end else of_day >= begin or of_day < end
