"""The lives of the soak's pods: each is drawn from the seed and its number alone.

The same seed therefore makes the same pods, independent of the machine's load.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from scrubber.emulator.playground import RESOURCE
from scrubber.emulator.pods import ContainerSpec, PodSpec, RestartPolicy

__all__ = ["LEAVING", "End", "Life", "Lives", "tenant"]

TENANT = Path(__file__).with_name("tenant.py")
NAMESPACES = ("team-a", "team-b", "team-c", "team-d")


class End(StrEnum):
    """How a pod ends."""

    ITSELF = "by itself"
    DELETED = "deleted"
    FORCED = "deleted by force"
    UNSTARTED = "deleted before it has started"
    KILLED = "its first process is killed"


@dataclass(frozen=True, slots=True)
class Life:
    """A pod and what is done to it. Times in seconds.

    Attributes:
        after: from its start to its end, unless it ends itself.
        grace: of its deletion.
        dying_for: how long its processes live on after a forced deletion, unless they are killed.
        restarts: of its main container, to wait for first.
        again: whether a pod of the same name follows, while its processes may still live.
    """

    kind: str
    spec: PodSpec
    end: End = End.ITSELF
    after: float = 0.0
    grace: float = 2.0
    dying_for: float = 0.0
    restarts: int = 0
    again: bool = False


def tenant(reader: Path, name: str, seconds: float | str, **words: str) -> tuple[str, ...]:
    """Return the command of a container that runs :mod:`tests.chaos.tenant`."""
    arguments = {"reader": str(reader), "name": name, "seconds": str(seconds), **words}
    return (sys.executable, "-I", "-S", str(TENANT), *(f"{key}={value}" for key, value in arguments.items()))


class Lives:
    """Pods whose tenants report to ``reader``; at most ``devices`` devices a pod; none of the kinds ``without``."""

    def __init__(
        self,
        reader: Path,
        seed: int,
        *,
        devices: int,
        shortest: float = 0.15,
        longest: float = 0.8,
        without: Set[str] = frozenset(),
    ) -> None:
        self._reader = reader
        self._seed = seed
        self._devices = devices
        self._shortest, self._longest = shortest, longest
        self._weights = {kind: weight for kind, (weight, _) in _KINDS.items() if kind not in without}

    def life(self, number: int) -> Life:
        """Return life number ``number``: always the same."""
        draw = _Draw(self, random.Random(f"{self._seed}/{number}"), number)
        (kind,) = draw.rng.choices(list(self._weights), weights=list(self._weights.values()))
        return _KINDS[kind][1](draw, kind)

    def kinds(self) -> Sequence[str]:
        return tuple(_KINDS)

    # Used by a draw

    @property
    def reader(self) -> Path:
        return self._reader

    @property
    def devices(self) -> int:
        return self._devices

    def stay(self, rng: random.Random) -> float:
        return round(rng.uniform(self._shortest, self._longest), 3)


class _Draw:
    """One pod being drawn."""

    def __init__(self, lives: Lives, rng: random.Random, number: int) -> None:
        self.rng = rng
        self._lives = lives
        self._namespace = rng.choice(NAMESPACES)
        self._name = f"p{number}"

    def container(
        self,
        name: str = "main",
        *,
        gpus: int = 1,
        seconds: str = "",
        restart: RestartPolicy = RestartPolicy.NEVER,
        **words: str,
    ) -> ContainerSpec:
        full = f"{self._namespace}/{self._name}/{name}"
        argv = tenant(self._lives.reader, full, seconds or self._lives.stay(self.rng), **words)
        return ContainerSpec(name, argv, {RESOURCE: gpus} if gpus else {}, restart=restart)

    def plain(self, name: str = "plain", *, restart: RestartPolicy = RestartPolicy.ALWAYS) -> ContainerSpec:
        """Return a container without a device that runs as long as its pod."""
        return self.container(name, gpus=0, seconds="forever", restart=restart)

    def pod(self, *containers: ContainerSpec, init: Sequence[ContainerSpec] = (), leave: bool = False) -> PodSpec:
        return PodSpec(self._name, self._namespace, containers, init, leave_children=leave)

    def after(self) -> float:
        return self._lives.stay(self.rng)

    def several(self) -> int:
        return min(self._lives.devices, self.rng.choice((2, 2, 2, 2, 3, 4)))


LEAVING = frozenset({"deleted by force, with children", "leaves a process behind", "crashes beside its child"})
"""Kinds of which a process outlives its container, against the rules of every runtime. With a claim such a process is
ended only where the service saw the container's first process, which these short lives and constant kills prevent: the
claim's release then waits for an operator."""


