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
from tests.simulation.cluster import DEFAULT
from tests.simulation.kubelet import Tenant
from tests.simulation.sharing import RESOURCE, SharedDeviceCluster, shared_device_cluster
from tests.simulation.timeline import in_virtual_time

NEVER = replace(DEFAULT, name="alone", digest="sha256:alone", sharing=SharingMode.NEVER)
OBSERVE = replace(DEFAULT, name="watching", digest="sha256:watching", enforcement=Enforcement.OBSERVE)


def exceptions(cluster: SharedDeviceCluster) -> list[str | None]:
    return [grant.basis.exception for _, grant in sorted(cluster.ledger_store.grants.items())]


# -- sharing -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_two_pods_of_a_tenant_share_a_device_and_nothing_is_cleared_while_a_pod_lives() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.start("acme", "train-1", cluster.share(1))
        erasers = cluster.erasers.started
        cluster.kubelet.delete(first)
        await cluster.run(20.0)
        assert cluster.erasers.started == erasers
        assert cluster.record().hygiene is Hygiene.IN_USE
        cluster.kubelet.delete(second)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert cluster.erasers.started == erasers + 1
        assert exceptions(cluster) == [None, "shared"]


@in_virtual_time
async def test_certificate_of_a_shared_start_states_that_other_pods_hold_the_device_and_memory_was_left() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        await cluster.start("acme", "train-1", cluster.share(1))
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.certificate is not None
        certificate = cluster.ledger_store.certificates[grant.certificate]
        assert not any(line.startswith("holders") for line in certificate.covered)
        assert [line for line in certificate.not_covered if line.startswith("holders: shared with 1 pod,")]
        assert "memory: not cleared, as the policy allows for shared starts" in certificate.not_covered
        assert {line.partition(":")[0] for line in certificate.covered} == {"settings", "health"}


@in_virtual_time
async def test_shared_start_is_refused_after_unauthorized_use_until_a_scrub_even_across_a_service_restart() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        unauthorized = cluster.process_table.start(
            None, "host/miner#1", "x/host/miner#1", mounted=frozenset({cluster.gpu().id})
        )
        cluster.process_table.open(unauthorized, cluster.gpu().id)
        await cluster.run(3.0)
        cluster.process_table.end(unauthorized)
        cluster.kill()
        await cluster.start_service()
        waiting = await cluster.admit_shares("acme", "train-1", cluster.share(1))
        await cluster.run(100.0)
        assert not waiting.running


@in_virtual_time
async def test_several_shares_of_a_device_in_one_request_are_granted_as_one_device() -> None:
    async with shared_device_cluster() as cluster:
        tenant = await cluster.admit_shares("acme", "train-0", cluster.share(0), cluster.share(3), starts=False)
        (granted,) = await cluster.call(tenant)
        assert granted.device == cluster.gpu().id
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_grants_of_finished_pods_do_not_accumulate_while_a_device_is_shared_without_a_pause() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "serve-0", cluster.share(0))
        for number in range(6):
            job = await cluster.start("acme", f"job-{number}", cluster.share(1))
            cluster.kubelet.delete(job)
            await cluster.run(3.0)
        assert len(cluster.record().open_grants) <= 2


@pytest.mark.parametrize("tenant", ["umbrella", "acme"])
def test_shared_start_is_refused_if_a_restarted_kubelet_may_have_started_a_waiting_pod_of_another_tenant(
    tenant: str,
) -> None:
    """Until the plugin is back, the kubelet starts pods without a request; this one ended before any check."""

    @in_virtual_time
    async def join() -> None:
        async with shared_device_cluster() as cluster:
            await cluster.start("acme", "train-0", cluster.share(0))
            waited = await cluster.admit_shares(tenant, "serve-0", cluster.share(1), starts=False)
            await cluster.run(1.5)
            cluster.kubelet.starts += 1
            cluster.kubelet.delete(waited)
            second_pod = await cluster.admit_shares("acme", "train-1", cluster.share(2))
            await cluster.run(60.0)
            assert second_pod.running is (tenant == "acme")

    join()


@in_virtual_time
async def test_share_granted_while_the_kubelet_was_unreadable_is_not_attributed_to_the_only_remaining_pod() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.admit_shares("umbrella", "serve-0", cluster.share(0), starts=False)
        second = await cluster.admit_shares("acme", "train-0", cluster.share(1), starts=False)
        cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.call(first)
        cluster.kubelet.delete(first)
        cluster.kubelet.trust = Trust.TRUSTED
        await cluster.run(3.0)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.pod is None
        cluster.kubelet.retry_pre_start(second)
        await cluster.until(lambda: second.running, within=120.0)


