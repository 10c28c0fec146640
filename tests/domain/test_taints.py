"""Why a scheduler should not choose a device for a claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scrubber.domain.policy import DeviceTaintRule, Enforcement, Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod, TaintReason
from scrubber.domain.taints import DeviceCondition, taint_reasons

FREE = DeviceRecord("GPU-1", hygiene=Hygiene.CLEAN)
XID = Cause("xid-79", "XID 79", RecoveryMethod.RESET, 1000.0)
BY_OPERATOR = replace(XID, code="operator", recovery_method=RecoveryMethod.OPERATOR, actor="uid:1000")
OUT_OF_SERVICE = sorted(set(Health) - {Health.HEALTHY, Health.SUSPECT})
POLICY = Policy(device_taints=DeviceTaintRule(dirty_after=600.0))
EVICTING = replace(POLICY, device_taints=DeviceTaintRule(evict_from_condemned=True))
OBSERVING = replace(POLICY, enforcement=Enforcement.OBSERVE)


def reasons(record: DeviceRecord = FREE, policy: Policy = POLICY, **condition: Any) -> list[str]:
    return [each.reason for each in taint_reasons(record, policy, DeviceCondition(**condition))]


@pytest.mark.parametrize("health", [Health.HEALTHY, Health.SUSPECT])
def test_device_in_service_has_no_reason(health: Health) -> None:
    assert reasons(replace(FREE, health=health, cause=XID)) == []


@pytest.mark.parametrize("health", OUT_OF_SERVICE)
def test_reason_of_a_device_that_is_out_of_service_is_the_code_of_its_cause(health: Health) -> None:
    assert reasons(replace(FREE, health=health, cause=XID)) == ["xid-79"]
    assert reasons(replace(FREE, health=health)) == ["out-of-service"]


@pytest.mark.parametrize("health", OUT_OF_SERVICE)
def test_only_a_condemned_device_evicts_pods_and_only_where_the_policy_says_so(health: Health) -> None:
    sick = replace(FREE, health=health, cause=XID)
    assert taint_reasons(sick, POLICY, DeviceCondition()) == (TaintReason("xid-79", evicts=False),)
    assert taint_reasons(sick, EVICTING, DeviceCondition()) == (
        TaintReason("xid-79", evicts=health is Health.CONDEMNED),
    )


@pytest.mark.parametrize(
    ("seconds", "limit", "expected"),
    [(None, 600.0, []), (599.0, 600.0, []), (600.0, 600.0, ["dirty"]), (1e9, None, [])],
)
def test_device_that_is_dirty_for_as_long_as_the_policy_says_has_a_reason(
    seconds: float | None, limit: float | None, expected: list[str]
) -> None:
    assert reasons(policy=Policy(device_taints=DeviceTaintRule(limit)), dirty_seconds=seconds) == expected


def test_each_reason_that_holds_is_stated() -> None:
    everything: dict[str, Any] = {"fault_reported": True, "held": True, "shared": True, "dirty_seconds": 600.0}
    assert reasons(**everything) == ["fault-reported", "held", "shared", "dirty"]
    assert reasons(replace(FREE, health=Health.QUARANTINED, cause=XID), **everything) == [
        "xid-79",
        "held",
        "shared",
        "dirty",
    ]


def test_policy_that_observes_has_no_reason_unless_an_operator_quarantined_the_device() -> None:
    sick = replace(FREE, health=Health.QUARANTINED, cause=XID)
    everything: dict[str, Any] = {"fault_reported": True, "held": True, "shared": True, "dirty_seconds": 600.0}
    assert reasons(sick, OBSERVING, **everything) == []
    assert reasons(replace(sick, cause=BY_OPERATOR), OBSERVING, **everything) == ["operator"]
