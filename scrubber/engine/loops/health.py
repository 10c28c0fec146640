"""Checks the health of devices: after each signal of the driver, and periodically.

The controllers decide what a check leads to.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault, InvalidRequest, LedgerFailure, ScrubberError
from scrubber.domain.evidence import Step
from scrubber.domain.health.signals import fault_finding
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.node import Node

__all__ = ["follow_signals", "quarantine_unreadable", "run_check", "watch_health"]

_MIN_CHECK_INTERVAL = 0.05
"""Seconds between two checks of a device whose driver keeps reporting signals."""


async def follow_signals(node: Node, *, dependencies: Dependencies) -> None:
    """Check a device as soon as the driver reports an event for it; at most one check per device at a time."""
    running: set[str] = set()
    again: set[str] = set()

    async def check_until_quiet(controller: DeviceController) -> None:
        device = controller.id
        try:
            again.add(device)
            while device in again:
                again.discard(device)
                await run_check(controller, controller.health.check)
                # A driver that reports without end must not occupy the service completely.
                await dependencies.clock.sleep(_MIN_CHECK_INTERVAL)
        finally:
            running.discard(device)

    async with asyncio.TaskGroup() as group:
        async for signal in dependencies.telemetry.signals():
            if signal.device is None:
                node.devices.inventory_changed.set()
            for controller in _concerned(node, signal.device):
                controller.health.note_signal(signal)
                if controller.id in running:
                    again.add(controller.id)
                else:
                    # Add it here and not in the task: signals that are already queued are merged before the task runs.
                    running.add(controller.id)
                    group.create_task(check_until_quiet(controller), name=f"signal {controller.id}")


def _concerned(node: Node, device: str | None) -> list[DeviceController]:
    if device is None:
        return list(node.devices.controllers.values())
    return [node.devices.controllers[device]] if device in node.devices.controllers else []


async def watch_health(
    node: Node, *, dependencies: Dependencies, interval: float, least: Callable[[Device], float] = lambda _: 0.0
) -> None:
    """Compare snapshots periodically: signals are edges and can be missed. A hung device delays no other.

    Args:
        interval: seconds between two rounds.
        least: returns the seconds below which a device is not checked again.
    """
    running: dict[str, asyncio.Task[None]] = {}
    checked: dict[str, float] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            # A device whose check has to wait, for example for the reset of a peer, delays no other.
            running = {device: task for device, task in running.items() if not task.done()}
            now = dependencies.clock.monotonic()
            for device, controller in node.devices.controllers.items():
                # A round that comes a moment early must not cost the next one.
                is_due = now - checked.get(device, -math.inf) >= least(controller.state.device) - interval / 10
                if device not in running and is_due:
                    checked[device] = now
                    running[device] = group.create_task(
                        run_check(controller, controller.health.check), name=f"health {device}"
                    )
            await dependencies.clock.sleep(interval)


async def quarantine_unreadable(controller: DeviceController, fault: DeviceFault) -> None:
    """Quarantine a device that cannot be inspected."""
    try:
        await controller.health.report([fault_finding(Step.HOLDERS, fault)])
    except LedgerFailure:
        # Every hand-over is refused while the ledger fails; the next check finds the same fault.
        return
    except InvalidRequest:
        # The device left the node in the meantime, which is why it did not answer.
        return


async def run_check(controller: DeviceController, check: Callable[[], Awaitable[object]]) -> None:
    """Run one check. What cannot be recorded now is detected again in the next round."""
    try:
        await check()
    except DeviceFault as fault:
        await quarantine_unreadable(controller, fault)
    except ScrubberError:
        return
