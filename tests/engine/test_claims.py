"""Resource claims: Prepare is the gate, once for a claim; Unprepare requests the release, and waits for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Claim, KubeletReading, Pod, Trust
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import DeviceBusy, InvalidRequest, NotReady, Quarantined, Refused, ScrubberError
from scrubber.domain.handover_kind import Basis
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.policy import Enforcement, PolicyOverride, SharingMode
from scrubber.domain.states import Hygiene
from scrubber.engine.resource_ids import ANNOUNCEMENT_SECONDS, Announcer
from scrubber.engine.views import ClaimRelease, GrantedDevice, PrepareClaimCall
from tests.engine.test_grant import before_the_next_grant
from tests.engine.test_yielding import driverless_node
from tests.simulation.claims import DRIVER, SimulatedClaim
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Gone, Tenant
from tests.simulation.service import Pace
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

ONE_POD = replace(DEFAULT, name="one-pod", digest="sha256:one-pod", sharing=SharingMode.NEVER)


def allocated(cluster: SimulatedCluster, *devices: int, namespace: str = "acme") -> SimulatedClaim:
    return cluster.claims.allocate(namespace, [cluster.gpu(number).id for number in devices or (0,)])


async def running(cluster: SimulatedCluster, claim: SimulatedClaim, name: str = "train-0") -> Tenant:
    """Return a pod of ``claim`` that has filled its devices."""
    tenant = cluster.claims.admit(claim, name)
    await cluster.until(lambda: tenant.running and bool(cluster.process_table.holders(claim.devices[0])))
    cluster.write_all(tenant)
    return tenant


async def prepared(cluster: SimulatedCluster, call: PrepareClaimCall) -> tuple[GrantedDevice, ...]:
    assert cluster.service is not None
    return await cluster.service.prepare_claim(call)


async def unprepared(cluster: SimulatedCluster, claim: SimulatedClaim, wait: float = 40.0) -> ClaimRelease:
    assert cluster.service is not None
    return await cluster.service.unprepare_claim(claim.uid, wait)


async def refusal(cluster: SimulatedCluster, call: PrepareClaimCall) -> ScrubberError:
    with pytest.raises(ScrubberError) as refused:
        await prepared(cluster, call)
    return refused.value


def event_names(cluster: SimulatedCluster) -> list[str]:
    return [event.name for event in cluster.ledger_store.events]


def grants_of(cluster: SimulatedCluster, number: int = 0) -> int:
    """Return how often a device was granted."""
    return cluster.record(number).grant_sequence


# -- Prepare -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_prepare_grants_all_devices_of_a_claim_in_one_transaction_and_uses_up_their_certificates() -> None:
    async with simulated_cluster(devices=3) as cluster:
        claim = allocated(cluster, 0, 2)
        writes = cluster.ledger_store.writes
        tenant = cluster.claims.admit(claim, "train-0", starts=False)
        answer = await cluster.claims.prepare(claim, tenant)
        assert cluster.ledger_store.writes == writes + 1
        granted = [each for each in cluster.ledger_store.events if each.name == "handover.granted"][-2:]
        assert [each.fields["claim"] for each in granted] == [f"acme/{claim.name}"] * 2
        assert [(each.device, each.basis) for each in answer] == [(each, Basis.CERTIFICATE) for each in claim.devices]
        for number in (0, 2):
            record = cluster.record(number)
            assert record.hygiene is Hygiene.IN_USE
            assert [each.uid for each in record.prepared_claims] == [claim.uid]
            assert record.tenant == "acme"
        assert grants_of(cluster, 1) == 0


@in_virtual_time
async def test_repeated_prepare_gets_the_same_answer_without_a_grant_before_and_after_a_restart_of_the_service() -> (
    None
):
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0, 1)
        await running(cluster, claim)
        first = claim.answer
        assert await prepared(cluster, claim.call()) == first
        cluster.kill()
        await cluster.start_service()
        assert await prepared(cluster, claim.call()) == first
        assert [grants_of(cluster, number) for number in (0, 1)] == [1, 1]
        assert [cluster.record(number).hygiene for number in (0, 1)] == [Hygiene.IN_USE] * 2


@in_virtual_time
async def test_repeated_prepare_refuses_a_device_that_failed_since_and_names_the_way_out() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0, 1)
        tenant = await running(cluster, claim)
        await cluster.node.actions.quarantine(cluster.gpu(1).id, "because", "uid:0")
        wrong = await refusal(cluster, claim.call())
        assert isinstance(wrong, Quarantined)
        assert cluster.gpu(1).id in wrong.public_message
        assert "once the claim's pods are deleted" in wrong.public_message
        assert tenant.running
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: claim.released)
        assert claim.withheld == (cluster.gpu(1).id,)


@in_virtual_time
async def test_pod_starts_although_its_device_fails_after_it_was_prepared_and_before_the_pod_s_other_claim() -> None:
    """The kubelet marks neither claim as prepared, and calls for both again; a pod that waits need not be deleted for that."""
    async with simulated_cluster() as cluster:
        process = await cluster.claims.use_process(tuple(cluster.process_table.gpus))
        claim = allocated(cluster)
        tenant = cluster.claims.admit(claim, "train-0", refused_beside=5.0)
        await cluster.until(lambda: claim.uid in process.cdi.files)
        cluster.gpu().ecc = 1
        await cluster.until(lambda: not cluster.record().advertised)
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE)
        assert claim.uid not in process.cdi.files
        await cluster.until(lambda: tenant.running, within=600.0)
        assert [(each.grant, each.basis) for each in claim.answer] == [(2, Basis.CERTIFICATE)]


@in_virtual_time
async def test_claim_whose_only_pod_has_not_started_is_released_when_its_device_failed() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0, 1)
        tenant = cluster.claims.admit(claim, "train-0", starts=False)
        await cluster.claims.prepare(claim, tenant)
        await cluster.node.actions.quarantine(cluster.gpu(1).id, "because", "uid:0")
        wrong = await refusal(cluster, claim.call())
        assert (type(wrong), wrong.code) == (NotReady, ErrorCode.CLAIM_ABANDONED)
        assert [cluster.record(number).prepared_claims for number in (0, 1)] == [(), ()]
        (event, _) = [each for each in cluster.ledger_store.events if each.name == "claim.unprepare-requested"]
        assert event.actor == "service"
        wrong = await refusal(cluster, claim.call())
        assert isinstance(wrong, Quarantined)
        assert "deleted" not in wrong.public_message
        await cluster.node.actions.unquarantine(cluster.gpu(1).id, "looked at", "uid:0")
        await cluster.until(lambda: cluster.record(1).advertised, within=600.0)
        assert [each.grant for each in await prepared(cluster, claim.call())] == [2, 2]


@in_virtual_time
@pytest.mark.parametrize("why", ["shared", "unreadable", "untrusted", "restored"])
async def test_claim_is_kept_although_its_device_failed_while_a_pod_of_it_may_start_or_run(why: str) -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = cluster.claims.admit(claim, "train-0", starts=False)
        await cluster.claims.prepare(claim, tenant)
        if why == "shared":  # the kubelet may have the answer, and start one of the two without a call
            cluster.claims.admit(claim, "train-1", starts=False)
        elif why == "unreadable":
            cluster.unreadable.add(tenant.uid)
        elif why == "untrusted":
            cluster.kubelet.trust = Trust.UNREADABLE
        await cluster.node.actions.quarantine(cluster.gpu().id, "because", "uid:0")
        wrong = await refusal(cluster, replace(claim.call(), restores=why == "restored"))
        assert isinstance(wrong, Quarantined)
        assert "once the claim's pods are deleted" in wrong.public_message
        assert [each.uid for each in cluster.record().prepared_claims] == [claim.uid]


async def start_ungranted(cluster: SimulatedCluster, name: str) -> Tenant:
    """Return a pod that the kubelet has started on device 0 without a hand-over, once the service knows of it."""
    intruder, device = await admitted(cluster, name=name), cluster.gpu().id
    proc = cluster.process_table.start(intruder.uid, f"{intruder.uid}/main#1", name, mounted=frozenset({device}))
    cluster.process_table.open(proc, device)
    await cluster.until(lambda: intruder.pod in [each.pod for each in cluster.record().open_grants], within=10.0)
    return intruder


@in_virtual_time
async def test_claim_whose_only_pod_has_not_started_waits_for_another_pod_that_got_its_device_since() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = cluster.claims.admit(claim, "train-0", starts=False)
        await cluster.claims.prepare(claim, tenant)
        intruder = await start_ungranted(cluster, "sudden-0")
        assert (await refusal(cluster, claim.call())).code is ErrorCode.CLAIM_ABANDONED
        wrong = await refusal(cluster, claim.call(wait=5.0))
        assert "deleted" not in wrong.public_message
        cluster.kubelet.delete(intruder)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=120.0)
        answer = await prepared(cluster, claim.call())
        assert [each.basis for each in answer] == [Basis.CERTIFICATE]


@in_virtual_time
async def test_repeated_prepare_refuses_a_device_that_another_pod_got_since_and_names_that_pod_to_operators_only() -> (
    None
):
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        intruder = await start_ungranted(cluster, "sudden-0")
        wrong = await refusal(cluster, claim.call())
        assert (type(wrong), wrong.code) == (Refused, ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN)
        assert "umbrella/sudden-0" in str(wrong)
        assert "sudden-0" not in wrong.public_message
        assert "Delete the claim's pods" in wrong.public_message
        for each in (intruder, tenant):
            cluster.kubelet.delete(each)
        await cluster.until(lambda: claim.released, within=120.0)
        await running(cluster, allocated(cluster), "train-1")


@in_virtual_time
async def test_repeated_prepare_is_answered_beside_another_pod_where_the_policy_only_observes() -> None:
    async with simulated_cluster(policy=replace(DEFAULT, enforcement=Enforcement.OBSERVE)) as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        await start_ungranted(cluster, "sudden-0")
        assert await prepared(cluster, claim.call()) == claim.answer


@in_virtual_time
async def test_prepare_that_was_committed_when_its_caller_left_answers_the_next_call() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = cluster.claims.admit(claim, "train-0", starts=False)
        call = asyncio.ensure_future(cluster.claims.prepare(claim, tenant))
        cluster.ledger_store.granting = call.cancel
        with pytest.raises(asyncio.CancelledError):
            await call
        cluster.ledger_store.granting = None
        answer = await prepared(cluster, claim.call())
        assert [each.grant for each in answer] == [1]


@in_virtual_time
async def test_prepared_claim_is_refused_with_other_devices() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0)
        await running(cluster, claim)
        wrong = await refusal(cluster, replace(claim.call(), devices=(cluster.gpu(1).id,)))
        assert (type(wrong), wrong.code) == (InvalidRequest, ErrorCode.CLAIM_CHANGED)
        assert cluster.record(1).hygiene is Hygiene.CLEAN


@pytest.mark.parametrize("devices", [(), ("GPU-0000", "GPU-0000"), ("GPU-9999",), ("GPU-0000", "GPU-9999")])
def test_prepare_of_unknown_duplicate_or_no_devices_is_refused(devices: tuple[str, ...]) -> None:
    @in_virtual_time
    async def prepare() -> None:
        async with simulated_cluster() as cluster:
            call = replace(allocated(cluster).call(), devices=devices)
            assert isinstance(await refusal(cluster, call), InvalidRequest)
            assert cluster.record().hygiene is Hygiene.CLEAN

    prepare()


@in_virtual_time
async def test_prepare_joins_the_scrub_of_a_dirty_device() -> None:
    async with simulated_cluster(settled=False) as cluster:
        await cluster.start_service()
        tenant = await running(cluster, allocated(cluster))
        assert tenant.refusals == []
        scrubs = [each for each in cluster.ledger_store.scrubs.values() if each.device == cluster.gpu().id]
        assert len([each for each in scrubs if each.path.value == "slow"]) == 1


@in_virtual_time
async def test_prepare_refuses_a_quarantined_device_at_once_and_grants_none_of_the_others() -> None:
    async with simulated_cluster() as cluster:
        await cluster.node.actions.quarantine(cluster.gpu(1).id, "because", "uid:0")
        began = cluster.clock.monotonic()
        assert isinstance(await refusal(cluster, allocated(cluster, 0, 1).call()), Quarantined)
        assert cluster.clock.monotonic() - began < 1.0
        assert cluster.record(0).hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_second_claim_waits_for_a_device_that_is_prepared_and_its_refusal_names_no_tenant() -> None:
    async with simulated_cluster() as cluster:
        first = allocated(cluster)
        await running(cluster, first)
        began = cluster.clock.monotonic()
        wrong = await refusal(cluster, allocated(cluster, namespace="umbrella").call(wait=10.0))
        assert cluster.clock.monotonic() - began >= 10.0
        assert (type(wrong), wrong.code) == (NotReady, ErrorCode.PREPARED_FOR_CLAIM)
        assert f"acme/{first.name}" in str(wrong)
        assert "acme" not in wrong.public_message
        assert grants_of(cluster) == 1


@in_virtual_time
async def test_device_stays_with_a_prepared_claim_although_all_its_pods_have_ended() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.claims.never_release()
        cluster.kubelet.delete(tenant)
        await cluster.run(120.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().cells != [""] * 4


@in_virtual_time
async def test_container_restart_within_a_claim_is_no_hand_over_and_reads_its_own_data() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster, allocated(cluster))
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2 and bool(cluster.process_table.holders(tenant.devices[0])))
        assert grants_of(cluster) == 1
        await cluster.run(5.0)
        assert "unauthorized.use.detected" not in event_names(cluster)


@in_virtual_time
async def test_certificate_of_a_grant_to_a_claim_lists_later_starts_as_not_covered() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        other = await started(cluster, "acme", "web-0", 1)
        (granted,) = claim.answer
        lines = cluster.ledger_store.certificates[granted.certificate or ""].not_covered
        assert any("restarts of containers within the claim" in line for line in lines)
        last = cluster.record(1).last_grant
        assert last is not None
        assert last.pod == other.pod
        ordinary = cluster.ledger_store.certificates[last.certificate or ""].not_covered
        assert not any("claim" in line for line in ordinary)


@in_virtual_time
async def test_no_exception_of_the_policy_applies_to_a_claim() -> None:
    from tests.simulation.start_requests import TRUSTED

    async with simulated_cluster(policy=TRUSTED) as cluster:
        first = allocated(cluster)
        cluster.kubelet.delete(await running(cluster, first))
        await cluster.until(lambda: first.released)
        await running(cluster, allocated(cluster), "train-1")
        last = cluster.record().last_grant
        assert last is not None
        assert last.basis is Basis.CERTIFICATE


# -- the device plugin and the driver ----------------------------------------------------------------------------------


@in_virtual_time
async def test_prepare_refuses_a_device_that_the_plugin_advertises_until_the_plugin_excludes_it() -> None:
    async with simulated_cluster() as cluster:
        mine, other = cluster.gpu(0).id, cluster.gpu(1).id
        await cluster.node.announce("nvidia.com/gpu", {mine: mine, other: other})
        claim = allocated(cluster)
        wrong = await refusal(cluster, claim.call())
        assert (type(wrong), wrong.code) == (Refused, ErrorCode.ADVERTISED_BY_PLUGIN)
        assert "nvidia.com/gpu" in str(wrong)
        await cluster.node.announce("nvidia.com/gpu", {other: other})
        await running(cluster, claim)


@in_virtual_time
async def test_device_that_a_plugin_advertises_since_it_was_prepared_is_not_granted_to_the_claim() -> None:
    async with simulated_cluster() as cluster:
        mine, claim = cluster.gpu().id, allocated(cluster)
        before_the_next_grant(cluster, lambda: cluster.node.announce("nvidia.com/gpu", {mine: mine}))
        assert (await refusal(cluster, claim.call())).code is ErrorCode.ADVERTISED_BY_PLUGIN
        assert grants_of(cluster) == 0


@in_virtual_time
async def test_device_of_a_plugin_that_has_ended_can_be_prepared_without_a_restart_of_the_service() -> None:
    async with simulated_cluster() as cluster:
        mine, claim, announcer = cluster.gpu().id, allocated(cluster), Announcer(cluster.clock.monotonic)
        with announcer.following():
            await cluster.node.announce("nvidia.com/gpu", {mine: mine}, announcer)
            await cluster.run(ANNOUNCEMENT_SECONDS * 2)
            assert (await refusal(cluster, claim.call())).code == ErrorCode.ADVERTISED_BY_PLUGIN
        await cluster.run(ANNOUNCEMENT_SECONDS + 1)
        await running(cluster, claim)


@in_virtual_time
async def test_container_start_waits_for_a_device_that_is_prepared_for_a_claim() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster, allocated(cluster))
        tenant = await admitted(cluster)
        with pytest.raises(ScrubberError) as refused:
            await request_start(cluster, tenant, 3.0)
        assert refused.value.code in (
            ErrorCode.PREPARED_FOR_CLAIM,
            ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN,
            ErrorCode.REASSIGNED,
        )
        assert grants_of(cluster) == 1


@in_virtual_time
async def test_prepare_waits_for_the_pod_that_has_the_device_from_the_plugin() -> None:
    async with simulated_cluster() as cluster:
        tenant = await started(cluster, "acme", "web-0")
        claim = allocated(cluster, namespace="umbrella")
        assert isinstance(await refusal(cluster, claim.call(wait=5.0)), NotReady)
        cluster.kubelet.delete(tenant)
        await running(cluster, claim)


@in_virtual_time
async def test_claim_for_an_extended_resource_is_refused_where_the_plugin_advertises_the_same_resource() -> None:
    async with simulated_cluster() as cluster:
        other = cluster.gpu(1).id
        await cluster.node.announce("nvidia.com/gpu", {other: other})
        claim = allocated(cluster)
        call = replace(claim.call(), extended_resources=frozenset({"nvidia.com/gpu"}))
        wrong = await refusal(cluster, call)
        assert (type(wrong), wrong.code) == (Refused, ErrorCode.RESOURCE_OF_PLUGIN)
        assert "advertises nvidia.com/gpu" in wrong.public_message
        assert grants_of(cluster) == 0
        await running(cluster, claim)  # by a claim of its own a pod may have the driver's devices


@in_virtual_time
async def test_drivers_name_selects_a_policy_override_once_its_claim_was_granted_and_not_by_a_request() -> None:
    named = replace(DEFAULT, name="named", digest="sha256:named")
    policy = replace(DEFAULT, overrides=(PolicyOverride(named, resources=(DRIVER,)),))
    async with simulated_cluster(policy=policy) as cluster:
        await cluster.node.announce("nvidia.com/gpu", {cluster.gpu().id: cluster.gpu().id})
        assert isinstance(await refusal(cluster, allocated(cluster).call()), Refused)
        await cluster.node.announce("nvidia.com/gpu", {})
        assert cluster.controller().state.policy.name == DEFAULT.name
        await running(cluster, allocated(cluster))
        assert cluster.controller().state.policy.name == "named"


# -- pods of a claim ---------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_second_pod_of_a_claim_is_a_tenant_as_soon_as_the_kubelet_lists_it() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        second = await running(cluster, claim, "train-1")
        await cluster.run(5.0)
        (known,) = cluster.record().prepared_claims
        assert second.pod in known.pods
        assert "unauthorized.use.detected" not in event_names(cluster)
        assert not cluster.record().contaminated
        assert grants_of(cluster) == 1


@in_virtual_time
async def test_pod_that_a_report_lacks_stays_with_the_claim_until_it_is_over() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        first, second = await running(cluster, claim), await running(cluster, claim, "train-1")
        await cluster.node.claims.set_pods(claim.uid, [first.pod, second.pod])
        await cluster.node.claims.set_pods(claim.uid, [second.pod])
        assert set(cluster.record().prepared_claims[0].pods) == {first.pod, second.pod}
        cluster.kubelet.force_delete(first, 0.5)
        await cluster.run(5.0)
        await cluster.node.claims.set_pods(claim.uid, [second.pod])
        assert cluster.record().prepared_claims[0].pods == (second.pod,)
        await cluster.node.claims.set_pods(claim.uid, [])
        assert cluster.record().prepared_claims[0].pods == (second.pod,)


@in_virtual_time
async def test_claim_of_two_pods_is_refused_where_the_policy_says_sharing_never() -> None:
    async with simulated_cluster(policy=ONE_POD) as cluster:
        claim = allocated(cluster)
        call = claim.call()
        pods = (Pod("acme", "train-0", "uid-a"), Pod("acme", "train-1", "uid-b"))
        wrong = await refusal(cluster, replace(call, claim=replace(call.claim, pods=pods)))
        assert (type(wrong), wrong.code) == (Refused, ErrorCode.CLAIM_SHARED)
        await running(cluster, claim)


@in_virtual_time
async def test_device_is_withheld_and_the_use_recorded_when_a_second_pod_joins_against_the_policy() -> None:
    async with simulated_cluster(policy=ONE_POD) as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        assert cluster.node.view().devices[0].advertised
        await running(cluster, claim, "train-1")
        await cluster.run(3.0)
        view = cluster.node.view().devices[0]
        assert not view.advertised
        assert "sharing: never" in view.withheld
        assert event_names(cluster).count("claim.shared-against-policy") == 1


@in_virtual_time
async def test_end_of_a_pod_that_was_reported_before_it_existed_is_seen_at_once() -> None:
    async with simulated_cluster(devices=1, pace=Pace(watch=8.0)) as cluster:
        claim = allocated(cluster)
        first = await running(cluster, claim)
        coming = Pod("acme", "train-1", "uid-0002")
        await cluster.node.claims.set_pods(claim.uid, [first.pod, coming])
        await cluster.run(1.0)
        second = await running(cluster, claim, "train-1")
        assert second.pod == coming
        cluster.kubelet.delete(first)
        await cluster.run(17.0)
        cluster.kubelet.force_delete(second, lives_on=20.0)
        await cluster.until(lambda: not any(cluster.process_table.living(coming.uid)))
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE, within=0.5)


@in_virtual_time
async def test_pods_of_an_unknown_claim_are_ignored() -> None:
    async with simulated_cluster() as cluster:
        writes = cluster.ledger_store.writes
        await cluster.node.claims.set_pods("claim-uid-unknown", [Pod("acme", "train-0", "uid-a")])
        assert cluster.ledger_store.writes == writes


# -- Unprepare ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_unprepare_succeeds_after_the_devices_are_scrubbed_and_the_next_claim_takes_the_fast_path() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0, 1)
        cluster.kubelet.delete(await running(cluster, claim))
        await cluster.until(lambda: claim.released)
        assert [cluster.record(number).hygiene for number in (0, 1)] == [Hygiene.CLEAN] * 2
        assert cluster.gpu().cells == [""] * 4
        assert cluster.node.claims.current() == ()
        following = allocated(cluster, namespace="umbrella")
        await running(cluster, following)
        assert [each.path.value for each in following.answer] == ["fast"]


@in_virtual_time
async def test_unprepare_of_an_unknown_claim_is_done_at_once() -> None:
    async with simulated_cluster() as cluster:
        assert await unprepared(cluster, allocated(cluster), 0.0) == ClaimRelease(done=True)


@in_virtual_time
async def test_unprepare_while_the_tenant_computes_is_not_done_and_clears_nothing() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        began = cluster.clock.monotonic()
        result = await unprepared(cluster, claim, 5.0)
        assert cluster.clock.monotonic() - began >= 5.0
        assert not result.done
        assert cluster.gpu().id in result.waits_for
        assert tenant.pod.name not in result.waits_for
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().cells != [""] * 4
        cluster.kubelet.delete(tenant)
        assert (await unprepared(cluster, claim)).done


@in_virtual_time
async def test_claim_allocated_after_a_forced_deletion_waits_until_the_first_tenant_has_ended() -> None:
    async with simulated_cluster() as cluster:
        first = allocated(cluster)
        tenant = await running(cluster, first)
        cluster.kubelet.force_delete(tenant, lives_on=8.0)
        following = await running(cluster, allocated(cluster, namespace="umbrella"), "serve-0")
        await cluster.until(lambda: first.released)
        assert not any(cluster.process_table.living(tenant.uid))
        assert following.running
        assert grants_of(cluster) == 2


@in_virtual_time
async def test_device_that_fails_its_scrub_is_withheld_and_does_not_keep_the_pod() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0, 1)
        tenant = await running(cluster, claim)
        cluster.gpu(1).wont_clear = True
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: claim.released)
        assert claim.withheld == (cluster.gpu(1).id,)
        assert not tenant.listed or await _gone(cluster, tenant)
        assert cluster.record(0).hygiene is Hygiene.CLEAN
        assert isinstance(await refusal(cluster, allocated(cluster, 1).call(wait=1.0)), Quarantined)


async def _gone(cluster: SimulatedCluster, tenant: Tenant) -> bool:
    await cluster.run(0.1)
    return not tenant.listed


@in_virtual_time
async def test_device_that_fails_in_use_is_withheld_at_unprepare_with_its_cause() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.gpu().report_xid(95)
        cluster.signal(0)
        await cluster.until(lambda: not cluster.record().advertised)
        cluster.claims.never_release()
        cluster.kubelet.delete(tenant)
        result = await unprepared(cluster, claim)
        assert result.done
        assert [(each.device, each.code) for each in result.withheld] == [(cluster.gpu().id, "xid-95")]


@in_virtual_time
async def test_leftover_of_a_claim_is_killed_after_its_grace_period_although_its_pod_is_still_listed() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        await cluster.run(3.0)
        assert tenant.first is not None
        left = cluster.process_table.fork(tenant.first)
        cluster.kubelet.delete(tenant)
        await cluster.run(DEFAULT.limits.leftover_grace_period - 5.0)
        assert left.alive
        await cluster.until(lambda: claim.released)
        assert not left.alive


@in_virtual_time
async def test_unprepare_is_done_with_the_device_withheld_although_a_process_of_no_pod_keeps_it_open() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.kubelet.delete(tenant)
        foreign = cluster.process_table.start(None, "", "host")
        cluster.process_table.open(foreign, cluster.gpu().id)
        await cluster.until(lambda: claim.released, 300.0)
        assert claim.withheld == (cluster.gpu().id,)
        assert foreign.alive


@in_virtual_time
async def test_pod_that_only_the_driver_names_loses_no_process() -> None:
    async with simulated_cluster() as cluster:
        victim = cluster.process_table.start("victim-uid", "main#1", "victim", first=True)
        claim = allocated(cluster)
        tenant = cluster.claims.admit(claim, "train-0", starts=False)
        await cluster.claims.before_start(tenant)
        await cluster.node.claims.set_pods(claim.uid, [tenant.pod, Pod("acme", "absent-0", "victim-uid")])
        cluster.kubelet.delete(tenant)
        await cluster.run(4 * DEFAULT.limits.leftover_grace_period)
        assert victim.alive
        assert not claim.released
        cluster.process_table.end(victim)
        await cluster.until(lambda: claim.released)


@in_virtual_time
async def test_pods_of_another_namespace_are_refused() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        with pytest.raises(InvalidRequest):
            await cluster.node.claims.set_pods(claim.uid, [Pod("umbrella", "train-0", "uid-b")])


@pytest.mark.parametrize("observed", [True, False])
def test_pod_that_never_ran_is_over_at_unprepare(observed: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        async with simulated_cluster() as cluster:
            cluster.process_table.has_cgroups = observed
            claim = allocated(cluster)
            tenant = cluster.claims.admit(claim, "train-0", starts=False)
            await cluster.claims.before_start(tenant)
            cluster.kubelet.delete(tenant)
            began = cluster.clock.monotonic()
            await cluster.until(lambda: claim.released)
            assert cluster.clock.monotonic() - began < 10.0

    check()


@in_virtual_time
async def test_shared_claim_is_unprepared_with_its_last_pod() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        first, second = await running(cluster, claim), await running(cluster, claim, "train-1")
        cluster.kubelet.delete(first)
        await cluster.run(10.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert not claim.releasing
        cluster.kubelet.delete(second)
        await cluster.until(lambda: claim.released)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_claim_that_was_released_before_its_second_pod_starts_is_handed_over_again() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        first = await running(cluster, claim)
        second = cluster.claims.admit(claim, "train-1", starts=False)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: claim.released)
        cluster.kubelet.start_worker(second)
        await cluster.until(lambda: second.running)
        assert [each.grant for each in claim.answer] == [2]
        assert cluster.record().prepared_claims[0].pods == (second.pod,)


@in_virtual_time
async def test_pod_that_joins_a_claim_during_its_release_starts_only_after_a_new_hand_over() -> None:
    """The kubelet remembers the claim as prepared until its Unprepare has succeeded, and calls no driver for such a pod."""
    async with simulated_cluster() as cluster:
        await cluster.claims.use_process(tuple(cluster.process_table.gpus))
        claim = allocated(cluster)
        first = await running(cluster, claim)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: claim.releasing)
        second = cluster.claims.admit(claim, "train-1")
        await cluster.until(lambda: second.running)
        assert [each.grant for each in claim.answer] == [2]


@in_virtual_time
async def test_pod_that_joins_a_claim_whose_release_begins_while_the_service_is_busy_starts_after_a_hand_over() -> None:
    async with simulated_cluster() as cluster:
        process = await cluster.claims.use_process(tuple(cluster.process_table.gpus))
        claim = allocated(cluster)
        first = await running(cluster, claim)
        async with cluster.node.devices.arrivals:  # a device that returns is being inspected
            cluster.kubelet.delete(first)
            await cluster.until(lambda: claim.releasing)
            await cluster.run(0.5)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.SCRUBBING)
        await cluster.run(0.1)
        assert claim.uid not in process.cdi.files
        second = cluster.claims.admit(claim, "train-1")
        await cluster.until(lambda: second.running)
        assert [each.grant for each in claim.answer] == [2]


@in_virtual_time
async def test_kubelet_that_restarts_during_a_prepare_calls_again_and_gets_one_grant() -> None:
    async with simulated_cluster(settled=False) as cluster:
        await cluster.start_service()
        claim = allocated(cluster)
        tenant = cluster.claims.admit(claim, "train-0")
        await cluster.run(0.004)
        assert claim.answer == ()
        cluster.kubelet.restart()
        cluster.kubelet.retry_pre_start(tenant)
        await cluster.until(lambda: tenant.running)
        assert grants_of(cluster) == 1


async def claim_whose_release_the_kubelet_lost(cluster: SimulatedCluster) -> SimulatedClaim:
    """Return a claim that is prepared although its pods are gone, and that the kubelet has forgotten.

    A restarted kubelet calls Prepare for a pod that joins the claim while it releases it. It forgets the claim when the
    release succeeds, so that the answer to Prepare is lost, and the pod is deleted before the next try.
    """
    claim = allocated(cluster)
    tenant = await running(cluster, claim)
    cluster.kubelet.restart()
    cluster.kubelet.delete(tenant)
    await cluster.until(lambda: claim.releasing)
    second = cluster.claims.admit(claim, "train-1", starts=False)
    with pytest.raises(Gone):
        await cluster.claims.before_start(second)
    cluster.kubelet.delete(second)
    await cluster.until(lambda: not second.listed)
    assert [each.uid for each in cluster.record().prepared_claims] == [claim.uid]
    return claim


@in_virtual_time
async def test_claim_whose_release_the_kubelet_lost_gets_other_devices_after_its_former_ones_are_released() -> None:
    async with simulated_cluster() as cluster:
        process = await cluster.claims.use_process(tuple(cluster.process_table.gpus))
        claim = await claim_whose_release_the_kubelet_lost(cluster)
        cluster.claims.allocate_again(claim, [cluster.gpu(1).id])
        tenant = cluster.claims.admit(claim, "train-2")
        await cluster.until(lambda: tenant.running)
        assert tenant.refusals == []
        await cluster.until(lambda: cluster.record(0).hygiene is Hygiene.CLEAN)
        assert process.cdi.files == {claim.uid: process.cdi.files[claim.uid]}
        (event,) = [each for each in cluster.ledger_store.events if each.actor == "service" and "claim" in each.fields]
        assert (event.name, event.device) == ("claim.unprepare-requested", cluster.gpu(0).id)


@in_virtual_time
async def test_another_claim_gets_the_device_of_a_claim_whose_release_the_kubelet_lost() -> None:
    async with simulated_cluster() as cluster:
        process = await cluster.claims.use_process(tuple(cluster.process_table.gpus))
        lost = await claim_whose_release_the_kubelet_lost(cluster)
        other = allocated(cluster, 0, 1, namespace="umbrella")
        tenant = cluster.claims.admit(other, "train-2")
        await cluster.until(lambda: tenant.running)
        assert tenant.refusals == []
        assert lost.uid not in process.cdi.files


@in_virtual_time
async def test_forgotten_claim_is_released_for_another_one_only_when_its_pod_is_over() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.kubelet.force_delete(tenant, 60.0)
        cluster.claims.forget(claim)
        following = allocated(cluster, namespace="umbrella")
        wrong = await refusal(cluster, following.call(wait=20.0))
        assert wrong.code is ErrorCode.PREPARED_FOR_CLAIM
        assert cluster.record().hygiene is Hygiene.IN_USE
        await cluster.run(60.0)
        assert (await refusal(cluster, following.call())).code is ErrorCode.CLAIM_ABANDONED
        assert [each.grant for each in await prepared(cluster, following.call())] == [2]


@in_virtual_time
async def test_child_that_outlives_the_pod_of_a_forgotten_claim_is_a_leftover_after_the_grace_period() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        await cluster.until(lambda: cluster.record().prepared_claims[0].listed_pods == (tenant.pod,))
        assert tenant.first is not None
        cluster.process_table.fork(tenant.first)
        cluster.kubelet.force_delete(tenant, 0.5)
        cluster.claims.forget(claim)
        following = cluster.claims.admit(allocated(cluster, namespace="umbrella"), "train-1")
        await cluster.run(20.0)
        assert cluster.record().prepared_claims[0].uid == claim.uid
        await cluster.until(lambda: following.running)
        assert not any(cluster.process_table.living(tenant.uid))


@in_virtual_time
async def test_requested_pod_with_processes_is_not_dropped_from_the_claim_that_is_released() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        await cluster.until(lambda: cluster.record().prepared_claims[0].listed_pods == (tenant.pod,))
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        child.holds.clear()
        cluster.kubelet.force_delete(tenant, 0.5)
        cluster.claims.forget(claim)
        await cluster.run(40.0)
        call = replace(claim.call(), devices=(cluster.gpu(1).id,))
        wrong = await refusal(cluster, replace(call, claim=replace(call.claim, pods=(tenant.pod,))))
        assert wrong.code is ErrorCode.CLAIM_ABANDONED
        assert [grant.pods for grant in cluster.record().open_grants] == [(tenant.pod,)]
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert not child.alive


@in_virtual_time
async def test_forgotten_claim_is_kept_while_a_pod_of_it_cannot_be_read() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.kubelet.force_delete(tenant, 0.5)
        cluster.claims.forget(claim)
        cluster.unreadable.add(tenant.uid)
        await cluster.run(60.0)
        wrong = await refusal(cluster, replace(claim.call(), devices=(cluster.gpu(1).id,)))
        assert wrong.code is ErrorCode.CLAIM_CHANGED
        assert cluster.gpu(0).id in str(wrong)
        assert "scrubber scrub" in str(wrong)
        assert cluster.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_claim_of_a_living_pod_is_kept_although_the_clock_was_set_back_after_a_forgotten_one_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated_cluster() as cluster:
        former = allocated(cluster)
        cluster.kubelet.force_delete(await running(cluster, former), 0.5)
        cluster.claims.forget(former)
        await cluster.run(10.0)
        wall = cluster.clock.wall
        monkeypatch.setattr(cluster.clock, "wall", lambda: wall() - 3600.0)
        claim = allocated(cluster, 1)
        claim.name, former.name = former.name, "former"
        first = await running(cluster, claim)
        await cluster.run(5.0)
        second = await running(cluster, claim, "train-1")
        await cluster.run(5.0)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: not first.listed)
        await cluster.run(60.0)
        assert second.running
        wrong = await refusal(cluster, allocated(cluster, 1, namespace="umbrella").call())
        assert wrong.code is ErrorCode.PREPARED_FOR_CLAIM
        assert (
            await refusal(cluster, allocated(cluster, namespace="umbrella").call())
        ).code is ErrorCode.CLAIM_ABANDONED


@in_virtual_time
async def test_claim_prepared_for_another_pod_after_the_list_was_read_is_kept_where_pods_have_no_cgroups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated_cluster() as cluster:
        cluster.process_table.has_cgroups = False
        claim = allocated(cluster)
        first = await running(cluster, claim)
        second = cluster.claims.admit(claim, "train-1", starts=False)
        call = claim.call()
        second.gone_since = cluster.clock.monotonic()  # the kubelet has not seen it yet
        await prepared(cluster, call)
        cluster.kubelet.force_delete(first, 0.5)
        cluster.claims.forget(claim)
        await cluster.run(10.0)
        read = cluster.kubelet.reading
        answers: list[asyncio.Task[tuple[GrantedDevice, ...]]] = []

        def reading() -> KubeletReading:
            found = read()
            if not answers:
                second.gone_since = None
                answers.append(asyncio.create_task(prepared(cluster, claim.call())))
            return found

        rival = allocated(cluster, namespace="umbrella").call(wait=5.0)
        monkeypatch.setattr(cluster.kubelet, "reading", reading)
        assert (await refusal(cluster, rival)).code is ErrorCode.PREPARED_FOR_CLAIM
        assert [each.grant for each in await answers[0]] == [1]
        assert [each.uid for each in cluster.record().prepared_claims] == [claim.uid]


@in_virtual_time
async def test_forgotten_claim_of_another_driver_is_left_to_an_operator() -> None:
    """Its driver removes the CDI specification, and the one that asks does not know it."""
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.kubelet.force_delete(tenant, 0.5)
        cluster.claims.forget(claim)
        await cluster.run(60.0)
        call = allocated(cluster, namespace="umbrella").call()
        wrong = await refusal(cluster, replace(call, claim=replace(call.claim, driver="other.example.com")))
        assert wrong.code is ErrorCode.PREPARED_FOR_CLAIM
        assert "scrubber scrub" in str(wrong)


@in_virtual_time
async def test_prepare_of_a_claim_that_is_being_released_is_a_new_hand_over() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        assert not (await unprepared(cluster, claim, 0.0)).done
        assert isinstance(await refusal(cluster, claim.call(wait=2.0)), NotReady)
        cluster.claims.never_release()
        cluster.kubelet.delete(tenant)
        answer = await prepared(cluster, claim.call())
        assert [each.grant for each in answer] == [2]
        assert [each.uid for each in cluster.record().prepared_claims] == [claim.uid]


@in_virtual_time
async def test_unprepare_does_not_overtake_a_prepare_in_progress() -> None:
    """Otherwise the devices would be granted to a claim that the kubelet has forgotten."""
    async with simulated_cluster() as cluster:
        await running(cluster, allocated(cluster))
        second = allocated(cluster, namespace="umbrella")
        waiting = asyncio.ensure_future(prepared(cluster, second.call(wait=20.0)))
        await cluster.run(1.0)
        result = await unprepared(cluster, second, 1.0)
        assert not result.done
        with pytest.raises(NotReady):
            await waiting
        assert (await unprepared(cluster, second, 1.0)).done


@in_virtual_time
async def test_operator_scrub_releases_a_claim_that_is_never_unprepared_once_its_pods_are_gone() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.claims.never_release()
        assert cluster.service is not None
        with pytest.raises(DeviceBusy):
            await cluster.service.scrub(cluster.gpu().id)
        cluster.kubelet.force_delete(tenant, 0.5)
        await cluster.run(5.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        await cluster.service.scrub(cluster.gpu().id)
        assert cluster.record().hygiene is Hygiene.CLEAN
        assert cluster.node.claims.current() == ()
        (event,) = [each for each in cluster.ledger_store.events if each.name == "claim.unprepare-requested"]
        assert event.actor == "uid:0"


@in_virtual_time
async def test_operator_scrub_releases_a_claim_that_is_never_unprepared_although_its_pod_left_a_process() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster, allocated(cluster))
        await cluster.until(lambda: cluster.record().prepared_claims[0].listed_pods == (tenant.pod,))
        cluster.claims.never_release()
        assert cluster.service is not None
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        cluster.kubelet.force_delete(tenant, 0.5)
        await cluster.run(5.0)
        with pytest.raises(DeviceBusy):
            await cluster.service.scrub(cluster.gpu().id)
        await cluster.run(DEFAULT.limits.leftover_grace_period)
        assert child.alive
        with suppress(ScrubberError):  # the leftover is ended meanwhile
            await cluster.service.scrub(cluster.gpu().id)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert not child.alive


@in_virtual_time
@pytest.mark.parametrize("leaves", [True, False])
async def test_operator_scrub_does_not_release_a_claim_that_a_pod_has_just_joined(leaves: bool) -> None:
    """The kubelet makes no call for it, and starts its container on the device a moment later."""
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        await cluster.until(lambda: cluster.record().prepared_claims[0].listed_pods == (tenant.pod,))
        cluster.claims.never_release()
        assert cluster.service is not None
        assert tenant.first is not None
        if leaves:
            cluster.process_table.fork(tenant.first)
        cluster.kubelet.force_delete(tenant, 0.5)
        await cluster.run(DEFAULT.limits.leftover_grace_period + 5.0)
        joined = cluster.claims.admit(claim, "train-1")
        await cluster.run(0.02)
        assert joined.pod not in cluster.record().prepared_claims[0].pods
        with pytest.raises(DeviceBusy):
            await cluster.service.scrub(cluster.gpu().id)
        await cluster.until(lambda: joined.running)


@in_virtual_time
async def test_repeated_prepare_is_a_new_hand_over_if_an_operator_releases_the_claim_meanwhile() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.claims.never_release()
        cluster.kubelet.force_delete(tenant, 0.5)
        await cluster.run(5.0)
        following = replace(claim.call(), claim=replace(claim.call().claim, pods=(Pod("acme", "train-1", "uid-b"),)))
        released = asyncio.Event()
        take = cluster.node.pods.is_gone

        async def gone_after_the_operator_acted(pod: Pod) -> bool:
            if not released.is_set():
                released.set()
                controller = cluster.controller()
                await controller.occupancy.release_claims(controller.state.record, "uid:0")
            return await take(pod)

        cluster.node.pods.is_gone = gone_after_the_operator_acted  # type: ignore[method-assign]
        answer = await prepared(cluster, following)
        assert [(each.grant, each.basis) for each in answer] == [(2, Basis.CERTIFICATE)]
        assert cluster.gpu().cells == [""] * 4


@in_virtual_time
async def test_claim_of_a_removed_device_is_forgotten_at_a_reboot() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        cluster.gpu().listed = False
        cluster.claims.never_release()
        cluster.reboot()
        await cluster.start_service()
        assert cluster.node.claims.current() == ()
        assert await unprepared(cluster, claim, 0.0) == ClaimRelease(done=True)


@in_virtual_time
async def test_claim_of_a_device_that_has_left_the_node_is_released_and_the_device_is_scrubbed_when_it_returns() -> (
    None
):
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.gpu().listed = False
        cluster.kill()
        cluster.claims.never_release()
        cluster.kubelet.delete(tenant)
        await cluster.start_service()
        assert [each.claim.uid for each in cluster.node.claims.current()] == [claim.uid]
        result = await unprepared(cluster, claim, 1.0)
        assert result.done
        assert [(each.device, each.code) for each in result.withheld] == [(cluster.gpu().id, "device-lost")]
        cluster.gpu().listed = True
        cluster.node.devices.inventory_changed.set()
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert cluster.gpu().cells == [""] * 4


# -- a yielded node ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_claim_is_released_on_a_yielded_node_and_scrubbed_after_it() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.claims.never_release()
        cluster.kubelet.delete(tenant)
        await cluster.node.yields.request(YieldRequester.OPERATOR, "driver upgrade", "uid:0")
        node = driverless_node(cluster)
        with pytest.raises(NotReady):
            await node.claims.prepare(claim.call())
        result = await node.claims.unprepare(claim.uid, 0.0)
        assert result.done
        assert [(each.device, each.code) for each in result.withheld] == [(cluster.gpu().id, "node-yielded")]
        cluster.kill()
        await cluster.start_service()
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)


@in_virtual_time
async def test_prepared_claim_gets_no_answer_while_a_yield_is_requested() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        await cluster.node.yields.request(YieldRequester.OPERATOR, "driver upgrade", "uid:0")
        wrong = await refusal(cluster, claim.call())
        assert (type(wrong), wrong.code) == (NotReady, ErrorCode.NODE_YIELDED)


@in_virtual_time
async def test_claim_is_not_released_while_the_service_waits_for_its_driver() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await running(cluster, claim)
        node = driverless_node(cluster, driver_error=lambda: "no driver")
        with pytest.raises(NotReady):
            await node.claims.unprepare(claim.uid, 0.0)
        assert cluster.record().prepared_claims != ()


# -- restarts ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_devices_of_a_claim_are_untouched_by_a_restart_of_the_service() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cells = list(cluster.gpu().cells)
        cluster.kill()
        await cluster.start_service()
        await cluster.run(10.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert cluster.gpu().cells == cells
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: claim.released)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_release_that_a_kill_interrupts_is_completed_by_the_next_service() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        cluster.kubelet.delete(await running(cluster, claim))
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.SCRUBBING)
        cluster.kill()
        await cluster.start_service()
        await cluster.until(lambda: claim.released)
        assert cluster.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_claim_gets_a_new_grant_on_a_scrubbed_device_after_a_reboot() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        before = claim.answer
        cluster.reboot()
        assert cluster.gpu().cells != [""] * 4
        await cluster.start_service()
        await cluster.until(lambda: tenant.running)
        assert [each.device for each in claim.answer] == [each.device for each in before]
        assert grants_of(cluster) == 2


@in_virtual_time
async def test_sandbox_of_an_adopted_pod_does_not_delay_the_prepare_of_its_own_claim() -> None:
    async with simulated_cluster() as cluster:
        tenant = await running(cluster, allocated(cluster))
        cluster.unreadable.add(tenant.uid)
        cluster.reboot()
        await cluster.start_service()
        await cluster.run(2.0)
        assert cluster.record().open_grants[-1].basis is Basis.ADOPTED
        cluster.unreadable.clear()
        await cluster.until(lambda: tenant.running)


@pytest.mark.parametrize("call", ["prepare", "unprepare"])
def test_sandbox_of_a_pod_counts_until_its_released_claim_has_had_no_specification_for_the_grace_period(
    call: str,
) -> None:
    """A driver that was killed before it removed the specification says nothing: the pod's container would find the device."""

    @in_virtual_time
    async def release() -> None:
        async with simulated_cluster() as cluster:
            claim = allocated(cluster)
            tenant = await running(cluster, claim)
            joined = cluster.claims.admit(claim, "train-1", starts=False)
            await cluster.node.claims.set_pods(claim.uid, (tenant.pod, joined.pod))
            assert tenant.first is not None
            child = cluster.process_table.fork(tenant.first)
            cluster.claims.never_release()
            cluster.kubelet.delete(tenant)
            assert not (await unprepared(cluster, claim, 1.0)).done
            cluster.process_table.start(joined.uid, f"{joined.uid}/sandbox", "", sandbox=True)
            cluster.process_table.end(child)
            await cluster.run(DEFAULT.limits.leftover_grace_period * 2)
            assert not (await unprepared(cluster, claim, 40.0)).done
            assert (await refusal(cluster, claim.call(wait=40.0))).code is ErrorCode.EARLIER_POD_RUNNING

            began = cluster.clock.monotonic()
            if call == "prepare":
                (granted,) = await prepared(cluster, replace(claim.call(wait=44.0), withdrawn=True))
                assert granted.basis is Basis.CERTIFICATE
            else:
                assert (await cluster.node.claims.unprepare(claim.uid, 40.0, withdrawn=True)).done
            assert cluster.clock.monotonic() - began >= DEFAULT.limits.leftover_grace_period

    release()


