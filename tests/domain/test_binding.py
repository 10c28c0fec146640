"""Whether the scheduler may bind a pod to a device that it waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrubber.domain.binding import binding_state
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import BindingState, Cause, Health, Hygiene, RecoveryMethod
from scrubber.domain.taints import DeviceCondition
from tests.simulation.samples import certificate

READY, BEING_CLEANED, IN_USE, OUT = BindingState
DIRTY = DeviceRecord("GPU-1", hygiene=Hygiene.DIRTY)
CLEAN = replace(DIRTY, hygiene=Hygiene.CLEAN, certificate=certificate())
BY_OPERATOR = Cause("operator", "replaced", RecoveryMethod.OPERATOR, 1000.0, actor="uid:1000")
OBSERVING = Policy(enforcement=Enforcement.OBSERVE)


def state(record: DeviceRecord, policy: Policy | None = None, /, **condition: Any) -> BindingState:
    return binding_state(record, policy or Policy(), DeviceCondition(**condition))


@pytest.mark.parametrize("health", [Health.HEALTHY, Health.SUSPECT])
@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (CLEAN, READY),
        (replace(CLEAN, certificate=None), BEING_CLEANED),
        (replace(CLEAN, certificate=replace(certificate(), next_grant=2)), BEING_CLEANED),
        (DIRTY, BEING_CLEANED),
        (replace(DIRTY, hygiene=Hygiene.SCRUBBING), BEING_CLEANED),
        (replace(DIRTY, hygiene=Hygiene.IN_USE), IN_USE),
    ],
)
def test_device_in_service_is_ready_only_with_an_unused_certificate(
    record: DeviceRecord, expected: BindingState, health: Health
) -> None:
    assert state(replace(record, health=health)) is expected


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (Health.QUARANTINED, OUT),
        (Health.CONDEMNED, OUT),
        (Health.RECOVERING, BEING_CLEANED),
        (Health.PROBATION, BEING_CLEANED),
    ],
)
@pytest.mark.parametrize("record", [CLEAN, DIRTY])
def test_device_out_of_service_is_waited_for_only_while_it_recovers(
    record: DeviceRecord, health: Health, expected: BindingState
) -> None:
    assert state(replace(record, health=health)) is expected


@pytest.mark.parametrize("health", [Health.RECOVERING, Health.PROBATION])
def test_device_that_a_pod_still_uses_is_not_waited_for_as_a_recovering_one(health: Health) -> None:
    assert state(replace(DIRTY, health=health, hygiene=Hygiene.IN_USE)) is OUT


@pytest.mark.parametrize("reason", ["fault_reported", "held", "shared"])
def test_device_with_a_reason_against_it_is_out_of_service(reason: str) -> None:
    condition: dict[str, Any] = {reason: True}
    assert state(CLEAN, **condition) is OUT
    assert state(DIRTY, **condition) is OUT


def test_device_that_has_been_dirty_for_long_is_still_being_cleaned() -> None:
    assert state(DIRTY, dirty_seconds=1e9) is BEING_CLEANED


@pytest.mark.parametrize("hygiene", Hygiene)
@pytest.mark.parametrize("health", Health)
def test_observing_policy_waits_for_no_device_but_one_that_an_operator_quarantined(
    hygiene: Hygiene, health: Health
) -> None:
    record = replace(DIRTY, hygiene=hygiene, health=health)
    assert state(record, OBSERVING, held=True) is READY
    assert state(replace(record, health=Health.QUARANTINED, cause=BY_OPERATOR), OBSERVING) is OUT
