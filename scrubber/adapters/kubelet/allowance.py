"""How often the kubelet may be asked, so that nobody else on the node is turned away because of us.

The kubelet answers 100 questions a second with a burst of 10 to the whole node together: monitoring asks it too, now and
then. Most of that is ours when many pods start at once, never all of it; and one that says that it is asked too often is left alone for longer each time.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Allowance", "pauses"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5


class Allowance:
    """A bucket of ``burst`` questions that fills at ``rate`` a second.

    Args:
        rate: questions a second, above 0.
        burst: questions that may follow each other at once, at least 1.
    """

    def __init__(self, *, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError("An allowance without any question allows nothing.")
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at: float | None = None

    def take(self, now: float) -> float:
        """Take one question; answers the seconds to wait before it is asked.

        Args:
            now: monotonic seconds.
        """
        if self._at is not None:
            self._left = min(self._burst, self._left + max(now - self._at, 0.0) * self._rate)
        self._at = now
        self._left -= 1
        return max(-self._left / self._rate, 0.0)


def pauses() -> Iterator[float]:
    """Seconds to leave a kubelet alone that said it is asked too often: twice as long each time, up to half a second."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * 2, _LONGEST_PAUSE)