@pytest.mark.parametrize("why", ["ran", "no-logs", "unlisted", "untrusted"])
def test_process_of_a_pod_of_a_released_claim_counts_unless_it_is_proved_that_no_container_of_it_ever_started(
    why: str,
) -> None:
    @in_virtual_time
    async def release() -> None:
        async with simulated_cluster() as cluster:
            claim = allocated(cluster)
            tenant = await running(cluster, claim)
            joined = cluster.claims.admit(claim, "train-1", starts=False)
            await cluster.node.claims.set_pods(claim.uid, (tenant.pod, joined.pod))
            cluster.claims.never_release()
            if why == "ran":
                cluster.process_table.start(joined.uid, f"{joined.uid}/main#1", "", first=True)
            else:
                cluster.process_table.start(joined.uid, f"{joined.uid}/sandbox", "", sandbox=True)
            if why == "no-logs":
                cluster.kubelet.without_logs.add(joined.uid)
            elif why == "unlisted":
                cluster.kubelet.force_delete(joined, 500.0)
            elif why == "untrusted":
                cluster.kubelet.trust = Trust.EMPTY_AFTER_RESTART
            cluster.kubelet.delete(tenant)
            assert not (await cluster.node.claims.unprepare(claim.uid, 100.0, withdrawn=True)).done

    release()


