"""The node's breaker at work: a storm costs the node a few resets and a few devices, and nobody else his hand-over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.basis import Basis
from scrubber.domain.breaker import Breaker
from scrubber.domain.evidence import Occasion, Outcome, Path, Step, Verdict
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import BreakerRule
from scrubber.ports.record import Event
from tests.world.asking import started
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

WINDOW = 900.0
FEW = replace(DEFAULT, breaker=BreakerRule(resets=2, window=WINDOW, soft_percent=25))
NONE = replace(DEFAULT, breaker=BreakerRule(resets=0, window=WINDOW))
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
        if scrub.occasion is Occasion.RECOVERY and any(step.step is Step.RESET for step in scrub.steps)
    )


def most_within(times: list[float], window: float) -> int:
    return max((sum(start <= each < start + window for each in times) for start in times), default=0)


def out(world: World) -> list[int]:
    """Numbers of the devices that the kubelet is told to hand to nobody."""
    return [number for number, view in enumerate(world.node.view().devices) if not view.offered]


def told(world: World, name: str, what: str) -> list[Event]:
    """What the audit has of the breaker."""
    return [event for event in world.vault.events if event.name == name and event.fields["what"] == what]


def overheated(world: World, *numbers: int, celsius: int = HOT) -> None:
    for number in numbers:
        world.gpu(number).celsius = celsius


# -- resets ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_breaker_stops_resets_and_never_a_scrub() -> None:
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
        assert world.node.info().breaker.resets != ""
        before = world.clock.monotonic()
        tenant = await world.admit("acme", "train-0", (3,))
        assert tenant is not None
        await world.until(lambda: tenant.running)
        assert world.clock.monotonic() - before < 1.0
        assert tenant.refusals == []


@in_virtual_time
async def test_what_waits_is_reset_once_the_window_is_over_and_never_more_within_one() -> None:
    async with a_world(5, FEW) as world:
        await struck(world, 0, 1, 2, 3, 4)
        await world.until(lambda: out(world) == [], within=3 * WINDOW)
        times = reset_times(world)
        assert len(times) == resets(world) == 5
        assert most_within(times, WINDOW) == 2
        assert times[-1] - times[0] < 2 * WINDOW + 90.0  # nobody waits for a window that is over


@in_virtual_time
async def test_a_restart_of_the_service_does_not_close_it() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2, 3)
        await world.run(120.0)
        for _ in range(3):
            world.kill()
            await world.start_service()
            assert world.node.info().breaker.resets != ""
            await world.run(60.0)
        assert resets(world) == 2
        await world.until(lambda: out(world) == [], within=2 * WINDOW)
        assert most_within(reset_times(world), WINDOW) == 2


@in_virtual_time
async def test_nor_does_a_reboot_of_the_node() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2, 3)
        await world.run(120.0)
        world.reboot()
        await world.start_service()
        await world.run(120.0)
        assert resets(world) == 2


@in_virtual_time
async def test_recoveries_that_begin_at_the_same_moment_do_not_overshoot() -> None:
    one = replace(FEW, breaker=BreakerRule(resets=1, window=WINDOW))
    async with a_world(8, one) as world:
        await struck(world, *range(8))
        await world.run(WINDOW - 60.0)
        assert resets(world) == 1
        assert len(out(world)) == 7


@in_virtual_time
async def test_one_device_that_fails_again_and_again_takes_no_more_than_the_nodes_share_of_resets() -> None:
    async with a_world(2, FEW) as world:
        world.gpu().reset_fails = "the reset did not take"
        await struck(world, 0)
        await world.run(WINDOW - 60.0)
        assert len(reset_times(world)) == 2
        assert world.record().health is Health.QUARANTINED
        assert out(world) == [0]


@in_virtual_time
async def test_where_none_is_allowed_none_is_made_and_what_needs_none_comes_back() -> None:
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
async def test_a_policy_that_allows_more_is_heard_while_devices_wait() -> None:
    async with a_world(2, NONE) as world:
        await struck(world, 0)
        await world.run(60.0)
        world.policy = FEW
        await world.until(lambda: out(world) == [], within=90.0)


@in_virtual_time
async def test_a_recovery_without_a_reset_is_no_reset() -> None:
    """Where the platform has none (an instance of a MIG GPU, say) a recovery is a scrub, and nothing else is counted."""
    async with a_world(1, FEW) as world:
        world.gpu().reset_missing = "this platform has none"
        await struck(world, 0)
        await world.until(lambda: world.record().failures > 0)
        assert resets(world) == 0
        assert [attempt.reset for attempt in world.record().attempts] == [False] * len(world.record().attempts)
        assert world.node.info().breaker.resets == ""


@in_virtual_time
async def test_the_breaker_does_not_stop_a_recovery_that_makes_no_reset() -> None:
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1)
        await world.until(lambda: resets(world) == 2)
        assert world.node.devices.breaker.state.resets != ""
        world.gpu(2).reset_missing = "this platform has none"
        await struck(world, 2)
        await world.until(lambda: 2 in out(world))
        world.gpu(2).xids.clear()
        await world.until(lambda: out(world) == [], within=300.0)
        assert resets(world) == 2


@in_virtual_time
async def test_a_device_whose_reset_was_not_allowed_has_lost_no_attempt_by_waiting() -> None:
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.run(WINDOW - 60.0)
        (waiting,) = out(world)
        assert world.record(waiting).failures == 0
        assert world.record(waiting).attempts == ()


# -- soft signals ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_no_more_than_the_share_goes_out_for_soft_signals_one_after_the_other() -> None:
    async with a_world(8, FEW) as world:
        for number in range(8):
            overheated(world, number)
            await world.run(60.0)
        await world.run(1_200.0)
        assert out(world) == [0, 1]
        assert all(world.record(number).health is Health.SUSPECT for number in range(2, 8))


@in_virtual_time
async def test_no_more_than_the_share_goes_out_for_soft_signals_however_many_turn_hot_at_once() -> None:
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
async def test_suspects_that_stay_in_are_handed_over_on_certificates() -> None:
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
async def test_a_hard_fault_still_takes_one_out() -> None:
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
async def test_what_is_out_for_a_hard_fault_leaves_the_share_to_soft_signals() -> None:
    async with a_world(4, FEW) as world:
        world.gpu(3).xids[79] = 1
        world.signal(3)
        overheated(world, 0)
        await world.run(1_200.0)
        assert out(world) == [0, 3]


@in_virtual_time
async def test_one_that_has_cooled_down_comes_back_and_makes_room() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0)
        await world.run(60.0)
        overheated(world, 1)
        await world.run(1_200.0)
        overheated(world, 0, celsius=40)
        await world.until(lambda: 0 not in out(world), within=600.0)
        await world.until(lambda: out(world) == [1], within=60.0)


@in_virtual_time
async def test_a_restart_does_not_close_it_for_soft_signals_either() -> None:
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
async def test_it_is_told_once_when_resets_stop_and_once_when_they_go_on() -> None:
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.run(300.0)
        (opened,) = told(world, "breaker.opened", "resets")
        assert "policy allows 2" in str(opened.fields["sentence"])
        assert told(world, "breaker.closed", "resets") == []
        await world.run(WINDOW)
        assert len(told(world, "breaker.opened", "resets")) == 1
        (closed,) = told(world, "breaker.closed", "resets")
        assert closed.at > opened.at
        assert world.node.info().breaker.resets == ""


@in_virtual_time
async def test_that_a_limit_is_reached_is_told_only_once_it_keeps_somebody_from_something() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1)
        overheated(world, 3)
        await world.run(700.0)
        assert world.node.devices.breaker.state.resets != ""
        assert world.node.devices.breaker.state.soft != ""
        assert told(world, "breaker.opened", "resets") == told(world, "breaker.opened", "soft") == []
        assert world.node.info().breaker == Breaker()


@in_virtual_time
async def test_and_once_when_soft_signals_stop_counting_and_once_when_they_count_again() -> None:
    async with a_world(4, FEW) as world:
        overheated(world, 0, 1)
        await world.run(1_200.0)
        (opened,) = told(world, "breaker.opened", "soft")
        assert "1 of 4 devices" in str(opened.fields["sentence"])
        overheated(world, 0, 1, celsius=40)
        await world.until(lambda: out(world) == [], within=600.0)
        await world.run(10.0)
        assert len(told(world, "breaker.opened", "soft")) == 1
        assert len(told(world, "breaker.closed", "soft")) == 1
        assert told(world, "breaker.opened", "resets") == []


@in_virtual_time
async def test_a_node_that_is_well_is_told_of_nothing() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0)
        await world.run(600.0)
        assert [event for event in world.vault.events if event.name.startswith("breaker.")] == []


@in_virtual_time
async def test_a_ledger_that_is_full_keeps_nobody_from_telling_and_ends_nothing() -> None:
    async with a_world(4, FEW) as world:
        await struck(world, 0, 1, 2)
        await world.until(lambda: resets(world) == 2)
        world.vault.refuses = "no space left"
        await world.run(20.0)
        assert world.journal is not None
        assert [event.fields["what"] for event in world.journal.events if event.name == "breaker.opened"] == ["resets"]
        world.vault.refuses = None
        await world.until(lambda: out(world) == [], within=2 * WINDOW)
        assert world.serving


@pytest.mark.parametrize("number", range(4))
def test_whatever_the_order_a_scrub_that_is_wanted_passes(number: int) -> None:
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
            assert (last.path, last.outcome) == (Path.SLOW, Outcome.PASSED)
            assert any((step.step, step.verdict) == (Step.MEMORY, Verdict.PASSED) for step in last.steps)

    play()


@in_virtual_time
async def test_what_it_counts_is_on_the_records_of_the_devices() -> None:
    """It has no memory of its own: whoever reads the ledger can work out what it said."""
    async with a_world(3, FEW) as world:
        await struck(world, 0, 1)
        await world.until(lambda: out(world) == [])
        attempts = [attempt for number in range(3) for attempt in world.record(number).attempts]
        assert sorted(attempt.at for attempt in attempts) == reset_times(world)
        assert all(attempt.reset for attempt in attempts)
        assert world.node.devices.breaker.state.resets_until == reset_times(world)[0] + WINDOW
