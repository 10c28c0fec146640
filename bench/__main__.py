"""``python -m bench``: run everything, write ``bench/results/latest.json`` and ``bench/RESULTS.md``, print the table.

Exit status 0 when everything could be measured, whatever the figures: a missed target is a result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench import allocation, clearing, fault, footprint, hand_over, machine, recovery, release, scrape, starting, storm
from bench.echo import Echo
from bench.figures import Amount, Timing
from bench.node import Node, other_processes
from bench.report import SCHEMA, Report, dump, load, render
from bench.targets import judge
from scrubber import __version__
from scrubber.emulator.pods import Pod

HERE = Path(__file__).parent
_GPU_MEMORY = "256MiB"
_LOADED_DEVICES = 4
_STORMY_DEVICES = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. Figures are samples, unless they say otherwise."""

    quick: bool
    hand_overs: int
    pods: tuple[int, ...]
    devices: tuple[int, ...]
    rounds: int
    crowd: int
    allocations: int
    faults: int
    rest: float
    """Seconds."""
    starts: int
    scrubs: int
    releases: int
    scrapes: int
    restarts: int
    recoveries: int
    """Of each way back."""
    storm: float
    """Seconds of restarts without and with it."""


FULL = Extent(
    quick=False,
    hand_overs=1000,
    pods=(1, 4, 16),
    devices=(4, 256),
    rounds=6,
    crowd=2000,
    allocations=1000,
    faults=64,
    rest=20.0,
    starts=7,
    scrubs=8,
    releases=20,
    scrapes=200,
    restarts=40,
    recoveries=5,
    storm=60.0,
)
QUICK = Extent(
    quick=True,
    hand_overs=100,
    pods=(1, 16),
    devices=(4, 32),
    rounds=1,
    crowd=500,
    allocations=100,
    faults=16,
    rest=2.0,
    starts=2,
    scrubs=2,
    releases=3,
    scrapes=20,
    restarts=8,
    recoveries=1,
    storm=5.0,
)


