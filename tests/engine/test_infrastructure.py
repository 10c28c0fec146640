"""Infrastructure beside tenants: what is tolerated and stated, and what a program of it makes of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.assignment import Trust
from scrubber.domain.evidence import FindingCode, Outcome, ScrubTrigger
from scrubber.domain.policy import Limits, UnauthorizedUseAction
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.telemetry import HolderKind
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Proc
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time


def agent(cluster: SimulatedCluster, kind: HolderKind, name: str = "exporter-x") -> Proc:
    """Start a process of the infrastructure's pod ``name`` that holds the first device."""
    gpu = cluster.gpu().id
    proc = cluster.process_table.start(name, f"{name}/main#1", "", mounted=frozenset({gpu}), agent=kind)
    cluster.process_table.open(proc, gpu)
    return proc


def logged(cluster: SimulatedCluster, name: str) -> int:
    assert cluster.journal is not None
    return sum(event.name == name for event in cluster.journal.events)


@in_virtual_time
async def test_certificate_of_a_scrub_beside_a_monitoring_agent_names_the_agent() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc = agent(cluster, HolderKind.INFRASTRUCTURE)
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        finished = await job.wait()
        assert finished.outcome is Outcome.PASSED
        (note,) = finished.findings
        assert note.code == FindingCode.INFRASTRUCTURE_HOLDER
        certificate = cluster.record().certificate
        assert certificate is not None
        assert certificate.covered[0].startswith("holders: none but infrastructure that the policy allows (1);")
        line = f"holders: gpu-operator/exporter-x (PID {proc.pid}) has the device open, as the policy allows"
        assert line in certificate.not_covered
        assert proc.alive


@in_virtual_time
async def test_certificate_lists_the_memory_that_a_driver_uses_as_not_covered() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc = agent(cluster, HolderKind.INFRASTRUCTURE)
        proc.memory_bytes = 4096
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.PASSED
        certificate = cluster.record().certificate
        assert certificate is not None
        assert f"memory: 4096 bytes in use by gpu-operator/exporter-x (PID {proc.pid})" in certificate.not_covered


@in_virtual_time
async def test_pods_start_and_end_beside_a_permanent_monitoring_agent() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc = agent(cluster, HolderKind.INFRASTRUCTURE)
        tenant = await started(cluster)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        await started(cluster, "umbrella", "serve-0")
        assert logged(cluster, "unauthorized.use.detected") == logged(cluster, "validation.use.detected") == 0
        assert proc.alive


@pytest.mark.parametrize("action", UnauthorizedUseAction)
def test_validation_makes_a_clean_device_dirty_and_is_neither_killed_nor_a_fault_under_any_policy(
    action: UnauthorizedUseAction,
) -> None:
    limits = replace(Limits(), leftover_grace_period=5.0)

    @in_virtual_time
    async def validate() -> None:
        async with simulated_cluster(
            devices=1, policy=replace(DEFAULT, unauthorized_use=action, limits=limits)
        ) as cluster:
            await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
            proc = agent(cluster, HolderKind.VALIDATION, "cuda-validator-x")
            await cluster.until(lambda: logged(cluster, "validation.use.detected") == 1)
            await cluster.run(30.0)
            assert (cluster.record().hygiene, cluster.record().health) == (Hygiene.DIRTY, Health.HEALTHY)
            assert proc.alive
            assert logged(cluster, "unauthorized.use.detected") == 0
            cluster.process_table.end(proc)
            await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)

    validate()


@in_virtual_time
async def test_start_waits_for_validation_to_end_and_then_gets_the_device() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        proc = agent(cluster, HolderKind.VALIDATION, "cuda-validator-x")
        call = request_start(cluster, await admitted(cluster))
        await cluster.run(3.0)
        assert not call.done()
        cluster.process_table.end(proc)
        (granted,) = await call
        assert granted.device == cluster.gpu().id


