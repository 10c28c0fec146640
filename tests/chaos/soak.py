"""The soak: thousands of pods over a few devices, while all components around them are killed, fail and misreport.

``python -m tests.chaos.soak --pods 2000 --devices 16 --seed N``

The shipped daemons run over the simulated node under the emulated kubelet. All actions of the pods and the weather are
drawn from one seed. An independent reader receives every tenant's messages and judges (:mod:`tests.chaos.reader`); this
module only causes events, and records what it did. Exit status 1 on any breach; then logs, facts and ledger are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrubber.emulator.playground import RESOURCE
from scrubber.emulator.pods import EmulatedPod, PodEnded, PodSpec
from tests.chaos.judgement import Verdict
from tests.chaos.lives import End, Life, Lives
from tests.chaos.storm import Supervisor
from tests.chaos.watched_node import FOR_EVER, WatchedNode, is_under_way, watched_node
from tests.chaos.weather import Weather

__all__ = ["Outcome", "main", "report", "soak"]

LULL = 3.0
"""Seconds after which the weather continues although no pod has come."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a soak."""

    seed: int
    verdict: Verdict
    weather: Counter[str]
    kinds: Counter[str]
    seconds: float
    processor: tuple[float, float]
    """Seconds of CPU time: of the soak's own process with its kubelet, and of all others."""


class Lanes:
    """Pods in several lanes, one after another: the requested number, or up to four times as many until ``enough``."""

    def __init__(
        self,
        node: WatchedNode,
        lives: Lives,
        requested: int,
        rng: random.Random,
        enough: Callable[[], bool],
        *,
        progress: bool = False,
    ) -> None:
        self._node = node
        self._lives = lives
        self._requested = requested
        self._rng = rng
        self._enough = enough
        self._progress = progress
        self._scheduler = asyncio.Lock()
        self.count = 0
        self.started = 0
        self.turned_away = 0
        self.kinds: Counter[str] = Counter()

    async def run(self) -> None:
        """Run one lane."""
        while self.started < self._requested or (self.started < 4 * self._requested and not self._enough()):
            self.count += 1
            life = self._lives.life(self.count)
            try:
                await self._live(life)
            except TimeoutError as error:
                self._node.waited.append(str(error))
                return
            self.kinds[life.kind] += 1

    async def _live(self, life: Life) -> None:
        node = self._node
        pod = await self._bind(life.spec)
        if life.end is End.UNSTARTED or (life.end is End.FORCED and not life.after):
            await asyncio.sleep(life.after or self._rng.uniform(0.0, 0.3))
        elif not await self._under_way(pod):
            return
        if life.restarts and life.end is not End.KILLED:
            await self._restarted(pod, life.restarts)
        if life.end is End.ITSELF:
            await self._over(pod)
        elif life.end is not End.UNSTARTED:
            await asyncio.sleep(life.after)
        if life.end is End.KILLED:
            node.kill(pod)
            await (self._restarted(pod, life.restarts) if life.restarts else self._over(pod))
        if life.end is End.FORCED:
            await node.delete_by_force(pod, dying_for=life.dying_for)
        else:
            await node.delete(pod, grace=life.grace)
        if life.again:
            await self._live(replace(life, again=False))

    async def _bind(self, spec: PodSpec) -> EmulatedPod:
        """Bind like the scheduler: one pod at a time, and only where there is room."""
        requested = spec.request(RESOURCE)
        async with self._scheduler:
            await self._node.stage.kubelet.wait_until(
                lambda kubelet: min(kubelet.schedulable(RESOURCE), self._node.free()) >= requested, FOR_EVER
            )
            return self._node.create(spec)

    async def _under_way(self, pod: EmulatedPod) -> bool:
        """Return whether all of its containers have started once; a pod that the kubelet refused is deleted."""
        try:
            await pod.wait(is_under_way, FOR_EVER)
        except TimeoutError as error:
            self._node.waited.append(str(error))
            await self._node.delete(pod, grace=0.0)
            return False
        if pod.reason == "UnexpectedAdmissionError":
            self.turned_away += 1
            await self._node.delete(pod, grace=0.0)
            await asyncio.sleep(self._rng.uniform(0.1, 0.4))
            return False
        self.started += 1
        if self._progress and self.started % 100 == 0:
            print(f"  {self.started} pods", flush=True)
        return True

    async def _restarted(self, pod: EmulatedPod, times: int) -> None:
        with suppress(TimeoutError, PodEnded):  # the kubelet's back-off, or a kubelet that refused the pod
            await pod.wait(lambda status: status.containers["main"].restarts >= times or status.phase.terminal, 10.0)

    async def _over(self, pod: EmulatedPod) -> None:
        try:
            await pod.wait(lambda status: status.phase.terminal or status.gone, FOR_EVER)
        except TimeoutError as error:
            self._node.waited.append(str(error))


