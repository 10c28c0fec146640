"""The node's circuit breaker: how much the service does by itself before it waits for somebody to look.

It stops resets that recoveries would make, and quarantines for soft signals. It never stops a scrub or the ending of proved
leftovers, and it lets no device in: what waits for a reset stays out of service. It is computed from the devices' records
and has no memory of its own, so a restart does not close it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.health import ADVERTISED, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import BreakerRule
from scrubber.domain.quantities import span
from scrubber.domain.record import DeviceRecord
from scrubber.domain.signal_table import SignalTable

__all__ = ["Breaker", "breaker_of", "out_for_soft_signals"]


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is stopped, each with its sentence; empty while it goes on.

    Attributes:
        resets: why no recovery resets a device now.
        resets_until: wall-clock seconds from which the next one may; None while they go on.
        soft: why no further device is taken out for a soft signal.
        waiting: devices that would be reset now.
        spared: devices that would be taken out now for a soft signal.
    """

    resets: str = ""
    resets_until: float | None = None
    soft: str = ""
    waiting: frozenset[str] = frozenset()
    spared: frozenset[str] = frozenset()

    @property
    def open(self) -> Breaker:
        """What is stopped and keeps somebody from something: that a limit is reached is no news by itself."""
        return replace(
            self,
            resets=self.resets if self.waiting else "",
            resets_until=self.resets_until if self.waiting else None,
            soft=self.soft if self.spared else "",
        )


def out_for_soft_signals(record: DeviceRecord, table: SignalTable) -> bool:
    """Whether the device is out of service for a condition that may pass by itself."""
    cause = record.cause
    return record.health not in ADVERTISED and cause is not None and not cause.by_person and cause.code in table.spared


def breaker_of(
    records: Collection[DeviceRecord],
    rule: BreakerRule,
    now: float,
    table: SignalTable,
    *,
    required: bool = False,
    sustained: Mapping[str, float] | None = None,
    starting: int = 0,
    leaving: int = 0,
) -> Breaker:
    """The breaker as it stands.

    Args:
        required: every slow path resets, also where no fault asks for it.
        sustained: how long soft signals may last, by code; for whom the breaker spares.
        starting: resets that were let through and are on no record yet.
        leaving: devices that go out for a soft signal and are not on record as out yet.
    """
    times = sorted(
        attempt.at
        for record in records
        for attempt in record.attempts
        if attempt.reset and not attempt.ordered and now - rule.window < attempt.at <= now
    )
    spent = len(times) + starting
    resets, until = "", None
    if spent >= rule.resets:
        # Those that are starting have no time yet: they are as young as can be.
        last = spent - rule.resets
        until = (times[last] if last < len(times) else now) + rule.window
        resets = (
            f"Recoveries reset devices of this node {spent} times within {span(rule.window)}, and the policy allows "
            f"{rule.resets}: devices that need a reset stay out of service until one is allowed again."
        )
    out = leaving + sum(out_for_soft_signals(record, table) for record in records)
    most = max(1, len(records) * rule.soft_percent // 100)
    soft = ""
    if out >= most and records:
        soft = (
            f"{out} of {len(records)} devices are out of service for soft signals, and the policy allows {most}: others "
            "that show such a signal stay suspect. Look for a cause that they share, such as cooling or power."
        )
    waiting = (record.device for record in records if _is_to_recover(record, now) and (record.must_reset or required))
    spared = (record.device for record in records if _is_overdue(record, sustained or {}, now, table))
    return Breaker(resets, until, soft, frozenset(waiting), frozenset(spared))


def _is_to_recover(record: DeviceRecord, now: float) -> bool:
    free = record.hygiene is not Hygiene.IN_USE
    due = record.retry_at is None or record.retry_at <= now
    cause = record.cause
    by_itself = cause is not None and not cause.by_person and cause.way_back not in (WayBack.REBOOT, WayBack.PERSON)
    if record.health is Health.PROBATION:  # released by a person, with a reset that is owed
        return record.must_reset and free and due
    return record.health is Health.QUARANTINED and by_itself and free and due


def _is_overdue(record: DeviceRecord, sustained: Mapping[str, float], now: float, table: SignalTable) -> bool:
    return record.advertised and any(
        each.code in table.spared and each.code in sustained and now - each.since >= sustained[each.code]
        for each in record.lasting
    )
