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
from tests.simulation.cluster import DEFAULT, SimulatedCluster
from tests.simulation.sharing import RESOURCE, shared_device_cluster
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

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
async def mixed_cluster(policy: Policy) -> AsyncIterator[SimulatedCluster]:
    """Provide device 0 of the usual model and device 1 of another one."""
    cluster = SimulatedCluster(2, policy)
    cluster.gpu(1).device = replace(cluster.gpu(1).device, model=OTHER_MODEL)
    try:
        await cluster.start_service()
        await cluster.until(cluster.settled)
        yield cluster
        cluster.check_laws()
        assert cluster.laws.breaches == []
    finally:
        await cluster.end()


async def offer(cluster: SimulatedCluster, resource: str, *numbers: int) -> None:
    """Announce, as a plugin, the devices that it hands out under ``resource``."""
    await cluster.node.announce(resource, {cluster.gpu(number).id: cluster.gpu(number).id for number in numbers})


async def out_of_service(cluster: SimulatedCluster, *numbers: int) -> None:
    """Put these devices into the state of waiting for a reboot that never comes."""
    for number in numbers:
        cluster.gpu(number).xids[79] = 1
        cluster.signal(number)
    await cluster.until(lambda: all(cluster.record(number).health is Health.QUARANTINED for number in numbers))


def offered(cluster: SimulatedCluster) -> list[bool]:
    return [view.advertised for view in cluster.node.view().devices]


# -- which policy applies ----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_certificate_names_the_policy_of_its_device() -> None:
    async with mixed_cluster(by_model(STRICT)) as cluster:
        issued = [cluster.record(number).certificate for number in (0, 1)]
        assert [each and (each.policy, each.policy_digest) for each in issued] == [
            ("default", DEFAULT.digest),
            ("default/strict", STRICT.digest),
        ]
        (granted,) = await request_start(cluster, await admitted(cluster, "acme", "train-0", 1))
        assert granted.certificate is not None
        assert cluster.ledger_store.certificates[granted.certificate].policy == "default/strict"


@in_virtual_time
async def test_view_names_the_policy_of_each_device() -> None:
    async with mixed_cluster(by_model(STRICT)) as cluster:
        assert [view.policy.name for view in cluster.node.view().devices] == ["default", "default/strict"]


@in_virtual_time
async def test_policy_override_by_model_decides_whether_a_restart_needs_a_certificate() -> None:
    """The same restart of the same container is an exception on one model, and needs a certificate on the other."""
    async with mixed_cluster(by_model(STRICT)) as cluster:
        exceptions = []
        for number in (0, 1):
            tenant = await started(cluster, "acme", f"train-{number}", number)
            await cluster.run(3.0)
            cluster.kubelet.exit(tenant, again=True)
            await cluster.until(lambda tenant=tenant: tenant.starts == 2)  # type: ignore[misc]
            grant = cluster.record(number).last_grant
            assert grant is not None
            exceptions.append(grant.basis.exception)
        assert exceptions == ["same-container", None]


@in_virtual_time
async def test_policy_override_by_model_sets_the_time_limits_of_a_scrub() -> None:
    """Clearing takes eight seconds: too long for a limit of five, and not for sixty."""
    async with mixed_cluster(by_model(PATIENT)) as cluster:
        cluster.gpu(0).slow = cluster.gpu(1).slow = 10.0
        for number in (0, 1):
            assert cluster.service is not None
            await cluster.service.scrub(cluster.gpu(number).id)
        assert cluster.record(0).health is not Health.HEALTHY
        assert cluster.record(1).health is Health.HEALTHY
        assert cluster.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_first_matching_policy_override_applies() -> None:
    both = replace(
        DEFAULT,
        overrides=(PolicyOverride(PATIENT, models=("Another *",)), PolicyOverride(STRICT, models=("*",), resources=())),
    )
    async with mixed_cluster(both) as cluster:
        assert [view.policy.name for view in cluster.node.view().devices] == ["default/strict", "default/patient"]


@in_virtual_time
async def test_policy_override_with_a_model_and_a_resource_applies_only_if_both_match() -> None:
    both = replace(DEFAULT, overrides=(PolicyOverride(STRICT, models=("Another *",), resources=(LAB,)),))
    async with mixed_cluster(both) as cluster:
        assert [view.policy.name for view in cluster.node.view().devices] == ["default", "default"]
        await offer(cluster, LAB, 0, 1)
        assert [view.policy.name for view in cluster.node.view().devices] == ["default", "default/strict"]


