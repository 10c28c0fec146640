"""Searches all states of nodes with up to two devices and three pods, restarts and faults: ``python -m tests.model``.

All nodes take hours of CPU time; ``python -m tests.model 0 1`` searches the first two. The record is written to
``bench/results/model.txt``: one line for each node.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import process_time

from tests.model.node import Node
from tests.model.search import search
from tests.tested_commit import tested_commit

_RECORD = Path(__file__).parents[2] / "bench/results/model.txt"
_NODES = (
    ((1, 1), 1, 1, 1),
    ((1, 1), 1, 1, 2),
    ((1, 1, 1), 1, 0, 1),
    ((1, 1), 2, 0, 0),
    ((2, 1), 2, 0, 0),
    ((1, 1), 2, 1, 0),
    ((1, 1), 2, 0, 1),
    ((1, 1, 1), 2, 0, 0),
    ((1, 1, 2), 2, 0, 0),
    ((1, 1, 1), 2, 0, 1),
    ((1, 1, 1), 2, 1, 0),
)
"""What the pods request, devices, restarts of each pod, faults and lost writes in all."""


def main() -> int:
    commit = tested_commit()
    chosen = [int(each) for each in sys.argv[1:]] or range(len(_NODES))
    known = _RECORD.read_text().splitlines() if _RECORD.exists() else []
    for number in chosen:
        wants, devices, restarts, faults = _NODES[number]
        began = process_time()
        report = search(Node(wants, devices, restarts, faults))
        name = f"{devices} device(s), pods requesting {'+'.join(map(str, wants))}, restarts {restarts}, faults {faults}"
        line = (
            f"{name}: {report.states} states, {report.transitions} transitions, {report.records} records; "
            f"{report.problem or 'no invariant broken, every start comes to an end'}; "
            f"commit {commit}, CPU {process_time() - began:.0f} s"
        )
        print(line, flush=True)
        known = [each for each in known if not each.startswith(f"{name}:")] + [line]
        _RECORD.write_text("\n".join(known) + "\n")
        if report.problem:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
