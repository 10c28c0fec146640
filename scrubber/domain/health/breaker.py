"""The node's circuit breaker: limits what the service does automatically before an operator must intervene.

It stops resets for recoveries, and quarantines for soft signals. It never stops a scrub or the killing of proved
leftovers, and it returns no device to service: a device that waits for a reset stays out of service. It is computed
from the devices' records and stores no state, so a restart does not close it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.formatting import format_duration
from scrubber.domain.health.signal_table import SignalTable
from scrubber.domain.policy import BreakerRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, Health, Hygiene, RecoveryMethod

__all__ = ["BreakerState", "breaker_state", "is_out_for_soft_signal"]


@dataclass(frozen=True, slots=True)
class BreakerState:
    """What is stopped, with a message each; empty while it is allowed.

    Attributes:
        resets_stopped_reason: why no recovery may reset a device now.
        resets_stopped_until: wall-clock seconds from which the next reset is allowed; None while resets are allowed.
        soft_signals_stopped_reason: why no further device is quarantined for a soft signal.
        awaiting_reset: devices that would be reset now.
        kept_in_service: devices that would be quarantined now for a soft signal.
    """

    resets_stopped_reason: str = ""
    resets_stopped_until: float | None = None
    soft_signals_stopped_reason: str = ""
    awaiting_reset: frozenset[str] = frozenset()
    kept_in_service: frozenset[str] = frozenset()

    @property
    def open(self) -> BreakerState:
        """The state restricted to stops that affect a device now: merely reaching a limit is not reported."""
        return replace(
            self,
            resets_stopped_reason=self.resets_stopped_reason if self.awaiting_reset else "",
            resets_stopped_until=self.resets_stopped_until if self.awaiting_reset else None,
            soft_signals_stopped_reason=self.soft_signals_stopped_reason if self.kept_in_service else "",
        )


def is_out_for_soft_signal(record: DeviceRecord, table: SignalTable) -> bool:
    """Whether the device is out of service for a condition that may end without intervention."""
    cause = record.cause
    return (
        record.health not in ADVERTISED
        and cause is not None
        and not cause.by_operator
        and cause.code in table.limited_by_breaker
    )


# See docs/decisions/0029-circuit-breaker.md.
def breaker_state(
    records: Collection[DeviceRecord],
    rule: BreakerRule,
    now: float,
    table: SignalTable,
    *,
    resets_required: bool = False,
    quarantine_after: Mapping[str, float] | None = None,
    pending_resets: int = 0,
    pending_soft_quarantines: int = 0,
) -> BreakerState:
    """Return the state of the breaker.

    Args:
        resets_required: every slow path resets, also where no fault requires it.
        quarantine_after: how long soft signals may last, by code; determines which devices the breaker spares.
        pending_resets: resets that were allowed and are on no record yet.
        pending_soft_quarantines: devices being quarantined for a soft signal that are not yet out of service on record.
    """
    times = sorted(
        attempt.at
        for record in records
        for attempt in record.recovery_attempts
        if attempt.reset and not attempt.operator_ordered and now - rule.window < attempt.at <= now
    )
    spent = len(times) + pending_resets
    resets, until = "", None
    if spent >= rule.max_resets:
        # Pending resets have no time yet: they count as starting now.
        last = spent - rule.max_resets
        until = (times[last] if last < len(times) else now) + rule.window
        resets = (
            f"Recoveries reset devices of this node {spent} times within {format_duration(rule.window)}; "
            f"the policy allows {rule.max_resets}. Devices that need a reset stay out of service until "
            "another reset is allowed."
        )
    out = pending_soft_quarantines + sum(is_out_for_soft_signal(record, table) for record in records)
    most = max(1, len(records) * rule.max_soft_percent // 100)
    soft = ""
    if out >= most and records:
        soft = (
            f"{out} of {len(records)} devices are out of service for soft signals; the policy allows "
            f"{most}. Other devices with such a signal stay suspect. Look for a common cause, such as "
            "cooling or power."
        )
    waiting = (
        record.device for record in records if _is_to_recover(record, now) and (record.owes_reset or resets_required)
    )
    spared = (record.device for record in records if _is_overdue(record, quarantine_after or {}, now, table))
    return BreakerState(resets, until, soft, frozenset(waiting), frozenset(spared))


def _is_to_recover(record: DeviceRecord, now: float) -> bool:
    free = record.hygiene is not Hygiene.IN_USE
    due = record.retry_at is None or record.retry_at <= now
    cause = record.cause
    by_itself = (
        cause is not None
        and not cause.by_operator
        and cause.recovery_method not in (RecoveryMethod.REBOOT, RecoveryMethod.OPERATOR)
    )
    if record.health is Health.PROBATION:  # released by an operator, with a reset that is owed
        return record.owes_reset and free and due
    return record.health is Health.QUARANTINED and by_itself and free and due


def _is_overdue(record: DeviceRecord, quarantine_after: Mapping[str, float], now: float, table: SignalTable) -> bool:
    return record.advertised and any(
        each.code in table.limited_by_breaker
        and each.code in quarantine_after
        and now - each.since >= quarantine_after[each.code]
        for each in record.warnings
    )