# -- announcements -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_whose_policy_changes_with_its_announced_resource_is_scrubbed_again() -> None:
    async with mixed_cluster(by_resource(STRICT)) as cluster:
        before = [cluster.record(number).certificate for number in (0, 1)]
        await offer(cluster, LAB, 1)
        await cluster.run(0.5)
        await cluster.until(cluster.settled)
        after = [cluster.record(number).certificate for number in (0, 1)]
        assert after[0] == before[0]
        assert after[1] is not None
        assert after[1] != before[1]
        assert after[1].policy_digest == STRICT.digest


@in_virtual_time
async def test_certificate_of_the_former_policy_is_not_accepted_after_the_announced_resource_changed_the_policy() -> (
    None
):
    async with mixed_cluster(by_resource(STRICT)) as cluster:
        tenant = await admitted(cluster, "acme", "train-0", 1)
        await offer(cluster, LAB, 1)
        (granted,) = await request_start(cluster, tenant)
        assert granted.certificate is not None
        fast = cluster.ledger_store.certificates[granted.certificate]
        assert cluster.ledger_store.certificates[fast.rests_on or ""].policy_digest == STRICT.digest


@in_virtual_time
async def test_announcement_that_changes_no_policy_triggers_no_scrub() -> None:
    async with mixed_cluster(by_resource(STRICT)) as cluster:
        await offer(cluster, "example.com/other", 0, 1)
        before = [cluster.record(number).certificate for number in (0, 1)]
        await cluster.run(30.0)
        await offer(cluster, "example.com/other", 0, 1)
        await cluster.run(30.0)
        assert [cluster.record(number).certificate for number in (0, 1)] == before


