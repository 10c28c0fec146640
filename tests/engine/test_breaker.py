"""The node's breaker at work: a storm costs the node a few resets and a few devices, and no other hand-over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger, Step, Verdict
from scrubber.domain.handover_kind import Basis
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.policy import BreakerRule
from scrubber.domain.states import Health, Hygiene
from scrubber.ports.record import Event
from tests.simulation.cluster import DEFAULT, SimulatedCluster, leisurely_cluster
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

WINDOW = 900.0
FEW = replace(DEFAULT, breaker=BreakerRule(max_resets=2, window=WINDOW, max_soft_percent=25))
NONE = replace(DEFAULT, breaker=BreakerRule(max_resets=0, window=WINDOW))
HOT = 120


async def struck(cluster: SimulatedCluster, *numbers: int) -> None:
    """These devices report what only a reset lifts, and it was seen."""
    for number in numbers:
        cluster.gpu(number).xids[95] = 1
        cluster.signal(number)
    await cluster.until(lambda: all(not cluster.record(number).advertised for number in numbers), within=5.0)


def resets(cluster: SimulatedCluster) -> int:
    return sum(gpu.resets for gpu in cluster.process_table.gpus.values())


def reset_times(cluster: SimulatedCluster) -> list[float]:
    """When recoveries began that made a reset, by what was recorded of each scrub."""
    return sorted(
        scrub.started
        for scrub in cluster.ledger_store.scrubs.values()
        if scrub.trigger is ScrubTrigger.RECOVERY and any(step.step is Step.RESET for step in scrub.steps)
    )


def most_within(times: list[float], window: float) -> int:
    return max((sum(start <= each < start + window for each in times) for start in times), default=0)


def out(cluster: SimulatedCluster) -> list[int]:
    """Numbers of the devices that are not advertised to the kubelet."""
    return [number for number, view in enumerate(cluster.node.view().devices) if not view.advertised]


def breaker_events(cluster: SimulatedCluster, name: str, what: str) -> list[Event]:
    """What the audit has of the breaker."""
    return [event for event in cluster.ledger_store.events if event.name == name and event.fields["breaker"] == what]


def overheated(cluster: SimulatedCluster, *numbers: int, celsius: int = HOT) -> None:
    for number in numbers:
        cluster.gpu(number).celsius = celsius


# -- resets ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_open_breaker_stops_resets_but_not_scrubs_leftover_cleanup_or_hand_overs() -> None:
    """Nor the ending of what a pod left behind, nor a hand-over; and it lets no device in."""
    async with leisurely_cluster(6, FEW) as cluster:
        await struck(cluster, 0, 1, 2, 3)
        await cluster.run(120.0)
        assert resets(cluster) == 2
        stopped = [number for number in range(4) if cluster.gpu(number).resets == 0]
        assert out(cluster) == stopped
        assert all(cluster.record(number).health is Health.QUARANTINED for number in stopped)
        back = next(number for number in range(4) if number not in stopped)
        assert cluster.record(back).state == "clean"

        # A pod runs on a healthy device: it is handed over, its leftovers are killed, its bytes are cleared.
        tenant = await started(cluster, "acme", "train-0", 4)
        await cluster.run(3.0)
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record(4).hygiene is Hygiene.CLEAN)
        assert not child.alive
        assert cluster.gpu(4).cells == [""] * 4

        # An operator may scrub one that waits for its reset: its bytes are cleared, and it stays out.
        assert cluster.service is not None
        before = cluster.erasers.started
        updates = await cluster.service.scrub(cluster.gpu(stopped[0]).id)
        assert updates[-1].finished is not None
        assert updates[-1].finished.outcome in (Outcome.PASSED, Outcome.FAILED)
        assert cluster.erasers.started == before + 1
        assert cluster.record(stopped[0]).health is Health.QUARANTINED
        assert resets(cluster) == 2


@in_virtual_time
async def test_a_clean_device_is_handed_over_at_once_while_the_breaker_is_open() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        await struck(cluster, 0, 1, 2)
        await cluster.run(120.0)
        assert cluster.node.service_view().breaker.resets_stopped_reason != ""
        before = cluster.clock.monotonic()
        tenant = await cluster.admit("acme", "train-0", (3,))
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        assert cluster.clock.monotonic() - before < 1.0
        assert tenant.refusals == []


@in_virtual_time
async def test_waiting_devices_are_reset_after_the_window_and_no_window_exceeds_the_limit() -> None:
    async with leisurely_cluster(5, FEW) as cluster:
        await struck(cluster, 0, 1, 2, 3, 4)
        await cluster.until(lambda: out(cluster) == [], within=3 * WINDOW)
        times = reset_times(cluster)
        assert len(times) == resets(cluster) == 5
        assert most_within(times, WINDOW) == 2
        assert times[-1] - times[0] < 2 * WINDOW + 90.0  # nothing waits for a window that is over


@in_virtual_time
async def test_service_restart_does_not_close_the_breaker() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        await struck(cluster, 0, 1, 2, 3)
        await cluster.run(120.0)
        for _ in range(3):
            cluster.kill()
            await cluster.start_service()
            assert cluster.node.service_view().breaker.resets_stopped_reason != ""
            await cluster.run(60.0)
        assert resets(cluster) == 2
        await cluster.until(lambda: out(cluster) == [], within=2 * WINDOW)
        assert most_within(reset_times(cluster), WINDOW) == 2


@in_virtual_time
async def test_node_reboot_does_not_close_the_breaker() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        await struck(cluster, 0, 1, 2, 3)
        await cluster.run(120.0)
        cluster.reboot()
        await cluster.start_service()
        await cluster.run(120.0)
        assert resets(cluster) == 2


@in_virtual_time
async def test_recoveries_that_start_at_the_same_moment_do_not_exceed_the_reset_limit() -> None:
    one = replace(FEW, breaker=BreakerRule(max_resets=1, window=WINDOW))
    async with leisurely_cluster(8, one) as cluster:
        await struck(cluster, *range(8))
        await cluster.run(WINDOW - 60.0)
        assert resets(cluster) == 1
        assert len(out(cluster)) == 7


@in_virtual_time
async def test_one_device_that_fails_repeatedly_does_not_exceed_the_nodes_reset_limit() -> None:
    async with leisurely_cluster(2, FEW) as cluster:
        cluster.gpu().reset_fails = "the reset did not take"
        await struck(cluster, 0)
        await cluster.run(WINDOW - 60.0)
        assert len(reset_times(cluster)) == 2
        assert cluster.record().health is Health.QUARANTINED
        assert out(cluster) == [0]


@in_virtual_time
async def test_policy_without_resets_makes_none_and_a_device_that_needs_no_reset_returns() -> None:
    async with leisurely_cluster(2, NONE) as cluster:
        await struck(cluster, 0)
        cluster.gpu(1).stuck = True
        await cluster.until(lambda: out(cluster) == [0, 1])
        cluster.gpu(1).stuck = False
        await cluster.until(lambda: out(cluster) == [0])
        await cluster.run(2 * WINDOW)
        assert resets(cluster) == 0
        assert out(cluster) == [0]


@in_virtual_time
async def test_policy_that_raises_the_reset_limit_applies_to_devices_that_already_wait() -> None:
    async with leisurely_cluster(2, NONE) as cluster:
        await struck(cluster, 0)
        await cluster.run(60.0)
        cluster.policy = FEW
        await cluster.until(lambda: out(cluster) == [], within=90.0)


@in_virtual_time
async def test_recovery_without_a_reset_does_not_count_as_a_reset() -> None:
    """Without resets (of an instance of a MIG GPU, for example) a recovery is a scrub, and nothing else is counted."""
    async with leisurely_cluster(1, FEW) as cluster:
        cluster.gpu().reset_missing = "this platform has none"
        await struck(cluster, 0)
        await cluster.until(lambda: cluster.record().failures > 0)
        assert resets(cluster) == 0
        assert [attempt.reset for attempt in cluster.record().recovery_attempts] == [False] * len(
            cluster.record().recovery_attempts
        )
        assert cluster.node.service_view().breaker.resets_stopped_reason == ""


@in_virtual_time
async def test_open_breaker_does_not_stop_a_recovery_that_needs_no_reset() -> None:
    async with leisurely_cluster(3, FEW) as cluster:
        await struck(cluster, 0, 1)
        await cluster.until(lambda: resets(cluster) == 2)
        assert cluster.node.devices.breaker.state.resets_stopped_reason != ""
        cluster.gpu(2).reset_missing = "this platform has none"
        await struck(cluster, 2)
        await cluster.until(lambda: 2 in out(cluster))
        cluster.gpu(2).xids.clear()
        await cluster.until(lambda: out(cluster) == [], within=300.0)
        assert resets(cluster) == 2


@in_virtual_time
async def test_device_that_waits_for_a_permitted_reset_loses_no_recovery_attempt() -> None:
    async with leisurely_cluster(3, FEW) as cluster:
        await struck(cluster, 0, 1, 2)
        await cluster.run(WINDOW - 60.0)
        (waiting,) = out(cluster)
        assert cluster.record(waiting).failures == 0
        assert cluster.record(waiting).recovery_attempts == ()


# -- soft signals ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_soft_signals_one_after_another_take_out_no_more_than_the_allowed_share_of_devices() -> None:
    async with leisurely_cluster(8, FEW) as cluster:
        for number in range(8):
            overheated(cluster, number)
            await cluster.run(60.0)
        await cluster.run(1_200.0)
        assert out(cluster) == [0, 1]
        assert all(cluster.record(number).health is Health.SUSPECT for number in range(2, 8))


@in_virtual_time
async def test_simultaneous_soft_signals_take_out_no_more_than_the_allowed_share_of_devices() -> None:
    """A shared cause, cooling or power, is for an operator to repair; half a node of suspects is not an outage."""
    async with leisurely_cluster(8, FEW) as cluster:
        overheated(cluster, *range(8))
        await cluster.run(1_200.0)
        assert len(out(cluster)) == 2
        assert sum(cluster.record(number).health is Health.SUSPECT for number in range(8)) == 6


@in_virtual_time
async def test_a_small_node_may_lose_one_device_to_a_soft_signal() -> None:
    async with leisurely_cluster(2, FEW) as cluster:
        overheated(cluster, 0)
        await cluster.run(60.0)
        overheated(cluster, 1)
        await cluster.run(1_200.0)
        assert out(cluster) == [0]


@in_virtual_time
async def test_suspect_device_kept_in_service_by_the_breaker_is_granted_on_a_certificate() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        overheated(cluster, 0)
        await cluster.run(60.0)
        overheated(cluster, 1)
        await cluster.run(1_200.0)
        assert out(cluster) == [0]
        await started(cluster, "acme", "train-0", 1)
        grant = cluster.record(1).last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_hard_fault_takes_a_device_out_while_soft_signals_are_stopped() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        overheated(cluster, 0)
        await cluster.run(60.0)
        overheated(cluster, 1, 2)
        await cluster.run(1_200.0)
        assert out(cluster) == [0]
        cluster.gpu(1).xids[79] = 1
        cluster.signal(1)
        await cluster.until(lambda: out(cluster) == [0, 1], within=5.0)


@in_virtual_time
async def test_devices_out_for_hard_faults_do_not_count_towards_the_soft_signal_share() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        cluster.gpu(3).xids[79] = 1
        cluster.signal(3)
        overheated(cluster, 0)
        await cluster.run(1_200.0)
        assert out(cluster) == [0, 3]


@in_virtual_time
async def test_device_that_cooled_down_returns_and_frees_its_place_in_the_soft_signal_share() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        overheated(cluster, 0)
        await cluster.run(60.0)
        overheated(cluster, 1)
        await cluster.run(1_200.0)
        overheated(cluster, 0, celsius=40)
        await cluster.until(lambda: 0 not in out(cluster), within=600.0)
        await cluster.until(lambda: out(cluster) == [1], within=60.0)


@in_virtual_time
async def test_service_restart_does_not_close_the_breaker_for_soft_signals() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        overheated(cluster, 0)
        await cluster.run(60.0)
        overheated(cluster, 1, 2)
        await cluster.run(1_200.0)
        cluster.kill()
        await cluster.start_service()
        await cluster.run(1_200.0)
        assert out(cluster) == [0]


# -- reporting ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_breaker_logs_once_when_resets_stop_and_once_when_resets_resume() -> None:
    async with leisurely_cluster(3, FEW) as cluster:
        await struck(cluster, 0, 1, 2)
        await cluster.run(300.0)
        (opened,) = breaker_events(cluster, "breaker.opened", "resets")
        assert "policy allows 2" in str(opened.fields["message"])
        assert breaker_events(cluster, "breaker.closed", "resets") == []
        await cluster.run(WINDOW)
        assert len(breaker_events(cluster, "breaker.opened", "resets")) == 1
        (closed,) = breaker_events(cluster, "breaker.closed", "resets")
        assert closed.at > opened.at
        assert cluster.node.service_view().breaker.resets_stopped_reason == ""


@in_virtual_time
async def test_reached_limit_is_not_logged_until_the_breaker_withholds_an_action() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        await struck(cluster, 0, 1)
        overheated(cluster, 3)
        await cluster.run(700.0)
        assert cluster.node.devices.breaker.state.resets_stopped_reason != ""
        assert cluster.node.devices.breaker.state.soft_signals_stopped_reason != ""
        assert (
            breaker_events(cluster, "breaker.opened", "resets")
            == breaker_events(cluster, "breaker.opened", "soft-quarantines")
            == []
        )
        assert cluster.node.service_view().breaker == BreakerState()


@in_virtual_time
async def test_breaker_logs_once_when_soft_signals_stop_counting_and_once_when_they_count_again() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        overheated(cluster, 0, 1)
        await cluster.run(1_200.0)
        (opened,) = breaker_events(cluster, "breaker.opened", "soft-quarantines")
        assert "1 of 4 devices" in str(opened.fields["message"])
        overheated(cluster, 0, 1, celsius=40)
        await cluster.until(lambda: out(cluster) == [], within=600.0)
        await cluster.run(10.0)
        assert len(breaker_events(cluster, "breaker.opened", "soft-quarantines")) == 1
        assert len(breaker_events(cluster, "breaker.closed", "soft-quarantines")) == 1
        assert breaker_events(cluster, "breaker.opened", "resets") == []


@in_virtual_time
async def test_breaker_logs_nothing_on_a_healthy_node() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        await struck(cluster, 0)
        await cluster.run(600.0)
        assert [event for event in cluster.ledger_store.events if event.name.startswith("breaker.")] == []


@in_virtual_time
async def test_full_ledger_does_not_stop_the_breaker_from_logging_or_the_service_from_running() -> None:
    async with leisurely_cluster(4, FEW) as cluster:
        await struck(cluster, 0, 1, 2)
        await cluster.until(lambda: resets(cluster) == 2)
        cluster.ledger_store.refuses = "no space left"
        await cluster.run(20.0)
        assert cluster.journal is not None
        assert [event.fields["breaker"] for event in cluster.journal.events if event.name == "breaker.opened"] == [
            "resets"
        ]
        cluster.ledger_store.refuses = None
        await cluster.until(lambda: out(cluster) == [], within=2 * WINDOW)
        assert cluster.serving


@pytest.mark.parametrize("number", range(4))
def test_requested_scrub_passes_in_any_order_of_faults_during_a_storm(number: int) -> None:
    """The same storm, with the pod on each device in turn: its memory is proved clean, whichever neighbours need a reset."""

    @in_virtual_time
    async def play() -> None:
        async with leisurely_cluster(4, FEW) as cluster:
            tenant = await started(cluster, "acme", "train-0", number)
            await struck(cluster, *(other for other in range(4) if other != number))
            await cluster.run(60.0)
            cluster.kubelet.delete(tenant)
            await cluster.until(lambda: cluster.record(number).hygiene is Hygiene.CLEAN, within=10.0)
            last = max(
                cluster.ledger_store.scrubs.values(),
                key=lambda scrub: (scrub.device == cluster.gpu(number).id, scrub.started),
            )
            assert (last.path, last.outcome) == (PathKind.SLOW, Outcome.PASSED)
            assert any((step.step, step.verdict) == (Step.MEMORY, Verdict.PASSED) for step in last.steps)

    play()


@in_virtual_time
async def test_breaker_state_is_derived_from_the_recovery_attempts_on_the_device_records() -> None:
    """The breaker has no state of its own: a reader of the ledger can derive its decisions."""
    async with leisurely_cluster(3, FEW) as cluster:
        await struck(cluster, 0, 1)
        await cluster.until(lambda: out(cluster) == [])
        attempts = [attempt for number in range(3) for attempt in cluster.record(number).recovery_attempts]
        assert sorted(attempt.at for attempt in attempts) == reset_times(cluster)
        assert all(attempt.reset for attempt in attempts)
        assert cluster.node.devices.breaker.state.resets_stopped_until == reset_times(cluster)[0] + WINDOW
