"""``python -m bench``: run everything, write ``bench/results/latest.json`` and ``bench/RESULTS.md``, print the table.

The exit status is 0 when everything could be measured, regardless of the figures: a missed target is a result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench import (
    allocation,
    claims,
    clearing,
    fault,
    footprint,
    hand_over,
    machine,
    recovery,
    release,
    scrape,
    several_devices,
    starting,
    storm,
)
from bench.claims import ClaimNode
from bench.echo import Echo
from bench.figures import Amount, Timing
from bench.node import BenchNode, other_processes
from bench.report import SCHEMA, Report, dump, load, render
from bench.targets import evaluate_targets
from scrubber import __version__
from scrubber.emulator.playground import Playground
from scrubber.emulator.pods import EmulatedPod
from tests.integration.nvidia_stage import NvidiaStage

HERE = Path(__file__).parent
_GPU_MIB = 256
_GPU_MEMORY = f"{_GPU_MIB}MiB"
_LOAD_DEVICES = 4
_TAKE_OVER_MEMORY = "48MiB"
_TAKE_OVER_DEVICES = (1, 8)
_STORM_DEVICES = 8
_XID_GPUS = 8
_CLAIM_DEVICES = 16
_IN_USE_PER_POD = 4


@dataclass(frozen=True, slots=True)
class BenchSize:
    """Extent of the benchmark. Values are numbers of samples unless stated otherwise."""

    quick: bool
    hand_overs: int
    pods: tuple[int, ...]
    devices: tuple[int, ...]
    rounds: int
    other_processes: int
    allocations: int
    faults: int
    xids: int
    idle_seconds: float
    """Seconds."""
    starts: int
    scrubs: int
    releases: int
    waiting: int
    """Hand-overs that wait for the end of the earlier pod."""
    take_overs: int
    scrapes: int
    restarts: int
    recoveries: int
    """For each recovery method."""
    claims: int
    publications: int
    storm_seconds: float
    """Seconds of restarts without and with the storm."""


FULL = BenchSize(
    quick=False,
    hand_overs=1000,
    pods=(1, 4, 16),
    devices=(4, 256),
    rounds=6,
    other_processes=2000,
    allocations=1000,
    faults=64,
    xids=104,
    idle_seconds=20.0,
    starts=7,
    scrubs=8,
    releases=112,
    waiting=104,
    take_overs=12,
    scrapes=200,
    restarts=40,
    recoveries=5,
    claims=112,
    publications=claims.MAX_PUBLICATIONS,
    storm_seconds=60.0,
)
QUICK = BenchSize(
    quick=True,
    hand_overs=100,
    pods=(1, 16),
    devices=(4, 32),
    rounds=1,
    other_processes=500,
    allocations=100,
    faults=16,
    xids=16,
    idle_seconds=2.0,
    starts=2,
    scrubs=2,
    releases=16,
    waiting=4,
    take_overs=1,
    scrapes=20,
    restarts=8,
    recoveries=1,
    claims=8,
    publications=1,
    storm_seconds=5.0,
)


@dataclass(slots=True)
class BenchRun:
    """The measurements so far, with progress output."""

    extent: BenchSize
    began: float = field(default_factory=time.monotonic)
    timings: list[Timing] = field(default_factory=list)
    amounts: list[Amount] = field(default_factory=list)
    containers: str = ""

    def log_progress(self, what: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {what}", flush=True)

    async def run_all(self, scratch: Path) -> None:
        await self._starts()
        await self._sixteen_devices(fault.quick_recovery(scratch))
        for devices in self.extent.devices:
            await self._scaling(devices, fault.quick_recovery(scratch))
        await self._clearing()
        await self._take_overs()
        await self._xids(fault.quick_recovery(scratch))
        await self._load()
        await self._recoveries()
        await self._claims(fault.quick_recovery(scratch))
        await self._storm()

    async def _starts(self) -> None:
        self.log_progress("start and end of the service, 16 devices")
        self.timings += await starting.service_startup(devices=16, starts=self.extent.starts)
        self.log_progress("start of the plugin, and a rolling update")
        self.timings += await starting.plugin_startup(devices=16, starts=self.extent.starts)

    async def _sixteen_devices(self, policy: Path) -> None:
        extent = self.extent
        self.log_progress("a node of 16 devices")
        async with BenchNode.start(16, policy=str(policy)) as node, _echo(node) as echo:
            self.containers = "marker" if node.stage.cgroup_parent is None else "cgroup v2"
            self.log_progress("idle")
            self.amounts += await footprint.at_rest(
                node.stage, seconds=extent.idle_seconds, name="idle", title="16 devices"
            )
            self.timings += await starting.command_line(node.stage, runs=extent.starts)

            self.amounts.append(
                await release.list_calls_at_rest(
                    node, seconds=extent.idle_seconds, name="idle", title="nothing happens"
                )
            )
            self.log_progress(f"{extent.releases} releases")
            self.timings += await release.releases(node, echo, samples=extent.releases)
            self.log_progress(f"{extent.waiting} hand-overs that wait")
            self.timings += await release.waiting_hand_overs(node, echo, samples=extent.waiting)

            pods: list[EmulatedPod] = []
            for count in extent.pods:
                self.log_progress(f"container restarts, pods on the node: {count}")
                pods += await node.start_pods(count - len(pods))
                on_the_node = f"{count} pod{'s' * (count > 1)}"
                title = f"hand-over, restart of a container, {on_the_node}"
                self.timings.append(
                    await hand_over.same_container(
                        node, echo, pods, name=f"pods-{count}", title=title, samples=extent.hand_overs
                    )
                )
                self.timings += await hand_over.reading_breakdown(
                    node, echo, name=f"pods-{count}", title=on_the_node, samples=extent.hand_overs // 4
                )
            self.log_progress("idle, 16 pods")
            self.amounts += await footprint.at_rest(
                node.stage, seconds=extent.idle_seconds / 2, name="idle-with-pods", title="16 devices in use"
            )
            self.log_progress(f"container restarts beside {scrape.SCRAPERS} scrapers")
            timings, amounts = await scrape.restarts_while_scraped(node, echo, pods, seconds=extent.storm_seconds)
            self.timings += timings
            self.amounts += amounts
            self.log_progress(f"container restarts beside {extent.other_processes} other processes")
            self._count_processes("hand-over.same-container.processes-before", "restarts")
            async with other_processes(extent.other_processes):
                self._count_processes("hand-over.same-container.processes-beside", "restarts beside the others")
                title = f"hand-over, restart of a container, 16 pods, {extent.other_processes} other processes"
                self.timings.append(
                    await hand_over.same_container(
                        node, echo, pods, name="crowd", title=title, samples=extent.hand_overs
                    )
                )
            await node.end_pods(pods)

            self.log_progress("first starts of pods, on certificates")
            title = "hand-over, first start of a pod, up to 16 pods"
            self.timings.append(
                await hand_over.on_certificate(node, echo, name="pods-16", title=title, pods=16, rounds=extent.rounds)
            )
            self._count_processes("hand-over.certificate.processes-before", "first starts")
            async with other_processes(extent.other_processes):
                self._count_processes("hand-over.certificate.processes-beside", "first starts beside the others")
                title = f"hand-over, first start of a pod, {extent.other_processes} other processes"
                self.timings.append(
                    await hand_over.on_certificate(
                        node, echo, name="crowd", title=title, pods=16, rounds=max(1, extent.rounds // 4)
                    )
                )

            self.log_progress("pods start and end")
            self.amounts += await release.churn(node, rounds=max(1, extent.rounds // 2))
            self.log_progress(f"{extent.faults} faults")
            self.timings.append(await fault.fault_to_list(node, faults=extent.faults))

    async def _scaling(self, devices: int, policy: Path) -> None:
        self.log_progress(f"a node of {devices} devices")
        async with BenchNode.start(devices, policy=str(policy)) as node, _echo(node) as echo:
            pods = await node.start_pods(4)
            self.log_progress(f"container restarts, {devices} devices")
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
                lambda number: node.pre_start(pods[number % len(pods)]),
                calls=self.extent.restarts,
                every=hand_over.restart_interval(pods),
                name=f"cpu-per-hand-over.devices-{devices}",
                title=f"restart of a container and {hand_over.restart_interval(pods):.2g} s of watching, {devices} devices",
            )
            self.log_progress(f"scrapes, {devices} devices")
            title = f"scrape of the service's metrics, {devices} devices"
            self.timings.append(
                await scrape.scrape_timing(
                    node, name=f"scrape.devices-{devices}", title=title, samples=self.extent.scrapes
                )
            )
            self.log_progress(f"{devices} devices in use")
            pods += await node.start_pods(devices // _IN_USE_PER_POD - len(pods), gpus=_IN_USE_PER_POD)
            self.amounts += await footprint.at_rest(
                node.stage,
                seconds=self.extent.idle_seconds,
                name=f"in-use.devices-{devices}",
                title=f"{devices} devices, {sum(len(pod.device_ids) for pod in pods)} in use",
            )

    async def _clearing(self) -> None:
        self.log_progress(f"the simulated eraser beside memset and memcmp, {_GPU_MEMORY}")
        self.timings += await clearing.eraser_speed(mebibytes=_GPU_MIB, scrubs=4 * self.extent.scrubs)

    async def _take_overs(self) -> None:
        few, many = _TAKE_OVER_DEVICES
        self.log_progress(f"pods take over {few} and {many} devices of {_TAKE_OVER_MEMORY}")
        async with (
            BenchNode.start(few, memory=_TAKE_OVER_MEMORY) as small,
            BenchNode.start(many, memory=_TAKE_OVER_MEMORY) as large,
        ):
            timings, ratio = await several_devices.take_over(
                (small, large), memory=_TAKE_OVER_MEMORY, rounds=self.extent.take_overs
            )
        self.timings += timings
        self.amounts.append(ratio)

    async def _xids(self, policy: Path) -> None:
        if shutil.which("gcc") is None:
            self.log_progress("no gcc, which compiles the stand-in for NVIDIA's driver: XIDs are not measured")
            return
        self.log_progress(f"{self.extent.xids} XIDs on {_XID_GPUS} GPUs of the stand-in for NVIDIA's driver")
        stage = NvidiaStage(gpus=_XID_GPUS, policy=str(policy), serve=("--poll-interval", "1s"))
        async with BenchNode.on(stage) as node, _echo(node) as echo:
            self.amounts += footprint.event_children(node)
            self.timings.append(await fault.xid_to_list(node, echo, stage.machine.gpus, xids=self.extent.xids))

    async def _load(self) -> None:
        extent = self.extent
        self.log_progress(f"a node of {_LOAD_DEVICES} devices of {_GPU_MEMORY}")
        async with BenchNode.start(_LOAD_DEVICES, memory=_GPU_MEMORY) as node, _echo(node) as echo:
            self.log_progress("scrubs on demand")
            timing, rates = await clearing.slow_path(node, memory=_GPU_MEMORY, scrubs=extent.scrubs)
            self.log_progress("Allocate, idle and while every device is scrubbed")
            self.timings.append(await allocation.allocate_at_rest(node, echo, samples=extent.allocations))
            loaded, share = await allocation.allocate_under_load(
                node, echo, memory=_GPU_MEMORY, samples=extent.allocations
            )
            self.timings += [loaded, timing]
            self.amounts += [share, *rates]

    async def _recoveries(self) -> None:
        samples = self.extent.recoveries
        self.log_progress("quarantine and recovery, default policy")
        async with BenchNode.start(3 * samples) as node:
            self.timings += await recovery.recoveries(node, samples=samples)
        self.amounts += recovery.recovery_pauses()

    async def _claims(self, policy: Path) -> None:
        extent = self.extent
        self.log_progress(f"a node of {_CLAIM_DEVICES} devices with the DRA driver: {extent.claims} claims")
        async with ClaimNode.start(_CLAIM_DEVICES, policy=str(policy)) as node, _echo_of(node.stage) as echo:
            self.timings += await claims.prepare_and_unprepare(node, echo, samples=extent.claims)
            self.log_progress(f"{extent.faults} faults of devices with claims")
            self.timings.append(await claims.fault_to_taint(node, faults=extent.faults))
        devices = max(extent.devices)
        self.log_progress(f"ResourceSlices of {devices} devices")
        async with ClaimNode.start(devices, policy=str(policy)) as node:
            timing, amounts = await claims.publication(node, samples=extent.publications)
            self.timings.append(timing)
            self.amounts += amounts
            self.amounts += await claims.at_rest(node, seconds=extent.idle_seconds)

    async def _storm(self) -> None:
        self.log_progress(f"a storm of XIDs on one of {_STORM_DEVICES} devices")
        async with BenchNode.start(_STORM_DEVICES) as node, _echo(node) as echo:
            timings, amounts = await storm.xid_storm(
                node, echo, restarts=self.extent.storm_seconds, idle=self.extent.idle_seconds
            )
        self.timings += timings
        self.amounts += amounts

    def _count_processes(self, name: str, when: str) -> None:
        count = sum(name.isdigit() for name in os.listdir("/proc"))
        self.amounts.append(Amount(name, f"processes on the machine, {when}", count, ""))


def _echo(node: BenchNode) -> contextlib.AbstractAsyncContextManager[Echo]:
    return _echo_of(node.stage)


def _echo_of(stage: Playground) -> contextlib.AbstractAsyncContextManager[Echo]:
    return Echo.start(stage.directory / "echo.sock")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure hand-overs and related operations.")
    parser.add_argument("--quick", action="store_true", help="a short run; prints the results and writes no file")
    extent = QUICK if parser.parse_args().quick else FULL

    where = machine.describe_machine()
    run = BenchRun(extent)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        asyncio.run(run.run_all(Path(scratch)))
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
        targets=evaluate_targets(run.timings, run.amounts),
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
