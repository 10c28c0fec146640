"""Results of benchmarks as values: timings with their reference, amounts, and targets.

Invariant: pure; nothing here runs or reads anything. All times inside are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["Amount", "Quantiles", "TargetResult", "Timing", "growth_exponent", "quantile", "slope"]


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least ``share`` of all samples do not exceed (nearest rank).

    The result is a measured value, never an interpolated one.

    Raises:
        ValueError: no samples, or ``share`` is not in (0, 1].
    """
    if not samples:
        raise ValueError("a quantile of no samples: measure something first")
    if not 0 < share <= 1:
        raise ValueError(f"a share is above 0 and up to 1, not {share}")
    ordered = sorted(samples)
    # The small offset keeps 0.99 * 100 at rank 99 despite rounding errors.
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Summary of durations in seconds. With fewer than 100 samples ``p99`` is the worst one."""

    samples: int
    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Raises ``ValueError`` when there are no samples."""
        return cls(len(seconds), quantile(seconds, 0.5), quantile(seconds, 0.99), max(seconds))


@dataclass(frozen=True, slots=True)
class Timing:
    """A duration, and that of the reference measured alternately with it.

    Attributes:
        name: stable and hierarchical, such as ``hand-over.same-container.pods-16``.
        reference_name: description of the reference; empty when there is none.
    """

    name: str
    title: str
    measured: Quantiles
    reference: Quantiles | None = None
    reference_name: str = ""

    @property
    def ratio_p50(self) -> float | None:
        return None if self.reference is None else self.measured.p50 / self.reference.p50

    @property
    def ratio_p99(self) -> float | None:
        return None if self.reference is None else self.measured.p99 / self.reference.p99


@dataclass(frozen=True, slots=True)
class Amount:
    """A single figure: a share of a core, a size, a rate."""

    name: str
    title: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target and its result.

    Attributes:
        limit: maximum of ``measured``, in ``unit``.
        cause: why it was missed; empty while it is met.
    """

    name: str
    sentence: str
    limit: float
    measured: float
    unit: str
    cause: str = ""

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


def growth_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return how a duration grows with a size: the steepest slope between neighbours on logarithmic axes.

    0 is constant, 1 linear, 2 quadratic. A duration with a fixed part looks flatter than its growing part, so the step
    where that part dominates counts, not the average over all steps.

    Raises:
        ValueError: fewer than two sizes, or sizes that do not grow.
    """
    if len(sizes) != len(seconds) or len(sizes) < 2:
        raise ValueError("growth is between at least two sizes, each with its duration")
    steps = zip(sizes, sizes[1:], seconds, seconds[1:], strict=False)
    slopes = []
    for size, larger, before, after in steps:
        if not 0 < size < larger or min(before, after) <= 0:
            raise ValueError("sizes grow and durations are above zero")
        slopes.append(math.log(after / before) / math.log(larger / size))
    return max(slopes)


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth of ``values`` per unit of ``at``: the line with the least squares.

    Raises:
        ValueError: fewer than two different positions.
    """
    count = len(at)
    mean_at, mean = math.fsum(at) / max(1, count), math.fsum(values) / max(1, count)
    spread = math.fsum((each - mean_at) ** 2 for each in at)
    if count != len(values) or not spread:
        raise ValueError("a slope is between at least two positions, each with its value")
    return math.fsum((x - mean_at) * (y - mean) for x, y in zip(at, values, strict=True)) / spread
