"""How the boards ask Prometheus. Every selector is built here, so that none forgets which daemons and nodes are picked.

``job`` and ``instance`` are the boards' variables. An instance is a node: both daemons of a node carry the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = [
    "ONE_DEVICE",
    "OUT",
    "count",
    "fold",
    "increase",
    "of",
    "or_zero",
    "per_minute",
    "quantile",
    "quantile_of_range",
    "rate",
    "ratio",
]

ONE_DEVICE: Final = 'device="$device"'
"""A matcher: the one device of the device board."""

OUT: Final = 'health!~"healthy|suspect"'
"""A matcher for states: out of service, whatever the reason."""


def of(metric: str, *matchers: str) -> str:
    """The series of ``metric`` that the board's variables pick; ``matchers`` are PromQL's own (``outcome="passed"``)."""
    picked = ", ".join(('job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{picked}}}"


def fold(how: str, metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """``sum``, ``min`` or ``max`` of the series of a gauge, by ``by``."""
    return f"{how}{_grouped(by)} ({of(metric, *matchers)})"


def rate(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moves in a second."""
    return f"sum{_grouped(by)} (rate({of(metric, *matchers)}[$__rate_interval]))"


def per_minute(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How often a minute a counter moves. What happens here happens a few times a minute; a second is no unit for it."""
    return f"60 * {rate(metric, *matchers, by=by)}"


def increase(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moved within the board's time range."""
    return f"sum{_grouped(by)} (increase({of(metric, *matchers)}[$__range]))"


def quantile(share: float, histogram: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """A quantile of ``histogram`` (named without ``_bucket``) as it goes, in the histogram's unit."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', *matchers, by=(*by, 'le'))})"


def quantile_of_range(share: float, histogram: str, *matchers: str) -> str:
    """A quantile over the whole time range of the board, as one number."""
    return f"histogram_quantile({share}, {increase(f'{histogram}_bucket', *matchers, by=('le',))})"


def count(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How many series there are, by ``by``."""
    return fold("count", metric, *matchers, by=by)


def or_zero(few: str, of_all: str) -> str:
    """``few``, and 0 where there are none although there is something to count: no data and none are two answers."""
    return f"{few} or 0 * {of_all}"


def ratio(part: str, whole: str) -> str:
    """``part`` of ``whole``: 0 where no part was ever seen; nothing, not NaN, where the whole is nothing."""
    return f"({or_zero(part, whole)}) / ({whole} > 0)"


def _grouped(by: Sequence[str]) -> str:
    return f" by ({', '.join(by)})" if by else ""
