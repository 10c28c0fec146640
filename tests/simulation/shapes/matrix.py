"""All plays, their number, and their outcomes.

A restart comes after every event of the undisturbed play. Of plays that are identical up to and at the restart, one is
played: they differ only in how the pod ends, and that is covered by the restarts that come later.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.simulation.shapes.play import Outcome, play
from tests.simulation.shapes.shape import (
    Component,
    Ending,
    Life,
    Policy,
    Script,
    Shape,
    Tempo,
    lives_of,
    shapes_of,
    some_shapes_of,
    written,
)

__all__ = [
    "KNOWN",
    "Played",
    "Tally",
    "all_scripts_of",
    "in_processes",
    "manner",
    "plays_of",
    "sample",
    "shapes_to_play",
]

KNOWN = (
    # A GPU container ends after a restart of the service, and restarts beside one without a device.
    "mG m- | Always deleted steady | service@7",
    "m- mG | Always deleted steady | service@8",
    "mG m- | Always deleted quick | service@7",
    "s- mG | Always deleted steady | service@8",
    # A main container gets the GPU of an init container while a sidecar without a device runs.
    "iG s- mG | Always deleted steady | no restart",
    "iG s- mG | Never completed steady | no restart",
    "iG s- iG mG | Always deleted steady | no restart",
    # A pod is admitted while the service is away, and its sandbox has two processes, or another container runs.
    "mG | Always deleted steady pauses=2 | service-away@0",
    "m- mG | Always deleted steady | service-away@0",
    "s- mG | Always deleted steady pauses=2 | service-away@0",
)
"""Pods that once failed to start on a healthy node."""

ENDS_WITH = "another tenant comes"
"""The event after which a play is about the next pod."""


@dataclass(frozen=True, slots=True)
class _Course:
    """A life, and the restarts to play in it.

    Attributes:
        first: how many events of it; None for all.
        next_too: whether restarts are also played while the next pod starts.
    """

    life: Life
    components: tuple[Component, ...]
    first: int | None = None
    next_too: bool = False


def plays_of(shape: Shape) -> Iterator[tuple[Script, Outcome]]:
    """Play all cases of ``shape``."""
    done: set[tuple[object, ...]] = set()
    for course in _courses(shape):
        plain = Script(shape, course.life)
        outcome = play(plain)
        yield plain, outcome
        for script in _restarts(plain, outcome.events, course, done):
            yield script, play(script)


def all_scripts_of(shape: Shape) -> Iterator[Script]:
    """Yield all cases of ``shape``."""
    done: set[tuple[object, ...]] = set()
    for course in _courses(shape):
        plain = Script(shape, course.life)
        yield plain
        yield from _restarts(plain, play(plain).events, course, done)


def _courses(shape: Shape) -> Iterator[_Course]:
    """Yield every life with every distinct restart, and some variants of the first life.

    The variants are containers that end before they are noticed, starts that fail, and a sandbox of two processes,
    where a restart of the service matters. Under Never only a reboot restarts anything. The pod after a deleted pod
    covers every case of the pod after a completed one.
    """
    for life in lives_of(shape):
        if life.policy is Policy.NEVER:
            few = (Component.NODE, Component.SERVICE) if life.ending is Ending.COMPLETED else (Component.NODE,)
            yield _Course(life, few)
        else:
            yield _Course(life, tuple(Component), next_too=life.ending is not Ending.COMPLETED)
    usual = next(lives_of(shape))
    yield _Course(replace(usual, tempo=Tempo.QUICK), (Component.SERVICE,))
    yield _Course(replace(usual, tempo=Tempo.STILLBORN), (Component.SERVICE,))
    yield _Course(replace(usual, pauses=2), (Component.SERVICE_AWAY,), first=4 + 4 * len(shape))


def _restarts(plain: Script, events: Sequence[str], course: _Course, done: set[tuple[object, ...]]) -> Iterator[Script]:
    count = len(events) if course.next_too else events.index(ENDS_WITH) if ENDS_WITH in events else len(events)
    for component in course.components:
        for after in range(count if course.first is None else min(count, course.first)):
            policy = plain.life.policy if component is Component.NODE else Policy.ALWAYS
            key = (component, policy, plain.life.tempo, plain.life.pauses, tuple(events[: after + 1]))
            if key not in done and _is_distinct(component, events[after]):
                done.add(key)
                yield plain.restarted(component, after)


def _is_distinct(component: Component, event: str) -> bool:
    """Return whether a restart of ``component`` after ``event`` differs from one after the next event.

    A request without an answer, or an answer before its delivery, ends with the node in the same way as an answered
    one; and a pod fails whose container waits for an answer of a plugin that has not registered.
    """
    requested = event.endswith("is requested") or event == "a grant is durable"
    return not (requested and component in (Component.NODE, Component.UNREGISTERED))


# See docs/decisions/0015-generated-pod-matrix.md.
def shapes_to_play(containers: Sequence[int], *, four: int = 0, seed: int = 1) -> list[Shape]:
    """Return all shapes with so many containers, and ``four`` of four, by ``seed``."""
    shapes = [shape for count in containers for shape in shapes_of(count)]
    more = some_shapes_of(4, seed)
    return shapes + [next(more) for _ in range(four)]


def sample(count: int, seed: int) -> list[Script]:
    """Return ``count`` scripts by ``seed``, evenly over sizes, lives, components and tempos; :data:`KNOWN` first."""
    rng = random.Random(f"sample/{seed}")
    everything = {size: list(shapes_of(size)) for size in (1, 2, 3, 4)}
    found = [Script.read(each) for each in KNOWN]
    while len(found) < count:
        shape = rng.choice(everything[rng.choice((2, 3, 3, 4))])
        life = rng.choice(list(lives_of(shape)))
        component = rng.choice((None, *Component))
        if component in (None, Component.SERVICE, Component.SERVICE_AWAY):
            life = replace(life, tempo=rng.choice(tuple(Tempo)), pauses=rng.choice((1, 1, 2)))
        script = Script(shape, life)
        # If the event does not come, the play stays undisturbed.
        found.append(script if component is None else script.restarted(component, rng.randrange(4 + 8 * len(shape))))
    return found


def manner(wrong: str) -> str:
    """Return the kind of a failure: names, places and times differ between plays."""
    plain = re.sub(r"uid-\d+|c\d#\d+|\bc\d\b|GPU-\d+|PID \d+|scrub-[\d.]+|\d+(\.\d+)?", "#", wrong)
    return re.sub(r"\s+", " ", plain)[:160]


@dataclass
class Tally:
    """The outcomes of plays, of any number of shapes.

    Attributes:
        wrong: by kind of failure, how many, and the shortest script with its outcome.
    """

    shapes: Counter[int] = field(default_factory=Counter)
    plays: Counter[int] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, tuple[int, str, str]] = field(default_factory=dict)

    def played(self, script: Script, outcome: Outcome) -> None:
        self.plays[len(script.shape)] += 1
        self.restarts[str(script.restart.component) if script.restart else "none"] += 1
        if outcome.wrong is not None:
            self._failed(manner(outcome.wrong), 1, str(script), outcome.wrong)

    def _failed(self, how: str, count: int, script: str, wrong: str) -> None:
        before = self.wrong.get(how, (0, script, wrong))
        shortest = min(before[1:], (script, wrong), key=lambda each: (_size(each[0]), each[0]))
        self.wrong[how] = (before[0] + count, *shortest)

    def add(self, other: Tally) -> None:
        self.shapes += other.shapes
        self.plays += other.plays
        self.restarts += other.restarts
        for how, (count, script, wrong) in other.wrong.items():
            self._failed(how, count, script, wrong)

    @property
    def failures(self) -> int:
        return sum(count for count, _, _ in self.wrong.values())

    def dump(self) -> str:
        return json.dumps([self.shapes, self.plays, self.restarts, self.wrong])

    @classmethod
    def load(cls, text: str) -> Tally:
        shapes, plays, restarts, wrong = json.loads(text)
        return cls(
            Counter({int(size): count for size, count in shapes.items()}),
            Counter({int(size): count for size, count in plays.items()}),
            Counter(restarts),
            {how: (int(count), str(script), str(why)) for how, (count, script, why) in wrong.items()},
        )

    def report(self) -> str:
        lines = [
            "| containers | shapes | plays |",
            "| --- | --- | --- |",
            *(f"| {size} | {count:,} | {self.plays[size]:,} |" for size, count in sorted(self.shapes.items())),
            f"| all | {self.shapes.total():,} | {self.plays.total():,} |",
            "",
            "| restarted | plays |",
            "| --- | --- |",
            *(f"| {component} | {count:,} |" for component, count in sorted(self.restarts.items())),
            "",
            f"{self.failures:,} plays went wrong.",
        ]
        for count, script, wrong in sorted(self.wrong.values(), reverse=True):
            lines += ["", f"- {count:,} times: {wrong}", f"  `{script}`"]
        return "\n".join(lines)


def _size(script: str) -> tuple[int, int]:
    read = Script.read(script)
    return (len(read.shape), 0 if read.restart is None else 1 + read.restart.after)


def tally(shapes: Iterable[Shape]) -> Tally:
    """Play all cases of ``shapes``, in this process."""
    found = Tally()
    for shape in shapes:
        found.shapes[len(shape)] += 1
        for script, outcome in plays_of(shape):
            found.played(script, outcome)
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """All cases of one shape, as a line of a record keeps them.

    Attributes:
        shape: as :func:`~tests.simulation.shapes.shape.written` writes it.
        commit: the commit of the tree that was tested.
    """

    shape: str
    commit: str
    tally: Tally

    def __str__(self) -> str:
        return f"{self.shape} | {self.commit} | {self.tally.dump()}\n"

    @classmethod
    def read(cls, line: str) -> Played:
        shape, commit, found = line.split(" | ", 2)
        return cls(shape, commit, Tally.load(found))


async def in_processes(shapes: Sequence[Shape], jobs: int) -> AsyncIterator[tuple[Shape, Tally]]:
    """Play all cases of ``shapes`` with ``jobs`` processes at a time; yield each shape's outcomes when it is done."""

    async def played(shape: Shape) -> tuple[Shape, Tally]:
        command = (sys.executable, "-m", "tests.simulation.shapes", "--shape", written(shape))
        async with slots:
            child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            output, _ = await child.communicate()
        if child.returncode != 0:
            raise RuntimeError(f"the plays of {written(shape)} ended with status {child.returncode}")
        return shape, Tally.load(output.decode())

    slots = asyncio.Semaphore(jobs)
    for each in asyncio.as_completed([asyncio.ensure_future(played(shape)) for shape in shapes]):
        yield await each
