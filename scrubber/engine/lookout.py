"""What watching a device has shown: for how long nobody held it, and whether anybody looked all the while."""

from __future__ import annotations

from scrubber.ports import Clock

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
        self._looked = clock.monotonic()
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

    def begin(self) -> None:
        """Whatever was missed before counts no more: the device was proved clean just now, or its gap is on record."""
        self._looked, self._gap = self._clock.monotonic(), False

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
