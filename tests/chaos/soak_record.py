"""The record of a soak over many rounds: one line of JSON a round, summed over the rounds of one commit.

A round is one node: a seed, the service with a device plugin or a DRA driver, and pods until enough processes were killed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Round", "append", "growth", "read", "total"]

_DIRTY = {"foreign bytes", "touched memory", "two at once", "no gate"}
_LOST = {"ledger", "leak", "accounts"}
_NEVER_STARTED = {"waits for ever"}


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in one round.

    Attributes:
        daemon: beside the service: ``plugin`` or ``DRA driver``.
        slopes: daemon → growth within its lives, for each thousand container starts.
        processor: seconds of CPU time of all processes.
    """

    commit: str
    seed: int
    daemon: str
    pods: int
    starts: int
    hand_overs: int
    seconds: int
    processor: int
    kills: Mapping[str, int] = field(default_factory=dict)
    weather: Mapping[str, int] = field(default_factory=dict)
    slopes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    breaches: Sequence[str] = ()

    def breaches_of(self, kinds: set[str]) -> int:
        return sum(each.partition(":")[0] in kinds for each in self.breaches)

    def dump(self) -> str:
        """Return its line."""
        return json.dumps(asdict(self))


def append(path: Path, each: Round) -> None:
    """Append a round to a record."""
    with path.open("a") as file:
        file.write(each.dump() + "\n")


def read(path: Path, commit: str) -> list[Round]:
    """Return the rounds of one commit; none where there is no record."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [each for each in (Round(**json.loads(line)) for line in lines) if each.commit == commit]


def total(rounds: Iterable[Round]) -> str:
    """Return the sums over rounds in readable form."""
    every = list(rounds)
    known = _DIRTY | _LOST | _NEVER_STARTED
    kills: Counter[str] = Counter()
    weather: Counter[str] = Counter()
    for each in every:
        kills.update(each.kills)
        weather.update(each.weather)
    breaches = sum(len(each.breaches) for each in every)
    counts = {
        "rounds": len(every),
        "kills": kills.total(),
        **{f"kills of the {kind}".replace("the driver's", "a driver's"): count for kind, count in kills.most_common()},
        "pods": sum(each.pods for each in every),
        "container starts": sum(each.starts for each in every),
        "hand-overs": sum(each.hand_overs for each in every),
        "dirty hand-overs": sum(each.breaches_of(_DIRTY) for each in every),
        "lost records": sum(each.breaches_of(_LOST) for each in every),
        "pods that never started": sum(each.breaches_of(_NEVER_STARTED) for each in every),
        "other breaches": breaches - sum(each.breaches_of(known) for each in every),
        **{f"weather: {name}": count for name, count in weather.most_common() if "killed" not in name},
        "seconds": sum(each.seconds for each in every),
        "seconds of CPU time": sum(each.processor for each in every),
    }
    return "\n".join([*(f"{count:>12,}  {what}" for what, count in counts.items()), *growth([x.slopes for x in every])])


def growth(slopes: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return a line for each daemon with its mean growth; none for a daemon whose lives were too short."""
    lines = []
    for daemon in sorted({daemon for each in slopes for daemon in each}):
        samples = [each[daemon] for each in slopes if each.get(daemon)]
        starts = sum(each["starts"] for each in samples)
        if starts:
            memory, descriptors = (
                sum(each[what] * each["starts"] for each in samples) / starts for what in ("memory", "descriptors")
            )
            lines.append(
                f"              {daemon}: {memory / 1024:+,.0f} KiB and {descriptors:+.2f} descriptors "
                f"for each thousand container starts within a life ({starts:,.0f} starts)"
            )
    return lines
