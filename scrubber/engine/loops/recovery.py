"""The recovery loop: one per device; does what the device needs without a request, as one pure function decides."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from scrubber.domain.errors import DeviceFault, ScrubberError
from scrubber.domain.evidence import ScrubTrigger
from scrubber.domain.health.history import DAY
from scrubber.domain.health.recovery import condition_persists, is_resting
from scrubber.domain.next_action import NextAction, RecoveryAction, next_action
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene, RecoveryMethod
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.loops.health import quarantine_unreadable
from scrubber.engine.node import Node

__all__ = ["run_recovery_loop", "run_recovery_loops"]

_PAUSE_FIRST, _PAUSE_LAST = 0.2, 5.0
_BREAKER_INTERVAL = 60.0
"""Seconds between two checks whether the breaker allows a reset: a changed policy may allow more."""


async def run_recovery_loops(node: Node, *, dependencies: Dependencies) -> None:
    """Run a recovery loop for every device of the node, including devices that appear later, once the node is ready."""
    loops: dict[str, tuple[DeviceController, asyncio.Task[None]]] = {}
    version = 0
    async with asyncio.TaskGroup() as group:
        while True:
            view = await node.wait_for_change(version)
            version = view.version
            if not view.ready:
                continue
            for device, (controller, task) in list(loops.items()):
                if node.devices.controllers.get(device) is not controller:
                    task.cancel()
                    del loops[device]
            for device, controller in node.devices.controllers.items():
                if device not in loops:
                    loop = run_recovery_loop(
                        controller,
                        dependencies=dependencies,
                        trigger=ScrubTrigger.SERVICE_START,
                        maintenance=node.devices.maintenance,
                    )
                    loops[device] = (controller, group.create_task(loop, name=f"recovery {device}"))


async def run_recovery_loop(
    controller: DeviceController, *, dependencies: Dependencies, trigger: ScrubTrigger, maintenance: asyncio.Lock
) -> None:
    """Scrub the device while it is dirty and free, recover it and verify it, until cancelled.

    Args:
        trigger: trigger of the first scrub (service start); later scrubs are triggered by a release.
        maintenance: held by the one device of the node that is scrubbed for maintenance.
    """
    pause = _PAUSE_FIRST
    while True:
        controller.state.wake.clear()
        job = controller.state.job
        if job is not None:
            await job.wait_without_urgency()
            continue
        now = dependencies.clock.wall()
        need = next_action(
            controller.state.record,
            controller.state.policy,
            dependencies.identity.for_device(controller.state.device),
            now=now,
        )
        if need.action is RecoveryAction.NOTHING:
            await controller.state.wake.wait()
            pause = _PAUSE_FIRST
            continue
        if need.due is not None and 0 < need.due - now <= _longest_delay(
            need, controller.state.record, controller.state.policy
        ):
            await _sleep(controller, dependencies, need.due - now)
            continue
        if need.action is RecoveryAction.SCRUB and controller.scrubs.delay > 0:
            await _sleep(controller, dependencies, controller.scrubs.delay)
            continue
        if need.action is RecoveryAction.MAINTENANCE_SCRUB and maintenance.locked():
            await _sleep(controller, dependencies, _PAUSE_LAST)
            continue
        try:
            if need.action is RecoveryAction.RESOLVE:
                await controller.scrubs.resolve()
                continue
            owes = need.action is RecoveryAction.RECOVER or (
                need.action is RecoveryAction.PROBATION_SCRUB and controller.state.record.owes_reset
            )
            until = await controller.reset_gate.resets_stopped_until() if owes else None
            if until is not None and until > now:
                await _sleep(controller, dependencies, min(until - now, _BREAKER_INTERVAL))
                continue
            if not await controller.occupancy.have_pods_ended():
                await controller.pods.refresh()
            if not await _is_blocked(controller, need.action) and not await _condition_persists(
                controller, need.action
            ):
                async with maintenance if need.action is RecoveryAction.MAINTENANCE_SCRUB else nullcontext():
                    if need.action is RecoveryAction.MAINTENANCE_SCRUB and not _still_due(controller, dependencies):
                        continue
                    recover = need.action is RecoveryAction.RECOVER
                    void = (
                        ScrubTrigger.CERTIFICATE_VOIDED if controller.state.record.hygiene is Hygiene.CLEAN else trigger
                    )
                    why = {RecoveryAction.SCRUB: void, RecoveryAction.MAINTENANCE_SCRUB: ScrubTrigger.MAINTENANCE}.get(
                        need.action, ScrubTrigger.RECOVERY
                    )
                    started = await controller.scrubs.start(
                        why, starting_pod=controller.state.waiting_pod, recover=recover
                    )
                    before = controller.state.record.version
                    await started.wait_without_urgency()
                trigger = ScrubTrigger.RELEASE
                if controller.state.record.version > before and controller.state.record.certificate is not None:
                    pause = _PAUSE_FIRST
                    continue
        except ScrubberError as error:
            # An unreadable device is quarantined; for other errors the refusals contain the reason, and the pause is
            # enough.
            if isinstance(error, DeviceFault):
                await quarantine_unreadable(controller, error)
        # A change made by this attempt itself is no reason to try again at once.
        controller.state.wake.clear()
        await _sleep(controller, dependencies, pause)
        pause = min(_PAUSE_LAST, pause * 2)


def _still_due(controller: DeviceController, dependencies: Dependencies) -> bool:
    """Whether a device that waited for its turn is still due.

    The maintenance window may have ended, or the device may need other work.
    """
    now = dependencies.clock.wall()
    need = next_action(
        controller.state.record,
        controller.state.policy,
        dependencies.identity.for_device(controller.state.device),
        now=now,
    )
    return need.action is RecoveryAction.MAINTENANCE_SCRUB and need.due is not None and need.due <= now


async def _sleep(controller: DeviceController, dependencies: Dependencies, seconds: float) -> None:
    """Sleep until ``seconds`` have passed or something about the device changes."""
    try:
        async with dependencies.clock.timeout(seconds):
            await controller.state.wake.wait()
    except TimeoutError:
        return


async def _is_blocked(controller: DeviceController, action: RecoveryAction) -> bool:
    """Whether a scrub cannot succeed now.

    A device may answer no query until it is reset, not even for its holders. Its recovery starts nevertheless: the
    scrub checks its earlier pods, and the resetter finds holders by other means.
    """
    try:
        return await controller.scrubs.blocker(controller.state.waiting_pod) is not None
    except DeviceFault:
        if action is RecoveryAction.RECOVER and controller.state.record.must_reset:
            return False
        raise


async def _condition_persists(controller: DeviceController, action: RecoveryAction) -> bool:
    """Whether a condition that must end before recovery persists. Waiting for it does not count as an attempt."""
    cause = controller.state.record.cause
    if action is not RecoveryAction.RECOVER or cause is None or cause.recovery_method is not RecoveryMethod.WAIT:
        return False
    return condition_persists(controller.state.record, await controller.health.check())


def _longest_delay(need: NextAction, record: DeviceRecord, policy: Policy) -> float:
    """Longest plausible delay in seconds. A later due time means that a clock was set back, and is ignored."""
    match need.action:
        case RecoveryAction.MAINTENANCE_SCRUB:
            return (policy.maintenance.interval or 0.0) + DAY
        case RecoveryAction.PROBATION_SCRUB:
            return policy.recovery.probation_interval
        case _:
            return DAY if is_resting(record) else policy.recovery.max_backoff
