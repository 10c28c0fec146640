"""The scenario of the committed pictures: three simulated nodes with everyday problems, in fast motion.

    python -m dashboards.preview.scenario [DIR]    runs it, records the three boards into dashboards/preview/recorded,
                                                and leaves Prometheus' data in DIR

Tenants come and go on all nodes. On each node there are problems that an SRE would want to see on a board: a device
whose memory does not verify, one that its tenants drive into errors, an unauthorized user, an active break-glass
override, a service that restarts. Prometheus and its rules are the real ones.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from dashboards.preview import record as recording
from dashboards.preview.__main__ import BOARDS, NAMES, RECORDED
from scrubber.adapters.sim import control
from scrubber.emulator.playground import RESOURCE, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import PodPhase
from tests.cluster.plugin_server import PluginApiServer, kubeconfig
from tests.dashboards.running import Prometheus
from tests.dashboards.stage import PLUGIN, SERVICE, SOON, Node

DURATION = 540.0
SCRAPE = 5
JOB_QUEUES = 5
DEVICES = 8
RECORDED_DEVICE = 4
RULES = [BOARDS / "rules" / name for name in ("recording.yaml", "alerts.yaml")]
TEAMS = ("team-vision", "team-speech", "team-search")

FINISHED_PHASES = (PodPhase.SUCCEEDED, PodPhase.FAILED)

POLICY = """\
name: {name}
limits:
  leftoverGracePeriod: 2s
  unknownPodIdlePeriod: 500ms
  clearTimeoutBase: 20s
  handOver: 25s
health:
  quietPeriod: 20s
  tenantQuarantineThreshold: 3
recovery:
  initialBackoff: 20s
  maxBackoff: 40s
  maxAttempts: 3
  maxAttemptsPerDay: 64
  maxResetsPerDay: 64
  probationScrubs: 2
  probationInterval: 10s
diagnostics:
  recovery: none
"""


class FrequentPrometheus(Prometheus):
    """Scrapes like a fleet's Prometheus, but more often: on a busy machine a response may take a second."""

    def _configuration(self) -> dict[str, Any]:
        every = f"{SCRAPE}s"
        times = {"scrape_interval": every, "evaluation_interval": every, "scrape_timeout": every}
        return super()._configuration() | {"global": times}


@dataclass(slots=True)
class NodeScenario:
    """The events of a node until ``stopped``; ``rng`` makes them reproducible, as far as a machine allows."""

    node: Node
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    async def sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopped.wait()

    async def run_jobs(self, queue: int) -> None:
        """Run one queue of jobs: each writes, waits, ends; the device may be idle between two of them."""
        for number in count():
            await self.sleep(self.rng.uniform(1, 25))
            if self.stopped.is_set():
                return
            team = self.rng.choice(TEAMS)
            stays = f"{self.rng.uniform(10, 70):.0f}"
            leaves = ["--leave-leftover"] if self.rng.random() < 0.15 else []
            argv = tenant_argv("--write", team, "--hold", stays, *leaves)
            with suppress(TimeoutError):
                async with asyncio.timeout(DURATION):
                    await self.node.kubelet.wait_until(
                        lambda kubelet: kubelet.running and kubelet.allocatable(RESOURCE) > 0, SOON
                    )
                    spec = gpu_pod_spec(f"job-{queue}-{number}", team, argv, leave_children=bool(leaves))
                    pod = await self.node.kubelet.run(spec)
                    if pod.admitted:
                        ended = asyncio.create_task(pod.wait(lambda status: status.phase in FINISHED_PHASES, DURATION))
                        over = asyncio.create_task(self.stopped.wait())
                        await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
                        for task in (ended, over):
                            task.cancel()
                    await self.node.kubelet.delete(pod, grace=0)

    async def raise_xids(self, index: str, xid: int, every: float) -> None:
        """Report an XID of a device at random intervals."""
        while not self.stopped.is_set():
            await self.sleep(self.rng.uniform(0.5, 1.5) * every)
            if not self.stopped.is_set():
                control.add_faults(self.node.sim_dir, index, xid=xid)

    async def fail_memory(self, index: str, delay: float, duration: float) -> None:
        """Make a device unclearable; later replace its memory, and have an operator return it to service."""
        await self.sleep(delay)
        control.add_faults(self.node.sim_dir, index, wont_clear=True)
        await self.sleep(duration)
        control.clear_faults(self.node.sim_dir, index, ["wont-clear"])
        if not self.stopped.is_set():
            await self.node.run_command("reset", index, "--yes", "--reason", "its memory was changed")

    async def fail_row_remap(self, index: str, delay: float) -> None:
        await self.sleep(delay)
        if not self.stopped.is_set():
            control.add_faults(
                self.node.sim_dir, index, conditions={"row-remap-failure": "a row could not be remapped"}
            )

    async def run_unauthorized_process(self, index: int, delay: float, duration: float) -> None:
        """Use a device without a grant for ``duration``, and until the service has reported it.

        On a busy machine, the process may need seconds to open the device, and the service to see it twice.
        """
        await self.sleep(delay)
        argv = tenant_argv("--device", str(self.node.memory(index)), "--hold", "forever")
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
        try:
            await self.sleep(duration)
            async with asyncio.timeout(SOON):
                while True:
                    if "unauthorized.use.detected" in await asyncio.to_thread(self.node.service.log.read_text):
                        break
                    await asyncio.sleep(0.5)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    async def open_override(self, index: str, delay: float) -> None:
        await self.sleep(delay)
        if not self.stopped.is_set():
            reason = "--reason", "the last device for an incident"
            await self.node.run_command("break-glass", index, "--duration", "30m", "--yes", *reason)

    async def restart_service(self, delay: float) -> None:
        await self.sleep(delay)
        if not self.stopped.is_set():
            await self.node.service.stop(SOON)
            await self.node.service.start()

    async def restart_kubelet(self, delay: float) -> None:
        await self.sleep(delay)
        if not self.stopped.is_set():
            await self.node.kubelet.restart()


