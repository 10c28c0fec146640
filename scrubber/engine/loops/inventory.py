"""Watches the inventory of the node: devices that appear, disappear or move, and changes of their descriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from scrubber.domain.device import Device
from scrubber.domain.errors import ScrubberError
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.node import Node
from scrubber.ports.device import Inventory

__all__ = ["watch_inventory"]

_INVENTORY_INTERVAL = 60.0
"""Seconds after which devices are described again without a signal: firmware changes silently."""


async def watch_inventory(
    node: Node, *, inventory: Inventory, dependencies: Dependencies, add_device: Callable[[Device], Awaitable[None]]
) -> None:
    """Follow devices that appear, disappear or move (handled as both), and changes of their descriptions.

    Args:
        add_device: makes a controller for a new device.
    """
    while True:
        with suppress(TimeoutError):
            async with dependencies.clock.timeout(_INVENTORY_INTERVAL):
                await node.devices.inventory_changed.wait()
        node.devices.inventory_changed.clear()
        failed = False
        try:
            present = {device.id: device for device in await inventory.devices()}
        except ScrubberError:
            present, failed = (
                {controller.id: controller.state.device for controller in node.devices.controllers.values()},
                True,
            )
        for device in present.values():
            node.devices.update_description(device)
        gone = [
            controller.state.device
            for controller in node.devices.controllers.values()
            if present.get(controller.id) != controller.state.device
        ]
        for lost in sorted(gone, key=lambda device: device.id):
            failed |= await _must_retry(partial(node.devices.remove_missing, lost.id))
        for new in sorted(present.keys() - node.devices.controllers.keys()):
            failed |= await _must_retry(partial(add_device, present[new]))
        if failed:
            # A missing driver or a full ledger must not lose a change, nor one device the change of another.
            await dependencies.clock.sleep(1.0)
            node.devices.inventory_changed.set()


async def _must_retry(change: Callable[[], Awaitable[None]]) -> bool:
    """Make ``change``; return whether it must be made again."""
    try:
        await change()
    except ScrubberError:
        return True
    return False
