"""What a device needs next when nobody asks for anything: one pure decision, so that every state has a way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.device import NodeIdentity
from scrubber.domain.handover import certificate_flaw
from scrubber.domain.health import Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Policy, ResetUse
from scrubber.domain.record import DeviceRecord
from scrubber.domain.schedule import due_again

__all__ = ["Act", "Need", "next_need"]


class Act(StrEnum):
    NOTHING = "nothing"
    SCRUB = "scrub"
    RECOVER = "recover"
    PROVE = "prove"
    """One more clean slow path on probation."""
    VERIFY = "verify"
    """Maintenance: what is clean is proved again."""
    SETTLE = "settle"
    """A scrub or a recovery is on record that nobody runs: put the record right."""


@dataclass(frozen=True, slots=True)
class Need:
    """What to do, at the earliest at ``due`` (wall-clock seconds; None: now, or never for ``NOTHING``)."""

    act: Act
    due: float | None = None


def next_need(record: DeviceRecord, policy: Policy, node: NodeIdentity, *, now: float = 0.0) -> Need:
    """What the device needs next. Precondition: no scrub of it runs in this process.

    Args:
        now: wall-clock seconds; maintenance that is overdue and missed its hours is due when they come again.
    """
    if record.hygiene is Hygiene.SCRUBBING or record.health is Health.RECOVERING:
        return Need(Act.SETTLE)
    if record.hygiene is Hygiene.IN_USE or record.health is Health.CONDEMNED:
        return Need(Act.NOTHING)
    if record.health is Health.PROBATION:
        return Need(Act.PROVE, record.retry_at)
    if record.health is Health.QUARANTINED:
        cause = record.cause
        if cause is None or cause.by_person or cause.way_back in (WayBack.PERSON, WayBack.REBOOT):
            return Need(Act.NOTHING)
        if policy.enforcement is Enforcement.OBSERVE and record.must_reset and policy.reset is not ResetUse.NEVER:
            return Need(Act.NOTHING)  # whoever only observes resets nothing, and would fail by it
        return Need(Act.RECOVER, record.retry_at)
    if record.hygiene is Hygiene.DIRTY:
        return Need(Act.SCRUB)
    certificate = record.certificate
    if certificate is None or certificate_flaw(certificate, record, node, policy) is not None:
        return Need(Act.SCRUB)
    again = due_again(certificate.issued_at, policy.maintenance)
    if again is not None and again <= now and policy.maintenance.every is not None:
        again = due_again(now - policy.maintenance.every, policy.maintenance)
    return Need(Act.NOTHING) if again is None else Need(Act.VERIFY, again)
