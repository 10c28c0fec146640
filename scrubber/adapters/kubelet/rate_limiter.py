"""Rate limiting of requests to the kubelet, so that the service does not cause other clients to be rejected.

The kubelet serves 100 requests per second with a burst of 10 to the whole node together; monitoring also queries it
occasionally. When many pods start at once the service uses most of that, never all of it. A kubelet that reports too
many requests is retried after an increasing delay.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["RateLimiter", "backoff_delays"]

_FIRST_DELAY = 0.02
_MAX_DELAY = 0.5


class RateLimiter:
    """A bucket of ``burst`` requests that refills at ``rate`` per second.

    Args:
        rate: requests per second, above 0.
        burst: requests that may follow each other immediately, at least 1.
    """

    def __init__(self, *, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError("rate must be above 0 and burst at least 1")
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._last: float | None = None

    def reserve(self, now: float) -> float:
        """Take one request from the bucket; return the seconds to wait before sending it.

        Args:
            now: monotonic seconds.
        """
        if self._last is not None:
            self._tokens = min(self._burst, self._tokens + max(now - self._last, 0.0) * self._rate)
        self._last = now
        self._tokens -= 1
        return max(-self._tokens / self._rate, 0.0)


def backoff_delays() -> Iterator[float]:
    """Yield the seconds to wait after each rejection for too many requests: doubles each time, up to half a second."""
    pause = _FIRST_DELAY
    while True:
        yield pause
        pause = min(pause * 2, _MAX_DELAY)