async def run_scenario(a: NodeScenario, b: NodeScenario, c: NodeScenario) -> None:
    """Run all events for DURATION seconds; jobs in progress continue until the nodes are stopped."""
    acts = [
        a.raise_xids("3", 31, 60.0),
        a.raise_xids("4", 95, 150.0),
        a.fail_memory("6", DURATION * 0.35, DURATION * 0.3),
        a.fail_row_remap("1", DURATION * 0.6),
        a.run_unauthorized_process(2, DURATION * 0.5, 12.0),
        a.restart_kubelet(DURATION * 0.8),
        b.restart_service(DURATION * 0.45),
        b.raise_xids("5", 95, 200.0),
        c.open_override("7", DURATION * 0.7),
        c.fail_row_remap("0", DURATION * 0.2),
    ]
    async with asyncio.TaskGroup() as group:
        for scene in (a, b, c):
            for lane in range(JOB_QUEUES):
                group.create_task(scene.run_jobs(lane))
        for act in acts:
            group.create_task(act)


def record_dashboards(address: str, start: float, end: float, variables: Mapping[str, str]) -> None:
    """Record the three boards: the whole fleet, one of its nodes, and one device of that node."""
    prometheus = recording.Prometheus(address)
    RECORDED.mkdir(exist_ok=True)
    for name in NAMES:
        board = json.loads((BOARDS / f"{name}.json").read_text(encoding="utf-8"))
        selected = {} if name == "fleet" else {"instance": variables["instance"]}
        if name == "device":
            selected = dict(variables)
        answers = recording.record(prometheus, board, start, end, scrape=SCRAPE, values=selected)
        recording.write_recording(answers, RECORDED / f"{name}.json")


@asynccontextmanager
async def slow_nodes(*fleet: Node) -> AsyncIterator[None]:
    """Yield with all nodes running and clean; from the first scrub on, clearing takes seconds, as on a real device."""
    dice = random.Random(7)
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            for node in fleet:
                await stack.enter_async_context(node)
                for index in range(DEVICES):
                    control.add_faults(node.sim_dir, str(index), slow_clear=dice.uniform(1.5, 2.5))
                group.create_task(node.start_daemons(SOON))
        for node in fleet:
            await node.wait_until_clean(SOON)
        yield


async def main(records: Path) -> None:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(PluginApiServer())
        fleet = []
        for name in ("node-a", "node-b", "node-c"):
            cluster.add_node(name)
            (records / name).mkdir(parents=True)
            login = {
                "SCRUBBER_CLUSTER_REPORTING": "auto",
                "KUBECONFIG": str(kubeconfig(records / name, cluster.url).path),
            }
            fleet.append(
                Node(name, POLICY.format(name="pool"), records, devices=DEVICES, memory="4MiB", environment=login)
            )
        targets = {job: {node.name: node.ports[job] for node in fleet} for job in (SERVICE, PLUGIN)}
        async with slow_nodes(*fleet):
            prometheus = stack.enter_context(FrequentPrometheus(records / "prometheus", targets, RULES))
            scenes = [NodeScenario(node) for node in fleet]
            began = asyncio.get_running_loop().time()
            playing = asyncio.create_task(run_scenario(*scenes))
            await asyncio.wait((playing,), timeout=DURATION)
            if playing.done():
                raise RuntimeError("the scenario ended too early, or an event did not occur") from playing.exception()
            now = time.time()
            length = asyncio.get_running_loop().time() - began
            device = (await fleet[0].read_client.devices()).devices[RECORDED_DEVICE].id
            await asyncio.to_thread(
                record_dashboards, prometheus.url, now - length, now, {"instance": "node-a", "device": device}
            )
            for scene in scenes:
                scene.stopped.set()
            await playing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dashboards.preview.scenario", description="Record the dashboards.")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="keep the files of the nodes here")
    with tempfile.TemporaryDirectory(prefix="scene-") as temporary:
        asyncio.run(main(parser.parse_args().directory or Path(temporary)))
