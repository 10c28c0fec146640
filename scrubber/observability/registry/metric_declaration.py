"""The declaration of a metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "DURATION_BUCKETS",
    "WAIT_BUCKETS",
    "MetricDeclaration",
    "MetricLabel",
    "MetricType",
    "declared_in",
]

DURATION_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Seconds. The client library's default buckets end at 10, where durations of the slow path only begin."""

WAIT_BUCKETS: Final = tuple(sorted((*DURATION_BUCKETS, 15, 20, 25)))
"""A start waits for 25 s at most: without bounds between 10 s and 30 s, 11 s and 24 s would look the same."""


class MetricType(StrEnum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """A label of a metric.

    Attributes:
        values: its known values; empty where they come from the node, or where ``remark`` says what they are. A counted
            value that is not among them is reported as ``other``.
        remark: what the values are, or what they mean; Markdown.
    """

    name: str
    values: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """A metric of a daemon.

    Attributes:
        name: as Prometheus stores it; the name of a counter ends in ``_total``.
        help: one sentence, also its ``# HELP``.
        buckets: upper bounds of a histogram.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[MetricLabel, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.labels)

    def label_values(self, name: str) -> tuple[str, ...]:
        """Return the known values of the label ``name``."""
        return next(each.values for each in self.labels if each.name == name)


def declared_in(namespace: dict[str, object]) -> tuple[MetricDeclaration, ...]:
    """Return the declarations that are constants of a module, by their names."""
    found = (each for each in namespace.values() if isinstance(each, MetricDeclaration))
    return tuple(sorted(found, key=lambda each: each.name))
