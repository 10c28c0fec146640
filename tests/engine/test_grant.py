"""Grants: a hand-over from request to answer, in a simulated cluster with labelled bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from scrubber.domain.assignment import Assignment, Process, Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import NotReady, Quarantined
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.record import Grant
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.views import GrantedDevice
from tests.world.asking import STRICT, TRUSTED, admitted, answered, ask, started
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world

# -- the basis of a grant ----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_with_a_certificate_is_granted_at_once_and_the_certificate_is_consumed() -> None:
    async with a_world() as world:
        tenant = await admitted(world)
        rests_on = world.record().certificate
        assert rests_on is not None
        before = world.clock.monotonic()
        (granted,) = await ask(world, tenant)
        assert world.clock.monotonic() - before < 0.1
        assert granted.path is PathKind.FAST
        assert world.vault.certificates[rests_on.id].next_grant == granted.grant
        assert granted.certificate is not None
        assert world.vault.certificates[granted.certificate].rests_on == rests_on.id
        assert world.record().hygiene is Hygiene.IN_USE
        assert world.record().certificate is None


@in_virtual_time
async def test_next_tenant_waits_for_the_last_tenant_and_then_reads_zeros() -> None:
    async with a_world() as world:
        first = await started(world)
        world.kubelet.force_delete(first, lives_on=4.0)
        second = await world.admit("umbrella", "serve-0")
        assert second is not None
        await world.run(3.9)
        assert not second.running
        await world.until(lambda: second.running)
        await world.run(1.0)
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_container_that_was_granted_its_start_is_waited_for_although_its_pod_was_deleted() -> None:
    """The pod was force-deleted between the answer and the start: the runtime may still start the container."""
    async with a_world(devices=1) as world:
        first = await world.admit("acme", "train-0", starts_after=3.0)
        assert first is not None
        await world.until(lambda: first.starting)
        world.kubelet.force_delete(first, lives_on=10.0)
        second = await world.admit("umbrella", "serve-0")
        assert second is not None
        await world.until(lambda: first.starts == 1)
        assert not second.running
        await world.until(lambda: second.running)


@in_virtual_time
async def test_granted_container_of_a_deleted_pod_is_waited_for_although_an_earlier_start_left_a_process() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        await world.run(3.0)
        assert first.first is not None
        world.matter.fork(first.first).holds.clear()
        first.starts_after = 3.0
        world.kubelet.exit(first, again=True)
        await world.until(lambda: first.starting)
        world.kubelet.force_delete(first, lives_on=10.0)
        second = await world.admit("umbrella", "serve-0")
        assert second is not None
        await world.until(lambda: first.starts == 2)
        assert not second.running
        await world.until(lambda: second.running)


@in_virtual_time
async def test_container_restart_needs_no_scrub() -> None:
    async with a_world() as world:
        tenant = await started(world)
        await world.run(2.0)  # and was observed running
        scrubs = world.erasers.started
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        assert world.erasers.started == scrubs
        grant = world.record().last_grant
        assert grant is not None
        assert (grant.kind, grant.basis) == (HandOverKind.SAME_CONTAINER, Basis.SAME_CONTAINER)


@in_virtual_time
async def test_container_restart_under_a_strict_policy_needs_a_certificate() -> None:
    async with a_world(policy=STRICT) as world:
        tenant = await started(world)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_memory_that_an_init_container_wrote_is_cleared_for_the_main_container() -> None:
    async with a_world() as world:
        tenant = await world.admit("acme", "train-0", init=True)
        assert tenant is not None
        await world.until(lambda: tenant.running)
        world.write_all(tenant)
        world.kubelet.exit(tenant, again=False)
        await world.until(lambda: tenant.running and tenant.container == "main")
        grant = world.record().last_grant
        assert grant is not None
        assert (grant.kind, grant.basis) == (HandOverKind.SAME_POD, Basis.CERTIFICATE)


@in_virtual_time
async def test_setting_changed_by_a_tenant_sends_the_container_restart_through_the_slow_path() -> None:
    async with a_world() as world:
        tenant = await started(world)
        world.gpu().settings["compute-mode"] = "exclusive"
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        assert world.gpu().settings["compute-mode"] == "default"
        assert world.gpu().cells == [""] * 4


@in_virtual_time
async def test_a_pod_that_the_kubelet_cannot_name_is_granted_on_a_certificate_only() -> None:
    async with a_world() as world:
        tenant = await started(world)
        world.kubelet.trust = Trust.UNREADABLE
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        grant = world.record().last_grant
        assert grant is not None
        assert (grant.kind, grant.assignment, grant.basis) == (HandOverKind.UNKNOWN, None, Basis.CERTIFICATE)


@in_virtual_time
async def test_grant_to_a_pod_that_only_the_checkpoint_names_does_not_count_as_exclusive_use() -> None:
    async with a_world(1) as world:
        tenant = await admitted(world)
        world.kubelet.trust = Trust.EMPTY_AFTER_RESTART
        (granted,) = await ask(world, tenant)
        assert granted.basis is Basis.CERTIFICATE
        assert not world.record().exclusive_use


@in_virtual_time
async def test_start_on_a_device_that_the_kubelet_assigns_to_no_pod_is_refused() -> None:
    async with a_world(1) as world:
        tenant = await admitted(world)
        world.kubelet.delete(tenant)
        assert (await answered(ask(world, tenant, wait=1.0))).code == ErrorCode.UNASSIGNED
        assert world.record().grant_sequence == 0


@in_virtual_time
async def test_device_of_an_unknown_pod_is_not_free_because_it_was_free_before_the_grant() -> None:
    """A long time without holders before the grant proves nothing about a container that is about to open it."""
    async with a_world() as world:
        await world.run(60.0)
        world.kubelet.trust = Trust.UNREADABLE
        first = await admitted(world)
        await ask(world, first)
        refusal = await answered(ask(world, first, wait=1.0))
        assert isinstance(refusal, NotReady)
        assert refusal.code == "earlier-pod-running"


@in_virtual_time
async def test_pod_whose_processes_cannot_be_read_is_granted_nothing() -> None:
    async with a_world() as world:
        tenant = await admitted(world)
        world.unreadable.add(tenant.uid)
        refusal = await answered(ask(world, tenant, wait=1.0))
        assert (type(refusal), refusal.code) == (NotReady, "pod-unreadable")
        assert world.record().hygiene is Hygiene.CLEAN
        world.unreadable.clear()
        await ask(world, tenant)


@in_virtual_time
async def test_start_under_a_policy_that_trusts_the_tenant_still_waits_for_its_last_pod_to_end() -> None:
    async with a_world(policy=TRUSTED) as world:
        first = await started(world)
        assert first.first is not None
        first.first.holds.clear()
        await world.run(2.0)
        world.kubelet.force_delete(first, lives_on=10.4)
        second = await world.admit("acme", "train-1")
        assert second is not None
        await world.run(10.0)
        assert not second.running
        await world.until(lambda: second.running)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.basis is Basis.SAME_TENANT


@in_virtual_time
async def test_start_under_a_policy_that_trusts_the_tenant_kills_leftover_processes_of_its_last_pod() -> None:
    async with a_world(policy=TRUSTED) as world:
        first = await started(world)
        await world.run(2.0)
        assert first.first is not None
        child = world.matter.fork(first.first)
        child.holds.clear()
        world.kubelet.force_delete(first, lives_on=3.4)
        second = await world.admit("acme", "train-1")
        assert second is not None
        await world.until(lambda: second.running)
        assert not child.alive


@in_virtual_time
async def test_memory_is_not_cleared_for_a_restart_while_a_process_of_an_earlier_start_lives() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        tenant = await started(world)
        assert tenant.first is not None
        child = world.matter.fork(tenant.first)
        child.holds.clear()
        world.kubelet.exit(tenant, again=True)
        await world.run(60.0)
        assert tenant.starts == 1
        world.matter.end(child)
        await world.until(lambda: tenant.starts == 2)


@in_virtual_time
async def test_process_left_by_an_earlier_start_never_counts_as_the_pods_sandbox() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        assert tenant.first is not None
        child = world.matter.fork(tenant.first)
        child.holds.clear()
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        world.kubelet.delete(tenant)
        follower = await world.admit("umbrella", "serve-0")
        assert follower is not None
        await world.until(lambda: follower.running)
        assert not child.alive


@in_virtual_time
async def test_sandbox_of_an_earlier_boot_is_not_expected_after_a_reboot() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        tenant = await started(world)
        world.reboot()
        await world.start_service()
        await world.until(lambda: tenant.starts == 2)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 3)


# -- all or none -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_several_devices_are_granted_in_one_transaction() -> None:
    async with a_world() as world:
        tenant = await admitted(world, "acme", "train-0", 0, 1)
        writes = world.vault.writes
        granted = await ask(world, tenant)
        assert [each.device for each in granted] == list(tenant.devices)
        assert world.vault.writes == writes + 1


@in_virtual_time
async def test_one_quarantined_device_refuses_the_whole_request_and_grants_none() -> None:
    async with a_world() as world:
        tenant = await admitted(world, "acme", "train-0", 0, 1)
        await world.node.actions.quarantine("1", "it smells", "uid:0")
        refusal = await answered(ask(world, tenant))
        assert isinstance(refusal, Quarantined)
        assert world.gpu(1).id in refusal.public_message
        assert "operator" in refusal.public_message
        assert [world.record(number).grant_sequence for number in (0, 1)] == [0, 0]
        assert world.record(0).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_allocation_during_the_commit_of_a_grant_is_newer_than_the_grant() -> None:
    async with a_world(1) as world:
        tenant, state = await admitted(world), world.controller().state
        world.vault.granting = state.count_allocation
        await ask(world, tenant)
        assert state.allocated_since


@in_virtual_time
async def test_pod_that_was_granted_its_device_is_no_longer_waiting_for_it() -> None:
    async with a_world(1) as world:
        tenant, state = await admitted(world), world.controller().state
        await world.run(1.0)
        state.note_waiting(tenant.pod)
        assert state.waiting_pod == tenant.pod
        await ask(world, tenant)
        assert state.waiting_pod is None


@in_virtual_time
async def test_device_does_not_count_as_free_after_its_grant() -> None:
    async with a_world(1) as world:
        tenant, coverage = await admitted(world), world.controller().occupancy.coverage
        assert coverage.free_for > 0
        await ask(world, tenant)
        assert coverage.free_for == 0


@in_virtual_time
async def test_device_that_waited_long_for_its_sibling_is_checked_again_before_the_grant() -> None:
    async with a_world() as world:
        tenant = await admitted(world, "acme", "train-0", 0, 1)
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu(1).id)
        await world.run(2.0)
        call = ask(world, tenant)
        await world.run(4.0)
        world.gpu(0).settings["compute-mode"] = "exclusive"
        world.matter.end(host)
        await call
        assert world.gpu(0).settings["compute-mode"] == "default"


async def waiting_for_its_sibling(world: World) -> asyncio.Task[tuple[GrantedDevice, ...]]:
    """A call for both devices: the first is ready, and the second is being scrubbed for a little longer."""
    tenant = await admitted(world, "acme", "train-0", 0, 1)
    assert world.service is not None
    world.service.life.start(world.service.scrub(world.gpu(1).id), "scrub")
    await world.until(lambda: bool(world.erasers.running))
    call = ask(world, tenant, wait=5.0)
    await world.run(0.7)
    assert world.controller(1).state.job is not None
    return call


@in_virtual_time
async def test_device_that_was_quarantined_while_its_sibling_was_waited_for_is_not_granted() -> None:
    async with a_world() as world:
        call = await waiting_for_its_sibling(world)
        await world.node.actions.quarantine("0", "it smells", "uid:0")
        assert isinstance(await answered(call), Quarantined)
        assert [world.record(number).grant_sequence for number in (0, 1)] == [0, 0]


@in_virtual_time
async def test_device_that_was_opened_while_its_sibling_was_waited_for_is_not_granted() -> None:
    async with a_world() as world:
        call = await waiting_for_its_sibling(world)
        host = world.matter.start(None, "", "host")
        world.matter.open(host, world.gpu(0).id)
        assert isinstance(await answered(call), NotReady)
        assert [world.record(number).grant_sequence for number in (0, 1)] == [0, 0]


def before_the_next_grant(world: World, change: Callable[[], Awaitable[object]]) -> None:
    """Run ``change`` once, when a device is prepared and not granted yet."""
    pods, changes = world.node.pods, [change]
    baseline = pods.baseline

    async def changed(assignment: Assignment | None, earlier_grants: Iterable[Grant]) -> tuple[Process, ...]:
        while changes:
            await changes.pop()()
        return await baseline(assignment, earlier_grants)

    pods.baseline = changed  # type: ignore[method-assign]


@in_virtual_time
async def test_device_that_is_allocated_again_before_its_grant_is_not_granted() -> None:
    async with a_world(1) as world:
        tenant = await admitted(world)

        async def allocate() -> None:
            world.controller().state.count_allocation()

        before_the_next_grant(world, allocate)
        assert (await answered(ask(world, tenant))).code == ErrorCode.REASSIGNED
        assert world.record().grant_sequence == 0


@in_virtual_time
async def test_device_that_leaves_the_node_before_its_grant_is_not_granted() -> None:
    async with a_world(1) as world:
        tenant = await admitted(world)
        before_the_next_grant(world, world.controller().state.retire)
        assert isinstance(await answered(ask(world, tenant, wait=1.0)), NotReady)
        assert world.record().grant_sequence == 0


@in_virtual_time
async def test_certificate_older_than_a_watch_gap_before_the_grant_is_voided_instead_of_consumed() -> None:
    async with a_world(1) as world:
        tenant, proved = await admitted(world), world.record().certificate
        assert proved is not None

        missed: list[float] = []

        async def miss() -> None:
            missed.append(world.clock.wall())
            world.controller().occupancy.coverage.record_failure()

        before_the_next_grant(world, miss)
        await ask(world, tenant)
        assert world.record().grant_sequence == 1
        assert world.vault.certificates[proved.id].next_grant is None
        (voided,) = (event for event in world.vault.events if event.name == "certificate.voided")
        assert voided.at - missed[0] < 0.1, "the start does not wait for the next look of the watch"


@in_virtual_time
async def test_call_for_a_pod_whose_device_was_reassigned_is_refused_and_never_granted_to_the_new_pod() -> None:
    async with a_world(devices=1) as world:
        first = await started(world)
        world.kubelet.force_delete(first, lives_on=5.0)
        second = await admitted(world, "umbrella", "serve-0")
        call = ask(world, second)
        await world.run(1.0)
        world.kubelet.delete(second)
        third = await admitted(world, "initech", "serve-1")
        refusal = await answered(call)
        assert refusal.code == "reassigned"
        await ask(world, third)


@in_virtual_time
async def test_hung_driver_of_one_device_does_not_delay_the_grant_of_another() -> None:
    async with a_world() as world:
        world.gpu(0).stuck = True
        tenant = await admitted(world, "acme", "train-0", 1)
        began = world.clock.monotonic()
        await ask(world, tenant)
        assert world.clock.monotonic() - began < 0.1
        await world.run(10.0)
        assert world.record(0).health is Health.QUARANTINED
        assert world.record(1).health is Health.HEALTHY


@in_virtual_time
async def test_device_whose_holders_cannot_be_read_is_quarantined_and_the_start_is_refused_with_that_cause() -> None:
    async with a_world() as world:
        tenant = await admitted(world)
        world.unreadable.add(world.gpu().id)
        refusal = await answered(ask(world, tenant, wait=5.0))
        assert isinstance(refusal, Quarantined)
        assert "driver-timeout" in refusal.public_message


@in_virtual_time
async def test_recently_used_device_whose_holders_cannot_be_read_is_quarantined() -> None:
    async with a_world() as world:
        first = await started(world)
        world.kubelet.delete(first)
        world.unreadable.add(world.gpu().id)
        tenant = world.kubelet.admit("umbrella", "serve-0", [world.gpu().id], starts=False)
        refusal = await answered(ask(world, tenant, wait=0.0))
        assert isinstance(refusal, NotReady | Quarantined)
        assert world.record().health is Health.QUARANTINED


@in_virtual_time
async def test_two_callers_for_overlapping_sets_of_devices_never_deadlock() -> None:
    async with a_world(devices=3) as world:
        one = await admitted(world, "acme", "train-0", 0, 1)
        two = await admitted(world, "umbrella", "serve-0", 1, 2)
        done, _ = await asyncio.wait({ask(world, one, wait=20.0), ask(world, two, wait=20.0)})
        assert len(done) == 2
        for call in done:
            call.exception()
