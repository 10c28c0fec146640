"""How often the kubelet may be asked, so that nobody else on the node is turned away because of us.

The kubelet answers 100 questions a second with a burst of 10 to the whole node together: monitoring asks it too, now and
then. Most of that is ours when many pods start at once, never all of it; and one that says that it is asked too often is left alone for longer each time.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["RateLimiter", "backoff_delays"]

_FIRST_DELAY = 0.02
_MAX_DELAY = 0.5


class RateLimiter:
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
        self._tokens = burst
        self._last: float | None = None

    def reserve(self, now: float) -> float:
        """Take one question; answers the seconds to wait before it is asked.

        Args:
            now: monotonic seconds.
        """
        if self._last is not None:
            self._tokens = min(self._burst, self._tokens + max(now - self._last, 0.0) * self._rate)
        self._last = now
        self._tokens -= 1
        return max(-self._tokens / self._rate, 0.0)


def backoff_delays() -> Iterator[float]:
    """Seconds to leave a kubelet alone that said it is asked too often: twice as long each time, up to half a second."""
    pause = _FIRST_DELAY
    while True:
        yield pause
        pause = min(pause * 2, _MAX_DELAY)
