"""PromQL queries of the boards. Every selector is built here, so that each applies the selected daemons and nodes.

``cluster``, ``job`` and ``instance`` are the boards' variables. An instance is a node: both daemons of a node have the
same one. Nodes of two clusters may have the same name, so whatever is grouped or joined by ``instance`` is also
grouped or joined by ``cluster``.

``rate()`` and ``increase()`` miss the first step of a series that starts above 0. Where that can happen, and most of
what matters here happens once, a counter is compared with its earlier value: :func:`occurrences`,
:func:`increase_by_timestamp`, and :func:`per_minute` and :func:`quantile` for :data:`NOT_INITIALIZED_AT_ZERO`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = [
    "DEVICE_MATCHER",
    "MAX_HEAT_MAP_NODES",
    "MAX_NODES",
    "MAX_ROWS",
    "NOT_INITIALIZED_AT_ZERO",
    "OUT_OF_SERVICE_MATCHER",
    "aggregate",
    "increase_by_timestamp",
    "increase_per_step",
    "occurrences",
    "or_zero",
    "over_range",
    "per_minute",
    "quantile",
    "rate",
    "ratio",
    "recorded_per_minute",
    "selector",
    "series_count",
    "top",
    "with_most_problems",
    "worst_nodes",
]

MAX_ROWS: Final = 50
"""Rows of a table, and nodes on the fleet board: a fleet has thousands of devices."""

MAX_NODES: Final = 10
"""Nodes whose devices the node board shows, if more are selected."""

MAX_HEAT_MAP_NODES: Final = 20
"""Rows of a heat map."""

DEVICE_MATCHER: Final = 'device="$device"'
"""A matcher: the one device of the device board."""

OUT_OF_SERVICE_MATCHER: Final = 'health!~"healthy|suspect"'
"""A matcher for states: out of service, for any reason."""

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
"""Counters and histograms without series at 0 from the start of a daemon: they have too many label combinations."""

_NEW_SERIES_LOOKBACK: Final = "6h"
"""A series seen this long before is not new: after a shorter absence of the scraper, old events are not reported again.
"""


def selector(metric: str, *matchers: str) -> str:
    """Return a selector for the chosen series of ``metric``; ``matchers`` are PromQL (``outcome="passed"``)."""
    picked = ", ".join(('cluster=~"$cluster"', 'job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{picked}}}"


def aggregate(how: str, metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return ``sum``, ``min`` or ``max`` of a gauge's series, grouped by ``by``."""
    return f"{how}{_grouped(by)} ({selector(metric, *matchers)})"