async def soak(
    records: Path,
    *,
    pods: int,
    devices: int,
    seed: int,
    memory: str = "1MiB",
    pace: tuple[int, int] = (2, 6),
    acts: Set[str] = frozenset(),
    progress: bool = False,
) -> Outcome:
    """Run one soak, from the first pod to the verdict.

    Args:
        pace: minimum and maximum of pods between two acts of the weather: their number does not depend on the machine's
            speed.
        acts: acts of the weather that have to happen; until then more pods come, up to four times as many.
    """
    began = time.monotonic()
    async with watched_node(records, devices=devices, memory=memory) as node:
        kubelet = node.stage.kubelet
        service, plugin = (
            Supervisor(each, _chance(seed, each.log.name)) for each in (node.stage.service, node.stage.plugin)
        )
        lives = Lives(node.socket, seed, devices=devices)
        lanes = Lanes(node, lives, pods, _chance(seed, "lanes"), lambda: acts <= weather.acts.keys(), progress=progress)
        chance = _chance(seed, "weather")

        async def pause() -> None:
            enough_pods = lanes.count + chance.randint(*pace)
            with suppress(TimeoutError):
                await kubelet.wait_until(lambda _: lanes.count >= enough_pods, LULL)

        weather = Weather(node.stage, service, plugin, chance, node.socket, node.kubelet_restarts, node.strike, pause)
        node.unauthorized = weather.unauthorized
        supervisors = [asyncio.create_task(each.run()) for each in (service, plugin)]
        try:
            await _in_all_weathers(weather, [lanes.run() for _ in range(devices + devices // 2)])
            await node.settle()
            await node.roll_call()
            await node.settle()
        finally:
            for each in supervisors:
                each.cancel()
            await asyncio.gather(*supervisors, return_exceptions=True)
        node.exits = {"service": list(service.deaths.elements()), "plugin": list(plugin.deaths.elements())}
        verdict = await node.judge()
        verdict.counts["pods that the kubelet would not have"] = lanes.turned_away
        verdict.counts["lives of the service"], verdict.counts["lives of the plugin"] = service.lives, plugin.lives
    spent = tuple(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Outcome(seed, verdict, weather.acts, lanes.kinds, time.monotonic() - began, (spent[0], spent[1]))


async def _in_all_weathers(weather: Weather, lanes: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all lanes to their end; then undo all faults and stop the weather."""
    enough = asyncio.Event()
    blowing = asyncio.create_task(weather.run(enough))
    living = asyncio.create_task(_all_of(lanes))
    try:
        await asyncio.wait({blowing, living}, return_when=asyncio.FIRST_COMPLETED)
        if not blowing.done():  # only an error ends it before the lanes
            await living
    finally:
        living.cancel()
        await asyncio.wait({living})
        enough.set()
        await blowing
        await weather.calm()


async def _all_of(lanes: Sequence[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(lane)


def _chance(seed: int, whose: str) -> random.Random:
    """Return a separate generator for each user, so that draws do not depend on the timing of others."""
    return random.Random(f"{seed}/{whose}")


async def _until_sigterm(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run ``work``; SIGTERM cancels it like an interrupt, and what it has started ends with it."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def report(outcome: Outcome) -> str:
    """Return the summary in readable form."""
    lines = [f"{count:>12,}  {what}" for what, count in outcome.verdict.counts.items()]
    lines += [f"{count:>12,}  weather: {what}" for what, count in outcome.weather.most_common()]
    lines += [f"{count:>12,}  pods: {what}" for what, count in outcome.kinds.most_common()]
    own, others = outcome.processor
    lines += [
        f"{outcome.seconds:>12.0f}  seconds; of processor time {own:.0f} (kubelet and soak), {others:.0f} (the others)"
    ]
    lines += [f"{len(outcome.verdict.breaches):>12,}  breaches"]
    lines += [f"  ✗ {each}" for each in outcome.verdict.breaches[:50]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 on any breach."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pods", type=int, default=2000, help="how many are to start (default 2000)")
    parser.add_argument("--devices", type=int, default=16, help="simulated GPUs (default 16)")
    parser.add_argument("--memory", default="1MiB", help="of each device (default 1MiB)")
    parser.add_argument("--seed", type=int, help="of everything random; printed, and drawn when not given")
    parser.add_argument("--records", type=Path, metavar="DIR", help="keep logs, facts and ledger here in any case")
    options = parser.parse_args(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    print(f"{options.pods} pods over {options.devices} devices; --seed {seed} makes the same ones again.", flush=True)
    records = options.records or Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    records.mkdir(parents=True, exist_ok=True)
    settings = {"pods": options.pods, "devices": options.devices, "seed": seed, "memory": options.memory}
    outcome = asyncio.run(_until_sigterm(soak(records, **settings, progress=True)))
    print(report(outcome))
    if outcome.verdict.breaches or options.records:
        print(f"Logs, facts and ledger are in {records}.")
    else:
        shutil.rmtree(records)
    return 1 if outcome.verdict.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
