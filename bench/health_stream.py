"""The kubelet's view of health: a stream of ``ListAndWatch``, with the time of each device's last change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from bench.node import BenchNode
from plugin.api import deviceplugin_pb2 as api

__all__ = ["HEALTHY", "UNHEALTHY", "HealthStream"]

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
_TIMEOUT = 120.0


class HealthStream:
    """The last message of the stream.

    Attributes:
        health: device → health.
        since: device → when its present health was first reported (``time.perf_counter``).
    """

    def __init__(self) -> None:
        self.health: Mapping[str, str] = {}
        self.since: dict[str, float] = {}
        self._changed = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, node: BenchNode) -> AsyncIterator[HealthStream]:
        """Follow a stream until the end of the block. The plugin registers again after that."""
        listing = cls()

        async def follow() -> None:
            async for message in node.plugin.ListAndWatch(api.Empty()):
                listing._update({device.ID: device.health for device in message.devices}, time.perf_counter())

        task = asyncio.create_task(follow())
        try:
            await listing.wait_until(lambda known: len(known) == len(node.devices))
            yield listing
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_until(self, holds: Callable[[Mapping[str, str]], bool]) -> None:
        """Raises ``TimeoutError`` when the condition does not hold in time."""
        async with asyncio.timeout(_TIMEOUT):
            while not holds(self.health):
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_health(self, device: str, health: str) -> float:
        """Wait until ``device`` has ``health``; return when that was reported."""
        await self.wait_until(lambda known: known[device] == health)
        return self.since[device]

    def _update(self, now: Mapping[str, str], at: float) -> None:
        self.since.update((device, at) for device, health in now.items() if self.health.get(device) != health)
        self.health = now
        self._changed.set()
