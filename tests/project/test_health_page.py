"""The page on health says of every code what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.evidence import Severity
from scrubber.domain.policy import Policy
from scrubber.domain.signal_table import Meaning

PAGE = Path(__file__).parents[2] / "docs" / "health.md"
NO_WAY = "\u2013"
ROWS = {
    row[1]: (row[2], row[3])
    for row in re.finditer(r"^\| `([a-z-]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
}


def what_follows(code: str, meaning: Meaning) -> tuple[str, str]:
    sustained = Policy().health.sustained
    match meaning.severity:
        case Severity.FAULT:
            return "quarantined", meaning.way_back.value
        case Severity.WARNING if code in sustained:
            return f"suspect; quarantined after {sustained[code] / 60:g} min", meaning.way_back.value
        case Severity.WARNING:
            return "suspect", meaning.way_back.value
        case _:
            return "noted", NO_WAY


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.meanings))
def test_the_page_says_what_follows_on_each_signal(code: str) -> None:
    assert ROWS[code] == what_follows(code, NVIDIA_SIGNALS.meanings[code])


def test_the_page_names_no_signal_that_there_is_not() -> None:
    assert ROWS.keys() - NVIDIA_SIGNALS.meanings.keys() == {"operator"}
