"""``python -m bench.scale``: hand-overs at given rates on a node of full size: devices, pods and other processes.

A pod's container restarts again and again, one restart after the other, as under the kubelet: a restart that is due while the
pod's last one has not been answered is missed. A rate is *sustained* when nothing was refused and at most one in a hundred
restarts was missed. Memory, the ledger and the duration of a hand-over are sampled meanwhile, and the table states how
each of them grows.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench import footprint, machine
from bench.echo import Echo
from bench.figures import Quantiles, slope
from bench.node import BenchNode, hand_over_message, other_processes
from bench.report import table
from scrubber import __version__
from scrubber.emulator.pods import EmulatedPod

__all__ = ["Load", "Sample", "main", "render", "restarts"]

_WATCHED = 2.0
"""Seconds until the service has seen all pods run, without which a restart is no exception of the policy."""
_ECHOES = 10.0
"""Echoes a second beside the load."""
_SAMPLES = 12
"""Samples of memory and ledger in one load."""
_SUSTAINED = 0.99
_REFUSAL_WORDS = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory and ledger at one moment of a load.

    Attributes:
        at: seconds since the begin of the load.
        pss: of all processes, in MB.
        ledger: bytes of the ledger's files.
        rows: audit rows so far.
    """

    at: float
    pss: float
    ledger: int
    rows: int


@dataclass(slots=True)
class Load:
    """One rate, and what was measured under it.

    Attributes:
        rate: requested hand-overs a second.
        seconds: duration.
        answered: begin of the call, in seconds since the begin of the load, and duration of each hand-over.
        echoes: durations of the echo under the same load.
        missed: restarts that were due before the pod's last one was answered.
        refusals: by the message.
        cpu: of the service and of the plugin, each with its children, in percent of a core.
    """

    rate: float
    seconds: float
    answered: list[tuple[float, float]] = field(default_factory=list)
    echoes: list[float] = field(default_factory=list)
    missed: int = 0
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    cpu: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def achieved(self) -> float:
        """Hand-overs a second that were granted."""
        return len(self.answered) / self.seconds

    @property
    def sustained(self) -> bool:
        due = len(self.answered) + self.missed + self.refusals.total()
        return not self.refusals and len(self.answered) >= _SUSTAINED * due


