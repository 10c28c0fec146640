"""The record of fuzzing runs: one line for each run of a target, summed over the runs of one commit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.target import Target

__all__ = ["Run", "read_runs", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one target.

    Attributes:
        accepted: inputs that the parser accepted.
        cpu_seconds: CPU time for the inputs alone.
        grown_bytes: resident memory at the end, less that after the first inputs.
        reached, lines: lines of the modules under test that all inputs of the corpus reach, and how many there are.
        finding: how the input that ended the run is repeated; empty when there was none.
    """

    target: str
    commit: str
    seed: int
    inputs: int
    accepted: int
    cpu_seconds: float
    grown_bytes: int
    reached: int
    lines: int
    finding: str = ""

    def __str__(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_runs(record: Path) -> list[Run]:
    """Return the runs in ``record``, oldest first; none when it does not exist."""
    if not record.exists():
        return []
    return [Run(**json.loads(line)) for line in record.read_text().splitlines()]


def report(runs: Iterable[Run], targets: Sequence[Target], commit: str) -> str:
    """Return the sums of ``commit``, as a table in Markdown."""
    of_commit = [each for each in runs if each.commit == commit]
    rows = [
        (
            f"Fuzzing of {commit}: {sum(each.inputs for each in of_commit):,} inputs, "
            f"{sum(bool(each.finding) for each in of_commit)} findings."
        ),
        "",
        "| target | inputs | goal | accepted | inputs per CPU second | lines reached | growth | findings |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for target in targets:
        found = [each for each in of_commit if each.target == target.name]
        if not found:
            rows.append(f"| {target.name} | 0 | {target.goal:,} | | | | | |")
            continue
        inputs, seconds = sum(each.inputs for each in found), sum(each.cpu_seconds for each in found)
        reached = max(found, key=lambda each: each.reached)
        rows.append(
            f"| {target.name} | {inputs:,} | {target.goal:,} | {sum(each.accepted for each in found) / max(inputs, 1):.0%} | "
            f"{inputs / max(seconds, 1e-9):,.0f} | {reached.reached} of {reached.lines} | "
            f"{max(each.grown_bytes for each in found) / 2**20:.1f} MiB | {sum(bool(each.finding) for each in found)} |"
        )
    return "\n".join(rows)
