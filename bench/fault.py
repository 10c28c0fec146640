"""Fault → ListAndWatch: from the moment that a device's driver has something to say to the kubelet's news of it.

Faults are XID 95 on one device after the other, written to the control file of the simulated driver. Every device
comes back by itself (reset, scrub, probation) before its next fault; the recoveries of others may be under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bench.figures import Quantiles, Timing
from bench.node import Node
from plugin.api import deviceplugin_pb2 as api
from scrubber.adapters.sim import control

__all__ = ["QUICK_RECOVERY", "fault_to_list", "quick_recovery"]

QUICK_RECOVERY = """\
name: bench
recovery:
  backoff-initial: 1s
  probation-scrubs: 1
  probation-interval: 100ms
"""
"""A policy under which a device is back within seconds. It is about the time after the fault, which is not measured."""
_XID = 95
_PATIENCE = 60.0


def quick_recovery(directory: Path) -> Path:
    """The policy as a file in ``directory``."""
    path = directory / "quick-recovery.yaml"
    path.write_text(QUICK_RECOVERY)
    return path


async def fault_to_list(node: Node, *, faults: int) -> Timing:
    """Seconds from the write of the control file to the ListAndWatch message in which the device is Unhealthy."""
    measured: list[float] = []
    async with _Health.followed(node) as health:
        while len(measured) < faults:
            for device in node.devices[: faults - len(measured)]:
                began = time.perf_counter()
                control.fault(node.stage.sim, device, xid=_XID)
                await health.until(lambda known, device=device: known[device] == "Unhealthy")  # type: ignore[misc]
                measured.append(health.told_at - began)
            await health.until(lambda known: all(each == "Healthy" for each in known.values()))
    title = f"fault → ListAndWatch, {len(node.devices)} devices"
    return Timing(f"fault.devices-{len(node.devices)}", title, Quantiles.of(measured))


class _Health:
    """What the last ListAndWatch message said, and when it came."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.told_at = 0.0
        self._news = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def followed(cls, node: Node) -> AsyncIterator[_Health]:
        """Follow a stream of the plugin's until the end of the block. The plugin registers again after that."""
        health = cls()

        async def follow() -> None:
            async for message in node.plugin.ListAndWatch(api.Empty()):
                health.told_at = time.perf_counter()
                health.known = {device.ID: device.health for device in message.devices}
                health._news.set()

        task = asyncio.create_task(follow())
        try:
            await health.until(lambda known: len(known) == len(node.devices))
            yield health
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, holds: Callable[[dict[str, str]], bool]) -> None:
        """Raises ``TimeoutError`` when it does not hold in time."""
        async with asyncio.timeout(_PATIENCE):
            while not holds(self.known):
                self._news.clear()
                await self._news.wait()
