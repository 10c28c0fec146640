"""When a device that nobody uses is scrubbed again, so that what is called clean was proved not long ago."""

from __future__ import annotations

from scrubber.domain.policy import MaintenanceRule
from scrubber.domain.tally import DAY

__all__ = ["due_again", "is_open"]


def due_again(proved: float, rule: MaintenanceRule) -> float | None:
    """The earliest time (wall-clock seconds) at which what was ``proved`` then is to be proved again; None: never."""
    if rule.every is None:
        return None
    due = proved + rule.every
    if rule.between is None or is_open(rule, due):
        return due
    return due + (rule.between[0] - due) % DAY


def is_open(rule: MaintenanceRule, now: float) -> bool:
    """Whether maintenance may begin ``now`` (wall-clock seconds)."""
    if rule.between is None:
        return True
    begin, end = rule.between
    of_day = now % DAY
    return begin <= of_day < end if begin < end else of_day >= begin or of_day < end