@in_virtual_time
async def test_claim_is_not_restored_while_the_kubelet_has_it_unprepared_through_another_instance_of_the_driver() -> (
    None
):
    """Unprepare would be answered with success and the claim stay prepared: the kubelet forgets it."""
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.claims.never_release()
        assert tenant.first is not None
        child = cluster.process_table.fork(tenant.first)
        cluster.kubelet.delete(tenant)
        release = asyncio.ensure_future(unprepared(cluster, claim))
        await cluster.until(lambda: not cluster.record().prepared_claims)
        restore = replace(claim.call(wait=44.0), restores=True)
        assert (await refusal(cluster, restore)).code is ErrorCode.CLAIM_IN_PROGRESS
        cluster.process_table.end(child)
        assert (await release).done
        await cluster.run(60.0)
        assert (await refusal(cluster, restore)).code is ErrorCode.CLAIM_IN_PROGRESS
        assert cluster.record().hygiene is Hygiene.CLEAN
        await cluster.run(60.0)
        assert await prepared(cluster, restore)


@in_virtual_time
async def test_only_process_of_a_pod_blocks_a_claim_that_is_restored_without_a_call_of_the_kubelet() -> None:
    """It is a sandbox if the kubelet calls, because it does so before the container; otherwise it may be the tenant."""
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.unreadable.add(tenant.uid)
        cluster.reboot()
        await cluster.start_service()
        assert tenant.worker is not None
        tenant.worker.cancel()
        await cluster.until(lambda: any(each.basis is Basis.ADOPTED for each in cluster.record().open_grants))
        cluster.process_table.start(tenant.uid, "its-only-container", "", mounted=frozenset(claim.devices))
        cluster.unreadable.clear()
        wrong = await refusal(cluster, replace(claim.call(wait=20.0), restores=True))
        assert wrong.code is ErrorCode.EARLIER_POD_RUNNING
        assert await prepared(cluster, claim.call(wait=20.0))


