"""A driver that reports XIDs of one device without end: the effect on other devices, the service, and the ledger.

One device of the node has the storm and no pod. The others have pods whose containers are restarted, measured against
the echo before and during the storm. Then the storm continues alone, and the load of the service is measured. The XIDs
are of classes that take no device out of service. A separate process, ``python -m bench.storm DIRECTORY DEVICE RATE``,
raises the storm and exits when its standard input ends.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench import footprint, hand_over
from bench.echo import Echo
from bench.figures import Amount, Timing
from bench.node import BenchNode
from bench.open_counter import OpenCounter
from scrubber.adapters.sim import control
from scrubber.adapters.sim.xid_storm import raise_xids
from scrubber.emulator.pods import EmulatedPod

__all__ = ["CODES", "RATE", "xid_storm"]

CODES = (13, 31, 45)
"""Two are faults of an application, one depends on its context."""
RATE = 1000.0
"""XIDs per second."""
_SAMPLES = 1000
_MOST_XIDS = 10_000_000
_NICE = 15
_MINUTE = 60.0
_BYTES_A_MEGABYTE = 1e6
_MOST_ROWS = 1000
"""Maximum of the service's response. So many would be far beyond what the storm may write."""


async def xid_storm(node: BenchNode, echo: Echo, *, restarts: float, idle: float) -> tuple[list[Timing], list[Amount]]:
    """Measure restarts of the other devices' containers without and with the storm, and the load of the service.

    Args:
        restarts: seconds of restarts, each time.
        idle: seconds of measuring the service at rest and in the storm, on an otherwise idle node.
    """
    struck, others = node.devices[0], len(node.devices) - 1
    # No pod uses the first device: no restart may wait for it.
    pods = await _pods_on_other_devices(node, struck)
    timings = [await _restarts(node, echo, pods, "calm", f"hand-over beside no storm, {others} devices", restarts)]
    calm = await _ServiceLoad.measure(node, struck, idle)
    began = time.time()
    async with _running_storm(node, struck) as raging:
        title = f"hand-over beside a storm of XIDs, {others} devices"
        timings.append(await _restarts(node, echo, pods, "storm", title, restarts))
        stormy = await _ServiceLoad.measure(node, struck, idle)
        rate = raging.rate
    minutes = math.ceil((time.time() - began) / _MINUTE)
    rows = len((await node.stage.read_client.history(device=struck, since=began, limit=_MOST_ROWS)).entries)
    await node.end_pods(pods)
    return timings, [
        Amount("storm.rate", "storm: XIDs of one device", rate, "a second"),
        Amount("storm.checks", "storm: health checks of that device", stormy.health_checks, "a second"),
        Amount("storm.checks.calm", "no storm: health checks of that device", calm.health_checks, "a second"),
        Amount("storm.cpu", "storm: CPU of the service and its children", stormy.cpu, "% of a core"),
        Amount("storm.cpu.calm", "no storm: CPU of the service and its children", calm.cpu, "% of a core"),
        Amount("storm.rows", f"storm: rows in the ledger, of {len(CODES)} codes in {minutes} min", float(rows), "rows"),
        Amount("storm.rows.bound", "storm: rows by code and minute begun", rows / len(CODES) / minutes, "rows"),
        Amount("storm.written", "storm: written by the service, log included", stormy.written, "MB a minute"),
        Amount("storm.written.calm", "no storm: written by the service, log included", calm.written, "MB a minute"),
    ]


async def _pods_on_other_devices(node: BenchNode, affected: str) -> list[EmulatedPod]:
    """Return a running pod on every device but ``affected``."""
    pods = await node.start_pods(len(node.devices))
    (without,) = [each for each in pods if affected in each.device_ids]
    pods.remove(without)
    await node.stage.kubelet.delete(without, grace=0)
    await node.stage.wait_for_devices(
        lambda devices: all(each.state == "clean" for each in devices if each.id == affected), _MINUTE
    )
    return pods


async def _restarts(
    node: BenchNode, echo: Echo, pods: list[EmulatedPod], name: str, title: str, seconds: float
) -> Timing:
    return await hand_over.same_container(
        node, echo, pods, name=f"others-{name}", title=title, samples=_SAMPLES, budget=seconds
    )


class _ServiceLoad:
    """Load of the service for a device: queries per second, % of a core, MB per minute."""

    def __init__(self, health_checks: float, cpu: float, written: float) -> None:
        self.health_checks, self.cpu, self.written = health_checks, cpu, written

    @classmethod
    async def measure(cls, node: BenchNode, device: str, seconds: float) -> _ServiceLoad:
        began, cpu, written = (
            time.perf_counter(),
            footprint.cpu_of_service(node),
            footprint.written_by_service(node),
        )
        with OpenCounter.watch(control.find_sim_device(node.stage.sim_dir, device).directory / "device.json") as opens:
            await asyncio.sleep(seconds)
        passed = time.perf_counter() - began
        more = footprint.written_by_service(node) - written
        return cls(
            health_checks=opens.count / passed,
            cpu=100 * (footprint.cpu_of_service(node) - cpu) / passed,
            written=_MINUTE * more / passed / _BYTES_A_MEGABYTE,
        )


class _Storm:
    """A storm in progress."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._before, self._began = self._raised(), time.perf_counter()

    @property
    def rate(self) -> float:
        """XIDs per second so far."""
        return (self._raised() - self._before) / (time.perf_counter() - self._began)

    def _raised(self) -> int:
        return sum(control.read_faults(self._place).xid_counts.values())


@asynccontextmanager
async def _running_storm(node: BenchNode, device: str) -> AsyncIterator[_Storm]:
    """Run the storm inside the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.storm", str(node.stage.sim_dir), device, str(RATE)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_MINUTE):
            await process.stdout.readline()
        yield _Storm(control.find_sim_device(node.stage.sim_dir, device).directory)
    finally:
        process.stdin.close()
        status = await process.wait()
        if status != 0:
            raise RuntimeError(f"the storm broke off with {status}")


def _run_storm(directory: Path, device: str, rate: float) -> None:
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        over.set()

    def go_on(seconds: float) -> None:
        if over.wait(seconds):
            raise SystemExit(0)

    os.nice(_NICE)  # the storm must not take CPU time from the measured processes
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    print("raging", flush=True)
    raise_xids(directory, device, CODES, repeat=_MOST_XIDS, rate=rate, sleep=go_on)


if __name__ == "__main__":
    _run_storm(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
