"""Resets that another service of the cluster makes: yields the node for them, and limits how long that may take.

The node is yielded only after the scrub that left the reset to others has ended, so that its end is on record. The
service's request to yield it ends with the reset, or a while after it should have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from scrubber.domain.agent_pause import AgentPause
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.states import Hygiene
from scrubber.engine.agent_pauses import AgentPauses
from scrubber.engine.devices import Devices
from scrubber.engine.yielding import YieldControl
from scrubber.ports.runtime import Clock

__all__ = ["ExternalResets"]

_POLL = 1.0
"""Seconds between two looks whether an operator has ended the yield."""
_RETRY = 10.0
"""Seconds until a change that could not be stored is tried again."""
_ACTOR = "service"
_RESUMED = "An operator has ended the yield of the node that the reset needs."


# See docs/decisions/0043-agents-are-paused-for-a-reset.md.
class ExternalResets:
    """The service's part of a reset by another service of the cluster.

    Args:
        limit: returns the seconds that one reset may take, and the seconds that its request may then take to end.
    """

    def __init__(self, *, pauses: AgentPauses, yields: YieldControl, clock: Clock, limit: Callable[[], float]) -> None:
        self._pauses = pauses
        self._yields = yields
        self._clock = clock
        self._limit = limit
        self._yielded_for = ""
        self._ending_since: float | None = None

    async def run(self) -> None:
        """Limit external resets, and end the yield after each. Runs as long as the service."""
        while True:
            changed = self._pauses.changed
            try:
                seconds = await self._step()
            except LedgerFailure:  # it is reported by the ledger's own status
                await self._clock.sleep(_RETRY)
                continue
            if seconds is None:
                await changed.wait()
                continue
            with suppress(TimeoutError):
                async with self._clock.timeout(seconds):
                    await changed.wait()

    async def _step(self) -> float | None:
        """Do what is due; return seconds until something may be due again, or None to wait for a change."""
        pause, yielded = self._pauses.pause, bool(self._yields.record.of(YieldRequester.SERVICE))
        if pause is None or not pause.is_external_reset:
            self._ending_since = None
            if yielded:
                await self._resume("the reset by another service is over")
            return None
        limit = self._limit()
        if pause.ending:
            now = self._clock.monotonic()
            since = self._ending_since = now if self._ending_since is None else self._ending_since
            if yielded and now - since >= limit:
                await self._resume("the reset by another service is over, although its request still exists")
            return _POLL if yielded else None
        self._ending_since = None
        left = min(limit, pause.since + limit - self._clock.wall())
        if left <= 0:
            await self._fail(pause, f"The devices were not reset within {limit:g} s.")
        elif yielded:
            self._yielded_for = pause.id
        elif self._yielded_for == pause.id:
            await self._fail(pause, _RESUMED)
        return min(_POLL, max(0.0, left))

    async def _resume(self, reason: str) -> None:
        await self._yields.withdraw(YieldRequester.SERVICE, reason, _ACTOR)

    async def _fail(self, pause: AgentPause, message: str) -> None:
        await self._pauses.fail_external_reset(pause.id, message)

    async def yield_when_free(self, devices: Devices) -> None:
        """Yield the node for each external reset, once no scrub of its devices runs. Runs while the driver is open."""
        while True:
            changed, pause = self._pauses.changed, self._pauses.pause
            if pause is not None and pause.is_external_reset and not pause.ending:
                try:
                    await self._yield(pause, devices)
                except LedgerFailure:
                    await self._clock.sleep(_RETRY)
                    continue
            await changed.wait()

    async def _yield(self, pause: AgentPause, devices: Devices) -> None:
        concerned = [devices.controllers[each] for each in pause.devices if each in devices.controllers]
        while jobs := [each.state.job for each in concerned if each.state.job is not None]:
            await asyncio.gather(*(each.wait_without_urgency() for each in jobs))
        if self._pauses.pause != pause:
            return
        used = [each.id for each in concerned if each.state.record.hygiene is Hygiene.IN_USE]
        if used:
            await self._fail(pause, f"Device {', '.join(used)} is in use.")
            return
        if self._yielded_for == pause.id:
            await self._fail(pause, _RESUMED)
            return
        named = ", ".join(pause.devices)
        await self._yields.request(YieldRequester.SERVICE, f"another service resets {named} ({pause.id})", _ACTOR)
        self._yielded_for = pause.id
