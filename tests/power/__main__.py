"""Searches power cuts, of which ``make test`` tries a part: ``python -m tests.power``.

A *life* is one run of a scenario's process. For each scenario, the power is cut in a whole life, in a life after one that
was killed (before each of its operations in turn), and in a life after a power cut. The record is written to ``bench/results/power.txt``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from time import process_time

from tests.power.recording import Recorder, Result, examine
from tests.power.scenarios import SCENARIOS
from tests.tested_commit import tested_commit

_RECORD = Path(__file__).parents[2] / "bench/results/power.txt"


def _search(recorder: Recorder, scenario: str, each: int, every: int, seed: int) -> tuple[list[str], Result | None]:
    """Return a line for each kind of cut, and the first result that broke a promise."""
    lines = []
    large = len(recorder.record(scenario).operations) > 60
    whole = examine(recorder, scenario, each=each, seed=seed)
    lines.append(f"{scenario}: {whole.operations} operations, {whole.states} states after a power cut")
    if whole.broken:
        return lines, whole
    kills = range(1, whole.operations, every if large else 1)
    states = 0
    for kill in kills:
        result = examine(recorder, scenario, kills=[kill], each=6, share=0.05 if large else 1, seed=seed)
        states += result.states
        if result.broken:
            return lines, result
    lines.append(f"{scenario}: {len(kills)} kills, {states} states after a power cut in the life after the kill")
    record = recorder.record(scenario)
    cuts = list(record.disk.cuts(record.operations, Random(seed), 4))
    chosen = Random(seed).sample(cuts, min(len(cuts), 40))
    states = 0
    for cut in chosen:
        result = examine(recorder, scenario, after=cut, each=4, share=0.05 if large else 1, seed=seed)
        states += result.states
        if result.broken:
            return lines, result
    lines.append(f"{scenario}: {len(chosen)} power cuts, {states} states after a second one in the life after it")
    return lines, None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--each", type=int, default=24, help="states of each moment (default: %(default)s)")
    parser.add_argument("--every", type=int, default=4, help="kill before every n-th operation of a long life")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [f"commit {tested_commit()}, --each {options.each} --every {options.every} --seed {options.seed}"]
    broken = None
    with Recorder.start() as recorder:
        for scenario in SCENARIOS:
            found, broken = _search(recorder, scenario, options.each, options.every, options.seed)
            lines += found
            print(*found, sep="\n", flush=True)
            if broken is not None:
                print(broken.broken)
                lines.append(broken.broken)
                break
    lines.append(f"{'a promise was broken' if broken else 'no promise was broken'}; CPU {process_time():.0f} s")
    _RECORD.write_text("\n".join(lines) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
