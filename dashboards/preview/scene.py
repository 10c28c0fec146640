"""The minutes that the committed pictures show: three simulated nodes in an ordinary day's trouble, played fast.

    python -m dashboards.preview.scene [DIR]    plays it, records the three boards into dashboards/preview/recorded,
                                                and leaves what Prometheus scraped in DIR


Tenants come and go on all nodes. On each something goes wrong that an SRE would want to see on a board: a device whose
memory does not verify, one that its tenants drive into errors, a stranger, an open break-glass, a service that restarts.
Prometheus and its rules are the real ones.
"""

import asyncio
import json
import random
import sys
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
from scrubber.emulator.pods import Phase
from scrubber.emulator.stage import RESOURCE, gpu_pod, tenant
from tests.cluster.api_server import ApiServerStandIn, kubeconfig
from tests.dashboards.running import Prometheus
from tests.dashboards.stage import PLUGIN, SERVICE, SOON, Node

LASTS = 540.0
SCRAPE = 5
LANES = 5
DEVICES = 8
SUBJECT = 4
RULES = [BOARDS / "rules" / name for name in ("recording.yaml", "alerts.yaml")]
TEAMS = ("team-vision", "team-speech", "team-search")

OVER = (Phase.SUCCEEDED, Phase.FAILED)

POLICY = """\
name: {name}
limits:
  dying-grace: 2s
  settle: 500ms
  memory-floor: 20s
  hand-over: 25s
health:
  calm: 20s
  blame: 3
recovery:
  backoff-initial: 20s
  backoff-max: 40s
  attempts: 3
  attempts-per-day: 64
  resets-per-day: 64
  probation-scrubs: 2
  probation-interval: 10s
diagnostics:
  recovery: none
"""


class Patient(Prometheus):
    """Scrapes as a fleet is scraped, only more often: on a busy machine an answer may take a second."""

    def _configuration(self) -> dict[str, Any]:
        every = f"{SCRAPE}s"
        times = {"scrape_interval": every, "evaluation_interval": every, "scrape_timeout": every}
        return super()._configuration() | {"global": times}


