"""Shared devices: pods of one tenant may share one, nothing is cleared meanwhile, the last release starts a scrub."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Assignment, Pod, Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidRequest, NotReady, Quarantined
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement, Limits, SharingMode
from scrubber.domain.states import Health, Hygiene
from scrubber.engine.views import HandOverCall
from tests.world.kubelet import Tenant
from tests.world.sharing import RESOURCE, SharedWorld, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT

NEVER = replace(DEFAULT, name="alone", digest="sha256:alone", sharing=SharingMode.NEVER)
OBSERVE = replace(DEFAULT, name="watching", digest="sha256:watching", enforcement=Enforcement.OBSERVE)


def exceptions(world: SharedWorld) -> list[str | None]:
    return [grant.basis.exception for _, grant in sorted(world.vault.grants.items())]


# -- sharing -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_two_pods_of_a_tenant_share_a_device_and_nothing_is_cleared_while_a_pod_lives() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.start("acme", "train-1", world.share(1))
        erasers = world.erasers.started
        world.kubelet.delete(first)
        await world.run(20.0)
        assert world.erasers.started == erasers
        assert world.record().hygiene is Hygiene.IN_USE
        world.kubelet.delete(second)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        assert world.erasers.started == erasers + 1
        assert exceptions(world) == [None, "shared"]


@in_virtual_time
async def test_certificate_of_a_shared_start_states_that_other_pods_hold_the_device_and_memory_was_left() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        await world.start("acme", "train-1", world.share(1))
        grant = world.record().last_grant
        assert grant is not None
        assert grant.certificate is not None
        certificate = world.vault.certificates[grant.certificate]
        assert not any(line.startswith("holders") for line in certificate.covered)
        assert [line for line in certificate.not_covered if line.startswith("holders: shared with 1 pod,")]
        assert "memory: left as it was, as the policy lets shared" in certificate.not_covered
        assert {line.partition(":")[0] for line in certificate.covered} == {"settings", "health"}


@in_virtual_time
async def test_shared_start_is_refused_after_unauthorized_use_until_a_scrub_even_across_a_service_restart() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        stranger = world.matter.start(None, "host/miner#1", "x/host/miner#1", mounted=frozenset({world.gpu().id}))
        world.matter.open(stranger, world.gpu().id)
        await world.run(3.0)
        world.matter.end(stranger)
        world.kill()
        await world.start_service()
        waiting = await world.admit_shares("acme", "train-1", world.share(1))
        await world.run(100.0)
        assert not waiting.running


@in_virtual_time
async def test_several_shares_of_a_device_in_one_request_are_granted_as_one_device() -> None:
    async with a_shared_world() as world:
        tenant = await world.admit_shares("acme", "train-0", world.share(0), world.share(3), starts=False)
        (granted,) = await world.call(tenant)
        assert granted.device == world.gpu().id
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_grants_of_finished_pods_do_not_accumulate_while_a_device_is_shared_without_a_pause() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "serve-0", world.share(0))
        for number in range(6):
            job = await world.start("acme", f"job-{number}", world.share(1))
            world.kubelet.delete(job)
            await world.run(3.0)
        assert len(world.record().open_grants) <= 2


@pytest.mark.parametrize("tenant", ["umbrella", "acme"])
def test_shared_start_is_refused_if_a_restarted_kubelet_may_have_started_a_waiting_pod_of_another_tenant(
    tenant: str,
) -> None:
    """Until the plugin is back, the kubelet starts pods without a request; this one ended before any check."""

    @in_virtual_time
    async def join() -> None:
        async with a_shared_world() as world:
            await world.start("acme", "train-0", world.share(0))
            waited = await world.admit_shares(tenant, "serve-0", world.share(1), starts=False)
            await world.run(1.5)
            world.kubelet.starts += 1
            world.kubelet.delete(waited)
            joining = await world.admit_shares("acme", "train-1", world.share(2))
            await world.run(60.0)
            assert joining.running is (tenant == "acme")

    join()


@in_virtual_time
async def test_share_granted_while_the_kubelet_was_unreadable_is_not_attributed_to_the_only_remaining_pod() -> None:
    async with a_shared_world() as world:
        first = await world.admit_shares("umbrella", "serve-0", world.share(0), starts=False)
        second = await world.admit_shares("acme", "train-0", world.share(1), starts=False)
        world.kubelet.trust = Trust.UNREADABLE
        await world.call(first)
        world.kubelet.delete(first)
        world.kubelet.trust = Trust.TRUSTED
        await world.run(3.0)
        grant = world.record().last_grant
        assert grant is not None
        assert grant.pod is None
        world.kubelet.ask_again(second)
        await world.until(lambda: second.running, within=120.0)


# -- another tenant ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_of_another_tenant_waits_until_all_sharing_pods_are_gone_and_gets_a_clean_device() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.start("acme", "train-1", world.share(1))
        stranger = await world.admit_shares("umbrella", "serve-0", world.share(2), starts=False)
        refusal = await world.refused(stranger)
        assert refusal.code == "sharing-not-allowed"
        assert "acme/train-0" in str(refusal)
        world.kubelet.delete(first)
        assert (await world.refused(stranger)).code == "sharing-not-allowed"
        world.kubelet.delete(second)
        (granted,) = await world.call(stranger)
        assert granted.basis is Basis.CERTIFICATE
        assert not any(world.gpu().cells)


@in_virtual_time
async def test_start_on_a_share_is_refused_once_the_kubelet_assigns_the_share_to_another_pod() -> None:
    async with a_shared_world() as world:
        await world.start("umbrella", "serve-0", world.share(0))
        second = await world.admit_shares("acme", "train-0", world.share(1), starts=False)
        call = world.call(second, wait=60.0)
        await world.run(1.0)
        world.kubelet.delete(second)
        await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        with pytest.raises(NotReady) as refusal:
            await call
        assert refusal.value.code == ErrorCode.REASSIGNED


@in_virtual_time
async def test_start_on_a_share_goes_on_when_another_share_of_the_device_is_allocated() -> None:
    async with a_shared_world() as world:
        first = await world.start("umbrella", "serve-0", world.share(0))
        second = await world.admit_shares("acme", "train-0", world.share(1), starts=False)
        call = world.call(second, wait=60.0)
        await world.run(1.0)
        await world.admit_shares("acme", "train-1", world.share(2), starts=False)
        world.kubelet.delete(first)
        (granted,) = await call
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_policy_may_forbid_two_pods_on_one_device() -> None:
    async with a_shared_world(policy=NEVER) as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "sharing: never" in str(refusal)
        world.kubelet.delete(first)
        (granted,) = await world.call(second)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_shared_start_is_refused_while_the_kubelet_cannot_name_the_requesting_pod() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        world.kubelet.trust = Trust.UNREADABLE
        assert (await world.refused(second)).code == "sharing-not-allowed"
        world.kubelet.trust = Trust.TRUSTED
        (granted,) = await world.call(second)
        assert granted.basis is Basis.SHARED


@in_virtual_time
async def test_observing_policy_refuses_no_shared_start() -> None:
    async with a_shared_world(policy=OBSERVE) as world:
        await world.start("acme", "train-0", world.share(0), writes=False)
        stranger = await world.admit_shares("umbrella", "serve-0", world.share(1), starts=False)
        (granted,) = await world.call(stranger, 1.0)
        assert granted.basis is Basis.OBSERVE_MODE


# -- whole devices -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_granted_whole_is_never_shared() -> None:
    async with a_shared_world() as world:
        whole = await world.admit("acme", "train-0")
        assert whole is not None
        await world.until(lambda: whole.running)
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "the whole of it" in str(refusal)


@in_virtual_time
async def test_device_with_a_granted_share_is_never_granted_whole() -> None:
    async with a_shared_world() as world:
        shared = await world.start("acme", "train-0", world.share(0))
        whole = world.kubelet.admit("acme", "train-1", [world.gpu().id], starts=False)
        # The kubelet names two pods for the device, so neither is certain; it still has to wait.
        assert (await world.refused(whole)).code == "earlier-pod-running"
        world.kubelet.delete(shared)
        (granted,) = await world.call(whole)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_request_for_a_whole_device_and_a_share_of_the_same_device_is_refused() -> None:
    async with a_shared_world() as world:
        with pytest.raises(InvalidRequest, match="twice"):
            await world.node.reserve([world.gpu().id, world.share(0)], RESOURCE)


# -- restarts ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_restart_beside_other_pods_is_a_shared_start_and_a_later_restart_alone_waits_for_the_scrub() -> None:
    """Another pod's bytes are on the device: the exception for the same container would let it start among them."""
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.start("acme", "train-1", world.share(1))
        world.kubelet.exit(first, again=True)
        await world.until(lambda: first.starts == 2)
        assert exceptions(world) == [None, "shared", "shared"]
        erasers = world.erasers.started
        world.kubelet.delete(second)
        await world.run(3.0)
        world.kubelet.exit(first, again=True)
        await world.until(lambda: first.starts == 3)
        assert world.erasers.started == erasers + 1
        assert exceptions(world)[-1] is None


