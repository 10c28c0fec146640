"""Fault → ListAndWatch: from an error report of a device's driver to the kubelet's notification.

Faults are XID 95 on one device after the other, written to the control file of the simulated driver, or to the event file
of the stand-in for NVIDIA's driver. Every device recovers automatically (reset, scrub, probation) before its next fault;
other devices may be recovering meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from bench.echo import REFERENCE, Echo
from bench.figures import Quantiles, Timing
from bench.health_stream import HEALTHY, UNHEALTHY, HealthStream
from bench.node import BenchNode, hand_over_message
from scrubber.adapters.sim import control
from tests.nvidia.gpu import Gpu

__all__ = ["QUICK_RECOVERY", "fault_to_list", "quick_recovery", "xid_to_list"]

QUICK_RECOVERY = """\
name: bench
recovery:
  initialBackoff: 1s
  maxBackoff: 1s
  maxAttemptsPerDay: 64
  maxResetsPerDay: 64
  probationScrubs: 1
  probationInterval: 100ms
memory:
  onChip: false
  countResidue: false
diagnostics:
  recovery: none
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


async def xid_to_list(node: BenchNode, echo: Echo, gpus: Sequence[Gpu], *, xids: int) -> Timing:
    """Measure from the XID of the stand-in driver to the message with the GPU as Unhealthy, in seconds.

    Args:
        gpus: the GPUs of ``node``.
    """
    measured: list[float] = []
    reference: list[float] = []
    async with HealthStream.open(node) as listing:
        while len(measured) < xids:
            for gpu in gpus[: xids - len(measured)]:
                reference.append(await echo(hand_over_message(gpu.uuid)))
                began = time.perf_counter()
                gpu.raise_xid(_XID)
                measured.append(await listing.wait_for_health(gpu.uuid, UNHEALTHY) - began)
            await listing.wait_until(lambda known: all(each == HEALTHY for each in known.values()))
    title = f"XID → ListAndWatch, {len(gpus)} GPUs, stand-in for NVIDIA's driver"
    return Timing("xid.list-and-watch", title, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)