# -- another tenant ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_pod_of_another_tenant_waits_until_all_sharing_pods_are_gone_and_gets_a_clean_device() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.start("acme", "train-1", cluster.share(1))
        unauthorized = await cluster.admit_shares("umbrella", "serve-0", cluster.share(2), starts=False)
        refusal = await cluster.refused(unauthorized)
        assert refusal.code == "sharing-not-allowed"
        assert "acme/train-0" in str(refusal)
        cluster.kubelet.delete(first)
        assert (await cluster.refused(unauthorized)).code == "sharing-not-allowed"
        cluster.kubelet.delete(second)
        (granted,) = await cluster.call(unauthorized)
        assert granted.basis is Basis.CERTIFICATE
        assert not any(cluster.gpu().cells)


@in_virtual_time
async def test_start_on_a_share_is_refused_once_the_kubelet_assigns_the_share_to_another_pod() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("umbrella", "serve-0", cluster.share(0))
        second = await cluster.admit_shares("acme", "train-0", cluster.share(1), starts=False)
        call = cluster.call(second, wait=60.0)
        await cluster.run(1.0)
        cluster.kubelet.delete(second)
        await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        with pytest.raises(NotReady) as refusal:
            await call
        assert refusal.value.code == ErrorCode.REASSIGNED


@in_virtual_time
async def test_start_on_a_share_goes_on_when_another_share_of_the_device_is_allocated() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("umbrella", "serve-0", cluster.share(0))
        second = await cluster.admit_shares("acme", "train-0", cluster.share(1), starts=False)
        call = cluster.call(second, wait=60.0)
        await cluster.run(1.0)
        await cluster.admit_shares("acme", "train-1", cluster.share(2), starts=False)
        cluster.kubelet.delete(first)
        (granted,) = await call
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_policy_may_forbid_two_pods_on_one_device() -> None:
    async with shared_device_cluster(policy=NEVER) as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        refusal = await cluster.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "sharing: never" in str(refusal)
        cluster.kubelet.delete(first)
        (granted,) = await cluster.call(second)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_shared_start_is_refused_while_the_kubelet_cannot_name_the_requesting_pod() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        cluster.kubelet.trust = Trust.UNREADABLE
        assert (await cluster.refused(second)).code == "sharing-not-allowed"
        cluster.kubelet.trust = Trust.TRUSTED
        (granted,) = await cluster.call(second)
        assert granted.basis is Basis.SHARED


@in_virtual_time
async def test_observing_policy_refuses_no_shared_start() -> None:
    async with shared_device_cluster(policy=OBSERVE) as cluster:
        await cluster.start("acme", "train-0", cluster.share(0), writes=False)
        unauthorized = await cluster.admit_shares("umbrella", "serve-0", cluster.share(1), starts=False)
        (granted,) = await cluster.call(unauthorized, 1.0)
        assert granted.basis is Basis.OBSERVE_MODE


# -- whole devices -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_device_granted_whole_is_never_shared() -> None:
    async with shared_device_cluster() as cluster:
        whole = await cluster.admit("acme", "train-0")
        assert whole is not None
        await cluster.until(lambda: whole.running)
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        refusal = await cluster.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "has the whole device" in str(refusal)


@in_virtual_time
async def test_device_with_a_granted_share_is_never_granted_whole() -> None:
    async with shared_device_cluster() as cluster:
        shared = await cluster.start("acme", "train-0", cluster.share(0))
        whole = cluster.kubelet.admit("acme", "train-1", [cluster.gpu().id], starts=False)
        # The kubelet names two pods for the device, so neither is certain; it still has to wait.
        assert (await cluster.refused(whole)).code == "earlier-pod-running"
        cluster.kubelet.delete(shared)
        (granted,) = await cluster.call(whole)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_request_for_a_whole_device_and_a_share_of_the_same_device_is_refused() -> None:
    async with shared_device_cluster() as cluster:
        with pytest.raises(InvalidRequest, match="twice"):
            await cluster.node.reserve([cluster.gpu().id, cluster.share(0)], RESOURCE)


# -- restarts ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_restart_beside_other_pods_is_a_shared_start_and_a_later_restart_alone_waits_for_the_scrub() -> None:
    """Another pod's bytes are on the device: the exception for the same container would let it start among them."""
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.start("acme", "train-1", cluster.share(1))
        cluster.kubelet.exit(first, again=True)
        await cluster.until(lambda: first.starts == 2)
        assert exceptions(cluster) == [None, "shared", "shared"]
        erasers = cluster.erasers.started
        cluster.kubelet.delete(second)
        await cluster.run(3.0)
        cluster.kubelet.exit(first, again=True)
        await cluster.until(lambda: first.starts == 3)
        assert cluster.erasers.started == erasers + 1
        assert exceptions(cluster)[-1] is None


