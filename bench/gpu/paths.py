"""The two paths of a hand-over on a GPU, timed part by part from the outside, through the ports that the engine uses.

Invariant: the timed code is the shipped code. The slow path is every step from the request to the facts of a
certificate; the fast path is its two checks. The ledger stores the certificate, which ``make bench`` measures.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from bench.figures import Quantiles
from scrubber.domain.device import Device
from scrubber.ports.device import Eraser, EraseReport, EraseRequest, Holders, Settings, Telemetry

__all__ = ["Ports", "SlowPath", "fast_path", "rates", "slow_path"]

_DEADLINE = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a backend that a scrub needs."""

    holders: Holders
    telemetry: Telemetry
    settings: Settings
    eraser: Eraser


@dataclass(frozen=True, slots=True)
class SlowPath:
    """One slow path. ``parts`` are seconds by name, in order; ``passes`` those that the eraser reported, by phase."""

    seconds: float
    parts: Mapping[str, float]
    passes: Mapping[str, float]
    report: EraseReport


async def slow_path(ports: Ports, device: Device, settings: Mapping[str, str], *, pattern: bool = False) -> SlowPath:
    """Run the steps: holders, health, memory with the processors, settings, health again, holders again.

    Args:
        settings: the settings to restore; none are changed when it is empty.

    Raises:
        ScrubberError: errors of the ports.
    """
    parts: dict[str, float] = {}
    begun = time.perf_counter()

    async def timed(name: str, work: Awaitable[_T]) -> _T:
        start = time.perf_counter()
        result = await work
        parts[name] = parts.get(name, 0.0) + time.perf_counter() - start
        return result

    await timed("holders", ports.holders.list_holders(device))
    await timed("health", ports.telemetry.snapshot(device))
    request = EraseRequest("bench", audit=True, pattern=pattern, deadline=_DEADLINE)
    report = await timed("memory", ports.eraser.erase(device, request, lambda _: None))
    if settings:
        await timed("settings", ports.settings.restore(device, settings))
    await timed("health", ports.telemetry.snapshot(device))
    await timed("held", ports.holders.is_held(device))
    seconds = time.perf_counter() - begun
    passes = dict(report.seconds_by_phase)
    parts["memory outside its passes"] = parts["memory"] - sum(passes.values())
    return SlowPath(seconds, parts, passes, report)


def rates(path: SlowPath, limits: Mapping[str, float]) -> dict[str, float]:
    """Return bytes per second of each pass, and its share of the device's best rate in the same run.

    Args:
        limits: bytes per second by ``read`` and ``write``.
    """
    bounds = {"audit": limits["read"], "clear": limits["write"], "verify": limits["read"]}
    found: dict[str, float] = {}
    for phase, bound in bounds.items():
        seconds = path.passes.get(phase)
        if seconds:
            rate = path.report.cleared_bytes / seconds
            found |= {f"{phase}_bytes_per_second": rate, f"{phase}_share": rate / bound}
    return found


async def fast_path(
    ports: Ports, device: Device, samples: int, reference_call: Callable[[], Awaitable[object]]
) -> tuple[Quantiles, Quantiles | None]:
    """Measure its two checks ``samples`` times, and ``reference_call`` once after every twentieth of them."""
    seconds: list[float] = []
    reference: list[float] = []
    for sample in range(samples):
        start = time.perf_counter()
        await ports.telemetry.snapshot(device)
        await ports.holders.is_held(device)
        seconds.append(time.perf_counter() - start)
        if sample % 20 == 0:
            start = time.perf_counter()
            if await reference_call() is not None:
                reference.append(time.perf_counter() - start)
    return Quantiles.of(seconds), Quantiles.of(reference) if reference else None
