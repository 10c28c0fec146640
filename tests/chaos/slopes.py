"""The growth of a daemon's memory and descriptors with the number of container starts, over all of its lives."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.storm import Supervisor

__all__ = ["Slopes", "slope"]

EVERY = 1.0


@dataclass(slots=True)
class Slopes:
    """Samples of one daemon, until :meth:`run` is cancelled.

    Attributes:
        starts: how many containers have started on the node.
        warm: container starts of a life that do not count. Imports, caches and pools fill; a service that runs undisturbed has
            54 MB after 600 starts and after 1,500.
    """

    daemon: Supervisor
    starts: Callable[[], int]
    warm: int
    _samples: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    async def run(self) -> None:
        """Sample while the daemon is past its start."""
        lives, warm = self.daemon.lives, self.starts() + self.warm
        while True:
            process = self.daemon.daemon.process
            if lives != self.daemon.lives:
                lives, warm = self.daemon.lives, self.starts() + self.warm
            if process is not None and process.returncode is None and self.starts() > warm:
                try:
                    pages = int(Path(f"/proc/{process.pid}/statm").read_bytes().split()[1])
                    descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
                except OSError:
                    pages = descriptors = 0
                if pages:
                    self._samples[lives].append((self.starts(), pages * mmap.PAGESIZE, descriptors))
            await asyncio.sleep(EVERY)

    def per_thousand_starts(self) -> dict[str, float]:
        """Return the growth of memory (bytes) and descriptors within a life; empty where no life was long enough."""
        lives = [each for each in self._samples.values() if len(each) > 1]
        starts = sum(each[-1][0] - each[0][0] for each in lives)
        if not starts:
            return {}
        memory, descriptors = (
            slope([[(float(x[0]), float(x[column])) for x in each] for each in lives]) for column in (1, 2)
        )
        return {"starts": starts, "memory": round(1000 * memory), "descriptors": round(1000 * descriptors, 2)}


def slope(groups: list[list[tuple[float, float]]]) -> float:
    """Return the slope of the line through each group that fits best, where only their heights differ."""
    above = below = 0.0
    for points in groups:
        middle_x, middle_y = (sum(each[axis] for each in points) / len(points) for axis in (0, 1))
        above += sum((x - middle_x) * (y - middle_y) for x, y in points)
        below += sum((x - middle_x) ** 2 for x, _ in points)
    return above / below if below else 0.0