@in_virtual_time
async def test_running_pod_keeps_its_device_when_an_announcement_changes_the_policy() -> None:
    async with mixed_cluster(by_resource(STRICT)) as cluster:
        tenant = await started(cluster, "acme", "train-0", 1)
        await offer(cluster, LAB, 1)
        await cluster.run(30.0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert cluster.record(1).hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_resource_of_the_last_grant_selects_the_policy_after_a_restart_until_a_plugin_announces_one() -> None:
    """Otherwise an observed device would be refused, and a strict one granted, for as long as the plugin is away."""
    policies = by_resource(OBSERVE, RESOURCE)
    async with shared_device_cluster(1, policies) as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        await out_of_service(cluster, 0)
        assert offered(cluster) == [True]
        cluster.kill()
        await cluster.start_service()
        assert cluster.node.own_resources == {RESOURCE}
        assert offered(cluster) == [True]


# -- observe mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["node", "model", "resource"])
def test_quarantined_device_under_an_observing_policy_is_advertised_and_granted(how: str) -> None:
    policy = {"node": OBSERVE, "model": by_model(OBSERVE), "resource": by_resource(OBSERVE)}[how]

    @in_virtual_time
    async def play() -> None:
        async with mixed_cluster(policy) as cluster:
            await offer(cluster, LAB, 1)
            await out_of_service(cluster, 0, 1)
            assert offered(cluster) == [how == "node", True]
            await cluster.node.reserve([cluster.gpu(1).id])
            (granted,) = await request_start(cluster, await admitted(cluster, "acme", "train-0", 1))
            assert granted.basis is Basis.OBSERVE_MODE
            assert cluster.record(1).health is Health.QUARANTINED

    play()


@pytest.mark.parametrize("how", ["model", "resource"])
def test_observing_policy_of_one_device_does_not_affect_an_enforced_one(how: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with mixed_cluster({"model": by_model, "resource": by_resource}[how](OBSERVE)) as cluster:
            await offer(cluster, "example.com/gpu", 0)
            await offer(cluster, LAB, 1)
            await out_of_service(cluster, 0, 1)
            with pytest.raises(Quarantined):
                await cluster.node.reserve([cluster.gpu(0).id])
            refused = cluster.kubelet.admit("acme", "train-0", [cluster.gpu(0).id], starts=False)
            assert isinstance(await refusal_of(request_start(cluster, refused, wait=1.0)), Quarantined)
            (granted,) = await request_start(cluster, await admitted(cluster, "acme", "train-1", 1))
            assert granted.basis is Basis.OBSERVE_MODE

    play()


@in_virtual_time
async def test_leftovers_are_killed_on_an_enforced_device_and_not_on_an_observed_one() -> None:
    async with mixed_cluster(by_model(OBSERVE)) as cluster:
        children = []
        for number in (0, 1):
            tenant = await started(cluster, "acme", f"train-{number}", number)
            await cluster.run(3.0)
            assert tenant.first is not None
            children.append(cluster.process_table.fork(tenant.first))
            cluster.kubelet.delete(tenant)
        await cluster.until(lambda: not children[0].alive, within=60.0)
        await cluster.run(300.0)
        assert children[1].alive
        follower = await admitted(cluster, "umbrella", "serve-0", 1)
        (granted,) = await request_start(cluster, follower, wait=5.0)
        assert granted.basis is Basis.OBSERVE_MODE


@in_virtual_time
async def test_observed_device_is_not_reset_for_recovery() -> None:
    async with mixed_cluster(by_model(OBSERVE)) as cluster:
        for number in (0, 1):
            cluster.gpu(number).xids[95] = 1
            cluster.signal(number)
        await cluster.until(lambda: cluster.gpu(0).resets == 1, within=60.0)
        await cluster.run(600.0)
        assert cluster.gpu(1).resets == 0
        assert offered(cluster) == [True, True]
        assert cluster.record(1).recovery_attempts == ()  # nor does it use up the budget of an enforcing policy


@in_virtual_time
async def test_scrub_of_an_observed_device_makes_no_reset_although_its_policy_requires_resets() -> None:
    watched = replace(OBSERVE, reset=ResetMode.REQUIRED)
    async with mixed_cluster(
        replace(DEFAULT, reset=ResetMode.REQUIRED, overrides=by_model(watched).overrides)
    ) as cluster:
        before = [cluster.gpu(number).resets for number in (0, 1)]
        for number in (0, 1):
            assert cluster.service is not None
            await cluster.service.scrub(cluster.gpu(number).id)
        assert [cluster.gpu(number).resets for number in (0, 1)] == [before[0] + 1, 0]
        assert cluster.record(1).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_observed_device_is_judged_audited_and_scrubbed_like_any_other() -> None:
    async with mixed_cluster(by_model(OBSERVE)) as cluster:
        await out_of_service(cluster, 1)
        (event,) = [each for each in cluster.ledger_store.events if each.name == "health.quarantined"]
        assert (event.device, event.fields["cause"]) == (cluster.gpu(1).id, "xid-79")
        tenant = await started(cluster, "acme", "train-0", 1)
        cluster.gpu(1).clear_faults()
        cluster.kubelet.delete(tenant)
        await cluster.node.actions.unquarantine("1", "it was looked at", "uid:0")
        await cluster.until(lambda: cluster.record(1).state == "clean")
        assert cluster.gpu(1).cells == [""] * 4


@in_virtual_time
async def test_observed_device_quarantined_by_an_operator_is_refused() -> None:
    async with mixed_cluster(by_model(OBSERVE)) as cluster:
        await cluster.node.actions.quarantine("1", "kept for the lab", "uid:0")
        assert offered(cluster) == [True, False]
        with pytest.raises(Quarantined):
            await cluster.node.reserve([cluster.gpu(1).id])
        tenant = cluster.kubelet.admit("acme", "train-0", [cluster.gpu(1).id], starts=False)
        assert isinstance(await refusal_of(request_start(cluster, tenant, wait=1.0)), Quarantined)


@in_virtual_time
async def test_observed_device_is_advertised_at_once_after_an_operator_releases_it() -> None:
    async with mixed_cluster(by_model(OBSERVE)) as cluster:
        await cluster.node.actions.quarantine("1", "kept for the lab", "uid:0")
        holder = cluster.process_table.start(None, "host", "host")
        cluster.process_table.open(holder, cluster.gpu(1).id)  # prevents its probation from starting
        await cluster.node.actions.unquarantine("1", "the lab is done", "uid:0")
        assert cluster.record(1).health is Health.PROBATION
        assert offered(cluster) == [True, True]


@in_virtual_time
async def test_restart_after_a_grant_by_an_observing_policy_needs_a_certificate_under_an_enforcing_policy() -> None:
    """After a switch to enforcing, nothing relies on what observe mode permitted."""
    async with mixed_cluster(OBSERVE) as cluster:
        first = await started(cluster, "acme", "train-0", 0)
        cluster.kubelet.force_delete(first, lives_on=60.0)
        second = await cluster.admit("acme", "train-1", (0,))
        assert second is not None
        await cluster.until(lambda: second.running)
        grant = cluster.record(0).last_grant
        assert grant is not None
        assert grant.basis is Basis.OBSERVE_MODE
        await cluster.run(90.0)
        cluster.policy = DEFAULT
        cluster.kubelet.exit(second, again=True)
        await cluster.until(lambda: second.starts == 2)
        grant = cluster.record(0).last_grant
        assert grant is not None
        assert grant.basis is Basis.CERTIFICATE
