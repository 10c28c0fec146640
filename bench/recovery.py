"""Time to leave service and to return to it, for each recovery method.

The default policy's pauses are part of the figures, and listed beside them. Each sample is a separate idle device,
because a second quarantine on the same day waits longer. Devices fail one after the other and recover in parallel.
Measured in the kubelet's view: from the fault to ``Unhealthy``, and from the end of its cause to ``Healthy``. The cause
of

- *wait* is a driver that does not respond about the device. It ends when the driver responds again.
- *scrub* is memory that is cleared too slowly, detected by a scrub on demand; so the time to leave service contains the
  whole timeout of clearing (``clearTimeoutBase``). It ends when clearing is fast again.
- *reset* is XID 95. Its cause ends with the reset, which is part of the recovery: measured from the fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from bench.figures import Amount, Quantiles, Timing
from bench.health_stream import HEALTHY, UNHEALTHY, HealthStream
from bench.node import BenchNode
from scrubber.adapters.sim import control
from scrubber.api.client import AdminClient
from scrubber.domain.policy import Policy

__all__ = ["recoveries", "recovery_pauses"]

_FAULT_INTERVAL = 3.0
"""Seconds between the faults of two devices.

A device that hangs delays queries about another one for a second, and memory that is cleared slowly occupies one of two
slots for five.
"""
_FAULT_DURATION = 2.0
"""Seconds that a cause lasts once its device is out of service: longer than the first pause of the recovery."""
_FOR_EVER = 3600.0

_Break = Callable[[str], Awaitable[None]]
_Restore = Callable[[str], None]


async def recoveries(node: BenchNode, *, samples: int) -> list[Timing]:
    """Measure ``samples`` devices for each cause; the node has at least three times as many.

    Its policy must allow as many resets: the default one's breaker opens at eight.
    """
    sim = node.stage.sim_dir

    async def hang(device: str) -> None:
        control.add_faults(sim, device, stuck=True)

    def answer(device: str) -> None:
        control.clear_faults(sim, device, ["stuck"])

    async def scrub_slowly(device: str) -> None:
        control.add_faults(sim, device, slow_clear=_FOR_EVER)
        async with AdminClient(node.stage.socket_dir) as admin, aclosing(admin.scrub(device, "slow")) as updates:
            await anext(updates)  # it has begun, and continues without a listener

    def clear_fast(device: str) -> None:
        control.clear_faults(sim, device, ["slow-clear"])

    async def raise_xid(device: str) -> None:
        control.add_faults(sim, device, xid=95)

    causes: list[tuple[str, str, _Break, _Restore | None]] = [
        ("wait", "driver that does not answer", hang, answer),
        ("scrub", "memory that is cleared too slowly", scrub_slowly, clear_fast),
        ("reset", "XID 95", raise_xid, None),
    ]
    timings: list[Timing] = []
    async with HealthStream.open(node) as listing:
        for number, (way, words, fail, mend) in enumerate(causes):
            devices = node.devices[number * samples : (number + 1) * samples]
            timings += await _out_and_back(listing, devices, way, words, fail, mend)
    return timings


def recovery_pauses() -> list[Amount]:
    """Return the pauses of every recovery under the default policy."""
    rule = Policy().recovery
    return [
        Amount("recovery.pause.first", "default policy: pause before the first attempt", rule.backoff(0), "s"),
        Amount(
            "recovery.pause.probation",
            f"default policy: pauses of the probation ({rule.probation_scrubs} clean scrubs)",
            rule.probation_scrubs * rule.probation_interval,
            "s",
        ),
    ]


async def _out_and_back(
    listing: HealthStream, devices: Sequence[str], way: str, words: str, fail: _Break, restore: _Restore | None
) -> list[Timing]:
    async def one(number: int, device: str) -> tuple[float, float]:
        await asyncio.sleep(number * _FAULT_INTERVAL)
        began = time.perf_counter()
        await fail(device)
        out = await listing.wait_for_health(device, UNHEALTHY)
        if restore is None:
            return out - began, await listing.wait_for_health(device, HEALTHY) - began
        await asyncio.sleep(_FAULT_DURATION)
        over = time.perf_counter()
        restore(device)
        return out - began, await listing.wait_for_health(device, HEALTHY) - over

    ways = await asyncio.gather(*(one(number, device) for number, device in enumerate(devices)))
    start = "fault" if restore is None else "end of the cause"
    return [
        Timing(f"recovery.out.{way}", f"fault → out of ListAndWatch: {words}", Quantiles.of([out for out, _ in ways])),
        Timing(
            f"recovery.back.{way}",
            f"{start} → Healthy in ListAndWatch, by {way}: {words}",
            Quantiles.of([back for _, back in ways]),
        ),
    ]
