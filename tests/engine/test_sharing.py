"""Shared devices: pods of one tenant may be on one together, nothing is cleared meanwhile, and the last one's leaving is
what has it scrubbed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Assignment, Pod, Trust
from scrubber.domain.basis import Basis
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidRequest, NotReady, Quarantined
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Limits, Sharing
from scrubber.engine.views import HandOverCall
from tests.world.kubelet import Tenant
from tests.world.sharing import RESOURCE, SharedWorld, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT

NEVER = replace(DEFAULT, name="alone", digest="sha256:alone", sharing=Sharing.NEVER)
OBSERVE = replace(DEFAULT, name="watching", digest="sha256:watching", enforcement=Enforcement.OBSERVE)


def exceptions(world: SharedWorld) -> list[str | None]:
    return [grant.basis.exception for _, grant in sorted(world.vault.grants.items())]


# -- together ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_two_pods_of_a_tenant_share_a_device_and_nothing_is_cleared_while_one_of_them_lives() -> None:
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
async def test_a_joiners_certificate_says_that_others_hold_the_device_and_that_its_memory_was_left() -> None:
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
async def test_nobody_joins_where_a_stranger_was_seen_before_it_was_scrubbed_whoever_is_restarted_meanwhile() -> None:
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
async def test_several_shares_of_a_device_in_one_request_are_the_device_once() -> None:
    async with a_shared_world() as world:
        tenant = await world.admit_shares("acme", "train-0", world.share(0), world.share(3), starts=False)
        (granted,) = await world.call(tenant)
        assert granted.device == world.gpu().id
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_grants_of_pods_that_are_over_do_not_pile_up_while_a_device_is_shared_without_a_pause() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "serve-0", world.share(0))
        for number in range(6):
            job = await world.start("acme", f"job-{number}", world.share(1))
            world.kubelet.delete(job)
            await world.run(3.0)
        assert len(world.record().open_grants) <= 2


@pytest.mark.parametrize("tenant", ["umbrella", "acme"])
def test_nobody_joins_once_a_restarted_kubelet_may_have_started_another_tenant_that_waited(tenant: str) -> None:
    """It starts without asking until the plugin is back, and that start was over before anybody looked."""

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
async def test_a_share_that_was_granted_to_nobody_knows_whom_is_not_taken_for_the_only_pod_that_is_left() -> None:
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
async def test_a_pod_of_another_tenant_waits_until_everybody_has_left_and_finds_the_device_clean() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.start("acme", "train-1", world.share(1))
        stranger = await world.admit_shares("umbrella", "serve-0", world.share(2), starts=False)
        refusal = await world.refused(stranger)
        assert refusal.code == "sharing"
        assert "acme/train-0" in str(refusal)
        world.kubelet.delete(first)
        assert (await world.refused(stranger)).code == "sharing"
        world.kubelet.delete(second)
        (granted,) = await world.call(stranger)
        assert granted.basis is Basis.CERTIFICATE
        assert not any(world.gpu().cells)


@in_virtual_time
async def test_start_on_a_share_is_refused_once_the_kubelet_gives_the_share_to_another_pod() -> None:
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
async def test_the_policy_may_let_no_two_pods_be_on_one_device() -> None:
    async with a_shared_world(policy=NEVER) as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing"
        assert "sharing: never" in str(refusal)
        world.kubelet.delete(first)
        (granted,) = await world.call(second)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_nobody_joins_while_no_witness_says_who_it_is() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        world.kubelet.trust = Trust.UNREADABLE
        assert (await world.refused(second)).code == "sharing"
        world.kubelet.trust = Trust.TRUSTED
        (granted,) = await world.call(second)
        assert granted.basis is Basis.SHARED


@in_virtual_time
async def test_observing_refuses_no_sharing() -> None:
    async with a_shared_world(policy=OBSERVE) as world:
        await world.start("acme", "train-0", world.share(0), writes=False)
        stranger = await world.admit_shares("umbrella", "serve-0", world.share(1), starts=False)
        (granted,) = await world.call(stranger, 1.0)
        assert granted.basis is Basis.OBSERVED


# -- the whole of it ---------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_device_that_somebody_has_whole_is_never_joined() -> None:
    async with a_shared_world() as world:
        whole = await world.admit("acme", "train-0")
        assert whole is not None
        await world.until(lambda: whole.running)
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing"
        assert "the whole of it" in str(refusal)


@in_virtual_time
async def test_a_device_of_which_somebody_has_a_share_is_never_given_whole() -> None:
    async with a_shared_world() as world:
        shared = await world.start("acme", "train-0", world.share(0))
        whole = world.kubelet.admit("acme", "train-1", [world.gpu().id], starts=False)
        # The kubelet names two pods for the device, so nobody is certain; it waits all the same.
        assert (await world.refused(whole)).code == "earlier-pod-lives"
        world.kubelet.delete(shared)
        (granted,) = await world.call(whole)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_the_whole_of_a_device_and_a_share_of_it_are_no_request() -> None:
    async with a_shared_world() as world:
        with pytest.raises(InvalidRequest, match="twice"):
            await world.node.reserve([world.gpu().id, world.share(0)], RESOURCE)


# -- restarts ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_restart_beside_others_joins_again_and_alone_afterwards_it_waits_for_the_scrub() -> None:
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
async def test_whoever_had_a_shared_device_to_itself_restarts_by_the_policys_exception() -> None:
    async with a_shared_world() as world:
        only = await world.start("acme", "train-0", world.share(0))
        await world.run(2.0)
        world.kubelet.exit(only, again=True)
        await world.until(lambda: only.starts == 2)
        assert exceptions(world) == [None, "same-container"]


@in_virtual_time
async def test_sharing_goes_on_across_a_restart_of_the_service() -> None:
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
        assert (await world.refused(stranger)).code == "sharing"


@in_virtual_time
async def test_nobody_joins_once_a_pod_had_the_device_without_asking() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        unasked = Assignment(second.pod, "main", frozenset({world.gpu().id}), RESOURCE)
        await world.controller().occupancy.adopt(unasked)
        third = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        refusal = await world.refused(third)
        assert refusal.code == "sharing"
        assert "before it was proved clean" in str(refusal)
        world.kubelet.delete(first)
        world.kubelet.delete(second)
        await world.run(DEFAULT.limits.dying_grace)
        (granted,) = await world.call(third)
        assert granted.basis is Basis.CERTIFICATE


# -- what is off -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_nobody_joins_beside_a_leftover() -> None:
    async with a_shared_world(policy=replace(DEFAULT, limits=replace(Limits(), dying_grace=5.0))) as world:
        first = await world.start("acme", "train-0", world.share(0))
        second = await world.start("acme", "train-1", world.share(1))
        world.kubelet.force_delete(first, lives_on=600.0)
        await world.run(15.0)
        third = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        refusal = await world.refused(third)
        assert refusal.code == "sharing"
        assert "left processes behind" in str(refusal)
        world.kubelet.delete(second)
        (granted,) = await world.call(third)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_nobody_joins_where_somebody_used_the_device_without_a_grant_before_it_was_scrubbed() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        proc = world.use(world.gpu())
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing"
        assert "without a grant" in str(refusal)
        world.matter.end(proc)
        assert (await world.refused(second)).code == "sharing"
        world.kubelet.delete(first)
        (granted,) = await world.call(second)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_unauthorized_use_that_only_the_checks_of_a_shared_start_see_is_recorded() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)

        async def held() -> bool:
            return False

        world.controller().occupancy.held = held  # type: ignore[method-assign]
        world.use(world.gpu())
        assert "without a grant" in str(await world.refused(second))
        assert world.record().tainted


@in_virtual_time
async def test_a_tenants_process_that_ends_while_it_is_asked_about_is_no_stranger() -> None:
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
        assert not world.record().tainted


@in_virtual_time
async def test_settings_that_are_off_cannot_be_put_right_while_others_are_there() -> None:
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        world.gpu().settings["compute-mode"] = "exclusive-process"
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        refusal = await world.refused(second)
        assert refusal.code == "sharing"
        assert "compute-mode" in str(refusal)
        world.kubelet.delete(first)
        await world.call(second)
        assert world.gpu().settings["compute-mode"] == "default"


@in_virtual_time
async def test_a_faulty_device_is_joined_by_nobody() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        world.gpu().xids[95] = 1
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        assert isinstance(await world.refused(second), Quarantined)
        assert world.record().health is Health.QUARANTINED


# -- answers that nobody heard -----------------------------------------------------------------------------------------


async def unheard(world: SharedWorld, tenant: Tenant) -> None:
    """The grant becomes durable, and at that very moment its caller is gone."""
    call = world.call(tenant)
    world.vault.granting = call.cancel
    await asyncio.wait({call})
    world.vault.granting = None
    assert call.cancelled()
    await world.run(0.1)


@in_virtual_time
async def test_whoever_was_not_told_of_its_share_is_given_the_same_answer_and_nobody_else_is() -> None:
    async with a_shared_world() as world:
        first = await world.admit_shares("acme", "train-0", world.share(0), starts=False)
        second = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        await unheard(world, first)
        (granted,) = await world.call(first)
        assert granted.grant == 1
        await unheard(world, second)
        (other,) = await world.call(second)
        assert (other.grant, other.basis) == (2, "shared")
        assert world.record().grants == 2


# -- assignments that we did not make ----------------------------------------------------------------------------------


async def elsewhere(world: SharedWorld) -> Tenant:
    """A pod of ours, and one that another plugin gave the same device to."""
    gpu = world.gpu().id
    world.elsewhere = (Assignment(Pod("umbrella", "claims", "uid-x"), "main", frozenset({gpu}), "gpu.vendor.com"),)
    return await world.admit_shares("acme", "train-1", world.share(1), starts=False)


@in_virtual_time
async def test_a_device_that_another_plugin_gave_to_another_pod_is_handed_to_nobody() -> None:
    async with a_shared_world() as world:
        tenant = await elsewhere(world)
        refusal = await world.refused(tenant)
        assert refusal.code == "foreign-assignment"
        assert "umbrella/claims" in str(refusal)
        assert "gpu.vendor.com" in refusal.public
        world.elsewhere = ()
        await world.call(tenant)


@in_virtual_time
async def test_an_assignment_that_we_did_not_make_is_a_finding() -> None:
    """Beside a rightful tenant, too: it is told, no exception outlives it, and it is in the way of the next start."""
    async with a_shared_world() as world:
        first = await world.start("acme", "train-0", world.share(0))
        later = await elsewhere(world)
        await world.run(2.0)
        assert world.journal is not None
        found = [event for event in world.journal.events if event.fields.get("use") == "foreign-assignment"]
        assert [(event.name, event.device) for event in found] == [("use.ungranted", world.gpu().id)]
        assert not world.record().watched
        assert first.running
        assert (await world.refused(later)).code == "foreign-assignment"


@in_virtual_time
async def test_a_plugin_of_ours_makes_no_foreign_assignments() -> None:
    async with a_shared_world() as world:
        await world.node.announce("gpu.vendor.com", {})
        assert world.node.own_resources == {"gpu.vendor.com"}
        tenant = await elsewhere(world)
        await world.call(tenant)
        assert world.node.own_resources == {"gpu.vendor.com", RESOURCE}


@in_virtual_time
async def test_while_no_plugin_has_named_its_resource_nothing_is_foreign() -> None:
    async with a_shared_world() as world:
        tenant = await elsewhere(world)
        world.kill()
        await world.start_service()  # which nobody has told anything
        await world.until(world.settled)
        assert world.node.own_resources == frozenset()
        assert world.service is not None
        await world.service.hand_over(HandOverCall(tenant.devices, 5.0))


@in_virtual_time
async def test_after_a_restart_of_the_service_the_resources_of_open_grants_are_known_to_be_ours() -> None:
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        world.kill()
        await world.start_service()
        assert world.node.own_resources == {RESOURCE}


# -- announced ids -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_ids_of_a_plugins_own_making_mean_what_it_announced() -> None:
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
        meaning = world.node.meaning("vendor.dev/gpu", "nvidia0")
        assert meaning is not None
        assert meaning.device == first
