"""The breaker's arithmetic: what counts, for how long, and when the next reset is allowed."""

from __future__ import annotations

import itertools

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.health.breaker import BreakerState, breaker_state, is_out_for_soft_signal
from scrubber.domain.health.history import RecoveryAttempt
from scrubber.domain.policy import BreakerRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, RecoveryMethod
from tests.simulation.samples import NOW, cause, record

RULE = BreakerRule(max_resets=3, window=600.0, max_soft_percent=25)


def reset_at(*ages: float) -> DeviceRecord:
    """Return a device that was reset so many seconds ago, oldest first."""
    return record(recovery_attempts=tuple(RecoveryAttempt(NOW - age, reset=True) for age in sorted(ages, reverse=True)))


def soft(health: Health = Health.QUARANTINED, code: str = "too-hot", actor: str = "service") -> DeviceRecord:
    return record(health=health, cause=cause(code, RecoveryMethod.WAIT, actor=actor))


def well(count: int) -> list[DeviceRecord]:
    return [record() for _ in range(count)]


# -- resets ------------------------------------------------------------------------------------------------------------


def test_breaker_of_a_node_without_devices_is_closed() -> None:
    assert breaker_state([], RULE, NOW, NVIDIA_SIGNALS) == BreakerState()


def test_resets_are_allowed_up_to_the_policys_limit() -> None:
    assert breaker_state([reset_at(10, 20)], RULE, NOW, NVIDIA_SIGNALS) == BreakerState()
    assert breaker_state([reset_at(10, 20, 30)], RULE, NOW, NVIDIA_SIGNALS).resets_stopped_reason != ""


def test_resets_of_all_devices_are_counted_together() -> None:
    stopped = breaker_state([reset_at(10), reset_at(20), reset_at(30)], RULE, NOW, NVIDIA_SIGNALS)
    assert "3 times within 10 min;" in stopped.resets_stopped_reason
    assert "allows 3" in stopped.resets_stopped_reason


def test_recovery_without_a_reset_is_not_counted_as_a_reset() -> None:
    scrubs = record(recovery_attempts=tuple(RecoveryAttempt(NOW - age, reset=False) for age in range(50)))
    assert breaker_state([scrubs, reset_at(10, 20)], RULE, NOW, NVIDIA_SIGNALS) == BreakerState()


def test_next_reset_is_allowed_once_enough_resets_have_left_the_window() -> None:
    records = [reset_at(500, 400, 30)]
    until = breaker_state(records, RULE, NOW, NVIDIA_SIGNALS).resets_stopped_until
    assert until == NOW + 100
    assert breaker_state(records, RULE, until - 0.001, NVIDIA_SIGNALS).resets_stopped_reason != ""
    assert breaker_state(records, RULE, until, NVIDIA_SIGNALS) == BreakerState()


def test_lowered_reset_limit_applies_to_past_resets() -> None:
    records = [reset_at(500, 400, 300, 200)]
    stricter = BreakerRule(max_resets=2, window=600.0)
    assert breaker_state(records, stricter, NOW, NVIDIA_SIGNALS).resets_stopped_until == NOW + 300


def test_pending_reset_counts_towards_the_limit() -> None:
    records = [reset_at(100), *well(3)]
    assert breaker_state(records, RULE, NOW, NVIDIA_SIGNALS, pending_resets=1) == BreakerState()
    stopped = breaker_state(records, RULE, NOW, NVIDIA_SIGNALS, pending_resets=2)
    assert stopped.resets_stopped_reason != ""
    assert stopped.resets_stopped_until == NOW + 500


def test_next_reset_is_allowed_after_a_whole_window_if_only_pending_resets_count() -> None:
    assert breaker_state(well(3), RULE, NOW, NVIDIA_SIGNALS, pending_resets=3).resets_stopped_until == NOW + 600


def test_reset_limit_of_zero_stops_all_resets() -> None:
    stopped = breaker_state(well(3), BreakerRule(max_resets=0, window=600.0), NOW, NVIDIA_SIGNALS)
    assert stopped.resets_stopped_reason != ""
    assert stopped.resets_stopped_until == NOW + 600


