"""The record of a soak: rounds of one commit add up, and each breach is counted as what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import soak_record
from tests.chaos.slopes import slope
from tests.chaos.soak_record import Round

ROUND = Round(
    commit="a1",
    seed=7,
    daemon="plugin",
    pods=10,
    starts=20,
    hand_overs=15,
    seconds=60,
    processor=30,
    kills={"service": 3, "eraser": 97},
    weather={"service killed": 3, "disk full": 2},
    slopes={"service": {"starts": 100, "memory": 2048.0, "descriptors": 0.5}, "plugin": {}},
)
BREACHES = (
    "foreign bytes: a pod found 7",
    "ledger: rows of the audit log are missing",
    "waits for ever: pod a/b",
    "daemon: service ended 1 times with status 1",
)


def test_rounds_of_the_same_commit_add_up_over_several_runs(tmp_path: Path) -> None:
    record = tmp_path / "soak.txt"
    assert soak_record.read(record, "a1") == []
    for each in (ROUND, replace(ROUND, commit="b2", seed=8), replace(ROUND, seed=9, breaches=BREACHES)):
        soak_record.append(record, each)
    found = soak_record.read(record, "a1")
    assert [each.seed for each in found] == [7, 9]
    counts = {what: count for count, what in (line.split(maxsplit=1) for line in soak_record.total(found).splitlines())}
    assert {name: counts[name] for name in ("rounds", "kills", "kills of the eraser", "hand-overs")} == {
        "rounds": "2",
        "kills": "200",
        "kills of the eraser": "194",
        "hand-overs": "30",
    }
    assert [counts[name] for name in ("dirty hand-overs", "lost records", "pods that never started")] == ["1", "1", "1"]
    assert counts["other breaches"] == "1"
    assert counts["weather: disk full"] == "4"
    assert "service: +2 KiB and +0.50 descriptors" in soak_record.total(found)


def test_slope_is_that_of_growth_within_lives_and_not_of_differences_between_them() -> None:
    lives = [[(0.0, 100.0), (10.0, 120.0)], [(20.0, 50.0), (30.0, 70.0), (40.0, 90.0)]]
    assert slope(lives) == pytest.approx(2.0)
    assert slope([[(5.0, 1.0)]]) == 0.0
