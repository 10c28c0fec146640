"""The soak: thousands of pods over a few devices, while all components around them are killed, fail and misreport.

``python -m tests.chaos.soak --pods 2000 --devices 16 --seed N``, or ``--kills 10000 --record FILE`` (see
:mod:`tests.chaos.rounds`)

The shipped daemons run over the simulated node under the emulated kubelet. All actions of the pods and the weather are
drawn from one seed. An independent reader receives every tenant's messages and judges (:mod:`tests.chaos.reader`); this
module only causes events, and records what it did. Exit status 1 on any breach; then logs, facts and ledger are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import os
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from scrubber.emulator import playground
from scrubber.emulator.pods import EmulatedPod, PodEnded, PodStatus
from tests import forkserver
from tests.chaos import soak_record
from tests.chaos.judgement import Verdict
from tests.chaos.lives import LEAVING, End, Life, Lives
from tests.chaos.node_faults import NodeFaults
from tests.chaos.rounds import SERVICE_ENDS, run_rounds, until_input_ends
from tests.chaos.shortages import daemon_kind, has_own_pids
from tests.chaos.slopes import Slopes
from tests.chaos.soak_record import Round
from tests.chaos.storm import STORM_LIMIT, Supervisor
from tests.chaos.watched_node import FOR_EVER, WatchedNode, is_under_way, watched_node
from tests.chaos.weather import Weather
from tests.tested_commit import tested_commit

__all__ = ["Outcome", "main", "report", "soak"]

_T = TypeVar("_T")
DEVICES_OF_A_ROUND = 6
A_START = 30.0
"""Seconds for which the next kill of a daemon may wait for a container to start."""
LONGEST_STORM = 1800.0
"""Seconds, on a machine that is busy with other things."""
LULL = 3.0


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
    kills: Counter[str] = field(default_factory=Counter)
    slopes: dict[str, dict[str, float]] = field(default_factory=dict)


class Lanes:
    """Pods in several lanes, one after another: the requested number, or up to ``limit`` until ``enough``.

    Args:
        longest_wait: seconds after which a waiting pod counts as waiting forever, once nothing is killed any more.
        stormy: set while processes are killed without a pause: a start may take as long as that lasts.
    """

    def __init__(
        self,
        node: WatchedNode,
        lives: Lives,
        requested: int,
        rng: random.Random,
        enough: Callable[[], bool],
        *,
        limit: float,
        longest_wait: float,
        stormy: asyncio.Event,
        progress: bool = False,
    ) -> None:
        self._node = node
        self._lives = lives
        self._requested = requested
        self._rng = rng
        self._enough = enough
        self._limit = limit
        self._longest_wait = longest_wait
        self._stormy = stormy
        self._progress = progress
        self.count = 0
        self.started = 0
        self.turned_away = 0
        self.kinds: Counter[str] = Counter()

    async def run(self) -> None:
        """Run one lane."""
        while self.started < self._requested or (self.started < self._limit and not self._enough()):
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
        pod = await self._node.bind(life.spec, LONGEST_STORM if self._stormy.is_set() else self._longest_wait)
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

    async def _under_way(self, pod: EmulatedPod) -> bool:
        """Return whether all of its containers have started once; a pod that the kubelet refused is deleted."""
        try:
            await self._wait(pod, is_under_way)
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

    async def _wait(self, pod: EmulatedPod, condition: Callable[[PodStatus], bool]) -> None:
        while self._stormy.is_set():
            with suppress(TimeoutError):
                await pod.wait(condition, LULL)
                return
        await pod.wait(condition, self._longest_wait)

    async def _restarted(self, pod: EmulatedPod, times: int) -> None:
        with suppress(TimeoutError, PodEnded):  # the kubelet's back-off, or a kubelet that refused the pod
            await pod.wait(lambda status: status.containers["main"].restarts >= times or status.phase.terminal, 10.0)

    async def _over(self, pod: EmulatedPod) -> None:
        try:
            await self._wait(pod, lambda status: status.phase.terminal or status.gone)
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
    lull: float = LULL,
    acts: Set[str] = frozenset(),
    progress: bool = False,
    kills: int = 0,
    spare: Set[str] = frozenset(),
    only: Set[str] = frozenset(),
    dra: bool = False,
    faults: NodeFaults | None = None,
) -> Outcome:
    """Run one soak, from the first pod to the verdict.

    Args:
        pace: minimum and maximum of pods between two acts of the weather: their number does not depend on the machine's
            speed.
        lull: seconds after which the weather continues although no pod has come.
        acts: acts of the weather that have to happen; until then more pods come, up to four times as many.
        kills: have pods come until so many processes are killed, without a pause.
        spare: acts of the weather that do not happen.
        only: the acts of the weather that happen; empty: all.
        dra: have pods request devices by claims.
        faults: of the node; None: they are new.
    """
    began = time.monotonic()
    async with watched_node(records, devices=devices, memory=memory, dra=dra, faults=faults) as node:
        kubelet = node.stage.kubelet
        service, plugin = (
            Supervisor(each, _chance(seed, each.log.name)) for each in (node.stage.service, node.stage.plugin)
        )
        stormy, requested_kills = asyncio.Event(), kills
        if kills:
            stormy.set()

        def enough() -> bool:
            return acts <= weather.acts.keys() and not stormy.is_set()

        limits = (
            {"limit": float("inf"), "longest_wait": STORM_LIMIT}
            if kills
            else {"limit": 4.0 * pods, "longest_wait": FOR_EVER}
        )
        lives = Lives(node.socket, seed, devices=devices, without=LEAVING if dra else frozenset())
        lanes = Lanes(node, lives, pods, _chance(seed, "lanes"), enough, progress=progress, stormy=stormy, **limits)
        chance = _chance(seed, "weather")
        slopes = {
            daemon_kind(each): Slopes(each, lambda: node.starts, 50 if kills else 500) for each in (service, plugin)
        }

        async def pause_for_pods() -> None:
            enough_pods = lanes.count + chance.randint(*pace)
            pods_come = asyncio.create_task(kubelet.wait_until(lambda _: lanes.count >= enough_pods, lull))
            ending = asyncio.create_task(over.wait())
            await asyncio.wait({pods_come, ending}, return_when=asyncio.FIRST_COMPLETED)
            for each in (pods_come, ending):
                each.cancel()
            await asyncio.gather(pods_come, ending, return_exceptions=True)

        async def pause_briefly() -> None:
            kills = weather.kills
            if kills.total() >= requested_kills and acts <= weather.acts.keys():
                over.set()
            big = kills.total() - kills["eraser"] - kills["driver's or walker's child"]
            if big > weather.counted and chance.random() < 0.5:
                # Kills in immediate succession leave no pod the time to start, and then break nothing.
                with suppress(TimeoutError):
                    await node.wait_for_a_start(A_START)
            weather.counted = big
            await asyncio.sleep(chance.uniform(0.0, 0.25))

        over = asyncio.Event()
        weather = Weather(
            *(node.stage, service, plugin, chance, node.faults),
            *(node.socket, node.kubelet_restarts, node.strike, pause_briefly if kills else pause_for_pods),
            hurried=kills > 0,
            spare=spare,
            only=only,
        )
        node.unauthorized = weather.unauthorized
        beside = [
            asyncio.create_task(each) for each in (service.run(), plugin.run(), *(s.run() for s in slopes.values()))
        ]
        number = devices if kills else devices + devices // 2
        try:
            await _in_all_weathers(weather, [lanes.run() for _ in range(number)], over, stormy)
            await node.settle()
            await node.roll_call()
            await node.settle()
        finally:
            for each in beside:
                each.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        node.exits = {"service": list(service.deaths.elements()), "plugin": list(plugin.deaths.elements())}
        node.without_memory = weather.acts["no memory"]
        verdict = await node.judge()
        verdict.counts["pods that the kubelet would not have"] = lanes.turned_away
        verdict.counts["lives of the service"], verdict.counts["lives of the plugin"] = service.lives, plugin.lives
    own, others = (sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    if has_own_pids():
        others = _processor_of_all() - own
    return Outcome(
        *(seed, verdict, weather.acts, lanes.kinds, time.monotonic() - began, (own, others), weather.kills),
        {name: each.per_thousand_starts() for name, each in slopes.items()},
    )


def _processor_of_all() -> float:
    """Return the seconds of CPU time of all processes of this PID namespace, those that have ended included."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            ticks += sum(int(each) for each in stat.read_bytes().rpartition(b") ")[2].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _in_all_weathers(
    weather: Weather, lanes: Sequence[Coroutine[Any, Any, None]], over: asyncio.Event, stormy: asyncio.Event
) -> None:
    """Run all lanes to their end; then undo all faults and stop the weather.

    Args:
        over: ends the weather before the lanes.
        stormy: cleared when the weather has ended.
    """
    blowing = asyncio.create_task(weather.run(over))
    living = asyncio.create_task(_all_of(lanes))
    try:
        await asyncio.wait({blowing, living}, return_when=asyncio.FIRST_COMPLETED)
        if blowing.done():
            blowing.result()
            await weather.calm()
            stormy.clear()
            await living
        living.result()
    finally:
        living.cancel()
        await asyncio.wait({living})
        over.set()
        await blowing
        await weather.calm()