@in_virtual_time
async def test_pod_alone_on_a_shared_device_restarts_by_the_policys_exception() -> None:
    async with shared_device_cluster() as cluster:
        only = await cluster.start("acme", "train-0", cluster.share(0))
        await cluster.run(2.0)
        cluster.kubelet.exit(only, again=True)
        await cluster.until(lambda: only.starts == 2)
        assert exceptions(cluster) == [None, "same-container"]


@in_virtual_time
async def test_sharing_continues_across_a_service_restart() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        await cluster.start("acme", "train-1", cluster.share(1))
        cluster.kill()
        await cluster.start_service()
        await cluster.until(cluster.settled)
        third = await cluster.admit_shares("acme", "train-2", cluster.share(2), starts=False)
        (granted,) = await cluster.call(third)
        assert granted.basis is Basis.SHARED
        cluster.kubelet.exit(first, again=True)
        await cluster.until(lambda: first.starts == 2)
        unauthorized = await cluster.admit_shares("umbrella", "serve-0", cluster.share(3), starts=False)
        assert (await cluster.refused(unauthorized)).code == "sharing-not-allowed"


@in_virtual_time
async def test_shared_start_is_refused_after_a_pod_started_without_a_grant() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        unasked = Assignment(second.pod, "main", frozenset({cluster.gpu().id}), RESOURCE)
        await cluster.controller().occupancy.adopt(unasked)
        third = await cluster.admit_shares("acme", "train-2", cluster.share(2), starts=False)
        refusal = await cluster.refused(third)
        assert refusal.code == "sharing-not-allowed"
        assert "before it was proved clean" in str(refusal)
        cluster.kubelet.delete(first)
        cluster.kubelet.delete(second)
        await cluster.run(DEFAULT.limits.leftover_grace_period)
        (granted,) = await cluster.call(third)
        assert granted.basis is Basis.CERTIFICATE


# -- refused starts ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_shared_start_beside_leftover_processes_is_refused() -> None:
    async with shared_device_cluster(
        policy=replace(DEFAULT, limits=replace(Limits(), leftover_grace_period=5.0))
    ) as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.start("acme", "train-1", cluster.share(1))
        cluster.kubelet.force_delete(first, lives_on=600.0)
        await cluster.run(15.0)
        third = await cluster.admit_shares("acme", "train-2", cluster.share(2), starts=False)
        refusal = await cluster.refused(third)
        assert refusal.code == "sharing-not-allowed"
        assert "left processes behind" in str(refusal)
        cluster.kubelet.delete(second)
        (granted,) = await cluster.call(third)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_shared_start_is_refused_after_unauthorized_use_until_the_device_was_scrubbed() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        proc = cluster.use(cluster.gpu())
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        refusal = await cluster.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "without a grant" in str(refusal)
        cluster.process_table.end(proc)
        assert (await cluster.refused(second)).code == "sharing-not-allowed"
        cluster.kubelet.delete(first)
        (granted,) = await cluster.call(second)
        assert granted.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_unauthorized_use_found_only_by_the_checks_of_a_shared_start_is_recorded() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)

        async def held() -> bool:
            return False

        cluster.controller().occupancy.is_held = held  # type: ignore[method-assign]
        cluster.use(cluster.gpu())
        assert "without a grant" in str(await cluster.refused(second))
        assert cluster.record().contaminated


@in_virtual_time
async def test_tenant_process_that_ends_during_the_check_of_a_shared_start_is_no_unauthorized_user() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        assert cluster.service is not None
        assert first.first is not None
        brief = cluster.process_table.fork(first.first)
        containers = cluster.service.dependencies.containers
        uid_of = containers.pod_uid_of

        async def after_its_end(pid: int) -> str | None:
            if pid == brief.pid:
                cluster.process_table.end(brief)
            return await uid_of(pid)

        containers.pod_uid_of = after_its_end  # type: ignore[method-assign]
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        (granted,) = await cluster.call(second)
        assert granted.basis is Basis.SHARED
        assert not cluster.record().contaminated


@in_virtual_time
async def test_changed_settings_of_a_shared_device_are_restored_only_after_the_other_pods_are_gone() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        cluster.gpu().settings["compute-mode"] = "exclusive-process"
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        refusal = await cluster.refused(second)
        assert refusal.code == "sharing-not-allowed"
        assert "compute-mode" in str(refusal)
        cluster.kubelet.delete(first)
        await cluster.call(second)
        assert cluster.gpu().settings["compute-mode"] == "default"


@in_virtual_time
async def test_shared_start_on_a_faulty_device_is_refused() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        cluster.gpu().xids[95] = 1
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        assert isinstance(await cluster.refused(second), Quarantined)
        assert cluster.record().health is Health.QUARANTINED


# -- undelivered answers -----------------------------------------------------------------------------------------------


