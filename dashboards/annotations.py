"""Marks on every graph of what changed: restarts, versions, drivers, policies, break-glass overrides, operator actions.

Each query returns nothing while nothing changes, and one series for each kind of change, not for each node: a roll-out to a
thousand nodes is one mark at a time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from grafana_foundation_sdk.models import dashboard as model

from dashboards.panels import DATASOURCE
from dashboards.queries import selector
from dashboards.value_mappings import Colour

__all__ = ["ANNOTATIONS", "Annotation", "annotation_models"]


_BY_OPERATOR: Final = 'cause_class="operator"'
_ON_DEMAND: Final = 'trigger="on-demand"'


class Annotation(NamedTuple):
    """A kind of change.

    Attributes:
        name: its toggle at the top of a board.
        query: PromQL; a mark where it has a value.
        title: of a mark; ``{{label}}`` is replaced.
    """

    name: str
    query: str
    title: str
    colour: str


def _appeared(metric: str, *labels: str) -> str:
    """Return how many series of ``metric`` are new: not even in the hour before, so that a restart does not count."""
    series = selector(metric)
    known = f"last_over_time({series}[1h] offset $__interval)"
    node = "cluster, job, instance"
    # Without an earlier value of the node there was no change, only a new node.
    new = f"{series} unless on ({node}, {', '.join(labels)}) {known}"
    return f"count by ({', '.join(labels)}) (({new}) and on ({node}) {known})"


def _restarted(counter: str) -> str:
    """Return how many nodes have a smaller value of ``counter`` than before: it starts from 0 with its daemon."""
    now, before = (
        f"sum by (cluster, job, instance) ({selector(counter)}{offset})" for offset in ("", " offset $__interval")
    )
    return f"count ({now} < {before})"


ANNOTATIONS: Final = (
    Annotation(
        "Service restarts",
        _restarted("scrubber_ledger_commit_duration_seconds_count"),
        "Service restarted",
        Colour.IN_USE,
    ),
    Annotation(
        "Plugin restarts", _restarted("scrubber_plugin_rpc_duration_seconds_count"), "Plugin restarted", Colour.INFO
    ),
    Annotation(
        "Versions and drivers",
        _appeared("scrubber_build_info", "version", "driver"),
        "Service {{version}}, driver {{driver}}",
        Colour.CLEAN,
    ),
    Annotation(
        "Plugin versions", _appeared("scrubber_plugin_build_info", "version"), "Plugin {{version}}", Colour.CLEAN
    ),
    Annotation(
        "Policies",
        _appeared("scrubber_policy_info", "policy", "digest"),
        "Policy {{policy}} {{digest}}",
        Colour.SCRUBBING,
    ),
    Annotation(
        "Break-glass",
        f"count by (cluster) ({selector('scrubber_break_glass_active')} == 1)",
        "Break-glass override {{cluster}}",
        Colour.CONDEMNED,
    ),
    Annotation(
        "Quarantines by operators",
        "count by (cluster) (time() - "
        f"{selector('scrubber_quarantine_start_timestamp_seconds', _BY_OPERATOR)} < $__interval_ms / 1000)",
        "An operator quarantined a device {{cluster}}",
        Colour.DIRTY,
    ),
    Annotation(
        "Yields",
        "count by (cluster, requester) (time() - "
        f"{selector('scrubber_yield_start_timestamp_seconds')} < $__interval_ms / 1000)",
        "Node yielded by {{requester}} {{cluster}}",
        Colour.RECOVERING,
    ),
    Annotation(
        "Scrubs by operators",
        f"sum by (cluster) (increase({selector('scrubber_scrubs_total', _ON_DEMAND)}[$__interval])) > 0",
        "An operator ordered a scrub or a reset {{cluster}}",
        Colour.PROBATION,
    ),
)


class _PrometheusAnnotation(model.AnnotationQuery):
    """An annotation with the fields that Grafana's Prometheus data source reads."""

    def __init__(self, annotation: Annotation) -> None:
        super().__init__(
            name=annotation.name,
            datasource=DATASOURCE,
            icon_color=annotation.colour,
            expr=annotation.query,
            built_in=None,
            hide=None,
        )
        self._title = annotation.title

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"titleFormat": self._title, "step": "60s"}


def annotation_models() -> list[model.AnnotationQuery]:
    """Return the annotations of every board."""
    return [_PrometheusAnnotation(each) for each in ANNOTATIONS]
