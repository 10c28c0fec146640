"""The scenario of the fleet for dashboards and alerts, within two minutes of five nodes.

``calm`` works all the time and its daemons are restarted, one after the other; no alert may fire for it. On each other
node every fault that has an alert happens, lasts until the alert fires (or until it should have), and is repaired. A
real Prometheus with the rules on a faster clock (:mod:`tests.dashboards.faster`) records everything.

    python -m tests.dashboards.scenario    reports its progress; Prometheus then runs until Ctrl-C
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from scrubber.emulator.interrupts import cancel_on_first_signal
from tests.cluster.plugin_server import PluginApiServer, kubeconfig
from tests.dashboards.acts import Acts
from tests.dashboards.calm import churn
from tests.dashboards.faster import SECONDS, faster
from tests.dashboards.running import SCRAPE, Prometheus
from tests.dashboards.stage import OPENMETRICS, PLUGIN, SERVICE, TEXT, Node, little_disk, nodes

__all__ = ["RULES", "FinishedScenario", "alerts_of_outage", "run_scenario"]

RULES: Final = tuple(
    Path(__file__).parents[2] / "dashboards" / "rules" / name for name in ("recording.yaml", "alerts.yaml")
)

QUICK: Final = """\
name: {name}
limits:
  leftoverGracePeriod: 1s
  unknownPodIdlePeriod: 500ms
  clearTimeoutBase: {floor}
  handOver: 25s
health:
  quietPeriod: 200ms
  tenantQuarantineThreshold: 3
  quarantineAfter:
    power-brake: 300ms
recovery:
  initialBackoff: 200ms
  maxBackoff: 1s
  maxAttempts: 3
  maxAttemptsPerDay: 64
  maxResetsPerDay: 64
  probationScrubs: 1
  probationInterval: 100ms
diagnostics:
  recovery: none
breaker:
  maxResets: {resets}
  maxSoftPercent: 100