@in_virtual_time
@pytest.mark.parametrize("restores", [True, False])
async def test_claim_keeps_its_former_device_unless_the_kubelet_itself_requests_another_one_for_its_unstarted_pod(
    restores: bool,
) -> None:
    """Without a request of the kubelet, the pod may start at any time on the answer that the kubelet has."""
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        await cluster.claims.prepare(claim, cluster.claims.admit(claim, "train-0", starts=False))
        moved = replace(claim.call(wait=20.0), devices=(cluster.gpu(1).id,), restores=restores)
        wrong = await refusal(cluster, moved)
        assert wrong.code is (ErrorCode.CLAIM_CHANGED if restores else ErrorCode.CLAIM_ABANDONED)
        assert bool(cluster.record().prepared_claims) is restores


@in_virtual_time
async def test_service_that_ends_during_a_release_does_not_adopt_the_claims_pod_because_something_holds_the_device() -> (
    None
):
    """The kubelet lists the pod until the release has ended, and an adopted pod keeps a device until it is not listed."""
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        assert tenant.worker is not None
        tenant.worker.cancel()
        for process in list(cluster.process_table.living(tenant.uid)):
            cluster.process_table.end(process)
        release = asyncio.ensure_future(unprepared(cluster, claim))
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.SCRUBBING)
        holder = cluster.process_table.start(None, "host", "host")
        cluster.process_table.open(holder, claim.devices[0])
        cluster.kill()
        with suppress(Gone):
            await release
        await cluster.start_service()
        cluster.process_table.end(holder)
        assert (await unprepared(cluster, claim, 100.0)).done


