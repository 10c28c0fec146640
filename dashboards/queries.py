"""How the boards ask Prometheus. Every selector is built here, so that none forgets which daemons and nodes are picked.

``job`` and ``instance`` are the boards' variables. An instance is a node: both daemons of a node carry the same one.

``rate()`` and ``increase()`` see no first step of a series that begins with what it counts. Where that can be, and most of
what matters here happens once, a counter is compared with what it was before: :func:`times`, :func:`each_time`, and what
:func:`per_minute` and :func:`quantile` do for :data:`BORN_COUNTING`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = [
    "BORN_COUNTING",
    "ONE_DEVICE",
    "OUT",
    "count",
    "counted",
    "each_time",
    "fold",
    "increase",
    "of",
    "or_zero",
    "per_minute",
    "quantile",
    "quantile_of_range",
    "rate",
    "ratio",
    "times",
]

ONE_DEVICE: Final = 'device="$device"'
"""A matcher: the one device of the device board."""

OUT: Final = 'health!~"healthy|suspect"'
"""A matcher for states: out of service, whatever the reason."""

BORN_COUNTING: Final = frozenset(
    {
        "scrubber_plugin_rpc_duration_seconds",
        "scrubber_rpc_duration_seconds",
        "scrubber_scrub_duration_seconds",
        "scrubber_step_duration_seconds",
        "scrubber_tenant_quarantines_total",
        "scrubber_xids_total",
    }
)
"""Counters and histograms whose series are not there at 0 from a daemon's start: their labels' combinations are too many."""

_KNOWN_FOR: Final = "6h"
"""What was seen so long before is not new: a scraper that was away for less does not tell old things again."""


def of(metric: str, *matchers: str) -> str:
    """The series of ``metric`` that the board's variables pick; ``matchers`` are PromQL's own (``outcome="passed"``)."""
    picked = ", ".join(('job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{picked}}}"


def fold(how: str, metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """``sum``, ``min`` or ``max`` of the series of a gauge, by ``by``."""
    return f"{how}{_grouped(by)} ({of(metric, *matchers)})"


def rate(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moves in a second."""
    assert _family(metric) not in BORN_COUNTING, metric
    return f"sum{_grouped(by)} (rate({of(metric, *matchers)}[$__rate_interval]))"


def per_minute(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How often a minute a counter moves. What happens here happens a few times a minute; a second is no unit for it.

    With ``by``, only what moved within the board's time range: most codes, outcomes and reasons never come.
    """
    if _family(metric) in BORN_COUNTING:
        return f"60 * {_in_each_step(metric, *matchers, by=by)} * 1000 / $__interval_ms"
    moved = f"60 * {rate(metric, *matchers, by=by)}"
    if not by:
        return moved
    return f"{moved} and {_moved_in_range(metric, *matchers, by=by)}"


def counted(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moved since the last point of a graph, for what happens once: by the minute, one would be several.

    With ``by``, only what moved within the board's time range, as in :func:`per_minute`.
    """
    assert _family(metric) not in BORN_COUNTING, metric
    moved = _in_each_step(metric, *matchers, by=by)
    return f"{moved} and {_moved_in_range(metric, *matchers, by=by)}" if by else moved


def _moved_in_range(metric: str, *matchers: str, by: Sequence[str]) -> str:
    in_range = f"increase({of(metric, *matchers)}[$__range] @ end())"
    return f"on ({', '.join(by)}) sum{_grouped(by)} ({in_range}) > 0"


def _in_each_step(metric: str, *matchers: str, by: Sequence[str]) -> str:
    """How far a counter moved since the last point of a graph: exactly, and from 0 for a series that was not there then.

    Nothing at the first point after nobody answered: what was counted meanwhile is not of this moment.
    """
    now = of(metric, *matchers)
    moved = f"({now} - {now} offset $__interval) >= 0 or {now}"
    return f"sum{_grouped(by)} (({moved}) and on (job, instance) {of('up')} offset $__interval == 1)"


def each_time(metric: str, last: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moved since the last point of a graph, where ``last`` says that it did.

    Args:
        last: the gauge, with the same labels, that says when the counter moved for the last time. So the first time is seen, and
            also the first time after a restart that brings the counter to where it had been before.
    """
    now, moved = of(metric, *matchers), of(last, *matchers)
    before, moved_before = (f"last_over_time({each}[{_KNOWN_FOR}] offset $__interval)" for each in (now, moved))
    return f"sum{_grouped(by)} (({now} - {before} > 0 or {now}) and ({moved} unless {moved} <= {moved_before}))"


def increase(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter that was there from the start moved within the board's time range."""
    assert _family(metric) not in BORN_COUNTING, metric
    return f"sum{_grouped(by)} (increase({of(metric, *matchers)}[$__range]))"


def times(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How often something happened within the board's time range, by a counter; the first time of a series too.

    A series that is new in the range counts from 0, or as far as ``increase()`` saw it move where that is more: over restarts.
    The alerts see what is new in the same way, so that no board says 0 of what somebody was woken for.
    """
    series = of(metric, *matchers)
    moved = f"increase({series}[$__range])"
    new = f"max_over_time({series}[$__range]) unless max_over_time({series}[{_KNOWN_FOR}] offset $__range)"
    return f"sum{_grouped(by)} ({moved} > ({new}) or {new} or {moved})"


def quantile(share: float, histogram: str, *matchers: str, by: Sequence[str] = (), new: bool = False) -> str:
    """A quantile of ``histogram`` (named without ``_bucket``) as it goes, in the histogram's unit.

    Args:
        new: some of its series begin with what they count, as those of a refusal do.
    """
    buckets, grouped = f"{histogram}_bucket", (*by, "le")
    if not new and histogram not in BORN_COUNTING:
        return f"histogram_quantile({share}, {rate(buckets, *matchers, by=grouped)})"
    series = of(buckets, *matchers)
    # What was not scraped then may have been there for long: it is new only to a scraper who looked.
    looked = f"on (job, instance) {of('up')} offset $__rate_interval == 1"
    begun = f"{series} unless {series} offset $__rate_interval and {looked}"
    moved = f"sum{_grouped(grouped)} ({begun} or increase({series}[$__rate_interval]))"
    return f"histogram_quantile({share}, {moved})"


def quantile_of_range(share: float, histogram: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """A quantile over the whole time range of the board, as one number, or one by ``by``."""
    return f"histogram_quantile({share}, {increase(f'{histogram}_bucket', *matchers, by=(*by, 'le'))})"


def count(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How many series there are, by ``by``."""
    return fold("count", metric, *matchers, by=by)


def or_zero(few: str, of_all: str) -> str:
    """``few``, and 0 where there are none although there is something to count: no data and none are two answers."""
    return f"{few} or 0 * {of_all}"


def ratio(part: str, whole: str) -> str:
    """``part`` of ``whole``: 0 where no part was ever seen; nothing, not NaN, where the whole is nothing."""
    return f"({or_zero(part, whole)}) / ({whole} > 0)"


def _family(metric: str) -> str:
    for part in ("_bucket", "_count", "_sum"):
        metric = metric.removesuffix(part)
    return metric


def _grouped(by: Sequence[str]) -> str:
    return f" by ({', '.join(by)})" if by else ""
