"""How much the searching tests try: little in every ``make test``, much in ``make property``.

Everything that is small enough to be tried completely (the tables of decisions, the graph of health states, every crash
point of a claim) is tried completely in both. The numbers below are of the searches that have no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypothesis import HealthCheck, settings

__all__ = ["CI", "DEEP", "Depth", "depth", "register_profiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The size of each search.

    Attributes:
        examples: examples of each Hypothesis test.
        stories: sequences of events in the simulated cluster.
        claim_stories: the same with resource claims.
        pod_shapes: pods of the matrix (``make pod-matrix`` plays all).
        restarts: components in the longest order of restarts within the time of a detection.
        restarts_apart: components in the longest order of restarts with time between.
        every_soft_signal: of the soft signals, every n-th goes through the histories of how long it lasts.
        starts: starts in the engine for each row of the truth table; None for all of its cases.
        weeks: weeks of a node.
        hostile_hours: number of devices and seed of each hour with a hostile tenant.
    """

    examples: int
    stories: int
    claim_stories: int
    pod_shapes: int
    restarts: int
    restarts_apart: int
    every_soft_signal: int
    starts: int | None
    weeks: int
    hostile_hours: tuple[tuple[int, int], ...]


CI: Final = Depth(
    examples=30,
    stories=48,
    claim_stories=24,
    pod_shapes=96,
    restarts=3,
    restarts_apart=2,
    every_soft_signal=5,
    starts=4,
    weeks=1,
    hostile_hours=((4, 0),),
)
DEEP: Final = Depth(
    examples=2_000,
    stories=4_800,
    claim_stories=3_200,
    pod_shapes=4_800,
    restarts=5,
    restarts_apart=3,
    every_soft_signal=1,
    starts=None,
    weeks=3,
    hostile_hours=tuple((devices, seed) for devices in (4, 8) for seed in range(3)),
)
_DEEP: Final = "deep"


def register_profiles() -> None:
    """Register Hypothesis' profiles, and load the one of ``make test``.

    Hypothesis applies no deadline, because load on a shared machine would fail a test. In ``ci`` every run uses the same
    examples, so that a new failure is caused by a change; ``deep`` uses different ones each time.
    """
    settings.register_profile(
        "ci",
        deadline=None,
        print_blob=True,
        derandomize=True,
        max_examples=CI.examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(_DEEP, parent=settings.get_profile("ci"), derandomize=False, max_examples=DEEP.examples)
    settings.load_profile("ci")


def depth() -> Depth:
    """Return the sizes of this run: those of ``--hypothesis-profile=deep``, or of ``make test``."""
    return DEEP if settings.get_current_profile_name() == _DEEP else CI