@in_virtual_time
async def test_unprepare_after_a_reboot_is_done() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster)
        tenant = await running(cluster, claim)
        cluster.claims.never_release()
        cluster.kubelet.delete(tenant)
        cluster.reboot()
        await cluster.start_service()
        assert await unprepared(cluster, claim, 0.0) == ClaimRelease(done=True)


# -- admin access ------------------------------------------------------------------------------------------------------


def _with_admin_access(claim: SimulatedClaim) -> PrepareClaimCall:
    return replace(claim.call(), devices=(), admin_devices=claim.devices)


@in_virtual_time
async def test_admin_access_is_recorded_and_changes_nothing_about_the_device() -> None:
    async with simulated_cluster() as cluster:
        await running(cluster, allocated(cluster))
        before = cluster.record()
        admin = allocated(cluster, namespace="monitoring")
        assert await prepared(cluster, _with_admin_access(admin)) == ()
        assert await prepared(cluster, _with_admin_access(admin)) == ()
        after = cluster.record()
        assert (after.hygiene, after.open_grants, after.tenant) == (before.hygiene, before.open_grants, "acme")
        assert event_names(cluster).count("claim.admin-access") == 1
        assert (await unprepared(cluster, admin, 0.0)).done
        assert cluster.record().admin_claims == ()