@in_virtual_time
async def test_pod_alone_on_a_shared_device_restarts_by_the_policys_exception() -> None:
    async with a_shared_world() as world:
        only = await world.start("acme", "train-0", world.share(0))
        await world.run(2.0)
        world.kubelet.exit(only, again=True)
        await world.until(lambda: only.starts == 2)
        assert exceptions(world) == [None, "same-container"]


@in_virtual_time
async def test_sharing_continues_across_a_service_restart() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        await world.start("acme", "train-1", world.share(1))
        world.kill()
        await world.start_service()
        await world.until(world.settled)
        third = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        (granted,) = await world.call(third)
        assert granted.basis is Basis.SHARED
        world.kubelet.exit(first, again=True)
        await world.until(lambda: first.starts == 2)
        stranger = await world.admit_shares("umbrella", "serve-0", world.share(3), starts=False)
        assert (await world.refused(stranger)).code == "sharing-not-allowed"


@in_virtual_time
async def test_shared_start_is_refused_after_a_pod_started_without_a_grant() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        unasked = Assignment(second.pod, "main", frozenset({world.gpu().id}), RESOURCE)
        await world.controller().occupancy.adopt(unasked)
        third = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        refusal = await world.refused(third)
        assert refusal.code == "sharing-not-allowed"
        assert "before it was proved clean" in str(refusal)
        world.kubelet.delete(first)
        world.kubelet.delete(second)
        await world.run(DEFAULT.limits.leftover_grace_period)
        (granted,) = await world.call(third)
        assert granted.basis is Basis.CERTIFICATE


