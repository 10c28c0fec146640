"""Speed of the slow path: a scrub by the client's clock, and the passes of the simulated eraser by its own.

A simulated GPU's memory is a file on tmpfs, so the passes are compared with the speed of the machine's memory.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench.figures import Amount, Quantiles, Timing, quantile
from bench.memory_speed import MemorySpeed, Reading
from bench.node import BenchNode
from scrubber.adapters.sim import shape
from scrubber.adapters.sim.backend import SimBackend
from scrubber.api.client import AdminClient
from scrubber.domain.device import Device
from scrubber.ports.device import EraseRequest

__all__ = ["eraser_speed", "slow_path"]

_PHASES = ("audit", "clear", "verify")
_PART = 1024 * 1024
_DEADLINE = 120.0
_MEMSET, _MEMCMP, _BOTH = "memset", "memcmp", "memset and memcmp"


async def slow_path(node: BenchNode, *, memory: str, scrubs: int) -> tuple[Timing, list[Amount]]:
    """Measure the whole slow path on demand, and the rate of each of its passes (median of ``scrubs``)."""
    whole: list[float] = []
    rates: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    async with AdminClient(node.stage.socket_dir) as admin:
        for number in range(scrubs):
            began = time.perf_counter()
            measured = await _scrub(admin, node.devices[number % len(node.devices)])
            whole.append(time.perf_counter() - began)
            for phase in _PHASES:
                rates[phase].append(measured["total_bytes"] / measured[f"{phase}_seconds"] / 1e9)
    timing = Timing("slow-path", f"the whole slow path, {memory}", Quantiles.of(whole))
    return timing, [
        Amount(f"slow-path.{phase}", f"{phase} of {memory}", quantile(rates[phase], 0.5), "GB/s") for phase in _PHASES
    ]


async def eraser_speed(*, mebibytes: int, scrubs: int) -> list[Timing]:
    """Measure the eraser without a service, alternately with the same work done by ``memset`` and ``memcmp``."""
    size = mebibytes * _PART
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=shm if os.access(shm, os.W_OK) else None) as scratch:
        node = Path(scratch) / "node"
        shape.create(node, devices=1, memory=size, node_name="bench")
        backend = SimBackend(node)
        await backend.start()
        try:
            await backend.warm_up()
            (device,) = await backend.inventory.devices()
            memory = backend.inventory.find_sim_device(device).memory
            async with MemorySpeed.start(size) as speed:
                written = await _erase_repeatedly(
                    scrubs, lambda: _prepared(speed, "written", memory, size), lambda: _erase(backend, device)
                )
                untouched = await _erase_repeatedly(scrubs, lambda: speed("untouched"), lambda: _erase(backend, device))
        finally:
            await backend.close()
    name = f"{mebibytes}MiB that a tenant has written"
    return [
        _timing("eraser.clear", f"eraser: clear {name}", _MEMSET, written, "clear"),
        _timing("eraser.verify", f"eraser: verify {name}", _MEMCMP, written, "verify"),
        _timing("eraser.map", f"eraser: map {name}", "", written, "map"),
        _timing("eraser.whole", f"eraser: request → report, {name}", _BOTH, written, "whole"),
        _timing("eraser.clear-untouched", f"eraser: clear {mebibytes}MiB without pages", _MEMSET, untouched, "clear"),
    ]


Round = tuple[Reading, dict[str, float]]


async def _erase_repeatedly(
    scrubs: int, reference: Callable[[], Awaitable[Reading]], erase: Callable[[], Awaitable[dict[str, float]]]
) -> Sequence[Round]:
    return [(await reference(), await erase()) for _ in range(scrubs)]


async def _prepared(speed: MemorySpeed, state: str, memory: Path, size: int) -> Reading:
    """Measure the reference, then write the device's memory as a tenant would."""
    found = await speed(state)
    content = os.urandom(_PART)
    with memory.open("r+b", buffering=0) as file:
        for _ in range(size // _PART):
            file.write(content)
    return found


async def _erase(backend: SimBackend, device: Device) -> dict[str, float]:
    """Return the seconds of each pass, and as ``whole`` those from the request to the report."""
    began = time.perf_counter()
    report = await backend.eraser.erase(device, EraseRequest("bench", False, False, _DEADLINE), lambda _: None)
    whole = time.perf_counter() - began
    if report.verified_bytes != device.memory_bytes:
        raise RuntimeError(f"the eraser verified {report.verified_bytes} of {device.memory_bytes} bytes")
    return {**dict(report.seconds_by_phase), "whole": whole}


def _timing(name: str, title: str, reference: str, rounds: Sequence[Round], phase: str) -> Timing:
    own = Quantiles.of([seconds[phase] for _, seconds in rounds])
    if not reference:
        return Timing(name, title, own)
    of = {
        _MEMSET: [found.memset for found, _ in rounds],
        _MEMCMP: [found.memcmp for found, _ in rounds],
        _BOTH: [found.memset + found.memcmp for found, _ in rounds],
    }
    return Timing(name, title, own, Quantiles.of(of[reference]), reference)


async def _scrub(admin: AdminClient, device: str) -> dict[str, float]:
    """Scrub ``device`` on the slow path; return what the clearing of its memory measured."""
    measured: dict[str, float] = {}
    async for update in admin.scrub(device, "slow"):
        if update.HasField("result"):
            for step in update.result.scrub.steps:
                measured |= json.loads(step.measurements_json) if step.step == "memory" else {}
    return measured
