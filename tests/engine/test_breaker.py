"""The node's breaker at work: a storm costs the node a few resets and a few devices, and nobody else his hand-over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger, Step, Verdict
from scrubber.domain.handover_kind import Basis
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.policy import BreakerRule
from scrubber.domain.states import Health, Hygiene
from scrubber.ports.record import Event
from tests.world.asking import started
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

WINDOW = 900.0
FEW = replace(DEFAULT, breaker=BreakerRule(max_resets=2, window=WINDOW, max_soft_percent=25))
NONE = replace(DEFAULT, breaker=BreakerRule(max_resets=0, window=WINDOW))
HOT = 120


async def struck(world: World, *numbers: int) -> None:
    """These devices report what only a reset lifts, and it was seen."""
    for number in numbers:
        world.gpu(number).xids[95] = 1
        world.signal(number)
    await world.until(lambda: all(not world.record(number).advertised for number in numbers), within=5.0)


def resets(world: World) -> int:
    return sum(gpu.resets for gpu in world.matter.gpus.values())


def reset_times(world: World) -> list[float]:
    """When recoveries began that made a reset, by what was recorded of each scrub."""
    return sorted(
        scrub.started
        for scrub in world.vault.scrubs.values()
        if scrub.trigger is ScrubTrigger.RECOVERY and any(step.step is Step.RESET for step in scrub.steps)
    )


def most_within(times: list[float], window: float) -> int:
    return max((sum(start <= each < start + window for each in times) for start in times), default=0)


def out(world: World) -> list[int]:
    """Numbers of the devices that the kubelet is told to hand to nobody."""
    return [number for number, view in enumerate(world.node.view().devices) if not view.advertised]


def told(world: World, name: str, what: str) -> list[Event]:
    """What the audit has of the breaker."""
    return [event for event in world.vault.events if event.name == name and event.fields["breaker"] == what]


def overheated(world: World, *numbers: int, celsius: int = HOT) -> None:
    for number in numbers:
        world.gpu(number).celsius = celsius


# -- resets ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_open_breaker_stops_resets_but_not_scrubs_leftover_cleanup_or_hand_overs() -> None:
    """Nor the ending of what a pod left behind, nor a hand-over; and it lets no device in."""
    async with a_world(6, FEW) as world:
        await struck(world, 0, 1, 2, 3)
        await world.run(120.0)
        assert resets(world) == 2
        stopped = [number for number in range(4) if world.gpu(number).resets == 0]
        assert out(world) == stopped
        assert all(world.record(number).health is Health.QUARANTINED for number in stopped)
        back = next(number for number in range(4) if number not in stopped)
        assert world.record(back).state == "clean"

        # A pod comes and goes on a device that is well: it is handed over, what it leaves is ended, its bytes are cleared.
        tenant = await started(world, "acme", "train-0", 4)
        await world.run(3.0)
        assert tenant.first is not None
        child = world.matter.fork(tenant.first)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record(4).hygiene is Hygiene.CLEAN)
        assert not child.alive
        assert world.gpu(4).cells == [""] * 4

        # A person may have one scrubbed that waits for its reset: its bytes go, and it stays out.
        assert world.service is not None
        before = world.erasers.started
        news = await world.service.scrub(world.gpu(stopped[0]).id)
        assert news[-1].finished is not None
        assert news[-1].finished.outcome in (Outcome.PASSED, Outcome.FAILED)
        assert world.erasers.started == before + 1
        assert world.record(stopped[0]).health is Health.QUARANTINED
        assert resets(world) == 2


@in_virtual_time
async def test_a_clean_device_is_handed_over_at_once_while_the_breaker_is_open() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.run(120.0)
        assert world.node.service_view().breaker.resets_stopped_reason != ""
        before = world.clock.monotonic()
        tenant = await world.admit("acme", "train-0", (3,))
        assert tenant is not None
        await world.until(lambda: tenant.running)
        assert world.clock.monotonic() - before < 1.0
        assert tenant.refusals == []


@in_virtual_time
async def test_waiting_devices_are_reset_after_the_window_and_no_window_exceeds_the_limit() -> None:
    async with a_world(5, FEW) as world:
        await struck(world, 0, 1, 2, 3, 4)
        await world.until(lambda: out(world) == [], within=3 * WINDOW)
        times = reset_times(world)
        assert len(times) == resets(world) == 5
        assert most_within(times, WINDOW) == 2
        assert times[-1] - times[0] < 2 * WINDOW + 90.0  # nobody waits for a window that is over


@in_virtual_time
async def test_service_restart_does_not_close_the_breaker() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2, 3)
        await world.run(120.0)
        for _ in range(3):
            world.kill()
            await world.start_service()
            assert world.node.service_view().breaker.resets_stopped_reason != ""
            await world.run(60.0)
        assert resets(world) == 2
        await world.until(lambda: out(world) == [], within=2 * WINDOW)
        assert most_within(reset_times(world), WINDOW) == 2


@in_virtual_time
async def test_node_reboot_does_not_close_the_breaker() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2, 3)
        await world.run(120.0)
        world.reboot()
        await world.start_service()
        await world.run(120.0)
        assert resets(world) == 2


@in_virtual_time
async def test_recoveries_that_start_at_the_same_moment_do_not_exceed_the_reset_limit() -> None:
    one = replace(FEW, breaker=BreakerRule(max_resets=1, window=WINDOW))
    async with a_world(8, one) as world:
        await struck(world, *range(8))
        await world.run(WINDOW - 60.0)
        assert resets(world) == 1
        assert len(out(world)) == 7


@in_virtual_time
async def test_one_device_that_fails_repeatedly_does_not_exceed_the_nodes_reset_limit() -> None:
    async with a_world(2, FEW) as world:
        world.gpu().reset_fails = "the reset did not take"
        await struck(world, 0)
        await world.run(WINDOW - 60.0)
        assert len(reset_times(world)) == 2
        assert world.record().health is Health.QUARANTINED
        assert out(world) == [0]


@in_virtual_time
async def test_policy_without_resets_makes_none_and_a_device_that_needs_no_reset_returns() -> None:
    async with a_world(2, NONE) as world:
        await struck(world, 0)
        world.gpu(1).stuck = True
        await world.until(lambda: out(world) == [0, 1])
        world.gpu(1).stuck = False
        await world.until(lambda: out(world) == [0])
        await world.run(2 * WINDOW)
        assert resets(world) == 0
        assert out(world) == [0]


@in_virtual_time
async def test_policy_that_raises_the_reset_limit_applies_to_devices_that_already_wait() -> None:
    async with a_world(2, NONE) as world:
        await struck(world, 0)
        await world.run(60.0)
        world.policy = FEW
        await world.until(lambda: out(world) == [], within=90.0)


@in_virtual_time
async def test_recovery_without_a_reset_does_not_count_as_a_reset() -> None:
    """Where the platform has none (an instance of a MIG GPU, say) a recovery is a scrub, and nothing else is counted."""
    async with a_world(1, FEW) as world:
        world.gpu().reset_missing = "this platform has none"
        await struck(world, 0)
        await world.until(lambda: world.record().failures > 0)
        assert resets(world) == 0
        assert [attempt.reset for attempt in world.record().recovery_attempts] == [False] * len(
            world.record().recovery_attempts
        )
        assert world.node.service_view().breaker.resets_stopped_reason == ""


@in_virtual_time
async def test_open_breaker_does_not_stop_a_recovery_that_needs_no_reset() -> None:
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1)
        await world.until(lambda: resets(world) == 2)
        assert world.node.devices.breaker.state.resets_stopped_reason != ""
        world.gpu(2).reset_missing = "this platform has none"
        await struck(world, 2)
        await world.until(lambda: 2 in out(world))
        world.gpu(2).xids.clear()
        await world.until(lambda: out(world) == [], within=300.0)
        assert resets(world) == 2


@in_virtual_time
async def test_device_that_waits_for_a_permitted_reset_loses_no_recovery_attempt() -> None:
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.run(WINDOW - 60.0)
        (waiting,) = out(world)
        assert world.record(waiting).failures == 0
        assert world.record(waiting).recovery_attempts == ()


# -- soft signals ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_soft_signals_one_after_another_take_out_no_more_than_the_allowed_share_of_devices() -> None:
    async with a_world(8, FEW) as world:
        for number in range(8):
            overheated(world, number)
            await world.run(60.0)
        await world.run(1_200.0)
        assert out(world) == [0, 1]
        assert all(world.record(number).health is Health.SUSPECT for number in range(2, 8))


@in_virtual_time
async def test_simultaneous_soft_signals_take_out_no_more_than_the_allowed_share_of_devices() -> None:
    """What they share, their cooling or their power, is a person's to mend; half a node of suspects is not an outage."""
    async with a_world(8, FEW) as world:
        overheated(world, *range(8))
        await world.run(1_200.0)
        assert len(out(world)) == 2
        assert sum(world.record(number).health is Health.SUSPECT for number in range(8)) == 6


