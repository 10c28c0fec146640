"""Notices for pod owners: a start that is refused repeatedly, and a device that was quarantined in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.policy import Enforcement, HealthRule, Limits, QuarantineTiming, StuckPodsRule
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.notices import RefusedStarts
from scrubber.engine.views import HandOverCall, PodNotice
from tests.world.asking import ask, started
from tests.world.kubelet import Tenant
from tests.world.sharing import a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

TELL = replace(DEFAULT, stuck_pods=StuckPodsRule(notify_after=60.0))
PATIENT = replace(TELL, limits=replace(Limits(), leftover_grace_period=5_000.0))
EVICT = replace(DEFAULT, stuck_pods=StuckPodsRule(notify_after=60.0, evict_after=300.0))


def stuck(world: World) -> list[PodNotice]:
    return [notice for notice in world.node.view().notices if notice.reason == "GpuHandOverRefused"]


def out(world: World) -> list[PodNotice]:
    return [notice for notice in world.node.view().notices if notice.reason == "GpuOutOfService"]


async def waiting(world: World, *devices: int, lives_on: float = 10_000.0) -> tuple[Tenant, Tenant]:
    """Return a deleted pod whose process lives on, and one that waits for its devices."""
    first = await started(world, "acme-secret", "steal-0", *devices)
    world.kubelet.force_delete(first, lives_on)
    second = await world.admit("umbrella", "serve-0", devices or (0,))
    assert second is not None
    await world.until(lambda: bool(second.refusals))
    return first, second


# -- refused starts ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_refused_for_long_gets_a_notice_with_its_device_and_the_reason() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world)
        assert stuck(world) == []
        began = world.clock.wall()
        await world.until(lambda: bool(stuck(world)), within=200.0)
        assert world.clock.wall() - began >= 59.0
        (notice,) = stuck(world)
        assert (notice.pod, notice.devices) == (second.pod, (world.gpu().id,))
        assert world.gpu().id in notice.message
        assert notice.message == second.refusals[-1].public_message
        assert notice.since <= began
        assert not notice.evict


@in_virtual_time
async def test_notice_for_a_refused_pod_names_no_other_tenant() -> None:
    async with a_world(1, PATIENT) as world:
        first, _ = await waiting(world)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        (notice,) = stuck(world)
        for word in (first.pod.namespace, first.pod.name, first.uid, "PID", "python"):
            assert word not in notice.message


@in_virtual_time
async def test_notice_for_a_pod_refused_for_a_quarantine_names_state_cause_and_way_back() -> None:
    async with a_world(1, TELL) as world:
        tenant = await world.admit("umbrella", "serve-0", starts=False)
        assert tenant is not None
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        world.kubelet.ask_again(tenant)
        await world.until(lambda: bool(stuck(world)))
        (notice,) = stuck(world)
        assert "quarantined (xid-79)" in notice.message
        assert "reboot" in notice.message


@in_virtual_time
async def test_notice_carries_the_message_of_the_last_refusal() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        (before,) = stuck(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: isinstance(second.refusals[-1], Quarantined))
        (after,) = stuck(world)
        assert "xid-79" in after.message
        assert after.since == before.since


@in_virtual_time
async def test_pod_that_waits_within_the_allowed_time_gets_no_notice() -> None:
    async with a_world(1, TELL) as world:
        _, second = await waiting(world, lives_on=40.0)
        await world.until(lambda: second.running)
        await world.run(120.0)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_notice_is_withdrawn_once_the_pod_is_granted_its_device() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world, lives_on=150.0)
        await world.until(lambda: bool(stuck(world)))
        await world.until(lambda: second.running)
        await world.until(lambda: stuck(world) == [], within=2.0)


@in_virtual_time
async def test_notice_is_withdrawn_once_the_pod_is_gone() -> None:
    async with a_world(1, PATIENT) as world:
        _, second = await waiting(world)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        world.kubelet.delete(second)
        await world.until(lambda: stuck(world) == [], within=3.0)


@in_virtual_time
async def test_pod_with_several_devices_gets_one_notice_that_names_all_of_them() -> None:
    async with a_world(2, PATIENT) as world:
        _, second = await waiting(world, 0, 1)
        await world.until(lambda: bool(stuck(world)), within=200.0)
        (notice,) = stuck(world)
        assert (notice.pod, notice.devices) == (second.pod, (world.gpu(0).id, world.gpu(1).id))


@in_virtual_time
async def test_no_notice_is_published_while_two_pods_may_be_the_refused_one() -> None:
    """The wrong pod must not be evicted, nor be informed about another pod's device."""
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        tenants = [world.kubelet.admit("umbrella", f"serve-{number}", [world.gpu().id]) for number in range(2)]
        await world.run(600.0)
        assert all(tenant.refusals for tenant in tenants)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_no_notice_is_published_for_a_request_for_devices_of_two_pods() -> None:
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
async def test_no_notice_is_published_while_the_kubelets_list_cannot_be_read() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        world.kubelet.trust = Trust.UNREADABLE
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.run(600.0)
        assert tenant.refusals
        assert world.node.view().notices == ()