def _short(draw: _Draw, kind: str) -> Life:
    return Life(kind, draw.pod(draw.container(exit=draw.rng.choice(("0", "0", "3", "kill")))))


def _deleted(draw: _Draw, kind: str) -> Life:
    return Life(kind, draw.pod(draw.container(seconds="forever")), End.DELETED, draw.after())


def _deaf(draw: _Draw, kind: str) -> Life:
    grace = draw.rng.choice((0.0, 0.3))
    return Life(kind, draw.pod(draw.container(seconds="forever", deaf="yes")), End.DELETED, draw.after(), grace)


def _held(draw: _Draw, kind: str) -> Life:
    """The device is held only by a mapping, or by a descriptor in flight."""
    how = draw.rng.choice(("map", "flight"))
    return Life(kind, draw.pod(draw.container(seconds="forever", hold=how)), End.DELETED, draw.after(), 0.0)


def _forced(draw: _Draw, kind: str) -> Life:
    """Its process lives on beside the next user of its device, for longer or shorter than the policy's grace period."""
    main = draw.container(seconds="forever", deaf="yes", hold=draw.rng.choice(("fd", "map")))
    dying = draw.rng.uniform(0.1, 2.5)
    return Life(kind, draw.pod(main), End.FORCED, draw.after(), dying_for=dying, again=draw.rng.random() < 0.3)


def _forced_with_children(draw: _Draw, kind: str) -> Life:
    main = draw.container(seconds="forever", deaf="yes", leave=draw.rng.choice(("child", "escaped", "idle")))
    return Life(kind, draw.pod(main, leave=True), End.FORCED, draw.after(), dying_for=draw.rng.uniform(0.1, 2.5))


def _leaves(draw: _Draw, kind: str) -> Life:
    """A process that it leaves behind outlives the pod and has to be killed."""
    whom = draw.rng.choice(("child", "child", "escaped", "escaped,child", "idle", "forker"))
    return Life(kind, draw.pod(draw.container(leave=whom, exit=draw.rng.choice(("0", "kill"))), leave=True))


def _crashes(draw: _Draw, kind: str) -> Life:
    how = draw.rng.choice(("3", "kill"))
    main = draw.container(
        exit=how, seconds="0.15", restart=draw.rng.choice((RestartPolicy.ALWAYS, RestartPolicy.ON_FAILURE))
    )
    return Life(kind, draw.pod(main), End.DELETED, 0.1, restarts=draw.rng.choice((1, 2, 3)))


def _crashes_beside_a_child(draw: _Draw, kind: str) -> Life:
    """Processes of an earlier run are legitimate while the pod is listed; the child ends itself."""
    main = draw.container(exit="3", seconds="0.15", leave="child", life="0.8", restart=RestartPolicy.ALWAYS)
    return Life(kind, draw.pod(main, leave=True), End.DELETED, 0.1, restarts=1)


def _killed(draw: _Draw, kind: str) -> Life:
    restart = draw.rng.choice((RestartPolicy.NEVER, RestartPolicy.ALWAYS))
    main = draw.container(seconds="forever", restart=restart, leave=draw.rng.choice(("", "child", "escaped")))
    return Life(kind, draw.pod(main), End.KILLED, draw.after(), restarts=restart is RestartPolicy.ALWAYS)


def _init_then_main(draw: _Draw, kind: str) -> Life:
    init = [draw.container(f"init{number}") for number in range(draw.rng.choice((1, 2)))]
    return Life(kind, draw.pod(draw.container(), init=init))


def _several_devices(draw: _Draw, kind: str) -> Life:
    end = draw.rng.choice((End.ITSELF, End.DELETED, End.FORCED))
    seconds = "" if end is End.ITSELF else "forever"
    main = draw.container(gpus=draw.several(), seconds=seconds)
    return Life(kind, draw.pod(main), end, draw.after(), dying_for=draw.rng.uniform(0.1, 1.5))