async def _all_of(lanes: Sequence[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(lane)


def _chance(seed: int, whose: str) -> random.Random:
    """Return a separate generator for each user, so that draws do not depend on the timing of others."""
    return random.Random(f"{seed}/{whose}")


async def _until_sigterm(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work``; SIGTERM cancels it like an interrupt, and what it has started ends with it."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def _until_input_ends(work: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_input_ends(task))
    try:
        return await task
    finally:
        watching.cancel()


def report(outcome: Outcome) -> str:
    """Return the summary in readable form."""
    lines = [f"{count:>12,}  {what}" for what, count in outcome.verdict.counts.items()]
    lines += [f"{count:>12,}  weather: {what}" for what, count in outcome.weather.most_common()]
    lines += [f"{count:>12,}  pods: {what}" for what, count in outcome.kinds.most_common()]
    own, others = outcome.processor
    lines += [
        f"{outcome.seconds:>12.0f}  seconds; of processor time {own:.0f} (kubelet and soak), {others:.0f} (the others)"
    ]
    lines += soak_record.growth([outcome.slopes])
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
    parser.add_argument("--dra", action="store_true", help="pods request devices by claims")
    parser.add_argument("--kills", type=int, default=0, help="instead of a number of pods: rounds until so many kills")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append each round; those of this commit count")
    parser.add_argument("--nodes", type=int, default=2, help="rounds at a time (default 2)")
    parser.add_argument("--round", metavar="COMMIT", help=argparse.SUPPRESS)
    parser.add_argument(
        "--spare-service", action="store_true", help="one life of the service, whose memory is measured"
    )
    options = parser.parse_args(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    records = options.records or Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    records.mkdir(parents=True, exist_ok=True)
    if options.round:
        return _one_round(options, seed, records)
    if options.kills:
        return _rounds(options, seed, records)
    print(f"{options.pods} pods over {options.devices} devices; --seed {seed} makes the same ones again.", flush=True)
    settings = {"pods": options.pods, "devices": options.devices, "seed": seed, "memory": options.memory}
    spare = SERVICE_ENDS if options.spare_service else frozenset()
    outcome = asyncio.run(_until_sigterm(soak(records, **settings, dra=options.dra, spare=spare, progress=True)))
    print(report(outcome))
    return _kept(bool(outcome.verdict.breaches), records, always=options.records is not None)


def _kept(breached: bool, records: Path, *, always: bool) -> int:
    if breached or always:
        print(f"Logs, facts and ledger are in {records}.")
    else:
        shutil.rmtree(records)
    return int(breached)


def _rounds(options: argparse.Namespace, seed: int, records: Path) -> int:
    commit = tested_commit()
    found = soak_record.read(options.record, commit) if options.record is not None else []
    print(f"Rounds on {options.nodes} nodes until {options.kills:,} kills, from --seed {seed} on.", flush=True)
    limits = {"kills": options.kills, "nodes": options.nodes, "seed": seed}
    with suppress(asyncio.CancelledError, KeyboardInterrupt):  # what was found until then counts
        work = run_rounds(found, commit=commit, record=options.record, records=records, **limits)
        asyncio.run(_until_sigterm(work))
    print(soak_record.total(found))
    return _kept(any(each.breaches for each in found), records, always=options.records is not None)


def _one_round(options: argparse.Namespace, seed: int, records: Path) -> int:
    """Write the round's result to standard output."""
    faults = NodeFaults()
    os.environ.update(faults.environment)  # the daemons are forked from a process that inherits it
    playground.start_module = forkserver.start
    settings = {
        "pods": options.pods,
        "devices": DEVICES_OF_A_ROUND,
        "seed": seed,
        "kills": options.kills,
        "faults": faults,
    }
    spare = SERVICE_ENDS if options.spare_service else frozenset()
    outcome = asyncio.run(_until_input_ends(soak(records, **settings, dra=options.dra, spare=spare)))
    counts = outcome.verdict.counts
    print(
        Round(
            commit=options.round,
            seed=seed,
            daemon="DRA driver" if options.dra else "plugin",
            pods=counts["pods started"],
            starts=counts["container starts"],
            hand_overs=counts["grants"],
            seconds=round(outcome.seconds),
            processor=round(sum(outcome.processor)),
            kills=dict(outcome.kills),
            weather=dict(outcome.weather),
            slopes=outcome.slopes,
            breaches=outcome.verdict.breaches,
        ).dump()
    )
    if not outcome.verdict.breaches:
        shutil.rmtree(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