@in_virtual_time
async def test_notice_requests_an_eviction_only_after_the_time_that_the_policy_sets() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        began = world.clock.monotonic()
        world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)))
        assert not stuck(world)[0].evict
        await world.until(lambda: stuck(world)[0].evict, within=400.0)
        assert 299.0 <= world.clock.monotonic() - began < 320.0


@in_virtual_time
async def test_kubelet_restart_does_not_withdraw_the_notice_of_a_waiting_pod() -> None:
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
async def test_service_restart_withdraws_notices_until_the_pod_is_refused_for_long_again() -> None:
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


# -- a grant that was not recognized -----------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_granted_its_device_while_the_kubelet_was_unreadable_gets_no_notice() -> None:
    """Otherwise a running pod would get a notice, and be evicted where the policy evicts."""
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
async def test_pod_whose_grant_could_not_be_delivered_gets_no_notice() -> None:
    async with a_world(1, EVICT) as world:
        await world.node.actions.quarantine("0", "it burns", "uid:0")
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id])
        await world.until(lambda: bool(stuck(world)), within=100.0)
        assert tenant.worker is not None
        tenant.worker.cancel()
        await world.node.actions.unquarantine("0", "it was the neighbour", "uid:0")
        await world.until(lambda: world.record().health is Health.HEALTHY)
        call = ask(world, tenant)
        # Its caller is cancelled at the moment the grant is in the ledger.
        world.vault.granting = call.cancel
        await asyncio.wait({call})
        world.vault.granting = None
        assert call.cancelled()
        assert world.record().hygiene is Hygiene.IN_USE
        await ask(world, tenant)
        await world.run(5.0)
        assert stuck(world) == []


@in_virtual_time
async def test_grants_to_other_pods_of_a_shared_device_do_not_restart_the_waiting_time_of_a_pod() -> None:
    """A tenant whose pods come and go can keep a shared device forever; the pod that waits for it must get a notice."""
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


# -- devices that are quarantined in use -------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_whose_device_is_quarantined_in_use_gets_a_notice() -> None:
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
        assert "quarantined (xid-79)" in notice.message
        assert not notice.evict
        assert stuck(world) == []


@in_virtual_time
async def test_notice_of_a_quarantine_in_use_is_withdrawn_once_the_pod_is_gone() -> None:
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
async def test_one_notice_names_all_quarantined_devices_of_a_pod() -> None:
    async with a_world(2, TELL) as world:
        tenant = await started(world, "acme", "train-0", 0, 1)
        for number in (0, 1):
            world.gpu(number).xids[79] = 1
            world.signal(number)
        await world.until(lambda: bool(out(world)) and len(out(world)[0].devices) == 2, within=5.0)
        (notice,) = out(world)
        assert notice.pod == tenant.pod
        assert all(world.gpu(number).id in notice.message for number in (0, 1))


@in_virtual_time
async def test_pod_gets_its_quarantine_notice_although_the_policy_withdraws_the_device_at_release() -> None:
    async with a_world(1, replace(TELL, health=HealthRule(quarantine_at=QuarantineTiming.RELEASE))) as world:
        await started(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: bool(out(world)), within=5.0)
        assert world.node.view().devices[0].advertised


@in_virtual_time
async def test_quarantine_of_an_unassigned_device_creates_no_notice() -> None:
    async with a_world(1, TELL) as world:
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.run(30.0)
        assert world.node.view().notices == ()


