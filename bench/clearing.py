"""Speed of the slow path: audit, clear and verify of one device's memory, by the eraser's own clock.

Informative only: a simulated GPU's memory is a file on tmpfs.
"""

from __future__ import annotations

import json
import time

from bench.figures import Amount, Quantiles, Timing, quantile
from bench.node import BenchNode
from scrubber.api.client import AdminClient

__all__ = ["slow_path"]

_PHASES = ("audit", "clear", "verify")


async def slow_path(node: BenchNode, *, memory: str, scrubs: int) -> tuple[Timing, list[Amount]]:
    """Measure the whole slow path on demand, and the rate of each of its passes (median of ``scrubs``)."""
    whole: list[float] = []
    rates: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    async with AdminClient(node.stage.socket_dir) as admin:
        for number in range(scrubs):
            began = time.perf_counter()
            measured: dict[str, float] = {}
            async for update in admin.scrub(node.devices[number % len(node.devices)], "slow"):
                if update.HasField("result"):
                    for step in update.result.scrub.steps:
                        measured |= json.loads(step.measurements_json) if step.step == "memory" else {}
            whole.append(time.perf_counter() - began)
            for phase in _PHASES:
                rates[phase].append(measured["total_bytes"] / measured[f"{phase}_seconds"] / 1e9)
    timing = Timing("slow-path", f"the whole slow path, {memory}", Quantiles.of(whole))
    return timing, [
        Amount(f"slow-path.{phase}", f"{phase} of {memory}", quantile(rates[phase], 0.5), "GB/s") for phase in _PHASES
    ]
