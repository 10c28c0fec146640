"""The page on health describes every code as the program implements it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.evidence import Severity
from scrubber.domain.health.signal_table import Classification
from scrubber.domain.policy import Policy

PAGE = Path(__file__).parents[2] / "docs" / "health.md"
NO_WAY = "\u2013"
ROWS = {
    row[1]: (row[2], row[3])
    for row in re.finditer(r"^\| `([a-z-]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
}


def what_follows(code: str, meaning: Classification) -> tuple[str, str]:
    sustained = Policy().health.quarantine_after
    match meaning.severity:
        case Severity.FAULT:
            return "quarantined", meaning.recovery_method.value
        case Severity.WARNING if code in sustained:
            return f"suspect; quarantined after {sustained[code] / 60:g} min", meaning.recovery_method.value
        case Severity.WARNING:
            return "suspect", meaning.recovery_method.value
        case _:
            return "noted", NO_WAY


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.classifications))
def test_health_page_states_the_effect_of_each_signal(code: str) -> None:
    assert ROWS[code] == what_follows(code, NVIDIA_SIGNALS.classifications[code])


def test_health_page_names_no_unknown_signal() -> None:
    assert ROWS.keys() - NVIDIA_SIGNALS.classifications.keys() == {"operator"}
