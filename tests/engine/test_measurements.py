"""What the engine reports for metrics: records of scrubs, waiting starts, and unexplained residue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.evidence import (
    Certificate,
    Finding,
    Outcome,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.policy import Limits
from scrubber.domain.states import Hygiene
from scrubber.engine import events
from scrubber.ports.record import Event
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time


def logged(cluster: SimulatedCluster, name: str = "residue.unexplained") -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in cluster.ledger_store.events if event.name == name]


def records(cluster: SimulatedCluster, path: PathKind) -> list[ScrubRecord]:
    assert cluster.journal is not None
    return [each for each in cluster.journal.scrubs if each.path is path]


# -- residue -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_residue_on_a_device_that_was_not_granted_since_its_certificate_is_logged_as_unexplained() -> None:
    async with simulated_cluster(1) as cluster:
        proved = cluster.record().certificate
        assert proved is not None
        cluster.gpu().cells[0] = "unknown"
        updates = [each async for each in cluster.node.actions.scrub(cluster.gpu().id, PathKind.SLOW, "uid:0")]
        (event,) = logged(cluster)
        assert [each.unexplained_residue for each in updates if each.unexplained_residue] == [event.fields["message"]]
        assert updates[-1].unexplained_residue, "the last update reports it to the operator who requested the scrub"
        assert event.device == cluster.gpu().id
        assert event.fields["certificate"] == proved.id
        assert event.fields["residue_bytes"]
        assert event.scrub == records(cluster, PathKind.SLOW)[-1].id
        assert cluster.journal is not None
        assert event in cluster.journal.events


@in_virtual_time
async def test_residue_of_a_tenant_is_not_logged_as_unexplained() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await started(cluster)
        cluster.kubelet.delete(tenant)
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        assert any(each.measurement(Step.MEMORY, "residue_bytes") for each in records(cluster, PathKind.SLOW))
        assert logged(cluster) == []


@in_virtual_time
async def test_scrub_of_a_clean_device_without_residue_reports_no_unexplained_residue() -> None:
    async with simulated_cluster(1) as cluster:
        updates = [each async for each in cluster.node.actions.scrub(cluster.gpu().id, PathKind.SLOW, "uid:0")]
        assert (logged(cluster), updates[-1].unexplained_residue) == ([], "")


CERTIFICATE = Certificate(
    *("cert-1", "node", "boot", "driver", "GPU-a", 1, 0, PathKind.SLOW, "scrub-0", (), (), "default", "digest"),
    issued_at=1.0,
)
RESIDUE = StepResult(Step.MEMORY, Verdict.PASSED, 1.0, measured={"residue_bytes": 512})


def of_steps(*steps: StepResult) -> ScrubRecord:
    return ScrubRecord("scrub-1", "GPU-a", PathKind.SLOW, ScrubTrigger.MAINTENANCE, 1.0, 2.0, Outcome.PASSED, steps)


@pytest.mark.parametrize("writer", [Step.RESET, Step.DIAGNOSTICS])
def test_residue_after_a_step_that_writes_to_memory_is_not_unexplained(writer: Step) -> None:
    assert events.residue_unexplained(of_steps(StepResult(writer, Verdict.PASSED, 1.0), RESIDUE), CERTIFICATE) == ()
    untouched = StepResult(writer, Verdict.NOT_COVERED, 1.0)
    assert len(events.residue_unexplained(of_steps(untouched, RESIDUE), CERTIFICATE)) == 1


def test_residue_on_a_device_without_a_certificate_is_not_unexplained() -> None:
    assert events.residue_unexplained(of_steps(RESIDUE), None) == ()


# -- records -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_every_scrub_and_every_hand_over_check_reaches_the_journal_once_stored() -> None:
    async with simulated_cluster(1) as cluster:
        (first,) = records(cluster, PathKind.SLOW)
        assert first.outcome is Outcome.PASSED
        assert first.steps[0].step is Step.HOLDERS
        await started(cluster)
        (check,) = records(cluster, PathKind.FAST)
        assert {step.step for step in check.steps} == {Step.HOLDERS, Step.SETTINGS, Step.HEALTH}
        (granted,) = logged(cluster, "handover.granted")
        assert granted.scrub == check.id


@in_virtual_time
async def test_reset_step_records_the_reset_method() -> None:
    async with simulated_cluster(1) as cluster:
        async for _ in cluster.node.actions.reset("0", "hangs", "uid:0"):
            pass
        (step,) = (step for step in records(cluster, PathKind.SLOW)[-1].steps if step.step is Step.RESET)
        assert step.measured["method"]


# -- waiting starts ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_waiting_starts_are_counted_until_they_end_or_are_cancelled() -> None:
    async with simulated_cluster(1) as cluster:
        await started(cluster)
        assert cluster.node.waiting_starts == 0
        call = request_start(cluster, await admitted(cluster), wait=5.0)
        await cluster.run(1.0)
        assert cluster.node.waiting_starts == 1
        await refusal_of(call)
        assert cluster.node.waiting_starts == 0
        given_up = request_start(cluster, await admitted(cluster, name="serve-1"), wait=5.0)
        await cluster.run(1.0)
        given_up.cancel()
        await cluster.run(0.1)
        assert cluster.node.waiting_starts == 0


@in_virtual_time
async def test_kubelet_restarts_are_counted() -> None:
    async with simulated_cluster(1) as cluster:
        assert cluster.node.kubelet_restarts == 0
        for times in (1, 2):
            cluster.kubelet.starts += 1
            await cluster.until(lambda times=times: cluster.node.kubelet_restarts == times, within=30.0)  # type: ignore[misc]


@in_virtual_time
async def test_eraser_pool_reports_busy_slots_and_waiting_scrubs() -> None:
    two_slots = replace(DEFAULT, limits=replace(Limits(), eraser_slots=2))
    async with simulated_cluster(4, two_slots) as cluster:
        slots = cluster.node.devices.eraser_pool
        assert (slots.busy, cluster.node.devices.free_eraser_slots, slots.waiting) == (0, 2, 0)
        for each in cluster.process_table.gpus.values():
            each.slow = 100.0
        for number in range(4):
            await cluster.controller(number).scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.until(lambda: slots.busy == 2 and slots.waiting == 2)
        assert cluster.node.devices.free_eraser_slots == 0
        for each in cluster.process_table.gpus.values():
            each.slow = 1.0


def test_process_killed_as_unauthorized_is_not_attributed_to_the_tenant_that_had_the_device() -> None:
    unauthorized_finding = Finding(
        Step.HOLDERS, "unauthorized-process-killed", Severity.NOTE, "It was ended.", {"pid": 7, "pod_uid": "uid-2"}
    )
    record = of_steps(StepResult(Step.HOLDERS, Verdict.PASSED, 1.0, (unauthorized_finding,)))
    ended, finished = events.scrub_finished(record, None, "acme")
    assert (ended.name, ended.fields) == (
        "unauthorized.process.killed",
        {"pid": 7, "pod_uid": "uid-2", "tenant": None},
    )
    assert finished.fields["tenant"] == "acme"