@in_virtual_time
async def test_a_small_node_may_lose_one_device_to_a_soft_signal() -> None:
    async with a_world(2, FEW) as world:
        overheated(world, 0)
        await world.run(60.0)
        overheated(world, 1)
        await world.run(1_200.0)
        assert out(world) == [0]


@in_virtual_time
async def test_suspect_device_kept_in_service_by_the_breaker_is_granted_on_a_certificate() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0)
        await world.run(60.0)
        overheated(world, 1)
        await world.run(1_200.0)
        assert out(world) == [0]
        await started(world, "acme", "train-0", 1)
        grant = world.record(1).last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_hard_fault_takes_a_device_out_while_soft_signals_are_stopped() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0)
        await world.run(60.0)
        overheated(world, 1, 2)
        await world.run(1_200.0)
        assert out(world) == [0]
        world.gpu(1).xids[79] = 1
        world.signal(1)
        await world.until(lambda: out(world) == [0, 1], within=5.0)


@in_virtual_time
async def test_devices_out_for_hard_faults_do_not_count_towards_the_soft_signal_share() -> None:
    async with a_world(4, FEW) as world:
        world.gpu(3).xids[79] = 1
        world.signal(3)
        overheated(world, 0)
        await world.run(1_200.0)
        assert out(world) == [0, 3]


