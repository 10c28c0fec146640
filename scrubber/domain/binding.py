"""Decides whether a scheduler that waits for a device may bind a pod to it now. Pure."""

from __future__ import annotations

from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import BindingState, Health, Hygiene
from scrubber.domain.taints import DeviceCondition

__all__ = ["binding_state"]


def binding_state(record: DeviceRecord, policy: Policy, condition: DeviceCondition) -> BindingState:
    """Return the state; ``READY`` where the policy only observes, unless an operator quarantined the device.

    It is advice for the scheduler: the preparation of the claim checks everything again.
    """
    if record.quarantined_by_operator:
        return BindingState.OUT_OF_SERVICE
    if policy.enforcement is Enforcement.OBSERVE:
        return BindingState.READY
    if record.health in (Health.RECOVERING, Health.PROBATION) and record.hygiene is not Hygiene.IN_USE:
        return BindingState.BEING_CLEANED
    if not record.advertised or condition.fault_reported or condition.held or condition.shared:
        return BindingState.OUT_OF_SERVICE
    if record.hygiene is Hygiene.IN_USE:
        return BindingState.IN_USE
    return BindingState.READY if record.is_certified else BindingState.BEING_CLEANED
