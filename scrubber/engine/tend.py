"""Tending: what a device needs when nobody asks. One loop per device, driven by one pure decision."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from scrubber.domain.errors import DeviceFault, ScrubberError
from scrubber.domain.evidence import Occasion
from scrubber.domain.health import WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Policy
from scrubber.domain.recovery import stands
from scrubber.domain.tally import DAY
from scrubber.domain.tending import Act, next_need
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.node import Node
from scrubber.engine.watch import quarantine_unreadable

__all__ = ["tend", "tend_all"]

_PAUSE_FIRST, _PAUSE_LAST = 0.2, 5.0
_BREAKER_EVERY = 60.0
"""Seconds between two looks at whether the breaker lets a reset through: a policy may allow more meanwhile."""


async def tend_all(node: Node, *, dependencies: Dependencies) -> None:
    """Tend every device that the node has, also those that come later. Nothing happens before the node is ready."""
    loops: dict[str, tuple[DeviceController, asyncio.Task[None]]] = {}
    version = 0
    async with asyncio.TaskGroup() as group:
        while True:
            view = await node.changed(version)
            version = view.version
            if not view.ready:
                continue
            for device, (controller, task) in list(loops.items()):
                if node.devices.controllers.get(device) is not controller:
                    task.cancel()
                    del loops[device]
            for device, controller in node.devices.controllers.items():
                if device not in loops:
                    loop = tend(
                        controller,
                        dependencies=dependencies,
                        occasion=Occasion.SERVICE_START,
                        maintenance=node.devices.maintenance,
                    )
                    loops[device] = (controller, group.create_task(loop, name=f"tend {device}"))


async def tend(
    controller: DeviceController, *, dependencies: Dependencies, occasion: Occasion, maintenance: asyncio.Lock
) -> None:
    """Until cancelled: scrub what is dirty and free, recover, prove.

    Args:
        occasion: of the first scrub (service start); later ones are for a release.
        maintenance: held by the one device of the node that is scrubbed for maintenance.
    """
    pause = _PAUSE_FIRST
    while True:
        controller.state.wake.clear()
        job = controller.state.job
        if job is not None:
            await job.over()
            continue
        now = dependencies.clock.wall()
        need = next_need(
            controller.state.record, controller.state.policy, dependencies.identity.of(controller.state.device), now=now
        )
        if need.act is Act.NOTHING:
            await controller.state.wake.wait()
            pause = _PAUSE_FIRST
            continue
        if need.due is not None and 0 < need.due - now <= _longest(controller.state.policy):
            await _sleep(controller, dependencies, need.due - now)
            continue
        if need.act is Act.SCRUB and controller.scrubs.put_off > 0:
            await _sleep(controller, dependencies, controller.scrubs.put_off)
            continue
        if need.act is Act.VERIFY and maintenance.locked():
            await _sleep(controller, dependencies, _PAUSE_LAST)
            continue
        try:
            if need.act is Act.SETTLE:
                await controller.scrubs.resolve()
                continue
            owes = need.act is Act.RECOVER or (need.act is Act.PROVE and controller.state.record.must_reset)
            until = await controller.reset_gate.stopped_until() if owes else None
            if until is not None and until > now:
                await _sleep(controller, dependencies, min(until - now, _BREAKER_EVERY))
                continue
            await controller.pods.refresh()
            if not await _held_up(controller, need.act) and not await _condition_stands(controller, need.act):
                async with maintenance if need.act is Act.VERIFY else nullcontext():
                    if need.act is Act.VERIFY and not _still_due(controller, dependencies):
                        continue
                    recover = need.act is Act.RECOVER
                    void = Occasion.VOID if controller.state.record.hygiene is Hygiene.CLEAN else occasion
                    why = {Act.SCRUB: void, Act.VERIFY: Occasion.SCHEDULE}.get(need.act, Occasion.RECOVERY)
                    started = await controller.scrubs.start(why, asking=controller.state.waiting, recover=recover)
                    before = controller.state.record.version
                    await started.over()
                occasion = Occasion.RELEASE
                if controller.state.record.version > before and controller.state.record.certificate is not None:
                    pause = _PAUSE_FIRST
                    continue
        except ScrubberError as error:
            # What cannot be read is out of service; for the rest the refusals say why, and the pause is enough.
            if isinstance(error, DeviceFault):
                await quarantine_unreadable(controller, error)
        # What this attempt itself changed is no reason to try again at once.
        controller.state.wake.clear()
        await _sleep(controller, dependencies, pause)
        pause = min(_PAUSE_LAST, pause * 2)


def _still_due(controller: DeviceController, dependencies: Dependencies) -> bool:
    """Whether a device that waited for its turn is still to be verified: the hours may be over, or it needs something else."""
    now = dependencies.clock.wall()
    need = next_need(
        controller.state.record, controller.state.policy, dependencies.identity.of(controller.state.device), now=now
    )
    return need.act is Act.VERIFY and need.due is not None and need.due <= now


async def _sleep(controller: DeviceController, dependencies: Dependencies, seconds: float) -> None:
    """Sleep, unless something about the device changes."""
    try:
        async with dependencies.clock.timeout(seconds):
            await controller.state.wake.wait()
    except TimeoutError:
        return


async def _held_up(controller: DeviceController, act: Act) -> bool:
    """Whether a scrub would get nowhere now.

    A device may answer nothing until it is reset, not even who holds it. Its recovery begins all the same: the scrub
    looks for its earlier pods, and whoever resets it looks for holders by other ways.
    """
    try:
        return await controller.scrubs.blocker(controller.state.waiting) is not None
    except DeviceFault:
        if act is Act.RECOVER and controller.state.record.must_reset:
            return False
        raise


async def _condition_stands(controller: DeviceController, act: Act) -> bool:
    """For a cause that has to end by itself: whether it still stands. Waiting for it costs no attempt."""
    cause = controller.state.record.cause
    if act is not Act.RECOVER or cause is None or cause.way_back is not WayBack.WAIT:
        return False
    return stands(controller.state.record, await controller.health.look())


def _longest(policy: Policy) -> float:
    """Beyond this (seconds) nothing is ever due: a clock was set back, and a device must not wait for the future."""
    rule, again = policy.recovery, policy.maintenance.every or 0.0
    return max(rule.backoff_max, rule.probation_interval, again + DAY)
