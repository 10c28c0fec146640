"""What watching a device has shown: for how long nobody held it, and whether anybody looked all the while."""

from __future__ import annotations

import math

from scrubber.ports.runtime import Clock

__all__ = ["GAP", "Lookout"]

GAP = 10.0
"""Seconds between two looks after which nobody can say any more that the device was left alone: the service stood still
(stopped, swapped out, a loop that hung), or its driver answered nobody.
"""


class Lookout:
    """One device's. Not durable: a service that starts has seen nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_since: float | None = None
        self._looked = self._attended = clock.monotonic()
        self._absent = -math.inf
        self._gap = False

    def look(self) -> None:
        """Somebody looks now: too late, if the last look was long ago."""
        self._gap = self.gap

    def saw(self, *, held: bool) -> None:
        """What a look showed."""
        self._looked = self._clock.monotonic()
        if held:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = self._looked

    def attend(self) -> None:
        """The service is awake. Told all the while, also while nobody may look because the device is scrubbed."""
        now = self._clock.monotonic()
        if now - self._attended > GAP:
            self._absent = now
        self._attended = now

    def absent_since(self, moment: float) -> bool:
        """Whether the service stood still for too long after ``moment`` (monotonic seconds)."""
        return self._absent >= moment or self._clock.monotonic() - max(self._attended, moment) > GAP

    def miss(self) -> None:
        """Something was seen and could not be put on record: as if nobody had looked."""
        self._gap = True

    def begin(self, at: float | None = None) -> None:
        """Whatever was missed before ``at`` (now) counts no more: the device was proved clean, or its gap is on record."""
        self._looked, self._gap = self._clock.monotonic() if at is None else at, False

    def granted(self) -> None:
        """Nobody was seen since."""
        self._free_since = None

    @property
    def gap(self) -> bool:
        """Whether there was a time in which nobody looked for too long."""
        return self._gap or self._clock.monotonic() - self._looked > GAP

    @property
    def free_for(self) -> float:
        """Seconds for which nobody was seen to hold the device."""
        return 0.0 if self._free_since is None else self._clock.monotonic() - self._free_since
