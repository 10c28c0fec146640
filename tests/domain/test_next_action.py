"""The next automatic action for a device, so that every state has a way out."""

from __future__ import annotations

from itertools import product

import pytest

from scrubber.domain.next_action import NextAction, RecoveryAction, next_action
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.simulation.samples import NODE, NOW, POLICY, cause, certificate, record


def need(device: DeviceRecord) -> NextAction:
    return next_action(device, POLICY, NODE)


def test_dirty_device_is_scrubbed_at_once() -> None:
    assert need(record()) == NextAction(RecoveryAction.SCRUB)


@pytest.mark.parametrize("health", Health)
def test_device_in_use_is_left_alone(health: Health) -> None:
    if health is not Health.RECOVERING:
        assert need(record(Hygiene.IN_USE, health, cause=cause())).action is RecoveryAction.NOTHING


def test_clean_device_with_a_valid_certificate_needs_no_action() -> None:
    assert need(record(Hygiene.CLEAN, certificate=certificate())).action is RecoveryAction.NOTHING


@pytest.mark.parametrize("change", [{"policy_digest": "sha256:older"}, {"driver": "driver-0"}, {"boot": "boot-0"}])
def test_clean_device_with_an_invalid_certificate_is_scrubbed_again(change: dict[str, object]) -> None:
    assert need(record(Hygiene.CLEAN, certificate=certificate(**change))) == NextAction(RecoveryAction.SCRUB)
    assert need(record(Hygiene.CLEAN)) == NextAction(RecoveryAction.SCRUB)


@pytest.mark.parametrize("way", [RecoveryMethod.SCRUB, RecoveryMethod.RESET, RecoveryMethod.WAIT])
def test_recoverable_quarantine_is_retried_when_its_backoff_is_over(way: RecoveryMethod) -> None:
    device = record(health=Health.QUARANTINED, cause=cause(recovery_method=way), retry_at=NOW + 4)
    assert need(device) == NextAction(RecoveryAction.RECOVER, NOW + 4)


@pytest.mark.parametrize(
    "why",
    [
        cause("operator", RecoveryMethod.OPERATOR, actor="uid:0"),
        cause("xid-79", RecoveryMethod.REBOOT),
        cause(recovery_method=RecoveryMethod.OPERATOR),
    ],
)
def test_quarantine_that_needs_an_operator_or_a_reboot_is_left_alone(why: object) -> None:
    assert need(record(health=Health.QUARANTINED, cause=why)).action is RecoveryAction.NOTHING


def test_operator_quarantine_is_never_retried_whatever_its_recovery_method() -> None:
    device = record(health=Health.QUARANTINED, cause=cause(recovery_method=RecoveryMethod.RESET, actor="uid:0"))
    assert need(device).action is RecoveryAction.NOTHING


@pytest.mark.parametrize("hygiene", [Hygiene.DIRTY, Hygiene.CLEAN])
def test_device_on_probation_is_scrubbed_again_after_the_probation_interval(hygiene: Hygiene) -> None:
    assert need(record(hygiene, Health.PROBATION, retry_at=NOW + 5)) == NextAction(
        RecoveryAction.PROBATION_SCRUB, NOW + 5
    )


def test_condemned_device_is_left_to_an_operator() -> None:
    assert need(record(health=Health.CONDEMNED, cause=cause())).action is RecoveryAction.NOTHING


@pytest.mark.parametrize(
    ("hygiene", "health"),
    [(Hygiene.SCRUBBING, health) for health in Health] + [(hygiene, Health.RECOVERING) for hygiene in Hygiene],
)
def test_interrupted_scrub_or_recovery_is_resolved(hygiene: Hygiene, health: Health) -> None:
    assert need(record(hygiene, health, cause=cause())) == NextAction(RecoveryAction.RESOLVE)


@pytest.mark.parametrize(("hygiene", "health"), list(product(Hygiene, Health)))
def test_no_action_is_needed_only_if_the_device_is_clean_in_use_or_condemned(hygiene: Hygiene, health: Health) -> None:
    device = record(hygiene, health, cause=cause(recovery_method=RecoveryMethod.SCRUB), certificate=certificate())
    cannot_run = hygiene is Hygiene.SCRUBBING or health is Health.RECOVERING
    left_alone = hygiene is Hygiene.IN_USE or health is Health.CONDEMNED or device.state == "clean"
    assert (need(device).action is RecoveryAction.NOTHING) == (left_alone and not cannot_run)