def rate(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return the increase of a counter per second."""
    assert _family(metric) not in NOT_INITIALIZED_AT_ZERO, metric
    return f"sum{_grouped(by)} (rate({selector(metric, *matchers)}[$__rate_interval]))"


def per_minute(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return the increase of a counter per minute, a better unit here: events occur a few times a minute.

    With ``by``, only series that increased within the board's time range: most codes, outcomes and reasons never occur.
    """
    if _family(metric) in NOT_INITIALIZED_AT_ZERO:
        return f"60 * {_increase_per_step(metric, *matchers, by=by)} * 1000 / $__interval_ms"
    moved = f"60 * {rate(metric, *matchers, by=by)}"
    if not by:
        return moved
    return f"{moved} and {_moved_in_range(metric, *matchers, by=by)}"


def increase_per_step(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return the increase of a counter since the previous point: per minute, a single event would look like several.

    With ``by``, only series that increased within the board's time range, as in :func:`per_minute`.
    """
    assert _family(metric) not in NOT_INITIALIZED_AT_ZERO, metric
    moved = _increase_per_step(metric, *matchers, by=by)
    return f"{moved} and {_moved_in_range(metric, *matchers, by=by)}" if by else moved


def _moved_in_range(metric: str, *matchers: str, by: Sequence[str]) -> str:
    in_range = f"increase({selector(metric, *matchers)}[$__range] @ end())"
    return f"on ({', '.join(by)}) sum{_grouped(by)} ({in_range}) > 0"


# See docs/decisions/0038-alerts-and-boards.md.
def _increase_per_step(metric: str, *matchers: str, by: Sequence[str]) -> str:
    """Return the exact increase of a counter since the previous point, from 0 for a series that is new.

    Empty at the first point after the target was down: what was counted meanwhile did not happen at that point.
    """
    now = selector(metric, *matchers)
    moved = f"({now} - {now} offset $__interval) >= 0 or {now}"
    return f"sum{_grouped(by)} (({moved}) and on (cluster, job, instance) {selector('up')} offset $__interval == 1)"


def increase_by_timestamp(metric: str, last: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return the increase of a counter since the previous point, where the gauge ``last`` reports one.

    Args:
        last: the gauge, with the same labels, with the time of the counter's last increase. So the first increase is
            detected, also after a restart in which the counter returns to its previous value.
    """
    now, moved = selector(metric, *matchers), selector(last, *matchers)
    before, moved_before = (
        f"last_over_time({each}[{_NEW_SERIES_LOOKBACK}] offset $__interval)" for each in (now, moved)
    )
    return f"sum{_grouped(by)} (({now} - {before} > 0 or {now}) and ({moved} unless {moved} <= {moved_before}))"


def occurrences(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return how often something happened within the board's time range, including the first event of a series.

    A series that is new in the range counts from 0, or by its ``increase()`` if that is larger, which happens with
    restarts. The alerts detect new series in the same way, so that no board shows 0 for an event that fired an alert.
    """
    series = selector(metric, *matchers)
    moved = f"increase({series}[$__range])"
    new = f"max_over_time({series}[$__range]) unless max_over_time({series}[{_NEW_SERIES_LOOKBACK}] offset $__range)"
    return f"sum{_grouped(by)} ({moved} > ({new}) or {new} or {moved})"


def quantile(share: float, histogram: str, *matchers: str, by: Sequence[str] = (), new: bool = False) -> str:
    """Return the current quantile of ``histogram`` (named without ``_bucket``), in the histogram's unit.

    Args:
        new: some of its series start above 0, as those of a refusal do.
    """
    buckets, grouped = f"{histogram}_bucket", (*by, "le")
    if not new and histogram not in NOT_INITIALIZED_AT_ZERO:
        return f"histogram_quantile({share}, {rate(buckets, *matchers, by=grouped)})"
    series = selector(buckets, *matchers)
    # A series that was not scraped before may be old: it is new only if the target was scraped at that time.
    in_range = f"on (cluster, job, instance) {selector('up')} offset $__rate_interval == 1"
    begun = f"{series} unless {series} offset $__rate_interval and {in_range}"
    moved = f"sum{_grouped(grouped)} ({begun} or increase({series}[$__rate_interval]))"
    return f"histogram_quantile({share}, {moved})"


def recorded_per_minute(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return a recorded rate per minute. With ``by``, only series that were not 0 throughout the board's time range."""
    rates = f"60 * {aggregate('sum', metric, *matchers, by=by)}"
    if not by:
        return rates
    most = f"max_over_time({selector(metric, *matchers)}[$__range] @ end())"
    return f"{rates} and on ({', '.join(by)}) max{_grouped(by)} ({most}) > 0"


def over_range(function: str, metric: str, *matchers: str) -> str:
    """Return ``max_over_time`` or another function of each series, over the time range of the board."""
    return f"{function}({selector(metric, *matchers)}[$__range])"


def series_count(metric: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Return the number of series, grouped by ``by``."""
    return aggregate("count", metric, *matchers, by=by)


def or_zero(part: str, whole: str) -> str:
    """Return ``part``, and 0 where it is missing but ``whole`` exists, which distinguishes 0 from no data."""
    return f"{part} or 0 * {whole}"


def ratio(part: str, whole: str) -> str:
    """Return ``part`` divided by ``whole``: 0 without a part; no value, not NaN, where the whole is 0."""
    return f"({or_zero(part, whole)}) / ({whole} > 0)"


def top(query: str, *, limit: int = MAX_ROWS) -> str:
    """Return the rows of a query with the largest values."""
    return f"topk({limit}, {query})"


def with_most_problems(query: str, *, limit: int = MAX_ROWS) -> str:
    """Return the part of a query that is about the selected nodes with the most problems at the end of the time range.

    A node that was scraped in the range at all is among them if no more nodes are selected.
    """
    score = f"last_over_time({selector('instance:scrubber_problems:score')}[$__range] @ end())"
    return f"{query} and on (cluster, instance) topk({limit}, sum by (cluster, instance) ({score}))"


def worst_nodes(metric: str) -> str:
    """Return a recorded metric of the :data:`MAX_HEAT_MAP_NODES` nodes with its largest values in the time range.

    Nodes on which it was 0 throughout are left out.
    """
    node = "cluster, instance"
    largest = f"max by ({node}) (max_over_time({selector(metric)}[$__range] @ end())) > 0"
    return f"max by ({node}) ({selector(metric)}) and on ({node}) topk({MAX_HEAT_MAP_NODES}, {largest})"


def _family(metric: str) -> str:
    for part in ("_bucket", "_count", "_sum"):
        metric = metric.removesuffix(part)
    return metric


def _grouped(by: Sequence[str]) -> str:
    return f" by ({', '.join(by)})" if by else ""