# -- refused starts ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_shared_start_beside_leftover_processes_is_refused() -> None:
    async with a_shared_world(policy=replace(DEFAULT, limits=replace(Limits(), leftover_grace_period=5.0))) as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.start("acme", "train-1", world.share(1))
        world.kubelet.force_delete(first, lives_on=600.0)
        await world.run(15.0)
        third = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        refusal = await world.refused(third)
        assert refusal.code == "sharing-not-allowed"
        assert "left processes behind" in str(refusal)
        world.kubelet.delete(second)
        (granted,) = await world.call(third)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_shared_start_is_refused_after_unauthorized_use_until_the_device_was_scrubbed() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        proc = world.use(world.gpu())
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "without a grant" in str(refusal)
        world.matter.end(proc)
        assert (await world.refused(second)).code == "sharing-not-allowed"
        world.kubelet.delete(first)
        (granted,) = await world.call(second)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_unauthorized_use_found_only_by_the_checks_of_a_shared_start_is_recorded() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)

        async def held() -> bool:
            return False

        world.controller().occupancy.is_held = held  # type: ignore[method-assign]
        world.use(world.gpu())
        assert "without a grant" in str(await world.refused(second))
        assert world.record().contaminated


@in_virtual_time
async def test_tenant_process_that_ends_during_the_check_of_a_shared_start_is_no_unauthorized_user() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        assert world.service is not None
        assert first.first is not None
        brief = world.matter.fork(first.first)
        containers = world.service.dependencies.containers
        uid_of = containers.pod_uid_of

        async def after_its_end(pid: int) -> str | None:
            if pid == brief.pid:
                world.matter.end(brief)
            return await uid_of(pid)

        containers.pod_uid_of = after_its_end  # type: ignore[method-assign]
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        (granted,) = await world.call(second)
        assert granted.basis is Basis.SHARED
        assert not world.record().contaminated


@in_virtual_time
async def test_changed_settings_of_a_shared_device_are_restored_only_after_the_other_pods_are_gone() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        world.gpu().settings["compute-mode"] = "exclusive-process"
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "compute-mode" in str(refusal)
        world.kubelet.delete(first)
        await world.call(second)
        assert world.gpu().settings["compute-mode"] == "default"


@in_virtual_time
async def test_shared_start_on_a_faulty_device_is_refused() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        world.gpu().xids[95] = 1
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        assert isinstance(await world.refused(second), Quarantined)
        assert world.record().health is Health.QUARANTINED


# -- undelivered answers -----------------------------------------------------------------------------------------------