def _two_containers(draw: _Draw, kind: str) -> Life:
    return Life(kind, draw.pod(draw.container(), draw.container("beside")))


def _sidecar(draw: _Draw, kind: str) -> Life:
    side = draw.container("side", seconds="forever", restart=RestartPolicy.ALWAYS)
    return Life(kind, draw.pod(draw.container(), init=[side]))


def _crashes_beside_a_plain_container(draw: _Draw, kind: str) -> Life:
    """The plain container is older than every start of the other one, or, where it is second, all but the first."""
    how = draw.rng.choice(("3", "kill"))
    restart = draw.rng.choice((RestartPolicy.ALWAYS, RestartPolicy.ON_FAILURE))
    both = [draw.container(exit=how, seconds="0.3", restart=restart), draw.plain(restart=restart)]
    draw.rng.shuffle(both)
    end = draw.rng.choice((End.DELETED, End.FORCED))
    dying = draw.rng.uniform(0.1, 1.5)
    return Life(kind, draw.pod(*both), end, draw.after(), dying_for=dying, restarts=draw.rng.choice((1, 2)))


def _killed_beside_a_plain_container(draw: _Draw, kind: str) -> Life:
    main = draw.container(seconds="forever", restart=RestartPolicy.ALWAYS)
    return Life(kind, draw.pod(main, draw.plain()), End.KILLED, draw.after(), restarts=1)


def _plain_sidecar(draw: _Draw, kind: str) -> Life:
    """It runs while a device passes from an init container to the main one, and while that one restarts."""
    init = [draw.container("init"), draw.plain("side")]
    if draw.rng.random() < 0.3:
        init.reverse()
    if draw.rng.random() < 0.5:
        return Life(kind, draw.pod(draw.container(), init=init))
    main = draw.container(exit="3", seconds="0.15", restart=RestartPolicy.ALWAYS)
    return Life(kind, draw.pod(main, init=init), End.DELETED, 0.1, restarts=1)


def _sidecar_that_crashes(draw: _Draw, kind: str) -> Life:
    """It has its own device, and restarts while main containers, with one and without, keep running."""
    side = draw.container("side", seconds="0.3", exit=draw.rng.choice(("3", "kill")), restart=RestartPolicy.ALWAYS)
    mains = [draw.container(seconds="forever", gpus=draw.rng.choice((0, 1))), draw.plain()]
    return Life(kind, draw.pod(*mains, init=[side]), End.DELETED, draw.after() + 0.5)


def _unstarted(draw: _Draw, kind: str) -> Life:
    end = draw.rng.choice((End.UNSTARTED, End.FORCED))
    main = draw.container(seconds="forever")
    if end is End.FORCED:
        return Life(kind, draw.pod(main), End.FORCED, 0.0, dying_for=draw.rng.uniform(0.0, 0.5))
    return Life(kind, draw.pod(main), End.UNSTARTED, draw.rng.uniform(0.0, 0.2), 0.0)


_KINDS: dict[str, tuple[int, Callable[[_Draw, str], Life]]] = {
    "ends by itself": (16, _short),
    "deleted": (10, _deleted),
    "deaf": (5, _deaf),
    "mapped or in flight": (6, _held),
    "deleted by force": (12, _forced),
    "deleted by force, with children": (5, _forced_with_children),
    "leaves a process behind": (10, _leaves),
    "crashes again and again": (8, _crashes),
    "crashes beside its child": (3, _crashes_beside_a_child),
    "killed": (6, _killed),
    "init containers": (8, _init_then_main),
    "several devices": (7, _several_devices),
    "two containers": (4, _two_containers),
    "sidecar": (4, _sidecar),
    "crashes beside a plain container": (6, _crashes_beside_a_plain_container),
    "killed beside a plain container": (3, _killed_beside_a_plain_container),
    "plain sidecar": (6, _plain_sidecar),
    "sidecar that crashes": (4, _sidecar_that_crashes),
    "deleted before its start": (3, _unstarted),
}
"""How often each kind comes, in about a hundred."""
