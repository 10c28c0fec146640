"""Devices that leave the node during an operation: nothing more is committed for them, and no other work stops."""

from __future__ import annotations

import asyncio

from scrubber.domain.errors import Unreadable
from scrubber.domain.evidence import Outcome, ScrubTrigger
from scrubber.domain.states import Health
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.loops.health import quarantine_unreadable
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.timeline import in_virtual_time


def unlist(cluster: SimulatedCluster) -> None:
    """Remove the first device from the inventory and signal the change."""
    cluster.gpu().listed = False
    cluster.node.devices.inventory_changed.set()


async def departed(cluster: SimulatedCluster) -> DeviceController:
    """Return the first device's controller, once the node no longer has it."""
    controller = cluster.controller()
    unlist(cluster)
    await cluster.until(lambda: controller.id not in cluster.node.devices.controllers)
    return controller


@in_virtual_time
async def test_unreadable_device_that_has_left_the_node_is_not_quarantined() -> None:
    async with simulated_cluster(devices=2) as cluster:
        controller = await departed(cluster)
        record = controller.state.record
        await quarantine_unreadable(controller, Unreadable("There is no such instance any more."))
        assert controller.state.record is record
        await cluster.run(60.0)
        assert cluster.serving


@in_virtual_time
async def test_scrub_that_starts_while_its_device_is_found_removed_ends_before_the_device_is_dropped() -> None:
    async with simulated_cluster(devices=2) as cluster:
        controller = cluster.controller()
        async with controller.state.lock:
            starting = asyncio.create_task(controller.scrubs.start(ScrubTrigger.ON_DEMAND))
            await asyncio.sleep(0)
            leaving = asyncio.create_task(cluster.node.devices.remove_missing(controller.id))
            await asyncio.sleep(0)
        job = await starting
        await leaving
        assert controller.id in cluster.node.devices.controllers
        assert controller.state.record.health is Health.QUARANTINED
        cluster.gpu().listed = False
        await job.wait_without_urgency()
        await cluster.until(lambda: controller.id not in cluster.node.devices.controllers)
        assert job.record.outcome is Outcome.PASSED
        await cluster.run(60.0)
        assert cluster.serving


@in_virtual_time
async def test_device_that_has_left_the_node_is_not_scrubbed_again() -> None:
    async with simulated_cluster(devices=2) as cluster:
        controller = await departed(cluster)
        before = dict(cluster.ledger_store.scrubs)
        await cluster.run(120.0)
        assert {each.device for each in cluster.ledger_store.scrubs.values() if each.id not in before} <= {
            cluster.gpu(1).id
        }
        assert controller.state.job is None
