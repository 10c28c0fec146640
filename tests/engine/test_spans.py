"""The engine's traces: one tree for each hand-over, and one for each scrub that no caller waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scrubber.domain.states import Hygiene
from tests.world.asking import admitted, answered, ask, started
from tests.world.spans import Recorder, Told
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world

CHECK = "check(step holders, step settings, step health)"
SCRUB = "scrub(step holders, step memory, step on-chip, step settings, step health)"


@asynccontextmanager
async def told(devices: int = 1) -> AsyncIterator[tuple[World, Recorder]]:
    """Provide a world whose devices are all clean, and the recorder of its service."""
    async with a_world(devices=devices, settled=False) as world:
        recorder = Recorder()
        world.tracer = recorder
        await world.start_service()
        await world.until(world.settled)
        yield world, recorder


def only(found: list[Told]) -> Told:
    (one,) = found
    return one


@in_virtual_time
async def test_scrub_without_a_waiting_caller_has_a_trace_tree_of_its_own() -> None:
    async with told() as (world, recorder):
        scrub = only(recorder.find("scrub"))
        assert scrub in recorder.roots
        assert scrub.outline == SCRUB
        (record,) = world.vault.scrubs.values()
        assert scrub.attributes == {
            "device": world.gpu().id,
            "scrub_id": record.id,
            "tenant": None,
            "path": "slow",
            "trigger": "service-start",
            "outcome": "passed",
        }
        assert {step.attributes["verdict"] for step in scrub.inside} == {"passed", "not-covered"}


@in_virtual_time
async def test_trace_of_a_hand_over_of_clean_devices_has_a_check_span_per_device_and_one_grant_span() -> None:
    async with told(devices=2) as (world, recorder):
        tenant = await admitted(world, "umbrella", "serve-0", 0, 1)
        await ask(world, tenant)
        over = only(recorder.find("hand-over"))
        assert over.outline == f"hand-over(device({CHECK}), device({CHECK}), grant)"
        assert over.attributes == {"resource": "", "devices": 2, "kind": "unknown", "path": "fast"}
        assert [each.attributes["device"] for each in over.find("device")] == [world.gpu(0).id, world.gpu(1).id]
        assert {each.attributes["tenant"] for each in over.find("device")} == {"umbrella"}
        assert over.ended == ""


@in_virtual_time
async def test_trace_of_a_waiting_hand_over_has_a_wait_span_that_names_the_scrub() -> None:
    async with told() as (world, recorder):
        first = await started(world)
        scrubs = len(recorder.find("scrub"))
        world.kubelet.delete(first)
        await ask(world, await admitted(world))
        over = recorder.find("hand-over")[-1]
        waited = only(over.find("wait"))
        scrub = recorder.find("scrub")[scrubs]
        assert waited.attributes == {"scrub_id": scrub.attributes["scrub_id"]}
        assert scrub.attributes["tenant"] == "acme"
        assert only(over.find("device")).attributes["tenant"] == "umbrella"


@in_virtual_time
async def test_trace_of_a_refused_hand_over_names_the_reason_and_the_tenant() -> None:
    async with told() as (world, recorder):
        await world.node.actions.quarantine("0", "spare", "uid:0")
        await answered(ask(world, world.kubelet.admit("umbrella", "serve-0", [world.gpu().id], starts=False)))
        over = recorder.find("hand-over")[-1]
        assert over.attributes["refused"] == "quarantined"
        assert over.attributes["tenant"] == "umbrella"
        assert over.ended == "Quarantined"


@in_virtual_time
async def test_span_of_a_failed_scrub_step_names_the_findings() -> None:
    async with told() as (world, recorder):
        world.gpu().flaws.add("on-chip")
        first = await started(world)
        world.kubelet.delete(first)
        await world.until(lambda: world.record().hygiene is not Hygiene.IN_USE)
        await world.until(lambda: len(recorder.find("scrub")) == 2)
        scrub = recorder.find("scrub")[1]
        await world.until(lambda: scrub.ended is not None)
        assert scrub.attributes["outcome"] == "failed"
        assert scrub.inside[-1].name == "step on-chip"
        assert scrub.inside[-1].attributes["verdict"] == "failed"
        assert scrub.inside[-1].attributes["findings"]
