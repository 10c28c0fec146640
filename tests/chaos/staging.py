"""The stage of the chaos tests: the shipped daemons on small devices, with shortened times of policy and kubelet."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from scrubber.emulator.playground import Playground, fast_kubelet_timings

__all__ = ["POLICY", "SOON", "chaos_stage", "until"]

SOON = 30.0
"""Seconds within which an expected event happens, on a busy machine too. It is a timeout; no test measures it."""

POLICY = """\
name: chaos
limits:
  driverCall: 10s
  leftoverGracePeriod: 1s
  unknownPodIdlePeriod: 500ms
  clearTimeoutBase: 1500ms
recovery:
  initialBackoff: 100ms
  maxBackoff: 400ms
  maxAttempts: 1000
  maxAttemptsPerDay: 64
  maxResetsPerDay: 64
  probationScrubs: 1
  probationInterval: 50ms
breaker:
  maxResets: 10000
"""
"""No device becomes unhealthy because the machine is busy: its pod would not be admitted."""
TIMINGS = replace(fast_kubelet_timings(0.05), pre_start_retry=(0.3, 0.5), relist_delay=(0.0, 0.05))

_T = TypeVar("_T")


@asynccontextmanager
async def chaos_stage(
    tmp_path: Path,
    *,
    devices: int = 4,
    memory: str = "4MiB",
    memory_floor: str = "1500ms",
    policy: str = POLICY,
    dra: bool = False,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Playground]:
    """Run both daemons. Their logs end up in ``tmp_path``, which pytest keeps for the analysis of failures.

    Args:
        memory_floor: how long an eraser may take; slow clearing is a fault when it takes longer.
        policy: the text of the policy file.
        dra: have pods request devices by claims.
        environment: additional variables of both daemons.
    """
    path = tmp_path / "chaos.yaml"
    path.write_text(policy.replace("1500ms", memory_floor))
    async with Playground(devices=devices, memory=memory, policy=str(path), timings=TIMINGS, dra=dra) as stage:
        stage.service.environment = stage.plugin.environment = environment or {}
        try:
            await stage.start_daemons(SOON)
            yield stage
        finally:
            for log in (stage.service.log, stage.plugin.log):
                shutil.copy(log, tmp_path)


async def until(look: Callable[[], _T], what: str) -> _T:
    """Poll ``look`` and return its first true result: for ``/proc`` or a file, which offer no notification.

    Raises:
        TimeoutError: ``what`` did not happen in time.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + SOON
    while not (answer := look()):
        if loop.time() > end:
            raise TimeoutError(f"{what} did not happen within {SOON:g} s")
        await asyncio.sleep(0.005)
    return answer