@in_virtual_time
async def test_device_that_cooled_down_returns_and_frees_its_place_in_the_soft_signal_share() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0)
        await world.run(60.0)
        overheated(world, 1)
        await world.run(1_200.0)
        overheated(world, 0, celsius=40)
        await world.until(lambda: 0 not in out(world), within=600.0)
        await world.until(lambda: out(world) == [1], within=60.0)


@in_virtual_time
async def test_service_restart_does_not_close_the_breaker_for_soft_signals() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0)
        await world.run(60.0)
        overheated(world, 1, 2)
        await world.run(1_200.0)
        world.kill()
        await world.start_service()
        await world.run(1_200.0)
        assert out(world) == [0]


# -- being told --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_breaker_logs_once_when_resets_stop_and_once_when_resets_resume() -> None:
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.run(300.0)
        (opened,) = told(world, "breaker.opened", "resets")
        assert "policy allows 2" in str(opened.fields["message"])
        assert told(world, "breaker.closed", "resets") == []
        await world.run(WINDOW)
        assert len(told(world, "breaker.opened", "resets")) == 1
        (closed,) = told(world, "breaker.closed", "resets")
        assert closed.at > opened.at
        assert world.node.service_view().breaker.resets_stopped_reason == ""


@in_virtual_time
async def test_reached_limit_is_not_logged_until_the_breaker_withholds_an_action() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1)
        overheated(world, 3)
        await world.run(700.0)
        assert world.node.devices.breaker.state.resets_stopped_reason != ""
        assert world.node.devices.breaker.state.soft_signals_stopped_reason != ""
        assert told(world, "breaker.opened", "resets") == told(world, "breaker.opened", "soft-quarantines") == []
        assert world.node.service_view().breaker == BreakerState()


@in_virtual_time
async def test_breaker_logs_once_when_soft_signals_stop_counting_and_once_when_they_count_again() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0, 1)
        await world.run(1_200.0)
        (opened,) = told(world, "breaker.opened", "soft-quarantines")
        assert "1 of 4 devices" in str(opened.fields["message"])
        overheated(world, 0, 1, celsius=40)
        await world.until(lambda: out(world) == [], within=600.0)
        await world.run(10.0)
        assert len(told(world, "breaker.opened", "soft-quarantines")) == 1
        assert len(told(world, "breaker.closed", "soft-quarantines")) == 1
        assert told(world, "breaker.opened", "resets") == []


@in_virtual_time
async def test_breaker_logs_nothing_on_a_healthy_node() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0)
        await world.run(600.0)
        assert [event for event in world.vault.events if event.name.startswith("breaker.")] == []


@in_virtual_time
async def test_full_ledger_does_not_stop_the_breaker_from_logging_or_the_service_from_running() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.until(lambda: resets(world) == 2)
        world.vault.refuses = "no space left"
        await world.run(20.0)
        assert world.journal is not None
        assert [event.fields["breaker"] for event in world.journal.events if event.name == "breaker.opened"] == [
            "resets"
        ]
        world.vault.refuses = None
        await world.until(lambda: out(world) == [], within=2 * WINDOW)
        assert world.serving


@pytest.mark.parametrize("number", range(4))
def test_requested_scrub_passes_in_any_order_of_faults_during_a_storm(number: int) -> None:
    """The same storm, with the pod on each device in turn: its memory is proved clean whatever its neighbours need."""

    @in_virtual_time
    async def play() -> None:
        async with a_world(4, FEW) as world:
            tenant = await started(world, "acme", "train-0", number)
            await struck(world, *(other for other in range(4) if other != number))
            await world.run(60.0)
            world.kubelet.delete(tenant)
            await world.until(lambda: world.record(number).hygiene is Hygiene.CLEAN, within=10.0)
            last = max(
                world.vault.scrubs.values(), key=lambda scrub: (scrub.device == world.gpu(number).id, scrub.started)
            )
            assert (last.path, last.outcome) == (PathKind.SLOW, Outcome.PASSED)
            assert any((step.step, step.verdict) == (Step.MEMORY, Verdict.PASSED) for step in last.steps)

    play()


@in_virtual_time
async def test_breaker_state_is_derived_from_the_recovery_attempts_on_the_device_records() -> None:
    """It has no memory of its own: whoever reads the ledger can work out what it said."""
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1)
        await world.until(lambda: out(world) == [])
        attempts = [attempt for number in range(3) for attempt in world.record(number).recovery_attempts]
        assert sorted(attempt.at for attempt in attempts) == reset_times(world)
        assert all(attempt.reset for attempt in attempts)
        assert world.node.devices.breaker.state.resets_stopped_until == reset_times(world)[0] + WINDOW
