"""Decides what a device needs next without a request: one pure function, so that every state has a way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.device import NodeIdentity
from scrubber.domain.handover import certificate_flaw
from scrubber.domain.maintenance import next_maintenance
from scrubber.domain.policy import Enforcement, Policy, ResetMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene, RecoveryMethod

__all__ = ["NextAction", "RecoveryAction", "next_action"]


class RecoveryAction(StrEnum):
    NOTHING = "nothing"
    SCRUB = "scrub"
    RECOVER = "recover"
    PROBATION_SCRUB = "prove"
    """One more clean slow path on probation."""
    MAINTENANCE_SCRUB = "verify"
    """Maintenance: a clean device is verified again."""
    RESOLVE = "settle"
    """The record shows a scrub or a recovery that is not running: correct the record."""


@dataclass(frozen=True, slots=True)
class NextAction:
    """What to do, and not before ``due`` (wall-clock seconds; None: now, or never for ``NOTHING``)."""

    action: RecoveryAction
    due: float | None = None


def next_action(record: DeviceRecord, policy: Policy, node: NodeIdentity, *, now: float = 0.0) -> NextAction:
    """Return what the device needs next. Precondition: no scrub of it runs in this process.

    Args:
        now: wall-clock seconds; overdue maintenance that missed its window is due when the next window begins.
    """
    if record.hygiene is Hygiene.SCRUBBING or record.health is Health.RECOVERING:
        return NextAction(RecoveryAction.RESOLVE)
    if record.hygiene is Hygiene.IN_USE or record.health is Health.CONDEMNED:
        return NextAction(RecoveryAction.NOTHING)
    if record.health is Health.PROBATION:
        return NextAction(RecoveryAction.PROBATION_SCRUB, record.retry_at)
    if record.health is Health.QUARANTINED:
        cause = record.cause
        if (
            cause is None
            or cause.by_operator
            or cause.recovery_method in (RecoveryMethod.OPERATOR, RecoveryMethod.REBOOT)
        ):
            return NextAction(RecoveryAction.NOTHING)
        if policy.enforcement is Enforcement.OBSERVE and record.owes_reset and policy.reset is not ResetMode.NEVER:
            return NextAction(RecoveryAction.NOTHING)  # observe mode resets nothing, so the recovery would fail
        return NextAction(RecoveryAction.RECOVER, record.retry_at)
    if record.hygiene is Hygiene.DIRTY:
        return NextAction(RecoveryAction.SCRUB)
    certificate = record.certificate
    if certificate is None or certificate_flaw(certificate, record, node, policy) is not None:
        return NextAction(RecoveryAction.SCRUB)
    again = next_maintenance(certificate.issued_at, policy.maintenance)
    if again is not None and again <= now and policy.maintenance.interval is not None:
        again = next_maintenance(now - policy.maintenance.interval, policy.maintenance)
    return NextAction(RecoveryAction.NOTHING) if again is None else NextAction(RecoveryAction.MAINTENANCE_SCRUB, again)
