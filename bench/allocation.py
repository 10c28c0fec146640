"""``Allocate``, which delays every pod admission on the node, while every device is being scrubbed.

The load is real: a scrub of each device restarts as soon as the last one ends, so the erasers read and write without a
pause. The echo is measured under the same load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.echo import Echo, measure_interleaved
from bench.figures import Amount, Timing
from bench.node import BenchNode, hand_over_message
from scrubber.api.client import AdminClient
from scrubber.domain.errors import DeviceBusy

__all__ = ["allocate_at_rest", "allocate_under_load"]

_UNDER_WAY = ("scrubbing",)


async def allocate_at_rest(node: BenchNode, echo: Echo, *, samples: int) -> Timing:
    """Measure ``Allocate`` on an idle node."""
    return await measure_interleaved(
        "allocate.at-rest",
        f"Allocate, {len(node.devices)} clean devices",
        lambda number: node.allocate(node.devices[number % len(node.devices)]),
        echo,
        hand_over_message(node.devices[0]),
        samples=samples,
    )


async def allocate_under_load(node: BenchNode, echo: Echo, *, memory: str, samples: int) -> tuple[Timing, Amount]:
    """Measure ``Allocate`` while all devices are scrubbed; also return the share of samples for which that was true."""
    scrubbing = 0
    states: dict[str, str] = {}

    async def allocate(number: int) -> float:
        nonlocal scrubbing
        if number >= 0:
            scrubbing += all(state in _UNDER_WAY for state in states.values())
        return await node.allocate(node.devices[number % len(node.devices)])

    async with _scrubs_without_end(node, states):
        timing = await measure_interleaved(
            "allocate.every-device-scrubbed",
            f"Allocate, {len(node.devices)} devices of {memory} being scrubbed",
            allocate,
            echo,
            hand_over_message(node.devices[0]),
            samples=samples,
        )
    share = Amount(
        "allocate.scrubbed-share", "samples at which every device was being scrubbed", 100 * scrubbing / samples, "%"
    )
    return timing, share


@asynccontextmanager
async def _scrubs_without_end(node: BenchNode, states: dict[str, str]) -> AsyncIterator[None]:
    """Keep every device being scrubbed inside the context; ``states`` follows the service's reports."""
    all_under_way = asyncio.Event()

    async def follow() -> None:
        async for news in node.stage.read_client.watch_devices():
            states.update((each.id, each.state) for each in news.devices)
            if all(state in _UNDER_WAY for state in states.values()):
                all_under_way.set()

    async def scrub(admin: AdminClient, device: str) -> None:
        while True:
            with suppress(DeviceBusy):
                async for _ in admin.scrub(device, "slow"):
                    pass

    async with AdminClient(node.stage.socket_dir) as admin:
        tasks = [asyncio.create_task(follow())]
        tasks += [asyncio.create_task(scrub(admin, device)) for device in node.devices]
        try:
            async with asyncio.timeout(30):
                await all_under_way.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