@in_virtual_time
async def test_pod_with_admin_access_is_neither_adopted_nor_an_unauthorized_user() -> None:
    async with simulated_cluster() as cluster:
        admin = allocated(cluster, namespace="monitoring")
        monitor = cluster.claims.admit(admin, "monitor-0", starts=False)
        await prepared(cluster, _with_admin_access(admin))
        cluster.kubelet.listed_claims.add(admin.uid)
        process = cluster.process_table.start(
            monitor.uid, f"{monitor.uid}/main", "", mounted=frozenset(admin.devices), first=True
        )
        cluster.process_table.open(process, cluster.gpu().id)
        certificate = cluster.record().certificate
        assert certificate is not None
        await cluster.run(10.0)
        assert cluster.record().hygiene is not Hygiene.IN_USE
        assert cluster.record().certificate is None, "what the monitor leaves on the device must not reach a tenant"
        assert cluster.record().open_grants == ()
        assert not {"unauthorized.use.detected", "device.adopted"} & set(event_names(cluster))
        cluster.process_table.end(process)


@in_virtual_time
async def test_claim_with_admin_access_that_the_kubelet_lists_is_never_forgotten_for_another_one() -> None:
    async with simulated_cluster() as cluster:
        admins = [allocated(cluster, namespace="monitoring") for _ in range(36)]
        listed, forgotten, last = admins[:16:2], admins[1:20:2], admins[20:]
        for each in admins[:20]:
            await prepared(cluster, _with_admin_access(each))
            if each in listed:
                cluster.claims.admit(each, f"pod-of-{each.name}", starts=False)
                cluster.kubelet.listed_claims.add(each.uid)
                await cluster.run(2.0)
        kept = {each.uid for each in cluster.record().admin_claims}
        assert {each.uid for each in listed} < kept
        assert forgotten[0].uid not in kept
        for each in last[:8]:
            await prepared(cluster, _with_admin_access(each))
            cluster.claims.admit(each, f"pod-of-{each.name}", starts=False)
            cluster.kubelet.listed_claims.add(each.uid)
            await cluster.run(2.0)
        with pytest.raises(NotReady, match="16 claims with admin access"):
            await prepared(cluster, _with_admin_access(last[8]))
        assert {each.uid for each in cluster.record().admin_claims} == {each.uid for each in (*listed, *last[:8])}


@in_virtual_time
async def test_prepared_claims_are_listed_with_their_devices_and_pods() -> None:
    async with simulated_cluster() as cluster:
        claim = allocated(cluster, 0, 1)
        tenant = await running(cluster, claim)
        (found,) = cluster.node.claims.current()
        assert found.devices == claim.devices
        assert found.claim == Claim(claim.uid, "acme", claim.name, DRIVER, (tenant.pod,))
