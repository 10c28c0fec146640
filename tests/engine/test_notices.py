"""What owners of pods are told: a start that is refused again and again, and a device that went out of service in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, HealthRule, Limits, News, StuckRule
from scrubber.engine.notices import Refusals
from scrubber.engine.views import HandOverCall, PodNotice
from tests.world.asking import ask, started
from tests.world.kubelet import Tenant
from tests.world.sharing import a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

TELL = replace(DEFAULT, stuck=StuckRule(tell_after=60.0))
PATIENT = replace(TELL, limits=replace(Limits(), dying_grace=5_000.0))
EVICT = replace(DEFAULT, stuck=StuckRule(tell_after=60.0, evict_after=300.0))


def stuck(world: World) -> list[PodNotice]:
    return [notice for notice in world.node.view().notices if notice.reason == "GpuNotHandedOver"]


def out(world: World) -> list[PodNotice]:
    return [notice for notice in world.node.view().notices if notice.reason == "GpuOutOfService"]


async def waiting(world: World, *devices: int, lives_on: float = 10_000.0) -> tuple[Tenant, Tenant]:
    """A pod that is gone and whose process lives on, and one that waits for its devices."""
    first = await started(world, "acme-secret", "steal-0", *devices)
    world.kubelet.force_delete(first, lives_on)
    second = await world.admit("umbrella", "serve-0", devices or (0,))
    assert second is not None
    await world.until(lambda: bool(second.refusals))
    return first, second


# -- starts that are refused -------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_pod_that_is_refused_for_long_is_told_of_with_its_device_and_why() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world)
        assert stuck(world) == []
        began = world.clock.wall()
        await world.until(lambda: bool(stuck(world)), within=200.0)
        assert world.clock.wall() - began >= 59.0
        (notice,) = stuck(world)
        assert (notice.pod, notice.devices) == (second.pod, (world.gpu().id,))
        assert world.gpu().id in notice.sentence
        assert notice.sentence == second.refusals[-1].public
        assert notice.since <= began
        assert not notice.evict


@in_virtual_time
async def test_it_reads_of_no_other_tenant() -> None:
    async with a_world(1, PATIENT) as world:
        first, _ = await waiting(world)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        (notice,) = stuck(world)
        for word in (first.pod.namespace, first.pod.name, first.uid, "PID", "python"):
            assert word not in notice.sentence


@in_virtual_time
async def test_one_that_is_refused_for_a_quarantine_reads_the_state_the_cause_and_the_way_back() -> None:
    async with a_world(1, TELL) as world:
        tenant = await world.admit("umbrella", "serve-0", starts=False)
        assert tenant is not None
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        world.kubelet.ask_again(tenant)
        await world.until(lambda: bool(stuck(world)))
        (notice,) = stuck(world)
        assert "quarantined (xid-79)" in notice.sentence
        assert "reboot" in notice.sentence


@in_virtual_time
async def test_what_is_told_is_what_it_was_refused_with_last() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        (before,) = stuck(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: isinstance(second.refusals[-1], Quarantined))
        (after,) = stuck(world)
        assert "xid-79" in after.sentence
        assert after.since == before.since


@in_virtual_time
async def test_a_pod_that_waits_no_longer_than_a_start_may_take_is_told_of_nothing() -> None:
    async with a_world(1, TELL) as world:
        _, second = await waiting(world, lives_on=40.0)
        await world.until(lambda: second.running)
        await world.run(120.0)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_once_it_is_granted_nothing_is_told_of_it_any_more() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world, lives_on=150.0)
        await world.until(lambda: bool(stuck(world)))
        await world.until(lambda: second.running)
        await world.until(lambda: stuck(world) == [], within=2.0)


@in_virtual_time
async def test_a_pod_that_is_gone_is_told_of_no_more() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        world.kubelet.delete(second)
        await world.until(lambda: stuck(world) == [], within=3.0)


@in_virtual_time
async def test_a_pod_of_several_devices_is_told_of_once_with_all_of_them() -> None:
    async with a_world(2, PATIENT) as world:
        _, second = await waiting(world, 0, 1)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        (notice,) = stuck(world)
        assert (notice.pod, notice.devices) == (second.pod, (world.gpu(0).id, world.gpu(1).id))


@in_virtual_time
async def test_where_two_pods_may_be_the_one_nobody_is_told() -> None:
    """A wrong pod must not be evicted, nor read of a device that is not its own."""
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        tenants = [world.kubelet.admit("umbrella", f"serve-{number}", [world.gpu().id]) for number in range(2)]
        await world.run(600.0)
        assert all(tenant.refusals for tenant in tenants)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_nor_where_what_is_asked_for_is_of_two_pods() -> None:
    async with a_world(2, EVICT) as world:
        for number in (0, 1):
            await world.node.actions.quarantine(str(number), "it burns", "uid:0")
            world.kubelet.admit("umbrella", f"serve-{number}", [world.gpu(number).id], starts=False)
        assert world.service is not None
        for _ in range(10):
            with pytest.raises(Quarantined):
                await world.service.hand_over(HandOverCall((world.gpu(0).id, world.gpu(1).id), 1.0))
            await world.run(30.0)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_where_the_kubelet_says_nothing_nobody_is_told() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        world.kubelet.trust = Trust.UNREADABLE
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.run(600.0)
        assert tenant.refusals
        assert world.node.view().notices == ()


@in_virtual_time
async def test_it_is_to_be_evicted_only_where_the_policy_says_so_and_only_then() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        began = world.clock.monotonic()
        world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)))
        assert not stuck(world)[0].evict
        await world.until(lambda: stuck(world)[0].evict, within=400.0)
        assert 299.0 <= world.clock.monotonic() - began < 320.0


@in_virtual_time
async def test_a_kubelet_that_restarts_makes_nobody_forgotten() -> None:
    async with a_world(1, TELL) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)))
        (before,) = stuck(world)
        world.restart_kubelet()
        await world.run(30.0)
        world.kubelet.trust = Trust.TRUSTED
        await world.run(5.0)
        (after,) = stuck(world)
        assert (after.pod, after.since) == (tenant.pod, before.since)


@in_virtual_time
async def test_after_a_restart_of_the_service_it_is_told_anew_when_it_was_refused_anew() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)) and stuck(world)[0].evict, within=400.0)
        world.kill()
        await world.start_service()
        await world.run(30.0)
        assert stuck(world) == []
        await world.until(lambda: bool(stuck(world)))
        assert not stuck(world)[0].evict


# -- a grant that is not seen for what it is ---------------------------------------------------------------------------


@in_virtual_time
async def test_a_pod_that_was_granted_its_device_waits_no_more_even_if_nobody_could_name_it_then() -> None:
    """Else a pod that runs would be told of, and evicted where the policy evicts."""
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)) and stuck(world)[0].evict, within=400.0)
        await world.node.actions.unquarantine("0", "it was the neighbour", "uid:0")
        world.kubelet.trust = Trust.UNREADABLE
        await world.until(lambda: tenant.running)
        await world.run(5.0)
        assert stuck(world) == []
        world.kubelet.trust = Trust.TRUSTED
        await world.run(60.0)
        assert tenant.running
        assert stuck(world) == []


@in_virtual_time
async def test_nor_one_whose_grant_its_caller_did_not_live_to_hear() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)), within=100.0)
        assert tenant.worker is not None
        tenant.worker.cancel()
        await world.node.actions.unquarantine("0", "it was the neighbour", "uid:0")
        await world.until(lambda: world.record().health is Health.HEALTHY)
        call = ask(world, tenant)
        # Its caller goes away in the very moment in which the grant is in the ledger.
        world.vault.granting = call.cancel
        await asyncio.wait({call})
        world.vault.granting = None
        assert call.cancelled()
        assert world.record().hygiene is Hygiene.IN_USE
        await ask(world, tenant)
        await world.run(5.0)
        assert stuck(world) == []


@in_virtual_time
async def test_grants_to_others_on_a_shared_device_do_not_make_a_pod_wait_anew() -> None:
    """Whose pods come and go keeps a device that they share for ever; who waits beside them is the one to be told."""
    async with a_shared_world(1, TELL) as world:
        await world.start("acme", "train-0", world.share(0), writes=False)
        waiting = await world.admit_shares("umbrella", "serve-0", world.share(1), starts=False)
        world.kubelet.ask_again(waiting)
        for number in range(10):
            other = await world.start("acme", f"more-{number}", world.share(2), writes=False)
            await world.run(20.0)
            world.kubelet.delete(other)
            await world.run(5.0)
        assert waiting.refusals
        assert [notice.pod for notice in stuck(world)] == [waiting.pod]


# -- devices that go out of service in use -----------------------------------------------------------------------------


@in_virtual_time
async def test_a_pod_whose_device_goes_out_of_service_is_told() -> None:
    async with a_world(2, TELL) as world:
        tenant = await started(world)
        await started(world, "umbrella", "serve-0", 1)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: bool(out(world)), within=5.0)
        (notice,) = out(world)
        cause = world.record().cause
        assert cause is not None
        assert (notice.pod, notice.devices, notice.since) == (tenant.pod, (world.gpu().id,), cause.since)
        assert "quarantined (xid-79)" in notice.sentence
        assert not notice.evict
        assert stuck(world) == []


@in_virtual_time
async def test_until_it_has_given_the_device_back() -> None:
    async with a_world(1, TELL) as world:
        tenant = await started(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: bool(out(world)), within=5.0)
        world.kubelet.delete(tenant)
        await world.until(lambda: out(world) == [], within=10.0)
        assert not world.record().advertised
        assert world.record().open_grants != (), "what it left was not cleared yet, and that is no more its business"


@in_virtual_time
async def test_of_several_devices_it_is_told_at_once() -> None:
    async with a_world(2, TELL) as world:
        tenant = await started(world, "acme", "train-0", 0, 1)
        for number in (0, 1):
            world.gpu(number).xids[79] = 1
            world.signal(number)
        await world.until(lambda: bool(out(world)) and len(out(world)[0].devices) == 2, within=5.0)
        (notice,) = out(world)
        assert notice.pod == tenant.pod
        assert all(world.gpu(number).id in notice.sentence for number in (0, 1))


@in_virtual_time
async def test_also_where_the_kubelet_hears_of_it_later() -> None:
    async with a_world(1, replace(TELL, health=HealthRule(news=News.AT_RELEASE))) as world:
        await started(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: bool(out(world)), within=5.0)
        assert world.node.view().devices[0].offered


@in_virtual_time
async def test_a_device_that_nobody_has_concerns_no_pod() -> None:
    async with a_world(1, TELL) as world:
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.run(30.0)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_of_an_observed_device_nobody_is_told_that_restarts_are_refused() -> None:
    """They are not."""
    async with a_world(1, replace(TELL, enforcement=Enforcement.OBSERVE)) as world:
        tenant = await started(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        assert not any("is refused" in notice.sentence for notice in out(world))
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)


# -- its memory --------------------------------------------------------------------------------------------------------


class _Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000.0 + self.now

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        raise NotImplementedError

    def patience(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        raise NotImplementedError


REFUSAL = NotReady("Who else has it.", public="Device GPU-0 is dirty. The start is tried again.")


def refused(refusals: Refusals, clock: _Clock, pod: Pod, *at: float) -> None:
    for moment in at:
        clock.now = moment
        refusals.refused([pod], ["GPU-0"], REFUSAL)


def test_of_any_number_of_pods_a_bounded_number_is_remembered_and_the_first_stay() -> None:
    clock = _Clock()
    refusals = Refusals(clock)
    pods = [Pod("acme", f"train-{number}", f"uid-{number}") for number in range(5_000)]
    for moment in (0.0, 100.0):
        clock.now = moment
        for pod in pods:
            refusals.refused([pod], ["GPU-0"], REFUSAL)
    notices = refusals.notices(StuckRule(tell_after=60.0))
    assert len(notices) == 1024
    assert {notice.pod for notice in notices} == set(pods[:1024])


def test_one_that_asks_no_more_is_forgotten_after_the_longest_pause_that_a_kubelet_makes() -> None:
    clock = _Clock()
    refusals, pod = Refusals(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0, 300.0)
    clock.now = 1_190.0
    assert len(refusals.notices(StuckRule())) == 1
    clock.now = 1_210.0
    assert refusals.notices(StuckRule()) == ()
    refusals.settle(Reading(Trust.TRUSTED, (Assignment(pod, "main", frozenset({"GPU-0"})),)))
    refused(refusals, clock, pod, 1_300.0, 1_350.0)
    assert refusals.notices(StuckRule()) == (), "what it waited before counts no more"


def test_the_pause_between_two_refusals_counts_and_the_time_since_the_last_does_not() -> None:
    """Whoever was not refused since may be starting at this moment."""
    clock = _Clock()
    refusals, pod = Refusals(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0)
    clock.now = 500.0
    assert refusals.notices(StuckRule()) == ()
    refused(refusals, clock, pod, 501.0)
    assert len(refusals.notices(StuckRule())) == 1


@pytest.mark.parametrize(
    ("trust", "forgotten"),
    [(Trust.TRUSTED, True), (Trust.EMPTY_AFTER_RESTART, False), (Trust.UNREADABLE, False)],
)
def test_only_a_list_that_can_be_believed_says_that_a_pod_is_gone(trust: Trust, forgotten: bool) -> None:
    clock = _Clock()
    refusals = Refusals(clock)
    refused(refusals, clock, Pod("acme", "train-0", "uid-0"), 0.0, 100.0)
    refusals.settle(Reading(trust))
    assert (refusals.notices(StuckRule()) == ()) is forgotten


def test_a_pod_that_only_the_checkpoint_names_is_there() -> None:
    clock = _Clock()
    refusals, pod = Refusals(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0, 100.0)
    refusals.settle(Reading(Trust.TRUSTED, hinted=(Assignment(pod, "init", frozenset({"GPU-0"})),)))
    assert len(refusals.notices(StuckRule())) == 1


def test_whoever_waits_longest_is_told_of_first() -> None:
    clock = _Clock()
    refusals = Refusals(clock)
    young, old = Pod("acme", "young", "uid-1"), Pod("acme", "old", "uid-2")
    refused(refusals, clock, old, 0.0)
    refused(refusals, clock, young, 50.0, 200.0)
    refused(refusals, clock, old, 210.0)
    assert [notice.pod for notice in refusals.notices(StuckRule())] == [old, young]
