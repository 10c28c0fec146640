"""Devices that leave the node during an operation: nothing more is committed for them, and no other work stops."""

from __future__ import annotations

import asyncio

from scrubber.domain.errors import Unreadable
from scrubber.domain.evidence import Outcome, ScrubTrigger
from scrubber.domain.states import Health
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.loops.pods import quarantine_unreadable
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


def unlist(world: World) -> None:
    """Remove the first device from the inventory and signal the change."""
    world.gpu().listed = False
    world.node.devices.inventory_changed.set()


async def departed(world: World) -> DeviceController:
    """Return the first device's controller, once the node no longer has it."""
    controller = world.controller()
    unlist(world)
    await world.until(lambda: controller.id not in world.node.devices.controllers)
    return controller


@in_virtual_time
async def test_unreadable_device_that_has_left_the_node_is_not_quarantined() -> None:
    async with a_world(devices=2) as world:
        controller = await departed(world)
        record = controller.state.record
        await quarantine_unreadable(controller, Unreadable("There is no such instance any more."))
        assert controller.state.record is record
        await world.run(60.0)
        assert world.serving


@in_virtual_time
async def test_scrub_that_starts_while_its_device_is_found_removed_ends_before_the_device_is_dropped() -> None:
    async with a_world(devices=2) as world:
        controller = world.controller()
        async with controller.state.lock:
            starting = asyncio.create_task(controller.scrubs.start(ScrubTrigger.ON_DEMAND))
            await asyncio.sleep(0)
            leaving = asyncio.create_task(world.node.devices.remove_missing(controller.id))
            await asyncio.sleep(0)
        job = await starting
        await leaving
        assert controller.id in world.node.devices.controllers
        assert controller.state.record.health is Health.QUARANTINED
        world.gpu().listed = False
        await job.wait_without_urgency()
        await world.until(lambda: controller.id not in world.node.devices.controllers)
        assert job.record.outcome is Outcome.PASSED
        await world.run(60.0)
        assert world.serving


@in_virtual_time
async def test_device_that_has_left_the_node_is_not_scrubbed_again() -> None:
    async with a_world(devices=2) as world:
        controller = await departed(world)
        before = dict(world.vault.scrubs)
        await world.run(120.0)
        assert {each.device for each in world.vault.scrubs.values() if each.id not in before} <= {world.gpu(1).id}
        assert controller.state.job is None
