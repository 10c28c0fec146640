"""Jobs: a prolog is the gate, its manager reports the end, and only an empty cgroup releases the devices."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Claim, JobManager, Pod
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import DeviceBusy, InvalidRequest, LedgerFailure, NotReady, Quarantined, ScrubberError
from scrubber.domain.jobs import Job
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.states import Hygiene
from scrubber.engine.views import GrantedDevice, PrepareClaimCall, StartJobCall
from tests.engine.test_yielding import driverless_node
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Proc
from tests.simulation.timeline import in_virtual_time

ALICE = Job(JobManager.SLURM, "4711", "alice", 1000)
BOB = Job(JobManager.SLURM, "4712", "bob", 1001)
RUN = Job(JobManager.RUN, "c0ffee", "alice", 1000)
WAIT = 30.0


def start_process(cluster: SimulatedCluster, job: Job, *devices: int, step: str = "step_0") -> Proc:
    """Start a process of ``job`` that has filled its devices."""
    ids = [cluster.gpu(number).id for number in devices]
    label = f"{job.user}/{job.pod.uid}/{step}"
    proc = cluster.process_table.start(job.pod.uid, step, label, mounted=frozenset(ids))
    for each in ids:
        cluster.process_table.open(proc, each)
        cluster.process_table.write(proc, each)
    return proc


async def started(cluster: SimulatedCluster, job: Job, *devices: int, wait: float = WAIT) -> tuple[GrantedDevice, ...]:
    assert cluster.service is not None
    names = tuple(cluster.gpu(number).id for number in devices or (0,))
    cluster.laws.requested_by_jobs.append(set(names))
    return await cluster.service.start_job(StartJobCall(job, "uid:0", names, wait_seconds=wait))


async def any_started(cluster: SimulatedCluster, job: Job, count: int) -> tuple[GrantedDevice, ...]:
    assert cluster.service is not None
    cluster.laws.requested_by_jobs += [{each} for each in cluster.node.devices.controllers]
    return await cluster.service.start_job(StartJobCall(job, "uid:0", count=count, wait_seconds=WAIT))


async def refusal(cluster: SimulatedCluster, job: Job, *devices: int, wait: float = 2.0) -> ScrubberError:
    with pytest.raises(ScrubberError) as refused:
        await started(cluster, job, *devices, wait=wait)
    return refused.value


async def end(cluster: SimulatedCluster, job: Job) -> None:
    assert cluster.service is not None
    await cluster.service.end_job(job)


def event_fields(cluster: SimulatedCluster, name: str) -> list[tuple[str | None, str, object, object]]:
    found = [each for each in cluster.ledger_store.events if each.name == name]
    return [(each.device, each.actor, each.fields["tenant"], each.fields["job"]) for each in found]


@in_virtual_time
async def test_job_gets_clean_devices_in_one_transaction_and_the_audit_log_names_job_and_caller() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.until(cluster.settled)
        writes = cluster.ledger_store.writes
        answer = await started(cluster, ALICE, 0, 1)
        assert cluster.ledger_store.writes == writes + 1
        assert [each.certificate is not None for each in answer] == [True, True]
        assert event_fields(cluster, "handover.granted") == [
            (cluster.gpu(number).id, "uid:0", "alice", "slurm/4711") for number in (0, 1)
        ]
        assert [cluster.record(number).tenant for number in (0, 1)] == ["alice", "alice"]
        start_process(cluster, ALICE, 0, 1)
        await cluster.run(5)
        assert not [each for each in cluster.ledger_store.events if each.name == "unauthorized.use.detected"]


@in_virtual_time
async def test_repeated_prolog_gets_the_same_answer_without_a_grant_after_a_kill_of_the_service() -> None:
    async with simulated_cluster() as cluster:
        first = await started(cluster, ALICE, 0)
        start_process(cluster, ALICE, 0)
        cluster.kill()
        await cluster.start_service()
        await cluster.run(5)
        assert cluster.record(0).hygiene is Hygiene.IN_USE
        assert await started(cluster, ALICE, 0) == first
        assert cluster.record(0).grant_sequence == 1


@in_virtual_time
async def test_job_whose_prolog_was_killed_after_the_commit_keeps_its_grant_until_its_end_is_reported() -> None:
    async with simulated_cluster() as cluster:
        call = asyncio.ensure_future(started(cluster, ALICE, 0))
        cluster.ledger_store.granting = call.cancel
        with pytest.raises(asyncio.CancelledError):
            await call
        cluster.ledger_store.granting = None
        await cluster.run(5)
        assert cluster.record(0).hygiene is Hygiene.IN_USE
        await end(cluster, ALICE)
        await cluster.until(lambda: cluster.record(0).is_certified)


@pytest.mark.parametrize("job", [ALICE, RUN], ids=["slurm", "run"])
def test_job_whose_grant_meets_a_full_disk_gets_no_device_and_exactly_one_grant_once_there_is_room(job: Job) -> None:
    @in_virtual_time
    async def fill_the_disk() -> None:
        async with simulated_cluster(devices=2) as cluster:
            await cluster.until(cluster.settled)
            start_process(cluster, job)
            cluster.ledger_store.refuses = "No space left on device."
            with pytest.raises(LedgerFailure, match="No space left"):
                await started(cluster, job, 0, 1, wait=2.0)
            for number in (0, 1):
                assert cluster.record(number).grant_sequence == 0
                assert cluster.record(number).is_certified
            await cluster.run(10)
            cluster.ledger_store.refuses = None
            answer = await started(cluster, job, 0, 1)
            assert [each.certificate is not None for each in answer] == [True, True]
            assert [cluster.record(number).grant_sequence for number in (0, 1)] == [1, 1]
            assert len(event_fields(cluster, "handover.granted")) == 2

    fill_the_disk()


@in_virtual_time
async def test_job_without_a_process_keeps_its_device_until_its_end_is_reported() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        first = start_process(cluster, ALICE, 0)
        cluster.process_table.end(first)
        await cluster.run(60)
        assert cluster.record(0).hygiene is Hygiene.IN_USE
        start_process(cluster, ALICE, 0, step="step_1")
        await cluster.run(5)
        assert cluster.record(0).hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_ended_job_releases_its_device_only_once_the_step_that_outlived_it_has_ended() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        outliving = start_process(cluster, ALICE, 0)
        await end(cluster, ALICE)
        assert event_fields(cluster, "job.end-reported") == [(cluster.gpu(0).id, "uid:0", "alice", "slurm/4711")]
        waits = await refusal(cluster, BOB, 0)
        assert (waits.code, "job 4711 of alice" in str(waits)) == (ErrorCode.EARLIER_POD_RUNNING, True)
        await cluster.run(120)
        assert outliving.alive
        assert cluster.record(0).hygiene is Hygiene.IN_USE
        cluster.process_table.end(outliving)
        await started(cluster, BOB, 0)
        start_process(cluster, BOB, 0)
        assert cluster.record(0).tenant == "bob"


@in_virtual_time
async def test_process_of_an_ended_job_that_holds_no_device_blocks_the_next_job_after_a_kill_of_the_service() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        silent = start_process(cluster, ALICE)
        await end(cluster, ALICE)
        cluster.kill()
        await cluster.start_service()
        waits = await refusal(cluster, BOB, 0)
        assert waits.code == ErrorCode.EARLIER_POD_RUNNING
        cluster.process_table.end(silent)
        await started(cluster, BOB, 0)


@in_virtual_time
async def test_device_is_released_at_the_moment_at_which_the_last_process_of_an_ended_job_ends() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        last = start_process(cluster, ALICE, 0)
        await end(cluster, ALICE)
        await cluster.run(1.5)
        cluster.process_table.end(last)
        await cluster.run(0.05)
        assert cluster.record(0).hygiene is not Hygiene.IN_USE


@in_virtual_time
async def test_next_prolog_ends_a_job_whose_epilog_never_came_on_all_its_devices() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await started(cluster, ALICE, 0, 1)
        living = start_process(cluster, ALICE, 0)
        waits = await refusal(cluster, BOB, 0)
        assert waits.code == ErrorCode.EARLIER_POD_RUNNING
        assert [fields[0] for fields in event_fields(cluster, "job.end-reported")] == [
            cluster.gpu(number).id for number in (0, 1)
        ]
        cluster.process_table.end(living)
        await started(cluster, BOB, 0)
        start_process(cluster, BOB, 0)
        await cluster.until(lambda: cluster.record(1).is_certified)


@in_virtual_time
async def test_job_that_is_queued_again_with_another_device_leaves_the_first_one_to_be_scrubbed() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await started(cluster, ALICE, 0)
        await started(cluster, ALICE, 1)
        await cluster.until(lambda: cluster.record(0).is_certified)
        assert cluster.record(1).hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_slurm_job_does_not_end_a_running_command_on_its_device() -> None:
    async with simulated_cluster() as cluster:
        start_process(cluster, RUN)
        await started(cluster, RUN, 0)
        waits = await refusal(cluster, BOB, 0)
        assert (type(waits), waits.code) == (NotReady, ErrorCode.PREPARED_FOR_CLAIM)
        assert "job c0ffee of alice (run)" in str(waits)
        assert "alice" not in waits.public_message


@in_virtual_time
async def test_command_releases_its_devices_without_a_report_once_it_has_no_process() -> None:
    async with simulated_cluster() as cluster:
        wrapper = start_process(cluster, RUN)
        await started(cluster, RUN, 0)
        background = start_process(cluster, RUN, 0)
        cluster.process_table.end(wrapper)
        await cluster.run(60)
        assert cluster.record(0).hygiene is Hygiene.IN_USE
        cluster.process_table.end(background)
        await cluster.until(lambda: cluster.record(0).is_certified)
        assert event_fields(cluster, "job.end-reported") == []


@in_virtual_time
async def test_command_that_was_killed_while_the_service_was_away_releases_its_devices_at_the_next_start() -> None:
    async with simulated_cluster() as cluster:
        wrapper = start_process(cluster, RUN, step="command")
        await started(cluster, RUN, 0)
        cluster.kill()
        cluster.process_table.end(wrapper)
        await cluster.start_service()
        await cluster.until(lambda: cluster.record(0).is_certified)


@in_virtual_time
async def test_command_without_a_process_in_its_cgroup_is_refused_because_it_would_look_over() -> None:
    async with simulated_cluster() as cluster:
        assert (await refusal(cluster, RUN, 0)).code == ErrorCode.JOB_UNREADABLE
        assert cluster.record(0).grant_sequence == 0


@in_virtual_time
async def test_slurm_job_is_refused_where_slurm_keeps_no_cgroups() -> None:
    async with simulated_cluster() as cluster:
        cluster.process_table.has_job_cgroups = False
        wrong = await refusal(cluster, ALICE, 0)
        assert (wrong.code, "job 4711 of alice" in str(wrong)) == (ErrorCode.JOB_UNREADABLE, True)
        assert cluster.record(0).grant_sequence == 0


@in_virtual_time
async def test_job_with_unreadable_processes_keeps_its_device_after_its_end() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        cluster.unreadable.add(ALICE.pod.uid or "")
        await end(cluster, ALICE)
        await cluster.run(120)
        assert cluster.record(0).hygiene is Hygiene.IN_USE
        cluster.unreadable.clear()
        await cluster.until(lambda: cluster.record(0).is_certified)


@in_virtual_time
async def test_any_devices_are_free_ones_and_two_calls_at_once_get_different_ones() -> None:
    async with simulated_cluster(devices=3) as cluster:
        await cluster.until(cluster.settled)
        await started(cluster, ALICE, 1)
        other = replace(RUN, id="beef")
        for job in (RUN, other):
            start_process(cluster, job)
        chosen = await asyncio.gather(any_started(cluster, RUN, 1), any_started(cluster, other, 1))
        assert {each.device for granted in chosen for each in granted} == {cluster.gpu(0).id, cluster.gpu(2).id}
        assert await any_started(cluster, RUN, 1) == chosen[0]
        third = replace(RUN, id="cafe")
        start_process(cluster, third)
        with pytest.raises(NotReady, match="0 of 1 requested devices are free"):
            await any_started(cluster, third, 1)
        for impossible in (0, 4):
            with pytest.raises(InvalidRequest, match="1 to 3 devices"):
                await any_started(cluster, third, impossible)


@in_virtual_time
async def test_job_on_a_device_that_an_operator_quarantined_is_refused_at_once() -> None:
    async with simulated_cluster() as cluster:
        await cluster.node.actions.quarantine(cluster.gpu(0).id, "because", "uid:0")
        assert isinstance(await refusal(cluster, ALICE, 0, wait=WAIT), Quarantined)


@in_virtual_time
async def test_job_on_a_device_that_failed_since_is_refused_and_nothing_is_sent_to_a_pod() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        start_process(cluster, ALICE, 0)
        await cluster.node.actions.quarantine(cluster.gpu(0).id, "because", "uid:0")
        wrong = await refusal(cluster, ALICE, 0)
        assert isinstance(wrong, Quarantined)
        assert "once the job has ended" in str(wrong)
        await cluster.run(60)
        assert cluster.node.view().notices == ()


@in_virtual_time
async def test_claim_waits_while_a_job_has_the_device_and_a_job_waits_while_a_claim_has_it() -> None:
    async with simulated_cluster(devices=2) as cluster:
        assert cluster.service is not None
        await started(cluster, ALICE, 0)
        claim = Claim("claim-1", "team-a", "training", "gpu.scrubber.dev", (Pod("team-a", "train-0", "uid-1"),))
        call = PrepareClaimCall(claim, (cluster.gpu(0).id,), wait_seconds=1.0)
        with pytest.raises(NotReady, match="used by job 4711 of alice"):
            await cluster.service.prepare_claim(call)
        cluster.laws.requested_by_jobs.append({cluster.gpu(1).id})
        await cluster.service.prepare_claim(replace(call, devices=(cluster.gpu(1).id,)))
        waits = await refusal(cluster, BOB, 1)
        assert (waits.code, "the claim team-a/training" in str(waits)) == (ErrorCode.PREPARED_FOR_CLAIM, True)


@in_virtual_time
async def test_end_of_a_job_is_noted_on_a_yielded_node_where_no_job_starts() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        await cluster.node.yields.request(YieldRequester.OPERATOR, "driver upgrade", "uid:0")
        assert (await refusal(cluster, BOB, 0)).code == ErrorCode.NODE_YIELDED
        node = driverless_node(cluster)
        with pytest.raises(NotReady, match="driver upgrade"):
            await node.jobs.start(StartJobCall(BOB, "uid:0", (cluster.gpu(0).id,)))
        ended = await node.jobs.end(ALICE, 0.0, "uid:0")
        assert ended.done
        assert [each.device for each in ended.withheld] == [cluster.gpu(0).id]
        cluster.kill()
        await cluster.start_service()
        await cluster.until(lambda: cluster.record(0).is_certified)


@in_virtual_time
async def test_operators_scrub_releases_a_job_whose_end_is_never_reported_once_it_has_no_process() -> None:
    async with simulated_cluster() as cluster:
        assert cluster.service is not None
        await started(cluster, ALICE, 0)
        step = start_process(cluster, ALICE, 0)
        await cluster.run(5)
        with pytest.raises(DeviceBusy):
            await cluster.service.scrub(cluster.gpu(0).id)
        cluster.process_table.end(step)
        await cluster.run(5)
        await cluster.service.scrub(cluster.gpu(0).id)
        assert cluster.record(0).is_certified
        assert event_fields(cluster, "job.end-reported") == [(cluster.gpu(0).id, "uid:0", "alice", "slurm/4711")]


@in_virtual_time
async def test_process_of_a_job_that_was_not_granted_the_device_uses_it_without_a_grant() -> None:
    async with simulated_cluster() as cluster:
        await started(cluster, ALICE, 0)
        start_process(cluster, ALICE, 0)
        start_process(cluster, BOB, 0)
        await cluster.run(5)
        found = [each for each in cluster.ledger_store.events if each.name == "unauthorized.use.detected"]
        assert {each.fields["pod_uid"] for each in found} == {"slurm-job-4712"}


@in_virtual_time
async def test_unknown_job_has_ended() -> None:
    async with simulated_cluster() as cluster:
        assert cluster.service is not None
        assert (await cluster.service.end_job(ALICE, 5.0)).done