async def cancelled_at_the_grant(cluster: SharedDeviceCluster, tenant: Tenant) -> None:
    """Cancel the caller at the moment the grant becomes durable."""
    call = cluster.call(tenant)
    cluster.ledger_store.granting = call.cancel
    await asyncio.wait({call})
    cluster.ledger_store.granting = None
    assert call.cancelled()
    await cluster.run(0.1)


@in_virtual_time
async def test_undelivered_grant_of_a_share_is_returned_again_to_the_same_pod_only() -> None:
    async with shared_device_cluster() as cluster:
        first = await cluster.admit_shares("acme", "train-0", cluster.share(0), starts=False)
        second = await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)
        await cancelled_at_the_grant(cluster, first)
        (granted,) = await cluster.call(first)
        assert granted.grant == 1
        await cancelled_at_the_grant(cluster, second)
        (other,) = await cluster.call(second)
        assert (other.grant, other.basis) == (2, "shared")
        assert cluster.record().grant_sequence == 2


# -- assignments by another plugin -------------------------------------------------------------------------------------


async def elsewhere(cluster: SharedDeviceCluster) -> Tenant:
    """Return a pod of this plugin, on a device that another plugin has assigned to another pod as well."""
    gpu = cluster.gpu().id
    cluster.elsewhere = (Assignment(Pod("umbrella", "claims", "uid-x"), "main", frozenset({gpu}), "gpu.vendor.com"),)
    return await cluster.admit_shares("acme", "train-1", cluster.share(1), starts=False)


@in_virtual_time
async def test_device_assigned_to_another_pod_by_another_plugin_is_not_granted() -> None:
    async with shared_device_cluster() as cluster:
        tenant = await elsewhere(cluster)
        refusal = await cluster.refused(tenant)
        assert refusal.code == "assigned-by-another-plugin"
        assert "umbrella/claims" in str(refusal)
        assert "gpu.vendor.com" in refusal.public_message
        cluster.elsewhere = ()
        await cluster.call(tenant)


@in_virtual_time
async def test_device_assigned_by_another_plugin_while_shared_is_logged_as_unauthorized_use_and_blocks_the_next_start() -> (
    None
):
    """This also holds beside an authorized tenant: the use is logged, ends exceptions, and blocks the next start."""
    async with shared_device_cluster() as cluster:
        first = await cluster.start("acme", "train-0", cluster.share(0))
        later = await elsewhere(cluster)
        await cluster.run(2.0)
        assert cluster.journal is not None
        found = [event for event in cluster.journal.events if event.fields.get("use") == "assigned-by-another-plugin"]
        assert [(event.name, event.device) for event in found] == [("unauthorized.use.detected", cluster.gpu().id)]
        assert not cluster.record().exclusive_use
        assert first.running
        assert (await cluster.refused(later)).code == "assigned-by-another-plugin"


@in_virtual_time
async def test_assignment_through_an_announced_resource_is_not_one_of_another_plugin() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.node.announce("gpu.vendor.com", {})
        assert cluster.node.own_resources == {"gpu.vendor.com"}
        tenant = await elsewhere(cluster)
        await cluster.call(tenant)
        assert cluster.node.own_resources == {"gpu.vendor.com", RESOURCE}


@in_virtual_time
async def test_no_assignment_counts_as_one_of_another_plugin_before_any_resource_is_announced() -> None:
    async with shared_device_cluster() as cluster:
        tenant = await elsewhere(cluster)
        cluster.kill()
        await cluster.start_service()  # without any announcement
        await cluster.until(cluster.settled)
        assert cluster.node.own_resources == frozenset()
        assert cluster.service is not None
        await cluster.service.hand_over(HandOverCall(tenant.devices, 5.0))


@in_virtual_time
async def test_resources_of_open_grants_are_known_as_own_after_a_service_restart() -> None:
    async with shared_device_cluster() as cluster:
        await cluster.start("acme", "train-0", cluster.share(0))
        cluster.kill()
        await cluster.start_service()
        assert cluster.node.own_resources == {RESOURCE}


# -- announced ids -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_plugin_defined_ids_resolve_to_the_devices_that_the_plugin_announced() -> None:
    async with shared_device_cluster(devices=2) as cluster:
        first, second = cluster.gpu(0).id, cluster.gpu(1).id
        with pytest.raises(InvalidRequest, match="no device nvidia1"):
            await cluster.node.reserve(["nvidia1"], "vendor.dev/gpu")
        await cluster.node.announce("vendor.dev/gpu", {"nvidia0": first, "nvidia1": second})
        tenant = await cluster.admit("acme", "train-0", (1,), starts=False)
        assert tenant is not None
        assert cluster.service is not None
        (granted,) = await cluster.service.hand_over(HandOverCall(("nvidia1",), 5.0, frozenset(), "vendor.dev/gpu"))
        assert granted.device == second
        meaning = cluster.node.resolve_id("vendor.dev/gpu", "nvidia0")
        assert meaning is not None
        assert meaning.device == first
