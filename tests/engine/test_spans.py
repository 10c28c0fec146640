"""The engine's traces: one tree for each hand-over, and one for each scrub that no caller waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scrubber.domain.states import Hygiene
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.spans import RecordedSpan, Recorder
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

CHECK = "check(step holders, step settings, step health)"
SCRUB = "scrub(step holders, step memory, step on-chip, step settings, step health)"


@asynccontextmanager
async def traced_cluster(devices: int = 1) -> AsyncIterator[tuple[SimulatedCluster, Recorder]]:
    """Provide a simulated cluster whose devices are all clean, and the recorder of its service."""
    async with simulated_cluster(devices=devices, settled=False) as cluster:
        recorder = Recorder()
        cluster.tracer = recorder
        await cluster.start_service()
        await cluster.until(cluster.settled)
        yield cluster, recorder


def only(found: list[RecordedSpan]) -> RecordedSpan:
    (one,) = found
    return one


@in_virtual_time
async def test_scrub_without_a_waiting_caller_has_a_trace_tree_of_its_own() -> None:
    async with traced_cluster() as (cluster, recorder):
        scrub = only(recorder.find("scrub"))
        assert scrub in recorder.roots
        assert scrub.outline == SCRUB
        (record,) = cluster.ledger_store.scrubs.values()
        assert scrub.attributes == {
            "device": cluster.gpu().id,
            "scrub_id": record.id,
            "tenant": None,
            "path": "slow",
            "trigger": "service-start",
            "outcome": "passed",
        }
        assert {step.attributes["verdict"] for step in scrub.inside} == {"passed", "not-covered"}


@in_virtual_time
async def test_trace_of_a_hand_over_of_clean_devices_has_a_check_span_per_device_and_one_grant_span() -> None:
    async with traced_cluster(devices=2) as (cluster, recorder):
        tenant = await admitted(cluster, "umbrella", "serve-0", 0, 1)
        await request_start(cluster, tenant)
        over = only(recorder.find("hand-over"))
        assert over.outline == f"hand-over(device({CHECK}), device({CHECK}), grant)"
        assert over.attributes == {"resource": "", "devices": 2, "kind": "unknown", "path": "fast"}
        assert [each.attributes["device"] for each in over.find("device")] == [cluster.gpu(0).id, cluster.gpu(1).id]
        assert {each.attributes["tenant"] for each in over.find("device")} == {"umbrella"}
        assert over.ended == ""


@in_virtual_time
async def test_trace_of_a_waiting_hand_over_has_a_wait_span_that_names_the_scrub() -> None:
    async with traced_cluster() as (cluster, recorder):
        first = await started(cluster)
        scrubs = len(recorder.find("scrub"))
        cluster.kubelet.delete(first)
        await request_start(cluster, await admitted(cluster))
        over = recorder.find("hand-over")[-1]
        waited = only(over.find("wait"))
        scrub = recorder.find("scrub")[scrubs]
        assert waited.attributes == {"scrub_id": scrub.attributes["scrub_id"]}
        assert scrub.attributes["tenant"] == "acme"
        assert only(over.find("device")).attributes["tenant"] == "umbrella"


@in_virtual_time
async def test_trace_of_a_refused_hand_over_names_the_reason_and_the_tenant() -> None:
    async with traced_cluster() as (cluster, recorder):
        await cluster.node.actions.quarantine("0", "spare", "uid:0")
        await refusal_of(
            request_start(cluster, cluster.kubelet.admit("umbrella", "serve-0", [cluster.gpu().id], starts=False))
        )
        over = recorder.find("hand-over")[-1]
        assert over.attributes["refused"] == "quarantined"
        assert over.attributes["tenant"] == "umbrella"
        assert over.ended == "Quarantined"


@in_virtual_time
async def test_span_of_a_failed_scrub_step_names_the_findings() -> None:
    async with traced_cluster() as (cluster, recorder):
        cluster.gpu().flaws.add("on-chip")
        first = await started(cluster)
        cluster.kubelet.delete(first)
        await cluster.until(lambda: cluster.record().hygiene is not Hygiene.IN_USE)
        await cluster.until(lambda: len(recorder.find("scrub")) == 2)
        scrub = recorder.find("scrub")[1]
        await cluster.until(lambda: scrub.ended is not None)
        assert scrub.attributes["outcome"] == "failed"
        assert scrub.inside[-1].name == "step on-chip"
        assert scrub.inside[-1].attributes["verdict"] == "failed"
        assert scrub.inside[-1].attributes["findings"]
