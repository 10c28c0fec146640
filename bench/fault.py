"""Fault → ListAndWatch: from an error report of a device's driver to the kubelet's notification.

Faults are XID 95 on one device after the other, written to the control file of the simulated driver. Every device
recovers automatically (reset, scrub, probation) before its next fault; other devices may be recovering meanwhile.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.figures import Quantiles, Timing
from bench.health_stream import HEALTHY, UNHEALTHY, HealthStream
from bench.node import BenchNode
from scrubber.adapters.sim import control

__all__ = ["QUICK_RECOVERY", "fault_to_list", "quick_recovery"]

QUICK_RECOVERY = """\
name: bench
recovery:
  initialBackoff: 1s
  maxBackoff: 1s
  maxAttemptsPerDay: 64
  maxResetsPerDay: 64
  probationScrubs: 1
  probationInterval: 100ms
breaker:
  maxResets: 10000
"""
"""A policy under which a device recovers within seconds, any number of times.

It affects only the time after the fault, which is not measured.
"""
_XID = 95


def quick_recovery(directory: Path) -> Path:
    """Write the policy to a file in ``directory``; return its path."""
    path = directory / "quick-recovery.yaml"
    path.write_text(QUICK_RECOVERY)
    return path


async def fault_to_list(node: BenchNode, *, faults: int) -> Timing:
    """Measure from the write of the control file to the message with the device as Unhealthy, in seconds."""
    measured: list[float] = []
    async with HealthStream.open(node) as listing:
        while len(measured) < faults:
            for device in node.devices[: faults - len(measured)]:
                began = time.perf_counter()
                control.add_faults(node.stage.sim_dir, device, xid=_XID)
                measured.append(await listing.wait_for_health(device, UNHEALTHY) - began)
            await listing.wait_until(lambda known: all(each == HEALTHY for each in known.values()))
    title = f"fault → ListAndWatch, {len(node.devices)} devices"
    return Timing(f"fault.devices-{len(node.devices)}", title, Quantiles.of(measured))
