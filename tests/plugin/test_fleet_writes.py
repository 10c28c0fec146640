"""How many requests a fleet's plugins send to the API server: a number for each node, whatever happens to all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from bench.fleet_writes import Phase, measure_phases

NODES: Final = 12
RACK: Final = 4
PAGE: Final = Path(__file__).parents[2] / "docs" / "scale.md"

AT_ONCE: Final = 3
"""Requests of a node within the second in which it starts."""
START: Final = 11
"""Requests of a node within the first five minutes."""
PER_MINUTE: Final = 1.3
"""Requests of a node per minute while pods come and go."""
REFUSED: Final = 25
"""Requests of a node within five minutes in which all are refused."""


@pytest.fixture(scope="module")
def phases() -> dict[str, Phase]:
    return {phase.name: phase for phase in measure_phases(NODES, RACK)}


@pytest.mark.parametrize("name", ["first start of all plugins", "all nodes return after a power cut"])
def test_start_of_all_plugins_at_once_is_a_bounded_number_of_requests_for_each(
    phases: dict[str, Phase], name: str
) -> None:
    assert 3 * NODES <= phases[name].total <= START * NODES
    assert phases[name].peak <= AT_ONCE * NODES


def test_rack_that_returns_adds_only_the_requests_of_its_own_nodes(phases: dict[str, Phase]) -> None:
    others = (NODES - RACK) * PER_MINUTE * 5
    assert 3 * RACK <= phases["a rack returns after a power cut"].total <= START * RACK + others


def test_pods_that_come_and_go_cause_about_one_request_per_node_and_minute(phases: dict[str, Phase]) -> None:
    phase = phases["pods come and go"]
    assert 0 < phase.total <= PER_MINUTE * NODES * phase.seconds / 60


def test_requests_that_are_refused_become_rare(phases: dict[str, Phase]) -> None:
    assert NODES < phases["the API server refuses every request"].total <= REFUSED * NODES
    assert phases["the API server works again"].peak <= AT_ONCE * NODES


def test_page_on_scale_states_the_bounds() -> None:
    section = re.sub(r"\s+", " ", PAGE.read_text().partition("## Fleet")[2].partition("\n## ")[0])
    for bound in (
        f"at most {AT_ONCE} requests in its first second",
        f"at most {START} in its first five minutes",
        f"at most {PER_MINUTE} a minute",
        f"at most {REFUSED} in five minutes",
    ):
        assert bound in section, bound
