"""Disruption budgets: which pods they protect from evictions.

Promise: a budget counts the pods that are running now. There is no disruption controller, whose status lags behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from scrubber.emulator.cluster.resources import Json, matches_label_selector
from scrubber.emulator.cluster.status import FieldError, StatusError

HEALTHY = "Running"


def protects(budget: Json, pod: Json) -> bool:
    """Whether ``budget`` protects ``pod``; none protects a pod that does not run, or is being deleted."""
    if budget["metadata"]["namespace"] != pod["metadata"]["namespace"] or not _is_healthy(pod):
        return False
    selector = budget["spec"].get("selector")
    return selector is not None and matches_label_selector(pod, selector)


def check_budget(budget: Json, pod: Json, pods: Iterable[Json]) -> None:
    """Check that ``budget`` permits the eviction of ``pod``, which it protects.

    Raises:
        StatusError: 429, too few of ``pods`` would be left.
    """
    healthy = [each for each in pods if protects(budget, each)]
    spec = budget["spec"]
    if "maxUnavailable" in spec:
        needed = len(healthy) - _count(spec["maxUnavailable"], len(healthy))
    else:
        needed = _count(spec.get("minAvailable", 1), len(healthy))
    if len(healthy) - 1 < needed:
        name = budget["metadata"]["name"]
        cause = f"The disruption budget {name} needs {needed} healthy pods and has {len(healthy)} currently"
        message = "Cannot evict pod as it would violate the pod's disruption budget."
        raise StatusError(429, "TooManyRequests", message, causes=[FieldError("", "DisruptionBudget", cause)])


def _is_healthy(pod: Json) -> bool:
    return pod["status"].get("phase") == HEALTHY and "deletionTimestamp" not in pod["metadata"]


def _count(value: int | str, total: int) -> int:
    """Return a number of pods, or a percentage of ``total``, rounded up."""
    return value if isinstance(value, int) else math.ceil(int(value.removesuffix("%")) * total / 100)