@in_virtual_time
async def test_notice_under_an_observing_policy_does_not_claim_that_restarts_are_refused() -> None:
    async with a_world(1, replace(TELL, enforcement=Enforcement.OBSERVE)) as world:
        tenant = await started(world)
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        assert not any("is refused" in notice.message for notice in out(world))
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)


# -- its state ---------------------------------------------------------------------------------------------------------


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

    def stall_tolerant_timeout(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        raise NotImplementedError


REFUSAL = NotReady("Who else has it.", public_message="Device GPU-0 is dirty. The start is tried again.")


def refused(refusals: RefusedStarts, clock: _Clock, pod: Pod, *at: float) -> None:
    for moment in at:
        clock.now = moment
        refusals.record_refusal([pod], ["GPU-0"], REFUSAL)


def test_number_of_remembered_refused_pods_is_bounded_and_the_first_are_kept() -> None:
    clock = _Clock()
    refusals = RefusedStarts(clock)
    pods = [Pod("acme", f"train-{number}", f"uid-{number}") for number in range(5_000)]
    for moment in (0.0, 100.0):
        clock.now = moment
        for pod in pods:
            refusals.record_refusal([pod], ["GPU-0"], REFUSAL)
    notices = refusals.notices(StuckPodsRule(notify_after=60.0))
    assert len(notices) == 1024
    assert {notice.pod for notice in notices} == set(pods[:1024])


def test_pod_that_stops_requesting_is_forgotten_after_the_kubelets_longest_backoff() -> None:
    clock = _Clock()
    refusals, pod = RefusedStarts(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0, 300.0)
    clock.now = 1_190.0
    assert len(refusals.notices(StuckPodsRule())) == 1
    clock.now = 1_210.0
    assert refusals.notices(StuckPodsRule()) == ()
    refusals.prune(KubeletReading(Trust.TRUSTED, (Assignment(pod, "main", frozenset({"GPU-0"})),)))
    refused(refusals, clock, pod, 1_300.0, 1_350.0)
    assert refusals.notices(StuckPodsRule()) == (), "what it waited before counts no more"


def test_waiting_time_of_a_refused_pod_ends_at_its_last_refusal() -> None:
    """A pod without a later refusal may be starting at this moment."""
    clock = _Clock()
    refusals, pod = RefusedStarts(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0)
    clock.now = 500.0
    assert refusals.notices(StuckPodsRule()) == ()
    refused(refusals, clock, pod, 501.0)
    assert len(refusals.notices(StuckPodsRule())) == 1


@pytest.mark.parametrize(
    ("trust", "forgotten"),
    [(Trust.TRUSTED, True), (Trust.EMPTY_AFTER_RESTART, False), (Trust.UNREADABLE, False)],
)
def test_only_a_trusted_kubelet_list_shows_that_a_refused_pod_is_gone(trust: Trust, forgotten: bool) -> None:
    clock = _Clock()
    refusals = RefusedStarts(clock)
    refused(refusals, clock, Pod("acme", "train-0", "uid-0"), 0.0, 100.0)
    refusals.prune(KubeletReading(trust))
    assert (refusals.notices(StuckPodsRule()) == ()) is forgotten


def test_refused_pod_that_only_the_checkpoint_names_is_not_forgotten() -> None:
    clock = _Clock()
    refusals, pod = RefusedStarts(clock), Pod("acme", "train-0", "uid-0")
    refused(refusals, clock, pod, 0.0, 100.0)
    refusals.prune(KubeletReading(Trust.TRUSTED, checkpoint_only=(Assignment(pod, "init", frozenset({"GPU-0"})),)))
    assert len(refusals.notices(StuckPodsRule())) == 1


def test_notices_list_the_longest_waiting_pod_first() -> None:
    clock = _Clock()
    refusals = RefusedStarts(clock)
    young, old = Pod("acme", "young", "uid-1"), Pod("acme", "old", "uid-2")
    refused(refusals, clock, old, 0.0)
    refused(refusals, clock, young, 50.0, 200.0)
    refused(refusals, clock, old, 210.0)
    assert [notice.pod for notice in refusals.notices(StuckPodsRule())] == [old, young]
