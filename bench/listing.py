"""What the kubelet is told: a stream of the plugin's ``ListAndWatch``, with the moment at which each device changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from bench.node import Node
from plugin.api import deviceplugin_pb2 as api

__all__ = ["HEALTHY", "UNHEALTHY", "Listing"]

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
_PATIENCE = 120.0


class Listing:
    """What the last message said.

    Attributes:
        known: device → health.
        since: device → when its health was first told as it is now (``time.perf_counter``).
    """

    def __init__(self) -> None:
        self.known: Mapping[str, str] = {}
        self.since: dict[str, float] = {}
        self._news = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def followed(cls, node: Node) -> AsyncIterator[Listing]:
        """Follow a stream until the end of the block. The plugin registers again after that."""
        listing = cls()

        async def follow() -> None:
            async for message in node.plugin.ListAndWatch(api.Empty()):
                listing._told({device.ID: device.health for device in message.devices}, time.perf_counter())

        task = asyncio.create_task(follow())
        try:
            await listing.until(lambda known: len(known) == len(node.devices))
            yield listing
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, holds: Callable[[Mapping[str, str]], bool]) -> None:
        """Raises ``TimeoutError`` when it does not hold in time."""
        async with asyncio.timeout(_PATIENCE):
            while not holds(self.known):
                self._news.clear()
                await self._news.wait()

    async def told(self, device: str, health: str) -> float:
        """When ``device`` was told to be of ``health``, once it is."""
        await self.until(lambda known: known[device] == health)
        return self.since[device]

    def _told(self, now: Mapping[str, str], at: float) -> None:
        self.since.update((device, at) for device, health in now.items() if self.known.get(device) != health)
        self.known = now
        self._news.set()