def test_resets_in_the_future_of_a_clock_that_was_set_back_are_ignored() -> None:
    assert breaker_state([reset_at(-10, -20, -30)], RULE, NOW, NVIDIA_SIGNALS) == BreakerState()


# -- soft signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "most"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (16, 4)])
def test_allowed_share_of_devices_may_be_out_for_soft_signals_and_always_one(devices: int, most: int) -> None:
    for out in range(devices + 1):
        records = [*(soft() for _ in range(out)), *well(devices - out)]
        assert bool(breaker_state(records, RULE, NOW, NVIDIA_SIGNALS).soft_signals_stopped_reason) is (out >= most)


def test_soft_signal_share_of_zero_percent_allows_one_device() -> None:
    none = BreakerRule(max_soft_percent=0)
    assert breaker_state(well(8), none, NOW, NVIDIA_SIGNALS) == BreakerState()
    assert "1 of 8 devices" in breaker_state([soft(), *well(7)], none, NOW, NVIDIA_SIGNALS).soft_signals_stopped_reason


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.limited_by_breaker))
def test_every_transient_soft_signal_counts_towards_the_share(code: str) -> None:
    assert is_out_for_soft_signal(soft(code=code), NVIDIA_SIGNALS)


def test_changed_firmware_is_not_limited_by_the_breaker_and_does_not_count_towards_the_share() -> None:
    """Otherwise an attacker who changes a quarter of the devices would keep all others in service."""
    assert NVIDIA_SIGNALS.soft - {"baseline-mismatch"} == NVIDIA_SIGNALS.limited_by_breaker
    assert not is_out_for_soft_signal(soft(code="baseline-mismatch"), NVIDIA_SIGNALS)


def test_reset_requested_by_an_operator_does_not_count_towards_the_limit() -> None:
    def after(*ordered: bool) -> BreakerState:
        attempts = tuple(
            RecoveryAttempt(NOW - 60.0 - number, reset=True, operator_ordered=each)
            for number, each in enumerate(ordered)
        )
        return breaker_state([record(recovery_attempts=attempts)], BreakerRule(max_resets=2), NOW, NVIDIA_SIGNALS)

    assert after(True, True, True, False) == BreakerState()
    assert after(True, False, False).resets_stopped_reason


@pytest.mark.parametrize("health", [Health.QUARANTINED, Health.RECOVERING, Health.PROBATION])
def test_device_counts_towards_the_soft_signal_share_until_it_is_back_in_service(health: Health) -> None:
    assert is_out_for_soft_signal(soft(health), NVIDIA_SIGNALS)


@pytest.mark.parametrize(
    "other",
    [
        soft(Health.SUSPECT),
        soft(code="xid-95"),
        soft(code="verification-failed"),
        soft(actor="uid:1000"),
        record(health=Health.QUARANTINED),
        record(),
    ],
    ids=["suspect", "a hard fault", "a scrub's fault", "a person's", "no cause", "healthy"],
)
def test_device_in_service_or_out_for_another_cause_does_not_count_towards_the_soft_signal_share(
    other: DeviceRecord,
) -> None:
    assert not is_out_for_soft_signal(other, NVIDIA_SIGNALS)
    assert breaker_state([other] * 4, RULE, NOW, NVIDIA_SIGNALS).soft_signals_stopped_reason == ""


def test_reset_limit_and_soft_signal_limit_are_independent() -> None:
    """All four combinations: a fault common to the node's devices must not prevent resets of those that need one."""
    for hot, reset in itertools.product((False, True), (False, True)):
        records = [*([soft()] if hot else []), *([reset_at(1, 2, 3)] if reset else []), *well(2)]
        state = breaker_state(records, RULE, NOW, NVIDIA_SIGNALS)
        assert (bool(state.soft_signals_stopped_reason), bool(state.resets_stopped_reason)) == (hot, reset)
        assert (state.resets_stopped_until is not None) is reset
