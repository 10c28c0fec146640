"""A sample of the matrix of pod shapes: those that once failed to start, and others of every kind by seed.

The whole matrix: ``make pod-matrix`` (:mod:`tests.simulation.shapes`).
"""

from __future__ import annotations

import pytest

from tests.depth import depth
from tests.simulation.shapes.matrix import KNOWN, sample
from tests.simulation.shapes.play import play
from tests.simulation.shapes.shape import Script

PARTS = 8


@pytest.mark.parametrize("line", KNOWN)
def test_pod_shape_that_once_failed_to_start_starts(line: str) -> None:
    assert play(Script.read(line)).wrong is None


@pytest.mark.parametrize("part", range(PARTS))
def test_pod_of_any_shape_starts_and_only_on_clean_devices(part: int) -> None:
    for script in sample(depth().pod_shapes, seed=2)[part::PARTS]:
        outcome = play(script)
        if outcome.wrong is not None:
            again = f"python -m tests.simulation.shapes --play '{script}'"
            pytest.fail(f"{outcome.wrong}\n    {again}", pytrace=False)