@dataclass(slots=True)
class Scene:
    """What happens on a node until ``over``; ``dice`` make it the same each time, as far as a machine allows."""

    node: Node
    over: asyncio.Event = field(default_factory=asyncio.Event)
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    async def after(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    async def work(self, lane: int) -> None:
        """One queue of jobs: each writes, stays, ends; between two of them the device may idle."""
        for number in count():
            await self.after(self.dice.uniform(1, 25))
            if self.over.is_set():
                return
            team = self.dice.choice(TEAMS)
            stays = f"{self.dice.uniform(10, 70):.0f}"
            leaves = ["--leave-child"] if self.dice.random() < 0.15 else []
            argv = tenant("--write", team, "--hold", stays, *leaves)
            with suppress(TimeoutError):
                async with asyncio.timeout(LASTS):
                    await self.node.kubelet.changed(
                        lambda kubelet: kubelet.running and kubelet.allocatable(RESOURCE) > 0, SOON
                    )
                    spec = gpu_pod(f"job-{lane}-{number}", team, argv, leave_children=bool(leaves))
                    pod = await self.node.kubelet.run(spec)
                    if pod.admitted:
                        ended = asyncio.create_task(pod.wait(lambda status: status.phase in OVER, LASTS))
                        over = asyncio.create_task(self.over.wait())
                        await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
                        for task in (ended, over):
                            task.cancel()
                    await self.node.kubelet.delete(pod, grace=0)

    async def errors(self, index: str, xid: int, every: float) -> None:
        """A device reports an XID now and then."""
        while not self.over.is_set():
            await self.after(self.dice.uniform(0.5, 1.5) * every)
            if not self.over.is_set():
                control.fault(self.node.sim, index, xid=xid)

    async def memory_fails(self, index: str, when: float, lasts: float) -> None:
        """A device cannot be cleared; then its memory is changed and a person lets it back."""
        await self.after(when)
        control.fault(self.node.sim, index, wont_clear=True)
        await self.after(lasts)
        control.clear(self.node.sim, index, ["wont-clear"])
        if not self.over.is_set():
            await self.node.command("reset", index, "--yes", "--reason", "its memory was changed")

    async def row_fails(self, index: str, when: float) -> None:
        await self.after(when)
        if not self.over.is_set():
            control.fault(self.node.sim, index, conditions={"row-remap-failure": "a row could not be remapped"})

    async def stranger(self, index: int, when: float, lasts: float) -> None:
        await self.after(when)
        argv = tenant("--device", str(self.node.memory(index)), "--hold", "forever")
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
        await self.after(lasts)
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()

    async def glass(self, index: str, when: float) -> None:
        await self.after(when)
        if not self.over.is_set():
            reason = "--reason", "the last device for an incident"
            await self.node.command("break-glass", index, "--for", "30m", "--yes", *reason)

    async def restart(self, when: float) -> None:
        await self.after(when)
        if not self.over.is_set():
            await self.node.service.stop(SOON)
            await self.node.service.start()

    async def kubelet_restarts(self, when: float) -> None:
        await self.after(when)
        if not self.over.is_set():
            await self.node.kubelet.restart()


async def play(a: Scene, b: Scene, c: Scene) -> None:
    """All of it, for LASTS seconds; what is running then goes on until the scenes are over."""
    acts = [
        a.errors("3", 31, 60.0),
        a.errors("4", 95, 150.0),
        a.memory_fails("6", LASTS * 0.35, LASTS * 0.3),
        a.row_fails("1", LASTS * 0.6),
        a.stranger(2, LASTS * 0.5, 12.0),
        a.kubelet_restarts(LASTS * 0.8),
        b.restart(LASTS * 0.45),
        b.errors("5", 95, 200.0),
        c.glass("7", LASTS * 0.7),
        c.row_fails("0", LASTS * 0.2),
    ]
    async with asyncio.TaskGroup() as group:
        for scene in (a, b, c):
            for lane in range(LANES):
                group.create_task(scene.work(lane))
        for act in acts:
            group.create_task(act)


def keep(address: str, start: float, end: float, subject: Mapping[str, str]) -> None:
    """Record the three boards: the fleet whole, the other two of one node, and of one device of it."""
    prometheus = recording.Prometheus(address)
    RECORDED.mkdir(exist_ok=True)
    for name in NAMES:
        board = json.loads((BOARDS / f"{name}.json").read_text(encoding="utf-8"))
        wanted = {} if name == "fleet" else {"instance": subject["instance"]}
        if name == "device":
            wanted = dict(subject)
        answers = recording.record(prometheus, board, start, end, scrape=SCRAPE, wanted=wanted)
        recording.write(answers, RECORDED / f"{name}.json")


@asynccontextmanager
async def slow_nodes(*fleet: Node) -> AsyncIterator[None]:
    """All of them, running and clean; clearing takes seconds, as on a device, from the first scrub on."""
    dice = random.Random(7)
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            for node in fleet:
                await stack.enter_async_context(node)
                for index in range(DEVICES):
                    control.fault(node.sim, str(index), slow_clear=dice.uniform(1.5, 2.5))
                group.create_task(node.start_daemons(SOON))
        for node in fleet:
            await node.all_clean(SOON)
        yield


async def main(records: Path) -> None:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(ApiServerStandIn())
        fleet = []
        for name in ("node-a", "node-b", "node-c"):
            cluster.add_node(name)
            (records / name).mkdir(parents=True)
            login = {"SCRUBBER_CLUSTER": "auto", "KUBECONFIG": str(kubeconfig(records / name, cluster.url).kubeconfig)}
            fleet.append(
                Node(name, POLICY.format(name="pool"), records, devices=DEVICES, memory="4MiB", environment=login)
            )
        targets = {job: {node.name: node.ports[job] for node in fleet} for job in (SERVICE, PLUGIN)}
        async with slow_nodes(*fleet):
            prometheus = stack.enter_context(Patient(records / "prometheus", targets, RULES))
            scenes = [Scene(node) for node in fleet]
            began = asyncio.get_running_loop().time()
            playing = asyncio.create_task(play(*scenes))
            await asyncio.wait((playing,), timeout=LASTS)
            if playing.done():
                raise RuntimeError("the scene was over too soon") from playing.exception()
            now = time.time()
            length = asyncio.get_running_loop().time() - began
            device = (await fleet[0].read.devices()).devices[SUBJECT].id
            await asyncio.to_thread(keep, prometheus.url, now - length, now, {"instance": "node-a", "device": device})
            for scene in scenes:
                scene.over.set()
            await playing


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(main(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory(prefix="scene-") as directory:
            asyncio.run(main(Path(directory)))
