"""Decides for which reasons a scheduler that chooses single devices should not choose one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, TaintReason

__all__ = ["YIELDED", "DeviceCondition", "taint_reasons"]

OUT_OF_SERVICE, FAULT_REPORTED, HELD, SHARED, DIRTY = "out-of-service", "fault-reported", "held", "shared", "dirty"
"""Reasons that are not the code of a cause."""


YIELDED = TaintReason("yielded")
"""The reason of every device of a yielded node."""


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """What the record of a device does not say.

    Attributes:
        fault_reported: its driver has just reported a fault.
        held: a process without a grant has blocked every scrub for a while.
        shared: several pods use it although the policy allows one at a time.
        dirty_seconds: how long it has been free and not clean; None: it is clean, or in use.
    """

    fault_reported: bool = False
    held: bool = False
    shared: bool = False
    dirty_seconds: float | None = None


def taint_reasons(record: DeviceRecord, policy: Policy, condition: DeviceCondition) -> tuple[TaintReason, ...]:
    """Return every reason; none where the policy only observes, unless an operator quarantined the device."""
    if policy.enforcement is Enforcement.OBSERVE:
        if not record.quarantined_by_operator:
            return ()
        condition = replace(condition, held=False, shared=False, fault_reported=False, dirty_seconds=None)
    rule = policy.device_taints
    waited = condition.dirty_seconds
    reasons = []
    if not record.advertised:
        code = OUT_OF_SERVICE if record.cause is None else str(record.cause.code)
        reasons.append(TaintReason(code, record.health is Health.CONDEMNED and rule.evict_from_condemned))
    elif condition.fault_reported:
        reasons.append(TaintReason(FAULT_REPORTED))
    if condition.held:
        reasons.append(TaintReason(HELD))
    if condition.shared:
        reasons.append(TaintReason(SHARED))
    if rule.dirty_after is not None and waited is not None and waited >= rule.dirty_after:
        reasons.append(TaintReason(DIRTY))
    return tuple(reasons)