"""


def quick(name: str, *, floor: str = "2s", resets: int = 100) -> str:
    """Return the default policy with a recovery that takes seconds.

    Args:
        floor: how long clearing may take.
        resets: the maximum number of resets by recoveries of the node.
    """
    return QUICK.format(name=name, floor=floor, resets=resets)


def alerts_of_outage(seconds: float) -> frozenset[str]:
    """Return the alerts that are right about a daemon that a restart left missing for ``seconds``.

    A scrape before and one after the outage can each be missing, too.
    """
    long = seconds > SECONDS["2m"] - 2 * SCRAPE
    return frozenset({"ScrubberServiceDown", "ScrubberPluginDown"} if long else ())


@dataclass(frozen=True, slots=True)
class FinishedScenario:
    """A finished scenario; Prometheus is still running.

    Attributes:
        began, ended: seconds since the epoch, from when all nodes were up.
        device: one with many events, for the dashboard of one device.
        pages: (node, job, form) → what a scraper received at the end.
        known: ids of the scrubs in the ledger of ``ill``.
        outages: node → the longest time in seconds that a restart left it without a daemon. That depends on what else
            the machine does; an alert for a missing daemon is right if it took as long as the rule waits.
    """

    prometheus: Prometheus
    began: float
    ended: float
    device: str
    pages: Mapping[tuple[str, str, str], str]
    known: frozenset[str]
    outages: Mapping[str, float]

    def outage_alerts(self) -> frozenset[tuple[str, str]]:
        """Return (alert, node) of the alerts that may fire for nodes that were only restarted; none unless overloaded."""
        return frozenset((alert, node) for node, outage in self.outages.items() for alert in alerts_of_outage(outage))


def _nothing(_message: str) -> None:
    """Report to no one."""


@dataclass(frozen=True)
class _Aloud(Acts):
    """Reports the start and the result of the wait for each alert."""

    report: Callable[[str], None]

    async def fires(self, node: Node, alert: str, *, matcher: str = "") -> bool:
        self.report(f"{node.name:<6}  {alert}: cause present")
        fired = await super().fires(node, alert, matcher=matcher)
        self.report(f"{node.name:<6}  {alert} {'fires' if fired else 'does not fire yet; the scenario continues'}")
        return fired


@asynccontextmanager
async def _taken_down(context: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
    """Run ``context``; if the task is cancelled meanwhile, its exit is still awaited."""
    await context.__aenter__()
    try:
        yield
    finally:
        ending = asyncio.ensure_future(context.__aexit__(*sys.exc_info()))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise


@asynccontextmanager
async def _answering(prometheus: Prometheus) -> AsyncIterator[None]:
    """Run Prometheus; it is closed even if the task is cancelled while a thread starts it."""
    starting = asyncio.create_task(asyncio.to_thread(prometheus.start))
    try:
        await asyncio.shield(starting)
        yield
    finally:
        await asyncio.wait({starting})
        prometheus.close()


@asynccontextmanager
async def run_scenario(
    records: Path, *, listening: int | None = None, report: Callable[[str], None] = _nothing
) -> AsyncIterator[FinishedScenario]:
    """Run the scenario; logs, rules and scraped data are in ``records``.

    Args:
        listening: port of Prometheus; an ephemeral one when None.
        report: receives a message about each current event.
    """
    rules = records / "rules"
    rules.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp")))
        cluster = await stack.enter_async_context(PluginApiServer())
        cluster.add_node("ill")
        stack.enter_context(little_disk(short / "cut" / "state"))
        login = {"SCRUBBER_CLUSTER_REPORTING": "auto", "KUBECONFIG": str(kubeconfig(short, cluster.url).path)}
        # This socket is absent, so health events fail and are dropped.
        login["SCRUBBER_NVSENTINEL_SOCKET"] = str(short / "nvsentinel.sock")
        calm = Node("calm", quick("calm"), records, devices=4, memory="4MiB")
        ill = Node("ill", quick("ill"), records, devices=8, memory="1MiB", environment=login)
        strict = Node("strict", quick("strict", floor="90s", resets=1), records, devices=6, memory="1MiB")
        slow = Node("slow", quick("slow", floor="90s"), records, devices=5, memory="1MiB")
        cut = Node("cut", quick("cut"), records, devices=2, memory="1MiB", directory=short / "cut")
        fleet = (calm, ill, strict, slow, cut)
        targets = {job: {node.name: node.ports[job] for node in fleet} for job in (SERVICE, PLUGIN)}
        prometheus = Prometheus(
            records / "prometheus", targets, [faster(each, rules) for each in RULES], listening=listening
        )
        report(f"{len(fleet)} simulated nodes start: {', '.join(node.name for node in fleet)}")
        async with _taken_down(nodes(*fleet)):
            await stack.enter_async_context(_answering(prometheus))
            report(f"prometheus {prometheus.url} answers, and things begin to go wrong on all nodes but calm")
            began = time.time()
            acts = _Aloud(prometheus, report)
            device = next(each.id for each in (await ill.read_client.devices()).devices if each.index == "1")
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
            entries = (await ill.read_client.history(limit=1000)).entries
            known = frozenset(each.scrub_id for each in entries if each.scrub_id)
            report("scenario finished; stopping the nodes")
        outages = {node.name: node.longest_outage for node in fleet}
        yield FinishedScenario(prometheus, began, ended, device, pages, known, outages)


async def _main() -> int:
    """Return 0 after the whole scenario, otherwise 128 plus the number of the signal that interrupted it."""
    began = time.monotonic()

    def report(message: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {message}", flush=True)

    whole = False
    with cancel_on_first_signal() as interruption, tempfile.TemporaryDirectory(prefix="story-") as directory:
        try:
            async with run_scenario(Path(directory) / "records", report=report) as story:
                whole = True
                print(f"prometheus {story.prometheus.url} answers until Ctrl-C; no node is left to be scraped")
                print(f"from {_utc(story.began)} to {_utc(story.ended)} UTC ({story.ended - story.began:.0f} s)")
                print(f"from {story.began:.0f} to {story.ended:.0f} in seconds since the epoch")
                print(f"device {story.device}", flush=True)
                await asyncio.Event().wait()
        except (asyncio.CancelledError, ExceptionGroup):
            # Ctrl-C at a terminal reaches the daemons, too: clients that query them at that moment fail.
            if interruption.received is None:
                raise
            if not whole:
                report("interrupted; all processes stopped")
                return 128 + interruption.received
        return 0


def _utc(moment: float) -> str:
    """Return the time in a form that time pickers accept."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.dashboards.scenario", description=(__doc__ or "").split("\n")[0]
    ).parse_args()
    sys.exit(asyncio.run(_main()))
