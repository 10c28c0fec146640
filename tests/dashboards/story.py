"""What the fleet of the boards and alerts goes through, within two minutes of five nodes.

``calm`` works all the time and its daemons are restarted, one after the other; nobody may be woken for it. On each other
node every fault that an alert is for happens, lasts until the alert fires (or until it should have), and is mended. The
whole is recorded by a real Prometheus with the rules on a faster clock (:mod:`tests.dashboards.faster`).

    python -m tests.dashboards.story    tells it, says where Prometheus answers, and waits for Ctrl-C
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.api_server import ApiServerStandIn, kubeconfig
from tests.dashboards.acts import Acts
from tests.dashboards.calm import churn
from tests.dashboards.faster import faster
from tests.dashboards.running import Prometheus
from tests.dashboards.stage import OPENMETRICS, PLUGIN, SERVICE, TEXT, Node, little_disk, nodes

__all__ = ["RULES", "Told", "told"]

RULES: Final = tuple(
    Path(__file__).parents[2] / "dashboards" / "rules" / name for name in ("recording.yaml", "alerts.yaml")
)

QUICK: Final = """\
name: {name}
limits:
  dying-grace: 1s
  settle: 500ms
  memory-floor: {floor}
  hand-over: 25s
health:
  calm: 200ms
  blame: 3
  sustained:
    power-brake: 300ms
recovery:
  backoff-initial: 200ms
  backoff-max: 1s
  attempts: 3
  attempts-per-day: 64
  resets-per-day: 64
  probation-scrubs: 1
  probation-interval: 100ms
diagnostics:
  recovery: none
breaker:
  resets: {resets}
  soft-percent: 100
"""


def quick(name: str, *, floor: str = "2s", resets: int = 100) -> str:
    """The default policy with a way back that takes seconds.

    Args:
        floor: how long clearing may take.
        resets: what recoveries of the node may do.
    """
    return QUICK.format(name=name, floor=floor, resets=resets)


@dataclass(frozen=True, slots=True)
class Told:
    """A story that is over; Prometheus goes on answering.

    Attributes:
        began, ended: seconds since the epoch, from when all nodes were up.
        device: one that went through much, for the board of one device.
        pages: (node, job, form) → what a scraper was given at the end.
        known: ids of the scrubs that the ledger of ``ill`` knows.
    """

    prometheus: Prometheus
    began: float
    ended: float
    device: str
    pages: Mapping[tuple[str, str, str], str]
    known: frozenset[str]


@asynccontextmanager
async def told(records: Path, *, listening: int | None = None) -> AsyncIterator[Told]:
    """Tell it; logs, rules and what was scraped are in ``records``."""
    rules = records / "rules"
    rules.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp")))
        cluster = await stack.enter_async_context(ApiServerStandIn())
        cluster.add_node("ill")
        stack.enter_context(little_disk(short / "cut" / "state"))
        login = {"KUBECONFIG": str(kubeconfig(short, cluster.url).kubeconfig)}
        calm = Node("calm", quick("calm"), records, devices=4, memory="4MiB")
        ill = Node("ill", quick("ill"), records, devices=8, memory="1MiB", environment=login)
        strict = Node("strict", quick("strict", resets=1), records, devices=6, memory="1MiB")
        slow = Node("slow", quick("slow", floor="90s"), records, devices=5, memory="1MiB")
        cut = Node("cut", quick("cut"), records, devices=2, memory="1MiB", directory=short / "cut")
        fleet = (calm, ill, strict, slow, cut)
        targets = {job: {node.name: node.ports[job] for node in fleet} for job in (SERVICE, PLUGIN)}
        prometheus = Prometheus(
            records / "prometheus", targets, [faster(each, rules) for each in RULES], listening=listening
        )
        async with nodes(*fleet):
            await asyncio.to_thread(prometheus.start)
            stack.callback(prometheus.close)
            began = time.time()
            acts = Acts(prometheus)
            device = next(each.id for each in (await ill.read.devices()).devices if each.index == "1")
            enough = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(churn(calm, enough))
                async with asyncio.TaskGroup() as others:
                    for node, act in ((ill, acts.ill), (strict, acts.strict), (slow, acts.slow), (cut, acts.cut)):
                        others.create_task(act(node))
                enough.set()
            ended = time.time()
            pages = {
                (node.name, job, form): await asyncio.to_thread(node.page, job, form)
                for node in (calm, ill)
                for job in (SERVICE, PLUGIN)
                for form in (TEXT, OPENMETRICS)
            }
            entries = (await ill.read.history(limit=1000)).entries
            known = frozenset(each.scrub_id for each in entries if each.scrub_id)
        yield Told(prometheus, began, ended, device, pages, known)


async def _main() -> None:
    told_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop.set)
    with tempfile.TemporaryDirectory(prefix="story-") as directory:
        async with told(Path(directory) / "records") as story:
            print(f"prometheus {story.prometheus.url}")
            print(f"from {story.began:.0f} to {story.ended:.0f} ({story.ended - story.began:.0f} s)")
            print(f"device {story.device}", flush=True)
            await told_to_stop.wait()


if __name__ == "__main__":
    asyncio.run(_main())