@in_virtual_time
async def test_validation_that_never_ends_is_named_since_it_was_first_seen_and_is_never_killed() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        proc = agent(cluster, HolderKind.VALIDATION, "cuda-validator-x")
        await cluster.until(lambda: bool(cluster.node.view().devices[0].holders))
        (first,) = cluster.node.view().devices[0].holders
        await cluster.run(1800.0)
        (named,) = cluster.node.view().devices[0].holders
        assert (named.since, named.code, named.is_blocking) == (first.since, "validation-holder", True)
        assert proc.alive
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_validation_beside_a_tenant_ends_the_exclusive_use_of_its_grant() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await started(cluster)
        await cluster.run(2.0)
        assert cluster.record().exclusive_use
        agent(cluster, HolderKind.VALIDATION, "cuda-validator-x")
        await cluster.run(2.0)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert not cluster.record().exclusive_use
        assert cluster.record().contaminated
        assert logged(cluster, "validation.use.detected") == 1


@in_virtual_time
async def test_program_of_a_validator_that_may_have_been_granted_the_device_is_not_recorded_as_validation() -> None:
    """The operator's validator may request a GPU like a tenant: then the use is by its grant."""
    async with simulated_cluster(devices=1) as cluster:
        cluster.kubelet.trust = Trust.UNREADABLE
        validator = await admitted(cluster)
        await request_start(cluster, validator)
        grant = cluster.record().last_grant
        assert grant is not None
        assert grant.pod is None
        agent(cluster, HolderKind.VALIDATION, validator.uid)
        await cluster.run(5.0)
        assert logged(cluster, "validation.use.detected") == 0
        assert not cluster.record().contaminated


def probe(cluster: SimulatedCluster, uid: str | None = None) -> Proc:
    """Start a process outside the infrastructure that has the first device open."""
    gpu = cluster.gpu().id
    proc = cluster.process_table.start(uid, f"{uid}/probe#1", "", mounted=frozenset({gpu}), command="nvidia-smi")
    cluster.process_table.open(proc, gpu)
    return proc


@in_virtual_time
async def test_probe_that_ends_within_a_moment_does_not_block_a_scrub() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc = probe(cluster)
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.run(0.3)
        cluster.process_table.end(proc)
        finished = await job.wait()
        assert finished.outcome is Outcome.PASSED
        (note,) = finished.findings
        assert (note.code, note.evidence["pid"]) == (FindingCode.HOLDER_ENDED, proc.pid)


@in_virtual_time
async def test_probes_that_follow_each_other_block_a_scrub() -> None:
    """A holder may pass the device on: the second look need not find the same process."""
    async with simulated_cluster(devices=1) as cluster:
        first = probe(cluster)
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.run(0.3)
        second = probe(cluster)
        cluster.process_table.end(first)
        finished = await job.wait()
        assert finished.outcome is Outcome.BLOCKED
        codes = {each.code: each.evidence.get("pid") for each in finished.findings}
        assert codes == {FindingCode.UNKNOWN_HOLDER: None, FindingCode.HOLDER_ENDED: first.pid}
        cluster.process_table.end(second)


@in_virtual_time
async def test_holder_that_was_found_before_is_not_looked_at_twice() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc = probe(cluster)
        await cluster.until(lambda: any(each.is_blocking for each in cluster.controller().view.holders))
        await cluster.until(lambda: cluster.controller().state.job is None)
        began = cluster.clock.monotonic()
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.BLOCKED
        assert cluster.clock.monotonic() - began < 0.5
        cluster.process_table.end(proc)


@in_virtual_time
async def test_process_that_uses_memory_is_not_looked_at_twice() -> None:
    async with simulated_cluster(devices=1) as cluster:
        proc = probe(cluster)
        proc.memory_bytes = 4096
        began = cluster.clock.monotonic()
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.BLOCKED
        assert cluster.clock.monotonic() - began < 0.5
        cluster.process_table.end(proc)


@in_virtual_time
async def test_process_of_a_pod_that_is_assigned_the_device_is_not_looked_at_twice() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        tenant = await admitted(cluster)
        await cluster.run(1.0)
        assert cluster.node.pods.reading.all_assignments(cluster.gpu().id)
        proc = probe(cluster, tenant.uid)
        began = cluster.clock.monotonic()
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.BLOCKED
        assert cluster.clock.monotonic() - began < 0.5
        cluster.process_table.end(proc)
