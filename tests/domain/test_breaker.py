"""The breaker's arithmetic: what counts, for how long, and when the next reset is allowed."""

from __future__ import annotations

import itertools

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.breaker import Breaker, breaker_of, out_for_soft_signals
from scrubber.domain.health import Health, WayBack
from scrubber.domain.policy import BreakerRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.tally import Attempt
from tests.world.samples import NOW, cause, record

RULE = BreakerRule(resets=3, window=600.0, soft_percent=25)


def reset_at(*ages: float) -> DeviceRecord:
    """A device that was reset so many seconds ago, oldest first."""
    return record(attempts=tuple(Attempt(NOW - age, reset=True) for age in sorted(ages, reverse=True)))


def soft(health: Health = Health.QUARANTINED, code: str = "too-hot", actor: str = "service") -> DeviceRecord:
    return record(health=health, cause=cause(code, WayBack.WAIT, actor=actor))


def well(count: int) -> list[DeviceRecord]:
    return [record() for _ in range(count)]


# -- resets ------------------------------------------------------------------------------------------------------------


def test_a_node_without_devices_stops_nothing() -> None:
    assert breaker_of([], RULE, NOW, NVIDIA_SIGNALS) == Breaker()


def test_resets_go_on_up_to_as_many_as_the_policy_allows() -> None:
    assert breaker_of([reset_at(10, 20)], RULE, NOW, NVIDIA_SIGNALS) == Breaker()
    assert breaker_of([reset_at(10, 20, 30)], RULE, NOW, NVIDIA_SIGNALS).resets != ""


def test_the_resets_of_all_devices_count_together() -> None:
    stopped = breaker_of([reset_at(10), reset_at(20), reset_at(30)], RULE, NOW, NVIDIA_SIGNALS)
    assert "3 times within 10 min," in stopped.resets
    assert "allows 3" in stopped.resets


def test_a_recovery_that_made_no_reset_is_none() -> None:
    scrubs = record(attempts=tuple(Attempt(NOW - age, reset=False) for age in range(50)))
    assert breaker_of([scrubs, reset_at(10, 20)], RULE, NOW, NVIDIA_SIGNALS) == Breaker()


def test_the_next_reset_is_allowed_once_the_oldest_that_stands_in_its_way_has_left_the_window() -> None:
    records = [reset_at(500, 400, 30)]
    until = breaker_of(records, RULE, NOW, NVIDIA_SIGNALS).resets_until
    assert until == NOW + 100
    assert breaker_of(records, RULE, until - 0.001, NVIDIA_SIGNALS).resets != ""
    assert breaker_of(records, RULE, until, NVIDIA_SIGNALS) == Breaker()


def test_where_a_policy_allows_fewer_than_there_were_it_takes_until_enough_have_left() -> None:
    records = [reset_at(500, 400, 300, 200)]
    stricter = BreakerRule(resets=2, window=600.0)
    assert breaker_of(records, stricter, NOW, NVIDIA_SIGNALS).resets_until == NOW + 300


def test_each_reset_that_is_being_started_takes_one_of_those_that_are_left() -> None:
    records = [reset_at(100), *well(3)]
    assert breaker_of(records, RULE, NOW, NVIDIA_SIGNALS, starting=1) == Breaker()
    stopped = breaker_of(records, RULE, NOW, NVIDIA_SIGNALS, starting=2)
    assert stopped.resets != ""
    assert stopped.resets_until == NOW + 500


def test_while_nothing_but_what_is_starting_stands_in_the_way_it_takes_a_whole_window() -> None:
    assert breaker_of(well(3), RULE, NOW, NVIDIA_SIGNALS, starting=3).resets_until == NOW + 600


def test_a_policy_that_allows_none_stops_them_all() -> None:
    stopped = breaker_of(well(3), BreakerRule(resets=0, window=600.0), NOW, NVIDIA_SIGNALS)
    assert stopped.resets != ""
    assert stopped.resets_until == NOW + 600


def test_resets_that_lie_ahead_of_a_clock_that_was_set_back_stop_nobody() -> None:
    assert breaker_of([reset_at(-10, -20, -30)], RULE, NOW, NVIDIA_SIGNALS) == Breaker()


# -- soft signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "most"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (16, 4)])
def test_a_share_of_the_devices_may_be_out_and_always_one(devices: int, most: int) -> None:
    for out in range(devices + 1):
        records = [*(soft() for _ in range(out)), *well(devices - out)]
        assert bool(breaker_of(records, RULE, NOW, NVIDIA_SIGNALS).soft) is (out >= most)


def test_a_policy_that_allows_no_share_allows_one_device() -> None:
    none = BreakerRule(soft_percent=0)
    assert breaker_of(well(8), none, NOW, NVIDIA_SIGNALS) == Breaker()
    assert "1 of 8 devices" in breaker_of([soft(), *well(7)], none, NOW, NVIDIA_SIGNALS).soft


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.spared))
def test_every_soft_signal_that_may_pass_by_itself_counts(code: str) -> None:
    assert out_for_soft_signals(soft(code=code), NVIDIA_SIGNALS)


def test_firmware_that_somebody_wrote_spares_no_device_and_counts_for_none() -> None:
    """Else whoever wrote it to a quarter of the devices would have all the others stay in service."""
    assert NVIDIA_SIGNALS.soft - {"baseline-changed"} == NVIDIA_SIGNALS.spared
    assert not out_for_soft_signals(soft(code="baseline-changed"), NVIDIA_SIGNALS)


def test_what_a_person_ordered_uses_up_no_reset() -> None:
    def after(*ordered: bool) -> Breaker:
        attempts = tuple(Attempt(NOW - 60.0 - number, reset=True, ordered=each) for number, each in enumerate(ordered))
        return breaker_of([record(attempts=attempts)], BreakerRule(resets=2), NOW, NVIDIA_SIGNALS)

    assert after(True, True, True, False) == Breaker()
    assert after(True, False, False).resets


@pytest.mark.parametrize("health", [Health.QUARANTINED, Health.RECOVERING, Health.PROBATION])
def test_a_device_counts_until_it_is_back_in_service(health: Health) -> None:
    assert out_for_soft_signals(soft(health), NVIDIA_SIGNALS)


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
def test_what_is_in_service_or_out_for_another_reason_does_not(other: DeviceRecord) -> None:
    assert not out_for_soft_signals(other, NVIDIA_SIGNALS)
    assert breaker_of([other] * 4, RULE, NOW, NVIDIA_SIGNALS).soft == ""


def test_neither_stops_the_other() -> None:
    """All four states there are: a fault that the node's devices share must not cost those that need a reset theirs."""
    for hot, reset in itertools.product((False, True), (False, True)):
        records = [*([soft()] if hot else []), *([reset_at(1, 2, 3)] if reset else []), *well(2)]
        state = breaker_of(records, RULE, NOW, NVIDIA_SIGNALS)
        assert (bool(state.soft), bool(state.resets)) == (hot, reset)
        assert (state.resets_until is not None) is reset
