"""Policy overrides by model or by resource, and what a policy that only observes leaves alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scrubber.domain.errors import Quarantined
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.policy import Enforcement, Limits, Policy, PolicyOverride, RequiredProof, ResetMode
from scrubber.domain.states import Health, Hygiene
from tests.world.asking import admitted, answered, ask, started
from tests.world.sharing import RESOURCE, a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World

OTHER_MODEL, LAB = "Another Two", "example.com/lab"
OBSERVE = replace(DEFAULT, name="default/watched", digest="sha256:watched", enforcement=Enforcement.OBSERVE)
STRICT = replace(
    DEFAULT,
    name="default/strict",
    digest="sha256:strict",
    required_proofs=dict.fromkeys(HandOverKind, RequiredProof.CERTIFICATE),
)
PATIENT = replace(
    DEFAULT, name="default/patient", digest="sha256:patient", limits=replace(Limits(), clear_timeout_base=60.0)
)


def by_model(policy: Policy) -> Policy:
    """Return the default policy, with ``policy`` for devices of the other model."""
    return replace(DEFAULT, overrides=(PolicyOverride(policy, models=("Another *",)),))


def by_resource(policy: Policy, resource: str = LAB) -> Policy:
    return replace(DEFAULT, overrides=(PolicyOverride(policy, resources=(resource,)),))


@asynccontextmanager
async def a_mixed_world(policy: Policy) -> AsyncIterator[World]:
    """Provide device 0 of the usual model and device 1 of another one."""
    world = World(2, policy)
    world.gpu(1).device = replace(world.gpu(1).device, model=OTHER_MODEL)
    try:
        await world.start_service()
        await world.until(world.settled)
        yield world
        world.look()
        assert world.laws.breaches == []
    finally:
        await world.end()


async def offer(world: World, resource: str, *numbers: int) -> None:
    """Announce, as a plugin, the devices that it hands out under ``resource``."""
    await world.node.announce(resource, {world.gpu(number).id: world.gpu(number).id for number in numbers})


async def out_of_service(world: World, *numbers: int) -> None:
    """Put these devices into the state of waiting for a reboot that never comes."""
    for number in numbers:
        world.gpu(number).xids[79] = 1
        world.signal(number)
    await world.until(lambda: all(world.record(number).health is Health.QUARANTINED for number in numbers))


def offered(world: World) -> list[bool]:
    return [view.advertised for view in world.node.view().devices]


# -- which policy applies ----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_certificate_names_the_policy_of_its_device() -> None:
    async with a_mixed_world(by_model(STRICT)) as world:
        issued = [world.record(number).certificate for number in (0, 1)]
        assert [each and (each.policy, each.policy_digest) for each in issued] == [
            ("default", DEFAULT.digest),
            ("default/strict", STRICT.digest),
        ]
        (granted,) = await ask(world, await admitted(world, "acme", "train-0", 1))
        assert granted.certificate is not None
        assert world.vault.certificates[granted.certificate].policy == "default/strict"


@in_virtual_time
async def test_view_names_the_policy_of_each_device() -> None:
    async with a_mixed_world(by_model(STRICT)) as world:
        assert [view.policy.name for view in world.node.view().devices] == ["default", "default/strict"]


@in_virtual_time
async def test_policy_override_by_model_decides_whether_a_restart_needs_a_certificate() -> None:
    """The same restart of the same container is an exception on one model, and needs a certificate on the other."""
    async with a_mixed_world(by_model(STRICT)) as world:
        exceptions = []
        for number in (0, 1):
            tenant = await started(world, "acme", f"train-{number}", number)
            await world.run(3.0)
            world.kubelet.exit(tenant, again=True)
            await world.until(lambda tenant=tenant: tenant.starts == 2)  # type: ignore[misc]
            grant = world.record(number).last_grant
            assert grant is not None
            exceptions.append(grant.basis.exception)
        assert exceptions == ["same-container", None]


@in_virtual_time
async def test_policy_override_by_model_sets_the_time_limits_of_a_scrub() -> None:
    """Clearing takes eight seconds: too long for a limit of five, and not for sixty."""
    async with a_mixed_world(by_model(PATIENT)) as world:
        world.gpu(0).slow = world.gpu(1).slow = 10.0
        for number in (0, 1):
            assert world.service is not None
            await world.service.scrub(world.gpu(number).id)
        assert world.record(0).health is not Health.HEALTHY
        assert world.record(1).health is Health.HEALTHY
        assert world.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_first_matching_policy_override_applies() -> None:
    both = replace(
        DEFAULT,
        overrides=(PolicyOverride(PATIENT, models=("Another *",)), PolicyOverride(STRICT, models=("*",), resources=())),
    )
    async with a_mixed_world(both) as world:
        assert [view.policy.name for view in world.node.view().devices] == ["default/strict", "default/patient"]


@in_virtual_time
async def test_policy_override_with_a_model_and_a_resource_applies_only_if_both_match() -> None:
    both = replace(DEFAULT, overrides=(PolicyOverride(STRICT, models=("Another *",), resources=(LAB,)),))
    async with a_mixed_world(both) as world:
        assert [view.policy.name for view in world.node.view().devices] == ["default", "default"]
        await offer(world, LAB, 0, 1)
        assert [view.policy.name for view in world.node.view().devices] == ["default", "default/strict"]


# -- announcements -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_whose_policy_changes_with_its_announced_resource_is_scrubbed_again() -> None:
    async with a_mixed_world(by_resource(STRICT)) as world:
        before = [world.record(number).certificate for number in (0, 1)]
        await offer(world, LAB, 1)
        await world.run(0.5)
        await world.until(world.settled)
        after = [world.record(number).certificate for number in (0, 1)]
        assert after[0] == before[0]
        assert after[1] is not None
        assert after[1] != before[1]
        assert after[1].policy_digest == STRICT.digest


@in_virtual_time
async def test_certificate_of_the_former_policy_is_not_accepted_after_the_announced_resource_changed_the_policy() -> (
    None
):
    async with a_mixed_world(by_resource(STRICT)) as world:
        tenant = await admitted(world, "acme", "train-0", 1)
        await offer(world, LAB, 1)
        (granted,) = await ask(world, tenant)
        assert granted.certificate is not None
        fast = world.vault.certificates[granted.certificate]
        assert world.vault.certificates[fast.rests_on or ""].policy_digest == STRICT.digest


@in_virtual_time
async def test_announcement_that_changes_no_policy_triggers_no_scrub() -> None:
    async with a_mixed_world(by_resource(STRICT)) as world:
        await offer(world, "example.com/other", 0, 1)
        before = [world.record(number).certificate for number in (0, 1)]
        await world.run(30.0)
        await offer(world, "example.com/other", 0, 1)
        await world.run(30.0)
        assert [world.record(number).certificate for number in (0, 1)] == before


@in_virtual_time
async def test_running_pod_keeps_its_device_when_an_announcement_changes_the_policy() -> None:
    async with a_mixed_world(by_resource(STRICT)) as world:
        tenant = await started(world, "acme", "train-0", 1)
        await offer(world, LAB, 1)
        await world.run(30.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.record(1).hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_resource_of_the_last_grant_selects_the_policy_after_a_restart_until_a_plugin_announces_one() -> None:
    """Otherwise an observed device would be refused, and a strict one granted, for as long as the plugin is away."""
    policies = by_resource(OBSERVE, RESOURCE)
    async with a_shared_world(1, policies) as world:
        await world.start("acme", "train-0", world.share(0))
        await out_of_service(world, 0)
        assert offered(world) == [True]
        world.kill()
        await world.start_service()
        assert world.node.own_resources == {RESOURCE}
        assert offered(world) == [True]


# -- observe mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["node", "model", "resource"])
def test_quarantined_device_under_an_observing_policy_is_advertised_and_granted(how: str) -> None:
    policy = {"node": OBSERVE, "model": by_model(OBSERVE), "resource": by_resource(OBSERVE)}[how]

    @in_virtual_time
    async def play() -> None:
        async with a_mixed_world(policy) as world:
            await offer(world, LAB, 1)
            await out_of_service(world, 0, 1)
            assert offered(world) == [how == "node", True]
            await world.node.reserve([world.gpu(1).id])
            (granted,) = await ask(world, await admitted(world, "acme", "train-0", 1))
            assert granted.basis is Basis.OBSERVE_MODE
            assert world.record(1).health is Health.QUARANTINED

    play()


@pytest.mark.parametrize("how", ["model", "resource"])
def test_observing_policy_of_one_device_does_not_affect_an_enforced_one(how: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with a_mixed_world({"model": by_model, "resource": by_resource}[how](OBSERVE)) as world:
            await offer(world, "example.com/gpu", 0)
            await offer(world, LAB, 1)
            await out_of_service(world, 0, 1)
            with pytest.raises(Quarantined):
                await world.node.reserve([world.gpu(0).id])
            refused = world.kubelet.admit("acme", "train-0", [world.gpu(0).id], starts=False)
            assert isinstance(await answered(ask(world, refused, wait=1.0)), Quarantined)
            (granted,) = await ask(world, await admitted(world, "acme", "train-1", 1))
            assert granted.basis is Basis.OBSERVE_MODE

    play()


@in_virtual_time
async def test_leftovers_are_killed_on_an_enforced_device_and_not_on_an_observed_one() -> None:
    async with a_mixed_world(by_model(OBSERVE)) as world:
        children = []
        for number in (0, 1):
            tenant = await started(world, "acme", f"train-{number}", number)
            await world.run(3.0)
            assert tenant.first is not None
            children.append(world.matter.fork(tenant.first))
            world.kubelet.delete(tenant)
        await world.until(lambda: not children[0].alive, within=60.0)
        await world.run(300.0)
        assert children[1].alive
        follower = await admitted(world, "umbrella", "serve-0", 1)
        (granted,) = await ask(world, follower, wait=5.0)
        assert granted.basis is Basis.OBSERVE_MODE


@in_virtual_time
async def test_observed_device_is_not_reset_for_recovery() -> None:
    async with a_mixed_world(by_model(OBSERVE)) as world:
        for number in (0, 1):
            world.gpu(number).xids[95] = 1
            world.signal(number)
        await world.until(lambda: world.gpu(0).resets == 1, within=60.0)
        await world.run(600.0)
        assert world.gpu(1).resets == 0
        assert offered(world) == [True, True]
        assert world.record(1).recovery_attempts == ()  # nor does it use up the budget of an enforcing policy


@in_virtual_time
async def test_scrub_of_an_observed_device_makes_no_reset_although_its_policy_requires_resets() -> None:
    watched = replace(OBSERVE, reset=ResetMode.REQUIRED)
    async with a_mixed_world(
        replace(DEFAULT, reset=ResetMode.REQUIRED, overrides=by_model(watched).overrides)
    ) as world:
        before = [world.gpu(number).resets for number in (0, 1)]
        for number in (0, 1):
            assert world.service is not None
            await world.service.scrub(world.gpu(number).id)
        assert [world.gpu(number).resets for number in (0, 1)] == [before[0] + 1, 0]
        assert world.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_observed_device_is_judged_audited_and_scrubbed_like_any_other() -> None:
    async with a_mixed_world(by_model(OBSERVE)) as world:
        await out_of_service(world, 1)
        (event,) = [each for each in world.vault.events if each.name == "health.quarantined"]
        assert (event.device, event.fields["cause"]) == (world.gpu(1).id, "xid-79")
        tenant = await started(world, "acme", "train-0", 1)
        world.gpu(1).mend()
        world.kubelet.delete(tenant)
        await world.node.actions.unquarantine("1", "it was looked at", "uid:0")
        await world.until(lambda: world.record(1).state == "clean")
        assert world.gpu(1).cells == [""] * 4


@in_virtual_time
async def test_observed_device_quarantined_by_an_operator_is_refused() -> None:
    async with a_mixed_world(by_model(OBSERVE)) as world:
        await world.node.actions.quarantine("1", "kept for the lab", "uid:0")
        assert offered(world) == [True, False]
        with pytest.raises(Quarantined):
            await world.node.reserve([world.gpu(1).id])
        tenant = world.kubelet.admit("acme", "train-0", [world.gpu(1).id], starts=False)
        assert isinstance(await answered(ask(world, tenant, wait=1.0)), Quarantined)


@in_virtual_time
async def test_observed_device_is_advertised_at_once_after_an_operator_releases_it() -> None:
    async with a_mixed_world(by_model(OBSERVE)) as world:
        await world.node.actions.quarantine("1", "kept for the lab", "uid:0")
        holder = world.matter.start(None, "host", "host")
        world.matter.open(holder, world.gpu(1).id)  # prevents its probation from starting
        await world.node.actions.unquarantine("1", "the lab is done", "uid:0")
        assert world.record(1).health is Health.PROBATION
        assert offered(world) == [True, True]


@in_virtual_time
async def test_restart_after_a_grant_by_an_observing_policy_needs_a_certificate_under_an_enforcing_policy() -> None:
    """After a switch to enforcing, nothing relies on what observe mode permitted."""
    async with a_mixed_world(OBSERVE) as world:
        first = await started(world, "acme", "train-0", 0)
        world.kubelet.force_delete(first, lives_on=60.0)
        second = await world.admit("acme", "train-1", (0,))
        assert second is not None
        await world.until(lambda: second.running)
        grant = world.record(0).last_grant
        assert grant is not None
        assert grant.basis is Basis.OBSERVE_MODE
        await world.run(90.0)
        world.policy = DEFAULT
        world.kubelet.exit(second, again=True)
        await world.until(lambda: second.starts == 2)
        grant = world.record(0).last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
