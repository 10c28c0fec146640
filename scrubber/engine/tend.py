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
from scrubber.engine.keeper import Keeper
from scrubber.engine.node import Node
from scrubber.engine.watch import quarantine_unreadable

__all__ = ["tend", "tend_all"]

_PAUSE_FIRST, _PAUSE_LAST = 0.2, 5.0
_BREAKER_EVERY = 60.0
"""Seconds between two looks at whether the breaker lets a reset through: a policy may allow more meanwhile."""


async def tend_all(node: Node, *, dependencies: Dependencies) -> None:
    """Tend every device that the node has, also those that come later. Nothing happens before the node is ready."""
    loops: dict[str, tuple[Keeper, asyncio.Task[None]]] = {}
    version = 0
    async with asyncio.TaskGroup() as group:
        while True:
            view = await node.changed(version)
            version = view.version
            if not view.ready:
                continue
            for device, (keeper, task) in list(loops.items()):
                if node.keepers.get(device) is not keeper:
                    task.cancel()
                    del loops[device]
            for device, keeper in node.keepers.items():
                if device not in loops:
                    loop = tend(keeper, dependencies=dependencies, occasion=Occasion.SERVICE_START)
                    loops[device] = (keeper, group.create_task(loop, name=f"tend {device}"))


async def tend(keeper: Keeper, *, dependencies: Dependencies, occasion: Occasion) -> None:
    """Until cancelled: scrub what is dirty and free, recover, prove.

    Args:
        occasion: of the first scrub (service start); later ones are for a release.
    """
    pause = _PAUSE_FIRST
    while True:
        keeper.wake.clear()
        job = keeper.job
        if job is not None:
            await job.over()
            continue
        now = dependencies.clock.wall()
        need = next_need(keeper.record, keeper.policy, dependencies.identity, now=now)
        if need.act is Act.NOTHING:
            await keeper.wake.wait()
            pause = _PAUSE_FIRST
            continue
        if need.due is not None and 0 < need.due - now <= _longest(keeper.policy):
            await _sleep(keeper, dependencies, need.due - now)
            continue
        if need.act is Act.SCRUB and keeper.scrub_put_off > 0:
            await _sleep(keeper, dependencies, keeper.scrub_put_off)
            continue
        if need.act is Act.VERIFY and keeper.maintenance.locked():
            await _sleep(keeper, dependencies, _PAUSE_LAST)
            continue
        try:
            if need.act is Act.SETTLE:
                await keeper.settle()
                continue
            owes = need.act is Act.RECOVER or (need.act is Act.PROVE and keeper.record.must_reset)
            until = await keeper.reset_stopped_until() if owes else None
            if until is not None and until > now:
                await _sleep(keeper, dependencies, min(until - now, _BREAKER_EVERY))
                continue
            await dependencies.pods.refresh()
            if not await _held_up(keeper, need.act) and not await _condition_stands(keeper, need.act):
                async with keeper.maintenance if need.act is Act.VERIFY else nullcontext():
                    if need.act is Act.VERIFY and not _still_due(keeper, dependencies):
                        continue
                    recover = need.act is Act.RECOVER
                    void = Occasion.VOID if keeper.record.hygiene is Hygiene.CLEAN else occasion
                    why = {Act.SCRUB: void, Act.VERIFY: Occasion.SCHEDULE}.get(need.act, Occasion.RECOVERY)
                    started = await keeper.start_scrub(why, asking=keeper.waiting, recover=recover)
                    before = keeper.record.version
                    await started.over()
                occasion = Occasion.RELEASE
                if keeper.record.version > before and keeper.record.certificate is not None:
                    pause = _PAUSE_FIRST
                    continue
        except ScrubberError as error:
            # What cannot be read is out of service; for the rest the refusals say why, and the pause is enough.
            if isinstance(error, DeviceFault):
                await quarantine_unreadable(keeper, error)
        # What this attempt itself changed is no reason to try again at once.
        keeper.wake.clear()
        await _sleep(keeper, dependencies, pause)
        pause = min(_PAUSE_LAST, pause * 2)


def _still_due(keeper: Keeper, dependencies: Dependencies) -> bool:
    """Whether a device that waited for its turn is still to be verified: the hours may be over, or it needs something else."""
    now = dependencies.clock.wall()
    need = next_need(keeper.record, keeper.policy, dependencies.identity, now=now)
    return need.act is Act.VERIFY and need.due is not None and need.due <= now


async def _sleep(keeper: Keeper, dependencies: Dependencies, seconds: float) -> None:
    """Sleep, unless something about the device changes."""
    try:
        async with dependencies.clock.timeout(seconds):
            await keeper.wake.wait()
    except TimeoutError:
        return


async def _held_up(keeper: Keeper, act: Act) -> bool:
    """Whether a scrub would get nowhere now.

    A device may answer nothing until it is reset, not even who holds it. Its recovery begins all the same: the scrub
    looks for its earlier pods, and whoever resets it looks for holders by other ways.
    """
    try:
        return await keeper.obstacle(keeper.waiting) is not None
    except DeviceFault:
        if act is Act.RECOVER and keeper.record.must_reset:
            return False
        raise


async def _condition_stands(keeper: Keeper, act: Act) -> bool:
    """For a cause that has to end by itself: whether it still stands. Waiting for it costs no attempt."""
    cause = keeper.record.cause
    if act is not Act.RECOVER or cause is None or cause.way_back is not WayBack.WAIT:
        return False
    return stands(keeper.record, await keeper.look())


def _longest(policy: Policy) -> float:
    """Beyond this (seconds) nothing is ever due: a clock was set back, and a device must not wait for the future."""
    rule, again = policy.recovery, policy.maintenance.every or 0.0
    return max(rule.backoff_max, rule.probation_interval, again + DAY)
