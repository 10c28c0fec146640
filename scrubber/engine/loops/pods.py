"""Watches pods, driver signals, health and the inventory; submits observations to controllers, which decide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from scrubber.domain.assignment import KubeletReading, Pod, Trust, presumed_sandbox
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault, InvalidRequest, LedgerFailure, ScrubberError, Unreadable
from scrubber.domain.evidence import Step
from scrubber.domain.health.signals import fault_finding
from scrubber.domain.pods import PodState
from scrubber.domain.states import Hygiene
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.node import Node
from scrubber.ports.device import Inventory
from scrubber.ports.record import Event

__all__ = ["follow_signals", "quarantine_unreadable", "run_check", "watch_health", "watch_inventory", "watch_pods"]


_MIN_CHECK_INTERVAL = 0.05
"""Seconds between two checks of a device whose driver keeps reporting signals."""
_INVENTORY_INTERVAL = 60.0
"""Seconds after which devices are described again without a signal: firmware changes silently."""


async def follow_signals(node: Node, *, dependencies: Dependencies) -> None:
    """Check a device as soon as the driver reports an event for it; at most one check per device at a time."""
    looking: set[str] = set()
    again: set[str] = set()

    async def look(controller: DeviceController) -> None:
        device = controller.id
        try:
            again.add(device)
            while device in again:
                again.discard(device)
                await run_check(controller, controller.health.check)
                # A driver that reports without end must not occupy the service completely.
                await dependencies.clock.sleep(_MIN_CHECK_INTERVAL)
        finally:
            looking.discard(device)

    async with asyncio.TaskGroup() as group:
        async for signal in dependencies.telemetry.signals():
            if signal.device is None:
                node.devices.inventory_changed.set()
            for controller in _concerned(node, signal.device):
                if controller.id in looking:
                    again.add(controller.id)
                else:
                    # Add it here and not in the task: signals that are already queued are merged before the task runs.
                    looking.add(controller.id)
                    group.create_task(look(controller), name=f"look {controller.id}")


def _concerned(node: Node, device: str | None) -> list[DeviceController]:
    if device is None:
        return list(node.devices.controllers.values())
    return [node.devices.controllers[device]] if device in node.devices.controllers else []


async def watch_health(node: Node, *, dependencies: Dependencies, interval: float) -> None:
    """Compare snapshots periodically: signals are edges and can be missed. A hung device delays no other."""
    looking: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            # A device whose check has to wait, for example for the reset of a peer, delays no other.
            looking = {device: task for device, task in looking.items() if not task.done()}
            for device, controller in node.devices.controllers.items():
                if device not in looking:
                    looking[device] = group.create_task(
                        run_check(controller, controller.health.check), name=f"health {device}"
                    )
            await dependencies.clock.sleep(interval)


async def watch_pods(node: Node, *, dependencies: Dependencies, interval: float) -> None:
    """Detect releases, kubelet restarts and assignments made by others.

    Runs every ``interval`` seconds and whenever ``node.pod_check_requested`` is set.
    """
    kubelet, before = "", KubeletReading(Trust.UNREADABLE)
    told: frozenset[tuple[str, Pod]] = frozenset()
    while True:
        node.pod_check_requested.clear()
        node.devices.track_pods()
        reading = await node.pods.refresh()
        controllers = list(node.devices.controllers.values())
        if reading.kubelet_instance and kubelet and reading.kubelet_instance != kubelet:
            node.kubelet_restarts += 1
            await asyncio.gather(
                *(
                    run_check(controller, partial(_void_after_restart, controller, before, reading, dependencies))
                    for controller in controllers
                )
            )
        kubelet, before = reading.kubelet_instance or kubelet, reading if reading.kubelet_instance else before
        if reading.trust is not Trust.UNREADABLE:
            told = await _report_other_assignments(node, reading, told, dependencies)
        looks = [
            run_check(controller, partial(_check_pods, controller, reading, dependencies)) for controller in controllers
        ]
        await asyncio.gather(*looks)
        node.update_notices(reading)
        try:
            async with dependencies.clock.timeout(interval):
                await node.pod_check_requested.wait()
        except TimeoutError:
            continue


# See docs/decisions/0011-containers-that-start-without-the-gate.md.
async def _void_after_restart(
    controller: DeviceController, before: KubeletReading, after: KubeletReading, dependencies: Dependencies
) -> None:
    """Void certificates and exceptions after a kubelet restart.

    Until the plugin has registered again, a restarted kubelet starts containers without a hand-over. A container that
    ended before it was detected would leave its data under a certificate or, where a pod waited for a device that
    others have, under an exception or for a pod that joins them.

    Args:
        before, after: the last readings before and after the restart.
    """
    record = controller.state.record
    granted = {grant.pod for grant in record.open_grants if grant.pod is not None}
    waiting = {each.pod for reading in (before, after) for each in reading.all_assignments(record.device)} - granted
    others = {pod.tenant for pod in waiting} - {pod.tenant for pod in granted}
    if controller.state.job is None and (
        record.hygiene is Hygiene.CLEAN or (record.hygiene is Hygiene.IN_USE and waiting)
    ):
        message = "The kubelet was restarted, and starts containers without asking until the plugin has registered."
        fields = {"reason": "kubelet-restart", "message": message}
        event = Event("certificate.voided", dependencies.clock.wall(), controller.id, fields=fields)
        await controller.occupancy.void_for_unauthorized_use(
            event, observed=record.hygiene is Hygiene.IN_USE and bool(others)
        )


async def _report_other_assignments(
    node: Node, reading: KubeletReading, reported: frozenset[tuple[str, Pod]], dependencies: Dependencies
) -> frozenset[tuple[str, Pod]]:
    """Report assignments of our devices by another plugin or a DRA driver, each once while it lasts."""
    own = node.own_resources
    foreign = {
        (device, each.pod): each
        for device in node.devices.controllers
        if own
        for each in reading.assigned_by_other_plugins(device, own)
    }
    for (device, pod), assignment in foreign.items():
        if (device, pod) in reported or device not in node.devices.controllers:
            continue
        message = (
            f"{assignment.resource} gave it to {pod.namespace}/{pod.name}; it is also handed out as "
            f"{', '.join(sorted(own))}. Only one of them may: stop the other plugin or DRA driver, or exclude the device."
        )
        fields = {"use": "assigned-by-another-plugin", "resource": assignment.resource, "message": message}
        event = Event("unauthorized.use.detected", dependencies.clock.wall(), device, fields=fields)
        try:
            await node.devices.controllers[device].occupancy.void_for_unauthorized_use(event)
        except ScrubberError:
            foreign = {key: each for key, each in foreign.items() if key != (device, pod)}  # reported in the next round
    return frozenset(foreign)


async def _check_pods(controller: DeviceController, reading: KubeletReading, dependencies: Dependencies) -> None:
    await controller.health.end_expired_break_glass()
    await _name_last_grant(controller, reading, dependencies)
    record = controller.state.record
    if record.hygiene is Hygiene.IN_USE and await _is_released(controller, dependencies):
        await controller.occupancy.release(record)


async def _name_last_grant(controller: DeviceController, reading: KubeletReading, dependencies: Dependencies) -> None:
    """Add the pod to a grant that was made while no source named its pod, once a source names it.

    The kubelet has not allocated the device again since, so the pod that has it now is the one that it was granted to.
    """
    last = controller.state.record.last_grant
    assignment = reading.assignment_of(controller.id)
    if assignment is not None and reading.shares_of(assignment.pod, controller.id):
        return  # other pods may have been assigned shares of a shared device before this one was granted
    if (
        last is None
        or (last.pod is not None and last.pod.uid is not None)
        or controller.state.record.hygiene is not Hygiene.IN_USE
    ):
        return
    if (
        reading.trust is not Trust.TRUSTED
        or assignment is None
        or assignment.pod.uid is None
        or controller.state.allocated_since
    ):
        return
    try:
        baseline = presumed_sandbox(await dependencies.containers.processes(assignment.pod), held=True)
    except Unreadable:
        return
    await controller.occupancy.record_grant_pod(last.sequence, assignment, baseline)


async def _is_released(controller: DeviceController, dependencies: Dependencies) -> bool:
    """Whether every pod that was granted the device is no longer listed by the kubelet, and over or a proved leftover.

    A pod that no source names may be anywhere: its device is released only by the next hand-over, except when the
    device is out of service and was not seen held for the idle period of unknown pods. Otherwise it could never return
    to service.
    """
    for grant in controller.state.record.open_grants:
        await controller.pods.sample_processes(grant)
    standings = await controller.occupancy.pod_liveness()
    for grant, where in standings:
        if where.state is PodState.ALIVE:
            return False
        if grant.pod is None and controller.state.record.advertised:
            return False
        if grant.pod is not None and not controller.pods.is_absent(grant.pod):
            return False
    if not standings:
        return False
    try:
        held = await controller.occupancy.is_held()
    except DeviceFault:
        if controller.state.record.advertised:
            raise
        held = False  # out of service and answers no query; once released, it is dirty and checked again
    # A leftover explains why the device is held; otherwise a process without a grant holds it.
    if not held or any(where.state is PodState.LEFTOVER for _, where in standings):
        return True
    # No pod starts on a device that is out of service, so only this check detects a holder without a process.
    return not controller.state.record.advertised and await controller.occupancy.is_held_without_process()


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
            there = {device.id: device for device in await inventory.devices()}
        except ScrubberError:
            there, failed = (
                {controller.id: controller.state.device for controller in node.devices.controllers.values()},
                True,
            )
        for device in there.values():
            node.devices.update_description(device)
        gone = [
            controller.state.device
            for controller in node.devices.controllers.values()
            if there.get(controller.id) != controller.state.device
        ]
        for lost in sorted(gone, key=lambda device: device.id):
            failed |= await _must_retry(partial(node.devices.remove_missing, lost.id))
        for new in sorted(there.keys() - node.devices.controllers.keys()):
            failed |= await _must_retry(partial(add_device, there[new]))
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