async def restarts(call: Callable[[int], Awaitable[object]], pods: int, load: Load) -> None:
    """Make ``load.rate`` calls a second for ``load.seconds``, each pod's in turn and never two of one pod at a time.

    ``call`` gets the pod's number. The pods' restarts are spread evenly.
    """
    began = time.perf_counter()
    total, interval = int(load.rate * load.seconds), pods / load.rate

    async def one_pod(number: int) -> None:
        turn = number
        while turn < total:
            behind = time.perf_counter() - began - turn / load.rate
            if behind >= interval:
                skipped = min(int(behind // interval), len(range(turn, total, pods)))
                load.missed += skipped
                turn += skipped * pods
                continue
            await asyncio.sleep(-behind)
            start = time.perf_counter()
            try:
                await call(number)
                load.answered.append((start - began, time.perf_counter() - start))
            except grpc.aio.AioRpcError as error:
                load.refusals[f"{error.code().name}: {(error.details() or '')[:_REFUSAL_WORDS]}"] += 1
            turn += pods

    await asyncio.gather(*(one_pod(number) for number in range(pods)))


class _FullNode:
    """A node whose pods run."""

    def __init__(self, node: BenchNode, echo: Echo, pods: Sequence[EmulatedPod]) -> None:
        self._node, self._echo, self._pods = node, echo, pods

    async def load(self, rate: float, seconds: float) -> Load:
        """Restart containers at ``rate``."""
        load = Load(rate, seconds)
        began, before = time.perf_counter(), self._cpu()
        beside = [asyncio.create_task(self._sample(load, began)), asyncio.create_task(self._echoes(load))]
        try:
            await restarts(lambda number: self._node.pre_start(self._pods[number]), len(self._pods), load)
            passed = time.perf_counter() - began
            load.cpu = {name: 100 * (used - before[name]) / passed for name, used in self._cpu().items()}
            load.samples.append(await self._state(time.perf_counter() - began))
        finally:
            for task in beside:
                task.cancel()
            results = await asyncio.gather(*beside, return_exceptions=True)
        for each in results:
            if isinstance(each, Exception):
                raise each
        return load

    async def _sample(self, load: Load, began: float) -> None:
        for number in range(_SAMPLES):
            await asyncio.sleep(began + number * load.seconds / _SAMPLES - time.perf_counter())
            load.samples.append(await self._state(time.perf_counter() - began))

    async def _echoes(self, load: Load) -> None:
        message = hand_over_message(self._node.devices[0])
        while True:
            await asyncio.sleep(1 / _ECHOES)
            load.echoes.append(await self._echo(message))

    async def _state(self, at: float) -> Sample:
        state = self._node.stage.directory / "state"
        newest = (await self._node.stage.read_client.history(limit=1)).entries
        return Sample(
            at=at,
            pss=footprint.pss(pid for pids in footprint.daemon_processes(self._node.stage).values() for pid in pids),
            ledger=sum(path.stat().st_size for path in state.glob("ledger.db*")),
            rows=max((each.sequence for each in newest), default=0),
        )

    def _cpu(self) -> dict[str, float]:
        return {
            name: sum(footprint.cpu_seconds(pid) for pid in pids)
            for name, pids in footprint.daemon_processes(self._node.stage).items()
        }


@dataclass(frozen=True, slots=True)
class _Size:
    devices: int
    pods: int
    per_pod: int
    processes: int


async def measure(size: _Size, rates: Sequence[float], seconds: float) -> list[Load]:
    """Measure every rate on one node, in the given order."""
    _log_progress(f"a node of {size.devices} devices")
    async with BenchNode.start(size.devices) as node, Echo.start(node.stage.directory / "echo.sock") as echo:
        _log_progress(f"{size.pods} pods with {size.per_pod} devices each")
        pods = await node.start_pods(size.pods, gpus=size.per_pod)
        _log_progress(f"{size.processes} other processes")
        async with other_processes(size.processes):
            await asyncio.sleep(_WATCHED)
            full = _FullNode(node, echo, pods)
            loads = []
            for rate in rates:
                _log_progress(f"{rate:g} hand-overs a second for {seconds:g} s")
                loads.append(await full.load(rate, seconds))
                await asyncio.sleep(_WATCHED)
            return loads


def render(size: str, loads: Sequence[Load]) -> str:
    """Return the tables in Markdown."""
    return "\n".join(_lines(size, loads))


def _lines(size: str, loads: Sequence[Load]) -> Iterator[str]:
    where = machine.describe_machine()
    yield (
        f"{size}; scrubber {__version__}, {where.cpu}, {where.cores} cores, {where.kernel}, {where.python}, load "
        f"average after the run {where.load:g}:"
    )
    yield ""
    yield from table(
        (
            *(
                "hand-overs a second",
                "granted a second",
                "sustained",
                "missed",
                "refused",
                "p50",
                "p99",
                "echo p50",
                "echo p99",
                "p50 ratio",
            ),
            *("p99 ratio", "CPU of the service", "CPU of the plugin"),
        ),
        [_load_cells(load) for load in loads],
    )
    yield ""
    yield from table(
        (
            *("hand-overs a second", "duration grows", "memory", "memory grows"),
            *("ledger per hand-over", "audit rows per hand-over"),
        ),
        [_growth_cells(load) for load in loads],
    )
    for load in loads:
        for message, count in load.refusals.most_common(3):
            yield ""
            yield f"{load.rate:g} a second: {count} times {message}"
    yield ""


def _load_cells(load: Load) -> tuple[str, ...]:
    counts = (f"{load.rate:g}", f"{load.achieved:.1f}", "yes" if load.sustained else "**no**", str(load.missed))
    cpu = [f"{load.cpu[name]:.3g} %" for name in ("service", "plugin")]
    if not load.answered:
        return (*counts, str(load.refusals.total()), *["" for _ in range(6)], *cpu)
    measured, echo = Quantiles.of([seconds for _, seconds in load.answered]), Quantiles.of(load.echoes)
    times = (measured.p50, measured.p99, echo.p50, echo.p99)
    return (
        *(*counts, str(load.refusals.total()), *(f"{1000 * each:.1f} ms" for each in times)),
        *(f"{measured.p50 / echo.p50:.1f}", f"{measured.p99 / echo.p99:.1f}", *cpu),
    )


def _growth_cells(load: Load) -> tuple[str, ...]:
    first, last = load.samples[0], load.samples[-1]
    done = max(1, len(load.answered))
    times = [each.at for each in load.samples]
    latency = slope(*zip(*load.answered, strict=True)) if len(load.answered) > 1 else 0.0
    memory = slope(times, [each.pss for each in load.samples])
    return (
        f"{load.rate:g}",
        f"{1000 * 60 * latency:+.1f} ms a minute",
        f"{last.pss:.0f} MB",
        f"{60 * memory:+.2f} MB a minute",
        f"{(last.ledger - first.ledger) / done:,.0f} bytes",
        f"{(last.rows - first.rows) / done:.2f}",
    )


def _log_progress(what: str) -> None:
    print(f"bench.scale: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale", description="Measure one node at its full size; print tables in Markdown."
    )
    parser.add_argument("--devices", type=int, default=256)
    parser.add_argument("--pods", type=int, default=110)
    parser.add_argument("--devices-per-pod", type=int, default=2)
    parser.add_argument("--processes", type=int, default=10_000, help="sleeping processes beside those of the pods")
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 20, 40, 60, 80, 100], help="hand-overs a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each rate")
    given = parser.parse_args()
    size = _Size(given.devices, given.pods, given.devices_per_pod, given.processes)
    if size.pods * size.per_pod > size.devices:
        parser.error(f"{size.pods} pods with {size.per_pod} devices each need more than {size.devices} devices")
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    if size.processes + 2 * size.pods > most // 2:
        parser.error(f"{size.processes} processes are too many for this machine: kernel.pid_max is {most}")
    loads = asyncio.run(measure(size, given.rates, given.seconds))
    words = (
        f"{size.devices} simulated devices, {size.pods} pods with {size.per_pod} devices each, {size.processes:,} other "
        f"processes, {given.seconds:g} s per rate"
    )
    print(render(words, loads))


if __name__ == "__main__":
    main()
