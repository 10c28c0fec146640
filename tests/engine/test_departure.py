"""Devices that leave the node while somebody works on them: nothing is committed for them any more, and nothing else stops."""

from __future__ import annotations

import asyncio

from scrubber.domain.errors import Unreadable
from scrubber.domain.evidence import Occasion, Outcome
from scrubber.domain.health import Health
from scrubber.engine.keeper import Keeper
from scrubber.engine.watch import quarantine_unreadable
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


def unlist(world: World) -> None:
    """The inventory names the first device no longer, and says so."""
    world.gpu().listed = False
    world.node.inventory_changed.set()


async def departed(world: World) -> Keeper:
    """Its keeper, once the node has it no longer."""
    keeper = world.keeper()
    unlist(world)
    await world.until(lambda: keeper.device.id not in world.node.keepers)
    return keeper


@in_virtual_time
async def test_a_question_that_fails_because_the_device_has_left_stops_nothing() -> None:
    async with a_world(devices=2) as world:
        keeper = await departed(world)
        record = keeper.record
        await quarantine_unreadable(keeper, Unreadable("There is no such instance any more."))
        assert keeper.record is record
        await world.run(60.0)
        assert world.serving


@in_virtual_time
async def test_a_scrub_that_begins_as_the_device_is_found_to_have_left_ends_before_it_goes() -> None:
    async with a_world(devices=2) as world:
        keeper = world.keeper()
        async with keeper.deciding():
            starting = asyncio.create_task(keeper.start_scrub(Occasion.ON_DEMAND))
            await asyncio.sleep(0)
            leaving = asyncio.create_task(world.node.lost(keeper.device.id))
            await asyncio.sleep(0)
        job = await starting
        await leaving
        assert keeper.device.id in world.node.keepers
        assert keeper.record.health is Health.QUARANTINED
        world.gpu().listed = False
        await job.over()
        await world.until(lambda: keeper.device.id not in world.node.keepers)
        assert job.outcome is Outcome.PASSED
        await world.run(60.0)
        assert world.serving


@in_virtual_time
async def test_a_device_that_has_left_is_scrubbed_no_more() -> None:
    async with a_world(devices=2) as world:
        keeper = await departed(world)
        before = dict(world.vault.scrubs)
        await world.run(120.0)
        assert {each.device for each in world.vault.scrubs.values() if each.id not in before} <= {world.gpu(1).id}
        assert keeper.job is None
