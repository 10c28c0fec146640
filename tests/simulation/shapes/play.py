"""One play of a script: a pod follows its life, one component is restarted, and another tenant's pod comes after it.

The node's laws judge, at every start and every read. At the end of every wait, everything that should run has to run: a
pod that waits for longer than anything takes is never started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from scrubber.domain.assignment import Pod
from scrubber.domain.errors import ScrubberError
from tests.simulation.life import start_outside_service
from tests.simulation.shapes.kubelet import RESOURCES, Container, ShapedPod, State
from tests.simulation.shapes.node import ShapedCluster
from tests.simulation.shapes.shape import Box, Component, Device, Ending, Kind, Policy, Script, Shape, Tempo
from tests.simulation.timeline import Livelock, VirtualLoop

__all__ = ["Outcome", "play"]

LONGEST = 120.0
"""Seconds after which a waiting pod counts as waiting forever: every cause has passed, and the kubelet has retried
repeatedly."""
LASTS = {Tempo.STEADY: 2.4, Tempo.STILLBORN: 2.4, Tempo.QUICK: 0.1}
"""Seconds that a container runs before it ends."""
LIVES_ON = 4.0
"""Seconds for which a pod that was deleted by force lives on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a play.

    Attributes:
        wrong: the first failure; None if there is none.
        events: descriptions of the events up to the end of the pod and of the next one.
        seconds: of virtual time.
    """

    wrong: str | None
    events: tuple[str, ...] = field(default=(), repr=False)
    seconds: float = 0.0


def play(script: Script, *, listen: Callable[[float, str], None] | None = None) -> Outcome:
    """Play ``script`` from the beginning.

    Args:
        listen: called with every event and its time.
    """
    loop = VirtualLoop()
    asyncio.set_event_loop(None)
    player: _Player | None = None
    wrong: str | None = None
    try:

        async def all_of_it() -> None:
            nonlocal player
            player = _Player(script, listen)
            try:
                await player.play()
            finally:
                await player.cluster.end()

        try:
            loop.run_until_complete(all_of_it())
        except (AssertionError, Livelock) as error:
            wrong = str(error) or type(error).__name__
        seconds = loop.time()
        unretrieved = loop.unretrieved
    finally:
        loop.close()
    assert player is not None
    breaches = player.cluster.laws.breaches
    wrong = breaches[0] if breaches else wrong or (unretrieved[0] if unretrieved else None)
    return Outcome(wrong, tuple(player.events), seconds)


class _Never(AssertionError):
    """An expected event never happens."""


class _Player:
    def __init__(self, script: Script, listen: Callable[[float, str], None] | None) -> None:
        self._script = script
        self._listen = listen
        self.events: list[str] = []
        self._restarted = False
        self.cluster = ShapedCluster(_device_counts(script.shape), self._happened, str(script))
        self.cluster.runs = self._runs

    def _happened(self, what: str) -> None:
        self.events.append(what)
        if self._listen is not None:
            self._listen(self.cluster.clock.monotonic(), what)
        restart = self._script.restart
        if restart is not None and not self._restarted and len(self.events) > restart.after:
            self._restarted = True
            if self._listen is not None:
                self._listen(self.cluster.clock.monotonic(), f"-- {restart.component} is restarted --")
            self.cluster.restart(restart.component)

    # -- the plot --------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        cluster, life = self.cluster, self._script.life
        await cluster.serve()
        await cluster.until(cluster.settled)
        self._happened("the node is ready")
        await self._settled()
        pod = await self._admitted("subject", "train-0", self._script.shape, life.policy)
        if pod is not None:
            await self._lives(pod)
            await self._ends(pod)
        self._happened("another tenant comes")
        await self._settled()
        follower = await self._admitted("follower", "serve-0", _one_of_each(self._script.shape), Policy.ALWAYS)
        if follower is not None:
            await self._all_run(follower)
        cluster.check_laws()

    async def _admitted(self, namespace: str, name: str, shape: Shape, policy: Policy) -> ShapedPod | None:
        """Admit a pod once there is a kubelet with a plugin; return None when it fails at Allocate."""
        cluster, life = self.cluster, self._script.life
        await cluster.until(lambda: cluster.plugin_up and cluster.shaped.registered and not cluster.shaped.down)
        allocated = cluster.shaped.allocate(shape)
        try:
            await cluster.allocated(allocated)
        except ScrubberError as refusal:
            raise AssertionError(f"{namespace}'s Allocate is refused: {refusal}") from refusal
        pod = cluster.shaped.take(
            Pod(namespace, name, f"uid-{len(cluster.shaped.pods) + 1:04d}"),
            shape,
            allocated,
            policy,
            pauses=life.pauses,
            stillborn=life.tempo is Tempo.STILLBORN and namespace == "subject",
        )
        self._happened(f"{namespace} is admitted")
        return pod

    async def _lives(self, pod: ShapedPod) -> None:
        """Run every container; then end each one while the others run, and wait for those that have to restart."""
        await self._all_run(pod)
        if self._script.life.ending is not Ending.COMPLETED and pod.policy is Policy.NEVER:
            return
        for box in pod.boxes:
            if box.kind is Kind.INIT or pod.over:
                continue
            await self._lasts()
            if box.state is State.RUNNING and not pod.over:
                self.cluster.shaped.ended(pod, box, 1)
            await self._all_run(pod)
        if pod.policy is Policy.ALWAYS and not pod.over:
            await self._lasts()
            for box in pod.boxes:
                self.cluster.shaped.ended(pod, box, 1)
            await self._all_run(pod)

    async def _ends(self, pod: ShapedPod) -> None:
        cluster, ending = self.cluster, self._script.life.ending
        await self._lasts()
        if pod.over:
            pass
        elif ending is Ending.DELETED:
            cluster.shaped.delete_pod(pod)
            self._happened("the pod is deleted")
        elif ending is Ending.FORCED:
            cluster.shaped.force_delete_pod(pod, LIVES_ON)
            self._happened("the pod is deleted by force")
        else:
            while not pod.over:  # a reboot restarts containers that had failed
                for box in pod.mains:
                    if box.state is State.RUNNING:
                        await self._lasts()
                        cluster.shaped.ended(pod, box, 0)
                await self._all_run(pod)
                await asyncio.sleep(0.25)
        await self._comes_true(lambda: not pod.listed, lambda: "the kubelet keeps the pod for ever")

    def _runs(self, pod: ShapedPod, box: Container) -> None:
        """An ordinary init container fails once, unless that fails the pod, and then succeeds."""
        if box.kind is not Kind.INIT:
            return
        code = int(box.runs == 1 and pod.policy is not Policy.NEVER)
        first = box.first

        async def ends() -> None:
            await asyncio.sleep(LASTS[self._script.life.tempo])
            if box.first is first:
                self.cluster.shaped.ended(pod, box, code)

        start_outside_service(ends(), f"{box.name} of {pod.uid}")

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def _lasts(self) -> None:
        await asyncio.sleep(LASTS[self._script.life.tempo])
        await self._settled()

    async def _settled(self) -> None:
        """Where only events after a restart matter, let the service complete its checks first."""
        restart = self._script.restart
        if self._restarted and restart is not None and restart.component is Component.SERVICE:
            await self.cluster.restored.wait()
            await asyncio.sleep(LASTS[Tempo.STEADY])

    async def _all_run(self, pod: ShapedPod) -> None:
        def who_waits() -> str:
            waiting = pod.waits_for
            named = next((each for each in waiting if each.refusal), waiting[0])
            return f"{pod.pod.namespace}: {named.name} never starts: {named.refusal or named.state.value}"

        await self._comes_true(lambda: not pod.waits_for, who_waits)

    async def _comes_true(self, condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        cluster = self.cluster
        ends = cluster.clock.monotonic() + LONGEST
        while not condition():
            cluster.check_laws()
            if cluster.laws.breaches:
                raise AssertionError(cluster.laws.breaches[0])
            if cluster.clock.monotonic() >= ends:
                raise _Never(otherwise())
            await asyncio.sleep(0.25)


def _device_counts(shape: Shape) -> dict[str, int]:
    """Return how many devices of each resource are needed: as many as the kubelet allocates, which passes some on."""
    device_counts: dict[str, int] = {}
    for device in dict.fromkeys(each.device for each in shape if each.device is not Device.NONE):
        kinds = [each.kind for each in shape if each.device is device]
        most = reusable = 0
        for kind in kinds:
            if reusable:
                reusable -= kind is not Kind.INIT
            else:
                most += 1
                reusable += kind is Kind.INIT
        device_counts[RESOURCES[device]] = 1 if device is Device.SHARE else most
    return device_counts


def _one_of_each(shape: Shape) -> Shape:
    """Return a pod that uses all the devices that a pod of ``shape`` had, each in a separate main container."""
    found: list[Box] = []
    for device in dict.fromkeys(each.device for each in shape if each.device is not Device.NONE):
        found += [Box(Kind.MAIN, device)] * _device_counts(shape)[RESOURCES[device]]
    return tuple(found)
