"""Pod shapes and their lives: all of them, except those that are equivalent to others.

A shape is the containers of one pod, in the order of their start. A life specifies how its containers and the pod end,
a restart which component is restarted after which event. All three together are a :class:`Script`, which is written in
one line, and parsed from it: ``iG s- mG | Always deleted steady | service@7``.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = [
    "Box",
    "Component",
    "Device",
    "Ending",
    "Kind",
    "Life",
    "Policy",
    "Restart",
    "Script",
    "Shape",
    "Tempo",
    "lives_of",
    "shapes_of",
    "some_shapes_of",
    "written",
]


class Kind(StrEnum):
    """Kind of a container."""

    INIT = "i"
    """An ordinary init container: it runs to its end before the next one starts."""
    SIDECAR = "s"
    """A native sidecar: an init container with ``restartPolicy: Always``."""
    MAIN = "m"


class Device(StrEnum):
    """The device that a container requests."""

    NONE = "-"
    GPU = "G"
    """A whole GPU. The kubelet passes the one of an ordinary init container on to a later container that requests
    one."""
    OTHER = "O"
    """A whole GPU of another resource, therefore never the one of a container with ``G``."""
    SHARE = "S"
    """A share of a GPU that all containers with ``S`` share."""


@dataclass(frozen=True, slots=True)
class Box:
    """One container of a shape."""

    kind: Kind
    device: Device

    def __str__(self) -> str:
        return f"{self.kind}{self.device}"


Shape = tuple[Box, ...]


class Policy(StrEnum):
    """The pod's restart policy."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


class Ending(StrEnum):
    """How the pod ends."""

    DELETED = "deleted"
    FORCED = "forced"
    """Deleted by force: its devices are free at once, and its containers live on for their grace period."""
    COMPLETED = "completed"
    """Its main containers end permanently."""


class Tempo(StrEnum):
    """How long a container runs before it ends."""

    STEADY = "steady"
    """Longer than two checks of the service take."""
    QUICK = "quick"
    """It ends before the service checks."""
    STILLBORN = "stillborn"
    """Like steady; but the first start of every container with a device fails after PreStart was answered."""


@dataclass(frozen=True, slots=True)
class Life:
    """The life of a pod, independent of its containers.

    Attributes:
        pauses: number of processes of the sandbox.
    """

    policy: Policy
    ending: Ending
    tempo: Tempo = Tempo.STEADY
    pauses: int = 1

    def __str__(self) -> str:
        more = "" if self.pauses == 1 else f" pauses={self.pauses}"
        return f"{self.policy} {self.ending} {self.tempo}{more}"


class Component(StrEnum):
    """The component that is restarted."""

    SERVICE = "service"
    """Killed and back at once; the pod's next event comes once the service has completed its first checks."""
    SERVICE_AWAY = "service-away"
    """Killed and away for a while, during which the pod lives on."""
    PLUGIN = "plugin"
    """Away for some seconds, during which the pod lives on."""
    KUBELET = "kubelet"
    """The plugin registers before the kubelet takes over its pods; the pod lives on meanwhile."""
    UNREGISTERED = "kubelet-unregistered"
    """Like ``kubelet``, but the plugin registers late: until then containers start without PreStart."""
    NODE = "node"
    """A reboot: every process ends."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of ``component`` right after event number ``after`` of the play, from 0."""

    component: Component
    after: int

    def __str__(self) -> str:
        return f"{self.component}@{self.after}"


@dataclass(frozen=True, slots=True)
class Script:
    """One play."""

    shape: Shape
    life: Life
    restart: Restart | None = None

    def __str__(self) -> str:
        return f"{written(self.shape)} | {self.life} | {self.restart or 'no restart'}"

    @classmethod
    def read(cls, line: str) -> Script:
        """Parse a script from its one-line form."""
        containers, life, restart = (each.strip() for each in line.split("|"))
        policy, ending, tempo, *more = life.split()
        pauses = int(more[0].removeprefix("pauses=")) if more else 1
        found = re.fullmatch(r"([a-z-]+)@(\d+)", restart)
        return cls(
            tuple(Box(Kind(each[0]), Device(each[1])) for each in containers.split()),
            Life(Policy(policy), Ending(ending), Tempo(tempo), pauses),
            None if found is None else Restart(Component(found[1]), int(found[2])),
        )

    def restarted(self, component: Component, after: int) -> Script:
        return replace(self, restart=Restart(component, after))


def written(shape: Shape) -> str:
    return " ".join(map(str, shape))


def shapes_of(containers: int) -> Iterator[Shape]:
    """Yield every shape of ``containers`` containers that is not equivalent to another one.

    Omitted are those without any device, about which the service gets no requests, and of two that differ only in
    exchanging ``G`` and ``O`` throughout the one in which ``O`` comes first: both are whole GPUs.
    """
    for inits in range(containers):
        for kinds in itertools.product((Kind.INIT, Kind.SIDECAR), repeat=inits):
            for devices in itertools.product(Device, repeat=containers):
                whole = [each for each in devices if each in (Device.GPU, Device.OTHER)]
                if set(devices) != {Device.NONE} and whole[:1] != [Device.OTHER]:
                    mains = (Kind.MAIN,) * (containers - inits)
                    yield tuple(Box(*each) for each in zip((*kinds, *mains), devices, strict=True))


def some_shapes_of(containers: int, seed: int) -> Iterator[Shape]:
    """Yield shapes of ``containers`` containers in an order given by ``seed``, endlessly."""
    everything = list(shapes_of(containers))
    rng = random.Random(f"{seed}/{containers}")
    while True:
        yield from rng.sample(everything, len(everything))


def lives_of(shape: Shape) -> Iterator[Life]:
    """Yield every life of ``shape`` that is not equivalent to another one.

    The restart policy matters only when a container has ended, or the node was rebooted. Under Always, containers fail
    and are restarted, until the pod is deleted; under OnFailure they fail and are restarted, until they succeed and the
    pod is complete; under Never they end permanently, or the pod is deleted while all of them run. A pod deleted under
    OnFailure is equivalent to one under Always.
    """
    for policy, ending in (
        (Policy.ALWAYS, Ending.DELETED),
        (Policy.ALWAYS, Ending.FORCED),
        (Policy.ON_FAILURE, Ending.COMPLETED),
        (Policy.NEVER, Ending.DELETED),
        (Policy.NEVER, Ending.FORCED),
        (Policy.NEVER, Ending.COMPLETED),
    ):
        yield Life(policy, ending)
