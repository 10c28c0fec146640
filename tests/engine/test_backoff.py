"""Pauses between the scrubs of a blocked device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.domain.evidence import Outcome
from scrubber.engine.device.backoff import Backoff
from tests.simulation.samples import scrub


@pytest.mark.parametrize(
    ("held", "pauses"),
    [(False, [0.25, 0.5, 1, 2, 2, 2]), (True, [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60])],
    ids=["free", "held"],
)
def test_backoff_doubles_with_each_blocked_scrub_and_lasts_longest_while_a_process_holds_the_device(
    held: bool, pauses: list[float]
) -> None:
    backoff = None
    for pause in pauses:
        backoff = Backoff.after(replace(scrub(), outcome=Outcome.BLOCKED), backoff, now=100.0)
        assert backoff is not None
        assert not backoff.is_over(100.0 + pause - 0.01, held=held)
        assert backoff.is_over(100.0 + pause, held=held)
    assert Backoff.after(replace(scrub(), outcome=Outcome.PASSED), backoff, now=200.0) is None