@dataclass(slots=True)
class Run:
    """What was measured so far; says what it does."""

    extent: Extent
    began: float = field(default_factory=time.monotonic)
    timings: list[Timing] = field(default_factory=list)
    amounts: list[Amount] = field(default_factory=list)
    containers: str = ""

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {what}", flush=True)

    async def everything(self, scratch: Path) -> None:
        await self._starts()
        await self._sixteen_devices(fault.quick_recovery(scratch))
        for devices in self.extent.devices:
            await self._number_of_devices(devices, fault.quick_recovery(scratch))
        await self._load()
        await self._recoveries()
        await self._storm()

    async def _starts(self) -> None:
        self.say("the service starts, 16 devices")
        self.timings.append(await starting.service(devices=16, starts=self.extent.starts))
        self.say("the plugin starts, and one instance follows another")
        self.timings += await starting.plugin(devices=16, starts=self.extent.starts)

    async def _sixteen_devices(self, policy: Path) -> None:
        extent = self.extent
        self.say("a node of 16 devices")
        async with Node.running(16, policy=str(policy)) as node, _echo(node) as echo:
            self.containers = "marker" if node.stage.cgroups is None else "cgroup v2"
            self.say("at rest")
            self.amounts += await footprint.at_rest(node, seconds=extent.rest, name="idle", title="16 devices")
            self.timings += await starting.command_line(node.stage, runs=extent.starts)

            self.amounts.append(
                await release.questions_at_rest(node, seconds=extent.rest, name="idle", title="nothing happens")
            )
            self.say(f"{extent.releases} releases")
            self.timings.append(await release.release_to_clean(node, releases=extent.releases))

            pods: list[Pod] = []
            for count in extent.pods:
                self.say(f"container restarts, pods on the node: {count}")
                pods += await node.start_pods(count - len(pods))
                on_the_node = f"{count} pod{'s' * (count > 1)}"
                title = f"hand-over, restart of a container, {on_the_node}"
                self.timings.append(
                    await hand_over.same_container(
                        node, echo, pods, name=f"pods-{count}", title=title, samples=extent.hand_overs
                    )
                )
                self.timings += await hand_over.reading_told_apart(
                    node, echo, name=f"pods-{count}", title=on_the_node, samples=extent.hand_overs // 4
                )
            self.say("at rest, 16 pods")
            self.amounts += await footprint.at_rest(
                node, seconds=extent.rest / 2, name="idle-with-pods", title="16 devices in use"
            )
            self.say(f"container restarts beside {scrape.CROWD} scrapers")
            timings, amounts = await scrape.crowded(node, echo, pods, seconds=extent.storm)
            self.timings += timings
            self.amounts += amounts
            self.say(f"container restarts beside {extent.crowd} other processes")
            self._count_processes("hand-over.same-container.processes-before", "restarts")
            async with other_processes(extent.crowd):
                self._count_processes("hand-over.same-container.processes-beside", "restarts beside the others")
                title = f"hand-over, restart of a container, 16 pods, {extent.crowd} other processes"
                self.timings.append(
                    await hand_over.same_container(
                        node, echo, pods, name="crowd", title=title, samples=extent.hand_overs
                    )
                )
            await node.end_pods(pods)

            self.say("first starts of pods, on certificates")
            title = "hand-over, first start of a pod, up to 16 pods"
            self.timings.append(
                await hand_over.on_certificate(node, echo, name="pods-16", title=title, pods=16, rounds=extent.rounds)
            )
            self._count_processes("hand-over.certificate.processes-before", "first starts")
            async with other_processes(extent.crowd):
                self._count_processes("hand-over.certificate.processes-beside", "first starts beside the others")
                title = f"hand-over, first start of a pod, {extent.crowd} other processes"
                self.timings.append(
                    await hand_over.on_certificate(
                        node, echo, name="crowd", title=title, pods=16, rounds=max(1, extent.rounds // 4)
                    )
                )

            self.say("pods come and go")
            self.amounts += await release.churn(node, rounds=max(1, extent.rounds // 2))
            self.say(f"{extent.faults} faults")
            self.timings.append(await fault.fault_to_list(node, faults=extent.faults))

    async def _number_of_devices(self, devices: int, policy: Path) -> None:
        self.say(f"a node of {devices} devices")
        async with Node.running(devices, policy=str(policy)) as node, _echo(node) as echo:
            pods = await node.start_pods(4)
            self.say(f"container restarts, {devices} devices")
            self.timings.append(
                await hand_over.same_container(
                    node,
                    echo,
                    pods,
                    name=f"devices-{devices}",
                    title=f"hand-over, restart of a container, 4 pods, {devices} devices",
                    samples=self.extent.hand_overs,
                )
            )
            self.amounts += await footprint.per_call(
                node,
                lambda number: node.start_again(pods[number % len(pods)]),
                calls=self.extent.restarts,
                every=hand_over.pause(pods),
                name=f"cpu-per-hand-over.devices-{devices}",
                title=f"restart of a container and {hand_over.pause(pods):.2g} s of watching, {devices} devices",
            )
            self.say(f"scrapes, {devices} devices")
            title = f"scrape of the service's metrics, {devices} devices"
            self.timings.append(
                await scrape.scrapes(node, name=f"scrape.devices-{devices}", title=title, samples=self.extent.scrapes)
            )

    async def _load(self) -> None:
        extent = self.extent
        self.say(f"a node of {_LOADED_DEVICES} devices of {_GPU_MEMORY}")
        async with Node.running(_LOADED_DEVICES, memory=_GPU_MEMORY) as node, _echo(node) as echo:
            self.say("scrubs on demand")
            timing, rates = await clearing.slow_path(node, memory=_GPU_MEMORY, scrubs=extent.scrubs)
            self.say("Allocate, at rest and while every device is scrubbed")
            self.timings.append(await allocation.allocate_at_rest(node, echo, samples=extent.allocations))
            loaded, share = await allocation.allocate_under_load(
                node, echo, memory=_GPU_MEMORY, samples=extent.allocations
            )
            self.timings += [loaded, timing]
            self.amounts += [share, *rates]

    async def _recoveries(self) -> None:
        samples = self.extent.recoveries
        self.say("ways out of service and back, default policy")
        async with Node.running(3 * samples) as node:
            self.timings += await recovery.recoveries(node, samples=samples)
        self.amounts += recovery.pauses()

    async def _storm(self) -> None:
        self.say(f"a storm of XIDs on one of {_STORMY_DEVICES} devices")
        async with Node.running(_STORMY_DEVICES) as node, _echo(node) as echo:
            timings, amounts = await storm.xids(node, echo, restarts=self.extent.storm, alone=self.extent.rest)
        self.timings += timings
        self.amounts += amounts

    def _count_processes(self, name: str, when: str) -> None:
        count = sum(name.isdigit() for name in os.listdir("/proc"))
        self.amounts.append(Amount(name, f"processes on the machine, {when}", count, ""))


def _echo(node: Node) -> contextlib.AbstractAsyncContextManager[Echo]:
    return Echo.running(node.stage.directory / "echo.sock")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the hand-over and its company.")
    parser.add_argument("--quick", action="store_true", help="a minute's look; prints, and writes no file")
    extent = QUICK if parser.parse_args().quick else FULL

    where = machine.here()
    run = Run(extent)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        asyncio.run(run.everything(Path(scratch)))
    report = Report(
        schema=SCHEMA,
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        quick=extent.quick,
        seconds=time.monotonic() - run.began,
        containers=run.containers,
        machine=where,
        timings=tuple(run.timings),
        amounts=tuple(run.amounts),
        targets=judge(run.timings, run.amounts),
    )
    text = dump(report)
    table = render(load(text))
    print(f"\n{table}")
    if not extent.quick:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "latest.json").write_text(text)
        (HERE / "RESULTS.md").write_text(table)


if __name__ == "__main__":
    main()