async def unheard(world: SharedWorld, tenant: Tenant) -> None:
    """Cancel the caller at the moment the grant becomes durable."""
    call = world.call(tenant)
    world.vault.granting = call.cancel
    await asyncio.wait({call})
    world.vault.granting = None
    assert call.cancelled()
    await world.run(0.1)


@in_virtual_time
async def test_undelivered_grant_of_a_share_is_returned_again_to_the_same_pod_only() -> None:
    async with a_shared_world() as world:
        first = await world.admit_shares("acme", "train-0", world.share(0), starts=False)
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        await unheard(world, first)
        (granted,) = await world.call(first)
        assert granted.grant == 1
        await unheard(world, second)
        (other,) = await world.call(second)
        assert (other.grant, other.basis) == (2, "shared")
        assert world.record().grant_sequence == 2


# -- assignments by another plugin -------------------------------------------------------------------------------------


async def elsewhere(world: SharedWorld) -> Tenant:
    """Return a pod of this plugin, on a device that another plugin has assigned to another pod as well."""
    gpu = world.gpu().id
    world.elsewhere = (Assignment(Pod("umbrella", "claims", "uid-x"), "main", frozenset({gpu}), "gpu.vendor.com"),)
    return await world.admit_shares("acme", "train-1", world.share(1), starts=False)


@in_virtual_time
async def test_device_assigned_to_another_pod_by_another_plugin_is_not_granted() -> None:
    async with a_shared_world() as world:
        tenant = await elsewhere(world)
        refusal = await world.refused(tenant)
        assert refusal.code == "assigned-by-another-plugin"
        assert "umbrella/claims" in str(refusal)
        assert "gpu.vendor.com" in refusal.public_message
        world.elsewhere = ()
        await world.call(tenant)


@in_virtual_time
async def test_device_assigned_by_another_plugin_while_shared_is_logged_as_unauthorized_use_and_blocks_the_next_start() -> (
    None
):
    """This also holds beside an authorized tenant: the use is logged, ends exceptions, and blocks the next start."""
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        later = await elsewhere(world)
        await world.run(2.0)
        assert world.journal is not None
        found = [event for event in world.journal.events if event.fields.get("use") == "assigned-by-another-plugin"]
        assert [(event.name, event.device) for event in found] == [("unauthorized.use.detected", world.gpu().id)]
        assert not world.record().exclusive_use
        assert first.running
        assert (await world.refused(later)).code == "assigned-by-another-plugin"


@in_virtual_time
async def test_assignment_through_an_announced_resource_is_not_one_of_another_plugin() -> None:
    async with a_shared_world() as world:
        await world.node.announce("gpu.vendor.com", {})
        assert world.node.own_resources == {"gpu.vendor.com"}
        tenant = await elsewhere(world)
        await world.call(tenant)
        assert world.node.own_resources == {"gpu.vendor.com", RESOURCE}


@in_virtual_time
async def test_no_assignment_counts_as_one_of_another_plugin_before_any_resource_is_announced() -> None:
    async with a_shared_world() as world:
        tenant = await elsewhere(world)
        world.kill()
        await world.start_service()  # without any announcement
        await world.until(world.settled)
        assert world.node.own_resources == frozenset()
        assert world.service is not None
        await world.service.hand_over(HandOverCall(tenant.devices, 5.0))


@in_virtual_time
async def test_resources_of_open_grants_are_known_as_own_after_a_service_restart() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        world.kill()
        await world.start_service()
        assert world.node.own_resources == {RESOURCE}


# -- announced ids -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_plugin_defined_ids_resolve_to_the_devices_that_the_plugin_announced() -> None:
    async with a_shared_world(devices=2) as world:
        first, second = world.gpu(0).id, world.gpu(1).id
        with pytest.raises(InvalidRequest, match="no device nvidia1"):
            await world.node.reserve(["nvidia1"], "vendor.dev/gpu")
        await world.node.announce("vendor.dev/gpu", {"nvidia0": first, "nvidia1": second})
        tenant = await world.admit("acme", "train-0", (1,), starts=False)
        assert tenant is not None
        assert world.service is not None
        (granted,) = await world.service.hand_over(HandOverCall(("nvidia1",), 5.0, frozenset(), "vendor.dev/gpu"))
        assert granted.device == second
        meaning = world.node.resolve_id("vendor.dev/gpu", "nvidia0")
        assert meaning is not None
        assert meaning.device == first
