"""How the boards ask Prometheus. Every selector is built here, so that none forgets which daemons and nodes are picked.

``job`` and ``instance`` are the boards' variables. An instance is a node: both daemons of a node carry the same one.

``rate()`` and ``increase()`` see no first step of a series that begins with what it counts. Where that can be, and most of
what matters here happens once, a counter is compared with what it was before: :func:`occurrences`, :func:`increase_by_timestamp`, and what
:func:`per_minute` and :func:`quantile` do for :data:`NOT_INITIALIZED_AT_ZERO`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = [
    "DEVICE_MATCHER",
    "NOT_INITIALIZED_AT_ZERO",
    "OUT_OF_SERVICE_MATCHER",
    "aggregate",
    "increase",
    "increase_by_timestamp",
    "increase_per_step",
    "occurrences",
    "or_zero",
    "per_minute",
    "quantile",
    "quantile_of_range",
    "rate",
    "ratio",
    "selector",
    "series_count",
]

DEVICE_MATCHER: Final = 'device="$device"'
"""A matcher: the one device of the device board."""

OUT_OF_SERVICE_MATCHER: Final = 'health!~"healthy|suspect"'
"""A matcher for states: out of service, whatever the reason."""

NOT_INITIALIZED_AT_ZERO: Final = frozenset(
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

_NEW_SERIES_LOOKBACK: Final = "6h"
"""What was seen so long before is not new: a scraper that was away for less does not tell old things again."""


def selector(metric: str, *matchers: str) -> str:
    """The series of ``metric`` that the board's variables pick; ``matchers`` are PromQL's own (``outcome="passed"``)."""
    picked = ", ".join(('job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{picked}}}"


def aggregate(how: str, metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """``sum``, ``min`` or ``max`` of the series of a gauge, by ``by``."""
    return f"{how}{_grouped(by)} ({selector(metric, *matchers)})"


def rate(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moves in a second."""
    assert _family(metric) not in NOT_INITIALIZED_AT_ZERO, metric
    return f"sum{_grouped(by)} (rate({selector(metric, *matchers)}[$__rate_interval]))"


def per_minute(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How often a minute a counter moves. What happens here happens a few times a minute; a second is no unit for it.

    With ``by``, only what moved within the board's time range: most codes, outcomes and reasons never come.
    """
    if _family(metric) in NOT_INITIALIZED_AT_ZERO:
        return f"60 * {_increase_per_step(metric, *matchers, by=by)} * 1000 / $__interval_ms"
    moved = f"60 * {rate(metric, *matchers, by=by)}"
    if not by:
        return moved
    return f"{moved} and {_moved_in_range(metric, *matchers, by=by)}"


def increase_per_step(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moved since the last point of a graph, for what happens once: by the minute, one would be several.

    With ``by``, only what moved within the board's time range, as in :func:`per_minute`.
    """
    assert _family(metric) not in NOT_INITIALIZED_AT_ZERO, metric
    moved = _increase_per_step(metric, *matchers, by=by)
    return f"{moved} and {_moved_in_range(metric, *matchers, by=by)}" if by else moved


def _moved_in_range(metric: str, *matchers: str, by: Sequence[str]) -> str:
    in_range = f"increase({selector(metric, *matchers)}[$__range] @ end())"
    return f"on ({', '.join(by)}) sum{_grouped(by)} ({in_range}) > 0"


def _increase_per_step(metric: str, *matchers: str, by: Sequence[str]) -> str:
    """How far a counter moved since the last point of a graph: exactly, and from 0 for a series that was not there then.

    Nothing at the first point after nobody answered: what was counted meanwhile is not of this moment.
    """
    now = selector(metric, *matchers)
    moved = f"({now} - {now} offset $__interval) >= 0 or {now}"
    return f"sum{_grouped(by)} (({moved}) and on (job, instance) {selector('up')} offset $__interval == 1)"


def increase_by_timestamp(metric: str, last: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter moved since the last point of a graph, where ``last`` says that it did.

    Args:
        last: the gauge, with the same labels, that says when the counter moved for the last time. So the first time is seen, and
            also the first time after a restart that brings the counter to where it had been before.
    """
    now, moved = selector(metric, *matchers), selector(last, *matchers)
    before, moved_before = (
        f"last_over_time({each}[{_NEW_SERIES_LOOKBACK}] offset $__interval)" for each in (now, moved)
    )
    return f"sum{_grouped(by)} (({now} - {before} > 0 or {now}) and ({moved} unless {moved} <= {moved_before}))"


def increase(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How far a counter that was there from the start moved within the board's time range."""
    assert _family(metric) not in NOT_INITIALIZED_AT_ZERO, metric
    return f"sum{_grouped(by)} (increase({selector(metric, *matchers)}[$__range]))"


def occurrences(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How often something happened within the board's time range, by a counter; the first time of a series too.

    A series that is new in the range counts from 0, or as far as ``increase()`` saw it move where that is more: over restarts.
    The alerts see what is new in the same way, so that no board says 0 of what somebody was woken for.
    """
    series = selector(metric, *matchers)
    moved = f"increase({series}[$__range])"
    new = f"max_over_time({series}[$__range]) unless max_over_time({series}[{_NEW_SERIES_LOOKBACK}] offset $__range)"
    return f"sum{_grouped(by)} ({moved} > ({new}) or {new} or {moved})"


def quantile(share: float, histogram: str, *matchers: str, by: Sequence[str] = (), new: bool = False) -> str:
    """A quantile of ``histogram`` (named without ``_bucket``) as it goes, in the histogram's unit.

    Args:
        new: some of its series begin with what they count, as those of a refusal do.
    """
    buckets, grouped = f"{histogram}_bucket", (*by, "le")
    if not new and histogram not in NOT_INITIALIZED_AT_ZERO:
        return f"histogram_quantile({share}, {rate(buckets, *matchers, by=grouped)})"
    series = selector(buckets, *matchers)
    # What was not scraped then may have been there for long: it is new only to a scraper who looked.
    looked = f"on (job, instance) {selector('up')} offset $__rate_interval == 1"
    begun = f"{series} unless {series} offset $__rate_interval and {looked}"
    moved = f"sum{_grouped(grouped)} ({begun} or increase({series}[$__rate_interval]))"
    return f"histogram_quantile({share}, {moved})"


def quantile_of_range(share: float, histogram: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """A quantile over the whole time range of the board, as one number, or one by ``by``."""
    return f"histogram_quantile({share}, {increase(f'{histogram}_bucket', *matchers, by=(*by, 'le'))})"


def series_count(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """How many series there are, by ``by``."""
    return aggregate("count", metric, *matchers, by=by)


def or_zero(part: str, whole: str) -> str:
    """``part``, and 0 where there are none although there is something to count: no data and none are two answers."""
    return f"{part} or 0 * {whole}"


def ratio(part: str, whole: str) -> str:
    """``part`` of ``whole``: 0 where no part was ever seen; nothing, not NaN, where the whole is nothing."""
    return f"({or_zero(part, whole)}) / ({whole} > 0)"


def _family(metric: str) -> str:
    for part in ("_bucket", "_count", "_sum"):
        metric = metric.removesuffix(part)
    return metric


def _grouped(by: Sequence[str]) -> str:
    return f" by ({', '.join(by)})" if by else ""
